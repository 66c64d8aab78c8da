"""LSTM with layer normalisation for the Listen-Attend-Spell encoder and decoder.

Ba, Kiros & Hinton 2016 (arXiv:1607.06450), equations 20 to 22, and the other places where a norm
can stand; kernels/reference.py has them side by side. norm="none" is nn.LSTM, whose parameter
names and layout all settings keep.

Padding is skipped, not computed and masked: a run over silence has no variance to divide by, and
each of its steps would multiply the gradient by 1 / sqrt(eps).

Legend: B utterances, T frames, I input size, H hidden size, D directions, L layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from asr.nn.dropout import Dropout, check_rate, draw_mask
from asr.nn.kernels import choice
from asr.nn.kernels.choice import backends
from asr.nn.kernels.problem import Batch
from asr.nn.lstm_cell import (
    LayerNormLSTMCell,
    State,
    add_weights,
    get_weights,
    make_setting,
)

__all__ = ["LayerNormLSTM", "LayerNormLSTMCell", "backends"]


class LayerNormLSTM(nn.Module):
    """Batch-first nn.LSTM with norm "none", "ba", "raw", "thesis", "per_gate" or "cell".

    dropout acts between layers, recurrent_dropout on the candidate g with one mask per sequence
    (Semeniuta et al. 2016). eps None takes the norm's own. zero_rows "guard" normalises a row
    without variance to zero and passes no gradient there; "raw" keeps the textbook formula.
    recurrent_gain is where norm "ba" starts the gain of the recurrent product.
    precision "bf16" takes the matrix products in bf16; under autocast they are anyway.
    Raises ValueError for a setting that does not exist.
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
        zero_rows: str = "guard",
        recurrent_gain: float = 1.0,
        backend: str = "auto",
        precision: str = "fp32",
    ) -> None:
        super().__init__()
        self.setting = make_setting(norm, eps, zero_rows, precision)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.directions = 2 if bidirectional else 1
        self.dropout = Dropout(dropout)
        self.recurrent_dropout = check_rate("recurrent_dropout", recurrent_dropout)
        self.backend = choice.check_name(backend)
        for layer in range(num_layers):
            size = input_size if layer == 0 else hidden_size * self.directions
            for suffix in self._suffixes(layer):
                add_weights(self, norm, size, hidden_size, recurrent_gain, suffix)

    def forward(
        self, x: Tensor, lengths: Tensor | Sequence[int] | None = None, state: State | None = None
    ) -> tuple[Tensor, State]:
        """x (B, T, I), lengths (B,) in frames, state (h, c) -> output (B, T, D * H), (h, c).

        Each state is (L * D, B, H), layer by layer, forward before backward; None is zeros.
        The returned one stands at each utterance's last frame (backward: its first). Padded
        outputs are zero, and nothing in the padding of x is read.
        Raises ValueError where a shape, length, dtype or device does not fit.
        """
        self._check_input(x)
        frames = None if lengths is None else check_lengths(lengths, x.shape[0], x.shape[1])
        h, c = self._initial(x) if state is None else self._check_state(state, x)
        ends = []
        for layer in range(self.num_layers):
            if layer > 0:
                x = self.dropout(x)
            now = slice(layer * self.directions, (layer + 1) * self.directions)
            mask = self._dropout_mask(x.shape[0])
            weights = [get_weights(self, self.setting.norm, s) for s in self._suffixes(layer)]
            batch = Batch(x, frames, h[now], c[now], mask)
            x, *end = choice.run_layer(self.backend, batch, weights, self.setting)
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
            weights = get_weights(self, self.setting.norm, f"_l{layer}")
            states.append(choice.run_step(self.backend, x, (h, c), None, weights, self.setting))
            x = states[-1][0]
        h, c = (torch.stack(parts) for parts in zip(*states, strict=True))
        return x, (h, c)

    def extra_repr(self) -> str:
        return (
            f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, "
            f"bidirectional={self.directions == 2}, norm={self.setting.norm!r}"
        )

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: self.directions]

    def _dropout_mask(self, batch_size: int) -> Tensor | None:
        if not self.training or self.recurrent_dropout == 0.0:
            return None
        shape = (self.directions, batch_size, self.hidden_size)
        return draw_mask(self.weight_hh_l0, shape, self.recurrent_dropout)

    def _state_shape(self, x: Tensor) -> tuple[int, int, int]:
        return self.num_layers * self.directions, x.shape[0], self.hidden_size

    def _initial(self, x: Tensor) -> State:
        zeros = self.weight_hh_l0.new_zeros(self._state_shape(x))
        return zeros, zeros

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != 3 or x.shape[2] != self.input_size or 0 in x.shape:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (B, T, {self.input_size})")
        choice.check_place("x", x, self.weight_hh_l0)

    def _check_state(self, state: State, x: Tensor) -> State:
        for name, part in zip("hc", state, strict=True):
            choice.check_shape(name, part, self._state_shape(x))
            choice.check_place(name, part, self.weight_hh_l0)
        return state


def check_lengths(lengths: Tensor | Sequence[int], B: int, T: int) -> list[int] | None:
    """Frame counts as a list, None where all are T.

    Raises ValueError naming the first that is below 1 or above T, or a wrong number of them.
    """
    counts = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if len(counts) != B:
        raise ValueError(f"{len(counts)} lengths for a batch of {B} utterances")
    for row, count in enumerate(counts):
        if not 1 <= count <= T:
            raise ValueError(f"length {count} of utterance {row} is not within 1 to {T} frames")
    return None if min(counts) == T else [int(count) for count in counts]
