"""The residual stream of a Transformer: where each sublayer is normalised and how it is added.

Every sublayer has exactly one norm:

    pre    x <- alpha x + dropout(sublayer(norm(x)))      Nguyen & Salazar 2019; Xiong et al. 2020
    post   x <- norm(alpha x + dropout(sublayer(x)))      Vaswani et al. 2017

With `pre` nothing normalises the stream itself, so each stack ends with one more norm; with `post`
there is none to add. alpha is 1 in both papers; DeepNet raises it.
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from asr.nn.dropout import Dropout
from asr.nn.norm import make_norm

POSITIONS = ("pre", "post")


class Residual(nn.Module):
    """The way into a sublayer and back: `x = r.leave(x, sublayer(r.enter(x)))`.

    Raises ValueError for an unknown norm or norm_position, or alpha <= 0.
    """

    def __init__(
        self,
        size: int,
        norm: str = "layer",
        norm_position: str = "pre",
        alpha: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm_position not in POSITIONS:
            raise ValueError(f"norm_position {norm_position!r} is unknown: choose pre or post")
        if not alpha > 0:
            raise ValueError(f"residual_scale {alpha} must be above 0")
        self.norm = make_norm(norm, size)
        self.pre = norm_position == "pre"
        self.alpha = alpha
        self.dropout = Dropout(dropout)

    def enter(self, x: Tensor) -> Tensor:
        """The sublayer's input, (..., E)."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, output: Tensor) -> Tensor:
        """The new stream from the old one and the sublayer's output, both (..., E)."""
        stream = self.dropout(output).add(x, alpha=self.alpha)
        return stream if self.pre else self.norm(stream)

    def extra_repr(self) -> str:
        return f"norm_position={'pre' if self.pre else 'post'}, alpha={self.alpha}"


class Scale(NamedTuple):
    """alpha on the residual stream; gain of the initial feed-forward, value and output weights."""

    alpha: float
    gain: float = 1.0


def residual_scales(
    setting: float | str | Mapping[str, float], encoder_layers: int, decoder_layers: int
) -> tuple[Scale, Scale]:
    """The scales of the encoder and of the decoder.

    `setting` is one alpha, `{"encoder": a, "decoder": b}`, or `deepnet`, meant for `post`: with N
    encoder and M decoder layers (Wang et al. 2022, arXiv:2203.00555, figure 2, beta is our gain)

        encoder   alpha = 0.81 (N^4 M)^(1/16)   beta = 0.87 (N^4 M)^(-1/16)
        decoder   alpha = (3 M)^(1/4)           beta = (12 M)^(-1/4)

    Raises ValueError for anything else.
    """
    if setting == "deepnet":
        depth = (encoder_layers**4 * decoder_layers) ** (1 / 16)
        decoder = Scale((3 * decoder_layers) ** 0.25, (12 * decoder_layers) ** -0.25)
        return Scale(0.81 * depth, 0.87 / depth), decoder
    encoder_alpha, decoder_alpha = per_stack("residual_scale", setting)
    return Scale(encoder_alpha), Scale(decoder_alpha)


def per_stack(name: str, setting: float | str | Mapping[str, float]) -> tuple[float, float]:
    """(encoder's, decoder's) of one number for both or a mapping with exactly these two keys."""
    if isinstance(setting, Mapping) and set(setting) == {"encoder", "decoder"}:
        return setting["encoder"], setting["decoder"]
    if isinstance(setting, (int, float)):
        return setting, setting
    raise ValueError(f"{name} {setting!r} is neither a number nor one for encoder and decoder each")
