"""The speller of Listen, Attend and Spell: memory and earlier tokens -> the next token.

Chan et al. 2016 (arXiv:1508.01211), equations 6 to 8:
    s_u = LSTM(s_{u-1}, y_{u-1}, c_{u-1})
    c_u = attention over the memory with query s_u
    P(y_u) = softmax(MLP(s_u, c_u))

B utterances, K hypotheses per utterance, U tokens, T frames of memory, E encoder size, H hidden
size, V vocabulary, L layers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from asr.nn.attention import Attention, Look, first_look
from asr.nn.dropout import Dropout, draw_mask
from asr.nn.kernels import choice
from asr.nn.kernels.cpu.spell import Fixed, Inputs
from asr.nn.kernels.loop import LoopWeight, linear
from asr.nn.kernels.problem import Weights
from asr.nn.lstm import LayerNormLSTMCell
from asr.nn.lstm_cell import get_weights
from asr.nn.memory import Memory

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Context(NamedTuple):
    """What stays the same over an utterance."""

    memory: Memory
    states: LoopWeight  # the memory's, (B, E, T)
    keys: Tensor  # (B, T, A)
    masks: tuple[Tensor | None, ...]  # recurrent dropout's, one (B, H) per layer
    weights: tuple[Weights, ...]  # the cells', per layer


class SpellerState(NamedTuple):
    """Where every hypothesis stands."""

    context: Context
    cells: tuple[tuple[Tensor, Tensor], ...]  # per layer h and c, each (B * K, H)
    read: Tensor  # (B, K, E), what was read of the memory in the last step
    look: Look

    @property
    def attention(self) -> Tensor:
        """The last step's attention weights, (B, K, T)."""
        return self.look.weights


class Speller(nn.Module):
    """Attention decoder with input feeding.

    `tied` shares the embedding's weights with the output layer. `lstm` (recurrent_dropout and the
    keys of asr/settings/lstm.py) goes to every LayerNormLSTMCell, its backend to the attention too.
    """

    def __init__(
        self,
        vocabulary: int,
        memory_size: int,
        layers: int = 1,
        hidden: int = 256,
        embedding: int = 128,
        attention: str = "location",
        attention_size: int = 128,
        dropout: float = 0.0,
        tied: bool = False,
        **lstm: Any,
    ) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.embedding = nn.Embedding(vocabulary, embedding)
        sizes = [embedding + memory_size] + [hidden] * (layers - 1)
        self.cells = nn.ModuleList(LayerNormLSTMCell(size, hidden, **lstm) for size in sizes)
        backend = lstm.get("backend", "auto")
        self.attend = Attention(attention, memory_size, hidden, attention_size, backend=backend)
        self.merge = nn.Linear(hidden + memory_size, embedding if tied else hidden)
        self.out = nn.Linear(self.merge.out_features, vocabulary)
        if tied:
            self.out.weight = self.embedding.weight

    def start(self, memory: Memory) -> SpellerState:
        """Every utterance with one hypothesis (K = 1) that stands before <sos>."""
        B, _, E = memory.states.shape
        states = memory.states
        masks = tuple(cell.dropout_mask(B) for cell in self.cells)
        cells = tuple((states.new_zeros(B, c.hidden_size),) * 2 for c in self.cells)
        weights = tuple(cell.loop_weights() for cell in self.cells)
        keys = self.attend.keys(memory)
        context = Context(memory, LoopWeight(states.mT), keys, masks, weights)
        return SpellerState(context, cells, states.new_zeros(B, 1, E), first_look(memory))

    def runs_at_once(self, memory: Memory, tokens: Tensor) -> bool:
        """Can at_once do what `advance` does step by step, and does nobody watch the steps?"""
        own = self.cells[0]
        if self._is_watched() or own.setting.precision != "fp32" or 0 in tokens.shape:
            return False
        chosen = choice.choose(own.backend, own.setting, own.weight_hh)
        return chosen == "cpu" and self.attend.runs_in_cpp(memory.states)

    def at_once(self, memory: Memory, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """All of tokens (B, U) -> what `advance` gives, (B, U, H + E), and weights (B, U, T)."""
        (B, U), attend, own = tokens.shape, self.attend, self.cells[0]
        embedded = self.dropout(self.embedding(tokens)).transpose(0, 1)
        matrices = attend.to_query.weight, attend.to_energy.weight, *attend.location_weights()
        given = Inputs(embedded, memory.states, attend.keys(memory), *matrices)
        masks = tuple(cell.dropout_mask(B) for cell in self.cells)
        keep = None
        if self.dropout.training and self.dropout.rate > 0.0:
            shape = len(self.cells), U, B, own.hidden_size
            keep = draw_mask(embedded, shape, self.dropout.rate)
        first = first_look(memory).weights.squeeze(1)
        fixed = Fixed(own.setting, memory.valid, first, masks, keep)
        weights = [get_weights(cell, own.setting.norm) for cell in self.cells]
        shown, read, looks = choice.run_spell(given, weights, fixed)
        return torch.cat([shown, read], dim=-1).transpose(0, 1), looks.transpose(0, 1)

    def _is_watched(self) -> bool:
        """Has a module that at_once does not call, or not for each step, any hook?"""
        parts = [self.embedding, self.dropout, *self.cells.modules(), *self.attend.modules()]
        return any(getattr(part, name) for part in parts for name in _HOOKS)

    def advance(self, state: SpellerState, tokens: Tensor) -> tuple[Tensor, SpellerState]:
        """Read tokens (B, K) -> what the output layer reads, (B, K, H + E), and the next state."""
        context, look = state.context, state.look
        B, K = tokens.shape
        embedded = self.dropout(self.embedding(tokens))
        x = torch.cat([embedded, state.read], dim=-1).view(B * K, -1)
        cells = []
        layers = zip(self.cells, state.cells, context.masks, context.weights, strict=True)
        for cell, before, mask, weights in layers:
            cells.append(cell(x, before, mask, weights))
            x = self.dropout(cells[-1][0])
        query = x.view(B, K, -1)
        look = self.attend(query, context.keys, context.memory.valid, look)
        read = linear(look.weights, context.states)  # (B, K, E)
        return torch.cat([query, read], dim=-1), SpellerState(context, tuple(cells), read, look)

    def logits(self, outputs: Tensor) -> Tensor:
        """(..., H + E) -> (..., V)."""
        merged = self.merge(outputs).tanh()
        return self.out(self.dropout(merged))

    def select(self, state: SpellerState, rows: Tensor) -> SpellerState:
        """Keep the hypotheses in rows (B', K'), numbered b * K + k; a line is one utterance."""
        K = state.read.size(1)
        utterances = rows[:, 0] // K
        flat = rows.reshape(-1)

        def pick(x: Tensor) -> Tensor:
            return x.flatten(0, 1)[flat].view(*rows.shape, *x.shape[2:])

        context = state.context
        if not is_identity(utterances, len(context.keys)):
            memory = Memory(*(part[utterances] for part in context.memory))
            masks = tuple(None if mask is None else mask[utterances] for mask in context.masks)
            states, keys = LoopWeight(memory.states.mT), context.keys[utterances]
            context = Context(memory, states, keys, masks, context.weights)
        cells = tuple((h[flat], c[flat]) for h, c in state.cells)
        return SpellerState(context, cells, pick(state.read), Look(*map(pick, state.look)))


def is_identity(rows: Tensor, size: int) -> bool:
    """Whether rows are 0, 1, ... size - 1, so that nothing need be copied."""
    return len(rows) == size and torch.equal(rows, torch.arange(size, device=rows.device))
