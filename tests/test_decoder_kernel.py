"""The decoder in one C++ call against the same steps one by one in torch's operators."""

import itertools

import pytest
import torch
from reference_lstm import NORMS, SETTINGS

from asr.config.schema import LasConfig, SpellerConfig
from asr.kernels import types
from asr.kernels.cpu import compiler, decoder
from asr.models.las import Speller
from asr.nn.attention import Memory

pytestmark = pytest.mark.skipif(
    compiler.obstacle() is not None, reason=f"no kernels: {compiler.obstacle()}"
)
# B, T, U, E, H, embedding, A: primes; less than a vector of each; more rows than a tile of 16; more
# rows in total than one product of the weight gradients has.
SIZES = [
    (5, 23, 7, 11, 13, 3, 17),
    (1, 1, 1, 2, 3, 2, 2),
    (19, 37, 3, 5, 31, 7, 37),
    (13, 5, 41, 3, 5, 2, 3),
]
V = 13


def speller(
    sizes, kind="location", norm="ba", backend="cpu", layers=1, dtype=torch.float64, **settings
):
    _, _, _, E, H, D, A = sizes
    torch.manual_seed(1)
    settings = SETTINGS[norm] | settings  # norm: a name in SETTINGS
    cells = SpellerConfig(layers=layers, hidden=H, embedding=D, backend=backend, **settings)
    config = LasConfig(kind="las", attention=kind, attention_size=A, speller=cells)
    made = Speller(V, E, config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return made.to(dtype)


def drawn(sizes, dtype=torch.float64, seed=2):
    """A ragged batch's states with gradients, its valid frames, and tokens."""
    B, T, U, E, *_ = sizes
    draw = torch.Generator().manual_seed(seed)
    valid = torch.arange(T) < torch.tensor([T, *range(T, 0, -3)] * B)[:B, None]
    states = torch.randn(B, T, E, generator=draw, dtype=torch.float64) * valid[..., None]
    tokens = torch.randint(0, V, (B, U), generator=draw)
    return states.to(dtype).requires_grad_(), valid, tokens


def step_by_step(ours, memory, tokens):
    state, outputs, weights = ours.start(memory), [], []
    for token in tokens.unbind(1):
        output, state = ours.advance(state, token[:, None])
        outputs.append(output)
        weights.append(state.attended.weights)
    return torch.cat(outputs, 1), torch.cat(weights, 1)


def all_of(ours, spell, states, valid, tokens):
    """Both outputs and every gradient of a random projection of them."""
    results = spell(ours, Memory(states, valid), tokens)
    draw = torch.Generator().manual_seed(3)
    slopes = [
        torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y.dtype) for y in results
    ]
    learned = [w for name, w in ours.named_parameters() if not name.startswith(("merge", "out"))]
    gradients = torch.autograd.grad(results, [states, *learned], slopes, materialize_grads=True)
    return [*results, *gradients]


@pytest.mark.parametrize(
    ("kind", "norm", "layers", "sizes"),
    [
        *itertools.product(("additive", "location"), ["ba"], (1, 3), SIZES),
        *(("location", norm, 2, SIZES[0]) for norm in SETTINGS if norm != "ba"),
    ],
)
def test_values_and_gradients_are_those_of_single_steps(kind, norm, layers, sizes):
    one, other = (speller(sizes, kind, norm, b, layers) for b in ("cpu", "reference"))
    actual = all_of(one, Speller.run_sequence, *drawn(sizes))
    torch.testing.assert_close(
        actual, all_of(other, step_by_step, *drawn(sizes)), atol=1e-10, rtol=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize("norm", [*NORMS, "joined hidden rms", "ba state"])
@pytest.mark.parametrize("bf16", [False, True])
def test_rounding_errors_are_those_of_single_steps(norm, bf16):
    """Relative, summed over all results and gradients; the median of nine draws."""
    if bf16 and not decoder.library.has_bf16():
        pytest.skip("this processor multiplies no bf16")
    errors = torch.zeros(2, 9, dtype=torch.float64)
    for seed in range(9):
        exact = all_of(speller(SIZES[0], norm=norm), step_by_step, *drawn(SIZES[0], seed=seed))
        ours = speller(SIZES[0], norm=norm, dtype=torch.float32)
        for which, spell in enumerate((Speller.run_sequence, step_by_step)):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                actual = all_of(ours, spell, *drawn(SIZES[0], torch.float32, seed))
            for y, judge in zip(actual, exact, strict=True):
                errors[which, seed] += ((y - judge).norm() / judge.norm()).detach()
    one_call, by_step = errors.median(dim=1).values
    assert 0 < one_call <= 1.2 * by_step


@pytest.mark.skipif(not decoder.library.has_bf16(), reason="this processor multiplies no bf16")
def test_bf16_is_applied(monkeypatch):
    results, library = [], decoder.library
    for kind in (library.kind_of_products, lambda x, products: library.KINDS[x.dtype]):
        monkeypatch.setattr(library, "kind_of_products", kind)
        ours, given = speller(SIZES[0], dtype=torch.float32), drawn(SIZES[0], torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            results.append(all_of(ours, Speller.run_sequence, *given))
    assert not any(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_dropout_between_the_steps():
    """Given masks act like a product with the outputs of the reference backend's cells."""
    sizes = B, T, U, _, H, *_ = SIZES[0]
    ours = speller(sizes, layers=2, backend="reference")
    states, valid, tokens = drawn(sizes)
    draw = torch.Generator().manual_seed(4)
    keep = torch.randint(0, 2, (2, U, B, H), generator=draw).double() / 0.7
    masks = tuple(torch.randint(0, 2, (2, B, H), generator=draw).double() / 0.6)
    memory = Memory(states, valid)
    state = ours.start(memory)
    state = state._replace(constants=state.constants._replace(masks=masks))
    expected = []
    for u in range(U):
        kept = iter(keep[:, u])
        ours.dropout.forward = lambda x, kept=kept: x if x.dim() == 3 else x * next(kept)
        output, state = ours.advance(state, tokens[:, u : u + 1])
        expected.append(output)
    expected = torch.cat(expected, 1)

    attend, embedded = ours.attend, ours.embedding(tokens).transpose(0, 1)
    given = types.DecoderInput(embedded, states, attend.keys(memory), *attend.matrices())
    first = torch.eye(T, dtype=torch.float64)[0].expand(B, T)
    fixed = types.DecoderConstants(valid, first, masks, keep)
    weights = [types.Weights(**dict(cell.named_parameters())) for cell in ours.cells]
    result = decoder.run_decoder(given, weights, fixed, ours.cells[0].settings, torch.float64)
    actual = torch.cat([result.output, result.context], -1).transpose(0, 1)
    torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)
    slope = torch.randn(actual.shape, generator=draw, dtype=torch.float64)
    learned = [states, *ours.cells.parameters(), *attend.parameters(), ours.embedding.weight]
    both = [torch.autograd.grad(y, learned, slope) for y in (actual, expected)]
    torch.testing.assert_close(*both, atol=1e-10, rtol=1e-10)


def test_dropout_acts_in_training_only_and_keeps_the_mean():
    sizes = SIZES[0]
    ours, (states, valid, tokens) = speller(sizes, dropout=0.5, recurrent_dropout=0.3), drawn(sizes)
    memory = Memory(states.detach(), valid)
    first, second = (ours.run_sequence(memory, tokens)[0] for _ in range(2))
    assert not torch.equal(first, second)
    H = sizes[4]
    assert 0.3 < (first[..., :H] == 0).double().mean() < 0.7
    ours.eval()
    assert torch.equal(*(ours.run_sequence(memory, tokens)[0] for _ in range(2)))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_nothing(threads, bf16):
    if bf16 and not decoder.library.has_bf16():
        pytest.skip("this processor multiplies no bf16")
    sizes, dtype = SIZES[2], torch.float32 if bf16 else torch.float64
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            ours = speller(sizes, layers=2, dtype=dtype)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                results.append(all_of(ours, Speller.run_sequence, *drawn(sizes, dtype)))
    finally:
        torch.set_num_threads(before)
    allowed = 1e-3 if bf16 else 1e-11
    torch.testing.assert_close(*results, atol=allowed, rtol=allowed)


def test_batch_mates_and_padding_values_change_nothing():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    full, weights = ours.run_sequence(Memory(states, valid), tokens)
    dirty = torch.where(valid[..., None], states, 1e3)
    torch.testing.assert_close(ours.run_sequence(Memory(dirty, valid), tokens), (full, weights))
    for b in range(SIZES[0][0]):
        frames = int(valid[b].sum())
        alone = Memory(states[b : b + 1, :frames], valid[b : b + 1, :frames])
        output, own = ours.run_sequence(alone, tokens[b : b + 1])
        torch.testing.assert_close(output[0], full[b])
        torch.testing.assert_close(own[0], weights[b, :, :frames])
        assert (weights[b, :, frames:] == 0).all()


def test_without_gradients_the_values_are_the_same():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    tracked = ours.run_sequence(Memory(states, valid), tokens)
    with torch.no_grad():
        plain = ours.run_sequence(Memory(states, valid), tokens)
    assert tracked[0].requires_grad and not plain[0].requires_grad
    assert all(torch.equal(*pair) for pair in zip(tracked, plain, strict=True))


def test_two_graphs_coexist_and_backward_runs_twice():
    ours, (states, valid, tokens) = speller(SIZES[0]), drawn(SIZES[0])
    others = (0.7 * states).detach().requires_grad_()

    def graph(x):
        output, weights = ours.run_sequence(Memory(x, valid), tokens)
        return output.sin().sum() + weights.square().sum()

    alone = [torch.autograd.grad(graph(x), x)[0] for x in (states, others)]
    graphs = graph(states), graph(others)
    for _ in range(2):
        for loss, x, expected in zip(graphs, (states, others), alone, strict=True):
            assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], expected)
