"""LayerDrop and DropHead: regularisers that leave out whole layers and whole heads in training."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asr.nn.dropout import check_rate


def kept_layers(
    layers: Iterable[nn.Module], rate: float, draw: Callable[[], float] | None = None
) -> Iterator[nn.Module]:
    """LayerDrop (Fan, Grave & Joulin 2019, arXiv:1909.11556).

    Yields the layers of one training pass: each is left out with probability `rate`, for the whole
    batch, and nothing is rescaled. The caller passes rate 0 in evaluation; nothing is drawn then.
    `draw` gives uniform numbers from 0 to 1; without it torch's own generator does.
    """
    for layer in layers:
        if rate == 0.0 or (draw() if draw else torch.rand(())) >= rate:
            yield layer


@dataclass(frozen=True)
class VShape:
    """The rate of scheduled DropHead (Zhou et al. 2020, arXiv:2004.13342).

    From `start` (default: `end`) linearly down to 0 over `warmup` steps, against overfitting early,
    then linearly up to `end` at step `total`, and `end` from there on.
    """

    end: float
    warmup: int
    total: int
    start: float | None = None

    def __post_init__(self) -> None:
        check_rate("drop_head end", self.end)
        check_rate("drop_head start", self.end if self.start is None else self.start)
        if not 0 <= self.warmup < self.total:
            raise ValueError(
                f"drop_head warmup {self.warmup} must be at least 0 and below total {self.total}"
            )

    def rate(self, step: int) -> float:
        """The rate at training step `step`, counted from 0."""
        if step < self.warmup:
            start = self.end if self.start is None else self.start
            return start * (1 - step / self.warmup)
        return self.end * min(1.0, (step - self.warmup) / (self.total - self.warmup))


class DropHead(nn.Module):
    """Drops whole attention heads in training (Zhou et al. 2020).

    Every utterance has its own mask; the kept heads are rescaled by H / kept. One head always
    stays: where all would fall, the one with the highest draw is kept. `schedule` is a constant
    rate or a VShape; `set_step` moves along the latter, which stands at step 0 before.
    """

    def __init__(self, schedule: float | VShape = 0.0) -> None:
        super().__init__()
        self.schedule = schedule
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Takes the rate of training step `step`."""
        scheduled = isinstance(self.schedule, VShape)
        rate = self.schedule.rate(step) if scheduled else self.schedule
        self.rate = check_rate("drop_head", rate)

    def forward(self, heads: Tensor) -> Tensor:
        """heads (B, H, ...) -> the same shape."""
        if not self.training or self.rate == 0.0:
            return heads
        draws = torch.rand(heads.shape[:2], device=heads.device)  # (B, H)
        kept = (draws >= self.rate) | (draws == draws.amax(1, keepdim=True))
        factor = kept * (kept.size(1) / kept.sum(1, keepdim=True))
        return heads * factor.to(heads.dtype).reshape(*kept.shape, *(1,) * (heads.dim() - 2))
