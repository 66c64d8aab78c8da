"""Speech models as programs of torch.export, for any number of utterances and any length.

    features  waveform (S,) -> features (T, F) of one utterance
    encoder   features (B, T, F), lengths (B,) -> states (B, T', E), valid (B, T'), and of the
              decoder: what it reads of the utterances, and its state before SOS
    ctc       states (B, T', E) -> log_probs (B, T', V)
    decoder   tokens (B, K), constants, state -> log_probs (B, K, V) of the next token, next state

Every tensor of a decoder's state begins with (B, K): indexing by hypothesis selects hypotheses.

The programs are traced from a copy of the model, in which three kinds of modules are replaced by
ones that compute the same without a length fixed in Python: an LSTM layer becomes a loop of the
graph (ONNX: Scan) over steps of the backend `reference`, and tables of positions are computed.

Shapes: S samples, B utterances, K hypotheses of each, T frames of features, T' of memory, U tokens
so far, F features, E encoder size, L decoder layers, V vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan_op
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic_sizes
from torch.nn.functional import pad

from asr.data.tokenizer import SOS
from asr.features.fbank import KALDI_SCALE, POWER_FLOOR, Fbank, SlaneyMel
from asr.features.front_end import FrontEnd
from asr.kernels import dispatch
from asr.kernels.types import Weights
from asr.models.las import LAS, SpellerState
from asr.models.transformer import Transformer, TransformerState
from asr.nn.attention import AttentionState, Memory, valid_mask
from asr.nn.lstm import LayerNormLSTM, get_weights
from asr.nn.positions import RotaryPositions, SinusoidalPositions, rotate, rotations, sinusoids

# Modules that cannot be traced, and what replaces them ------------------------------------------


class ScannedLSTM(nn.Module):
    """One layer of LayerNormLSTM, as a loop that keeps the state at padded frames."""

    def __init__(self, lstm: LayerNormLSTM) -> None:
        super().__init__()
        assert lstm.num_layers == 1, f"a listener's LSTM has one layer, not {lstm.num_layers}"
        self.lstm = lstm

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, None]:
        """x (B, T, I), lengths (B,) -> output (B, T, D * H), zero in the padding; no states."""
        valid = valid_mask(lengths, x.size(1), x.device).unsqueeze(2)  # (B, T, 1)
        steps = x.transpose(0, 1), valid.transpose(0, 1)
        outputs = [self._direction(steps, "_l0")]
        if self.lstm.directions == 2:  # from the end: padding comes first and changes no state
            turned = self._direction(tuple(part.flip(0) for part in steps), "_l0_reverse")
            outputs.append(turned.flip(0))
        return torch.cat(outputs, dim=-1).transpose(0, 1), None

    def _direction(self, steps: tuple[Tensor, Tensor], suffix: str) -> Tensor:
        """x (T, B, I) and valid (T, B, 1) in the order of reading -> output (T, B, H)."""
        kernels = dispatch.Kernels("reference", self.lstm.settings)
        named = get_weights(self.lstm, suffix)._asdict()
        weights = {name: weight for name, weight in named.items() if weight is not None}
        missing = dict.fromkeys(named)

        def step(h: Tensor, c: Tensor, x: Tensor, valid: Tensor, *flat: Tensor) -> Sequence[Tensor]:
            cell = Weights(**(missing | dict(zip(weights, flat, strict=True))))
            after = kernels.step(x, (h, c), None, cell)
            kept = (torch.where(valid, *pair) for pair in zip(after, (h, c), strict=True))
            return *kept, torch.where(valid, after[0], 0.0)

        zeros = steps[0].new_zeros(steps[0].size(1), self.lstm.hidden_size)
        *_, output = scan_op(step, (zeros, zeros.clone()), steps, tuple(weights.values()))
        return output


class ComputedSinusoids(nn.Module):
    """SinusoidalPositions without its table."""

    def __init__(self, positions: SinusoidalPositions) -> None:
        super().__init__()
        self.size = positions.table.size(1)

    def forward(self, start: int, length: int) -> Tensor:
        """Encodings of the positions start .. start + length - 1: (length, E)."""
        return sinusoids(start, start + length, self.size)


class ComputedRotations(nn.Module):
    """RotaryPositions without its table."""

    def __init__(self, positions: RotaryPositions) -> None:
        super().__init__()
        self.size = 2 * positions.table.size(2)

    def forward(self, x: Tensor, start: int) -> Tensor:
        """x (B, H, T, D) at the positions start .. start + T - 1 -> the same shape."""
        return rotate(x, rotations(start, start + x.size(2), self.size))


REPLACED = {
    LayerNormLSTM: ScannedLSTM,
    SinusoidalPositions: ComputedSinusoids,
    RotaryPositions: ComputedRotations,
}


def traceable(model: nn.Module) -> nn.Module:
    """A copy on the CPU in float32, for evaluation; the model stays as it is."""
    model = copy.deepcopy(model).float().cpu().eval().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if replacement := REPLACED.get(type(child)):
                setattr(module, name, replacement(child))
            elif hasattr(child, "kernels"):
                child.kernels = dispatch.Kernels("reference", child.kernels.settings)
    return model


# The programs -----------------------------------------------------------------------------------

Tensors = tuple[Tensor, ...]


class LasDecoder(nn.Module):
    """A step of LAS; constants and state by name."""

    def __init__(self, model: LAS) -> None:
        super().__init__()
        self.model = model
        layers = range(len(model.speller.cells))
        cells = [f"{part}_{layer}" for layer in layers for part in ("hidden", "cell")]
        self.constants = ("states", "valid", "keys")
        self.state = (*cells, "context", "attention", "attention_sum")

    def start(self, memory: Memory) -> tuple[Tensors, Tensors]:
        """Constants, and the state before SOS with K = 1."""
        state = self.model.start(memory)
        return (*memory, state.constants.keys), self._flat(state)

    def forward(self, tokens: Tensor, constants: Tensors, state: Tensors) -> Tensors:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, next state."""
        states, valid, keys = constants
        *cells, context, weights, total = state
        flat = [part.flatten(0, 1) for part in cells]
        fixed = self.model.start(Memory(states, valid)).constants._replace(keys=keys)
        pairs = tuple(zip(flat[::2], flat[1::2], strict=True))
        before = SpellerState(fixed, pairs, context, AttentionState(weights, total))
        log_probs, after = self.model.step(before, tokens)
        return log_probs, *self._flat(after)

    def _flat(self, state: SpellerState) -> Tensors:
        sizes = state.context.shape[:2]
        cells = [part.unflatten(0, sizes) for pair in state.cells for part in pair]
        return *cells, state.context, *state.attended


class TransformerDecoder(nn.Module):
    """A step of Transformer or Conformer; constants and state by name."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        layers = range(len(model.decoder.layers))
        memory = [f"{part}_{layer}" for layer in layers for part in ("keys", "values")]
        self.constants = ("valid", *memory)
        self.state = ("past",)  # (B, K, U, L, 2, E): keys and values of the tokens read

    def start(self, memory: Memory) -> tuple[Tensors, Tensors]:
        """Constants, and the state before SOS with K = 1."""
        state = self.model.start(memory)
        pairs = [part for pair in state.memory for part in pair]
        return (state.valid, *pairs), (state.past.movedim(0, 1).unsqueeze(1),)

    def forward(self, tokens: Tensor, constants: Tensors, state: Tensors) -> Tensors:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, next state."""
        valid, *flat = constants
        past = state[0].flatten(0, 1).movedim(1, 0)  # (U, B * K, L, 2, E)
        rows = torch.arange(tokens.numel()).view_as(tokens)
        memory = list(zip(flat[::2], flat[1::2], strict=True))
        before = TransformerState(memory, valid, past, rows)
        log_probs, after = self.model.step(before, tokens)
        return log_probs, after.past.movedim(0, 1).unflatten(0, tokens.shape)


class Encoder(nn.Module):
    """The encoder with what its decoder computes once per utterance."""

    def __init__(self, decoder: LasDecoder | TransformerDecoder) -> None:
        super().__init__()
        self.decoder = decoder
        names = ("states", "valid", *decoder.constants, *decoder.state)
        self.outputs = tuple(dict.fromkeys(names))

    def forward(self, features: Tensor, lengths: Tensor) -> Tensors:
        """features (B, T, F), lengths (B,) of at least 1 -> the tensors that `outputs` names."""
        memory = self.decoder.model.encode(features, lengths)
        constants, state = self.decoder.start(memory)
        named = dict(zip(self.decoder.constants, constants, strict=True))
        named |= dict(zip(self.decoder.state, state, strict=True)) | memory._asdict()
        return tuple(named[name] for name in self.outputs)


class Features(nn.Module):
    """FrontEnd.features of log-mel without dither.

    The discrete Fourier transform is a product with its matrix, which every runtime has.
    """

    def __init__(self, front_end: FrontEnd) -> None:
        super().__init__()
        extract, self.norm = front_end.extract, front_end.norm
        assert type(extract) in (Fbank, SlaneyMel) and not extract.dither, extract
        self.is_kaldi, self.shift = isinstance(extract, Fbank), extract.shift
        hann = torch.hann_window(extract.window, periodic=not self.is_kaldi)
        self.window = hann**0.85 if self.is_kaldi else hann  # Povey's
        size = 2 * extract.filters.size(1) if self.is_kaldi else extract.window
        angles = 2 * torch.pi / size * torch.arange(size // 2 + 1, dtype=torch.float64)
        angles = torch.arange(extract.window).unsqueeze(1) * angles  # (window, size // 2 + 1)
        self.cosines, self.sines = angles.cos(), angles.sin()
        self.filters = pad(extract.filters, (0, 1)) if self.is_kaldi else extract.filters
        self.floor = torch.finfo(torch.float32).eps if self.is_kaldi else POWER_FLOOR

    def forward(self, waveform: Tensor) -> Tensor:
        """waveform (S,), at least one window, in [-1, 1] -> features (T, F), normalised."""
        frames = waveform.unfold(0, len(self.window), self.shift)  # (T, window)
        if self.is_kaldi:
            frames = frames * KALDI_SCALE
            frames = frames - frames.mean(1, keepdim=True)
            frames = frames - 0.97 * torch.cat((frames[:, :1], frames[:, :-1]), 1)
        frames = (frames * self.window).double()
        power = (frames @ self.cosines).square() + (frames @ self.sines).square()
        return self.norm((power.float() @ self.filters.T).clamp_min(self.floor).log())


class Ctc(nn.Module):
    """The CTC head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, states: Tensor) -> Tensor:
        """states (B, T', E) -> log-probabilities (B, T', V)."""
        return self.model.ctc(Memory(states, None))


class Program(NamedTuple):
    """A module, two tuples of arguments for it, and the names of its inputs and outputs.

    Where the sizes of the arguments differ, the traced program takes any size.
    """

    module: nn.Module
    first: tuple[Any, ...]
    second: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @torch.no_grad()
    def trace(self) -> ExportedProgram:
        """The program. It may assert two utterances, frames or hypotheses; its ONNX does not."""
        with symbolic_sizes.patch(backed_size_oblivious=True):
            return torch.export.export(
                self.module,
                self.first,
                dynamic_shapes=_free(self.first, self.second),
                prefer_deferred_runtime_asserts_over_guards=True,
            )


def _free(first: Any, second: Any) -> Any:
    """The dimensions in which arguments, or tuples of arguments, differ."""
    if isinstance(first, tuple):
        return tuple(_free(*pair) for pair in zip(first, second, strict=True))
    sizes = enumerate(zip(first.shape, second.shape, strict=True))
    return {axis: Dim.DYNAMIC for axis, (first, other) in sizes if first != other}


@torch.no_grad()
def speech_programs(model: nn.Module, front_end: FrontEnd) -> dict[str, Program]:
    """`features`, `encoder`, `decoder` and, with a CTC head, `ctc`."""
    model = traceable(model)
    decoder = LasDecoder(model) if isinstance(model, LAS) else TransformerDecoder(model)
    encoder = Encoder(decoder)
    first, second = (
        _examples(encoder, front_end, *sizes) for sizes in ((2, 41, 3, 5), (7, 67, 1, 4))
    )
    after = tuple(f"next_{name}" for name in decoder.state)
    parts = {
        "features": (Features(front_end), ("waveform",), ("features",)),
        "encoder": (encoder, ("features", "lengths"), encoder.outputs),
        "decoder": (
            decoder,
            ("tokens", *decoder.constants, *decoder.state),
            ("log_probs", *after),
        ),
    }
    if model.ctc_head is not None:
        parts["ctc"] = Ctc(model), ("states",), ("log_probs",)
    return {
        name: Program(module, first[name], second[name], *names)
        for name, (module, *names) in parts.items()
    }


def _examples(
    encoder: Encoder, front_end: FrontEnd, B: int, T: int, K: int, U: int
) -> dict[str, tuple[Any, ...]]:
    """Arguments of each program for these sizes."""
    decoder, extract = encoder.decoder, front_end.extract
    waveform = torch.rand(extract.window + (T - 1) * extract.shift)
    audio = torch.randn(B, T, front_end.size), torch.full((B,), T)
    memory = decoder.model.encode(*audio)
    constants, state = decoder.start(memory)
    for _ in range(U):
        _, *state = decoder(torch.full((B, 1), SOS), constants, tuple(state))
    state = tuple(part.expand(B, K, *part.shape[2:]).contiguous() for part in state)
    # Contiguous, else the strides would be further free sizes.
    step = torch.full((B, K), SOS), tuple(part.contiguous() for part in constants), state
    states = memory.states.contiguous()
    return {"features": (waveform,), "encoder": audio, "ctc": (states,), "decoder": step}
