"""The Triton kernels under Triton's interpreter, without a GPU, against the reference."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from asr.kernels.cuda import lstm as cuda
from asr.nn.lstm import LayerNormLSTM, backends
from reference_lstm import SETTINGS
from test_lstm_backends import gradients

assert backends()["cuda"] is None
cuda.BUCKET = 3  # one step more than frames
x = torch.randn(2, 2, 2, dtype=torch.float64)
x[1, 1] = float("nan")  # padding
x.requires_grad_()
start = torch.randn(2, 2, 2, 3, dtype=torch.float64, requires_grad=True)
for norm in sys.argv[1:]:
    found = []
    for name in ("reference", "cuda"):
        torch.manual_seed(1)
        keys = SETTINGS[norm] | {"backend": name, "recurrent_dropout": 0.3}
        lstm = LayerNormLSTM(2, 3, batch_first=True, bidirectional=True, **keys).double()
        for weight in lstm.parameters():
            torch.nn.init.normal_(weight)
        torch.manual_seed(2)
        output, state = lstm(x, tuple(start), lengths=[2, 1])
        inputs = (x, start, *lstm.parameters())
        found.append([output, *state, *gradients((output, *state), inputs)])
    torch.testing.assert_close(found[1], found[0], atol=1e-11, rtol=1e-11, msg=lambda m: norm + m)

for kind in ("layer", "rms"):  # silence: the guard
    lstm = LayerNormLSTM(2, 3, norm="ba", norm_kind=kind, backend="cuda").double()
    torch.nn.init.zeros_(lstm.bias_ih_l0)
    (lstm(torch.zeros(1, 2, 2, dtype=torch.float64))[0].sum()).backward()
    assert all(weight.grad.isfinite().all() for weight in lstm.parameters())
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_are_the_reference():
    here = Path(__file__).parent
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{here.parent}:{here}"}
    command = [sys.executable, "-c", SCRIPT, "ba", "per_gate", "cell", "joined state rms"]
    command += ["ba hidden", "per_gate output rms"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
