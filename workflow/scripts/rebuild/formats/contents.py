"""What a file holds, by key, before it is written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rebuild.states.samples import Sample


@dataclass(frozen=True)
class Pieces:
    """A tensor that is made some rows at a time while it is written, so that it never lies in memory as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Iterator[Tensor]]

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def whole(self) -> Tensor:
        """Return the tensor."""
        return torch.cat([*self.make()])


Content = dict[str, "Tensor | Pieces | str"]


def ids_and_mask(sample: Sample) -> Content:
    """Return `input_ids` and `loss_mask`, int64 [S] each."""
    return {
        "input_ids": torch.from_numpy(sample.input_ids.astype("int64")),
        "loss_mask": torch.from_numpy(sample.loss_mask.astype("int64")),
    }


def needed(state: Tensor | None, name: str) -> Tensor:
    """Return a final state that a format cannot do without.

    Raises:
        ValueError: it was not captured, though `wanted_states` asks for it.
    """
    if state is None:
        raise ValueError(f"{name} was not captured")
    return state


def side_by_side(taps: Tensor) -> Tensor:
    """Return the layers' states [S, D, H] as [S, D·H], in layer order."""
    return taps.flatten(1)
