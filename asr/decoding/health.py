"""Signs that a hypothesis looped or left speech out, which its score does not show.

Shapes: T memory frames, U tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul

from torch import Tensor

WINDOW = 25  # frames: a second at 40 ms each
ENOUGH = 0.5  # tokens' worth of attention that a window needs (tau of Chorowski & Jaitly 2016)
NGRAM = 4
LITTLE, LOOPED = 0.5, 0.75  # less coverage or more repetition than this is an illness


@dataclass(frozen=True)
class Health:
    """Figures of one hypothesis."""

    coverage: float | None  # share of windows of the audio that were attended; low: left out
    repetition: float  # share of n-grams said before; high: a loop
    length_ratio: float  # tokens per frame; far from the corpus' own: loop or early end

    @property
    def ill(self) -> bool:
        """Whether most of the audio was left out, or most of the text is a loop."""
        left_out = self.coverage is not None and self.coverage < LITTLE
        return left_out or self.repetition > LOOPED


def health(
    tokens: Sequence[int], frames: int, attention: Tensor | None = None, window: int = WINDOW
) -> Health:
    """U tokens over T frames, attention (U or U + 1, T) with EOS' row or without."""
    covered = None if attention is None else coverage(attention[: len(tokens)], window)
    return Health(covered, repetition(tokens), len(tokens) / frames if frames else 0.0)


def together(parts: Sequence[Health], lengths: Sequence[int]) -> Health:
    """Of pieces of one recording, by their lengths; every piece's attention is known."""
    if not parts:
        return Health(None, 0.0, 0.0)

    def mean(values: Iterable[float]) -> float:
        return sum(map(mul, values, lengths)) / sum(lengths)

    return Health(
        mean(part.coverage or 0.0 for part in parts),
        mean(part.repetition for part in parts),
        mean(part.length_ratio for part in parts),
    )


def coverage(attention: Tensor, window: int = WINDOW) -> float:
    """attention (U, T) -> share of windows with half a token's attention; 1 for no frames.

    Chorowski & Jaitly 2016 count single frames; attention peaks, so we count windows. A shorter
    rest at the end belongs to the last window.
    """
    attended = attention.sum(dim=0)
    windows = max(1, len(attended) // window)
    parts = attended.tensor_split([window * k for k in range(1, windows)])
    return sum(float(part.sum()) >= ENOUGH for part in parts) / windows if len(attended) else 1.0


def repetition(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of n-grams that were said before (Welleck et al. 2020, seq-rep-n): 0 is none."""
    ngrams = [tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
