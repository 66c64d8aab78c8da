"""What every group of recipe keys is: frozen, typed, and closed to unknown keys."""

from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]  # a dropout-like probability
Weight = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Speed = Annotated[float, Field(ge=0.5, le=2.0)]
Natural = Annotated[int, Field(ge=0, le=1_000_000_000)]


class Settings(BaseModel):
    """One group of recipe keys. Numbers may be written as 1e-3; infinities and NaN may not."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _yes_is_no_number(cls, tree: Any) -> Any:
        """Pydantic would take `yes` for 1; as text, it is refused where a number should stand."""
        if not isinstance(tree, dict):
            return tree
        return {
            key: str(value) if isinstance(value, bool) and cls._is_number(key) else value
            for key, value in tree.items()
        }

    @classmethod
    def _is_number(cls, key: Any) -> bool:
        field = cls.model_fields.get(key)
        kinds = _kinds(field.annotation) if field else set()
        return bool(kinds & {int, float}) and bool not in kinds


def _kinds(annotation: Any) -> set[Any]:
    """The plain types within a type such as `Annotated[int, ...] | None`."""
    parts = get_args(annotation)
    return set().union(*map(_kinds, parts)) if parts else {annotation}
