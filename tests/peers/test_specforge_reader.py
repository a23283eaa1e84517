"""SpecForge's own offline reader, as released, on the files of an extracted shard."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from extract_hidden_states import extract_hidden_states
from rebuild.states.layers import dflash_layers
from rebuild.states.specforge import file_name, write_sample
from rebuild.tables import iter_rows
from tests.support.tiny_states import (
    HIDDEN,
    ExtractionRun,
    build_model,
    save_model,
    tokenized_row,
    write_manifest,
    write_tokenized,
)

PEERS = Path(os.environ.get("REBUILD_PEERS", ".cache/peers")).absolute()
LAYERS = [1, 2, 3, 4, 5]
LENGTHS = {"plain_gen0": 40, "two/parts é_gen1": 17, ".hidden": 64, "100% [*]?#": 23, "x" * 300: 31}


def specforge(module):
    """Import a module of the installed SpecForge; it comes last, so that it can shadow nothing of ours."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    return importlib.import_module(f"specforge.{module}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    model = save_model("llama", folder / "model")
    run = ExtractionRun(folder, write_manifest(folder / "manifest.json", model))
    write_tokenized(run.tokenized, [tokenized_row(name, size) for name, size in LENGTHS.items()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REBUILD_LEASE_DIR", str(folder / "leases"))
        extract_hidden_states(**run.arguments(layers="auto"))
    return run


def read(folder, max_len=2048):
    """Read a folder as SpecForge's trainer does; return its samples by file name."""
    data = specforge("algorithms.common.dflash_family_data")
    store = specforge("runtime.data_plane.feature_store").LocalFeatureStore()
    reader = data.build_offline_reader(
        "dflash", str(folder), run_id="test", ttt_length=7, max_len=max_len
    )
    normalize = data.build_offline_normalizer(max_len)
    refs = reader.read()
    return {Path(ref.feature_store_uri).name: normalize(store.get(ref)[0]) for ref in refs}


def test_the_reader_finds_every_sample_of_the_index_and_no_other_file(run):
    assert set(read(run.states)) == {Path(row["file"]).name for row in iter_rows(run.index)}
    assert set(read(run.states)) == {file_name(name) for name in LENGTHS}


def test_the_reader_finds_the_samples_from_the_folder_above_all_shards(run):
    assert set(read(run.index.parent)) == {file_name(name) for name in LENGTHS}


def test_ids_masks_and_states_reach_the_trainer_unchanged(run):
    samples, model = read(run.states), build_model("llama")
    context = specforge("modeling.draft.dflash").extract_context_feature
    for row in iter_rows(run.tokenized):
        sample = samples[file_name(row["sample_id"])]
        assert sample["input_ids"].tolist() == [row["input_ids"]]
        assert sample["loss_mask"].tolist() == [row["loss_mask"]]
        assert {sample[key].dtype for key in ("input_ids", "loss_mask")} == {torch.int64}
        assert sample["hidden_states"].dtype == torch.bfloat16
        assert sample["hidden_states"].shape == (1, row["seq_len"], len(LAYERS) * HIDDEN)
        with torch.no_grad():
            plain = model(sample["input_ids"], output_hidden_states=True).hidden_states
        expected = context(plain, LAYERS)
        torch.testing.assert_close(sample["hidden_states"].float(), expected, rtol=2**-8, atol=1e-3)


def test_the_readers_own_validation_passes(run):
    reader = specforge("runtime.data_plane.offline_reader").OfflineManifestReader(
        str(run.states),
        strategy="dflash",
        feature_keys=("input_ids", "loss_mask", "hidden_states"),
        target_repr=None,
        validate_files=True,
    )
    assert sorted(ref.num_tokens for ref in reader) == sorted(LENGTHS.values())


def test_samples_of_different_length_make_a_batch(run):
    collate = specforge("algorithms.common.dflash_family_data").build_collator()
    batch = collate(list(read(run.states).values()))
    assert batch["hidden_states"].shape == (len(LENGTHS), 64, len(LAYERS) * HIDDEN)


def test_the_reader_refuses_what_extraction_refuses_too(tmp_path):
    write_sample(tmp_path / "lonely.ckpt", [1, 2, 3], [0, 1, 0], torch.ones(3, 4).bfloat16())
    with pytest.raises(ValueError, match="two consecutive supervised tokens"):
        read(tmp_path)


@pytest.mark.parametrize("taps", [1, 2, 3, 5, 7])
def test_the_layers_of_the_formula_are_specforges(taps):
    formula = specforge("modeling.draft.dflash").build_target_layer_ids
    for layers in range(8, 100):
        assert dflash_layers(layers, taps) == formula(layers, taps)
