"""The store in which the ranks of a training find each other when torchrun has started them.

It is there before any of them is connected to another, and it may be there after one has failed.
"""

import time
import uuid

import torch.distributed as dist

POLL = 0.02  # seconds
SPOKEN = "spoken"  # key of the rank that has said why all end


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


def has_spoken(store: dist.Store) -> bool:
    """Whether another rank has said why all end; from now on this one has."""
    try:
        return store.add(SPOKEN, 1) > 1
    except RuntimeError:  # the store went with the first rank, which says why it goes
        return True
