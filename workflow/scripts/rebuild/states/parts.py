"""Finished parts of a shard: an append-only log among them, so that a restart keeps what is whole.

A part is one file of one sample in one format. The log holds one JSON object a line: the part's index row, and
`made_from`, the hash of what it was made from. Snakemake knows of neither log nor parts, so it removes neither when a
job fails. The log stays with the parts for good: whatever makes the job run again, it finds what is whole and computes
nothing twice.
"""

import errno
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rebuild.files import atomic_path, sha256_file

Part = dict[str, Any]

LOG = ".parts.jsonl"


class Key(NamedTuple):
    """What tells the parts of a shard apart."""

    sample_id: str
    format: str


class Due(NamedTuple):
    """A part as it must be: the file it is in, relative to the folder of all shards, and what it is made from."""

    file: str
    made_from: str


def read_log(folder: Path) -> list[Part]:
    """Return the parts recorded in `folder`'s log; a line that a crash cut short counts as not written."""
    log = folder / LOG
    lines = log.read_bytes().splitlines() if log.exists() else []
    return [part for line in lines if (part := parse_line(line)) is not None]


def parse_line(line: bytes) -> Part | None:
    """Return the part of one log line, or None if the line is not whole."""
    try:
        part = json.loads(line)
    except ValueError:
        return None
    return part if isinstance(part, dict) else None


def begin_log(folder: Path, parts: Iterable[Part]) -> None:
    """Write the log anew with `parts` alone, so that appending starts on a line of its own."""
    with atomic_path(folder / LOG) as temporary:
        temporary.write_text("".join(json.dumps(part) + "\n" for part in parts))


def record_parts(folder: Path, parts: Iterable[Part]) -> None:
    """Add finished parts to the log, in one write so that writers do not mix their lines, and force it to the disk.

    Raises:
        OSError: the disk is full or refuses; what it took of a line counts as not written.
    """
    lines = "".join(json.dumps(part) + "\n" for part in parts).encode()
    with open(folder / LOG, "ab", buffering=0) as handle:
        if handle.write(lines) < len(lines):  # what a disk does when it is full within a write
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / LOG))
        os.fsync(handle.fileno())


def whole_parts(parts: Iterable[Part], due: Mapping[Key, Due], folder: Path) -> dict[Key, Part]:
    """Return the parts that are still as recorded and as they are due; `folder` is where their files are looked up."""
    kept = {}
    for part in parts:
        key = Key(part.get("sample_id", ""), part.get("format", ""))
        wanted = due.get(key)
        if wanted == (part.get("file"), part.get("made_from")) and is_whole(part, folder):
            kept[key] = part
    return kept


def is_whole(part: Part, folder: Path) -> bool:
    """Return whether the part's file has the size and the checksum that were recorded."""
    path = folder / part["file"]
    if not path.is_file() or path.stat().st_size != part["bytes"]:
        return False
    return sha256_file(path) == str(part["sha256"])
