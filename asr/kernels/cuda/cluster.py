"""Backend "cluster": a layer's recurrence in one CUDA kernel, weights in registers (cluster.cu).

For bf16 products of up to 512 units, on GPUs with clusters of thread blocks (Hopper and later). The
rest of the layer is that of backend "cuda". NVRTC, which torch requires, compiles the kernel for
the layer's options and size in two seconds on first use. Nothing is recorded, so a new batch shape
costs nothing. Tested on the CPU by emulation, on a GPU by tests/benchmarks/gpu.py.
"""

import ctypes
import functools
import hashlib
import importlib.util
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asr.config.cell import CellSettings
from asr.io import atomic_writer
from asr.kernels.cpu.compiler import cache_folder
from asr.kernels.cuda import lstm
from asr.kernels.types import LayerInput, LayerOutput, Weights

UNITS, THREADS, MOST_BLOCKS = 32, 256, 16  # as in cluster.cu; blocks of a cluster
SOURCES = ("device.h", "cluster.cu")
TILES = (1, 2, 3, 4)  # groups of 8 utterances that a cluster computes

_POINTERS = (
    "gates", "weight", "h", "c", "mask", "lengths", "gain_h", "bias", "gain_c", "bias_c",
    "gain_hidden", "bias_hidden", "hs", "cs", "ah", "raw", "stats", "dhs", "dh", "dc", "dz", "dah",
    "dgates", "dstates",
)  # fmt: skip
_NUMBERS = ("S", "D", "B")


class Arguments(ctypes.Structure):
    """Arguments of cluster.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in _POINTERS] + [
        (name, ctypes.c_int) for name in _NUMBERS
    ]


class Kernel(NamedTuple):
    """A compiled kernel and the shared memory that it needs."""

    function: Any
    bytes: int


@functools.cache
def missing() -> str | None:
    """Why the backend cannot run on this machine; None where it can."""
    if reason := lstm.missing():
        return reason
    # find_spec of a module raises an error where its package is missing, as with torch for AMD.
    if not all(map(importlib.util.find_spec, ("cuda", "cuda.bindings"))):
        return "cuda-bindings is not installed"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        return f"{torch.cuda.get_device_name()} has no clusters of thread blocks"
    return None


def limit(H: int, products: torch.dtype) -> str | None:
    """Why it does not cover a layer of H units; None where it does."""
    if products != torch.bfloat16:
        return f"backend 'cluster' computes products in bf16, not in {products}"
    if H > UNITS * MOST_BLOCKS:
        return f"backend 'cluster' has room for {UNITS * MOST_BLOCKS} units, not {H}"
    return None


def layer(
    batch: LayerInput, weights: list[Weights], settings: CellSettings, products: torch.dtype
) -> LayerOutput:
    """All directions of one layer at once. Raises ValueError where `limit` has a reason."""
    if reason := limit(batch.h.shape[-1], products):
        raise ValueError(reason)
    plan = lstm.CudaPlan(settings, products, lstm.Loops(_forward, _backward, 1))
    return lstm.run_loops(batch, weights, plan)


def _forward(
    plan: lstm.CudaPlan,
    learns: bool,
    gates: Tensor,
    weight: Tensor,
    h: Tensor,
    c: Tensor,
    mask: Tensor | None,
    lengths: Tensor,
    *vectors: Tensor,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    S, D, B, _ = gates.shape
    H = h.shape[-1]
    settings = plan.settings
    hs, cs = gates.new_empty(S + 1, D, B, H), gates.new_empty(S + 1, D, B, H)
    ah = gates.new_empty(gates.shape if learns else 0, dtype=plan.dtype)
    raw = gates.new_empty((S, D, B, H) if learns and settings.carries_norm else 0)
    norms = {"none": 0, "per_gate": 4}.get(settings.gates, 1)
    norms += settings.norms_cell + settings.hidden_norm
    stats = gates.new_empty((S, D, B, norms, 2) if learns else 0)
    inputs = _inputs(gates, weight.to(plan.dtype), mask, lengths, vectors)
    _launch("lstm_forward", plan, **inputs, h=h, c=c, hs=hs, cs=cs, ah=ah, raw=raw, stats=stats)
    return hs, cs, (ah, raw, stats)


def _backward(
    plan: lstm.CudaPlan,
    needed: tuple[bool, ...],
    gates: Tensor,
    weight: Tensor,
    cs: Tensor,
    saved: tuple[Tensor, ...],
    mask: Tensor | None,
    lengths: Tensor,
    vectors: list[Tensor],
    dhs: Tensor,
    dh: Tensor,
    dc: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor | None]]:
    _, D, B, columns = gates.shape
    ah, raw, stats = saved
    dh, dc, dah = dh.clone(), dc.clone(), torch.empty_like(ah)
    dz = gates.new_empty(0 if plan.settings.norms_sum else gates.shape)
    groups = -(-B // 8)  # at least as many as the kernel has
    dgates = gates.new_zeros(groups, 2, D, columns)
    dstates = gates.new_zeros(groups, 4, D, columns // 4)
    inputs = _inputs(gates, weight.to(plan.dtype), mask, lengths, vectors)
    _launch(
        "lstm_backward", plan, **inputs, cs=cs, ah=ah, raw=raw, stats=stats, dhs=dhs, dh=dh, dc=dc,
        dz=dz, dah=dah, dgates=dgates, dstates=dstates,
    )  # fmt: skip
    sums = *dgates.sum(0), *dstates.sum(0)
    dvectors = [d if wanted else None for d, wanted in zip(sums, needed, strict=True)]
    if plan.settings.gates == "split":  # the bias is added to the input's part
        dvectors[1] = None
    return dh, dc, dah.to(gates.dtype) if plan.settings.norms_sum else dz, dah, dvectors


def _inputs(
    gates: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    lengths: Tensor,
    vectors: tuple[Tensor, ...] | list[Tensor],
) -> dict[str, Tensor | None]:
    """What both kernels read, by name."""
    names = ("gain_h", "bias", "gain_c", "bias_c", "gain_hidden", "bias_hidden")
    inputs = {"gates": gates.contiguous(), "weight": weight.contiguous()}
    return inputs | {"mask": mask, "lengths": lengths} | dict(zip(names, vectors, strict=True))


def _launch(name: str, plan: lstm.CudaPlan, **tensors: Tensor | None) -> None:
    """Run a kernel on tensors, named as in Arguments; those that are None or empty are not read."""
    S, D, B, columns = tensors["gates"].shape
    H, device = columns // 4, tensors["gates"].device
    macros, blocks = _macros(plan.settings, H, tensors["mask"]), -(-H // UNITS)
    tiles = _tiles(H, device, blocks, D, B)
    arguments = Arguments(S=S, D=D, B=B)
    for key, tensor in tensors.items():
        if tensor is not None and tensor.numel():
            setattr(arguments, key, tensor.data_ptr())
    _run(_compiled(macros, tiles, device, name), arguments, D * -(-B // (8 * tiles)), blocks)


def _macros(settings: CellSettings, H: int, mask: Tensor | None) -> tuple[str, ...]:
    options = {"H": H, "EPS": f"{settings.eps!r}f"} | lstm.kernel_options(settings, mask)
    return tuple(f"{key}={int(v) if isinstance(v, bool) else v}" for key, v in options.items())


def _tiles(H: int, device: torch.device, blocks: int, D: int, B: int) -> int:
    """The least groups of 8 utterances in a cluster with which all clusters run at once."""
    room = _room(H, device, blocks)
    return next((n for n in TILES if D * -(-B // (8 * n)) <= room), TILES[-1])


@functools.cache
def _room(H: int, device: torch.device, blocks: int) -> int:
    """The number of clusters that can run at once, in the kernel without norms."""
    from cuda.bindings import driver

    kernel = _compiled(_macros(CellSettings("none"), H, None), TILES[0], device, "lstm_forward")
    config = _configuration(kernel, 1, blocks)
    return _checked(driver.cuOccupancyMaxActiveClusters(kernel.function, config))


@functools.cache
def _compiled(macros: tuple[str, ...], tiles: int, device: torch.device, name: str) -> Kernel:
    from cuda.bindings import driver

    module = _module(macros, tiles, device)
    function = _checked(driver.cuModuleGetFunction(module, name.encode()))
    size = ctypes.c_int()
    place, _ = _checked(
        driver.cuModuleGetGlobal(module, name.replace("lstm_", "").encode() + b"_bytes")
    )
    _checked(driver.cuMemcpyDtoH(ctypes.addressof(size), place, 4))
    attributes = driver.CUfunction_attribute
    for key, value in (
        (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size.value),
    ):
        _checked(driver.cuFuncSetAttribute(function, key, value))
    return Kernel(function, size.value)


@functools.cache
def _module(macros: tuple[str, ...], tiles: int, device: torch.device) -> Any:
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device)
    return _checked(driver.cuModuleLoadData(machine_code(macros, tiles, f"sm_{major}{minor}")))


def machine_code(macros: tuple[str, ...], tiles: int, architecture: str) -> bytes:
    """Both kernels, compiled now or before. RuntimeError with the compiler's messages."""
    from cuda.bindings import nvrtc

    text = "".join((Path(__file__).parent / name).read_text() for name in SOURCES)
    options = [f"--gpu-architecture={architecture}", "--std=c++17", "-default-device"]
    options += [f"-D{macro}" for macro in (*macros, f"NT={tiles}")]
    version = _checked(nvrtc.nvrtcVersion())
    digest = hashlib.sha256(repr((text, options, version)).encode()).hexdigest()[:16]
    try:
        path = cache_folder() / f"cluster-{digest}.cubin"
        return path.read_bytes()
    except (OSError, RuntimeError):  # it may also be that no folder can be had
        code = compile_source(text, options)
    with suppress(OSError, RuntimeError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        with atomic_writer(cache_folder() / f"cluster-{digest}.cubin") as file:
            file.write(code)
    return code


def compile_source(text: str, options: list[str]) -> bytes:
    """Machine code. Needs no GPU. RuntimeError with the compiler's messages."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), b"cluster.cu", 0, [], []))
    failed, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if failed:
        log = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"NVRTC cannot compile cluster.cu: {log.decode()}")
    code = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return bytes(code)


def _run(kernel: Kernel, arguments: Arguments, clusters: int, blocks: int) -> None:
    from cuda.bindings import driver

    config = _configuration(kernel, clusters, blocks)
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
    launched = driver.cuLaunchKernelEx(config, kernel.function, ctypes.addressof(pointers), 0)
    _checked(launched)


def _configuration(kernel: Kernel, clusters: int, blocks: int) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = clusters * blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes = kernel.bytes
    config.hStream = torch.cuda.current_stream().cuda_stream
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster = attribute.value.clusterDim
    cluster.x, cluster.y, cluster.z = blocks, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


def _checked(result: tuple[Any, ...]) -> Any:
    """The results of a call of the CUDA API after its status. RuntimeError unless it succeeded."""
    status, *values = result
    if int(status):
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
