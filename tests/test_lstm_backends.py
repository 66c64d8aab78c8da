"""Every backend available on this machine, against slow loops."""

import copy

import pytest
import torch
from reference_lstm import (
    CELLS,
    NORMS,
    VARIED,
    default_eps,
    naive_layer_norm_loop,
    run_layer,
)

from asr.kernels.dispatch import backends
from asr.nn.lstm import LayerNormLSTM

LENGTHS = [4, 11, 1, 7, 7]
# cuda too with TRITON_INTERPRET=1, which is set by hand because it takes minutes.
HERE = [name for name, reason in backends().items() if reason is None]


@pytest.fixture(params=HERE)
def backend(request, monkeypatch):
    monkeypatch.setattr("asr.kernels.cuda.lstm.BUCKET", 3)  # few idle steps
    return request.param


def make(norm, backend, bidirectional=True, layers=1, gain=0.3, size=(3, 7), **options):
    """An LSTM with all weights moved from their initial values. norm: CellSettings or a name."""
    torch.manual_seed(1)
    lstm = LayerNormLSTM(
        *size,
        layers,
        batch_first=True,
        bidirectional=bidirectional,
        norm=CELLS.get(norm, norm),
        backend=backend,
        **options,
    )
    with torch.no_grad():
        for name, weight in lstm.named_parameters():
            if name.startswith("bias"):
                weight.normal_()
            elif name.startswith("gain"):
                weight.uniform_(0.5, 1.5).mul_(gain)
    return lstm


def weights_of(lstm):
    """A dict of parameters per direction, their names without suffix."""
    suffixes = ("_l0", "_l0_reverse")[: lstm.directions]
    named = dict(lstm.named_parameters())
    return [{k.removesuffix(s): v for k, v in named.items() if k.endswith(s)} for s in suffixes]


def gradients(outputs, inputs, seed=2):
    """Gradients of a fixed random projection of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(
        (y * torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)).sum()
        for y in outputs
    )
    return torch.autograd.grad(total, inputs, materialize_grads=True)


def start_of(lstm, batch=5, dtype=torch.float64):
    torch.manual_seed(3)
    return torch.randn(2, lstm.directions * lstm.num_layers, batch, lstm.hidden_size, dtype=dtype)


@pytest.mark.parametrize(
    ("norm", "bidirectional"),
    [*((norm, both) for norm in NORMS for both in (False, True)), *((n, True) for n in VARIED)],
)
def test_values_and_gradients_are_the_slow_loops(norm, bidirectional, backend):
    lstm = make(norm, backend, bidirectional).double()
    x = torch.randn(5, 11, 3, dtype=torch.float64, requires_grad=True)
    start = start_of(lstm).requires_grad_()
    inputs = (x, start, *lstm.parameters())
    output, state = lstm(x, tuple(start), lengths=LENGTHS)
    judge = run_layer(x, LENGTHS, *start, weights_of(lstm), norm, default_eps(norm))
    torch.testing.assert_close((output, *state), judge, atol=1e-11, rtol=1e-11)
    ours, expected = gradients((output, *state), inputs), gradients(judge, inputs)
    torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("norm", [*NORMS, "joined state rms", "ba hidden"])
def test_recurrent_dropout_is_the_slow_loops(norm, backend):
    lstm = make(norm, backend, recurrent_dropout=0.4).double()
    x = torch.randn(5, 11, 3, dtype=torch.float64, requires_grad=True)
    start, inputs = start_of(lstm), (x, *lstm.parameters())
    torch.manual_seed(4)
    output, state = lstm(x, tuple(start), lengths=LENGTHS)
    torch.manual_seed(4)
    mask = lstm._dropout_mask(5)
    judge = run_layer(x, LENGTHS, *start, weights_of(lstm), norm, default_eps(norm), mask=mask)
    torch.testing.assert_close((output, *state), judge, atol=1e-11, rtol=1e-11)
    ours, expected = gradients((output, *state), inputs), gradients(judge, inputs)
    torch.testing.assert_close(ours, expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("gain", [0.3, 1.0])
def test_float32_error_is_at_most_twice_the_naive_loops(gain, backend):
    """At gain 1 the recurrence is chaotic; only the error relative to the naive loop's counts."""
    lstm = make("ba", backend, bidirectional=False, gain=gain, size=(13, 37))
    x = torch.randn(5, 59, 13)
    runs = {}
    for name, dtype in (
        ("exact", torch.float64),
        ("naive", torch.float32),
        ("ours", torch.float32),
    ):
        model = copy.deepcopy(lstm).to(dtype)
        input_ = x.to(dtype).requires_grad_()
        naive = name != "ours"
        output = (
            naive_layer_norm_loop(input_, weights_of(model)[0], 1e-5) if naive else model(input_)[0]
        )
        runs[name] = [output, *gradients([output], (input_, *model.parameters()))]
    for exact, naive, ours in zip(runs["exact"], runs["naive"], runs["ours"], strict=True):
        allowed = 2 * (naive - exact).norm() + 1e-6 * exact.norm()
        assert (ours - exact).norm() <= allowed


@pytest.mark.parametrize("norm", [*NORMS[1:], *VARIED])
def test_inputs_whose_squares_vanish_are_no_silence(norm, backend):
    lstm = make(norm, backend, bidirectional=False, size=(3, 37))
    with torch.no_grad():
        for name, weight in lstm.named_parameters():
            if name.startswith("bias_ih"):
                weight.zero_()
    exact, x = copy.deepcopy(lstm).double(), 1e-30 * torch.randn(2, 3, 3)
    found = []
    for model in (lstm, exact):
        given = x.to(model.weight_ih_l0.dtype).requires_grad_()
        found.append(gradients([model(given)[0]], (given, model.weight_ih_l0)))
    for ours, judge in zip(*found, strict=True):
        assert (ours - judge).norm() < 1e-5 * judge.norm()


@pytest.mark.parametrize("norm", [*NORMS, "joined hidden rms", "ba state"])
def test_padding_and_batch_mates_change_nothing(norm, backend):
    lstm = make(norm, backend, layers=2, gain=1.0)
    x = torch.randn(5, 11, 3)
    for row, length in enumerate(LENGTHS):
        x[row, length:] = float("nan")
    x.requires_grad_()
    output, (h, c) = lstm(x, lengths=LENGTHS)
    (gradient,) = gradients([output, h, c], [x])
    for row, length in enumerate(LENGTHS):
        assert (output[row, length:] == 0).all()
        assert (gradient[row, length:] == 0).all()
        alone, (h_alone, c_alone) = lstm(x[row : row + 1, :length])
        torch.testing.assert_close(output[row, :length], alone[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(h[:, row], h_alone[:, 0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(c[:, row], c_alone[:, 0], atol=1e-6, rtol=1e-5)


def test_gradients_of_padded_outputs_are_ignored(backend):
    lstm = make("ba", backend)
    x = torch.randn(5, 11, 3, requires_grad=True)
    output, _ = lstm(x, lengths=LENGTHS)
    upstream = torch.randn(output.shape)
    for row, length in enumerate(LENGTHS):
        upstream[row, length:] = 0
    clean = torch.autograd.grad(output, (x, *lstm.parameters()), upstream, retain_graph=True)
    for row, length in enumerate(LENGTHS):
        upstream[row, length:] = float("nan")
    poisoned = torch.autograd.grad(output, (x, *lstm.parameters()), upstream)
    torch.testing.assert_close(clean, poisoned)


@pytest.mark.parametrize(
    ("norm", "frames"),
    [*((n, frames) for n in NORMS[1:] for frames in (1, 3, 10, 40)), *((n, 10) for n in VARIED)],
)
def test_silence_leaves_gradients_finite(norm, frames, backend):
    lstm = make(norm, backend, gain=1.0)
    with torch.no_grad():
        for name, weight in lstm.named_parameters():
            if name.startswith("bias"):
                weight.zero_()
    x = torch.randn(2, 47, 3)
    x[:, :frames] = 0
    x.requires_grad_()
    output, _ = lstm(x)
    for gradient in gradients([output], (x, *lstm.parameters())):
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 1e6


@pytest.mark.parametrize("norm", VARIED)
def test_a_row_without_variance_passes_no_gradient(norm, backend):
    """Zero input, state and biases: of the weights only those of the next frame get gradients."""
    lstm = make(norm, backend, bidirectional=False).double()
    with torch.no_grad():
        for name, weight in lstm.named_parameters():
            if name.startswith("bias"):
                weight.zero_()
    x = torch.zeros(2, 1, 3, dtype=torch.float64, requires_grad=True)
    output, state = lstm(x)
    assert (output == 0).all()
    dx, *_ = gradients((output, *state), (x, *lstm.parameters()))
    assert (dx == 0).all() == (norm != "cell rms")  # cell has no norm of the gates


@pytest.mark.parametrize("norm", ["none", "ba", "thesis", "joined carried", "ba hidden"])
def test_segments_with_carried_state_equal_the_whole_sequence(norm, backend):
    lstm = make(norm, backend, bidirectional=False, layers=2)
    x = torch.randn(5, 11, 3)
    full, (h, c) = lstm(x)
    parts, state = [], None
    for piece in x.split([4, 1, 6], dim=1):
        part, state = lstm(piece, state)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state, (h, c), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 17), (3, 1, 16), (7, 3, 33)])
def test_odd_shapes_and_strides(shape, backend):
    B, T, H = shape
    lstm = make("ba", backend, size=(3, H))
    x = torch.randn(3, T, B).transpose(0, 2).requires_grad_()
    start = start_of(lstm, B, torch.float32)
    judge = run_layer(x, [T] * B, *start, weights_of(lstm), "ba", 1e-5)
    output, state = lstm(x, tuple(start))
    torch.testing.assert_close((output, *state), judge, atol=1e-5, rtol=1e-4)
    inputs = (x, *lstm.parameters())
    torch.testing.assert_close(
        gradients((output, *state), inputs), gradients(judge, inputs), atol=2e-5, rtol=1e-3
    )


def test_without_gradients_the_values_are_the_same(backend):
    lstm = make("ba", backend, layers=2)
    x = torch.randn(5, 11, 3)
    tracked = lstm(x, lengths=LENGTHS)
    with torch.no_grad():
        plain = lstm(x, lengths=LENGTHS)
    assert tracked[0].requires_grad
    assert not plain[0].requires_grad
    torch.testing.assert_close(plain, tracked, atol=1e-6, rtol=1e-5)


def test_two_graphs_coexist_and_backward_runs_twice(backend):
    lstm = make("ba", backend)
    inputs = [torch.randn(5, 11, 3, requires_grad=True) for _ in range(2)]
    alone = [gradients([lstm(x)[0]], [x]) for x in inputs]
    first, second = (lstm(x)[0] for x in inputs)
    for _ in range(2):
        for output, x, expected in zip((first, second), inputs, alone, strict=True):
            total = torch.Generator().manual_seed(2)
            weight = torch.randn(output.shape, generator=total, dtype=torch.float64).float()
            actual = torch.autograd.grad((output * weight).sum(), [x], retain_graph=True)
            torch.testing.assert_close(actual, expected)


def test_a_run_repeats_bit_for_bit(backend):
    lstm = make("ba", backend, layers=2)
    x = torch.randn(5, 11, 3)
    runs = [
        (y := lstm(x, lengths=LENGTHS)[0], *gradients([y], list(lstm.parameters())))
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
