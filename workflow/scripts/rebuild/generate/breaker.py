"""Stops a job whose requests keep failing, before a shard is filled with errors."""

from collections import Counter, deque
from dataclasses import dataclass, field

from rebuild.errors import StepError


@dataclass
class Breaker:
    """Stops a job whose requests fail in a row or by half: something is wrong with the server, not with the prompts."""

    in_a_row: int = 20
    window: int = 100
    share: float = 0.5
    recent: deque[str | None] = field(default_factory=deque)
    failed: int = 0  # of the recent ones
    running: int = 0  # failures in a row up to now

    def record(self, error: str | None) -> None:
        """Take note of one outcome (None is an answer).

        Raises:
            StepError: too many failures; names the commonest error.
        """
        self.recent.append(error)
        self.failed += error is not None
        self.running = self.running + 1 if error is not None else 0
        if len(self.recent) > self.window:
            self.failed -= self.recent.popleft() is not None
        half = len(self.recent) == self.window and self.failed >= self.share * self.window
        if self.running < self.in_a_row and not half:
            return
        errors = [entry for entry in self.recent if entry is not None]
        kinds = Counter(entry.split(":")[0] for entry in errors)
        kind, count = kinds.most_common(1)[0]
        example = next(entry for entry in reversed(errors) if entry.startswith(kind))
        raise StepError(
            f"{len(errors)} of the last {len(self.recent)} requests failed",
            expected=f"fewer than {self.in_a_row} failures in a row and {self.share:.0%} of {self.window}",
            seen=f"most often ({count} times) {example}",
            remedy="mend the cause (the server's log is named above); answers so far are kept, and the run resumes",
        )
