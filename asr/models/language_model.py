"""Language models over the tokens of a vocabulary: a LayerNorm-LSTM and a Transformer.

    LSTM          embed -> LayerNormLSTM layers -> (project) -> output
    Transformer   embed + positions -> causal self-attention layers -> norm (pre) -> output

The Transformer is a decoder without an encoder (Radford et al. 2018): its layers are the encoder's
(asr/nn/transformer_layers.py) with attention that sees no later token. Tied output: Press & Wolf
2017; Inan et al. 2017.

Both have one face. `forward(tokens)` gives logits after every token of whole sentences that begin
with <sos>; `start`, `step` and `select` walk hypotheses, as asr/decoding/search.py describes a
Scorer, so that the beam can add their log-probs to those of a speech model. Padding lies behind a
sentence and can change nothing before it.

Shapes: B utterances, K hypotheses of each, U tokens, V vocabulary, E embedding, H hidden, L layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asr.nn.drop import DropHead
from asr.nn.dropout import Dropout
from asr.nn.fixnorm import WordEmbedding
from asr.nn.lstm import LayerNormLSTM
from asr.nn.memory import Memory
from asr.nn.positions import make_positions
from asr.nn.residual import Scale
from asr.nn.transformer_layers import EncoderLayer, LayerSettings, Stack


class LstmState(NamedTuple):
    """h and c of every layer, (L, B * K, H) each, and K."""

    h: Tensor
    c: Tensor
    beam: int
    attention: None = None  # a language model hears nothing


class LstmLanguageModel(nn.Module):
    """`tied`: the output layer shares the embedding's weights, behind a projection where the sizes
    differ. dropout acts on the embedding, between layers and before the output. `lstm`
    (recurrent_dropout and the keys of asr/settings/lstm.py) goes to LayerNormLSTM.
    """

    def __init__(
        self,
        vocabulary: int,
        embedding: int = 256,
        hidden: int = 512,
        layers: int = 2,
        dropout: float = 0.0,
        tied: bool = False,
        **lstm: Any,
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, embedding)
        nn.init.normal_(self.embedding.weight, std=embedding**-0.5 if tied else 1.0)
        self.lstm = LayerNormLSTM(embedding, hidden, layers, dropout=dropout, **lstm)
        projects = tied and hidden != embedding
        self.project = nn.Linear(hidden, embedding) if projects else nn.Identity()
        self.out = nn.Linear(embedding if tied else hidden, vocabulary)
        if tied:
            self.out.weight = self.embedding.weight

    def set_step(self, step: int) -> None:
        """Told the training step, counted from 0; nothing here changes with it."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, U) from <sos> on -> logits (B, U, V) of the token after each."""
        outputs, _ = self.lstm(self.dropout(self.embedding(tokens)))
        return self._logits(outputs)

    @torch.no_grad()
    def start(self, memory: Memory) -> LstmState:
        """One hypothesis per utterance, before <sos>; of the memory only their number counts."""
        shape = (self.lstm.num_layers, len(memory.valid), self.lstm.hidden_size)
        zeros = self.out.weight.new_zeros(shape)
        return LstmState(zeros, zeros, 1)

    @torch.no_grad()
    def step(self, state: LstmState, tokens: Tensor) -> tuple[Tensor, LstmState]:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, next state."""
        embedded = self.embedding(tokens.flatten())  # (B * K, E)
        output, (h, c) = self.lstm.step(embedded, (state.h, state.c))
        logits = self._logits(output).unflatten(0, tokens.shape)
        return logits.log_softmax(-1), LstmState(h, c, tokens.shape[1])

    def select(self, state: LstmState, rows: Tensor) -> LstmState:
        """rows (B', K') number old hypotheses b * K + k."""
        flat = rows.flatten()
        return LstmState(state.h[:, flat], state.c[:, flat], rows.shape[1])

    def _logits(self, outputs: Tensor) -> Tensor:
        return self.out(self.project(self.dropout(outputs)))


class TransformerState(NamedTuple):
    """past (U, N, L, 2, E): keys and values of the U tokens that N hypotheses have read; rows
    (B, K) says which of the N each hypothesis goes on from, so that choosing moves nothing.
    """

    past: Tensor
    rows: Tensor
    attention: None = None


class TransformerLanguageModel(nn.Module):
    """`residual_scale`: alpha of every layer, or `deepnet`, which for M layers and no encoder is
    alpha (2 M)^(1/4) with gain (8 M)^(-1/4) (Wang et al. 2022, arXiv:2203.00555, figure 2).
    The other arguments are those of asr.models.transformer.Transformer for both of its stacks;
    what is for its encoder alone, encoder_windows and encoder_convolution, raises ValueError.
    """

    def __init__(
        self,
        vocabulary: int,
        d_model: int = 256,
        layers: int = 6,
        residual_scale: float | str = 1.0,
        layer_drop: float = 0.0,
        fixnorm: bool = False,
        tied: bool = False,
        positions: str = "sinusoidal",
        max_positions: int = 5000,
        **layer: Any,
    ) -> None:
        super().__init__()
        for name in ("encoder_windows", "encoder_convolution"):
            if layer.get(name) is not None:
                raise ValueError(f"{name} is for encoders; a language model has none: leave it out")
        settings = LayerSettings(**layer)
        scale = Scale((2 * layers) ** 0.25, (8 * layers) ** -0.25)
        if residual_scale != "deepnet":
            scale = Scale(residual_scale)
        self.words = WordEmbedding(vocabulary, d_model, fixnorm)
        self.positions = make_positions(positions, d_model, max_positions)
        self.stack = settings.encoder(d_model, layers, scale, layer_drop)
        self.output = None if tied else nn.Linear(d_model, vocabulary)
        self.dropout = Dropout(settings.dropout)

    def set_step(self, step: int) -> None:
        """Tells DropHead and LayerDrop the training step, counted from 0; call it before each."""
        for module in self.modules():
            if isinstance(module, DropHead | Stack):
                module.set_step(step)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (B, U) from <sos> on -> logits (B, U, V) of the token after each."""
        x = self.dropout(self.words(tokens) + self.positions(0, tokens.size(1)))
        for layer in self.stack.passing():
            x = _through(layer, x, layer.self_attention(_entered(layer, x), causal=True))
        return self._logits(x)

    @torch.no_grad()
    def start(self, memory: Memory) -> TransformerState:
        """One hypothesis per utterance, before <sos>; of the memory only their number counts."""
        batch, size = len(memory.valid), self.words.weight.size(1)
        past = self.words.weight.new_empty(0, batch, len(self.stack.layers), 2, size)
        return TransformerState(past, torch.arange(batch, device=past.device).unsqueeze(1))

    @torch.no_grad()
    def step(self, state: TransformerState, tokens: Tensor) -> tuple[Tensor, TransformerState]:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, and the state after them.

        For search, so without dropout; `state` itself stays as it was.
        """
        length, _, *rest = state.past.shape
        past = state.past.new_empty(length + 1, tokens.numel(), *rest)
        torch.index_select(state.past, 1, state.rows.flatten(), out=past[:length])
        x = self.words(tokens.flatten()) + self.positions(length, 1)  # (B * K, E)
        for i, layer in enumerate(self.stack.layers):
            x = _through(layer, x, layer.self_attention.step(_entered(layer, x), past[:, :, i]))
        rows = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens)
        logits = self._logits(x).unflatten(0, tokens.shape)
        return logits.log_softmax(-1), TransformerState(past, rows)

    def select(self, state: TransformerState, rows: Tensor) -> TransformerState:
        """rows (B', K') number old hypotheses b * K + k."""
        return TransformerState(state.past, state.rows.flatten()[rows])

    def _logits(self, x: Tensor) -> Tensor:
        x = self.stack.last_norm(x)
        return self.words.logits(x) if self.output is None else self.output(x)


def _entered(layer: EncoderLayer, x: Tensor) -> Tensor:
    return layer.around_self_attention.enter(x)


def _through(layer: EncoderLayer, x: Tensor, attended: Tensor) -> Tensor:
    """The layer around what its self-attention gave: (..., E) -> (..., E)."""
    x = layer.around_self_attention.leave(x, attended)
    around = layer.around_feed_forward
    return around.leave(x, layer.feed_forward(around.enter(x)))
