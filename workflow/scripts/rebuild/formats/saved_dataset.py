"""The data set that speculators' states are numbered by, as `datasets` saves it to disk.

The trainer (speculators 0.9.0, `train/data.py`) reads it with `load_from_disk`, takes `input_ids`, `loss_mask` and
`seq_len`, and needs the rows as torch tensors, which the saved set says of itself; it never looks at `sample_id`.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, disable_progress_bars
from datasets.table import MemoryMappedTable

from rebuild.files import sync_file, sync_folder
from rebuild.formats.writing import not_written
from rebuild.states.samples import Sample

STATE = "state.json"
INFO = "dataset_info.json"
SAVING = ".saving"
TOKEN_BYTES = 5  # an id and its mask
BATCH = 256  # samples in memory at a time
ROWS = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("seq_len", pa.int32()),
        ("sample_id", pa.string()),
    ]
)


def save_dataset(folder: Path, samples: Sequence[Sample]) -> None:
    """Save the samples, in order, as a data set in `folder`; the same samples give the same bytes.

    A set that is cut short by a crash has no `state.json`, without which nothing loads it.

    Raises:
        StepError: the disk is full or refuses.
    """
    disable_progress_bars()
    saving = folder / SAVING
    try:
        shutil.rmtree(saving, ignore_errors=True)
        saving.mkdir(parents=True)
        fingerprint = write_rows(saving / "rows.arrow", samples)
        rows = Dataset(
            MemoryMappedTable.from_file(str(saving / "rows.arrow")), fingerprint=fingerprint
        )
        rows.set_format("torch")
        rows.save_to_disk(saving / "set", num_shards=1)
        replace_dataset(folder, saving / "set")
    except OSError as error:
        raise not_written(folder, TOKEN_BYTES * sum(map(len, samples)), error) from error
    finally:
        shutil.rmtree(saving, ignore_errors=True)


def write_rows(path: Path, samples: Iterable[Sample]) -> str:
    """Write the samples as one Arrow stream; return a hash of them all."""
    digest = hashlib.sha256()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, ROWS) as stream:
        for batch in batches(samples):
            for sample in batch:
                digest.update(sample.made_from(sample.sample_id).encode())
            columns = [
                [sample.input_ids for sample in batch],
                [sample.loss_mask for sample in batch],
                [len(sample) for sample in batch],
                [sample.sample_id for sample in batch],
            ]
            arrays = [
                pa.array(values, kind) for values, kind in zip(columns, ROWS.types, strict=True)
            ]
            stream.write_batch(pa.record_batch(arrays, schema=ROWS))
    return digest.hexdigest()


def batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Yield the samples in lists of `BATCH`."""
    rest = iter(samples)
    while batch := list(islice(rest, BATCH)):
        yield batch


def replace_dataset(folder: Path, saved: Path) -> None:
    """Move a saved data set's files into `folder` over those of an earlier one, the one that makes it a set last."""
    (folder / STATE).unlink(missing_ok=True)
    sync_folder(folder)
    for path in sorted(saved.iterdir(), key=lambda path: path.name == STATE):
        sync_file(path)
        path.replace(folder / path.name)
        sync_folder(folder)
