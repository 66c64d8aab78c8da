"""A check of values: does a backend compute on this GPU what `reference` does?

Tests on machines without a GPU cannot answer this for each GPU, driver and version of Triton, so
backend "auto" asks before it first takes a GPU's backend for a layer of some size, or for decoders.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.errors import is_out_of_memory
from asr.kernels import reference
from asr.kernels.types import (
    DecoderConstants,
    DecoderInput,
    DecoderOutput,
    LayerInput,
    LayerOutput,
    Weights,
    weight_shapes,
)

Layer = Callable[[LayerInput, list[Weights], CellSettings, torch.dtype], LayerOutput]

FRAMES = 7
# Largest |difference| / |reference| of a result. A TF32 product errs by 3e-4; with bf16 products a
# value of the check passes up to 14, each of which rounds three numbers by at most 2^-9. A decoder
# whose products torch's operators round so errs by at most 0.026, in 16 combinations of norms.
BOUNDS = {torch.float32: 4e-3, torch.bfloat16: 0.05}


def fault(
    layer: Layer,
    settings: CellSettings,
    products: torch.dtype,
    shape: tuple[int, int, int],
    device: torch.device,
) -> str | None:
    """Why a layer of D directions, H units and B utterances (shape) must not be computed so; None
    where output, states and gradients of a ragged batch are those of `reference`, within BOUNDS.

    A lack of memory is raised: it is no fault of the backend, and a smaller batch may fit.
    """
    batch, weights = random_layer(settings, shape, FRAMES, device)
    lengths = [FRAMES, *(1 + row % FRAMES for row in range(shape[2] - 1))]
    batch = batch._replace(lengths=lengths)
    ours = functools.partial(results, layer, batch, weights, settings, products)
    judge = functools.partial(results, reference.layer, batch, weights, settings)
    return _difference(ours, judge, BOUNDS[products])


def decoder_fault(
    run: Callable[..., DecoderOutput],
    settings: CellSettings,
    products: torch.dtype,
    device: torch.device,
) -> str | None:
    """As fault, of a small decoder with location-aware attention and two layers."""
    batch = random_decoder(settings, DecoderSizes(), device)
    ours = functools.partial(decoder_results, run, *batch, settings, products)
    judge = functools.partial(decoder_results, reference.run_decoder, *batch, settings)
    return _difference(ours, judge, BOUNDS[products])


def _difference(
    ours: Callable[[], list[Tensor]], judge: Callable[[], list[Tensor]], bound: float
) -> str | None:
    try:
        found = ours()
    except Exception as error:  # those of a compiler and a driver are of any kind
        if is_out_of_memory(error):
            raise
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    for result, exact in zip(found, judge(), strict=True):
        error = float((result - exact).norm() / exact.norm().clamp_min(1e-6))
        if not error <= bound:  # NaN is no small error
            return f"a result differs from the reference by {error:.2g} of its size"
    return None


def random_layer(
    settings: CellSettings, shape: tuple[int, int, int], T: int, device: torch.device
) -> tuple[LayerInput, list[Weights]]:
    """Of D directions, H units and inputs, B utterances of T frames; the same in every call."""
    D, H, B = shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    with torch.inference_mode(False):
        directions = []
        for _ in range(D):
            named = {}
            for name, size in weight_shapes(settings, H, H).items():
                noise = draw(*size) * (H**-0.5 if len(size) == 2 else 0.1)
                named[name] = (noise + name.startswith("gain")).requires_grad_()
            directions.append(Weights(**named))
        x, h, c = draw(B, T, H).requires_grad_(), draw(D, B, H), draw(D, B, H)
        return LayerInput(x, None, h, c, None), directions


def results(
    layer: Layer,
    batch: LayerInput,
    weights: list[Weights],
    settings: CellSettings,
    products: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Output and states, and the gradients of x and of all weights."""
    off = torch.autocast(batch.x.device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), off:
        found = layer(batch, weights, settings, products)
        learned = [batch.x, *(w for cell in weights for w in cell if w is not None)]
        total = found.output.square().sum() + found.h.sum() + found.c.sum()
        return [*(part.detach() for part in found), *torch.autograd.grad(total, learned)]


class DecoderSizes(NamedTuple):
    """More than a tile of each kind; kind: of attention."""

    U: int = 5
    B: int = 3
    T: int = 301
    E: int = 136
    M: int = 24
    H: int = 72
    A: int = 40
    C: int = 10
    W: int = 51
    layers: int = 2
    kind: str = "location"


Decoder = tuple[DecoderInput, list[Weights], DecoderConstants]


def random_decoder(
    settings: CellSettings, sizes: DecoderSizes, device: torch.device, dropout: bool = False
) -> Decoder:
    """A ragged batch with gradients, its weights small enough for little chaos; the same in every
    call.
    """
    U, B, T, E, M, H, A, C, W, layers, kind = sizes
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=generator, device=device)

    with torch.inference_mode(False):
        valid = torch.arange(T, device=device) < torch.tensor(
            [T, *(1 + 37 * row % T for row in range(1, B))], device=device
        ).unsqueeze(1)
        inputs = [draw(U, B, M), draw(B, T, E) * valid[..., None], draw(B, T, A)]
        inputs.append(draw(A, H, scale=H**-0.5))
        inputs.append(None if kind == "dot" else draw(1, A, scale=2 * A**-0.5))
        location = [draw(A, C, scale=C**-0.5), draw(C, 2, W, scale=0.5)]
        inputs += location if kind == "location" else [None, None]
        cells = []
        for size in [M + E, *[H] * (layers - 1)]:
            named = {}
            for name, shape in weight_shapes(settings, size, H).items():
                noise = draw(*shape) * (shape[1] ** -0.5 if len(shape) == 2 else 0.1)
                named[name] = noise + name.startswith("gain")
            gain = next((n for n in ("gain_hh", "gain_gates") if n in named), "weight_hh")
            named[gain] = 0.3 * named[gain]
            cells.append(Weights(**{name: w.requires_grad_() for name, w in named.items()}))
        masks = [(draw(B, H) > -1).float() / 0.84 if dropout else None for _ in range(layers)]
        keep = (draw(layers, U, B, H) > -1).float() / 0.84 if dropout else None
        first = torch.zeros(B, T, device=device)
        first[:, 0] = 1.0
        inputs = DecoderInput(*(t if t is None else t.requires_grad_() for t in inputs))
        return inputs, cells, DecoderConstants(valid, first, tuple(masks), keep)


def decoder_results(
    run: Callable[..., DecoderOutput],
    inputs: DecoderInput,
    cells: list[Weights],
    constants: DecoderConstants,
    *options: Any,
) -> list[Tensor]:
    """Outputs, and the gradients of all inputs and weights."""
    off = torch.autocast(inputs.states.device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), off:
        found = run(inputs, cells, constants, *options)
        learned = [t for part in (inputs, *cells) for t in part if t is not None]
        total = sum(part.square().sum() for part in found)
        return [*(part.detach() for part in found), *torch.autograd.grad(total, learned)]
