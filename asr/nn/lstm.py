"""LSTM with layer normalisation for the Listen-Attend-Spell encoder and decoder.

Ba, Kiros & Hinton 2016 (arXiv:1607.06450), equations 20 to 22, and other positions of the norms;
asr/kernels/reference.py lists the equations of all settings. norm="none" is nn.LSTM, whose
parameter names and layout all settings keep.

Padding is skipped, not computed and masked: a run of silence has no variance to divide by, and
each of its steps would multiply the gradient by 1 / sqrt(eps).

Legend: B utterances, T frames, I input size, H hidden size, D directions, L layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from asr.config.schema import LSTMConfig, check_norms_fit
from asr.kernels import dispatch
from asr.kernels.deferred import DeferredWeight
from asr.kernels.dispatch import backends
from asr.kernels.types import (
    LayerInput,
    LSTMOptions,
    State,
    Weights,
    check_shape,
    make_setting,
    weight_shapes,
)
from asr.nn.dropout import Dropout, check_rate, draw_mask

__all__ = ["LayerNormLSTM", "LayerNormLSTMCell", "backends"]


def add_weights(
    module: nn.Module,
    setting: LSTMOptions,
    input_size: int,
    hidden_size: int,
    recurrent_gain: float,
    suffix: str = "",
) -> None:
    """Registers and initialises one direction's weights, named as in nn.LSTM."""
    for name, shape in weight_shapes(setting, input_size, hidden_size).items():
        module.register_parameter(name + suffix, nn.Parameter(torch.empty(shape)))
    reset_weights(get_weights(module, setting, suffix), recurrent_gain)


def lstm_options(config: LSTMConfig, normed: bool = True) -> dict[str, Any]:
    """The arguments of a LayerNormLSTM for norms and backend; without norms unless `normed`."""
    plain = {"norm": "none", "cell_norm": None, "hidden_norm": False, "norm_kind": "layer"}
    options = config.model_dump(include=set(LSTMConfig.model_fields))
    return options if normed else options | plain


def get_weights(module: nn.Module, setting: LSTMOptions, suffix: str = "") -> Weights:
    """The weights that add_weights registered."""
    names = weight_shapes(setting, 1, 1)
    return Weights(**{name: getattr(module, name + suffix) for name in names})


@torch.no_grad()
def reset_weights(weights: Weights, recurrent_gain: float) -> None:
    """Xavier W_x, orthogonal W_h (each per gate), gains 1, biases 0 except the forget gate's 1.

    A forget bias of 1 lets memory survive long utterances. As in nn.LSTM two biases are added; only
    one of them starts at 1. A norm gives W_h h the scale of the input from the first step on; with
    a recurrent_gain below 1 the recurrence starts weaker (Cooijmans et al. 2017, arXiv:1603.09025,
    for batch normalisation).
    """
    for block in weights.weight_ih.chunk(4):
        nn.init.xavier_uniform_(block)
    for block in weights.weight_hh.chunk(4):
        nn.init.orthogonal_(block)
    for name, weight in weights._asdict().items():
        if weight is not None and name.startswith(("bias", "gain")):
            weight.fill_(1.0 if name.startswith("gain") else 0.0)
    weights.bias_ih.chunk(4)[1].fill_(1.0)
    if weights.gain_hh is not None:
        weights.gain_hh.fill_(recurrent_gain)


def describe_norms(setting: LSTMOptions) -> str:
    """norm='ba', and what differs from what that fixes: cell_norm='state', norm_kind='rms'."""
    named = make_setting(setting.norm, None, "guard", "fp32", None, False, "layer")
    keys = ("cell_norm", "hidden_norm", "norm_kind")
    changed = [key for key in keys if getattr(setting, key) != getattr(named, key)]
    return ", ".join(f"{key}={getattr(setting, key)!r}" for key in ("norm", *changed))


class LayerNormLSTMCell(nn.Module):
    """nn.LSTMCell with layer normalisation, for decoders; options as for LayerNormLSTM."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        norm: str = "ba",
        *,
        recurrent_dropout: float = 0.0,
        eps: float | None = None,
        zero_variance: str = "guard",
        recurrent_gain: float = 1.0,
        precision: str = "fp32",
        backend: str = "auto",
        cell_norm: str | None = None,
        hidden_norm: bool = False,
        norm_kind: str = "layer",
    ) -> None:
        super().__init__()
        norms = cell_norm, hidden_norm, norm_kind
        self.setting = make_setting(norm, eps, zero_variance, precision, *norms)
        check_norms_fit(norm, *norms)
        self.input_size, self.hidden_size = input_size, hidden_size
        self.recurrent_dropout = check_rate("recurrent_dropout", recurrent_dropout)
        self.backend = dispatch.check_name(backend)
        add_weights(self, self.setting, input_size, hidden_size, recurrent_gain)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        weights: Weights | None = None,
    ) -> State:
        """x (B, I), state (h, c) each (B, H) or None for zeros -> the next (h, c).

        mask (B, H) comes from dropout_mask, weights from loop_weights, once per sequence.
        Raises ValueError where a shape, dtype or device does not fit.
        """
        if x.dim() != 2 or x.shape[1] != self.input_size:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, {self.input_size})")
        if state is None:
            zeros = x.new_zeros(x.shape[0], self.hidden_size, dtype=self.weight_hh.dtype)
            state = zeros, zeros
        weights = weights or get_weights(self, self.setting)
        return dispatch.run_step(self.backend, x, state, mask, weights, self.setting)

    def loop_weights(self) -> Weights:
        """The weights for one sequence of steps, with deferred weight gradients."""
        w = get_weights(self, self.setting)
        weight_ih, weight_hh = DeferredWeight(w.weight_ih), DeferredWeight(w.weight_hh)
        return w._replace(weight_ih=weight_ih, weight_hh=weight_hh)

    def dropout_mask(self, batch_size: int) -> Tensor | None:
        """A new recurrent-dropout mask (B, H) for one sequence; None where nothing is dropped."""
        rate = self.recurrent_dropout if self.training else 0.0
        return draw_mask(self.weight_hh, (batch_size, self.hidden_size), rate)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, {describe_norms(self.setting)}"


class LayerNormLSTM(nn.Module):
    """Batch-first nn.LSTM with norm "none", "ba", "raw", "thesis", "per_gate", "cell" or "joined".

    cell_norm, hidden_norm and norm_kind vary the norms of some of them (docs/normalization.md).
    dropout acts between layers, recurrent_dropout on the candidate g with one mask per sequence
    (Semeniuta et al. 2016). eps and cell_norm None are what the norm fixes (CELLS). zero_variance
    "guard" normalises a row without variance to zero and passes no gradient there; "raw" keeps the
    textbook formula. recurrent_gain is the initial gain of W_h h in norm "ba". precision "bf16"
    computes the matrix products in bf16; under autocast they always are.
    Raises ValueError for a setting that does not exist or does not fit the norm.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        norm: str = "ba",
        eps: float | None = None,
        zero_variance: str = "guard",
        recurrent_gain: float = 1.0,
        backend: str = "auto",
        precision: str = "fp32",
        cell_norm: str | None = None,
        hidden_norm: bool = False,
        norm_kind: str = "layer",
    ) -> None:
        super().__init__()
        norms = cell_norm, hidden_norm, norm_kind
        self.setting = make_setting(norm, eps, zero_variance, precision, *norms)
        check_norms_fit(norm, *norms)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.directions = 2 if bidirectional else 1
        self.dropout = Dropout(dropout)
        self.recurrent_dropout = check_rate("recurrent_dropout", recurrent_dropout)
        self.backend = dispatch.check_name(backend)
        for layer in range(num_layers):
            size = input_size if layer == 0 else hidden_size * self.directions
            for suffix in self._suffixes(layer):
                add_weights(self, self.setting, size, hidden_size, recurrent_gain, suffix)

    def forward(
        self, x: Tensor, lengths: Tensor | Sequence[int] | None = None, state: State | None = None
    ) -> tuple[Tensor, State]:
        """x (B, T, I), lengths (B,) in frames, state (h, c) -> output (B, T, D * H), (h, c).

        Each state is (L * D, B, H), layer by layer, forward before backward; None is zeros.
        The returned one is that of each utterance's last frame (backward: its first). Padded
        outputs are zero, and the padding of x is not read.
        Raises ValueError where a shape, length, dtype or device does not fit.
        """
        if x.dim() != 3 or x.shape[2] != self.input_size or 0 in x.shape:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, T, {self.input_size})")
        dispatch.check_place("x", x, self.weight_hh_l0)
        frames = None if lengths is None else check_lengths(lengths, x.shape[0], x.shape[1])
        h, c = self._initial_state(x.shape[0], state)
        ends = []
        for layer in range(self.num_layers):
            if layer > 0:
                x = self.dropout(x)
            now = slice(layer * self.directions, (layer + 1) * self.directions)
            mask = self._dropout_mask(x.shape[0])
            weights = [get_weights(self, self.setting, s) for s in self._suffixes(layer)]
            batch = LayerInput(x, frames, h[now], c[now], mask)
            x, *end = dispatch.run_layer(self.backend, batch, weights, self.setting)
            ends.append(end)
        h, c = (torch.cat(parts) for parts in zip(*ends, strict=True))
        return x, (h, c)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One more frame in one direction, for a search: no dropout, nothing transposed.

        x (N, I), state (h, c) each (L, N, H) -> output (N, H), next state.
        Raises ValueError where a shape, dtype or device does not fit.
        """
        assert self.directions == 1, "the backward direction needs the whole sequence"
        states = []
        for layer, (h, c) in enumerate(zip(*state, strict=True)):
            weights = get_weights(self, self.setting, f"_l{layer}")
            states.append(dispatch.run_step(self.backend, x, (h, c), None, weights, self.setting))
            x = states[-1][0]
        h, c = (torch.stack(parts) for parts in zip(*states, strict=True))
        return x, (h, c)

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, "
            f"bidirectional={self.directions == 2}, {describe_norms(self.setting)}"
        )

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: self.directions]

    def _dropout_mask(self, batch_size: int) -> Tensor | None:
        rate = self.recurrent_dropout if self.training else 0.0
        return draw_mask(self.weight_hh_l0, (self.directions, batch_size, self.hidden_size), rate)

    def _initial_state(self, batch_size: int, state: State | None) -> State:
        """The given state, checked, or zeros."""
        shape = self.num_layers * self.directions, batch_size, self.hidden_size
        if state is None:
            return (self.weight_hh_l0.new_zeros(shape),) * 2
        for name, part in zip("hc", state, strict=True):
            check_shape(name, part, shape)
            dispatch.check_place(name, part, self.weight_hh_l0)
        return state


def check_lengths(lengths: Tensor | Sequence[int], B: int, T: int) -> list[int] | None:
    """Frame counts as a list, None where all are T. ValueError unless there are B in 1 .. T."""
    counts = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if len(counts) != B:
        raise ValueError(f"{len(counts)} lengths for a batch of {B} utterances")
    for row, count in enumerate(counts):
        if not 1 <= count <= T:
            raise ValueError(f"length {count} of utterance {row} is not within 1 to {T} frames")
    return None if min(counts) == T else [int(count) for count in counts]
