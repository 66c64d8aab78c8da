"""Backend "cpu" as an operator of torch, `layernorm_asr::lstm`, for graphs of torch.compile.

There a layer is one node for any number of frames. Plain calls use lstm.layer, which has less
overhead. An operator takes tensors and plain values: the weights of all directions are one list,
and the settings are a text.
"""

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.kernels.cpu import lstm
from asr.kernels.types import (
    LayerInput,
    LayerOutput,
    Weights,
    check_lengths,
    weight_shapes,
)

GIVEN = (
    "Tensor x, Tensor h, Tensor c, Tensor? mask, Tensor? lengths, Tensor[] weights, str settings, "
    "ScalarType products"
)


def layer(
    batch: LayerInput, weights: list[Weights], settings: str, products: torch.dtype
) -> LayerOutput:
    """All directions of one layer; the settings as settings_text writes them."""
    x, lengths, h, c, mask = batch
    flat = [w for one in weights for w in one if w is not None]
    lengths = torch.tensor(lengths, device="cpu") if isinstance(lengths, list) else lengths
    return LayerOutput(*forward(x, h, c, mask, lengths, flat, settings, products)[:3])


def settings_text(settings: CellSettings) -> str:
    """The settings as an argument of the operators."""
    return json.dumps(asdict(settings))


def _read_settings(text: str) -> CellSettings:
    return CellSettings(**json.loads(text))


def _read(
    x: Tensor,
    h: Tensor,
    c: Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    weights: list[Tensor],
    text: str,
    products: torch.dtype,
) -> tuple[lstm.Plan, LayerInput, list[Weights]]:
    """The arguments of an operator -> those of the functions in lstm.py."""
    settings = _read_settings(text)
    counts = None if lengths is None else check_lengths(lengths, x.shape[0], x.shape[1])
    batch = lstm.laid_out(LayerInput(x, counts, h, c, mask))
    names = weight_shapes(settings, x.shape[2], h.shape[2])
    starts = range(0, len(weights), len(names))
    named = [dict(zip(names, weights[start:], strict=False)) for start in starts]
    return lstm.Plan.of(batch, settings, products), batch, [Weights(**one) for one in named]


def _empty_buffers(x: Tensor, h: Tensor, settings: str) -> dict[str, Tensor]:
    """For all frames: how many are valid is not known when a graph is recorded."""
    frames = h.shape[0] * x.shape[0] * x.shape[1]
    sizes = lstm.saved_sizes(_read_settings(settings), frames, h.shape[2])
    return {name: x.new_empty(size) for name, size in sizes.items()}


@torch.library.custom_op("layernorm_asr::lstm", mutates_args=(), schema=f"({GIVEN}) -> Tensor[]")
def forward(*arguments: Any) -> list[Tensor]:
    """-> output (B, T, D * H), h, c (D, B, H), and the buffers for the backward pass."""
    plan, batch, weights = _read(*arguments)
    buffers = _empty_buffers(batch.x, batch.h, arguments[-2])
    result = lstm.layer_forward(plan, batch, weights, buffers)
    return [*result, *buffers.values()]


@forward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    x, h, c, *_, settings, _ = arguments
    output = x.new_empty(*x.shape[:2], h.shape[0] * h.shape[2])
    states = [x.new_empty(part.shape) for part in (h, c)]
    return [output, *states, *_empty_buffers(x, h, settings).values()]


@torch.library.custom_op(
    "layernorm_asr::lstm_backward",
    mutates_args=(),
    schema=f"({GIVEN}, Tensor[] saved, Tensor[] upstream) -> Tensor[]",
)
def backward(*arguments: Any) -> list[Tensor]:
    """saved: output and buffers; upstream: gradients of output, h, c -> of x, h, c, weights."""
    *arguments, (output, *saved), upstream = arguments
    plan, batch, weights = _read(*arguments)
    buffers = dict(zip(lstm.saved_sizes(plan.settings, 0, 0), saved, strict=True))
    upstream = [gradient.contiguous() for gradient in upstream]
    found = lstm.layer_backward(plan, batch, weights, (output, buffers), upstream, with_dx=True)
    # Vectors are parts of one tensor, which results of an operator must not be.
    return [part.clone() if part.dim() == 1 else part for part in found]


@backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    x, h, c, _, _, weights, *_ = arguments
    return [part.new_empty(part.shape) for part in (x, h, c, *weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, weights, ctx.settings, ctx.products = inputs
    result, _, _, *buffers = output
    ctx.buffers = len(buffers)
    ctx.save_for_backward(*tensors, result, *buffers, *weights)


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    x, h, c, mask, lengths, result, *others = ctx.saved_tensors
    saved, weights = [result, *others[: ctx.buffers]], others[ctx.buffers :]
    pairs = zip(gradients[:3], (result, h, c), strict=True)
    upstream = [torch.zeros_like(of) if one is None else one for one, of in pairs]
    arguments = x, h, c, mask, lengths, weights, ctx.settings, ctx.products
    dx, dh, dc, *flat = backward(*arguments, saved, upstream)
    return dx, dh, dc, None, None, flat, None, None


forward.register_autograd(_differentiate, setup_context=_save)
