"""What a language model minimises: label-smoothed cross-entropy per token, <eos> counted as one."""

from torch import Tensor, nn

from asr.data.sentences import SentenceBatch
from asr.training.objective import Sum, cross_entropy, shift


class LanguageObjective(nn.Module):
    """-> objective, nats, accuracy, and the perplexities: per token, and per word.

    Only perplexities per word compare between vocabularies. As with n-gram models, a sentence's
    end counts as one more word.
    """

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.label_smoothing = label_smoothing

    def set_step(self, step: int) -> None:
        """Tell the model which training step, counted from 0, comes next."""
        self.model.set_step(step)

    def forward(self, batch: SentenceBatch) -> dict[str, Sum]:
        """One pass over whole sentences."""
        inputs, targets = shift(batch.tokens, batch.token_lengths)
        logits: Tensor = self.model(inputs)
        sums = cross_entropy(logits.float(), targets, self.label_smoothing)
        nats = sums["nats"].total
        words = (batch.words + 1).sum()
        return sums | {"perplexity": sums["nats"], "word_perplexity": Sum(nats, words)}
