"""Files of one `torch.save` dictionary, only ever written here."""

from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from rebuild.formats.contents import Content
from rebuild.formats.writing import FileFacts, HashedFile, write_file


def write_torch(path: Path, content: Content) -> FileFacts:
    """Write a dictionary of tensors and texts, whole or not at all. The same content gives the same bytes.

    Raises:
        StepError: the disk is full or refuses.
    """
    stored = {key: owned(cast("Tensor | str", value)) for key, value in content.items()}
    size = sum(value.nbytes for value in stored.values() if isinstance(value, Tensor))

    # Given a path, torch would record the temporary file's name, and with it the process id.
    def fill(file: HashedFile) -> None:
        torch.save(stored, file)  # type: ignore[arg-type]

    return write_file(path, fill, size)


def owned(value: Tensor | str) -> Tensor | str:
    """Return a tensor that is all of its memory, a copy if need be: torch stores all that a slice is taken from."""
    if isinstance(value, str):
        return value
    whole = value.is_contiguous() and value.untyped_storage().nbytes() == value.nbytes
    return value if whole else value.clone(memory_format=torch.contiguous_format)
