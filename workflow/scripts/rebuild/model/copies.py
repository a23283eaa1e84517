"""Folders that are either whole or not there: a model made once, or copied to a faster disk and verified."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rebuild.errors import StepError
from rebuild.files import sync_file
from rebuild.model.files import MIB, THREADS, FileFacts, changed_files, deviations
from rebuild.progress import Progress
from rebuild.step import say


def build_once(target: Path, build: Callable[[Path], None], resume: bool = False) -> Path:
    """Return `target`, filled by `build(folder)` unless it is there; of two runs at once one builds, one waits."""
    with locked(target):
        if not target.is_dir():
            fill_folder(target, build, resume)
    return target


def fill_folder(target: Path, build: Callable[[Path], None], resume: bool = False) -> None:
    """Have `build` fill a folder beside `target`, then rename it; `resume` keeps what a broken-off try left."""
    partial = target.with_name(f".{target.name}.partial")
    if not resume:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(exist_ok=True)
    try:
        build(partial)
        for path in partial.rglob("*"):
            if path.is_file():
                sync_file(path)
        partial.rename(target)
    finally:
        if not resume:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock file beside `target`; wait, and say so, while another process has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{target.name}.lock"), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is preparing {target}: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def copy_model(origin: Path, target: Path, files: dict[str, FileFacts]) -> None:
    """Copy the recorded files to the folder `target` and verify every byte; a whole copy found there is kept.

    Raises:
        StepError: not enough space, or the copy differs from what was recorded.
    """
    with locked(target):
        if target.is_dir() and not deviations(target, files) and not changed_files(target, files):
            say(f"the copy in {target} is whole: used as it is")
            return
        shutil.rmtree(target, ignore_errors=True)
        check_space(target.parent, sum(facts["size"] for facts in files.values()))
        fill_folder(target, lambda folder: copy_files(origin, folder, files))


def copy_files(origin: Path, folder: Path, files: dict[str, FileFacts]) -> None:
    """Copy the files with several threads, then read the copies back and compare."""
    progress = Progress(sum(facts["size"] for facts in files.values()) // MIB, "MiB copied")
    for parent in {(folder / name).parent for name in files}:
        parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(THREADS) as pool:
        for copy in pool.map(lambda name: shutil.copyfile(origin / name, folder / name), files):
            progress.update(copy.stat().st_size // MIB)
    changed = changed_files(folder, files)
    if changed:
        raise StepError(
            "the copy of the model differs from what was recorded",
            where=f"{origin}, copied to {folder.parent}",
            expected="equal SHA-256 of every file",
            seen=f"{len(changed)} differ: {', '.join(changed[:5])}",
            remedy="run again; if it happens twice, the origin was changed, or a disk or the memory is failing",
        )


def check_space(folder: Path, needed: int) -> None:
    """Raise StepError when the file system of `folder` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StepError(
            "not enough free space for the model",
            where=str(folder),
            expected=f"{needed} bytes ({needed / 1e9:.1f} GB)",
            seen=f"{free} bytes ({free / 1e9:.1f} GB)",
            remedy="make room there, or choose another folder (model.stage_to; null uses the model where it lies)",
        )
