"""CPU time of one step of the speller's cell relative to nn.LSTMCell and to torch operators.

    OMP_NUM_THREADS=1 .venv/bin/python tests/benchmarks/lstm_step.py

Without gradients, as in a search: rows are utterances times hypotheses. A figure is the
median over interleaved rounds of the CPU time divided by nn.LSTMCell's in the same round.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from asr.nn.lstm import LayerNormLSTMCell

ROWS, INPUT, HIDDEN, STEPS = (4, 40), 640, 256, 100


def contestants(rows: int) -> dict[str, Callable[[], None]]:
    """A name -> STEPS steps, each from the state before."""
    x = torch.randn(rows, INPUT)
    start = torch.zeros(rows, HIDDEN), torch.zeros(rows, HIDDEN)
    judge = nn.LSTMCell(INPUT, HIDDEN)
    ours = LayerNormLSTMCell(INPUT, HIDDEN, norm="ba", backend="cpu")
    plain = LayerNormLSTMCell(INPUT, HIDDEN, norm="none", backend="cpu")
    slow = LayerNormLSTMCell(INPUT, HIDDEN, norm="ba", backend="reference")

    def repeat(cell: nn.Module, *more: object) -> Callable[[], None]:
        def run() -> None:
            state = start
            for _ in range(STEPS):
                state = cell(x, state, *more)

        return run

    return {
        "nn.LSTMCell": repeat(judge),
        "ours, ba": repeat(ours, None, ours.loop_weights()),
        "ours, none": repeat(plain, None, plain.loop_weights()),
        "reference, ba": repeat(slow, None, slow.loop_weights()),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for rows in ROWS:
        runs = contestants(rows)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, run in runs.items():
                begin = time.process_time()
                run()
                seconds[name].append(time.process_time() - begin)
        for name, own in seconds.items():
            pairs = zip(own, seconds["nn.LSTMCell"], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            micro = 1e6 * statistics.median(own) / STEPS
            print(json.dumps({"rows": rows, "name": name, "us": micro, "ratio": ratio}))


if __name__ == "__main__":
    main()
