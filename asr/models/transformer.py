"""The speech Transformer: an encoder over subsampled features, a decoder over tokens.

Vaswani et al. 2017 (arXiv:1706.03762), with strided convolutions in front of the encoder as in
Dong, Xu & Xu 2018. Both inputs are scaled by sqrt(E), get position encodings and dropout:

    encoder   dropout(sqrt(E) subsample(features) + positions) -> layers -> Memory
    decoder   dropout(sqrt(E) embed(tokens) + positions) -> layers -> logits

The encoder's output goes to every decoder layer. Where the norms sit: docs/normalization.md. A
Conformer (Gulati et al. 2020) has other encoder layers: asr/nn/conformer.py.
With `intermediate_ctc` some encoder layers predict CTC's symbols from N(x), with N the last norm of
the encoder: asr/nn/intermediate_ctc.py.

Shapes: B utterances, T frames (of the memory where there is one), F features, U tokens,
V vocabulary, E = d_model, K hypotheses per utterance, L decoder layers, H heads, D = E/H.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.config.schema import ConformerConfig, EncoderDecoderConfig, TransformerConfig
from asr.nn.attention import Memory, keeps_all, valid_mask
from asr.nn.conformer import ConformerLayer
from asr.nn.dropout import Dropout
from asr.nn.frontend import Frontend
from asr.nn.intermediate_ctc import IntermediateCTC, self_conditioning
from asr.nn.norm import WordEmbedding, at_least_float32
from asr.nn.positions import make_positions
from asr.nn.subsampling import ConvSubsampling
from asr.nn.transformer import (
    DecoderLayer,
    EncoderLayer,
    LayerScales,
    Stack,
    extend_past,
    layer_scales,
    make_stack,
)


class TransformerState(NamedTuple):
    """The state of a search over B utterances with K hypotheses each.

    memory: keys and values of each decoder layer, (B, H, T, D), once per utterance; valid (B, T).
    past (U, N, L, 2, E): keys and values of the U tokens read so far by N hypotheses; rows (B, K):
    which of the N each hypothesis continues. So selecting hypotheses copies nothing, and the next
    step copies the past once, in the new order and with room for one more token.
    """

    memory: list[tuple[Tensor, Tensor]]
    valid: Tensor
    past: Tensor
    rows: Tensor


class Transformer(nn.Module):
    """`features` F per frame, `vocabulary` V; one frame of memory for `reduction` input frames."""

    # Prefixes of the weights that are of the vocabulary.
    of_vocabulary = ("words.", "output.", "ctc_head.", "conditioning.")

    def __init__(
        self,
        features: int,
        vocabulary: int,
        config: EncoderDecoderConfig,
        frontend: Frontend | None = None,
    ) -> None:
        super().__init__()
        self.frontend = frontend
        features = frontend.size if frontend else features
        size, counts = config.d_model, (config.encoder_layers, config.decoder_layers)
        scales = layer_scales(config.residual_scale, config.norm_position, *counts)
        self.front = ConvSubsampling(features, size, config.reduction, config.subsampling_channels)
        self.frame_positions = make_positions(config.positions, size)
        self.encoder = self.make_encoder(config, scales[0])
        self.words = WordEmbedding(vocabulary, size, config.fixnorm)
        self.token_positions = make_positions(config.positions, size)
        self.decoder = make_stack(config, counts[1], scales[1], DecoderLayer)
        self.output = None if config.tied else nn.Linear(size, vocabulary)
        self.ctc_head = nn.Linear(size, vocabulary) if config.ctc_weight else None
        self.dropout = Dropout(config.dropout)
        self.intermediate_ctc = config.intermediate_ctc
        self.conditioning = self_conditioning(config.intermediate_ctc, vocabulary, size)

    @staticmethod
    def make_encoder(config: TransformerConfig, scales: LayerScales) -> Stack:
        """The encoder's layers."""
        norm = config.convolution_norm or config.norm
        extras = (config.encoder_windows, config.encoder_convolution, norm)
        return make_stack(config, config.encoder_layers, scales, EncoderLayer, *extras)

    def memory_lengths(self, lengths: Tensor) -> Tensor:
        """Frames of memory (B,) for that many frames of features (B,)."""
        if self.frontend is not None:
            lengths = self.frontend.output_lengths(lengths)
        return self.front.output_lengths(lengths)

    def encode(self, features: Tensor, lengths: Tensor) -> Memory:
        """features (B, T, F), lengths (B,) -> states (B, T', E), valid (B, T')."""
        return self.encode_with_intermediate_ctc(features, lengths)[0]

    def encode_with_intermediate_ctc(
        self, features: Tensor, lengths: Tensor
    ) -> tuple[Memory, list[Tensor]]:
        """As encode, and log-probabilities (B, T', V) of CTC's symbols by intermediate layers."""
        if self.frontend is not None:
            features, lengths = self.frontend(features, lengths)
        x, lengths = self.front(features, lengths)
        x = x.to(self.words.weight.dtype)  # the residual stream; autocast convolves in bf16
        valid = valid_mask(lengths, x.size(1), x.device)
        x = self.dropout(x * math.sqrt(x.size(-1)) + self.frame_positions(0, x.size(1)))
        x = self.encoder.first_norm(x)
        norm, head = self.encoder.last_norm, self.ctc_head
        ctc = IntermediateCTC(self.intermediate_ctc, lambda x: head(norm(x)), self.conditioning)
        for number, layer in self.encoder.passing():
            x = ctc(number, layer(x, valid[:, None, None]))
        return Memory(norm(x), valid), ctc.log_probs

    def ctc(self, memory: Memory) -> Tensor | None:
        """Log-probabilities (B, T, V) of CTC's symbols, or None without a head."""
        if self.ctc_head is None:
            return None
        return at_least_float32(self.ctc_head(memory.states)).log_softmax(-1)

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        """tokens (B, U), beginning with SOS -> logits (B, U, V) of the token after each."""
        x, valid = self._embed(tokens), memory.valid[:, None, None]
        for _, layer in self.decoder.passing():
            x, _ = layer(x, layer.cross_attention.project(memory.states), valid)
        return self._logits(x)

    def decode_and_attend(self, memory: Memory, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As decode, and weights (B, U, T) of the last layer's cross-attention, mean of heads.

        LayerDrop keeps that layer.
        """
        x, valid = self._embed(tokens), memory.valid[:, None, None]
        last = len(self.decoder.layers)
        layers = dict(self.decoder.passing()) | {last: self.decoder.layers[-1]}
        for number, layer in layers.items():
            keys = layer.cross_attention.project(memory.states)
            x, weights = layer(x, keys, valid, need_weights=number == last)
        return self._logits(x), weights

    @torch.no_grad()
    def start(self, memory: Memory) -> TransformerState:
        """One hypothesis per utterance, before SOS."""
        batch, _, size = memory.states.shape
        keys = [layer.cross_attention.project(memory.states) for layer in self.decoder.layers]
        past = memory.states.new_empty(0, batch, len(keys), 2, size)
        rows = torch.arange(batch, device=past.device).unsqueeze(1)
        return TransformerState(keys, memory.valid, past, rows)

    @torch.no_grad()
    def step(self, state: TransformerState, tokens: Tensor) -> tuple[Tensor, TransformerState]:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, next state."""
        past, valid = extend_past(state.past, state.rows), state.valid[:, None, None]
        x = self._embed(tokens, past.size(0) - 1)
        for i, layer in enumerate(self.decoder.layers):
            x = layer.step(x, past[:, :, i], state.memory[i], valid)
        rows = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        state = TransformerState(state.memory, state.valid, past, rows)
        return self._logits(x).log_softmax(-1), state

    def select(self, state: TransformerState, rows: Tensor) -> TransformerState:
        """Keep and reorder hypotheses: rows (B', K') number them b * K + k, a row per utterance."""
        memory, valid, past, before = state
        utterances = rows[:, 0] // before.size(1)
        if not keeps_all(utterances, len(valid)):
            memory = [(keys[utterances], values[utterances]) for keys, values in memory]
            valid = valid[utterances]
        return TransformerState(memory, valid, past, before.flatten()[rows])

    def _embed(self, tokens: Tensor, start: int | None = None) -> Tensor:
        """tokens (B, U) at the positions 0 .. U - 1, or all at the position `start`."""
        length = tokens.size(1) if start is None else 1
        x = self.dropout(self.words(tokens) + self.token_positions(start or 0, length))
        return self.decoder.first_norm(x)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.decoder.last_norm(x)
        return self.words.logits(x) if self.output is None else self.output(x)


class Conformer(Transformer):
    """A Transformer whose encoder has the Conformer's layers."""

    @staticmethod
    def make_encoder(config: ConformerConfig, scales: LayerScales) -> Stack:
        """The encoder's layers, the last of which ends with the norm of the stack."""
        stack = make_stack(config, config.encoder_layers, scales, ConformerLayer)
        stack.last_norm = nn.Identity()
        return stack
