"""speculators' own dataset and transfers, as released, on a shard's files and on all shards joined."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from safetensors import safe_open

from join_speculators import join_speculators
from rebuild.formats.catalog import FORMATS
from rebuild.formats.shard_files import finish_shard
from rebuild.formats.speculators import layer_ids
from rebuild.states.captured import Captured
from rebuild.states.samples import Sample
from tests.support.captured import HIDDEN, LAYERS, make_captured, make_sample, write_empty_index

PEERS = Path(os.environ.get("REBUILD_BENCH_PEERS", ".cache/bench-peers")).absolute()
SHARDS = {"canary": [12, 9], "00000": [40, 17, 64, 2], "00001": [], "00002": [31]}
NAMES = ["speculators", "speculators_fp8"]
WORST_TOKEN = 0.04  # of FP8's rounding, relative to the token's states

Written = list[tuple[Sample, Captured]]


def peer(module: str) -> Any:
    """Import a module of the installed speculators; it comes last, so that it can shadow nothing of ours."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    return importlib.import_module(module)


def with_outliers(captured: Captured, seed: int) -> Captured:
    """Return states as models have them: some channels hundreds of times as large as the rest."""
    generator = torch.Generator().manual_seed(seed)
    loud = torch.randint(0, HIDDEN, (1,), generator=generator)
    captured.taps[:, :, loud] *= 300
    captured.pre_norm[:, loud] *= 1000
    return captured


def write_shard(folder: Path, name: str, lengths: list[int]) -> Written:
    """Write a shard's samples in one format, and return them with what was captured."""
    kind, written = FORMATS[name], []
    for row, length in enumerate(lengths):
        sample = make_sample(f"{folder.name} é/{row}_gen0", length)
        captured = with_outliers(make_captured(length, seed=row), row)
        kind.write(
            folder / kind.path(sample.sample_id, row), kind.tensors(sample, captured, "none")
        )
        written.append((sample, captured))
    finish_shard(folder, [name], [sample for sample, _ in written])
    return written


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(name) / "hidden_states"


@pytest.fixture(scope="module")
def written(run: Path, name: str) -> dict[str, Written]:
    return {shard: write_shard(run / shard, name, lengths) for shard, lengths in SHARDS.items()}


@pytest.fixture(scope="module")
def joined(run: Path, written: dict[str, Written]) -> Path:
    indexes = [write_empty_index(run / f"{shard}.parquet") for shard in SHARDS]
    join_speculators(indexes, run / "speculators")
    return run / "speculators"


def transfer(name: str, path: Path) -> Any:
    kind = {"speculators": "FileTransfer", "speculators_fp8": "FP8Transfer"}[name]
    return getattr(peer("hs_connectors"), kind)(path / "hidden_states")


def read(name: str, path: Path, **options: Any) -> list[Any]:
    """Read a data path as speculators' trainer does."""
    dataset = peer("speculators.train.data").ArrowDataset(
        max_len=128, datapath=path, transfer=transfer(name, path), on_missing="raise", **options
    )
    return [dataset[row] for row in range(len(dataset))]


def worst_token(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the greatest relative error of a token over all its layers."""
    difference = (found.float() - expected.float()).flatten(1).norm(dim=1)
    return float((difference / expected.float().flatten(1).norm(dim=1)).max())


def check(name: str, items: list[Any], expected: Written) -> None:
    assert len(items) == len(expected)
    for item, (sample, captured) in zip(items, expected, strict=True):
        assert item["input_ids"].tolist() == sample.input_ids.tolist()
        assert item["loss_mask"].tolist() == sample.loss_mask.tolist()
        assert item["lengths"].tolist() == [len(sample)]
        assert item["hidden_states"].dtype == torch.bfloat16
        states = captured.taps.flatten(1)
        if name == "speculators":
            assert torch.equal(item["hidden_states"], states)
            assert torch.equal(item["verifier_last_hidden_states"], captured.pre_norm)
        else:
            final = item["verifier_last_hidden_states"]
            assert (
                0
                < worst_token(
                    torch.cat((item["hidden_states"], final), dim=1),
                    torch.cat((states, captured.pre_norm), dim=1),
                )
                < WORST_TOKEN
            )


@pytest.mark.parametrize("shard", ["canary", "00000", "00002"])
def test_a_shards_samples_reach_the_trainer_in_order(name, run, written, shard):
    check(name, read(name, run / shard / "speculators"), written[shard])


def test_all_shards_joined_reach_the_trainer_in_order(name, joined, written):
    check(name, read(name, joined), [sample for shard in SHARDS for sample in written[shard]])


def test_the_trainers_split_finds_the_states_of_its_rows(name, joined, written):
    everything = [sample for shard in SHARDS for sample in written[shard]]
    for split, rows in [("train", slice(0, 4)), ("val", slice(4, None))]:
        items = read(name, joined, train_ratio=0.6, split=split)
        check(name, items, everything[rows])


def test_the_trainer_finds_the_states_where_it_looks_by_itself(run, written, name):
    arguments = type("Arguments", (), {"hidden_states_path": None})
    backend = {"speculators": "FileBackend", "speculators_fp8": "FP8Backend"}[name]
    path = run / "00000" / "speculators"
    found = getattr(peer("hs_connectors"), backend).from_train_args(arguments, str(path))
    assert found.get_cached(3)["token_ids"].tolist() == written["00000"][3][0].input_ids.tolist()
    assert found.get_cached(4) is None


def test_the_trainers_batches_take_them(name, joined):
    collate = peer("speculators.train.data").CollateFn(128, HIDDEN, num_target_layers=LAYERS)
    batch = collate(read(name, joined)[:2])
    assert batch["hidden_states"].shape == (1, 128, LAYERS * HIDDEN)
    assert batch["error_records"] == 0


def test_its_own_checks_of_existing_files_pass(name, joined, run):
    offline = peer("speculators.data_generation.offline")
    for path, rows in [(run / "00000" / "speculators", 4), (joined, 7)]:
        states = path / "hidden_states"
        assert offline.get_existing_hidden_state_indices(states) == list(range(rows))
        assert offline.find_corrupt_hidden_state_indices(states, list(range(rows))) == {}
        saved = load_from_disk(str(path))
        for row in range(rows):
            cached = transfer(name, path).get_cached(row)
            offline.check_hidden_states(cached, saved[row]["input_ids"].tolist())


def test_rows_keep_their_sample_ids(joined, written):
    ids = [sample.sample_id for shard in SHARDS for sample, _ in written[shard]]
    assert load_from_disk(str(joined))["sample_id"][:] == ids


def test_fp8_is_bit_for_bit_what_its_own_connector_makes(tmp_path):
    quantize = peer("hs_connectors.fp8_utils").quantize_tensor_to_fp8
    captured = with_outliers(make_captured(50), 0)
    captured.taps[3], captured.pre_norm[3] = 0, 0
    kind = FORMATS["speculators_fp8"]
    kind.write(tmp_path / "file", kind.tensors(make_sample(length=50), captured, "none"))
    states = torch.cat((captured.taps, captured.pre_norm.unsqueeze(1)), dim=1)
    values, scales = quantize(states)
    with safe_open(tmp_path / "file", framework="pt") as file:
        found = file.get_tensor("hidden_states")
        assert torch.equal(found.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(file.get_tensor("hidden_states_scales"), scales)


def test_layers_are_counted_as_its_converter_counts_them(tiny_llama):
    layers = [1, 2]
    converter = peer("speculators.convert.dflash.converter").DFlashConverter()
    source = {"block_size": 8, "dflash_config": {"target_layer_ids": layers}, "vocab_size": 512}
    config = converter._build_config(source, str(tiny_llama), None)
    assert config.aux_hidden_state_layer_ids == layer_ids(layers)
