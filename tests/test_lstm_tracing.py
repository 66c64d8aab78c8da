"""The LSTM under torch.compile, torch.export, torch.jit.trace, torch.func and fake tensors, and in
plain calls after each of them.
"""

import io
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from test_lstm_backends import gradients, make
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from asr.kernels.cpu import library
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell

ROOT = Path(__file__).parent.parent
LENGTHS = [2, 5, 3]
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.jit is deprecated


@pytest.fixture
def lstm():
    """A layer; afterwards, plain calls must work with memory that the pool has not lent before."""
    lstm = make("ba", "auto")
    yield lstm
    assert all(type(buffer) is Tensor for buffer in library.POOL._free)
    other, x = LayerNormLSTM(3, 13), torch.randn(17, 19, 3)
    gradients([other(x)[0]], list(other.parameters()))
    judge, x = make("ba", "reference"), torch.randn(3, 5, 3)
    torch.testing.assert_close(lstm(x)[0], judge(x)[0], atol=1e-6, rtol=1e-5)


def traced(lstm, given, named=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks of shapes are not recorded
        return torch.jit.trace(lstm, given, example_kwarg_inputs=named)


def test_jit_trace(lstm):
    program = traced(lstm, (torch.randn(3, 5, 3),))
    x = torch.randn(7, 5, 3)  # another batch size
    torch.testing.assert_close(program(x), lstm(x), atol=1e-6, rtol=1e-5)
    with pytest.raises(RuntimeError, match="Expected 5 elements in a list but found 13"):
        program(torch.randn(5, 13, 3))
    example = {"input": torch.randn(3, 5, 3), "lengths": torch.tensor(LENGTHS)}
    program, x = traced(lstm, None, example), torch.randn(3, 5, 3)
    x[1, 3:] = float("nan")
    for lengths in ([5, 3, 1], [2, 2, 4]):
        found = program(input=x, lengths=torch.tensor(lengths))
        torch.testing.assert_close(found, lstm(x, lengths=lengths), atol=1e-6, rtol=1e-5)


def test_jit_trace_of_a_packed_sequence(lstm):
    class Packing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = lstm

        def forward(self, x, lengths):
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            output, (h, c) = self.lstm(packed)
            return pad_packed_sequence(output, batch_first=True)[0], h, c

    module, x = Packing(), torch.randn(3, 5, 3)
    program = traced(module, (x, torch.tensor(LENGTHS)))
    for lengths in ([5, 3, 1], [1, 2, 5]):
        found, judge = (call(x, torch.tensor(lengths)) for call in (program, module))
        torch.testing.assert_close(found, judge, atol=1e-5, rtol=1e-5)


def test_onnx_export_without_dynamo(lstm):
    """Judge: ONNX Runtime."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    file, axes = io.BytesIO(), {"x": {0: "B"}, "lengths": {0: "B"}}
    given = torch.randn(3, 5, 3), None, torch.tensor(LENGTHS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the checks of shapes are not recorded
        torch.onnx.export(
            lstm, given, file, dynamo=False, input_names=list(axes), dynamic_axes=axes
        )
    session = onnxruntime.InferenceSession(file.getvalue())
    x, lengths = torch.randn(4, 5, 3), torch.tensor([1, 5, 2, 3])
    output, (h, c) = lstm(x, lengths=lengths)
    found = session.run(None, {"x": x.numpy(), "lengths": lengths.numpy()})
    for ours, judge in zip(found, (output, h, c), strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), judge, atol=1e-5, rtol=1e-4)


def test_torch_func(lstm):
    x = torch.randn(3, 5, 3)
    weights = {name: weight.detach() for name, weight in lstm.named_parameters()}

    def loss(weights, x, lengths):
        return functional_call(lstm, weights, (x,), {"lengths": lengths})[0].sin().sum()

    plain = loss(dict(lstm.named_parameters()), x, LENGTHS)
    expected = torch.autograd.grad(plain, list(lstm.parameters()))
    for lengths in (LENGTHS, torch.tensor(LENGTHS)):
        found = torch.func.grad(loss)(weights, x, lengths)
        torch.testing.assert_close(tuple(found.values()), expected, atol=1e-5, rtol=1e-4)
    rows = x.unsqueeze(1), torch.tensor(LENGTHS).unsqueeze(1)  # utterances one by one
    each = torch.vmap(torch.func.grad(loss), (None, 0, 0))(weights, *rows)
    summed = tuple(gradient.sum(0) for gradient in each.values())
    torch.testing.assert_close(summed, expected, atol=1e-5, rtol=1e-4)
    direction, step = torch.randn_like(x), 1e-2
    slope = torch.func.jvp(lambda x: loss(weights, x, None), (x,), (direction,))[1]
    sides = [loss(weights, x + side * step * direction, None) for side in (1, -1)]
    torch.testing.assert_close(slope, (sides[0] - sides[1]) / (2 * step), atol=1e-2, rtol=1e-2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # FakeTensorMode reads it
def test_fake_functional_and_meta_tensors_reach_no_kernel(lstm):
    x, cell = torch.randn(3, 5, 3), LayerNormLSTMCell(3, 7)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output, (h, _) = lstm(mode.from_tensor(x), lengths=LENGTHS)
        cell(mode.from_tensor(x[:, 0]))
    lstm(mode.from_tensor(x))  # a mode that has ended left its tensors
    meta = make("ba", "auto").to("meta")(x.to("meta"))[0]
    assert output.shape == meta.shape == (3, 5, 14) and h.shape == (2, 3, 7)
    expected = lstm(x)[0]
    for function in (
        make_fx(lambda x: lstm(x)[0])(x),
        torch.func.functionalize(lambda x: lstm(x)[0]),
    ):
        torch.testing.assert_close(function(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # FakeTensorMode reads it
def test_lengths_may_stay_on_the_cpu():
    with FakeTensorMode(), torch.device("cuda"):
        lstm, x = make("ba", "auto"), torch.randn(3, 5, 3)
        assert lstm(x, lengths=torch.ones(3, dtype=torch.long, device="cpu"))[0].shape == (3, 5, 14)


def test_dropout_is_transformed(lstm):
    lstm.recurrent_dropout, x = 0.5, torch.randn(3, 5, 3)
    weights = dict(lstm.named_parameters())
    torch.func.grad(lambda w: functional_call(lstm, w, (x,))[0].sum())(weights)
    assert not torch.equal(traced(lstm, (x,))(x)[0], lstm.eval()(x)[0])


def test_script_is_refused_in_a_line():
    refused = pytest.raises(TypeError, match="cannot compile LayerNormLSTM; use")
    with warnings.catch_warnings(), refused:
        warnings.simplefilter("ignore")
        torch.jit.script(LayerNormLSTM(3, 7))


EXPORTED = """
import os
import torch
from torch.nn.utils.rnn import pack_sequence
from asr.kernels.dispatch import backends
from asr.nn.lstm import LayerNormLSTM

torch.manual_seed(1)

class Faulty(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = LayerNormLSTM(3, 7, bidirectional=True, batch_first=True)
    def forward(self, x):
        y = self.lstm(x)[0]
        return y if y.sum() > 0 else -y

faulty, x = Faulty(), torch.randn(2, 3, 3)
try:
    torch.export.export(faulty, (x,))
except Exception as error:
    print(type(error).__name__)
else:
    raise SystemExit("the export of a branch on values succeeded")
lstm = faulty.lstm
gradient = torch.autograd.grad(lstm(x)[0].sum(), list(lstm.parameters()))
shapes = {"input": {0: torch.export.Dim("B")}, "lengths": {0: torch.export.Dim("B")}}
program = torch.export.export(
    lstm, (), {"input": x, "lengths": torch.tensor([3, 2])}, dynamic_shapes=shapes
)
assert {node.target.namespace for node in program.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)} == {"aten"}
x = torch.randn(5, 3, 3)
for lengths in ([3, 2, 1, 3, 2], [1, 1, 2, 1, 1]):
    found = program.module()(input=x, lengths=torch.tensor(lengths))
    torch.testing.assert_close(found, lstm(x, lengths=lengths), atol=1e-6, rtol=1e-5)
"""
COMPILED = """
lstm = LayerNormLSTM(3, 7, 2, bidirectional=True, batch_first=True)
graphs = []

def backend(graph, example):
    graphs.append({str(node.target) for node in graph.graph.nodes})
    from torch._dynamo.backends.debugging import aot_eager
    return aot_eager(graph, example)

compiled = torch.compile(lstm, backend=backend, fullgraph=True, dynamic=True)
weights = list(lstm.parameters())
for x, lengths in ((torch.randn(2, 5, 3), [5, 3]), (torch.randn(3, 11, 3), [2, 9, 11])):
    found = []
    for called in (lstm, compiled):
        x = x.detach().requires_grad_()
        output, (h, c) = called(x, lengths=torch.tensor(lengths))
        total = output.sin().sum() + h.sum() + c.cos().sum()
        found.append([output, h, c, *torch.autograd.grad(total, [x, *weights])])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
if backends()["cpu"] is None:
    assert all("layernorm_asr.lstm.default" in graph for graph in graphs)
    assert all(map(torch.equal, *found))
    try:
        compiled(x, lengths=torch.tensor([2, 12, 11]))
    except ValueError as error:
        assert str(error) == "length 12 of utterance 1 is not within 1 to 11 frames"
    else:
        raise SystemExit("a wrong length was accepted")
packed = pack_sequence([torch.randn(length, 3) for length in (5, 3)])
output = torch.compile(lstm, backend="eager")(packed)[0]
assert torch.equal(output.data, lstm(packed)[0].data)
torch._dynamo.reset()
os.environ["LAYERNORM_LSTM_BACKEND"] = "python"
lstm = LayerNormLSTM(3, 7, 2, bidirectional=True, batch_first=True)
compiled = torch.compile(lstm, backend="eager", fullgraph=True)
x = torch.randn(2, 5, 3)
torch.testing.assert_close(compiled(x), lstm(x), atol=1e-6, rtol=1e-5)
"""


@pytest.mark.slow
def test_export_and_compile():
    """In a separate process: torch.compile starts threads, after which no test may fork."""
    line = [sys.executable, "-W", "ignore", "-c", EXPORTED + COMPILED]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
