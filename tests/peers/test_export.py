"""SpecForge's online loader and speculators' prepare-data, as released, on exported shards."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk

from export_shard import export_shard
from rebuild.files import sha256_file, write_json
from rebuild.tables import iter_rows
from tests.support.shards import (
    Shard,
    clean_answers,
    make_answer,
    make_disaster,
    make_truncated,
    rewrite,
    write_shard,
)

PEERS = {
    "specforge": Path(os.environ.get("REBUILD_PEERS", ".cache/peers")).absolute(),
    "speculators": Path(os.environ.get("REBUILD_BENCH_PEERS", ".cache/bench-peers")).absolute(),
}
LONGEST = 4096
SERVER = {
    "backend": "mooncake",
    "control_dir": "control",
    "server_urls": ["http://localhost:1"],  # nobody is asked
}

Sample = tuple[list[int], list[int]]  # ids and mask


def peer(module: str) -> Any:
    """Import a module of an installed peer; it comes last, so that it can shadow nothing of ours."""
    folder = str(PEERS[module.partition(".")[0]])
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(module)


def forget_reasons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"finish_reason": None} for row in rows]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Shard]:
    """Three exported shards: one whose first samples have no finish reason, one of all kinds, and one without samples."""
    folder = tmp_path_factory.mktemp("run")
    mixed = [make_answer("x", turn=turn) for turn in range(2)]
    mixed += [make_disaster("d"), make_truncated("t"), make_answer('odd "name" \u2028')]
    made = []
    for name, answers in [("00000", clean_answers(40)), ("00001", mixed), ("00002", [])]:
        shard = Shard(write_shard(folder / name, answers, max_length=LONGEST).run)
        if name == "00000":
            rewrite(shard.tokenized, forget_reasons)
        write_json(shard.approved, {"tokenized_sha256": sha256_file(shard.tokenized)})
        export_shard(shard.tokenized, shard.approved, folder / "export" / f"{name}.jsonl")
        made.append(shard)
    return made


@pytest.fixture(scope="module")
def folder(shards: list[Shard]) -> Path:
    return shards[0].run.parent / "export"


@pytest.fixture(scope="module")
def samples(shards: list[Shard]) -> list[Sample]:
    """The ids and masks of all shards, in order."""
    rows = (row for shard in shards for row in iter_rows(shard.tokenized))
    return [(row["input_ids"], row["loss_mask"]) for row in rows]


@pytest.fixture(scope="module")
def joined(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All shards in one file, as `cat` makes it: SpecForge takes a file, not a folder."""
    path = tmp_path_factory.mktemp("joined") / "all.jsonl"
    with open(path, "wb") as whole:
        for part in sorted(folder.glob("*.jsonl")):
            with open(part, "rb") as lines:
                shutil.copyfileobj(lines, whole)
    return path


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_specforge_reads_every_sample_as_it_is_and_in_order(
    joined: Path, samples: list[Sample], algorithm: str
) -> None:
    config = peer("specforge.config.schema").Config(
        model={"target_model_path": "target", "draft_model_config": "draft"},
        data={"prompts_path": str(joined), "max_length": LONGEST},
        training={"strategy": algorithm},
        deployment={"mode": "disaggregated", "disaggregated": SERVER},
    )
    run = peer("specforge.application.composition").resolve_run(config)
    prepare = peer("specforge.training.assembly")._prepare_prompts
    tasks = prepare(config, None, algorithm=run.algorithm, draft_config={"block_size": 16})
    read = [(task["payload"]["input_ids"], task["payload"]["loss_mask"]) for task in tasks]
    assert read == samples


def prepare_data(model: Path, output: Path, *data: Path) -> list[Sample]:
    """Run speculators' own command on exported files or folders, and return the rows of the data set that it saves."""
    command = [sys.executable, "-m", "speculators", "prepare-data", "--model", str(model)]
    command += [word for path in data for word in ("--data", str(path))]
    command += ["--output", str(output), "--seq-length", str(LONGEST)]
    command += ["--num-preprocessing-workers", "1"]
    environ = {"PYTHONPATH": str(PEERS["speculators"]), "HF_HOME": str(output.parent / "hf")}
    done = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    saved = load_from_disk(str(output)).with_format(None)
    assert saved.column_names == ["input_ids", "loss_mask", "seq_len"]
    return [(row["input_ids"], row["loss_mask"]) for row in saved]


def test_speculators_takes_the_folder_and_keeps_every_sample_as_it_is(
    folder: Path, tiny_llama: Path, samples: list[Sample], tmp_path: Path
) -> None:
    assert sorted(prepare_data(tiny_llama, tmp_path / "out", folder)) == sorted(samples)


def test_speculators_takes_single_shards(
    folder: Path, tiny_llama: Path, samples: list[Sample], tmp_path: Path
) -> None:
    files = [folder / "00001.jsonl", folder / "00000.jsonl"]
    assert sorted(prepare_data(tiny_llama, tmp_path / "out", *files)) == sorted(samples)
