"""SpecForge's own offline readers, as released, on the files of a shard: DFlash, DSpark and EAGLE-3."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rebuild.formats.catalog import FORMATS
from rebuild.formats.names import file_name
from rebuild.formats.shard_files import finish_shard
from rebuild.states.captured import Captured
from rebuild.states.layers import dflash_layers
from rebuild.states.samples import Sample
from tests.support.captured import HIDDEN, make_captured, make_sample
from tests.support.tiny_states import build_model

PEERS = Path(os.environ.get("REBUILD_PEERS", ".cache/peers")).absolute()
LENGTHS = {"plain_gen0": 40, "two/parts é_gen1": 17, ".hidden": 64, "100% [*]?#": 23, "x" * 300: 31}
LAYERS = 5
LONGEST = 2048

Read = dict[str, dict[str, torch.Tensor]]


def specforge(module: str) -> Any:
    """Import a module of the installed SpecForge; it comes last, so that it can shadow nothing of ours."""
    if str(PEERS) not in sys.path:
        sys.path.append(str(PEERS))
    return importlib.import_module(f"specforge.{module}")


def write_shard(folder: Path, name: str, include_last: str, layers: int) -> dict[str, Captured]:
    """Write the samples in one format; return what was captured of them, by file name."""
    kind, captured = FORMATS[name], {}
    samples = [make_sample(sample_id, length) for sample_id, length in LENGTHS.items()]
    for row, sample in enumerate(samples):
        path = folder / kind.path(sample.sample_id, row)
        states = captured[path.name] = make_captured(len(sample), layers, seed=row)
        kind.write(path, kind.tensors(sample, states, include_last))
    finish_shard(folder, [name], samples)
    return captured


def read_all(reader: Any, normalize: Any) -> Read:
    """Read files as SpecForge's trainer does; return its samples by file name."""
    store = specforge("runtime.data_plane.feature_store").LocalFeatureStore()
    refs = reader.read()
    return {Path(ref.feature_store_uri).name: normalize(store.get(ref)[0]) for ref in refs}


def read_dflash(folder: Path, algorithm: str = "dflash") -> Read:
    data = specforge("algorithms.common.dflash_family_data")
    kind = {"dflash": "", "dspark": "dspark_"}[algorithm]
    reader = getattr(data, f"build_{kind}offline_reader")(
        algorithm, str(folder), run_id="test", ttt_length=7, max_len=LONGEST
    )
    return read_all(reader, getattr(data, f"build_{kind}offline_normalizer")(LONGEST))


def read_eagle3(folder: Path) -> Read:
    data = specforge("algorithms.eagle3.data")
    reader = data.build_offline_reader(str(folder), run_id="test", ttt_length=7, max_len=LONGEST)
    return read_all(reader, data.build_offline_normalizer(LONGEST))


def samples_by_name() -> dict[str, Sample]:
    return {
        file_name(sample_id, ".ckpt"): make_sample(sample_id, length)
        for sample_id, length in LENGTHS.items()
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def captured(run: Path) -> dict[str, Captured]:
    """Two shards are written; this is what was captured of the first."""
    (run / "00001").mkdir()
    return write_shard(run / "00000", "specforge", "post_norm", LAYERS)


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_ids_masks_and_states_reach_the_trainer_unchanged(run, captured, algorithm):
    read = read_dflash(run / "00000", algorithm)
    assert read.keys() == samples_by_name().keys() == captured.keys()
    for name, sample in samples_by_name().items():
        found, states = read[name], captured[name]
        assert found["input_ids"].tolist() == [sample.input_ids.tolist()]
        assert found["loss_mask"].tolist() == [sample.loss_mask.tolist()]
        assert {found[key].dtype for key in ("input_ids", "loss_mask")} == {torch.int64}
        assert torch.equal(found["hidden_states"], states.taps.flatten(1).unsqueeze(0))
        if algorithm == "dspark":
            assert torch.equal(found["target_last_hidden_states"], states.post_norm.unsqueeze(0))


def test_the_reader_finds_the_samples_from_the_folder_above_all_shards(run, captured):
    assert read_dflash(run).keys() == captured.keys()


@pytest.mark.parametrize("algorithm", ["dflash", "dspark"])
def test_samples_of_different_length_make_a_batch(run, captured, algorithm):
    data = specforge("algorithms.common.dflash_family_data")
    collate = {"dflash": data.build_collator, "dspark": data.build_dspark_collator}[algorithm]()
    batch = collate(list(read_dflash(run / "00000", algorithm).values()))
    assert batch["hidden_states"].shape == (len(LENGTHS), 64, LAYERS * HIDDEN)


def test_dspark_refuses_files_without_the_final_state(tmp_path):
    write_shard(tmp_path, "specforge", "none", LAYERS)
    assert len(read_dflash(tmp_path)) == len(LENGTHS)
    with pytest.raises(KeyError, match="target_last_hidden_states"):
        read_dflash(tmp_path, "dspark")


def test_eagle3_gets_the_target_and_the_three_layers(tmp_path):
    captured = write_shard(tmp_path, "specforge_eagle3", "none", 3)
    read = read_eagle3(tmp_path)
    assert read.keys() == captured.keys()
    for name, sample in samples_by_name().items():
        found, states = read[name], captured[name]
        assert found["input_ids"].tolist() == [sample.input_ids.tolist()]
        # It never learns from the last token, after which the target's state says nothing that is known.
        assert found["loss_mask"].tolist() == [[*sample.loss_mask[:-1].tolist(), 0]]
        assert torch.equal(found["target"], states.post_norm.unsqueeze(0))
        assert torch.equal(found["hidden_state"], states.taps.flatten(1).unsqueeze(0))


def test_eagle3s_samples_of_different_length_make_a_batch(tmp_path):
    write_shard(tmp_path, "specforge_eagle3", "none", 3)
    batch = specforge("data.utils").DataCollatorWithPadding()(list(read_eagle3(tmp_path).values()))
    assert batch["hidden_state"].shape[0] == len(LENGTHS)
    assert batch["hidden_state"].shape[2] == 3 * HIDDEN
    assert batch["target"].shape[2] == HIDDEN


@pytest.mark.parametrize(
    ("name", "include_last", "layers", "keys"),
    [
        ("specforge", "none", LAYERS, ["hidden_states"]),
        ("specforge", "post_norm", LAYERS, ["hidden_states", "target_last_hidden_states"]),
        ("specforge_eagle3", "none", 3, ["hidden_state", "aux_hidden_state"]),
    ],
)
def test_the_readers_own_validation_passes(name, include_last, layers, keys, tmp_path):
    write_shard(tmp_path, name, include_last, layers)
    reader = specforge("runtime.data_plane.offline_reader").OfflineManifestReader(
        str(tmp_path),
        strategy="test",
        feature_keys=("input_ids", "loss_mask", *keys),
        validate_files=True,
    )
    assert sorted(ref.num_tokens for ref in reader) == sorted(LENGTHS.values())


def test_the_layers_are_in_the_order_in_which_the_drafter_takes_them_from_the_model(tmp_path):
    model, sample, layers = build_model("llama"), make_sample(length=30), [1, 2, 3, 4, 6]
    ids = torch.from_numpy(sample.input_ids.astype("int64") % model.config.vocab_size)
    with torch.no_grad():
        plain = model(ids.unsqueeze(0), output_hidden_states=True).hidden_states
    taps = torch.stack([plain[layer + 1][0] for layer in layers], dim=1).bfloat16()
    kind = FORMATS["specforge"]
    path = tmp_path / kind.path("one", 0)
    kind.write(path, kind.tensors(sample, Captured(taps), "none"))
    expected = specforge("modeling.draft.dflash").extract_context_feature(plain, layers)
    assert torch.equal(read_dflash(tmp_path)[path.name]["hidden_states"], expected.bfloat16())


def test_the_reader_refuses_what_extraction_refuses_too(tmp_path):
    kind, sample = FORMATS["specforge"], make_sample(length=3)
    sample.loss_mask[:] = [0, 1, 0]
    kind.write(tmp_path / "lonely.ckpt", kind.tensors(sample, make_captured(3), "none"))
    with pytest.raises(ValueError, match="two consecutive supervised tokens"):
        read_dflash(tmp_path)


@pytest.mark.parametrize("taps", [1, 2, 3, 5, 7])
def test_the_layers_of_the_formula_are_specforges(taps):
    formula = specforge("modeling.draft.dflash").build_target_layer_ids
    for layers in range(8, 100):
        assert dflash_layers(layers, taps) == formula(layers, taps)
