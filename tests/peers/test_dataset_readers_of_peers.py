"""What the released speculators and SpecForge write and read, beside what our readers make of the same files."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from transformers import AutoTokenizer

from rebuild.datasets.readers import describe_dataset, read_dataset
from tests.support.disaster import Sample, build_samples, write_dataset

PEERS = {
    "specforge": Path(os.environ.get("REBUILD_PEERS", ".cache/peers")).absolute(),
    "speculators": Path(os.environ.get("REBUILD_BENCH_PEERS", ".cache/bench-peers")).absolute(),
}
ROWS = 1500  # more than one of the batches that `datasets` writes

Row = tuple[list[int], list[int]]  # ids and mask


def peer(module: str) -> Any:
    """Import a module of an installed peer; it comes last, so that it can shadow nothing of ours."""
    folder = str(PEERS[module.partition(".")[0]])
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)


def ours(path: Path) -> list[dict[str, Any]]:
    return [row for batch in read_dataset(path) for row in batch.to_pylist()]


def pairs(rows: list[dict[str, Any]]) -> list[Row]:
    return [(row["input_ids"], row["loss_mask"]) for row in rows]


@pytest.fixture(scope="module")
def samples(demo_model: Path) -> list[Sample]:
    return build_samples(AutoTokenizer.from_pretrained(demo_model), rows=ROWS)


@pytest.fixture(scope="module")
def prepared(
    samples: list[Sample], tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder that speculators' own command makes of the samples, its token frequencies beside them."""
    folder = tmp_path_factory.mktemp("prepared")
    rows = write_dataset(folder / "rows", "jsonl", samples)
    command = [sys.executable, "-m", "speculators", "prepare-data", "--model", str(tiny_llama)]
    command += ["--data", str(rows), "--output", str(folder / "out"), "--no-skip-token-freq"]
    command += ["--num-preprocessing-workers", "1"]
    environ = {"PYTHONPATH": str(PEERS["speculators"]), "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "out" / "token_freq.pt").is_file()
    return folder / "out"


def test_what_prepare_data_saved_is_read_row_for_row_as_its_trainer_numbers_them(prepared):
    theirs = load_from_disk(str(prepared)).with_format(None).to_list()
    rows = ours(prepared)
    assert pairs(rows) == pairs(theirs)
    assert [row["seq_len"] for row in rows] == [row["seq_len"] for row in theirs]
    assert [row["sample_id"] for row in rows] == [f"out[{number}]" for number in range(ROWS)]
    assert describe_dataset(prepared).rows == ROWS


def test_prepare_data_kept_all_samples_the_empty_ones_among_them(prepared, samples):
    expected = [(sample.input_ids, sample.loss_mask) for sample in samples]
    assert sorted(pairs(ours(prepared))) == sorted(expected)
    assert sum(sample.empty for sample in samples) == round(0.87 * ROWS)


def test_speculators_rows_are_read_as_specforges_own_reader_takes_them(samples, tmp_path):
    path = write_dataset(tmp_path, "jsonl", samples[:50])
    records = peer("specforge.data.prompt_builder")._iter_records(str(path))
    assert pairs(ours(path)) == pairs([record for _, record in records])


@pytest.mark.parametrize("kind", ["ckpt", "ckpt.gz"])
def test_specforges_files_are_read_in_its_order_with_the_same_ids_and_masks(
    samples, kind, tmp_path
):
    path = write_dataset(tmp_path / "states", "ckpt", samples[:40])
    if kind == "ckpt.gz":
        subprocess.run(["gzip", *map(str, path.iterdir())], check=True)
    reader = peer("specforge.runtime.data_plane.offline_reader")
    store = peer("specforge.runtime.data_plane.feature_store")
    files = reader.list_feature_files(str(path))
    theirs = [store.load_feature_file(file) for file in files]
    rows = ours(path)
    assert [row["sample_id"] for row in rows] == [Path(file).name for file in files]
    assert pairs(rows) == [
        (sample["input_ids"].tolist(), sample["loss_mask"].tolist()) for sample in theirs
    ]
    assert {sample["hidden_states"].dtype for sample in theirs} == {torch.bfloat16}
