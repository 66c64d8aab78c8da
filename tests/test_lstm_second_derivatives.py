"""Second derivatives and batched gradients of the LSTM, by every backend of this machine.

Judges: nn.LSTM, the slow loops, and one backward pass for each row.
"""

import pytest
import torch
from reference_lstm import CELLS, NORMS, VARIED, default_eps, run_layer
from test_lstm_backends import HERE, make, start_of, weights_of
from torch import nn
from torch.autograd import functional

from asr.config.schema import LasConfig
from asr.models.las import LAS
from asr.nn.dropout import Dropout
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell

DOUBLE = {"dtype": torch.float64}
EXACT = {"atol": 1e-11, "rtol": 1e-11}
KERNELS = [name for name in HERE if name in ("python", "cpu")]
LENGTHS = [3, 1]


def pair(backend, **options):
    judge = nn.LSTM(3, 5, bidirectional=True, **options, **DOUBLE)
    ours = LayerNormLSTM(
        3, 5, bidirectional=True, norm="none", backend=backend, **options, **DOUBLE
    )
    ours.load_state_dict(judge.state_dict())
    return ours, judge


@pytest.mark.parametrize("backend", HERE)
def test_gradient_penalty_is_that_of_torchs_lstm(backend):
    """With a state that depends on the input, through which each gradient passes once."""
    results = []
    x = torch.randn(2, 4, 3, **DOUBLE, requires_grad=True)
    for own in pair(backend, num_layers=2, batch_first=True):
        state = x.mean(1).repeat(4, 1, 2)[..., :5]
        output, (h, c) = own(x, (state, state.sin()))
        (gradient,) = torch.autograd.grad(
            (output.sum() + h[1].sum(), c[0].sum()), x, create_graph=True
        )
        results.append(
            [gradient, *torch.autograd.grad(gradient.square().sum(), [x, *own.parameters()])]
        )
    torch.testing.assert_close(*results, **EXACT)


def penalty(outputs, inputs):
    """The gradients of a penalty on gradients, linear and not in the outputs."""
    total = sum((y.sum() + y.sin().sum()) for y in outputs)
    first = torch.autograd.grad(total, inputs, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), inputs, retain_graph=True)


@pytest.mark.parametrize("norm", [*NORMS, *VARIED])
@pytest.mark.parametrize("backend", KERNELS)
def test_second_derivatives_are_the_slow_loops(backend, norm):
    lstm = make(norm, backend, recurrent_dropout=0.4, size=(2, 3)).double()
    x = torch.randn(2, 3, 2, **DOUBLE, requires_grad=True)
    start = start_of(lstm, batch=2).requires_grad_()
    torch.manual_seed(4)
    output, state = lstm(x, tuple(start), lengths=LENGTHS)
    torch.manual_seed(4)
    mask = lstm._dropout_mask(2)
    judge = run_layer(x, LENGTHS, *start, weights_of(lstm), norm, default_eps(norm), mask=mask)
    inputs = x, start, *lstm.parameters()
    torch.testing.assert_close(
        penalty((output, *state), inputs), penalty(judge, inputs), atol=1e-10, rtol=1e-9
    )


@pytest.mark.parametrize("norm", [*NORMS, "joined state rms", "ba hidden"])
@pytest.mark.parametrize("backend", HERE)
def test_second_derivatives_of_a_loop_over_cells(backend, norm):
    """With deferred weight gradients, as the speller has them."""
    cell = LayerNormLSTMCell(2, 3, backend=backend, norm=CELLS[norm]).double()
    x = torch.randn(2, 3, 2, **DOUBLE, requires_grad=True)
    mask, inputs = torch.rand(2, 3, **DOUBLE), [x, *cell.parameters()]
    state, weights = None, cell.loop_weights()
    for frame in x.unbind(1):
        state = cell(frame, state, mask, weights)
    start = torch.zeros(1, 2, 3, **DOUBLE)
    named = [dict(cell.named_parameters())]
    judge = run_layer(x, [3, 3], start, start, named, norm, default_eps(norm), mask=mask[None])
    judge = [part[0] for part in judge[1:]]
    torch.testing.assert_close(state, tuple(judge), **EXACT)
    for _ in range(2):  # a pass without a graph between those with one
        found = penalty(state, inputs)
        torch.testing.assert_close(found, penalty(judge, inputs), atol=1e-10, rtol=1e-9)
        first = [
            torch.autograd.grad(sum(map(torch.sum, s)), inputs, retain_graph=True)
            for s in (state, judge)
        ]
        torch.testing.assert_close(*first, **EXACT)


@pytest.mark.parametrize("backend", HERE)
def test_batched_gradients_are_those_of_each_row(backend):
    lstm = make("ba", backend, layers=2).double()
    x = torch.randn(2, 3, 3, **DOUBLE, requires_grad=True)
    output = lstm(x, lengths=LENGTHS)[0]
    rows, inputs = torch.randn(4, *output.shape, **DOUBLE), [x, *lstm.parameters()]

    def gradient(row):
        return torch.autograd.grad(output, inputs, row, retain_graph=True)

    judge = tuple(map(torch.stack, zip(*map(gradient, rows), strict=True)))
    torch.testing.assert_close(torch.func.vmap(gradient)(rows), judge, **EXACT)
    found = torch.autograd.grad(output, inputs, rows, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(found, judge, **EXACT)
    torch.testing.assert_close(gradient(rows[0]), tuple(part[0] for part in judge), **EXACT)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.jit.script, by torch itself
@pytest.mark.parametrize("backend", HERE)
def test_forward_mode_is_the_jacobian_times_a_vector(backend):
    lstm, x = make("ba", backend, layers=2).double(), torch.randn(2, 3, 3, **DOUBLE)
    vector = torch.randn_like(x)
    judge = functional.jvp(lambda x: lstm(x)[0], x, vector)[1]  # by two backward passes
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        output = lstm(forward_ad.make_dual(x, vector))[0]
        torch.testing.assert_close(forward_ad.unpack_dual(output).tangent, judge, **EXACT)


def test_gradient_of_dropout_is_differentiable():
    x = torch.randn(7, 5, requires_grad=True)
    y = Dropout(0.4)(x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, 2 * (y / x).square())


@pytest.mark.parametrize("backend", [name for name in ("cpu", "reference") if name in HERE])
def test_las_is_exact_by_the_reference_and_refused_in_cpp(backend):
    torch.manual_seed(1)
    speller = {"hidden": 5, "embedding": 3, "backend": backend}
    keys = {"listener": {"layers": 2, "hidden": 5, "pyramid": [2]}, "speller": speller}
    model = LAS(3, 7, LasConfig(kind="las", **keys)).double()
    lengths, tokens = torch.tensor([5, 4]), torch.randint(7, (2, 3))

    def gradient(x, **options):
        loss = model.decode(model.encode(x, lengths), tokens).log_softmax(-1)[..., 0].sum()
        return torch.autograd.grad(loss, x, **options)[0]

    x = torch.randn(2, 5, 3, **DOUBLE, requires_grad=True)
    vector, step = torch.randn_like(x), 1e-5
    if backend == "cpu":
        with pytest.raises(RuntimeError, match="use backend='reference'"):
            gradient(x, create_graph=True)
        return
    (found,) = torch.autograd.grad((gradient(x, create_graph=True) * vector).sum(), x)
    sides = [gradient((x + sign * step * vector).detach().requires_grad_()) for sign in (1, -1)]
    torch.testing.assert_close(found, (sides[0] - sides[1]) / (2 * step), atol=1e-8, rtol=1e-5)
