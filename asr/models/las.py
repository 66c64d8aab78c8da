"""Listen, Attend and Spell (Chan et al. 2016, arXiv:1508.01211) on LayerNorm-LSTMs.

    memory = Listener(features): h^j_t = BLSTM(h^j_{t-1}, [h^{j-1}_{2t}, h^{j-1}_{2t+1}])   eq. 5
    s_u    = LSTM(s_{u-1}, y_{u-1}, c_{u-1})                                                eq. 7
    c_u    = attention over the memory with query s_u (asr/nn/attention.py)                 eq. 6
    P(y_u) = softmax(MLP(s_u, c_u))                                                         eq. 8

We differ in four ways. The last frame of an odd length is paired with zeros instead of dropped;
strided convolutions may precede the listener; the layers outside `pyramid` keep the frame rate; an
optional CTC head (Graves et al. 2006) reads the memory, and with `intermediate_ctc` some layers
before it (Lee & Watanabe 2021), whose predictions later ones may read (Nozaki & Komatsu 2021).

B utterances, K hypotheses per utterance, T frames, U tokens, F features, H hidden size (in the
listener of one direction), E encoder size (2 H of the listener), A attention size, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from asr.config.schema import LasConfig, ListenerConfig
from asr.kernels.types import DecoderConstants, DecoderInput, LoopMatrix, Weights
from asr.nn.attention import (
    Attention,
    AttentionState,
    Memory,
    initial_attention,
    keeps_all,
    valid_mask,
)
from asr.nn.dropout import Dropout, draw_mask
from asr.nn.frontend import Frontend
from asr.nn.intermediate_ctc import IntermediateCTC, self_conditioning
from asr.nn.lstm import LayerNormLSTM, LayerNormLSTMCell, get_weights
from asr.nn.norm import at_least_float32
from asr.nn.subsampling import ConvSubsampling

CHANNELS = 32  # of the convolutions
FILTERS, REACH = 10, 25  # of location-aware attention; reach: frames to each side


def join_pairs(x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, T, E), zero in its padding -> (B, ceil(T / 2), 2 E), lengths halved upwards."""
    x = pad(x, (0, 0, 0, x.size(1) % 2))  # not by an if, which torch.export would decide once
    return x.reshape(x.size(0), x.size(1) // 2, 2 * x.size(2)), (lengths + 1) // 2


class Listener(nn.Module):
    """Pyramidal bidirectional LayerNorm-LSTM over `features` values per frame."""

    def __init__(self, features: int, config: ListenerConfig) -> None:
        super().__init__()
        self.size = 2 * config.hidden
        self.pyramid = frozenset(config.pyramid)
        self.dropout = Dropout(config.dropout)
        shape = features, self.size, config.convolution, CHANNELS
        self.front = ConvSubsampling(*shape) if config.convolution > 1 else None
        self.layers = nn.ModuleList()
        size = features if self.front is None else self.size
        for number in range(1, config.layers + 1):
            paired = number in self.pyramid
            normed = {"all": True, "pyramid": paired, "first": number == 1}[config.norm_layers]
            self.layers.append(
                LayerNormLSTM(
                    2 * size if paired else size,
                    config.hidden,
                    batch_first=True,
                    bidirectional=True,
                    norm=config.settings if normed else "none",
                    recurrent_dropout=config.recurrent_dropout,
                    backend=config.backend,
                )
            )
            size = self.size

    def forward(
        self,
        features: Tensor,
        lengths: Tensor,
        after: Callable[[int, Tensor], Tensor] = lambda number, x: x,
    ) -> Memory:
        """features (B, T, F), lengths (B,) of at least 1 -> Memory, its padding zero.

        `after` may change the output (B, T', E) of each layer, by its number from 1.
        """
        x, lengths = features, lengths.cpu()  # every LSTM layer reads their values
        if self.front is not None:
            x, lengths = self.front(x, lengths)
        # The padding may hold NaN, or the bias of the front, which must not enter a pair.
        padding = ~valid_mask(lengths, x.size(1), x.device)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0)
        for number, layer in enumerate(self.layers, start=1):
            if number in self.pyramid:
                x, lengths = join_pairs(x, lengths)
            x, _ = layer(x, lengths=lengths)  # (B, T', E), zero in the padding
            x = after(number, self.dropout(x))
        return Memory(x, valid_mask(lengths, x.size(1), x.device))

    def output_lengths(self, lengths: Tensor) -> Tensor:
        """Frames of memory for that many frames of features."""
        if self.front is not None:
            lengths = self.front.output_lengths(lengths)
        for _ in self.pyramid:
            lengths = (lengths + 1) // 2
        return lengths


class SpellerConstants(NamedTuple):
    """The part of a speller's state that no step changes."""

    memory: Memory
    states: LoopMatrix  # the memory's, (B, E, T)
    keys: Tensor  # (B, T, A)
    masks: tuple[Tensor | None, ...]  # recurrent dropout, one (B, H) per layer
    weights: tuple[Weights, ...]  # the cells', per layer


class SpellerState(NamedTuple):
    """All hypotheses after some tokens."""

    constants: SpellerConstants
    cells: tuple[tuple[Tensor, Tensor], ...]  # per layer h and c, each (B * K, H)
    context: Tensor  # (B, K, E), c_u of the last step
    attended: AttentionState


class Speller(nn.Module):
    """Attention decoder with input feeding: c_{u-1} is part of each step's input."""

    def __init__(self, vocabulary: int, memory_size: int, config: LasConfig) -> None:
        super().__init__()
        speller = config.speller
        hidden, embedding, layers = speller.hidden, speller.embedding, speller.layers
        self.dropout = Dropout(speller.dropout)
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.cells = nn.ModuleList(
            LayerNormLSTMCell(
                size,
                hidden,
                norm=speller.settings,
                recurrent_dropout=speller.recurrent_dropout,
                backend=speller.backend,
            )
            for size in [embedding + memory_size] + [hidden] * (layers - 1)
        )
        sizes = memory_size, hidden, config.attention_size
        self.attend = Attention(config.attention, *sizes, FILTERS, REACH, speller.backend)
        self.merge = nn.Linear(hidden + memory_size, embedding if speller.tied else hidden)
        self.out = nn.Linear(self.merge.out_features, vocabulary)
        if speller.tied:
            self.out.weight = self.embedding.weight

    def start(self, memory: Memory) -> SpellerState:
        """Every utterance with one hypothesis (K = 1), before <sos>."""
        states = memory.states
        B, _, E = states.shape
        masks = tuple(cell.dropout_mask(B) for cell in self.cells)
        cells = tuple((states.new_zeros(B, c.hidden_size),) * 2 for c in self.cells)
        weights = tuple(cell.loop_weights() for cell in self.cells)
        keys = self.attend.keys(memory)
        constants = SpellerConstants(memory, LoopMatrix(states.mT), keys, masks, weights)
        return SpellerState(constants, cells, states.new_zeros(B, 1, E), initial_attention(memory))

    def advance(self, state: SpellerState, tokens: Tensor) -> tuple[Tensor, SpellerState]:
        """One step: tokens (B, K) -> [s_u, c_u] (B, K, H + E) and the next state."""
        fixed = state.constants
        B, K = tokens.shape
        embedded = self.dropout(self.embedding(tokens))
        x = torch.cat([embedded, state.context], dim=-1).view(B * K, -1)
        cells = []
        layers = zip(self.cells, state.cells, fixed.masks, fixed.weights, strict=True)
        for cell, before, mask, weights in layers:
            cells.append(cell(x, before, mask, weights))
            x = self.dropout(cells[-1][0])
        query = x.view(B, K, -1)
        attended = self.attend(query, fixed.keys, fixed.memory.valid, state.attended)
        context = fixed.states.linear(attended.weights)  # (B, K, E)
        output = torch.cat([query, context], dim=-1)
        return output, SpellerState(fixed, tuple(cells), context, attended)

    def can_run_sequence(self, memory: Memory, tokens: Tensor) -> bool:
        """Does one kernel call compute all steps? Not where a module's hooks must see each step."""
        modules = [self.embedding, self.dropout, *self.cells.modules(), *self.attend.modules()]
        cell, matrices = self.cells[0], self.attend.matrices()
        covered = cell.kernels.covers_decoder(cell.weight_hh, memory.states, matrices, modules)
        return tokens.numel() > 0 and covered

    def run_sequence(self, memory: Memory, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """All steps at once: tokens (B, U) -> [s_u, c_u] (B, U, H + E), weights (B, U, T)."""
        (B, U), attend, cell = tokens.shape, self.attend, self.cells[0]
        embedded = self.dropout(self.embedding(tokens)).transpose(0, 1)
        inputs = DecoderInput(embedded, memory.states, attend.keys(memory), *attend.matrices())
        masks = tuple(cell.dropout_mask(B) for cell in self.cells)
        rate = self.dropout.rate if self.dropout.training else 0.0
        keep = draw_mask(embedded, (len(self.cells), U, B, cell.hidden_size), rate)
        first = initial_attention(memory).weights.squeeze(1)
        constants = DecoderConstants(memory.valid, first, masks, keep)
        cells = [get_weights(cell) for cell in self.cells]
        output, context, weights = cell.kernels.decoder(inputs, cells, constants)
        return torch.cat([output, context], dim=-1).transpose(0, 1), weights.transpose(0, 1)

    def logits(self, outputs: Tensor) -> Tensor:
        """[s_u, c_u] (..., H + E) -> (..., V)."""
        merged = self.merge(outputs).tanh()
        return self.out(self.dropout(merged))

    def select(self, state: SpellerState, rows: Tensor) -> SpellerState:
        """Keep the hypotheses in rows (B', K'), numbered b * K + k; a line is one utterance."""
        utterances = rows[:, 0] // state.context.size(1)
        flat = rows.reshape(-1)

        def pick(x: Tensor) -> Tensor:
            return x.flatten(0, 1)[flat].view(*rows.shape, *x.shape[2:])

        fixed = state.constants
        if not keeps_all(utterances, len(fixed.keys)):
            memory = Memory(*(part[utterances] for part in fixed.memory))
            masks = tuple(None if mask is None else mask[utterances] for mask in fixed.masks)
            states, keys = LoopMatrix(memory.states.mT), fixed.keys[utterances]
            fixed = SpellerConstants(memory, states, keys, masks, fixed.weights)
        cells = tuple((h[flat], c[flat]) for h, c in state.cells)
        attended = AttentionState(*map(pick, state.attended))
        return SpellerState(fixed, cells, pick(state.context), attended)


class LAS(nn.Module):
    """A listener and a speller with the interface that every speech model has.

    In training the speller reads, with probability `scheduled_sampling`, its last prediction
    instead of the true token (Bengio et al. 2015).
    """

    # Prefixes of the weights that are of the vocabulary.
    of_vocabulary = ("speller.embedding.", "speller.out.", "ctc_head.", "conditioning.")

    def __init__(
        self,
        features: int,
        vocabulary: int,
        config: LasConfig,
        frontend: Frontend | None = None,
    ) -> None:
        super().__init__()
        self.frontend = frontend
        self.listener = Listener(frontend.size if frontend else features, config.listener)
        self.speller = Speller(vocabulary, self.listener.size, config)
        self.scheduled_sampling = config.speller.scheduled_sampling
        size = self.listener.size
        self.ctc_head = nn.Linear(size, vocabulary) if config.ctc_weight > 0 else None
        self.intermediate_ctc = config.intermediate_ctc
        self.conditioning = self_conditioning(config.intermediate_ctc, vocabulary, size)

    def encode(self, features: Tensor, lengths: Tensor) -> Memory:
        """features (B, T, F), lengths (B,) -> what the speller attends over."""
        return self.encode_with_intermediate_ctc(features, lengths)[0]

    def encode_with_intermediate_ctc(
        self, features: Tensor, lengths: Tensor
    ) -> tuple[Memory, list[Tensor]]:
        """As encode, and log-probabilities (B, T', V) of CTC's symbols by intermediate layers."""
        if self.frontend is not None:
            features, lengths = self.frontend(features, lengths)
        ctc = IntermediateCTC(self.intermediate_ctc, self.ctc_head, self.conditioning)
        return self.listener(features, lengths, ctc), ctc.log_probs

    def memory_lengths(self, lengths: Tensor) -> Tensor:
        """Frames of memory (B,) for that many frames of features (B,)."""
        if self.frontend is not None:
            lengths = self.frontend.output_lengths(lengths)
        return self.listener.output_lengths(lengths)

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        """tokens (B, U) from <sos> on -> logits (B, U, V) of the token after each."""
        return self.decode_and_attend(memory, tokens)[0]

    def decode_and_attend(self, memory: Memory, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """As decode, and attention weights (B, U, T) of the step that reads each token."""
        outputs, weights = self._read(memory, tokens)
        return self.speller.logits(outputs), weights

    def ctc(self, memory: Memory) -> Tensor | None:
        """Log-probabilities (B, T, V) of each frame's label; None without a CTC head."""
        if self.ctc_head is None:
            return None
        return at_least_float32(self.ctc_head(memory.states)).log_softmax(-1)

    def start(self, memory: Memory) -> SpellerState:
        """One hypothesis per utterance, before <sos>."""
        return self.speller.start(memory)

    def step(self, state: SpellerState, tokens: Tensor) -> tuple[Tensor, SpellerState]:
        """tokens (B, K) -> log-probabilities (B, K, V) of the next ones, next state."""
        outputs, state = self.speller.advance(state, tokens)
        return self.speller.logits(outputs).log_softmax(dim=-1), state

    def select(self, state: SpellerState, rows: Tensor) -> SpellerState:
        """Keep and reorder hypotheses: rows (B', K') number them b * K + k."""
        return self.speller.select(state, rows)

    def _read(self, memory: Memory, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (B, U, H + E) and attention weights (B, U, T) over the tokens."""
        sampled = self.training and self.scheduled_sampling > 0.0
        if not sampled and self.speller.can_run_sequence(memory, tokens):
            return self.speller.run_sequence(memory, tokens)
        state = self.speller.start(memory)
        outputs: list[Tensor] = []
        weights = []
        for true in tokens.unbind(dim=1):
            token = self._sample(true, outputs[-1]) if sampled and outputs else true
            output, state = self.speller.advance(state, token.unsqueeze(1))
            outputs.append(output)
            weights.append(state.attended.weights)
        return torch.cat(outputs, dim=1), torch.cat(weights, dim=1)

    def _sample(self, true: Tensor, output: Tensor) -> Tensor:
        """The true token (B,), or with probability scheduled_sampling the speller's prediction."""
        predicted = self.speller.logits(output).squeeze(1).argmax(dim=-1)
        draws = torch.rand(len(true), device=true.device)
        return torch.where(draws < self.scheduled_sampling, predicted, true)
