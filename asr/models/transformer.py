"""The speech Transformer: an encoder over subsampled features, a decoder over tokens.

Vaswani et al. 2017 (arXiv:1706.03762), with strided convolutions in front of the encoder as in
Dong, Xu & Xu 2018. Both inputs are scaled by sqrt(E), given positions, and dropped out:

    encoder   dropout(sqrt(E) subsample(features) + positions) -> layers -> Memory
    decoder   dropout(sqrt(E) embed(tokens) + positions) -> layers -> logits

The encoder's output goes to every decoder layer. Where the norms sit: docs/normalization.md.

Shapes: B utterances, T frames (of the memory where there is one), F features, U tokens,
V vocabulary, E = d_model, K hypotheses per utterance, L decoder layers, H heads, D = E/H.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asr.nn.drop import DropHead
from asr.nn.dropout import Dropout
from asr.nn.fixnorm import WordEmbedding
from asr.nn.masks import valid_places
from asr.nn.memory import Memory
from asr.nn.multihead import KeyValue
from asr.nn.positions import make_positions
from asr.nn.residual import per_stack, residual_scales
from asr.nn.subsampling import ConvSubsampling
from asr.nn.transformer_layers import LayerSettings, Stack


class Transformer(nn.Module):
    """Sizes: `features` F, `vocabulary` V; one frame of the memory stands for `reduction` frames.

    `residual_scale`: a number, one per stack, or `deepnet` (asr/nn/residual.py); `layer_drop`: a
    rate, or one per stack; `tied`: the word embedding is also the output layer, without a bias;
    `fixnorm`: its rows have length 1; `positions`: sinusoidal | learned, the latter for at most
    max_positions; `ctc`: with a CTC head on the encoder. `layer`: see LayerSettings.
    Raises ValueError, one line, for a setting that cannot be.
    """

    def __init__(
        self,
        features: int,
        vocabulary: int,
        d_model: int = 256,
        encoder_layers: int = 12,
        decoder_layers: int = 6,
        reduction: int = 4,
        subsampling_channels: int = 32,
        residual_scale: float | str | Mapping[str, float] = 1.0,
        layer_drop: float | Mapping[str, float] = 0.0,
        fixnorm: bool = False,
        tied: bool = False,
        positions: str = "sinusoidal",
        max_positions: int = 5000,
        ctc: bool = True,
        **layer: Any,
    ) -> None:
        super().__init__()
        if min(encoder_layers, decoder_layers) < 1:
            raise ValueError(f"{encoder_layers} + {decoder_layers} layers: each stack needs one")
        settings = LayerSettings(**layer)  # refuses a name it does not have
        scales = residual_scales(residual_scale, encoder_layers, decoder_layers)
        drops = per_stack("layer_drop", layer_drop)
        self.front = ConvSubsampling(features, d_model, reduction, subsampling_channels)
        self.frame_positions = make_positions(positions, d_model, max_positions)
        self.encoder = settings.encoder(d_model, encoder_layers, scales[0], drops[0])
        self.words = WordEmbedding(vocabulary, d_model, fixnorm)
        self.token_positions = make_positions(positions, d_model, max_positions)
        self.decoder = settings.decoder(d_model, decoder_layers, scales[1], drops[1])
        self.output = None if tied else nn.Linear(d_model, vocabulary)
        self.ctc_head = nn.Linear(d_model, vocabulary) if ctc else None
        self.dropout = Dropout(settings.dropout)

    def set_step(self, step: int) -> None:
        """Tells DropHead and LayerDrop the training step, counted from 0; call it before each."""
        for module in self.modules():
            if isinstance(module, DropHead | Stack):
                module.set_step(step)

    def memory_lengths(self, lengths: Tensor) -> Tensor:
        """Lengths (B,) of the memory of utterances of `lengths` frames (B,); exact."""
        return self.front.output_lengths(lengths)

    def encode(self, features: Tensor, lengths: Tensor) -> Memory:
        """features (B, T, F), lengths (B,) -> states (B, T', E), valid (B, T')."""
        x, lengths = self.front(features, lengths)
        valid = valid_places(lengths, x.size(1))
        x = self.dropout(x * math.sqrt(x.size(-1)) + self.frame_positions(0, x.size(1)))
        for layer in self.encoder.passing():
            x = layer(x, valid[:, None, None])
        return Memory(self.encoder.last_norm(x), valid)

    def ctc(self, memory: Memory) -> Tensor | None:
        """Log-probabilities (B, T, V) of CTC's symbols, or None without a head."""
        return None if self.ctc_head is None else self.ctc_head(memory.states).log_softmax(-1)

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        """tokens (B, U), beginning with SOS -> logits (B, U, V) of the token after each."""
        x, valid = self._embed(tokens), memory.valid[:, None, None]
        for layer in self.decoder.passing():
            x, _ = layer(x, layer.cross_attention.project(memory.states), valid)
        return self._logits(x)

    def attention(self, memory: Memory, tokens: Tensor) -> Tensor:
        """tokens (B, U) -> weights (B, U, T) of the last layer's cross-attention, mean over heads.

        Each row sums to 1 over the valid frames.
        """
        return self.decode_and_attend(memory, tokens)[1]

    def decode_and_attend(self, memory: Memory, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What decode and attention give, in one pass; no decoder layer is dropped."""
        x, valid = self._embed(tokens), memory.valid[:, None, None]
        for layer in self.decoder.layers:
            keys = layer.cross_attention.project(memory.states)
            x, weights = layer(x, keys, valid, need_weights=layer is self.decoder.layers[-1])
        return self._logits(x), weights

    @torch.no_grad()
    def start(self, memory: Memory) -> "TransformerState":
        """One hypothesis per utterance, before SOS."""
        batch, size = len(memory.states), memory.states.size(-1)
        keys = [layer.cross_attention.project(memory.states) for layer in self.decoder.layers]
        past = memory.states.new_empty(0, batch, len(keys), 2, size)
        rows = torch.arange(batch, device=past.device).unsqueeze(1)
        return TransformerState(keys, memory.valid, past, rows, None)

    @torch.no_grad()
    def step(self, state: "TransformerState", tokens: Tensor) -> tuple[Tensor, "TransformerState"]:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, and the state after them.

        For search, so without gradients; `state` itself stays as it was.
        """
        past, valid = state.room_for_one(), state.valid[:, None, None]
        x = self._embed(tokens, len(past) - 1)
        for i, layer in enumerate(self.decoder.layers):
            last = i == len(self.decoder.layers) - 1
            x, weights = layer.step(x, past[:, :, i], state.memory[i], valid, need_weights=last)
        rows = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        state = TransformerState(state.memory, state.valid, past, rows, weights)
        return self._logits(x).log_softmax(-1), state

    def select(self, state: "TransformerState", rows: Tensor) -> "TransformerState":
        """Goes on with the hypotheses `rows` (B', K'), numbered b * K + k; see TransformerState."""
        return state.select(rows)

    def _embed(self, tokens: Tensor, start: int | None = None) -> Tensor:
        """tokens (B, U) at the places 0 .. U - 1, or all at the place `start`."""
        length = tokens.size(1) if start is None else 1
        return self.dropout(self.words(tokens) + self.token_positions(start or 0, length))

    def _logits(self, x: Tensor) -> Tensor:
        x = self.decoder.last_norm(x)
        return self.words.logits(x) if self.output is None else self.output(x)


class TransformerState(NamedTuple):
    """Where search stands, with B utterances of K hypotheses each.

    memory: keys and values of each decoder layer, (B, H, T, D), once per utterance; valid (B, T).
    past (U, N, L, 2, E): keys and values of the U tokens read so far by N hypotheses; rows (B, K)
    says which of the N each hypothesis goes on from. So choosing hypotheses moves nothing, and the
    next step copies the past once, in the new order and with room for one more token.
    attention (B, K, T): the last step's, None before the first.
    """

    memory: list[KeyValue]
    valid: Tensor
    past: Tensor
    rows: Tensor
    attention: Tensor | None

    def room_for_one(self) -> Tensor:
        """The past of the B*K hypotheses, and an unwritten place for one more token."""
        length, _, *rest = self.past.shape
        past = self.past.new_empty(length + 1, self.rows.numel(), *rest)
        torch.index_select(self.past, 1, self.rows.flatten(), out=past[:length])
        return past

    def select(self, rows: Tensor) -> "TransformerState":
        """rows (B', K'): old hypotheses b * K + k, those of one line from one utterance."""
        utterances = rows[:, 0] // self.rows.size(1)
        memory, valid = self.memory, self.valid
        if not torch.equal(utterances, torch.arange(len(valid), device=rows.device)):
            memory = [(keys[utterances], values[utterances]) for keys, values in memory]
            valid = valid[utterances]
        attention = None if self.attention is None else self.attention.flatten(0, 1)[rows]
        return TransformerState(memory, valid, self.past, self.rows.flatten()[rows], attention)
