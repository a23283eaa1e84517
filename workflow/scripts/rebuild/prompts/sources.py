"""The files that hold the prompts, and their identity; standard library only, so that a Snakefile can import it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.files import sha256_file

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


def source_files(source: Path) -> list[Path]:
    """Return the prompt files of `source`: itself, or all below it, in the order of their relative paths.

    The order is that of code points, the same on every machine. Hidden files and folders and files
    of other kinds are passed over.

    Raises:
        StepError: there is no such path, or no prompt file in it.
    """
    if source.is_dir():
        found = sorted(_walk(source), key=lambda file: file.relative_to(source).as_posix())
    else:
        found = [source] if source.is_file() and _is_prompt_file(source.name) else []
    if not found:
        raise StepError(
            f"no prompts found at {source}",
            expected=f"a file, or a directory of files, ending in {', '.join(SUFFIXES)}",
            seen=_what_is(source),
            remedy="set `prompts.path` in the config",
        )
    return found


def file_label(source: Path, file: Path) -> str:
    """Return the name by which a prompt file is known: relative to a directory, else the bare file name."""
    name = file.relative_to(source).as_posix() if source.is_dir() else file.name
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def source_identity(source: Path, known: Iterable[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return `path` (its label), `size` (bytes), `mtime_ns` and `sha256` of every prompt file of `source`.

    An entry of `known`, the result of an earlier call, lends its sha256 to the file that still has its
    path, size and time, so that an unchanged source is not read again. Only path and sha256 identify.
    """
    remembered = {_cache_key(entry): entry["sha256"] for entry in known}
    identity = []
    for file in source_files(source):
        entry = _stamp(source, file)
        entry["sha256"] = remembered.get(_cache_key(entry)) or sha256_file(file)
        identity.append(entry)
    return identity


def check_unchanged(source: Path, identity: list[dict[str, Any]]) -> None:
    """Check that `source` still holds the files of `identity`, with the sizes and times they had.

    Raises:
        StepError: a file was written, added or removed since.
    """
    before = {_cache_key(entry) for entry in identity}
    now = {_cache_key(_stamp(source, file)) for file in source_files(source)}
    if before != now:
        raise StepError(
            f"the prompts at {source} changed while they were read",
            seen=", ".join(sorted({path for path, _, _ in before ^ now})),
            remedy="run again once nothing writes there any more",
        )


def _walk(folder: Path) -> Iterable[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and _is_prompt_file(name):
                yield Path(parent, name)


def _is_prompt_file(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


def _what_is(source: Path) -> str:
    if source.is_dir():
        return "a directory without such a file"
    return "a file of another kind" if source.exists() else "no such path"


def _stamp(source: Path, file: Path) -> dict[str, Any]:
    status = file.stat()
    path = file_label(source, file)
    return {"path": path, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def _cache_key(entry: dict[str, Any]) -> tuple[str, int, int]:
    return entry["path"], entry["size"], entry["mtime_ns"]
