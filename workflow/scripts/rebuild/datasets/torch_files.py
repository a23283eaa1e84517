"""Tokenized datasets of one `torch.save` dictionary per sample: SpecForge's offline files, and ModelOpt's dumps.

No file can run code here: torch reads it with `weights_only`, which knows tensors, numbers, text and containers and
refuses every other object. Of its tensors, only ids and mask are read from the disk.
"""

import gzip
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from rebuild.datasets.columns import (
    BATCH_TOKENS,
    Batch,
    Places,
    from_rows,
    locate_columns,
)
from rebuild.errors import StepError

BATCH_FILES = 256


def torch_names(file: Path) -> list[str]:
    """Return the keys of the dictionary in a file."""
    with _loaded(file) as sample:
        return [str(key) for key in sample]


def read_torch(files: list[tuple[Path, str]], text: bool = True) -> Iterator[Batch]:
    """Yield samples in the order of their `files`, given with labels, which name the samples.

    Raises:
        StepError: a file is damaged, holds other objects than tensors, or the first lacks ids or mask.
    """
    places: Places | None = None
    rows: list[dict[str, Any]] = []
    labels: list[str] = []
    tokens = 0
    for file, label in files:
        with _loaded(file) as sample:
            places = places or _places(sample, file, text)
            rows.append({place: _plain(sample.get(place)) for place in places.values()})
        labels.append(label)
        tokens += _length(rows[-1]["input_ids"])
        if len(rows) == BATCH_FILES or tokens >= BATCH_TOKENS:
            yield from_rows(rows, places, partial(list.__getitem__, labels))
            rows, labels, tokens = [], [], 0
    if places and rows:
        yield from_rows(rows, places, partial(list.__getitem__, labels))


def _places(sample: dict[str, Any], file: Path, text: bool) -> Places:
    """Return where the columns are; samples are named by their files, which tells them apart."""
    places = locate_columns(list(map(str, sample)), file, text)
    return {ours: place for ours, place in places.items() if ours != "sample_id"}


def _plain(value: Any) -> Any:
    """Return a tensor as lists of numbers, [1, S] as [S]; a tensor of another shape is no row."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0:
        return value.item()
    return value.reshape(-1).tolist() if value.shape[:-1].numel() == 1 else None


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


@contextmanager
def _loaded(file: Path) -> Iterator[dict[str, Any]]:
    """Give the dictionary in a file, its tensors on the disk until they are looked at.

    Raises:
        StepError: the file is damaged or holds something else.
    """
    with _refusing(file), _unzipped(file) as path:
        # Only the zip archives that torch has written since 1.6 can be mapped.
        sample = torch.load(
            str(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
        if not isinstance(sample, dict):
            raise _wrong(
                file, "a dictionary of tensors", f"an object of type {type(sample).__name__}"
            )
        yield sample


@contextmanager
def _unzipped(file: Path) -> Iterator[Path]:
    """Give the file, or for one that ends in .gz, a temporary file with what it holds."""
    if file.suffix.lower() != ".gz":
        yield file
        return
    with tempfile.NamedTemporaryFile() as whole:
        with gzip.open(file, "rb") as packed:
            shutil.copyfileobj(packed, whole)
        whole.flush()
        yield Path(whole.name)


@contextmanager
def _refusing(file: Path) -> Iterator[None]:
    try:
        yield
    except UnpicklingError as error:
        raise _wrong(
            file,
            "a whole file of torch.save that holds nothing but tensors, numbers, text, lists and dictionaries",
            f"a pickle that is refused, as one that is damaged or could run code: {_short(error)}",
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError, zlib.error) as error:
        raise _wrong(file, "a whole file of torch.save", _short(error)) from error


def _short(error: Exception) -> str:
    """Return what torch found, without its advice, which is to read the file unsafely."""
    found = error.__context__ if isinstance(error.__context__, UnpicklingError) else error
    return f"{type(found).__name__}: {' '.join(str(found).split()).partition(' Please use')[0]}"


def _wrong(file: Path, expected: str, seen: str) -> StepError:
    return StepError(
        "a sample's file cannot be read",
        where=str(file),
        expected=expected,
        seen=seen,
        remedy="write it again with plain tensors (torch.save of a dictionary), or remove it",
    )
