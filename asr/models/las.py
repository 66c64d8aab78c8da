"""Listen, Attend and Spell (Chan et al. 2016) on LayerNorm-LSTMs, with an optional CTC head.

B utterances, T frames, F features, U tokens, V vocabulary, E encoder size.
"""

import torch
from torch import Tensor, nn

from asr.models.listener import Listener
from asr.models.speller import Speller, SpellerState
from asr.nn.memory import Memory


class LAS(nn.Module):
    """A listener and a speller behind the face that every speech model has.

    `sampling` is the probability with which the speller reads, in training, its own last token
    instead of the true one (scheduled sampling, Bengio et al. 2015).
    """

    def __init__(
        self,
        listener: Listener,
        speller: Speller,
        vocabulary: int,
        sampling: float = 0.0,
        ctc: bool = True,
    ) -> None:
        super().__init__()
        self.listener = listener
        self.speller = speller
        self.sampling = sampling
        self.ctc_head = nn.Linear(listener.size, vocabulary) if ctc else None

    def set_step(self, step: int) -> None:
        """Told the training step, counted from 0; nothing here changes with it."""

    def encode(self, features: Tensor, lengths: Tensor) -> Memory:
        """features (B, T, F), lengths (B,) -> what the speller attends over."""
        return self.listener(features, lengths)

    def memory_lengths(self, lengths: Tensor) -> Tensor:
        """Frames of memory (B,) for that many frames of features (B,)."""
        return self.listener.output_lengths(lengths)

    def decode(self, memory: Memory, tokens: Tensor) -> Tensor:
        """tokens (B, U) from <sos> on -> logits (B, U, V) of the token after each."""
        return self.speller.logits(self._read(memory, tokens)[0])

    def decode_and_attend(self, memory: Memory, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What decode and attention give, in one pass."""
        outputs, weights = self._read(memory, tokens)
        return self.speller.logits(outputs), weights

    def attention(self, memory: Memory, tokens: Tensor) -> Tensor:
        """The weights (B, U, T) with which each of tokens (B, U) was followed."""
        return self._read(memory, tokens)[1]

    def ctc(self, memory: Memory) -> Tensor | None:
        """Log-probabilities (B, T, V) of each frame's label; None without a CTC head."""
        return None if self.ctc_head is None else self.ctc_head(memory.states).log_softmax(dim=-1)

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
        """Outputs (B, U, H + E) and attention weights (B, U, T) over the given tokens."""
        sampled = self.training and self.sampling > 0.0
        if not sampled and self.speller.runs_at_once(memory, tokens):
            return self.speller.at_once(memory, tokens)
        state = self.speller.start(memory)
        outputs: list[Tensor] = []
        weights = []
        for true in tokens.unbind(dim=1):
            token = self._sample(true, outputs[-1]) if outputs else true
            output, state = self.speller.advance(state, token.unsqueeze(1))
            outputs.append(output)
            weights.append(state.attention)
        return torch.cat(outputs, dim=1), torch.cat(weights, dim=1)

    def _sample(self, true: Tensor, output: Tensor) -> Tensor:
        """The true token (B,), or in training now and then the speller's own choice."""
        if not self.training or self.sampling == 0.0:
            return true
        own = self.speller.logits(output).squeeze(1).argmax(dim=-1)
        return torch.where(torch.rand(len(true), device=true.device) < self.sampling, own, true)
