"""Time and memory of the LayerNorm-LSTM relative to nn.LSTM.

    OMP_NUM_THREADS=2 .venv/bin/python tests/benchmarks/lstm.py --json lstm.json

Three bidirectional layers of norm ba; forward without gradients, and forward and backward. In
every round each contestant runs once, so that other load affects all of them; a figure is the
median over the rounds of the time divided by fp32 nn.LSTM's time in the same round. "bf16" runs
under autocast. Peak memory in MiB is the rise
above a new process' memory before its first forward and backward pass. --backends python reference
adds slower backends, which are timed in the last rounds only. --cells compares every cell of
backend cpu with ba instead.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from asr.config.cell import PRESETS, CellSettings
from asr.kernels.dispatch import backends
from asr.nn.lstm import LayerNormLSTM

CASES = {  # B, T, I, H
    "B16 T400 I160 H256": (16, 400, 160, 256),
    "B16 T200 I1024 H256": (16, 200, 1024, 256),
    "B32 T100 I512 H512": (32, 100, 512, 512),
}
JUDGE = "nn.LSTM"
CELLS = {
    **{norm: CellSettings(norm) for norm in ("ba", *PRESETS)},
    **{f"{norm} rms": CellSettings(norm, norm_kind="rms") for norm in ("ba", "joined", "per_gate")},
    **{f"ba, c {c}": CellSettings("ba", cell_norm=c) for c in ("none", "carried", "state")},
    "joined, c output": CellSettings("joined", cell_norm="output"),
    "joined, hidden": CellSettings("joined", hidden_norm=True),
    "ba, hidden": CellSettings("ba", hidden_norm=True),
}
SLOW_ROUNDS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backends", nargs="*", choices=("python", "reference"), default=[])
    parser.add_argument("--cells", action="store_true")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        print(own_peak(*options.memory))
        return
    if (reason := backends()["cpu"]) is not None:
        sys.exit(f"backend cpu cannot run: {reason}")
    names = [JUDGE, f"{JUDGE} bf16", "ours", "ours bf16", *options.backends]
    if options.cells:
        names = list(CELLS)
    rows = [row for case in options.cases for row in measured(case, names, options)]
    table(rows, options.threads)
    if options.json:
        about = {"torch": torch.__version__, "threads": options.threads, "cpu": processor()}
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def contestant(name: str, I: int, H: int) -> nn.Module:  # noqa: E741
    shape = {"batch_first": True, "bidirectional": True}
    if name.startswith(JUDGE):
        return nn.LSTM(I, H, **shape)
    if name in CELLS:
        return LayerNormLSTM(I, H, **shape, backend="cpu", norm=CELLS[name])
    return LayerNormLSTM(I, H, **shape, backend="cpu" if name.startswith("ours") else name)


def passes(name: str, case: str) -> dict[str, Callable[[], None]]:
    """The timed functions: both kinds of pass of one contestant over its own input."""
    B, T, I, H = CASES[case]  # noqa: E741
    torch.manual_seed(0)
    lstm, x = contestant(name, I, H), torch.randn(B, T, I, requires_grad=True)
    upstream = torch.randn(B, T, 2 * H)

    def context() -> torch.autocast | nullcontext:
        half = name.endswith("bf16")
        return torch.autocast("cpu", torch.bfloat16) if half else nullcontext()

    def forward() -> None:
        with torch.no_grad(), context():
            lstm(x)

    def both() -> None:
        lstm.zero_grad(set_to_none=True)
        x.grad = None
        with context():
            output, _ = lstm(x)
        output.backward(upstream.to(output.dtype))

    return {"forward": forward, "forward+backward": both}


def measured(case: str, names: list[str], options: argparse.Namespace) -> list[dict]:
    """A row of figures for every contestant, relative to the first, and kind of pass."""
    runs = {name: passes(name, case) for name in names}
    kinds = list(runs[names[0]])
    seconds = {(name, kind): [] for name in names for kind in kinds}
    for each in range(-1, options.rounds):  # the first round is a warm-up
        late = each >= options.rounds - SLOW_ROUNDS
        for kind in kinds:
            for name in names:
                slow = name in options.backends
                took = timed(runs[name][kind]) if late or not slow else float("nan")
                if each >= 0:
                    seconds[name, kind].append(took)
    del runs
    peaks = {name: peak_memory(case, name, options.threads) for name in names}
    return [
        row(case, name, kind, seconds[name, kind], seconds[names[0], kind])
        | ({"peak_mib": peaks[name]} if kind != "forward" else {})
        for kind in kinds
        for name in names
    ]


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def row(case: str, name: str, kind: str, own: list[float], judge: list[float]) -> dict:
    pairs = [(a, b) for a, b in zip(own, judge, strict=True) if a == a]
    return {
        "case": case,
        "pass": kind,
        "name": name,
        "ms": 1e3 * statistics.median(a for a, _ in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def peak_memory(case: str, name: str, threads: int) -> float:
    """MiB, measured in a separate process."""
    command = [sys.executable, __file__, "--threads", str(threads), "--memory", case, name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def own_peak(case: str, name: str) -> float:
    """The rise, in MiB, of this process' resident memory over three training passes."""
    run = passes(name, case)["forward+backward"]
    tiny = contestant(name, 16, 16)
    tiny(torch.randn(2, 3, 16))[0].sum().backward()  # libraries and thread pools are not counted
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = status("VmRSS")
    for _ in range(3):
        run()
    return (status("VmHWM") - before) / 1024


def status(key: str) -> int:
    """A value of /proc/self/status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def table(rows: list[dict], threads: int) -> None:
    judge = rows[0]["name"]
    memory = {r["case"]: r["peak_mib"] for r in rows if r["name"] == judge and "peak_mib" in r}
    print(f"torch {torch.__version__}, {threads} threads, time and memory / {judge} (fp32)")
    for r in rows:
        peak = ""
        if "peak_mib" in r:
            peak = f"  peak {r['peak_mib']:5.0f} MiB {r['peak_mib'] / memory[r['case']]:5.2f}"
        print(f"{r['case']:20} {r['pass']:17} {r['name']:16} "
              f"{r['ms']:7.1f} ms {r['ratio']:5.2f}{peak}")  # fmt: skip


if __name__ == "__main__":
    main()
