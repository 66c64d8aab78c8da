"""Recipe keys under `train:`."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from asr.settings.base import Count, Natural, Positive, Rate, Settings, Weight

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class Optimizer(Settings):
    """Adam or AdamW."""

    kind: Literal["adam", "adamw"] = "adam"
    lr: Positive = 1e-3  # the peak; for `noam` the factor in front of the formula
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0


class Schedule(Settings):
    """Learning rate against steps: a linear warm-up, then as `kind` says."""

    kind: Literal["constant", "noam", "ramp_hold_decay"] = "ramp_hold_decay"
    warmup: Natural = 200  # steps
    hold: Weight = 0.5  # ramp_hold_decay: share of the run at the peak's end
    floor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05  # ramp_hold_decay: last rate / peak
    width: Count = 512  # noam: d_model of the formula


class Guide(Settings):
    """Guided attention (Tachibana et al. 2018): in the first steps, far from the diagonal costs."""

    weight: Positive = 1.0  # beside the cross-entropy, and times 1 - model.ctc_weight as that is
    # Of the free band, as a share of the utterance.
    width: Annotated[float, Field(ge=1e-3, le=10.0)] = 0.2
    steps: Count = 1000


class Consistency(Settings):
    """Each utterance is heard twice, masked otherwise, and both should be heard alike.

    A batch then takes twice the memory and time: halve batch_seconds.
    """

    ctc: Annotated[float, Field(ge=0.0)] = 0.2  # beside the CTC loss (Yao et al. 2024)
    decoder: Annotated[float, Field(ge=0.0)] = 0.5  # beside the cross-entropy (Liang et al. 2021)


class Alarm(Settings):
    """Says so when attention has not found the diagonal."""

    steps: Natural = 3000  # looked at from this step on, at every validation; 0 never
    diagonality: Weight = 0.6  # below this the alarm is raised


class Train(Settings):
    """The training loop."""

    epochs: Count = 20
    steps: Count | None = None  # overrides epochs
    batch_seconds: Positive = 120.0  # padded audio in one batch
    # Batches are padded to multiples of this, so that few shapes come back again and again; 0: not.
    round_seconds: Annotated[float, Field(ge=0.0, le=10.0)] = 0.0
    accumulate: Count = 1  # batches per step
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    clip: Positive = 5.0  # largest gradient norm
    bad_steps: Count = 10  # steps without a finite gradient, in a row, that stop the run
    label_smoothing: Rate = 0.1
    guide: Guide | None = None
    consistency: Consistency | None = None
    short_first: bool = True  # first epoch from the shortest utterance to the longest
    precision: Literal["fp32", "bf16"] = "fp32"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None  # None leaves torch's own choice
    init: Path | None = None  # another run's folder: start from its weights
    validate_every: Count | None = None  # steps; None once per epoch
    save_every: Count = 500  # steps
    keep: Count = 3  # last checkpoints kept, beside the best ones
    keep_best: Count = 1  # best checkpoints kept, by validation loss
    log_every: Count = 20  # steps
    samples: Natural = 4  # validation utterances shown in TensorBoard
    wer_utterances: Natural = 200  # validation utterances decoded for the curves of WER
    alarm: Alarm = Alarm()
    health: Natural = 0  # look inside gates, norms and attention every so many validations; 0 never
    debug: Literal["nan"] | None = None  # nan: stop at the first value that is not finite, slow


ALONE = "leave it out"
# What only utterances have, and what other tasks have in its place.
OF_SPEECH = {
    "batch_seconds": "data.batch_bytes sizes batches of text, data.batch those of images",
    "round_seconds": ALONE,
    "short_first": ALONE,
    "guide": ALONE,
    "consistency": ALONE,
    "wer_utterances": ALONE,
    "alarm": ALONE,
}
