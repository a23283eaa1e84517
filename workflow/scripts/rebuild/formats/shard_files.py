"""A shard's folder once all of its samples are written: nothing of others in it, and what formats need beside the files."""

import re
from collections.abc import Sequence
from pathlib import Path

from rebuild.formats.catalog import FORMATS
from rebuild.formats.speculators import DATASET, STATES
from rebuild.states.samples import Sample
from rebuild.step import say

SUFFIXES = (".ckpt", ".ckpt.gz", ".pt")  # directly in the folder: SpecForge's, ModelOpt's
NUMBERED = re.compile(r"hs_\d+\.safetensors")  # speculators'
TEMPORARY = re.compile(r"\..+\.\d+\.tmp")  # the names that `atomic_path` gives


def finish_shard(folder: Path, formats: Sequence[str], samples: Sequence[Sample]) -> None:
    """Remove what is not of the shard's `samples`, and write the data set whose rows speculators' files are.

    It may be called again; the same samples give the same bytes.

    Raises:
        StepError: the disk is full or refuses.
    """
    paths = [FORMATS[name].path for name in formats]
    keep = {path(sample.sample_id, row) for row, sample in enumerate(samples) for path in paths}
    if strays := remove_strays(folder, keep):
        say(
            f"removed {len(strays)} files that are not of this shard's samples, such as {strays[0]}"
        )
    if any(path("", 0).startswith(f"{DATASET}/") for path in paths):
        # Only now: a shard of other formats has no use for the library.
        from rebuild.formats.saved_dataset import save_dataset

        save_dataset(folder / DATASET, samples)


def remove_strays(folder: Path, keep: set[str]) -> list[str]:
    """Remove what trainers would read in a shard's folder beyond `keep`, and unfinished files; return their paths.

    Paths are relative to the folder. Only files that are named as samples' are, or as `atomic_path` names them, in the
    places where formats put them, are touched.
    """
    places = [folder, folder / DATASET, folder / DATASET / STATES]
    paths = (path for place in places for path in sorted(place.glob("*")) if not path.is_dir())
    strays = [
        path
        for path in paths
        if path.relative_to(folder).as_posix() not in keep and is_sample_or_unfinished(path, folder)
    ]
    for path in strays:
        path.unlink()
    return [path.relative_to(folder).as_posix() for path in strays]


def is_sample_or_unfinished(path: Path, folder: Path) -> bool:
    """Return whether a file in one of the places is named as a sample's file, or as one that was never finished."""
    if TEMPORARY.fullmatch(path.name):
        return True
    if path.parent == folder:
        return path.name.endswith(SUFFIXES)
    return path.parent.name == STATES and NUMBERED.fullmatch(path.name) is not None
