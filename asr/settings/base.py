"""What every group of recipe keys is: frozen, typed, and closed to unknown keys."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]  # a dropout-like probability
Weight = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Natural = Annotated[int, Field(ge=0, le=1_000_000_000)]


class Settings(BaseModel):
    """One group of recipe keys. Numbers may be written as 1e-3; infinities and NaN may not."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
