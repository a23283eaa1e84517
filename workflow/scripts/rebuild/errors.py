"""The one exception for conditions that a person has to act on."""


class StepError(Exception):
    """A step cannot go on: what happened, where, what was expected and seen, and what to do about it."""

    def __init__(
        self, what: str, *, where: str = "", expected: str = "", seen: str = "", remedy: str = ""
    ) -> None:
        self.what = what
        self.where = where
        self.expected = expected
        self.seen = seen
        self.remedy = remedy
        super().__init__(self.describe())

    def describe(self) -> str:
        """Return the message as lines of `label: text`, the empty ones left out."""
        labelled = {
            "where": self.where,
            "expected": self.expected,
            "seen": self.seen,
            "what to do": self.remedy,
        }
        return "\n".join(
            [self.what, *(f"  {label}: {text}" for label, text in labelled.items() if text)]
        )
