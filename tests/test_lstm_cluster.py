"""The CUDA kernel of backend "cluster", on an emulation of its threads, against the reference."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from asr.config.cell import CellSettings
from asr.kernels.cuda import cluster

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
HARNESS = """
#include "cluster.cu"

static Arguments given;
extern "C" int lstm_forward_(const Arguments *a, int clusters) {
  given = *a;
  return emulate([] { lstm_forward(given); }, clusters, BLOCKS, forward_bytes);
}
extern "C" int lstm_backward_(const Arguments *a, int clusters) {
  given = *a;
  return emulate([] { lstm_backward(given); }, clusters, BLOCKS, backward_bytes);
}
"""
PROGRAM = """
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from asr.kernels import reference
from asr.kernels.cuda import cluster
from asr.nn.lstm import LayerNormLSTM, get_weights
from asr.kernels.types import LayerInput
from reference_lstm import CELLS
from test_lstm_backends import gradients

HERE, HARNESS = Path(sys.argv[1]), sys.argv[2]
built = {}

def compiled(macros, tiles, device, name):
    if (macros, tiles) not in built:
        folder = Path(tempfile.mkdtemp(dir=sys.argv[3]))
        # The headers first: a macro H would change those of the C++ library.
        defined = [f"#define {macro.replace('=', ' ')}" for macro in (*macros, f"NT={tiles}")]
        text = "\\n".join(['#include "cuda_emulator.h"', *defined, HARNESS])
        (folder / "harness.cpp").write_text(text)
        paths = [f"-I{HERE}", f"-I{Path(cluster.__file__).parent}"]
        flags = ["-O1", "-std=c++17", "-w", "-shared", "-fPIC", "-o", "harness.so"]
        command = ["g++", *flags, *paths, "harness.cpp"]
        subprocess.run(command, cwd=folder, check=True)
        built[macros, tiles] = ctypes.CDLL(folder / "harness.so")
    return built[macros, tiles][name + "_"]

def run(kernel, arguments, clusters, blocks):
    assert kernel(ctypes.byref(arguments), clusters) == 0, "the threads wait for each other"

class HalfProduct(torch.autograd.Function):
    # x @ w.T, rounded where the backend rounds.

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x.bfloat16(), w.bfloat16())
        return (x.bfloat16() @ w.bfloat16().t()).float()

    @staticmethod
    def backward(ctx, d):
        x, w = ctx.saved_tensors
        d = d.bfloat16().float()
        return d @ w.float(), d.flatten(0, -2).t() @ x.flatten(0, -2).float()

cluster._compiled, cluster._run = compiled, run
reference.deferred_linear = HalfProduct.apply
B, T, I = 9, 3, 5
lengths = [3, 1, 3, 2, 3, 3, 1, 2, 3]
# Two directions; blocks with fewer units than threads, clusters with fewer utterances than rows.
CASES = [
    ("ba hidden", 37, 1, 0.3),
    ("per_gate state hidden", 13, 2, 0.0),
    ("joined state rms", 65, 1, 0.0),
    ("none", 5, 2, 0.0),
]
for norm, H, tiles, rate in CASES:
    cluster._tiles = lambda *given: tiles
    torch.manual_seed(3)
    lstm = LayerNormLSTM(I, H, batch_first=True, bidirectional=True, norm=CELLS[norm])
    for name, weight in lstm.named_parameters():
        torch.nn.init.normal_(weight, std=H**-0.5 if "weight" in name else 0.5)
    weights = [get_weights(lstm, suffix) for suffix in ("_l0", "_l0_reverse")]
    x, start = torch.randn(B, T, I, requires_grad=True), torch.randn(2, 2, B, H, requires_grad=True)
    mask = (torch.rand(2, B, H) > rate) / (1 - rate) if rate else None
    found = []
    for layer in (reference.layer, cluster.layer):
        batch = LayerInput(x, lengths, *start, mask)
        results = layer(batch, weights, lstm.settings, torch.bfloat16)
        found.append([*results, *gradients(results, (x, start, *lstm.parameters()))])
    names = ["output", "h", "c", "x", "start", *(name for name, _ in lstm.named_parameters())]
    for name, judge, ours in zip(names, *found[:2], strict=True):
        error = float((ours - judge).detach().norm() / judge.detach().norm().clamp_min(1e-6))
        # The products of all steps at once are rounded at their end, which the judge is not.
        bound = 2**-7 if name == "x" or name.startswith("weight") else 1e-4
        assert error <= bound, (norm, name, error)
with torch.no_grad():  # stores nothing for a backward pass
    again = cluster.layer(batch, weights, lstm.settings, torch.bfloat16)
assert all(map(torch.equal, again, found[1]))
"""


def run(program: str, tmp_path: Path) -> None:
    """In a separate process, since TRITON_INTERPRET is read as triton is imported."""
    paths = {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE.parent}:{HERE}"}
    command = [sys.executable, "-c", program, str(HERE), HARNESS, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or shutil.which("g++") is None,
    reason="triton or g++ is not installed",
)
def test_the_kernel_is_the_reference(tmp_path):
    run(PROGRAM, tmp_path)


def test_the_kernel_compiles_for_a_gpu(monkeypatch, tmp_path):
    """The compiler needs no GPU; what it has compiled is read the next time."""
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("LAYERNORM_LSTM_CACHE", str(tmp_path))
    macros = cluster._macros(CellSettings("ba", hidden_norm=True), 64, torch.ones(1))
    code = cluster.machine_code(macros, 2, "sm_90")
    assert b"lstm_forward" in code and b"lstm_backward" in code
    monkeypatch.setattr(cluster, "compile_source", None)
    assert cluster.machine_code(macros, 2, "sm_90") == code
    with pytest.raises(TypeError):  # other options are compiled
        cluster.machine_code(macros, 1, "sm_90")
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="NVRTC cannot compile"):
        cluster.compile_source("no C++", [])
