"""ONNX files against the model that they were exported from, on audio, in ONNX Runtime.

Each program gets the model's inputs: features of three recordings in one batch, padded with NaN,
and of one alone; the states of the memory; and along a beam search of the model a step of the
decoder for each token. The figure of a program is the greatest

    |program - model| / (1 + |model|)

of its outputs at real frames. Log-mel features of bands far below the loudest one of their frame
are rounding errors of the front end's Fourier transform in float32, which ROUNDING allows for.

Shapes: S samples, B utterances, K hypotheses of each, T frames, F features, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.config.schema import SpeechRecipe
from asr.data.corpus import read_manifest
from asr.data.splits import filter_by_duration
from asr.data.tokenizer import EOS, SOS
from asr.decoding.scorer import NEVER
from asr.errors import UserError
from asr.features import AudioError
from asr.features.front_end import FrontEnd
from asr.inference.programs import Program
from asr.inference.recognition import Recognizer, has_no_speech
from asr.nn.attention import Memory

TOLERANCE = 1e-4
ROUNDING = 1e-6  # of an amplitude, as a share of the loudest of its frame
BEAM, STEPS = 3, 12

Run = Callable[..., dict[str, Tensor]]  # named inputs -> named outputs


def check_programs(
    folder: Path, programs: Mapping[str, Program], recognizer: Recognizer, recipe: SpeechRecipe
) -> str:
    """One line on how far the ONNX files in `folder` are from the model.

    Raises UserError where that is more than TOLERANCE, or ONNX Runtime cannot run them.
    """
    waveforms, audio = check_audio(recognizer, recipe)
    try:
        found = differences(folder, programs, recognizer, waveforms)
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"--onnx: not written, since ONNX Runtime fails: {reason}") from None
    listed = {name: f"{name} {value:.2g}" for name, value in found.items()}
    if wrong := [text for name, text in listed.items() if not found[name] <= TOLERANCE]:
        raise UserError(
            f"--onnx: not written, since programs differ from the model by more than "
            f"{TOLERANCE:g}: {', '.join(wrong)}, on {audio}; please report this with the run's "
            "recipe.yaml"
        )
    return f"greatest differences from the model, on {audio}: {', '.join(listed.values())}"


def check_audio(recognizer: Recognizer, recipe: SpeechRecipe) -> tuple[list[Tensor], str]:
    """Three waveforms (S,) or fewer, of data.valid where it can be read, and what they are."""
    front_end = recognizer.front_end
    longest = recognizer.max_segment_seconds
    valid, waveforms, reason = recipe.data.valid, [], "data.valid is not set"
    if valid:
        reason = "data.valid has no speech"
        try:
            corpus = read_manifest(valid, recipe.data.allow_outside_audio)
            corpus, _ = filter_by_duration(corpus, 0.0, longest)
            order, count = np.argsort(corpus.seconds), len(corpus)
            chosen = dict.fromkeys(order[share * count // 10] for share in (5, 9, 1))
            waveforms = [front_end.load(corpus[int(row)].audio) for row in chosen]
            waveforms = [part for part in waveforms if not has_no_speech(front_end, part)]
        except (UserError, AudioError) as error:
            reason = str(error)
    if waveforms:
        return waveforms, f"{len(waveforms)} utterances of {valid}"
    sizes = (int(min(seconds, longest) * front_end.sample_rate) for seconds in (1.9, 2.9, 1.3))
    generator = torch.Generator().manual_seed(1)
    return [0.1 * torch.randn(size, generator=generator) for size in sizes], f"noise ({reason})"


@torch.no_grad()
def differences(
    folder: Path,
    programs: Mapping[str, Program],
    recognizer: Recognizer,
    waveforms: Sequence[Tensor],
) -> dict[str, float]:
    """The figure of each program."""
    model, front_end = recognizer.model, recognizer.front_end
    run = {name: open_program(folder / f"{name}.onnx") for name in programs}
    figures: dict[str, list[float]] = {name: [] for name in programs}
    features = [front_end.features(waveform) for waveform in waveforms]
    for waveform, expected in zip(waveforms, features, strict=True):
        actual = run["features"](waveform=waveform)["features"]
        slack = rounding(front_end, waveform, expected)
        figures["features"].append(difference(actual, expected, slack=slack))
    for rows in (features, features[:1]):
        lengths = torch.tensor([len(row) for row in rows])
        padded = pad_sequence(rows, batch_first=True, padding_value=torch.nan)
        memory = model.encode(padded, lengths)
        encoded, real = run["encoder"](features=padded, lengths=lengths), memory.valid
        figures["encoder"].append(difference(encoded["valid"].int(), real.int()))
        figures["encoder"].append(difference(encoded["states"], memory.states, real))
        if "ctc" in run:
            log_probs = run["ctc"](states=memory.states)["log_probs"]
            figures["ctc"].append(difference(log_probs, model.ctc(memory), real))
        decoder = run["decoder"], programs["decoder"].module
        pairs = decoder_steps(*decoder, model, memory, encoded)
        figures["decoder"] += [difference(*pair) for pair in pairs]
    return {name: max(each) for name, each in figures.items()}


def open_program(path: Path) -> Run:
    """An ONNX file as a function."""
    import onnxruntime  # an optional package

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(**inputs: Tensor) -> dict[str, Tensor]:
        outputs = session.run(names, {name: part.numpy() for name, part in inputs.items()})
        return dict(zip(names, map(torch.from_numpy, outputs), strict=True))

    return run


def difference(
    actual: Tensor, expected: Tensor, valid: Tensor | None = None, slack: Tensor | float = 0.0
) -> float:
    """The greatest |actual - expected| / (1 + |expected| + slack), of the places in `valid`.

    Infinite for NaN, and where the shapes differ.
    """
    if actual.shape != expected.shape:
        return torch.inf
    share = (actual - expected).abs() / (1 + expected.abs() + slack)
    share = share if valid is None else share[valid]
    return share.double().nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()


def rounding(front_end: FrontEnd, waveform: Tensor, normalised: Tensor) -> Tensor:
    """What `difference` allows for normalised features (T, F) of a waveform (S,): the same shape.

    An error of the amplitude exp(x / 2) by ROUNDING times the loudest of the frame, exp(m / 2),
    changes x by 2 ROUNDING exp((m - x) / 2), which the norm then scales.
    """
    plain = front_end.extract(waveform)
    spread = (each.amax(0) - each.amin(0) for each in (normalised, plain))
    scale = torch.div(*spread).nan_to_num(0.0)  # (F,)
    quiet = (plain.amax(1, keepdim=True) - plain) / 2
    return scale * quiet.exp() * (2 * ROUNDING / TOLERANCE)


def decoder_steps(
    run: Run,
    program: nn.Module,
    model: nn.Module,
    memory: Memory,
    encoded: Mapping[str, Tensor],
) -> Iterator[tuple[Tensor, Tensor]]:
    """log_probs (B, K, V) of program and model at each step of a beam search by the model."""
    constants = {name: encoded[name] for name in program.constants}
    program_state, state = {name: encoded[name] for name in program.state}, model.start(memory)
    utterances = torch.arange(len(memory.valid)).unsqueeze(1)
    tokens, scores = torch.full_like(utterances, SOS), torch.zeros(len(utterances), 1)
    for _ in range(STEPS):
        log_probs, state = model.step(state, tokens)
        outputs = run(tokens=tokens, **constants, **program_state)
        yield outputs["log_probs"], log_probs
        K, V = log_probs.shape[1:]
        going = log_probs.index_fill(2, torch.tensor([*NEVER, EOS]), -torch.inf)
        scores, best = (scores.unsqueeze(2) + going).flatten(1).topk(BEAM)
        parents, tokens = best // V, best % V
        state = model.select(state, utterances * K + parents)
        program_state = {
            name: outputs[f"next_{name}"][utterances, parents] for name in program_state
        }
