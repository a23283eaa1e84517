"""Writing one file whole or not at all, with the checksum of what was written and without reading it again."""

import hashlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
from typing import BinaryIO

from rebuild.errors import StepError
from rebuild.files import atomic_path

LARGE = 1 << 16  # bytes from which hashing in another thread is worth its while
SLICE = 8 << 20  # bytes after which the disk may begin, instead of waiting for the whole file


@dataclass(frozen=True)
class FileFacts:
    """A written file's size and the hex SHA-256 of its bytes."""

    bytes: int
    sha256: str


class HashedFile:
    """A file that is only appended to; large pieces are hashed by `helper` while they are written."""

    def __init__(self, file: BinaryIO, helper: ThreadPoolExecutor) -> None:
        self.file = file
        self.helper = helper
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.begun = 0  # bytes that the disk was told to begin with

    def write(self, piece: bytes | memoryview) -> int:
        """Write and hash one piece; its memory is not needed afterwards."""
        whole = memoryview(piece)
        if whole.nbytes < LARGE:
            self.digest.update(whole)
            self.append(whole)
            return whole.nbytes
        hashing = self.helper.submit(self.digest.update, whole)
        try:
            for start in range(0, whole.nbytes, SLICE):
                self.append(whole[start : start + SLICE])
        finally:
            hashing.result()
        return whole.nbytes

    def append(self, view: memoryview) -> None:
        """Write one slice."""
        self.file.write(view)
        self.bytes += view.nbytes
        self.begin_writing()

    def begin_writing(self) -> None:
        """Have the disk begin with what is complete: the kernel would leave it in memory until the file is forced out."""
        fresh = self.bytes - self.begun
        if fresh >= SLICE and sys.platform == "linux":
            with suppress(OSError):  # it is advice, which a file system may not take
                os.posix_fadvise(self.file.fileno(), self.begun, fresh, os.POSIX_FADV_DONTNEED)
            self.begun = self.bytes

    def flush(self) -> None:
        """Empty the file's buffer."""
        self.file.flush()

    def facts(self) -> FileFacts:
        """Return the facts of what was written so far."""
        return FileFacts(self.bytes, self.digest.hexdigest())


def write_file(path: Path, fill: Callable[[HashedFile], None], size: int) -> FileFacts:
    """Have `fill` write the file of about `size` bytes; it is on the disk, whole, when this returns, or not there at all.

    Raises:
        StepError: the disk is full or refuses.
    """
    try:
        with (
            atomic_path(path) as temporary,
            ThreadPoolExecutor(max_workers=1) as helper,
            open(temporary, "wb") as file,
        ):
            hashed = HashedFile(file, helper)
            fill(hashed)
    except (OSError, RuntimeError) as error:  # torch makes the one into the other
        raise not_written(path, size, error) from error
    return hashed.facts()


def not_written(path: Path, size: int, error: Exception) -> StepError:
    """Return the error for a file of `size` bytes that the disk did not take."""
    return StepError(
        "a file for trainers could not be written",
        where=str(path),
        expected=f"room for {size} bytes",
        seen=f"{root_of(error)}; {disk_usage(existing(path.parent)).free} bytes are free there now",
        remedy="make room (df -h) or mend the disk, then run again: samples already written are kept",
    )


def root_of(error: BaseException) -> BaseException:
    """Return the operating system's own error behind others that followed from it, or the error itself."""
    behind = [error]
    for one in behind:
        if isinstance(one, OSError):
            return one
        behind += [other for other in (one.__cause__, one.__context__) if other is not None]
    return error


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())
