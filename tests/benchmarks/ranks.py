"""Seconds per part of a training, as one process or under torchrun.

    python tests/benchmarks/ranks.py recipes/demo.yaml train.accumulate=2 ... --run DIR
    torchrun --nproc-per-node 2 -- tests/benchmarks/ranks.py recipes/demo.yaml ... --run DIR

The arguments are those of asr.train. At the end every rank prints the seconds spent in its steps
and in collective operations, including the time that it waits for slower ranks.
"""

import os
import time
from collections import Counter
from collections.abc import Callable

from asr import errors, train
from asr.training import trainer

TOGETHER = ("gather", "add_sums", "add_gradients")
spent: Counter[str] = Counter()


def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
    """The function, with its time added under the name."""

    def counted(*args: object, **more: object) -> object:
        begin = time.perf_counter()
        try:
            return call(*args, **more)
        finally:
            spent[name] += time.perf_counter() - begin

    return counted


def main() -> int:
    """Train, then print."""
    for name in ("take_step", *TOGETHER):
        setattr(trainer, name, timed(name, getattr(trainer, name)))
    code = train.main()
    seconds = "  ".join(f"{name} {spent[name]:.2f} s" for name in ("take_step", *TOGETHER))
    print(f"rank {os.environ.get('RANK', 0)}: {seconds}", flush=True)
    return code


if __name__ == "__main__":
    errors.run_command(main)
