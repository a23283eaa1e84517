"""SpecForge's offline DFlash format: one `torch.save` dictionary per sample, only ever written here.

The reader (SpecForge 0.2.0, `specforge/runtime/data_plane/offline_reader.py`) takes every `*.ckpt` under a
folder, whatever its name; `input_ids` and `loss_mask` are int64 [S], `hidden_states` bfloat16 [S, D·H].
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from shutil import disk_usage
from urllib.parse import quote

import torch
from torch import Tensor

from rebuild.errors import StepError
from rebuild.files import atomic_path

SUFFIX = ".ckpt"
KEY = "hidden_states"
DTYPE = "bfloat16"
LONGEST_STEM = 200  # bytes; most file systems allow 255, and the temporary file's name is longer


def file_name(sample_id: str) -> str:
    """Return the file's name for a sample: its id, percent-encoded where it is not plainly safe.

    Different ids give different names, none of which starts with a dot or leaves the folder. A long one ends in
    `%~` and the id's hash, which no encoded id contains.
    """
    stem = quote(sample_id, safe="", errors="surrogatepass")
    if stem.startswith("."):
        stem = "%2E" + stem[1:]
    if len(stem) > LONGEST_STEM:
        mark = "%~" + hashlib.sha256(sample_id.encode("utf-8", "surrogatepass")).hexdigest()
        stem = stem[: LONGEST_STEM - len(mark)] + mark
    return stem + SUFFIX


def write_sample(
    path: Path, input_ids: Sequence[int], loss_mask: Sequence[int], states: Tensor
) -> None:
    """Write one sample, whole or not at all; `states` is [S, D·H] on the CPU. The same sample gives the same bytes.

    Raises:
        StepError: the disk is full or refuses.
    """
    sample = {
        "input_ids": torch.tensor(input_ids, dtype=torch.int64),
        "loss_mask": torch.tensor(loss_mask, dtype=torch.int64),
        # A copy, because torch stores all of the memory that a slice is taken from.
        KEY: states.clone(memory_format=torch.contiguous_format),
    }
    try:
        # Given a path, torch would record the temporary file's name, and with it the process id.
        with atomic_path(path) as temporary, open(temporary, "wb") as handle:
            torch.save(sample, handle)
    except (OSError, RuntimeError) as error:  # torch makes the one into the other
        raise StepError(
            "a sample's hidden states could not be written",
            where=str(path),
            expected=f"room for {states.nbytes} bytes",
            seen=f"{error.__context__ or error}; {disk_usage(path.parent).free} bytes are free there now",
            remedy="make room (df -h) or mend the disk, then run again: samples already written are kept",
        ) from error
