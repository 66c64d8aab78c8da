"""The store in which the ranks of a training find each other when torchrun has started them.

It is there before any of them is connected to another, and it may be there after one has failed.
"""

import time
import uuid

import torch.distributed as dist

POLL = 0.02  # seconds
PATIENCE = 2.0  # seconds; ranks that fail for one reason do so together
SPOKEN = "spoken"  # key: how many ranks have failed, of which the first says why


def new_room(store: dist.Store, number: int, count: int) -> str:
    """A prefix for the keys of those `count` ranks that are alive now, the same for all.

    torchrun may keep its store when it starts the ranks anew. The addresses of the dead stand in
    it, and who finds one of them waits for ever. The first rank names the room; it answers what
    another calls itself this time, until that one has confirmed the name.
    """
    me = uuid.uuid4().hex
    if number:
        store.set(f"hello {number}", me)
        while (answer := store.get(f"answer {number}").decode().split())[1] != me:
            time.sleep(POLL)
        store.set(f"confirmed {number}", answer[0])
        return answer[0]
    missing = set(range(1, count))
    while missing:
        for other in sorted(missing):
            if hello := _value(store, f"hello {other}"):
                store.set(f"answer {other}", f"{me} {hello}")
            if _value(store, f"confirmed {other}") == me:
                missing.remove(other)
        time.sleep(POLL)
    return me


def _value(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def has_spoken(store: dist.Store, number: int, count: int) -> bool:
    """Whether another of the ranks has said why all end; from now on this one has."""
    try:
        before = store.add(SPOKEN, 1) - 1
        end = time.monotonic() + PATIENCE
        # Without torchrun the first rank holds the store: who asks a store that is gone gets pages
        # of warnings on its connection.
        while number == 0 and store.add(SPOKEN, 0) < count and time.monotonic() < end:
            time.sleep(POLL)
    except RuntimeError:  # the store went with the first rank, which says why it goes
        return True
    return before > 0
