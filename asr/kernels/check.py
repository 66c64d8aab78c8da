"""A check of values: does a backend compute on this GPU what `reference` does?

Tests on machines without a GPU cannot answer this for each GPU, driver and version of Triton, so
backend "auto" asks before it first takes a GPU's backend for a layer of some size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.errors import is_out_of_memory
from asr.kernels import reference
from asr.kernels.types import LayerInput, LayerOutput, Weights, weight_shapes

Layer = Callable[[LayerInput, list[Weights], CellSettings, torch.dtype], LayerOutput]

FRAMES = 7
# Largest |difference| / |reference| of a result. A TF32 product errs by 3e-4; with bf16 products a
# value of the check passes up to 14, each of which rounds three numbers by at most 2^-9.
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
    try:
        ours = results(layer, batch, weights, settings, products)
    except Exception as error:  # those of a compiler and a driver are of any kind
        if is_out_of_memory(error):
            raise
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    for result, judge in zip(ours, results(reference.layer, batch, weights, settings), strict=True):
        error = float((result - judge).norm() / judge.norm().clamp_min(1e-6))
        if not error <= BOUNDS[products]:  # NaN is no small error
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
