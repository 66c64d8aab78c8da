"""LSTM with layer normalisation for the Listen-Attend-Spell encoder and decoder.

Ba, Kiros & Hinton 2016 (arXiv:1607.06450), equations 20 to 22, and other positions of the norms;
asr/kernels/reference.py lists the equations of all settings. norm="none" is nn.LSTM, whose
parameter names and layout all settings keep.

Padding is skipped, not computed and masked: a run of silence has no variance to divide by, and
each of its steps would multiply the gradient by 1 / sqrt(eps).

Legend: B utterances, T frames, I input size, H hidden size, D directions, L layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from asr.config.cell import CellSettings
from asr.kernels import dispatch
from asr.kernels.deferred import LoopMatrix
from asr.kernels.dispatch import backends
from asr.kernels.types import (
    LayerInput,
    State,
    Weights,
    check_lengths,
    check_shape,
    weight_shapes,
)
from asr.nn.dropout import Dropout, check_rate, draw_mask

__all__ = ["LayerNormLSTM", "LayerNormLSTMCell", "backends"]


def add_weights(
    module: nn.Module,
    settings: CellSettings,
    sizes: tuple[int, int],
    suffix: str = "",
    bias: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Registers one direction's weights, named as in nn.LSTM. sizes: I and H."""
    for name, shape in weight_shapes(settings, *sizes).items():
        if bias or name not in ("bias_ih", "bias_hh"):
            weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            module.register_parameter(name + suffix, weight)


def get_weights(module: nn.Module, suffix: str = "") -> Weights:
    """The weights that add_weights registered, zeros for biases that do not exist."""
    found = {name: getattr(module, name + suffix, None) for name in Weights._fields}
    if found["bias_ih"] is None:
        zeros = found["weight_hh"].new_zeros(found["weight_hh"].shape[0])
        found |= {"bias_ih": zeros, "bias_hh": zeros}
    return Weights(**found)


@torch.no_grad()
def reset_weights(module: nn.Module, recurrent_gain: float, suffix: str = "") -> None:
    """Xavier W_x, orthogonal W_h (each per gate), gains 1, biases 0 except the forget gate's 1.

    A forget bias of 1 lets memory survive long utterances. As in nn.LSTM two biases are added; only
    one of them starts at 1. A norm gives W_h h the scale of the input from the first step on; with
    a recurrent_gain below 1 the recurrence starts weaker (Cooijmans et al. 2017, arXiv:1603.09025,
    for batch normalisation).
    """
    weights = get_weights(module, suffix)
    for block in weights.weight_ih.chunk(4):
        nn.init.xavier_uniform_(block)
    for block in weights.weight_hh.chunk(4):
        exact = torch.promote_types(block.dtype, torch.float32)  # no QR in half precision
        block.copy_(nn.init.orthogonal_(torch.empty_like(block, dtype=exact)))
    for name, weight in weights._asdict().items():
        if weight is not None and name.startswith(("bias", "gain")):
            weight.fill_(1.0 if name.startswith("gain") else 0.0)
    weights.bias_ih.chunk(4)[1].fill_(1.0)
    if weights.gain_hh is not None:
        weights.gain_hh.fill_(recurrent_gain)
    for name, weight in weights._asdict().items():
        if parametrize.is_parametrized(module, name + suffix):  # `weight` was computed
            setattr(module, name + suffix, weight)


class LayerNormLSTMCell(nn.Module):
    """nn.LSTMCell with layer normalisation, for decoders; norms and options as for LayerNormLSTM.

    Arguments, names of weights and forms of input are those of nn.LSTMCell; only the initial values
    of the weights differ (reset_weights).
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str | CellSettings = "ba",
        recurrent_dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if not isinstance(bias, bool):
            raise ValueError(f"bias is {bias!r}; it must be True or False, and norm={bias!r} named")
        self.settings = norm if isinstance(norm, CellSettings) else CellSettings(norm)
        self.input_size, self.hidden_size, self.bias = input_size, hidden_size, bias
        self.recurrent_dropout = check_rate("recurrent_dropout", recurrent_dropout)
        self.kernels = dispatch.Kernels(backend, self.settings)
        sizes = input_size, hidden_size
        add_weights(self, self.settings, sizes, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises all weights anew (reset_weights)."""
        reset_weights(self, self.settings.recurrent_gain)

    def forward(
        self,
        input: Tensor,
        hx: State | None = None,
        mask: Tensor | None = None,
        weights: Weights | None = None,
    ) -> State:
        """input (B, I), hx (h, c) each (B, H) or None for zeros -> the next (h, c).

        A single input (I,) has states (H,). mask (B, H) comes from dropout_mask, weights from
        loop_weights, once per sequence.
        Raises ValueError where a shape, dtype or device does not fit.
        """
        if input.dim() not in (1, 2) or input.shape[-1] != self.input_size:
            expected = f"(B, {self.input_size}) or ({self.input_size},)"
            raise ValueError(f"input has shape {tuple(input.shape)}; expected {expected}")
        if input.dim() == 1:
            hx = None if hx is None else (hx[0].unsqueeze(0), hx[1].unsqueeze(0))
            h, c = self.forward(input.unsqueeze(0), hx, mask, weights)
            return h.squeeze(0), c.squeeze(0)
        if hx is None:
            zeros = input.new_zeros(len(input), self.hidden_size, dtype=self.weight_hh.dtype)
            hx = zeros, zeros
        weights = weights or get_weights(self)
        return self.kernels.step(input, hx, mask, weights)

    def loop_weights(self) -> Weights:
        """The weights for one sequence of steps, with deferred weight gradients."""
        w = get_weights(self)
        weight_ih, weight_hh = LoopMatrix(w.weight_ih), LoopMatrix(w.weight_hh)
        return w._replace(weight_ih=weight_ih, weight_hh=weight_hh)

    def dropout_mask(self, batch_size: int) -> Tensor | None:
        """A new recurrent-dropout mask (B, H) for one sequence; None where nothing is dropped."""
        rate = self.recurrent_dropout if self.training else 0.0
        return draw_mask(self.weight_hh, (batch_size, self.hidden_size), rate)

    def extra_repr(self) -> str:
        bias = "" if self.bias else "bias=False, "
        return f"{self.input_size}, {self.hidden_size}, {bias}{self.settings}"


class Sequences(NamedTuple):
    """The arguments of LayerNormLSTM.forward, checked and in one layout."""

    x: Tensor  # (B, T, I)
    lengths: list[int] | Tensor | None  # (B,) frames, None where all are T
    h: Tensor  # (L * D, B, H)  the initial state
    c: Tensor  # (L * D, B, H)


class LayerNormLSTM(nn.Module):
    """nn.LSTM with layer normalisation.

    Arguments, attributes, names of weights and forms of input are those of nn.LSTM, without
    proj_size; only the initial values of the weights differ (reset_weights), and dropout 1.

    norm: "none", "ba", "raw", "thesis", "per_gate", "cell", "joined", or CellSettings, which vary
    them (docs/normalization.md). dropout acts between layers, recurrent_dropout on the candidate g
    with one mask per sequence (Semeniuta et al. 2016). Under torch.autocast in bf16 the matrix
    products are bf16, all else is float32.
    Raises ValueError for a norm or backend that does not exist.
    """

    mode = "LSTM"  # code for nn.RNNBase asks for it

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        norm: str | CellSettings = "ba",
        recurrent_dropout: float = 0.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.settings = norm if isinstance(norm, CellSettings) else CellSettings(norm)
        _check_sizes(input_size, hidden_size, num_layers, proj_size)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.proj_size = bias, batch_first, proj_size
        self.bidirectional, self.directions = bidirectional, 2 if bidirectional else 1
        self.between_layers = Dropout(dropout)
        self.recurrent_dropout = check_rate("recurrent_dropout", recurrent_dropout)
        self.kernels = dispatch.Kernels(backend, self.settings)
        for layer in range(num_layers):
            sizes = input_size if layer == 0 else hidden_size * self.directions, hidden_size
            for suffix in self._suffixes(layer):
                add_weights(self, self.settings, sizes, suffix, bias, device, dtype)
        self.reset_parameters()

    @property
    def dropout(self) -> float:
        """The rate between layers; a new one acts from the next call on."""
        return self.between_layers.rate

    @dropout.setter
    def dropout(self, rate: float) -> None:
        self.between_layers.rate = check_rate("dropout", rate)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The weights of each layer and direction, nn.LSTM's first, then those of the norms."""
        names = [name for name in weight_shapes(self.settings, 1, 1) if hasattr(self, f"{name}_l0")]
        return [
            [getattr(self, name + suffix) for name in names]
            for layer in range(self.num_layers)
            for suffix in self._suffixes(layer)
        ]

    def reset_parameters(self) -> None:
        """Initialises all weights anew (reset_weights)."""
        for layer in range(self.num_layers):
            for suffix in self._suffixes(layer):
                reset_weights(self, self.settings.recurrent_gain, suffix)

    def flatten_parameters(self) -> None:
        """Does nothing: nn.LSTM arranges its weights for cuDNN here."""

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Tensor | PackedSequence, State]:
        """input (T, B, I), with batch_first (B, T, I) -> output (T, B, D * H) or (B, T, D * H), and
        the state (h, c), (L * D, B, H) each, layer by layer, forward before backward.

        hx is the initial state, None for zeros. A single sequence (T, I) has states (L * D, H); a
        PackedSequence returns one. With lengths (B,) in frames, shorter utterances are padded:
        padding is not read, its outputs are zero, and the state returned is that of each
        utterance's last frame (backward: its first), as for a PackedSequence.
        Raises ValueError where a shape, length, dtype or device does not fit.
        """
        x, frames, h, c = self.read(input, hx, lengths)
        ends = []
        for layer in range(self.num_layers):
            if layer > 0:
                x = self.between_layers(x)
            now = slice(layer * self.directions, (layer + 1) * self.directions)
            mask = self._dropout_mask(x.shape[0])
            weights = [get_weights(self, s) for s in self._suffixes(layer)]
            batch = LayerInput(x, frames, h[now], c[now], mask)
            x, *end = self.kernels.layer(batch, weights)
            ends.append(end)
        h, c = (torch.cat(parts) for parts in zip(*ends, strict=True))
        return self._as_given(input, Sequences(x, frames, h, c))

    def read(
        self,
        input: Tensor | PackedSequence,
        hx: State | None = None,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> Sequences:
        """The arguments of forward in the layout of the kernels. Raises ValueError as forward."""
        if isinstance(input, PackedSequence):
            return self._read_packed(input, hx, lengths)
        single = input.dim() == 2
        x = input.unsqueeze(0) if single else input
        if input.dim() == 3 and not self.batch_first:
            x = input.transpose(0, 1)
        if x.dim() != 3 or x.shape[2] != self.input_size or x.shape[1] == 0:
            form = f"B, T, {self.input_size}" if self.batch_first else f"T, B, {self.input_size}"
            single_form = f"(T, {self.input_size}) for a single sequence"
            raise ValueError(
                f"input has shape {tuple(input.shape)}; expected ({form}), or {single_form}, "
                "of at least one frame"
            )
        if single and lengths is not None:
            raise ValueError("lengths belong to a batch, and the input is a single sequence")
        dispatch.check_device_and_dtype("input", x, self.weight_hh_l0)
        h, c = self._initial_state(() if single else (x.shape[0],), hx, x)
        if single:
            h, c = h.unsqueeze(1), c.unsqueeze(1)
        return Sequences(x, self._frames(x, lengths), h, c)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """One more frame in one direction, for a search: no dropout, nothing transposed.

        x (N, I), state (h, c) each (L, N, H) -> output (N, H), next state.
        Raises ValueError where a shape, dtype or device does not fit.
        """
        assert self.directions == 1, "the backward direction needs the whole sequence"
        states = []
        for layer, (h, c) in enumerate(zip(*state, strict=True)):
            weights = get_weights(self, f"_l{layer}")
            states.append(self.kernels.step(x, (h, c), None, weights))
            x = states[-1][0]
        h, c = (torch.stack(parts) for parts in zip(*states, strict=True))
        return x, (h, c)

    def extra_repr(self) -> str:
        defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0}
        defaults |= {"bidirectional": False}
        changed = [f"{k}={getattr(self, k)}" for k, v in defaults.items() if getattr(self, k) != v]
        sizes = f"{self.input_size}, {self.hidden_size}"
        return ", ".join((sizes, *changed, str(self.settings)))

    def _suffixes(self, layer: int) -> list[str]:
        return [f"_l{layer}", f"_l{layer}_reverse"][: self.directions]

    def _dropout_mask(self, batch_size: int) -> Tensor | None:
        rate = self.recurrent_dropout if self.training else 0.0
        return draw_mask(self.weight_hh_l0, (self.directions, batch_size, self.hidden_size), rate)

    def _read_packed(
        self,
        input: PackedSequence,
        hx: State | None,
        lengths: Tensor | Sequence[int] | None,
    ) -> Sequences:
        """In the order of the packed data, the longest first."""
        if lengths is not None:
            raise ValueError("a PackedSequence has its own lengths; lengths must be None")
        if input.data.dim() != 2 or input.data.shape[1] != self.input_size:
            shape = tuple(input.data.shape)
            raise ValueError(f"packed data have shape {shape}; expected (N, {self.input_size})")
        dispatch.check_device_and_dtype("input", input.data, self.weight_hh_l0)
        in_order = PackedSequence(input.data, input.batch_sizes)
        x, counts = pad_packed_sequence(in_order, batch_first=True)
        h, c = self._initial_state((x.shape[0],), hx, x)
        if hx is not None and input.sorted_indices is not None:
            h, c = (part.index_select(1, input.sorted_indices) for part in (h, c))
        return Sequences(x, self._frames(x, counts), h, c)

    def _frames(
        self, x: Tensor, lengths: Tensor | Sequence[int] | None
    ) -> list[int] | Tensor | None:
        """The lengths, checked; a tensor in a graph that torch records, which has no values."""
        if lengths is None:
            return None
        if isinstance(lengths, Tensor) and dispatch.is_traced(x, self.weight_hh_l0, lengths):
            return lengths
        counts = check_lengths(lengths, x.shape[0], x.shape[1])
        if counts is not None and dispatch.is_traced(x, self.weight_hh_l0):
            return torch.tensor(counts, device=x.device)
        return counts

    def _as_given(
        self, input: Tensor | PackedSequence, result: Sequences
    ) -> tuple[Tensor | PackedSequence, State]:
        """Output and state in the form of the input."""
        output, lengths, h, c = result
        if isinstance(input, PackedSequence):
            counts = [output.shape[1]] * output.shape[0] if lengths is None else lengths
            data = pack_padded_sequence(output, counts, batch_first=True).data
            output = PackedSequence(
                data, input.batch_sizes, input.sorted_indices, input.unsorted_indices
            )
            if input.unsorted_indices is not None:
                h, c = (part.index_select(1, input.unsorted_indices) for part in (h, c))
        elif input.dim() == 2:
            output, h, c = output.squeeze(0), h.squeeze(1), c.squeeze(1)
        elif not self.batch_first:
            output = output.transpose(0, 1).contiguous()
        return output, (h, c)

    def _initial_state(self, batch: tuple[int, ...], hx: State | None, x: Tensor) -> State:
        """The state, checked, or zeros: (L * D, *batch, H)."""
        shape = self.num_layers * self.directions, *batch, self.hidden_size
        weight = self.weight_hh_l0
        if hx is None:
            # From x, so that a graph has the batch size and a transform its level.
            return (x.new_zeros(shape, dtype=weight.dtype),) * 2
        if isinstance(hx, Tensor) or len(hx) != 2:
            raise ValueError("hx is not a pair (h, c) of tensors")
        for name, part in zip("hc", hx, strict=True):
            check_shape(name, part, shape)
            dispatch.check_device_and_dtype(name, part, weight)
        return tuple(hx)

    def __prepare_scriptable__(self) -> nn.Module:
        raise TypeError(
            "torch.jit.script cannot compile LayerNormLSTM; use torch.jit.trace, torch.export or "
            "torch.compile"
        )


def _check_sizes(input_size: int, hidden_size: int, num_layers: int, proj_size: int) -> None:
    sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_layers": num_layers}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if proj_size != 0:
        raise ValueError(
            f"proj_size is {proj_size}; LayerNormLSTM has no projection: leave it 0 and apply an "
            "nn.Linear to the output"
        )
