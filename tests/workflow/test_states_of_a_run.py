"""The hidden states of a real run, as the trainers' own loaders read them, and what its jobs proved before capturing."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_from_disk
from transformers import AutoModelForCausalLM

from rebuild.formats.names import file_name
from rebuild.tables import iter_rows, read_metadata
from tests.workflow.conftest import SHARDS, Run

LAYERS = [1, 8, 14, 20, 27]
WIDTH = 576
PEERS = Path(os.environ.get("REBUILD_PEERS", ".cache/peers")).absolute()
SPECULATORS = Path(".cache/bench-peers").absolute()


def peer(module: str, folder: Path = PEERS) -> Any:
    """Import a module of an installed trainer; it comes last, so that it can shadow nothing of ours."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(module)


def rows_of(run: Run, phase: str) -> list[dict[str, Any]]:
    return [row for shard in SHARDS for row in iter_rows(run.results / phase / f"{shard}.parquet")]


@pytest.fixture(scope="module")
def tokenized(finished_run: Run) -> dict[str, dict[str, Any]]:
    return {row["sample_id"]: row for row in rows_of(finished_run, "tokenized")}


@pytest.fixture(scope="module")
def plain(demo_model: Path, tokenized: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Every layer's output of some samples by a plain float32 forward: [N, S, H], and the normed final state last."""
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32).eval()
    states = {}
    for name in list(tokenized)[::4]:
        ids = torch.tensor([tokenized[name]["input_ids"]])
        with torch.inference_mode():
            entering: list[torch.Tensor] = []
            hook = model.model.norm.register_forward_pre_hook(
                lambda _norm, given, entering=entering: entering.append(given[0])
            )
            _, *inner, normed = model(ids, output_hidden_states=True).hidden_states
            hook.remove()
        states[name] = torch.cat([*inner, entering[0], normed])
    return states


def nearest(states: torch.Tensor, every: torch.Tensor) -> int:
    """Return the layer whose output these states [S, H] are nearest to."""
    return int((every - states.float()).norm(dim=-1).mean(dim=-1).argmin())


def test_specforges_reader_reads_every_sample_of_the_run(finished_run: Run, tokenized, plain):
    data = peer("specforge.algorithms.common.dflash_family_data")
    store = peer("specforge.runtime.data_plane.feature_store").LocalFeatureStore()
    folder = finished_run.results / "hidden_states"
    reader = data.build_offline_reader(
        "dflash", str(folder), run_id="t", ttt_length=7, max_len=4096
    )
    normalize = data.build_offline_normalizer(4096)
    read = {Path(r.feature_store_uri).name: normalize(store.get(r)[0]) for r in reader.read()}
    assert set(read) == {file_name(name, ".ckpt") for name in tokenized}
    for name, row in tokenized.items():
        sample = read[file_name(name, ".ckpt")]
        assert sample["input_ids"][0].tolist() == row["input_ids"]
        assert sample["loss_mask"][0].tolist() == row["loss_mask"]
        assert sample["hidden_states"].shape == (1, row["seq_len"], len(LAYERS) * WIDTH)
    for name, every in plain.items():
        taps = read[file_name(name, ".ckpt")]["hidden_states"][0].unflatten(1, (-1, WIDTH))
        assert [nearest(taps[:, place], every) for place in range(len(LAYERS))] == LAYERS
        expected = every[LAYERS].transpose(0, 1)
        torch.testing.assert_close(taps.float(), expected, rtol=2**-8, atol=2e-3)


def test_speculators_dataset_reads_the_joined_run(finished_run: Run, tokenized, plain):
    dataset = peer("speculators.train.data", SPECULATORS).ArrowDataset
    path = finished_run.results / "hidden_states" / "speculators"
    names = load_from_disk(str(path))["sample_id"]
    transfer = peer("hs_connectors", SPECULATORS).FileTransfer(path / "hidden_states")
    items = dataset(max_len=4096, datapath=path, transfer=transfer, on_missing="raise")
    assert len(items) == len(names) == len(tokenized) and set(names) == set(tokenized)
    for name, item in zip(names, (items[at] for at in range(len(names))), strict=True):
        row = tokenized[name]
        assert item["input_ids"].tolist() == row["input_ids"]
        assert item["loss_mask"].tolist() == row["loss_mask"]
        assert item["hidden_states"].shape == (row["seq_len"], len(LAYERS) * WIDTH)
        if name in plain:
            last = item["verifier_last_hidden_states"]
            assert nearest(last, plain[name]) == 29  # before the final norm
            taps = item["hidden_states"].unflatten(1, (-1, WIDTH))
            found = [nearest(taps[:, place], plain[name]) for place in range(len(LAYERS))]
            assert found == LAYERS


def test_every_modelopt_file_loads_with_weights_only(finished_run: Run, tokenized, plain):
    found = {}
    for path in (finished_run.results / "hidden_states").rglob("*.pt"):
        stored = torch.load(path, weights_only=True)
        name = stored["conversation_id"]
        found[name] = stored
        assert stored["input_ids"].tolist() == tokenized[name]["input_ids"]
        assert stored["loss_mask"].tolist() == tokenized[name]["loss_mask"]
        if name in plain:
            assert nearest(stored["hidden_states"], plain[name]) == 30  # after the final norm
    assert set(found) == set(tokenized)


def test_the_canary_was_held_against_the_engine_and_its_log_probabilities(finished_run: Run):
    checks = json.loads(
        read_metadata(finished_run.results / "hidden_states" / "canary.parquet")["checks"]
    )
    samples = len(list(iter_rows(finished_run.results / "tokenized" / "canary.parquet")))
    assert len(checks["logprob_gaps"]) == samples > 3
    assert max(checks["logprob_gaps"]) < 0.01
    assert max(checks["errors"]["capture"]) == 0
    assert max(checks["errors"]["engine"]) < 0.005


def test_the_server_gave_log_probabilities_of_the_canary_alone(finished_run: Run):
    for shard in SHARDS:
        for row in iter_rows(finished_run.results / "generated" / f"{shard}.parquet"):
            if shard == "canary":
                assert len(row["response_logprobs"]) == len(row["response_token_ids"])
                assert max(row["response_logprobs"]) <= 0
            else:
                assert row["response_logprobs"] is None


def test_every_other_shard_recomputed_one_of_its_own_and_one_of_the_canarys(finished_run: Run):
    for shard in SHARDS[1:]:
        log = finished_run.results / "logs" / "extract_hidden_states" / f"{shard}.log"
        said = log.read_text()
        assert f"shard {shard}, sample" in said and "likely as the canary's" in said
        assert "shard canary, sample" in said and "nats from the server's" in said
