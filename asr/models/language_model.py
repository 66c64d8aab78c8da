"""Language models over the tokens of a vocabulary: a LayerNorm-LSTM and a Transformer.

    LSTM          embed -> LayerNormLSTM layers -> (project) -> output
    Transformer   embed + positions -> causal self-attention layers -> norm (pre) -> output

The Transformer is a decoder without an encoder (Radford et al. 2018): the layers of an encoder
(asr/nn/transformer.py) with causal attention. Tied output: Press & Wolf 2017; Inan et al. 2017.

`start`, `step` and `select` are those of a Scorer (asr/decoding/scorer.py): a beam search can add
their scores to a speech model's. Padding follows a sentence and changes nothing before it.

Shapes: B utterances, K hypotheses of each, U tokens, V vocabulary, E embedding, H hidden, L layers.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.config.language import LSTMLanguageModelConfig, TransformerLanguageModelConfig
from asr.nn.attention import Memory
from asr.nn.dropout import Dropout
from asr.nn.lstm import LayerNormLSTM
from asr.nn.norm import WordEmbedding
from asr.nn.positions import make_positions
from asr.nn.transformer import EncoderLayer, LayerScales, extend_past, make_stack


class LSTMState(NamedTuple):
    """h and c of every layer, (L, B * K, H) each."""

    h: Tensor
    c: Tensor


class LSTMLanguageModel(nn.Module):
    """A tied output layer follows a projection where `hidden` and `embedding` differ."""

    def __init__(self, vocabulary: int, config: LSTMLanguageModelConfig) -> None:
        super().__init__()
        hidden, embedding, tied = config.hidden, config.embedding, config.tied
        self.dropout = Dropout(config.dropout)
        self.embedding = nn.Embedding(vocabulary, embedding)
        nn.init.normal_(self.embedding.weight, std=embedding**-0.5 if tied else 1.0)
        self.lstm = LayerNormLSTM(
            embedding,
            hidden,
            config.layers,
            batch_first=True,
            dropout=config.dropout,
            norm=config.settings,
            recurrent_dropout=config.recurrent_dropout,
            backend=config.backend,
        )
        projects = tied and hidden != embedding
        self.project = nn.Linear(hidden, embedding) if projects else nn.Identity()
        self.out = nn.Linear(embedding if tied else hidden, vocabulary)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, U) from <sos> on -> logits (B, U, V) of the token after each."""
        outputs, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self._logits(outputs)

    @torch.no_grad()
    def start(self, memory: Memory) -> LSTMState:
        """One hypothesis per utterance, before <sos>; of the memory only the size is used."""
        layers, size = self.lstm.num_layers, self.lstm.hidden_size
        zeros = self.out.weight.new_zeros(layers, len(memory.valid), size)
        return LSTMState(zeros, zeros)

    @torch.no_grad()
    def step(self, state: LSTMState, tokens: Tensor) -> tuple[Tensor, LSTMState]:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, next state."""
        embedded = self.embedding(tokens.flatten())  # (B * K, E)
        output, (h, c) = self.lstm.step(embedded, state)
        logits = self._logits(output).unflatten(0, tokens.shape)
        return logits.log_softmax(-1), LSTMState(h, c)

    def select(self, state: LSTMState, rows: Tensor) -> LSTMState:
        """Keep and reorder hypotheses: rows (B', K') number them b * K + k."""
        flat = rows.flatten()
        return LSTMState(state.h[:, flat], state.c[:, flat])

    def _logits(self, outputs: Tensor) -> Tensor:
        return self.out(self.project(self.dropout(outputs)))


class CausalState(NamedTuple):
    """past (U, N, L, 2, E): keys and values of the U tokens that N hypotheses have read; rows
    (B, K): which of the N each hypothesis continues, so that selecting copies nothing.
    """

    past: Tensor
    rows: Tensor


class TransformerLanguageModel(nn.Module):
    """A decoder alone.

    residual_scale `deepnet`: Wang et al. 2022, arXiv:2203.00555, figure 2. The gains of
    norm_position `sub`: Wang et al. 2022, arXiv:2210.06423, figure 2.
    """

    def __init__(self, vocabulary: int, config: TransformerLanguageModelConfig) -> None:
        super().__init__()
        size, layers = config.d_model, config.layers
        if config.residual_scale == "deepnet":
            scales = LayerScales((2 * layers) ** 0.25, (8 * layers) ** -0.25)
        else:
            gain = math.sqrt(math.log(2 * layers)) if config.norm_position == "sub" else 1.0
            scales = LayerScales(config.residual_scale, gain)
        self.words = WordEmbedding(vocabulary, size, config.fixnorm)
        self.positions = make_positions(config.positions, size)
        extras = (None, None, config.norm)
        self.stack = make_stack(config, layers, scales, EncoderLayer, *extras)
        self.output = None if config.tied else nn.Linear(size, vocabulary)
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, U) from <sos> on -> logits (B, U, V) of the token after each."""
        x = self.dropout(self.words(tokens) + self.positions(0, tokens.size(1)))
        x = self.stack.first_norm(x)
        for _, layer in self.stack.passing():
            x = layer(x, valid=None, causal=True)
        return self._logits(x)

    @torch.no_grad()
    def start(self, memory: Memory) -> CausalState:
        """One hypothesis per utterance, before <sos>; of the memory only the size is used."""
        batch, size = len(memory.valid), self.words.weight.size(1)
        past = self.words.weight.new_empty(0, batch, len(self.stack.layers), 2, size)
        return CausalState(past, torch.arange(batch, device=past.device).unsqueeze(1))

    @torch.no_grad()
    def step(self, state: CausalState, tokens: Tensor) -> tuple[Tensor, CausalState]:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, next state; no dropout."""
        past = extend_past(state.past, state.rows)
        x = self.words(tokens.flatten()) + self.positions(len(past) - 1, 1)  # (B * K, E)
        x = self.stack.first_norm(x)
        for i, layer in enumerate(self.stack.layers):
            x = layer.step(x, past[:, :, i])
        rows = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        logits = self._logits(x).unflatten(0, tokens.shape)
        return logits.log_softmax(-1), CausalState(past, rows)

    def select(self, state: CausalState, rows: Tensor) -> CausalState:
        """Keep and reorder hypotheses: rows (B', K') number them b * K + k."""
        return CausalState(state.past, state.rows.flatten()[rows])

    def _logits(self, x: Tensor) -> Tensor:
        x = self.stack.last_norm(x)
        return self.words.logits(x) if self.output is None else self.output(x)
