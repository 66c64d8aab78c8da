"""Memory for what a forward pass saves, used again by the next one.

Large allocations come from the system page by page, zeroed: at 400 frames that costs a tenth of
a training step. What a graph held goes back to the pool when the graph dies.
"""

import threading
from collections import deque

import torch
from torch import Tensor


class Pool:
    """Lends flat tensors; holds at most as much as was ever lent at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._returned: deque[Tensor] = deque()
        self._lent = self._most = 0  # bytes

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least `count` elements, its values arbitrary."""
        with self._lock:
            self._take_back()
            fits = [b for b in self._free if b.dtype == dtype and count <= b.numel() <= 2 * count]
            buffer = min(fits, key=Tensor.numel, default=None)
            if buffer is not None:
                self._free = [b for b in self._free if b is not buffer]
        if buffer is None:
            buffer = torch.empty(count + count // 8, dtype=dtype)
        with self._lock:
            self._lent += buffer.nbytes
            self._most = max(self._most, self._lent)
            self._trim()
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back, without the lock: garbage may be collected while `take` holds it."""
        self._returned.append(buffer)

    def lent(self) -> int:
        """Bytes that are lent now."""
        with self._lock:
            self._take_back()
            return self._lent

    def _take_back(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._lent -= buffer.nbytes
            self._free.append(buffer)

    def _trim(self) -> None:
        """Drops the longest unused buffers beyond what was ever lent at once."""
        while self._free and self._lent + sum(b.nbytes for b in self._free) > self._most:
            self._free.pop(0)


POOL = Pool()


class Lease:
    """Some buffers, given back when the lease dies."""

    def __init__(self, dtype: torch.dtype, **counts: int) -> None:
        self.buffers: dict[str, Tensor] = {}
        for name, count in counts.items():  # where memory ends, those before it go back
            self.buffers[name] = POOL.take(count, dtype)

    def __getitem__(self, name: str) -> Tensor | None:
        return self.buffers.get(name)

    def __del__(self) -> None:
        for buffer in self.buffers.values():
            POOL.give(buffer)
