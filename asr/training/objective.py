"""What is minimised, in a form that sums over micro-batches and machines without bias.

An Objective is an nn.Module whose forward(batch) returns a dict of Sum(total, count), never a
mean. The entry "objective" is minimised: gradient = sum of its totals / sum of its counts, over
all micro-batches of a step. The other entries are only logged; "nats" is the unsmoothed
cross-entropy per target token, so that curves of different settings compare.

B utterances, T frames, U tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.data.batch import Batch
from asr.tokens import BLANK, EOS, SOS


class Sum(NamedTuple):
    """A total over `count` things, both scalar tensors."""

    total: Tensor
    count: Tensor


class Objective(Protocol):
    """Any task: speech, language model, classification."""

    model: nn.Module  # what a checkpoint holds

    def set_step(self, step: int) -> None: ...

    def __call__(self, batch: Batch) -> dict[str, Sum]: ...


@dataclass(frozen=True)
class Guide:
    """A hint for the first steps: attention far from the diagonal costs something."""

    weight: float = 1.0
    width: float = 0.2  # of the diagonal's band, as a share of the utterance
    steps: int = 1000  # no hint from this step on


@dataclass(frozen=True)
class Consistency:
    """What it costs that two maskings of an utterance are heard differently.

    ctc: beside the CTC loss (CR-CTC, Yao et al. 2024, arXiv:2410.05101; its alpha); decoder: beside
    the cross-entropy, as R-Drop (Liang et al. 2021, arXiv:2106.14448), which masks nothing.
    """

    ctc: float = 0.2
    decoder: float = 0.5


class SpeechObjective(nn.Module):
    """Label-smoothed cross-entropy of the decoder and CTC of the encoder, per target token.

    (1 - ctc_weight) * cross-entropy + ctc_weight * CTC, as in Watanabe et al. 2017, both divided
    by the number of target tokens (<eos> counts as one); what the guide costs is added to the
    cross-entropy, before the weights. Label smoothing: Szegedy et al. 2016, the mass spread evenly
    over the whole vocabulary. An utterance with more labels than frames has no CTC path; it adds
    nothing to that part.
    """

    def __init__(
        self,
        model: nn.Module,
        ctc_weight: float,
        label_smoothing: float,
        guide: Guide | None = None,
        consistency: Consistency | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.ctc_weight = ctc_weight
        self.label_smoothing = label_smoothing
        self.guide = guide
        self.guided = guide is not None
        self.consistency = consistency

    def set_step(self, step: int) -> None:
        """Tell the model which training step, counted from 0, comes next."""
        self.model.set_step(step)
        self.guided = self.guide is not None and step < self.guide.steps

    def forward(self, batch: Batch) -> dict[str, Sum]:
        """-> objective, nats, accuracy, and ctc where there is a CTC head.

        In training, with consistency, each utterance is heard twice and counts twice.
        """
        compared = self.training and self.consistency is not None
        batch = batch.both_views() if compared else batch
        memory = self.model.encode(batch.features, batch.lengths)
        inputs, targets = shift(batch.tokens, batch.token_lengths)
        logits, sums = self._decoder_loss(memory, inputs, targets)
        if compared:
            said = logits.log_softmax(-1)
            add_loss(sums, "decoder_apart", apart(said, targets != BLANK), self.consistency.decoder)
        log_probs = self.model.ctc(memory)
        if log_probs is None:
            return sums
        log_probs, frames = log_probs.float(), memory.valid.sum(dim=1)
        heard = ctc_loss(log_probs, frames, batch.tokens, batch.token_lengths)
        loss, count = sums["objective"]
        sums["objective"] = Sum((1 - self.ctc_weight) * loss, count)
        add_loss(sums, "ctc", heard, self.ctc_weight)
        if compared:
            weight = self.ctc_weight * self.consistency.ctc
            add_loss(sums, "ctc_apart", apart(log_probs, memory.valid), weight)
        return sums

    def _decoder_loss(
        self, memory: Any, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Sum]]:
        """-> logits (B, U, V) in float32, and their sums, with what the guide adds."""
        if not (self.training and self.guided):
            logits = self.model.decode(memory, inputs).float()
            return logits, cross_entropy(logits, targets, self.label_smoothing)
        logits, weights = self.model.decode_and_attend(memory, inputs)
        logits = logits.float()
        sums = cross_entropy(logits, targets, self.label_smoothing)
        off = off_diagonal(weights.float(), targets != BLANK, memory.valid, self.guide.width)
        add_loss(sums, "off_diagonal", off, self.guide.weight)
        return logits, sums


def add_loss(sums: dict[str, Sum], name: str, total: Tensor, weight: float) -> None:
    """`total` weighs so much in the objective, and is logged under its name."""
    loss, count = sums["objective"]
    sums["objective"] = Sum(loss + weight * total, count)
    sums[name] = Sum(total.detach(), count)


def apart(log_probs: Tensor, real: Tensor) -> Tensor:
    """KL(a || b) + KL(b || a) of the first and the second half of the rows, summed.

    log_probs (2 B, N, V), real (2 B, N), alike in both halves. The left side of each is a target
    and has no gradient, as in CR-CTC.
    """
    a, b = log_probs.chunk(2)
    real = real.chunk(2)[0]
    a, b = a[real], b[real]
    return kl(a, b) + kl(b, a)


def kl(wanted: Tensor, found: Tensor) -> Tensor:
    """KL divergence of log-probabilities (..., V) `found` from the target `wanted`, summed."""
    return functional.kl_div(found, wanted.detach(), reduction="sum", log_target=True)


def shift(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """tokens (B, U) -> what the decoder reads, <sos> first, and says, <eos> last: (B, U + 1)."""
    inputs = functional.pad(tokens, (1, 0), value=SOS)
    targets = functional.pad(tokens, (0, 1), value=BLANK)
    return inputs, targets.scatter(1, lengths.unsqueeze(1), EOS)


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> dict[str, Sum]:
    """logits (B, U, V), targets (B, U) with <blank> as padding -> objective, nats, accuracy."""
    real = targets != BLANK
    log_probs = logits[real].log_softmax(dim=-1)  # (tokens, V)
    wanted = targets[real].unsqueeze(1)
    nats = -log_probs.gather(1, wanted).sum()
    spread = -log_probs.mean(dim=-1).sum()
    right = (log_probs.argmax(dim=-1, keepdim=True) == wanted).sum()
    count = real.sum()
    return {
        "objective": Sum((1 - smoothing) * nats + smoothing * spread, count),
        "nats": Sum(nats.detach(), count),
        "accuracy": Sum(right, count),
    }


def off_diagonal(weights: Tensor, said: Tensor, valid: Tensor, width: float) -> Tensor:
    """Guided attention loss (Tachibana, Uenoyama & Aihara 2018, arXiv:1710.08969, eq. 6), summed.

    weights (B, U, T), said (B, U) and valid (B, T) their real places. Attention of token u to
    frame t costs 1 - exp(-(u / U - t / T)^2 / (2 width^2)).
    """
    u = (said.cumsum(1) - 1) / said.sum(1, keepdim=True)  # (B, U)
    t = (valid.cumsum(1) - 1) / valid.sum(1, keepdim=True)  # (B, T)
    apart = u.unsqueeze(2) - t.unsqueeze(1)  # (B, U, T)
    cost = 1 - torch.exp(-apart.square() / (2 * width**2))
    return (weights * cost)[said].sum()


def ctc_loss(log_probs: Tensor, frames: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """log_probs (B, T, V), frames (B,), tokens (B, U), lengths (B,) -> summed over B."""
    return functional.ctc_loss(
        log_probs.transpose(0, 1),
        tokens,
        frames,
        lengths,
        blank=BLANK,
        reduction="sum",
        zero_infinity=True,
    )


def add(sums: dict[str, Sum], more: dict[str, Sum]) -> None:
    """Add `more` into `sums`, entry by entry, detached and in float64."""
    for name, (total, count) in more.items():
        total, count = total.detach().double(), count.double()
        old = sums.get(name)
        sums[name] = Sum(old.total + total, old.count + count) if old else Sum(total, count)


def means(sums: dict[str, Sum]) -> dict[str, float]:
    """Total / count of every entry that counted anything; of a perplexity, its exponential."""
    ratios = {name: total / count for name, (total, count) in sums.items() if count > 0}
    return {n: float(r.exp() if n.endswith("perplexity") else r) for n, r in ratios.items()}
