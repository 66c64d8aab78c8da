"""LAS's decoder and attention in Triton under Triton's interpreter, without a GPU."""

import importlib.util

import pytest
from test_lstm_triton import COMPILING, COUNTING, run

PRELUDE = """
import torch
from asr.config.cell import CellSettings
from asr.kernels import check, reference
from asr.kernels.check import DecoderSizes
from asr.kernels.cuda import decoder, lstm
from asr.kernels.types import AttentionInput, DecoderConstants
from reference_lstm import CELLS

CPU = torch.device("cpu")
decoder.BLOCK_T, decoder.BLOCK_R, decoder.BLOCK_E = 4, 8, 4  # several tiles of each
SMALL = DecoderSizes(U=2, B=2, T=7, E=5, M=3, H=5, A=3, C=2, W=5, layers=1)

def doubled(x):
    if x is None or torch.is_tensor(x):
        real = x is not None and x.dtype == torch.float32
        return x.detach().double().requires_grad_(x.requires_grad) if real else x
    parts = [doubled(part) for part in x]
    return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)

def rounded_up(*multiples):
    decoder.TOKENS, decoder.UTTERANCES, decoder.FRAMES = multiples

def errors(ours, judge):
    return [float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in zip(ours, judge)]

def compare(norm, sizes, dropout=False):
    settings = CELLS[norm]
    batch = doubled(check.random_decoder(settings, sizes, CPU, dropout))
    ours = check.decoder_results(decoder.run_decoder, *batch, settings, torch.float64)
    judge = check.decoder_results(reference.run_decoder, *batch, settings)
    assert len(ours) == len(judge)
    assert all(a.shape == b.shape for a, b in zip(ours, judge)), sizes
    assert max(errors(ours, judge)) < 1e-11, (norm, sizes, errors(ours, judge))
    return ours
"""
EXACT = """
rounded_up(1, 1, 1)
full = compare("ba", SMALL._replace(layers=2), dropout=True)
compare("per_gate output rms", SMALL._replace(kind="dot"))
compare("none", SMALL._replace(B=1, A=19, kind="additive"), dropout=True)
compare("ba hidden", SMALL._replace(U=1, B=1, T=1, W=9))  # one token, utterance and frame
compare("raw", SMALL._replace(U=3, H=17, E=3))
compare("joined state rms", SMALL._replace(T=4, kind="dot"), dropout=True)  # a full tile
compare("cell", SMALL._replace(C=1, W=1))

# Padded tokens, utterances and frames change no bit of what they stand beside.
rounded_up(3, 3, 5)
padded = compare("ba", SMALL._replace(layers=2), dropout=True)
assert max(errors(padded, full)) < 1e-14
"""
PADDING = """
rounded_up(1, 1, 1)
settings = CELLS["ba"]
inputs, cells, constants = doubled(check.random_decoder(settings, SMALL, CPU))

def results():
    batch = inputs, cells, constants
    return check.decoder_results(decoder.run_decoder, *batch, settings, torch.float64)

clean = results()
with torch.no_grad():
    for part in (inputs.states, inputs.keys):
        part[~constants.valid] = torch.nan
dirty = results()
assert all(torch.equal(*pair) for pair in zip(clean, dirty))

# An utterance without a frame: zeros, not NaN, and nothing in the other one changes.
valid = constants.valid.clone()
valid[1] = False
silent = constants._replace(valid=valid)
found = decoder.run_decoder(inputs, cells, silent, settings, torch.float64)
assert not found.weights[:, 1].any() and not found.context[:, 1].any()
torch.testing.assert_close(found.weights[:, 0], clean[2][:, 0], rtol=0, atol=0)
total = sum(part.square().sum() for part in found)
gradients = torch.autograd.grad(total, [inputs.states, inputs.keys, cells[0].weight_hh])
assert all(gradient.isfinite().all() for gradient in gradients)
assert not gradients[0][1].any() and not gradients[1][1].any()
"""
MISUSE = """
found = decoder.run_decoder(inputs, cells, constants, settings, torch.float64)
try:
    torch.autograd.grad(found.output.sum(), inputs.states, create_graph=True)
    raise SystemExit("second derivatives must be refused")
except RuntimeError as error:
    assert "no second derivatives" in str(error), error
try:
    shorter = inputs._replace(keys=inputs.keys[:, 1:])
    decoder.run_decoder(shorter, cells, constants, settings, torch.float64)
    raise SystemExit("a wrong shape must be refused")
except ValueError as error:
    assert "keys has shape" in str(error), error
assert decoder.covers_attention(1024, None, None, None)
assert not decoder.covers_attention(1025, None, None, None)
assert not decoder.covers_attention(8, None, None, torch.empty(2, 2, 257))
"""
HALF = """
# Both factors and the result of a product are rounded, by at most 2^-9 of their size; a value of
# this decoder passes up to eight products, there and back.
rounded_up(1, 1, 1)
for norm in ("ba", "none", "joined hidden rms"):
    batch = check.random_decoder(CELLS[norm], SMALL, CPU, True)
    ours = check.decoder_results(decoder.run_decoder, *batch, CELLS[norm], torch.bfloat16)
    judge = check.decoder_results(reference.run_decoder, *batch, CELLS[norm])
    assert all(part.dtype == torch.float32 for part in ours)
    assert 1e-5 < max(errors(ours, judge)) < 8 * 3 * 2**-9, (norm, errors(ours, judge))
"""
GRAPH = """
from test_gpu_paths import StandInGraph

# In the place of CUDA graphs, which this machine cannot record: what is recorded may read nothing
# but the tensors passed to it.
recorded = []

def record(loop, tensors):
    recorded.append(loop.func.__name__)
    outputs = loop(*tensors)
    stand_in = StandInGraph(loop, tensors, outputs)
    return lstm.Recorded(stand_in, tensors, outputs)

cache = lstm.GraphCache(record)
eager = lstm.replay
rounded_up(2, 2, 4)
batches = []
for U, B, T in ((2, 2, 7), (1, 1, 5)):  # rounded up to the same shapes
    sizes = SMALL._replace(U=U, B=B, T=T)
    batches.append(doubled(check.random_decoder(CELLS["joined"], sizes, CPU)))
for batch in batches:
    lstm.replay = eager
    judge = check.decoder_results(decoder.run_decoder, *batch, CELLS["joined"], torch.float64)
    lstm.replay = lambda key, loop, *inputs: cache.replay(key, loop, 1e9, *inputs)
    ours = check.decoder_results(decoder.run_decoder, *batch, CELLS["joined"], torch.float64)
    assert all(torch.equal(*pair) for pair in zip(ours, judge))
assert recorded == ["_run_forward", "_run_backward"], recorded

cache.recorded.clear()  # what a validation in inference mode records serves training
batch = batches[0]
with torch.inference_mode():
    decoder.run_decoder(*batch, CELLS["joined"], torch.float64)
assert check.decoder_results(decoder.run_decoder, *batch, CELLS["joined"], torch.float64)
lstm.replay = eager
"""
ATTEND = """
for kind, K in (("location", 3), ("additive", 1), ("dot", 2)):
    sizes = SMALL._replace(kind=kind)
    inputs, _, constants = doubled(check.random_decoder(CELLS["none"], sizes, CPU))
    B, T, A = inputs.keys.shape
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(B, K, A, generator=draw, dtype=torch.float64)
    past = torch.rand(2, B, K, T, generator=draw, dtype=torch.float64)
    given = AttentionInput(inputs.keys, query, inputs.v, *past, inputs.weight_loc, inputs.conv)
    assert decoder.attend(given, constants.valid) is None  # its gradient is torch's
    with torch.no_grad():
        ours = decoder.attend(given, constants.valid)
        judge = reference.attend(given, constants.valid)
    torch.testing.assert_close(ours, judge, rtol=1e-12, atol=1e-12)
"""
STEP = """
for norm in ("ba", "raw", "none", "per_gate output rms", "joined hidden rms"):
    sizes = SMALL._replace(B=3)
    _, (w,), _ = doubled(check.random_decoder(CELLS[norm], sizes, CPU))
    draw = torch.Generator().manual_seed(1)
    x, h, c, mask = (
        torch.randn(3, n, generator=draw, dtype=torch.float64) for n in (8, 5, 5, 5)
    )
    for drop in (None, mask):
        given = x, (h, c), drop, w, CELLS[norm]
        judge = reference.step(*given)
        tracked = decoder.step(*given, torch.float64)
        assert all(torch.equal(*pair) for pair in zip(tracked, judge))
        assert tracked[0].requires_grad
        with torch.no_grad():
            ours = decoder.step(*given, torch.float64)
        torch.testing.assert_close(ours, judge, rtol=1e-12, atol=1e-12)
"""
SPELLER = """
from asr.models.las import Speller
from asr.nn.attention import Memory
from test_decoder_kernel import all_of, drawn, speller, step_by_step

rounded_up(1, 1, 1)
sizes = 2, 6, 2, 5, 5, 3, 3
for kind in ("location", "dot"):
    ours, other = (speller(sizes, kind, "ba", name, 2) for name in ("cuda", "reference"))
    states, valid, tokens = drawn(sizes)
    assert ours.can_run_sequence(Memory(states, valid), tokens)
    actual = all_of(ours, Speller.run_sequence, states, valid, tokens)
    judge = all_of(other, step_by_step, states, valid, tokens)
    torch.testing.assert_close(actual, judge, rtol=1e-10, atol=1e-10)
    assert not ours.can_run_sequence(Memory(states, valid), tokens[:, :0])  # an empty target
    with torch.no_grad():  # by the kernels of a search
        searched = step_by_step(ours, Memory(states, valid), tokens)
    torch.testing.assert_close(searched, judge[:2], rtol=1e-10, atol=1e-10)

# The same with autocast, in training, in a search, and in single steps with gradients.
ours, other = (speller(sizes, "location", "ba", n, 2, torch.float32) for n in ("cuda", "reference"))
judge = all_of(other, step_by_step, *drawn(sizes, torch.float32))
with torch.autocast("cpu", torch.bfloat16):
    trained = all_of(ours, Speller.run_sequence, *drawn(sizes, torch.float32))
    sampled = all_of(ours, step_by_step, *drawn(sizes, torch.float32))
    with torch.no_grad():
        states, valid, tokens = drawn(sizes, torch.float32)
        searched = step_by_step(ours, Memory(states, valid), tokens)
bound = 8 * 3 * 2**-9
assert 1e-5 < max(errors(trained, judge)) < bound, errors(trained, judge)
assert 1e-5 < max(errors(searched, judge[:2])) < bound, errors(searched, judge)
assert max(errors(sampled, judge)) < 2 * bound, errors(sampled, judge)  # energies in bf16, too
"""
COUNT = """
def launches(products, norm, dropout, layers):
    counts = []
    for U in (2, 4):
        sizes = DecoderSizes(U=U, B=2, T=7, E=5, M=3, H=5, A=3, C=2, W=5, layers=layers)
        batch = check.random_decoder(CELLS[norm], sizes, CPU, dropout)
        calls.clear()
        with Computing():
            found = decoder.run_decoder(*batch, CELLS[norm], products)
            forward = len(calls)
            (found.output.sum() + found.context.sum() + found.weights.sum()).backward()
        counts.append((forward, len(calls) - forward))
    return [(late - early) / 2 for early, late in zip(*counts)]

rounded_up(1, 1, 1)
for products in (torch.float32, torch.bfloat16):
    assert launches(products, "ba", True, 1) == [8, 9], launches(products, "ba", True, 1)
    assert launches(products, "joined", False, 1) == [7, 8]
    layer = [b - a for a, b in zip(*(launches(products, "ba", True, n) for n in (1, 2)))]
    assert layer == [5, 5], layer

from asr.kernels import dispatch
from asr.nn.attention import Memory
from test_decoder_kernel import drawn, speller

dispatch.is_traced = lambda *tensors: False  # but for counting, operators would be kept
sizes = 2, 6, 2, 5, 5, 3, 3
states, valid, _ = drawn(sizes, torch.float32)
for norm in ("ba", "joined hidden rms"):
    ours = speller(sizes, norm=norm, backend="cuda", dtype=torch.float32).eval()
    with torch.no_grad():
        state = ours.start(Memory(states, valid))
        state = ours.select(state, torch.tensor([[0, 0, 0], [1, 1, 1]]))  # three hypotheses
        tokens = torch.ones(2, 3, dtype=torch.long)
        ours.advance(state, tokens)  # fills caches
        calls.clear()
        with Computing():
            ours.advance(state, tokens)
    assert len(calls) <= 12, calls
"""
COMPILE = """
from asr.config.cell import CellSettings
from asr.kernels import check
from asr.kernels.check import DecoderSizes
from asr.kernels.cuda import decoder, triton_attention, triton_norm, triton_step

KERNELS = ("norm_rows_forward", "norm_rows_backward", "forward_step", "backward_step",
           "attention_energy", "attention_context", "attention_backward_weights",
           "attention_backward", "sum_tiles")
for module in (triton_norm, triton_step, triton_attention):
    for name in KERNELS:
        if name in vars(module):
            setattr(module, name, Compiling(vars(module)[name]))
decoder.UTTERANCES = 1
ones = DecoderSizes(U=1, B=1, T=1, E=1, M=1, H=1, A=1, C=1, W=1, layers=1)  # constants in Triton
some = DecoderSizes(U=1, B=2, T=5, H=24, layers=1)
kinds = {"location": 256, "additive": 40, "dot": 1024}
large = [some._replace(kind=kind, A=A) for kind, A in kinds.items()]
for sizes in (ones, *large):
    for products in (torch.bfloat16, torch.float32):
        batch = check.random_decoder(CellSettings("ba"), sizes, torch.device("cpu"), True)
        check.decoder_results(decoder.run_decoder, *batch, CellSettings("ba"), products)
assert {name for name, *_ in compiled} == set(KERNELS)
"""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


def test_the_decoder_in_triton():
    programs = PADDING, MISUSE, HALF, ATTEND, STEP, GRAPH, SPELLER, COUNTING, COUNT
    done = run("".join((PRELUDE, EXACT, *programs)), "1")
    assert done.returncode == 0, done.stderr


def test_its_kernels_compile_for_a_gpu():
    done = run(COMPILING + COMPILE, "0")
    assert done.returncode == 0, done.stderr
