"""Recipe keys under `decode:`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from asr.settings.base import Count, Natural, Positive, Settings, Speed, Weight


class Decode(Settings):
    """From logits to text: greedy, or a beam with penalties, joint CTC and language model."""

    checkpoint: Literal["best", "last"] = "best"
    average: Count = 1  # checkpoints averaged: the best ones, or the last ones
    batch_seconds: Positive = 240.0
    search: Literal["beam", "ctc"] = "beam"  # ctc: its head alone, by prefix beam search
    # Each utterance is heard at all of these, and the search follows the mean of what is heard;
    # validation in training hears at 1 alone.
    speeds: Annotated[tuple[Speed, ...], Field(min_length=1, max_length=20)] = (1.0,)
    # Runs of the same vocabulary and features, such as other seeds, that are part of that mean.
    ensemble: Annotated[tuple[Path, ...], Field(max_length=20)] = ()
    beam: Annotated[int, Field(ge=1, le=1000)] = 1
    ctc_weight: Weight = 0.0  # share of the CTC prefix score (Watanabe et al. 2017)
    lm: Path | None = None  # a language model's run, or n-grams (.arpa, .arpa.gz, kenlm's binary)
    lm_weight: Annotated[float, Field(ge=0.0)] = 0.3  # of its log-probs beside the model's
    # Of the n-grams. A word is paid for at its end, so that under a heavy lm_weight words that
    # never end may win; a token is paid for at once.
    lm_unit: Literal["word", "token"] = "word"
    # Summed log-probabilities favour the short, the more so after label smoothing, which leaves
    # <eos> a chance at every step; hence these two. A beam of 1 without scorers and other rules is
    # greedy search, which does not feel them.
    length_penalty: Annotated[float, Field(ge=0.0, le=10.0)] = 0.6  # alpha of Wu et al. 2016
    token_reward: float = 0.0  # added per token
    coverage_penalty: Annotated[float, Field(ge=0.0)] = 0.0  # beta of Wu et al. 2016
    # <eos> must be that near to the best other token (Hannun et al. 2019); null: no such rule
    eos_threshold: Positive | None = 1.5
    ngram: Natural = 0  # no n-gram of that length twice; 0 allows all
    temperature: Positive = 1.0
    # Stop once that many beams have ended, exact or not (Kasai et al. 2022); None: only where no
    # living hypothesis can still win.
    patience: Positive | None = None
    # Shortest and longest hypothesis / frames of memory; the longest may have 10 tokens more.
    min_ratio: Annotated[float, Field(ge=0.0, le=1000.0)] = 0.0
    max_ratio: Annotated[float, Field(gt=0.0, le=1000.0)] = 1.0
    # Longer audio is cut at pauses into pieces of at most so many seconds; null: data.max_seconds.
    longest: Annotated[float, Field(ge=1.0)] | None = None
    overlap: Annotated[float, Field(ge=0.0)] = 2.0  # seconds, where nobody pauses

    @property
    def others(self) -> list[float]:
        """The speeds besides 1."""
        return [speed for speed in self.speeds if speed != 1.0]

    @field_validator("speeds")
    @classmethod
    def _go_around_one(cls, speeds: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if 1.0 not in speeds or len(set(speeds)) < len(speeds):
            raise ValueError("they must differ, and 1.0 be one of them")
        if len(speeds) > 1 and info.data.get("search") == "ctc":
            raise ValueError("search=ctc hears at one: set decode.speeds=[1.0] or search=beam")
        return speeds

    @field_validator("ensemble")
    @classmethod
    def _follow_a_beam(cls, runs: tuple[Path, ...], info: ValidationInfo) -> tuple[Path, ...]:
        if runs and info.data.get("search") == "ctc":
            raise ValueError("search=ctc follows one run: set decode.ensemble=[] or search=beam")
        return runs
