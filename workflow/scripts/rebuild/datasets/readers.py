"""Any tokenized dataset, read in a stream as batches of this workflow's columns: the way into `audit_dataset`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rebuild.datasets import arrow, jsonl
from rebuild.datasets.columns import Batch
from rebuild.errors import StepError
from rebuild.tables import TOKENIZED

OURS = "tokenized shards of this workflow"
PARQUET = "Parquet"
ARROW = "Arrow streams"
SAVED = "a dataset saved by the `datasets` library"
JSONL = "lines of JSON"
TORCH = "one torch file per sample"
SUFFIXES = {
    PARQUET: (".parquet",),
    JSONL: (".jsonl", ".jsonl.gz"),
    TORCH: (".ckpt", ".ckpt.gz", ".pt"),
    ARROW: (".arrow",),
}
KNOWN = (
    "a file or folder of Parquet or JSONL with input_ids and loss_mask (or labels), a folder of `save_to_disk`, "
    "or a folder of SpecForge's *.ckpt or ModelOpt's *.pt"
)
SHOWN = 8


@dataclass(frozen=True)
class Dataset:
    """What a path was recognised as: its format, its files in the order of rows, the places of its columns.

    `rows` is None where counting them would be to read them.
    """

    path: Path
    format: str
    files: tuple[Path, ...]
    columns: tuple[str, ...]
    rows: int | None


def describe_dataset(path: Path) -> Dataset:
    """Recognise a tokenized dataset and count its rows where that is cheap.

    Raises:
        StepError: it is of no known format, of several at once, or cannot be read.
    """
    folders = arrow.saved_folders(path)
    if folders:
        files = [file for _, folder in folders for file in arrow.saved_files(folder)]
        return _describe(path, SAVED, files, arrow.arrow_names(files[0]) if files else [])
    kind, files, names = _recognise(path)
    if kind == PARQUET and set(TOKENIZED.names) <= set(names):
        kind = OURS
    return _describe(path, kind, files, names)


def read_dataset(path: Path, text: bool = True) -> Iterator[Batch]:
    """Yield a tokenized dataset as record batches of `datasets.columns.DATASET`, a bounded amount at a time.

    What the dataset does not have is null; a row without an id is named by its file and place, in brackets
    counted from 0, after a colon the number of its line. Broken rows come as they are: lists of different
    length, odd values, null where no numbers are. Without `text`, that column is not read.

    Raises:
        StepError: see `describe_dataset`; or a file, a line or a sample cannot be read.
    """
    folders = arrow.saved_folders(path)
    if folders:
        for label, folder in folders:
            yield from arrow.read_saved(folder, label, text)
        return
    kind, files, _ = _recognise(path)
    labelled = [(file, _label(path, file)) for file in files]
    if kind == TORCH:
        from rebuild.datasets.torch_files import read_torch  # torch takes seconds to import

        yield from read_torch(labelled, text)
        return
    readers = {PARQUET: arrow.read_parquet, JSONL: jsonl.read_jsonl, ARROW: arrow.read_arrow}
    for file, label in labelled:
        yield from readers[kind](file, label, text)


def _describe(path: Path, kind: str, files: list[Path], names: list[str]) -> Dataset:
    counters: dict[str, Callable[[Path], int]] = {
        PARQUET: arrow.parquet_rows,
        OURS: arrow.parquet_rows,
        ARROW: arrow.arrow_rows,
        SAVED: arrow.arrow_rows,
        TORCH: lambda file: 1,
    }
    count = counters.get(kind)
    rows = sum(map(count, files)) if count else None
    return Dataset(path, kind, tuple(files), tuple(names), rows)


def _recognise(path: Path) -> tuple[str, list[Path], list[str]]:
    """Return format, files and the places of the columns: of the one kind of files that hold input_ids."""
    seen: list[str] = []
    found = []
    failures = []
    for kind, files in _files_by_kind(path).items():
        try:
            names = _first_names(kind, files)
        except StepError as error:
            failures.append(error)
            continue
        seen.append(f"{files[0].name} with {', '.join(names[:SHOWN]) or 'nothing in it'}")
        if "input_ids" in names:
            found.append((kind, files, names))
    if failures and not found:
        raise failures[0]
    if len(found) != 1:
        raise _unrecognised(path, [kind for kind, _, _ in found], seen)
    return found[0]


def _first_names(kind: str, files: list[Path]) -> list[str]:
    """Return the places of the columns of the first file that has any."""
    if kind == TORCH:
        from rebuild.datasets.torch_files import torch_names

        return torch_names(files[0])
    reader = {PARQUET: arrow.parquet_names, JSONL: jsonl.jsonl_names, ARROW: arrow.arrow_names}[
        kind
    ]
    return next(filter(None, map(reader, files)), [])


def _files_by_kind(path: Path) -> dict[str, list[Path]]:
    """Return the files of every known kind: the path itself, or all below it, sorted by path."""
    files = sorted(_walk(path), key=str) if path.is_dir() else [path] * path.is_file()
    kinds: dict[str, list[Path]] = {}
    for file in files:
        for kind, suffixes in SUFFIXES.items():
            if file.name.lower().endswith(suffixes):
                kinds.setdefault(kind, []).append(file)
    return kinds


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, but for hidden ones, which are other programs' work in progress."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _label(path: Path, file: Path) -> str:
    name = file.relative_to(path).as_posix() if path.is_dir() else file.name
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _unrecognised(path: Path, kinds: list[str], seen: list[str]) -> StepError:
    several = len(kinds) > 1
    return StepError(
        "several datasets in one place" if several else "no tokenized dataset found",
        where=str(path),
        expected=KNOWN,
        seen=" and ".join(kinds) if several else "; ".join(seen) or _what_is_there(path),
        remedy="give the file or folder of one tokenized set: --config dataset=PATH",
    )


def _what_is_there(path: Path) -> str:
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"a folder with {', '.join(names[:SHOWN]) or 'nothing in it'}{more}"
    return "a file of another kind" if path.exists() else "no such file or folder"
