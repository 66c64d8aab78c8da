"""Recipe keys of every LayerNorm-LSTM, wherever it stands."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from asr.settings.base import Positive, Settings

Layer = Annotated[int, Field(ge=1, le=64)]


class Lstm(Settings):
    """What normalises an LSTM, and which backend computes it."""

    norm: Literal["none", "ba", "raw", "thesis", "per_gate", "cell"] = "ba"
    recurrent_gain: Positive = 1.0  # ba: start of the gain that the recurrent product gets
    eps: Positive | None = None  # of the norms; None takes each norm's own default
    zero_rows: Literal["guard", "raw"] = "guard"
    backend: Literal["auto", "reference", "python", "cpu", "cuda"] = "auto"

    @field_validator("recurrent_gain")
    @classmethod
    def _has_that_gain(cls, gain: float, info: ValidationInfo) -> float:
        norm = info.data.get("norm", "ba")
        if gain != 1.0 and norm != "ba":
            raise ValueError(f"only norm ba has this gain, not {norm}: leave it at 1")
        return gain
