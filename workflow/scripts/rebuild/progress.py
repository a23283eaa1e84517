"""A progress line that reads well in a log file: done, rate, time to go."""

import time

from rebuild.step import say


class Progress:
    """Counts what is done of `total` and says so at most every `log_every_s` seconds."""

    def __init__(self, total: int, unit: str, log_every_s: float = 10.0) -> None:
        self.total = total
        self.unit = unit
        self.log_every_s = log_every_s
        self.done = 0
        self.began = self.spoke = time.monotonic()

    def update(self, count: int = 1, note: str = "") -> None:
        """Add `count`, and say where it stands when the last line is old enough."""
        self.done += count
        if time.monotonic() - self.spoke >= self.log_every_s:
            self.spoke = time.monotonic()
            say(self.line(note))

    def finish(self, note: str = "") -> None:
        """Say the last line."""
        say(self.line(note))

    def line(self, note: str = "") -> str:
        """Return `done/total unit (percent), rate, ETA`, and the note."""
        seconds = max(time.monotonic() - self.began, 1e-9)
        rate = self.done / seconds
        text = f"{self.done}/{self.total} {self.unit}"
        if self.total:
            text += f" ({100 * self.done / self.total:.0f} %)"
        text += f", {rate:.2f}/s"
        if 0 < self.done < self.total:
            text += f", about {duration((self.total - self.done) / rate)} to go"
        elif self.done >= self.total:
            text += f", in {duration(seconds)}"
        return f"{text}; {note}" if note else text


def duration(seconds: float) -> str:
    """Return a duration as people write it: `42 s`, `3 min 10 s`, `5 h 02 min`, `3 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
