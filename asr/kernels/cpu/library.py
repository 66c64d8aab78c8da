"""Calls of the compiled kernels: the C structures of call.h, and the memory of saved tensors.

Large allocations come from the system page by page, zeroed: at 400 frames this takes a tenth of a
training step. BufferPool therefore reuses the buffers that a forward pass saved, once autograd
frees them.
"""

import ctypes
import multiprocessing
import os
import threading
import weakref
from collections import deque
from ctypes import Structure, c_double, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.kernels.cpu import compiler
from asr.kernels.types import MODES


class BufferPool:
    """Lends flat tensors; keeps at most as much memory as was ever lent at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Tensor] = []
        self._returned: deque[Tensor] = deque()
        self._lent = self._most = 0  # bytes

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of at least `count` elements, its values arbitrary."""
        with self._lock:
            self._collect_returned()
            fits = [b for b in self._free if b.dtype == dtype and count <= b.numel() <= 2 * count]
            if fits:
                buffer = min(fits, key=Tensor.numel)
                self._free = [b for b in self._free if b is not buffer]
            else:
                buffer = torch.empty(count + count // 8, dtype=dtype, device="cpu")
                # One without memory of its own, kept here, would fail in a later, unrelated call.
                assert type(buffer) is Tensor, f"{type(buffer)} in the pool of the kernels"
            self._lent += buffer.nbytes
            self._most = max(self._most, self._lent)
            while self._free and self._lent + sum(b.nbytes for b in self._free) > self._most:
                self._free.pop(0)  # the longest unused
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Returns a buffer, without the lock: garbage collection may run while `take` holds it."""
        self._returned.append(buffer)

    def lent(self) -> int:
        """Bytes that are lent now."""
        with self._lock:
            self._collect_returned()
            return self._lent

    def _collect_returned(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._lent -= buffer.nbytes
            self._free.append(buffer)


POOL = BufferPool()


def pooled(dtype: torch.dtype, **counts: int) -> dict[str, Tensor]:
    """Named flat tensors, each of which returns to the pool once nothing refers to its memory."""
    return {name: _lend(POOL.take(count, dtype), count) for name, count in counts.items()}


def _lend(buffer: Tensor, count: int) -> Tensor:
    """The first `count` elements: checkpointing expects the same size in each pass.

    Hooks of saved tensors may keep an alias alone, as checkpointing does: what shows that the
    memory is unused is the end of the array, which the storage of every alias keeps alive.
    """
    array = buffer.numpy()[:count]
    weakref.finalize(array, POOL.give, buffer).atexit = False
    return torch.from_numpy(array)


KINDS = {torch.float32: 0, torch.float64: 1}  # as in element.h
BF16_PRODUCTS = 2
STATS = 14  # values of a row's statistics, as in cell.h

# Was this process forked, so that OpenMP's threads are gone? A fork by anything but multiprocessing
# before this module was imported stays unnoticed.
_forked = [True] if multiprocessing.parent_process() and os.name == "posix" else []
os.register_at_fork(after_in_child=lambda: _forked.append(True))


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


NORM_FIELDS = "mode rms norm_c show carry norm_h swap"


class Direction(Structure):
    """call.h: Direction."""

    _fields_ = fields(
        c_void_p,
        "weight_ih weight_hh bias gain_x gain_h gain_c bias_c gain_hidden bias_hidden h0 c0 mask "
        "h c ax ah raw stats dh dc dh0 dc0 dx dweight_ih dweight_hh dvectors dax dah",
    )


class Call(Structure):
    """call.h: Call."""

    _fields_ = (
        *fields(c_int64, f"B T I H D {NORM_FIELDS} threads blocks forked"),
        ("eps", c_double),
        *fields(c_void_p, "lengths x"),
        *fields(c_int64, "x_stride_b x_stride_t"),
        *fields(c_void_p, "output doutput"),
        ("direction", Direction * 2),
    )


def point(structure: Structure, **tensors: Tensor | None) -> None:
    """Sets fields to the addresses of tensors, which the caller keeps alive during the call."""
    for name, tensor in tensors.items():
        setattr(structure, name, None if tensor is None else tensor.data_ptr())


def describe_norm(call: Structure, settings: CellSettings) -> None:
    """Sets the fields of the norms, which the calls of layers, steps and decoders share."""
    call.mode, call.eps, call.rms = MODES[settings.gates], settings.eps, settings.norm_kind == "rms"
    call.norm_c, call.norm_h = settings.norms_cell, settings.hidden_norm
    call.show, call.carry, call.swap = settings.shows_norm, settings.carries_norm, settings.swap


def slots(weight: Tensor | None, count: int) -> Tensor | None:
    """Zeros (count, *weight's shape): each thread sums its part of a weight's gradient in one."""
    return None if weight is None else weight.new_zeros(count, *weight.shape)


def add_up(parts: Tensor | None) -> Tensor | None:
    """The sum over slots."""
    return None if parts is None else parts[0] if len(parts) == 1 else parts.sum(0)


def kind_of_products(x: Tensor, products: torch.dtype) -> int:
    """x's of KINDS, or bf16 where the products are to be and this processor multiplies it."""
    half = products == torch.bfloat16
    return BF16_PRODUCTS if half and has_bf16() else KINDS[x.dtype]


def run(name: str, call: Structure, kind: int) -> None:
    """Calls lstm_forward, decoder_backward or the like, without the GIL. Raises BuildError."""
    call.forked = bool(_forked)
    library, structure = compiler.load(), type(call)
    size = getattr(library, f"{name.partition('_')[0]}_call_size")
    if size() != ctypes.sizeof(structure):
        raise compiler.BuildError(f"C++ and Python disagree on the structure {structure.__name__}")
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.POINTER(structure), c_int], None
    function(ctypes.byref(call), kind)


def has_bf16() -> bool:
    """Can this processor multiply bf16 (AVX512-BF16)? Raises compiler.BuildError."""
    return bool(compiler.load().lstm_has_bf16())
