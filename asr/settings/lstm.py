"""Recipe keys of every LayerNorm-LSTM, wherever it stands."""

from typing import Annotated, Literal

from pydantic import Field

from asr.settings.base import Positive, Settings

Layer = Annotated[int, Field(ge=1, le=64)]


class Lstm(Settings):
    """What normalises an LSTM, and which backend computes it."""

    norm: Literal["none", "ba", "raw", "thesis", "per_gate", "cell"] = "ba"
    recurrent_gain: Positive = 1.0  # start of the recurrent product's gain, which ba alone has
    eps: Positive | None = None  # of the norms; None takes each norm's own default
    zero_rows: Literal["guard", "raw"] = "guard"
    backend: Literal["auto", "reference", "python", "cpu", "cuda"] = "auto"
