"""The C structures of call.h, field by field, and calls of the compiled kernels."""

import ctypes
import multiprocessing
import os
from ctypes import Structure, c_double, c_int, c_int64, c_void_p

from torch import Tensor

from asr.nn.kernels.cpu import build
from asr.nn.kernels.problem import Setting

KINDS = {"float32": 0, "float64": 1, "bf16": 2}  # as in element.h
# How the pre-activations are normed: modes of cell.h.
MODES = {"none": 0, "cell": 0, "ba": 1, "raw": 1, "thesis": 1, "per_gate": 2}

# Has this process lost the threads of its parent? Not known where another than multiprocessing
# forked before this module was imported.
_forked = [True] if multiprocessing.parent_process() and os.name == "posix" else []
os.register_at_fork(after_in_child=lambda: _forked.append(True))


def pointers(names: str) -> list[tuple[str, type]]:
    return [(name, c_void_p) for name in names.split()]


class Direction(Structure):
    """call.h: Direction."""

    _fields_ = pointers(
        "weight_ih weight_hh bias gain_x gain_h gain_c bias_c h0 c0 mask h c ax ah raw stats "
        "dh dc dh0 dc0 dx dweight_ih dweight_hh dvectors dax dah"
    )


class Call(Structure):
    """call.h: Call."""

    _fields_ = (
        [(name, c_int64) for name in ("B", "T", "I", "H", "D")]
        + [(name, c_int64) for name in ("mode", "norm_c", "carry", "swap")]
        + [(name, c_int64) for name in ("threads", "blocks", "forked")]
        + [("eps", c_double), ("lengths", c_void_p), ("x", c_void_p)]
        + [("x_stride_b", c_int64), ("x_stride_t", c_int64)]
        + pointers("output doutput")
        + [("direction", Direction * 2)]
    )


def point(structure: Structure, **tensors: Tensor | None) -> None:
    """Fields of the structure -> where the tensors' values lie (the caller keeps them alive)."""
    for name, tensor in tensors.items():
        setattr(structure, name, None if tensor is None else tensor.data_ptr())


def describe_norm(call: Structure, setting: Setting) -> None:
    """How cells are normed, in the fields that all calls of them have."""
    norm = setting.norm
    call.mode, call.eps, call.norm_c = MODES[norm], setting.eps, norm != "none"
    call.carry, call.swap = norm == "per_gate", norm == "thesis"


def slots(weight: Tensor | None, count: int) -> Tensor | None:
    """Zeros (count, *weight's shape): where each thread sums its part of a weight's gradient."""
    return None if weight is None else weight.new_zeros(count, *weight.shape)


def add_up(parts: Tensor | None) -> Tensor | None:
    """What slots gave -> the gradient."""
    return None if parts is None else parts[0] if len(parts) == 1 else parts.sum(0)


def kind_of(x: Tensor) -> int:
    """What the kernels call x's dtype."""
    return KINDS[str(x.dtype).removeprefix("torch.")]


def kind_of_products(x: Tensor, setting: Setting) -> int:
    """kind_of, or bf16 where the setting asks for it and this processor multiplies it."""
    half = setting.precision == "bf16" and kind_of(x) == KINDS["float32"]
    return KINDS["bf16"] if half and has_bf16() else kind_of(x)


def run(name: str, call: Structure, kind: int) -> None:
    """Calls lstm_forward, look_forward or the like without Python's lock. Raises BuildError."""
    call.forked = bool(_forked)
    library, structure = build.load(), type(call)
    size = getattr(library, f"{name.partition('_')[0]}_call_size")
    if size() != ctypes.sizeof(structure):
        raise build.BuildError(f"C++ and Python disagree on the structure {structure.__name__}")
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.POINTER(structure), c_int], None
    function(ctypes.byref(call), kind)


def has_bf16() -> bool:
    """Can this processor multiply bf16 (AVX512-BF16)? Raises build.BuildError."""
    return bool(build.load().lstm_has_bf16())
