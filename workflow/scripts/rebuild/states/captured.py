"""What is captured of a sample, whichever backend does it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from rebuild.errors import StepError


@dataclass(frozen=True)
class Wanted:
    """What to capture: ids of layers, ascending, and the last layer's output before or after the final norm.

    Id k is the output of the 0-based decoder layer k.
    """

    layers: tuple[int, ...]
    pre_norm: bool = False
    post_norm: bool = False


@dataclass(frozen=True)
class Captured:
    """The states of one sample of S tokens, bfloat16 on the CPU: D wanted layers, and the final state where it is wanted.

    `taps` is [S, D, H] in the order of the layers' ids; `pre_norm` and `post_norm` are the last layer's output before and
    after the model's final norm, [S, H] each, or None.
    """

    taps: Tensor
    pre_norm: Tensor | None = None
    post_norm: Tensor | None = None


class SampleError(StepError):
    """One of the samples that were given to a backend cannot be captured; `position` says which of them."""

    position = 0

    @classmethod
    def about(cls, position: int, error: StepError) -> Self:
        """Return an error as one about the sample at that position."""
        stop = cls(
            error.what,
            where=error.where,
            expected=error.expected,
            seen=error.seen,
            remedy=error.remedy,
        )
        stop.position = position
        return stop


# Takes token ids of samples; yields each sample's position among them and its states, as they are ready.
CaptureAll = Callable[[Sequence[Sequence[int]]], Iterator[tuple[int, Captured]]]
