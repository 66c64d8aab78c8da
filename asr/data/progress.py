"""The progress of long work on audio, as lines on the console."""

import time

from asr.errors import print_line

SECONDS = 30.0  # between two lines


class AudioProgress:
    """Reports how much of `total` seconds of audio is done, from time to time."""

    def __init__(self, label: str, total: float) -> None:
        self.label, self.total, self.done = label, total, 0.0
        self.began = self.last = time.monotonic()

    def add(self, seconds: float) -> None:
        """So much more is done; prints a line where one is due."""
        self.done += seconds
        now = time.monotonic()
        if now - self.last < SECONDS or not self.done:
            return
        self.last, rate = now, self.done / (now - self.began)  # seconds of audio per second
        left = max(0.0, self.total - self.done) / rate / 60
        share = 100 * self.done / self.total
        print_line(f"{self.label} {share:.0f} %, {rate:.0f} times real time, {left:.0f} min left")
