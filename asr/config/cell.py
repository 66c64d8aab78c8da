"""CellSettings: where an LSTM cell is normalised, and how.

The keys of a recipe's LSTM section (LSTMConfig in schema.py) under the same names, without
pydantic, which the layer does not need. asr/kernels/reference.py has the equations.
"""

import math
from dataclasses import KW_ONLY, dataclass, fields

from asr.config.registered import REGISTERED, is_registered

# norm -> what the norms of the gates take (gates), and the defaults of cell_norm and eps.
#   gates    none; split: each product alone; joined: their sum; per_gate: their sum, by gate
#   eps      each paper's or code's (docs/normalization.md); per_gate's original used 1e-12
PRESETS = {
    "none": ("none", "none", 1e-5),
    "ba": ("split", "output", 1e-5),
    "raw": ("split", "output", 1e-3),
    "thesis": ("split", "output", 1e-3),
    "per_gate": ("per_gate", "carried", 1e-5),
    "cell": ("none", "output", 1e-5),
    "joined": ("joined", "none", 1e-5),
}
CELL_NORMS = ("none", "output", "carried", "state")
NORM_KINDS = ("layer", "rms")
VARIABLE = ("ba", "per_gate", "joined")  # presets that cell_norm and hidden_norm vary


@dataclass(frozen=True)
class CellSettings:
    """A preset's name, and what differs from it: CellSettings("ba", eps=1e-6).

    cell_norm and eps None become what the preset fixes. Raises ValueError for a value that is not
    known or does not fit `norm`.

    zero_variance "guard": a row of exactly zero variance (rms: of zeros) is normalised to 0 and
    passes no gradient. The true gradient there is 1/sqrt(eps), which overflows when it is
    multiplied over some silent frames; near such a row it is just as large, so the guarded gradient
    jumps at that one point. The C++ kernel also guards rows whose spread is rounding, at most
    4.8e-7 of the mean (float64: 8.9e-16). "raw": the textbook formula.
    """

    norm: str = "ba"  # a key of PRESETS
    _: KW_ONLY
    cell_norm: str | None = None  # output: tanh reads N(c); carried: N(c) is the state too; state
    hidden_norm: bool = False  # h is N(o tanh(c)), as output and as recurrent input
    norm_kind: str = "layer"  # rms: no mean is subtracted; or a name given to asr.register_norm
    eps: float | None = None
    zero_variance: str = "guard"
    recurrent_gain: float = 0.1  # ba: the initial gain of N(W_h h); 1.0 is as published

    def __post_init__(self) -> None:
        kinds = (*NORM_KINDS, *REGISTERED)
        if is_registered(self.norm_kind):
            kinds = (*kinds, self.norm_kind)
        for name, value, allowed in (
            ("norm", self.norm, tuple(PRESETS)),
            ("cell_norm", self.cell_norm, (None, *CELL_NORMS)),
            ("norm_kind", self.norm_kind, kinds),
            ("zero_variance", self.zero_variance, ("guard", "raw")),
        ):
            if value not in allowed:
                choices = ", ".join(filter(None, allowed))
                raise ValueError(f"{name} {value!r} is not known; choose one of {choices}")
        registered = REGISTERED.get(self.norm_kind)
        if registered and registered.obstacle:
            raise ValueError(f"norm_kind {self.norm_kind!r} {registered.obstacle}")
        if self.eps is not None and not 0 < self.eps < math.inf:
            raise ValueError(f"eps is {self.eps}; it must be above 0 and finite")
        if not 0 <= self.recurrent_gain <= 1000:  # NaN is neither
            raise ValueError(f"recurrent_gain is {self.recurrent_gain}; it must be from 0 to 1000")
        _, cell_norm, eps = PRESETS[self.norm]
        self._check_fit(cell_norm)
        # The class is frozen: None is replaced here alone.
        object.__setattr__(self, "cell_norm", self.cell_norm or cell_norm)
        object.__setattr__(self, "eps", eps if self.eps is None else self.eps)
        if registered and (self.eps != eps or self.zero_variance != "guard"):
            raise ValueError(
                f"norm_kind {self.norm_kind!r} is registered: eps and zero_variance are its own"
            )

    def _check_fit(self, fixed: str) -> None:
        """Raise ValueError for a setting that does not fit `norm`, whose cell_norm is `fixed`."""
        norm, fit = self.norm, "use norm = ba, per_gate or joined"
        if norm not in VARIABLE and self.cell_norm not in (None, fixed):
            alone = "" if norm == "cell" else ", or norm = cell for a norm of c alone"
            raise ValueError(
                f"cell_norm = {self.cell_norm} does not fit norm = {norm}, which fixes it; "
                f"{fit}{alone}"
            )
        if norm not in VARIABLE and self.hidden_norm:
            raise ValueError(f"hidden_norm = true does not fit norm = {norm}; {fit}")
        if norm not in (*VARIABLE, "cell") and self.norm_kind != "layer":
            fit = "use norm = ba, per_gate, joined or cell"
            raise ValueError(f"norm_kind = {self.norm_kind} does not fit norm = {norm}; {fit}")

    def __str__(self) -> str:
        """norm='ba', and what differs from that preset: eps=1e-06."""
        preset = CellSettings(self.norm)
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(preset, f.name)]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ("norm", *changed))

    @property
    def gates(self) -> str:
        """What the norms of the gates take: none, split, joined or per_gate."""
        return PRESETS[self.norm][0]

    @property
    def affine(self) -> bool:
        """Have the norms of the gates gains?"""
        return self.norm in VARIABLE

    @property
    def swap(self) -> bool:
        """Does a step read h as its cell and c as its h?"""
        return self.norm == "thesis"

    @property
    def guard(self) -> bool:
        """Are rows of zero variance normalised to 0?"""
        return self.zero_variance == "guard"

    @property
    def norms_sum(self) -> bool:
        """Do the norms of the gates take W_x x + W_h h?"""
        return self.gates in ("joined", "per_gate")

    @property
    def norms_cell(self) -> bool:
        """Is there a norm of c?"""
        return self.cell_norm != "none"

    @property
    def shows_norm(self) -> bool:
        """Does the output read the normed c?"""
        return self.cell_norm in ("output", "carried")

    @property
    def carries_norm(self) -> bool:
        """Is the normed c the next cell state?"""
        return self.cell_norm in ("carried", "state")
