"""Finished parts of a shard: an append-only log among them, so that a restart keeps what is whole.

The log holds one JSON object a line: the part's index row, and `made_from`, the hash of what it was made from.
Snakemake knows of neither log nor parts, so it removes neither when a job fails. The log stays with the parts for good:
whatever makes the job run again, it finds what is whole and computes nothing twice.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rebuild.files import atomic_path, sha256_file, sync_file

Part = dict[str, Any]

LOG = ".parts.jsonl"
TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # the names that `atomic_path` gives


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


def record_part(folder: Path, part: Part) -> None:
    """Add one finished part to the log and force it to the disk."""
    with open(folder / LOG, "a") as handle:
        handle.write(json.dumps(part) + "\n")
    sync_file(folder / LOG)


def whole_parts(parts: Iterable[Part], wanted: Mapping[str, str], folder: Path) -> dict[str, Part]:
    """Return, by sample id, the parts that are still as recorded and made from what is wanted now.

    `wanted` is the `made_from` of every sample; `folder` is where the parts' `file` names are looked up.
    """
    return {
        part["sample_id"]: part
        for part in parts
        if part["made_from"] == wanted.get(part["sample_id"]) and is_whole(part, folder)
    }


def is_whole(part: Part, folder: Path) -> bool:
    """Return whether the part's file has the size and the checksum that were recorded."""
    path = folder / part["file"]
    if not path.is_file() or path.stat().st_size != part["bytes"]:
        return False
    return sha256_file(path) == str(part["sha256"])


def remove_strays(folder: Path, suffix: str, keep: set[str]) -> list[str]:
    """Remove what trainers would read in `folder` beyond `keep`, and unfinished files; return the names.

    Only files directly in the folder that end in `suffix`, or are named as `atomic_path` names them, are touched.
    """
    strays = [
        path
        for path in sorted(folder.glob("*"))
        if path.name not in keep
        and not path.is_dir()
        and (path.suffix == suffix or TEMPORARY.fullmatch(path.name))
    ]
    for path in strays:
        path.unlink()
    return [path.name for path in strays]
