"""The Triton kernels under Triton's interpreter, without a GPU, against the reference."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import torch
from asr.config.cell import CellSettings
from asr.kernels.cuda import lstm as cuda
from asr.kernels.types import LayerInput
from asr.nn.lstm import LayerNormLSTM, backends, get_weights
from reference_lstm import CELLS
from test_lstm_backends import gradients

assert backends()["cuda"] is None
cuda.BUCKET = 3  # one step more than frames
cuda.PROGRAMS = 2  # fewer than rows
torch.manual_seed(3)
"""
EXACT = """
x = torch.randn(2, 2, 2, dtype=torch.float64)
x[1, 1] = float("nan")  # padding
x.requires_grad_()
start = torch.randn(2, 2, 2, 3, dtype=torch.float64, requires_grad=True)
for norm in ("ba", "per_gate", "cell", "joined state rms", "ba hidden", "per_gate output rms"):
    found = []
    for name in ("reference", "cuda"):
        torch.manual_seed(1)
        keys = {"norm": CELLS[norm], "backend": name, "recurrent_dropout": 0.3}
        lstm = LayerNormLSTM(2, 3, batch_first=True, bidirectional=True, **keys).double()
        for weight in lstm.parameters():
            torch.nn.init.normal_(weight)
        torch.manual_seed(2)
        output, state = lstm(x, tuple(start), lengths=[2, 1])
        # Transposed: their gradients have other strides than the kernels' rows.
        results = output, *(part.mT for part in state)
        found.append([*results, *gradients(results, (x, start, *lstm.parameters()))])
    torch.testing.assert_close(found[1], found[0], atol=1e-11, rtol=1e-11, msg=lambda m: norm + m)

for norm in ("ba", "joined state rms", "per_gate", "none"):  # frozen gains, learned biases
    found = []
    for name in ("reference", "cuda"):
        torch.manual_seed(1)
        lstm = LayerNormLSTM(2, 3, norm=CELLS[norm], backend=name).double()
        for key, weight in lstm.named_parameters():
            weight.requires_grad_("gain" not in key)
        output = lstm(x[1:, :1].detach())[0].square().sum()
        found.append(gradients([output], [p for p in lstm.parameters() if p.requires_grad]))
    torch.testing.assert_close(found[1], found[0], atol=1e-11, rtol=1e-11, msg=lambda m: norm + m)

for kind in ("layer", "rms"):  # silence: the guard
    lstm = LayerNormLSTM(2, 3, norm=CellSettings("ba", norm_kind=kind), backend="cuda").double()
    torch.nn.init.zeros_(lstm.bias_ih_l0)
    (lstm(torch.zeros(1, 2, 2, dtype=torch.float64))[0].sum()).backward()
    assert all(weight.grad.isfinite().all() for weight in lstm.parameters())
"""
HALF = """
# A value passes four products here, of the input and of h, forward and backward. Each rounds two
# factors and a result, by at most 2^-9 of their size. Between them norms may enlarge an error, but
# not of these inputs: the backend python, in bf16, errs as much.
BOUND = 4 * 3 * 2**-9
x = torch.randn(3, 2, 5, requires_grad=True)
for norm in ("none", "raw", "joined carried", "joined hidden rms", "per_gate state hidden", "ba"):
    found = []
    for name in ("reference", "cuda"):
        torch.manual_seed(1)
        keys = {"norm": CELLS[norm], "backend": name}
        lstm = LayerNormLSTM(5, 7, batch_first=True, **keys)
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "cuda"):
            output, state = lstm(x, lengths=[2, 1, 2])
        results = output, *state
        found.append([*results, *gradients(results, (x, *lstm.parameters()))])
    for judge, ours in zip(*found, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - judge).norm() <= BOUND * judge.norm(), (norm, judge, ours)

"""
COUNT = """
for products in (torch.float32, torch.bfloat16):
    counts = []
    for frames in (3, 6):
        lstm = LayerNormLSTM(5, 7, norm="ba", backend="cuda")
        weights = [get_weights(lstm, "_l0")]
        batch = LayerInput(torch.randn(2, frames, 5), None, *torch.zeros(2, 1, 2, 7), None)
        calls.clear()
        with Computing():  # with such a mode the module itself records operators of torch
            output, *_ = cuda.layer(batch, weights, lstm.settings, products)
            forward = len(calls)
            output.sum().backward()
        counts.append((forward, len(calls) - forward))
    three_steps = [late - early for early, late in zip(*counts, strict=True)]
    assert three_steps == [3 * 2, 3 * 2], (products, three_steps)
"""
COUNTING = """
from torch.utils._python_dispatch import TorchDispatchMode
from asr.kernels.cuda import triton_attention, triton_norm, triton_step

calls = []

class Computing(TorchDispatchMode):
    # Operators that launch a kernel: all but views, and what only allocates.

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        free = any(name in str(function) for name in ("empty", "detach", "view"))
        if not (function.is_view or free):
            calls.append(str(function))
        return function(*args, **(kwargs or {}))

class Kernel:
    # In the place of a Triton kernel, which calls torch under the interpreter.

    def __init__(self, name):
        self.name = name

    def __getitem__(self, grid):
        return lambda *args, **options: calls.append(self.name)

KERNELS = {
    triton_step: ("forward_step", "backward_step"),
    triton_norm: ("norm_rows_forward", "norm_rows_backward"),
    triton_attention: ("attention_energy", "attention_context", "attention_backward_weights",
                       "attention_backward", "sum_tiles"),
}
for module, names in KERNELS.items():
    for name in names:
        setattr(module, name, Kernel(name))
"""
COMPILING = """
import torch
import triton
from triton.backends.compiler import GPUTarget

DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.uint8: "*u8"}
NUMBERS = {int: "i32", bool: "i32", float: "fp32"}

class Compiling:
    # In the place of a kernel: its first launch compiles it for a GPU, none runs it.

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps=4, **named):
        named = dict(zip(self.kernel.arg_names, args, strict=False)) | named
        fixed = {name: value for name, value in named.items() if name.isupper() and len(name) > 1}
        for parameter in self.kernel.params:  # as a launch does
            value = named[parameter.name]
            if isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
                fixed[parameter.name] = 1
        kinds = {name: kind_of(value) for name, value in named.items()}
        kinds |= dict.fromkeys(fixed, "constexpr")
        if (key := (self.kernel.fn.__name__, *fixed.values(), *kinds.values())) in compiled:
            return
        source = triton.compiler.ASTSource(self.kernel, kinds, fixed)
        options = {"num_warps": num_warps}
        compiled[key] = triton.compile(source, GPUTarget("cuda", 90, 32), options).asm["cubin"]

def kind_of(value):
    return DTYPES[value.dtype] if torch.is_tensor(value) else NUMBERS[type(value)]

compiled = {}
"""
COMPILE = """
from asr.kernels.cuda import lstm as cuda, triton_norm, triton_step
from asr.kernels.types import LayerInput
from asr.nn.lstm import LayerNormLSTM, get_weights
from reference_lstm import CELLS

KERNELS = ("norm_rows_forward", "norm_rows_backward", "forward_step", "backward_step")
for module in (triton_norm, triton_step):
    for name in KERNELS:
        if name in module.__dict__:
            setattr(module, name, Compiling(getattr(module, name)))
for norm in ("ba hidden", "per_gate"):
    lstm = LayerNormLSTM(5, 7, norm=CELLS[norm])
    weights = [get_weights(lstm, "_l0")]
    mask = torch.ones(1, 2, 7) if norm == "ba hidden" else None
    batch = LayerInput(torch.randn(2, 3, 5), None, *torch.zeros(2, 1, 2, 7), mask)
    output, *_ = cuda.layer(batch, weights, lstm.settings, torch.bfloat16)
    output.sum().backward()
assert {name for name, *_ in compiled} == set(KERNELS)
"""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


def run(program: str, interpret: str) -> subprocess.CompletedProcess[str]:
    """In a separate process, since TRITON_INTERPRET is read as triton is imported."""
    here = Path(__file__).parent
    environment = os.environ | {
        "TRITON_INTERPRET": interpret,
        "PYTHONPATH": f"{here.parent}:{here}",
    }
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_triton_kernels_are_the_reference():
    done = run(PRELUDE + EXACT + HALF + COUNTING + COUNT, "1")
    assert done.returncode == 0, done.stderr


def test_triton_kernels_compile_for_a_gpu():
    """What the interpreter accepts may be no Triton; the compiler needs no GPU."""
    done = run(COMPILING + COMPILE, "0")
    assert done.returncode == 0, done.stderr
