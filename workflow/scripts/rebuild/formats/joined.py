"""speculators' shards as one data path: a data set of all rows, and the states under the rows' new numbers.

Nothing is copied: the set's Arrow files and the states are links, relative ones, to those of the shards.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from rebuild.errors import StepError
from rebuild.files import read_json, sha256_json, sync_folder, write_json
from rebuild.formats.saved_dataset import INFO, STATE
from rebuild.formats.speculators import DATASET, STATES, hs_name

FILES = "_data_files"  # of a set's state: its Arrow files, in order
FINGERPRINT = "_fingerprint"


@dataclass(frozen=True)
class SavedShard:
    """One shard's data set: where it is, what its state says, and how many rows it has."""

    folder: Path
    state: dict[str, Any]
    rows: int

    @property
    def files(self) -> list[Path]:
        """Its Arrow files, in order."""
        return arrow_files(self.folder, self.state)


def join_shards(shards: Sequence[Path], joined: Path) -> int:
    """Make `joined` the data path of all `shards` (their folders), in order; return the number of rows.

    It is made beside and renamed, an earlier one giving way to it. Memory does not grow with the rows.

    Raises:
        StepError: a shard lacks its data set, or states of its rows.
    """
    making, retired = (joined.with_name(f".{joined.name}.{name}") for name in ("making", "old"))
    for path in (making, retired):
        shutil.rmtree(path, ignore_errors=True)
    (making / STATES).mkdir(parents=True)
    saved = [read_shard(shard / DATASET) for shard in shards]
    write_set(making, saved, joined)
    first = 0
    for shard in saved:
        link_states(making / STATES, joined / STATES, shard, first)
        first += shard.rows
    sync_folder(making / STATES)
    sync_folder(making)
    if joined.exists():
        joined.rename(retired)
    making.rename(joined)
    sync_folder(joined.parent)
    shutil.rmtree(retired, ignore_errors=True)
    return first


def read_shard(folder: Path) -> SavedShard:
    """Return a shard's data set.

    Raises:
        StepError: it is not there, or not whole.
    """
    try:
        state = read_json(folder / STATE)
        rows = sum(count_rows(path) for path in arrow_files(folder, state))
    except (OSError, ValueError, KeyError) as error:
        raise incomplete(folder, "the data set of the shard's samples", str(error)) from error
    return SavedShard(folder, state, rows)


def arrow_files(folder: Path, state: dict[str, Any]) -> list[Path]:
    """Return the Arrow files that a set's state names."""
    return [folder / file["filename"] for file in state[FILES]]


def count_rows(arrow: Path) -> int:
    """Return the rows of an Arrow stream; only the heads of its batches are read from the disk."""
    with pa.memory_map(str(arrow)) as memory, pa.ipc.open_stream(memory) as stream:
        return sum(batch.num_rows for batch in stream)


def write_set(making: Path, saved: Sequence[SavedShard], joined: Path) -> None:
    """Link the shards' Arrow files into `making`, which will be `joined`, and write what makes them one set."""
    files = [path for shard in saved for path in shard.files]
    names = [f"data-{number:05d}-of-{len(files):05d}.arrow" for number in range(len(files))]
    for name, path in zip(names, files, strict=True):
        (making / name).symlink_to(os.path.relpath(path, joined))
    write_json(making / INFO, read_json(saved[0].folder / INFO))
    fingerprint = sha256_json([shard.state[FINGERPRINT] for shard in saved])[:16]
    state = {FILES: [{"filename": name} for name in names], FINGERPRINT: fingerprint}
    write_json(making / STATE, saved[0].state | state)


def link_states(making: Path, joined: Path, shard: SavedShard, first: int) -> None:
    """Link a shard's states in `making`, which will be `joined`, its first row as `first`.

    Raises:
        StepError: a row has no file.
    """
    present = set(file_names(shard.folder / STATES))
    target = os.path.relpath(shard.folder / STATES, joined)
    for row in range(shard.rows):
        name = hs_name(row)
        if name not in present:
            raise incomplete(
                shard.folder / STATES / name,
                f"a file for each of {shard.rows} rows",
                "it is missing",
            )
        (making / hs_name(first + row)).symlink_to(f"{target}/{name}")


def file_names(folder: Path) -> Iterator[str]:
    """Yield the names in a folder, none if it is not there."""
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from (entry.name for entry in entries)


def incomplete(where: Path, expected: str, seen: str) -> StepError:
    """Return the error for a shard that cannot be joined."""
    return StepError(
        "a shard's files for speculators are not whole",
        where=str(where),
        expected=expected,
        seen=seen,
        remedy="remove the shard's index (hidden_states/<shard>.parquet) and run again: what is whole is kept",
    )
