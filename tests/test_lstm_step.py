"""The single step that decoders repeat, and which backend it runs on."""

import pytest
import torch
from reference_lstm import CELLS
from test_lstm_backends import HERE, gradients

from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell


def pair(norm, backend, **options):
    """The same random weights in the reference and in a backend."""
    torch.manual_seed(1)
    judge = LayerNormLSTMCell(5, 11, backend="reference", norm=CELLS[norm], **options)
    with torch.no_grad():
        for weight in judge.parameters():
            weight.normal_()
    ours = LayerNormLSTMCell(5, 11, backend=backend, norm=CELLS[norm], **options)
    ours.load_state_dict(judge.state_dict())
    return judge.double(), ours.double()


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("norm", CELLS)
def test_step_is_the_reference_step(norm, backend):
    judge, ours = pair(norm, backend, recurrent_dropout=0.3)
    mask = ours.dropout_mask(3)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, 3, 11, dtype=torch.float64, requires_grad=True)
    results = []
    for cell in (judge, ours):
        state = tuple(start)
        for _ in range(3):
            state = cell(x, state, mask)
        results.append([*state, *gradients(state, (x, start, *cell.parameters()))])
    torch.testing.assert_close(results[1], results[0], atol=1e-11, rtol=1e-11)


STRIDED = {
    "expanded over the batch": lambda mask: mask[:1].expand_as(mask),
    "expanded over the units": lambda mask: mask[:, :1].expand_as(mask),
    "transposed": lambda mask: mask.T.contiguous().T,
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("layout", STRIDED)
def test_a_mask_may_have_any_strides(layout, backend):
    judge, ours = pair("ba", backend, recurrent_dropout=0.3)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    start = torch.randn(2, 3, 11, dtype=torch.float64, requires_grad=True)
    mask = STRIDED[layout](torch.rand(3, 11, dtype=torch.float64))
    results = []
    for cell in (judge, ours):
        state = cell(x, tuple(start), mask)
        results.append([*state, *gradients(state, (x, start, *cell.parameters()))])
        with torch.no_grad():
            results[-1] += cell(x, tuple(start), mask)
    torch.testing.assert_close(results[1], results[0], atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("norm", ["ba", "none", "per_gate", "joined hidden rms"])
def test_step_without_gradients_has_the_same_values(norm):
    judge, ours = pair(norm, "auto")
    x = torch.randn(3, 5, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), judge(x))


def test_half_precision_of_a_step_affects_only_the_products():
    judge, ours = (cell.float() for cell in pair("ba", "auto"))
    x, state = torch.randn(3, 5), (torch.randn(3, 11), torch.randn(3, 11))
    with torch.autocast("cpu", torch.bfloat16):
        h, c = ours(x, state)
    assert h.dtype == c.dtype == torch.float32
    assert not torch.equal(h, judge(x, state)[0])
    torch.testing.assert_close(h, judge(x, state)[0], atol=0.1, rtol=0)


@pytest.mark.parametrize("backend", HERE)
def test_gradients_requested_separately_equal_those_requested_together(backend):
    """One product covers all steps: it must not include values of an earlier pass."""
    cell, _ = pair("ba", backend)
    x, state = torch.randn(2, 5, dtype=torch.float64, requires_grad=True), None
    weights = cell.loop_weights()
    for _ in range(3):
        state = cell(x, state, None, weights)
    inputs = (x, cell.weight_hh, cell.bias_ih)
    together = torch.autograd.grad(state[0].sum(), inputs, retain_graph=True)
    alone = [torch.autograd.grad(state[0].sum(), one, retain_graph=True)[0] for one in inputs]
    torch.testing.assert_close(tuple(alone), together)


H, C = torch.randn(2, 11), torch.randn(2, 11)
MISFITS = {
    "x is torch.float64, the LSTM's weights are torch.float32": (H, C, None, torch.float64),
    "h is torch.float64, the LSTM's weights are torch.float32": (H.double(), C, None),
    "c is torch.float16, the LSTM's weights are torch.float32": (H, C.half(), None),
    "c is on meta, the LSTM's weights are on cpu": (H, C.to("meta"), None),
    r"h has shape \(1, 11\); expected \(2, 11\)": (H[:1], C, None),
    r"c has shape \(7, 11\); expected \(2, 11\)": (H, torch.randn(7, 11), None),
    r"mask has shape \(1, 11\); expected \(2, 11\)": (H, C, torch.ones(1, 11)),
    "mask is torch.float64, the LSTM's weights are torch.float32": (
        H,
        C,
        torch.ones(2, 11).double(),
    ),
}


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("message", MISFITS)
def test_mismatched_shapes_of_a_step_are_reported(message, backend):
    """C++ would read beyond the end of the tensor."""
    h, c, mask, *dtype = MISFITS[message]
    x = torch.randn(2, 5, dtype=dtype[0] if dtype else None)
    with pytest.raises(ValueError, match=message):
        LayerNormLSTMCell(5, 11, backend=backend)(x, (h, c), mask)
    if mask is None:
        with pytest.raises(ValueError, match=message):
            LayerNormLSTM(5, 11, backend=backend).step(x, (h[None], c[None]))
