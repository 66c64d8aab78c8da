"""Training objectives as sums that add up over micro-batches and ranks without bias.

An Objective's forward(batch) returns a dict of Sum(total, count), never a mean. The entry
"objective" is minimised: gradient = sum of its totals / sum of its counts over all micro-batches of
a step. The other entries are only logged; "nll" is the cross-entropy per target token without label
smoothing, which is comparable between settings.

B utterances, T frames, U tokens, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from asr.config.schema import ConsistencyConfig, GuidedAttentionConfig
from asr.data.batching import Batch
from asr.data.tokenizer import BLANK, EOS, SOS


class Sum(NamedTuple):
    """A total over `count` things, both scalar tensors; their mean is logged."""

    total: Tensor
    count: Tensor

    def mean(self) -> Tensor:
        """The figure to log."""
        return self.total / self.count


class Perplexity(Sum):
    """A sum of nats, logged as exp(total / count)."""

    def mean(self) -> Tensor:
        """exp(total / count)."""
        return super().mean().exp()


class Objective(nn.Module):
    """What a task minimises: a loss over `model`, which checkpoints store."""

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing

    def set_step(self, step: int) -> None:
        """Called before every training step, counted from 0, for a loss that changes with it."""

    def forward(self, batch: Any) -> dict[str, Sum]:
        """-> `objective`, which is minimised, `nll`, which ranks checkpoints, and others to log."""
        raise NotImplementedError


def add(sums: dict[str, Sum], more: dict[str, Sum]) -> None:
    """Add `more` into `sums`, entry by entry, detached and in float64."""
    for name, each in more.items():
        total, count = each.total.detach().double(), each.count.double()
        if old := sums.get(name):
            total, count = old.total + total, old.count + count
        sums[name] = each._replace(total=total, count=count)


def read(values: Sequence[Tensor]) -> Tensor:
    """Scalar tensors (N) as one of float64 on the CPU, with one wait for the device."""
    device = values[0].device
    return torch.stack([v.detach().double().to(device, non_blocking=True) for v in values]).cpu()


def on_cpu(sums: dict[str, Sum]) -> dict[str, Sum]:
    """The same sums on the CPU."""
    if not sums:
        return {}
    pairs = read([value for each in sums.values() for value in each]).view(-1, 2)
    return {
        name: each._replace(total=total, count=count)
        for (name, each), (total, count) in zip(sums.items(), pairs, strict=True)
    }


def means(sums: dict[str, Sum]) -> dict[str, float]:
    """The figure of every entry with a count."""
    return {name: float(each.mean()) for name, each in on_cpu(sums).items() if each.count > 0}


def shift(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """tokens (B, U) -> decoder inputs, which begin with <sos>, and targets, which end with <eos>.

    Both (B, U + 1).
    """
    inputs = functional.pad(tokens, (1, 0), value=SOS)
    targets = functional.pad(tokens, (0, 1), value=BLANK)
    ends = lengths.to(tokens.device, non_blocking=True).unsqueeze(1)
    return inputs, targets.scatter(1, ends, EOS)


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> dict[str, Sum]:
    """Label-smoothed cross-entropy -> objective, nll, accuracy.

    logits (B, U, V), targets (B, U) padded with <blank>. Label smoothing (Szegedy et al. 2016)
    spreads its mass evenly over the whole vocabulary.
    """
    valid = targets != BLANK
    # Padding adds 0: to select the valid tokens would wait for the device.
    log_probs = logits.log_softmax(dim=-1)
    nll = -_sum_valid(log_probs.gather(2, targets.unsqueeze(2)).squeeze(2), valid)
    uniform = -_sum_valid(log_probs.mean(dim=-1), valid)
    correct = ((log_probs.argmax(dim=-1) == targets) & valid).sum()
    count = valid.sum()
    return {
        "objective": Sum((1 - smoothing) * nll + smoothing * uniform, count),
        "nll": Sum(nll.detach(), count),
        "accuracy": Sum(correct, count),
    }


def _sum_valid(values: Tensor, valid: Tensor) -> Tensor:
    """The sum of values (B, N) where valid (B, N)."""
    return values.masked_fill(~valid, 0.0).sum()


def ctc_loss(log_probs: Tensor, frames: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """log_probs (B, T, V), frames (B,), tokens (B, U), lengths (B,) -> summed over B.

    frames and lengths are best on the CPU, where torch reads them.
    An utterance with more labels than frames has no CTC path and adds 0.
    """
    options = {"blank": BLANK, "reduction": "sum", "zero_infinity": True}
    return functional.ctc_loss(log_probs.transpose(0, 1), tokens, frames, lengths, **options)


def off_diagonal(weights: Tensor, valid_tokens: Tensor, valid: Tensor, width: float) -> Tensor:
    """Guided attention loss (Tachibana, Uenoyama & Aihara 2018, arXiv:1710.08969, eq. 6), summed.

    weights (B, U, T), valid_tokens (B, U), valid (B, T). Attention of token u to frame t costs
    1 - exp(-(u / U - t / T)^2 / (2 width^2)).
    """
    u = (valid_tokens.cumsum(1) - 1) / valid_tokens.sum(1, keepdim=True)  # (B, U)
    t = (valid.cumsum(1) - 1) / valid.sum(1, keepdim=True)  # (B, T)
    distance = u.unsqueeze(2) - t.unsqueeze(1)  # (B, U, T)
    cost = 1 - torch.exp(-distance.square() / (2 * width**2))
    return _sum_valid((weights * cost).sum(2), valid_tokens)


def symmetric_kl(log_probs: Tensor, valid: Tensor) -> Tensor:
    """KL(a || b) + KL(b || a) of the first and the second half of the rows, summed.

    log_probs (2 B, N, V), valid (2 B, N), the same in both halves. The left side of each is a
    target without gradient, as in CR-CTC.
    """
    valid, _ = valid.chunk(2)
    a, b = log_probs.chunk(2)
    kl_div = partial(functional.kl_div, reduction="none", log_target=True)
    both = kl_div(b, a.detach()) + kl_div(a, b.detach())
    return _sum_valid(both.sum(2), valid)


class SpeechObjective(Objective):
    """Label-smoothed cross-entropy of the decoder and CTC of the encoder, per target token.

    (1 - ctc_weight) * cross-entropy + ctc_weight * CTC, as in Watanabe et al. 2017, both divided
    by the number of target tokens (<eos> counts as one). The guided attention loss is added to the
    cross-entropy before the weights. With a model of intermediate CTC losses, CTC is in training

        (1 - intermediate_weight) * last layer's + intermediate_weight * mean of the others'
    """

    def __init__(
        self,
        model: nn.Module,
        ctc_weight: float,
        label_smoothing: float,
        guided_attention: GuidedAttentionConfig | None = None,
        consistency: ConsistencyConfig | None = None,
        intermediate_weight: float = 0.0,
    ) -> None:
        super().__init__(model, label_smoothing)
        self.ctc_weight, self.intermediate_weight = ctc_weight, intermediate_weight
        self.guided_attention, self.consistency = guided_attention, consistency
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Guided attention ends at its last training step; steps count from 0."""
        self.guided = self.guided_attention is not None and step < self.guided_attention.steps

    def forward(self, batch: Batch) -> dict[str, Sum]:
        """-> objective, nll, accuracy, and ctc where there is a CTC head.

        In training with `consistency` both masked views of each utterance count.
        """
        consistency = self.consistency if self.training else None
        batch = batch.both_views() if consistency else batch
        memory, inner = self.model.encode_with_intermediate_ctc(batch.features, batch.lengths)
        intermediate = inner if self.training else []
        inputs, targets = shift(batch.tokens, batch.token_lengths)
        logits, sums = self.decoder_loss(memory, inputs, targets)
        if consistency:
            divergence = symmetric_kl(logits.log_softmax(-1), targets != BLANK)
            add_loss(sums, "decoder_symmetric_kl", divergence, consistency.decoder)
        log_probs = self.model.ctc(memory)
        if log_probs is None:
            return sums
        labels = self.model.memory_lengths(batch.lengths), batch.tokens, batch.token_lengths
        loss, count = sums["objective"]
        sums["objective"] = Sum((1 - self.ctc_weight) * loss, count)
        inner_weight = self.intermediate_weight if intermediate else 0.0
        last_weight = self.ctc_weight * (1 - inner_weight)
        add_loss(sums, "ctc", ctc_loss(log_probs, *labels), last_weight)
        if intermediate:
            mean = sum(ctc_loss(each, *labels) for each in intermediate) / len(intermediate)
            add_loss(sums, "intermediate_ctc", mean, self.ctc_weight * inner_weight)
        if consistency:
            weight = self.ctc_weight * consistency.ctc
            add_loss(sums, "ctc_symmetric_kl", symmetric_kl(log_probs, memory.valid), weight)
        return sums

    def decoder_loss(
        self, memory: Any, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, dict[str, Sum]]:
        """-> logits (B, U, V) in float32, and their sums with the guided attention loss."""
        if not (self.training and self.guided):
            logits = self.model.decode(memory, inputs).float()
            return logits, cross_entropy(logits, targets, self.label_smoothing)
        logits, weights = self.model.decode_and_attend(memory, inputs)
        logits = logits.float()
        sums = cross_entropy(logits, targets, self.label_smoothing)
        guide = self.guided_attention
        loss = off_diagonal(weights.float(), targets != BLANK, memory.valid, guide.width)
        add_loss(sums, "off_diagonal", loss, guide.weight)
        return logits, sums


def add_loss(sums: dict[str, Sum], name: str, total: Tensor, weight: float) -> None:
    """Add weight * total to the objective, and log the total under its name."""
    loss, count = sums["objective"]
    sums["objective"] = Sum(loss + weight * total, count)
    sums[name] = Sum(total.detach(), count)
