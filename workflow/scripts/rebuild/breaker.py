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

    def record(self, error: str | None) -> None:
        """Take note of one outcome (None is an answer).

        Raises:
            StepError: too many failures; names the commonest error.
        """
        self.recent.append(error)
        if len(self.recent) > self.window:
            self.recent.popleft()
        errors = [entry for entry in self.recent if entry]
        full = len(self.recent) == self.window
        tail = [*self.recent][-self.in_a_row :]
        if not (len(tail) == self.in_a_row and all(tail)) and not (
            full and len(errors) >= self.share * self.window
        ):
            return
        kinds = Counter(entry.split(":")[0] for entry in errors)
        kind, count = kinds.most_common(1)[0]
        example = next(entry for entry in reversed(errors) if entry.startswith(kind))
        raise StepError(
            f"{len(errors)} of the last {len(self.recent)} requests failed",
            expected=f"fewer than {self.in_a_row} failures in a row and {self.share:.0%} of {self.window}",
            seen=f"most often ({count} times) {example}",
            remedy="mend the cause (the server's log is named above); answers so far are kept, and the run resumes",
        )
