"""Extraction of one shard: files, index, trust, and resume."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import extract_hidden_states as step
import rebuild.capture.batches
import rebuild.capture.model
import rebuild.extraction.backends
import rebuild.extraction.capturing
import rebuild.extraction.shard
from rebuild.errors import StepError
from rebuild.extraction.capturing import CHECKS
from rebuild.files import sha256_file
from rebuild.serving.devices import Device
from rebuild.states.parts import LOG, read_log
from rebuild.tables import HIDDEN_STATES, iter_rows, read_metadata
from tests.support.tiny_states import (
    HIDDEN,
    ExtractionRun,
    build_model,
    save_model,
    tokenized_row,
    write_manifest,
    write_tokenized,
)

LAYERS = [1, 3, 4]
LENGTHS = {"a_gen0": 20, "b_gen0": 44, "c_gen0": 9, "d_gen0": 31}
CHECKED = 31  # the sample of median length


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def run(tmp_path, llama, monkeypatch):
    monkeypatch.setenv("REBUILD_LEASE_DIR", str(tmp_path / "leases"))
    run = ExtractionRun(tmp_path / "run", write_manifest(tmp_path / "manifest.json", llama))
    set_samples(run, LENGTHS)
    return run


@pytest.fixture
def forwards(monkeypatch):
    """The lengths of the samples that were captured, in order; the first one is recomputed before any is written."""
    lengths = []
    plain = rebuild.capture.batches.capture_batch

    def counting(target, sequences):
        lengths.extend(len(ids) for ids in sequences)
        return plain(target, sequences)

    monkeypatch.setattr(rebuild.capture.batches, "capture_batch", counting)
    return lengths


def set_samples(run, lengths):
    write_tokenized(run.tokenized, [tokenized_row(name, size) for name, size in lengths.items()])


def extract(run, **changes):
    step.extract_hidden_states(**run.arguments(**changes))


def rows(run):
    return {row["sample_id"]: row for row in iter_rows(run.index)}


def files(run):
    return sorted(path.name for path in run.states.iterdir() if path.name not in (LOG, CHECKS))


def load(run, row):
    return torch.load(run.index.parent / row["file"], weights_only=True)


def spoil_layer(monkeypatch, layer, length, spoil):
    """Have one layer of the real model fail for the sample of that length."""
    plain = LlamaDecoderLayer.forward

    def failing(self, hidden_states, *args, **kwargs):
        output = plain(self, hidden_states, *args, **kwargs)
        if self.self_attn.layer_idx == layer and output.shape[1] == length:
            spoil(output)
        return output

    monkeypatch.setattr(LlamaDecoderLayer, "forward", failing)


def test_every_sample_has_its_file_with_the_states_of_a_plain_forward(run):
    extract(run)
    model = build_model("llama")
    tokens = {row["sample_id"]: row for row in iter_rows(run.tokenized)}
    for name, row in rows(run).items():
        stored = load(run, row)
        with torch.no_grad():
            plain = model(stored["input_ids"][None], output_hidden_states=True).hidden_states
        expected = torch.cat([plain[layer + 1][0] for layer in LAYERS], dim=-1)
        assert stored["input_ids"].tolist() == tokens[name]["input_ids"]
        assert stored["loss_mask"].tolist() == tokens[name]["loss_mask"]
        assert stored["hidden_states"].dtype == torch.bfloat16
        torch.testing.assert_close(stored["hidden_states"].float(), expected, rtol=2**-8, atol=1e-3)


def test_the_index_describes_every_file_in_the_order_of_the_samples(run):
    extract(run)
    assert pq.read_schema(run.index).names == HIDDEN_STATES.names
    index = rows(run)
    assert list(index) == list(LENGTHS)
    for name, row in index.items():
        path = run.index.parent / row["file"]
        states = load(run, row)["hidden_states"].float()
        assert row["file"] == f"00000/{name}.ckpt"
        assert row["bytes"] == path.stat().st_size
        assert row["sha256"] == sha256_file(path)
        assert (row["key"], row["dtype"], row["layers"]) == ("hidden_states", "bfloat16", LAYERS)
        assert (row["seq_len"], row["finite"], row["zero_rows"]) == (LENGTHS[name], True, 0)
        rms = states.unflatten(1, (-1, HIDDEN)).square().mean(dim=(0, 2)).sqrt()
        assert row["rms"] == pytest.approx(rms.tolist(), rel=1e-5)
    facts = read_metadata(run.index)
    assert (facts["rows"], facts["fingerprint"], facts["compute_dtype"]) == (
        "4",
        "states",
        "float32",
    )


def test_samples_that_were_changed_after_their_approval_are_refused(run):
    arguments = run.arguments()
    write_tokenized(run.tokenized, [tokenized_row("other_gen0", 12)])
    with pytest.raises(StepError, match="not the ones that were approved"):
        step.extract_hidden_states(**arguments)
    assert not run.index.exists() and not run.states.exists()


def test_nothing_is_left_of_the_work_in_progress(run):
    extract(run)
    assert files(run) == [f"{name}.ckpt" for name in sorted(LENGTHS)]


def test_a_finished_shard_that_is_asked_for_again_is_only_verified(run, monkeypatch):
    extract(run)
    before = run.index.read_bytes()
    run.index.unlink()
    monkeypatch.delattr(rebuild.capture.model, "load_whole")
    extract(run)
    assert run.index.read_bytes() == before


def test_the_longest_sample_goes_first(run, forwards):
    extract(run)
    assert forwards == [CHECKED, *sorted(LENGTHS.values(), reverse=True)]


def test_the_same_samples_give_the_same_bytes_again(run):
    extract(run)
    first = {name: row["sha256"] for name, row in rows(run).items()}
    extract(run)
    assert {name: row["sha256"] for name, row in rows(run).items()} == first


def test_ids_of_any_kind_get_a_file_in_the_shards_folder(run):
    lengths = {"../up": 9, "a/b": 12, ".dot": 15, "日本 🙂": 18, "x" * 400: 21, "100% [*]": 24}
    set_samples(run, lengths)
    extract(run)
    assert {name: len(load(run, row)["input_ids"]) for name, row in rows(run).items()} == lengths
    assert sorted(Path(row["file"]).name for row in rows(run).values()) == files(run)


def test_an_empty_shard_gets_an_empty_index_and_needs_no_device(run, tmp_path):
    set_samples(run, {})
    extract(run)
    assert rows(run) == {}
    assert not (tmp_path / "leases").exists()


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda states: states[0, 7].fill_(float("nan")), "not finite"),
        (lambda states: states.zero_(), "all zero"),
    ],
)
def test_a_layer_that_fails_stops_the_shard_and_names_sample_and_layer(
    run, monkeypatch, spoil, fault
):
    spoil_layer(monkeypatch, layer=3, length=31, spoil=spoil)
    with pytest.raises(StepError) as stopped:
        extract(run)
    assert f"layer 3 are {fault}" in stopped.value.what
    assert stopped.value.where == "shard 00000, sample d_gen0"
    assert not run.index.exists()
    assert "d_gen0.ckpt" not in files(run)


def test_what_was_computed_before_a_failure_is_not_computed_again(run, monkeypatch, forwards):
    with monkeypatch.context() as faulty:
        spoil_layer(faulty, layer=3, length=20, spoil=lambda states: states.zero_())
        with pytest.raises(StepError):
            extract(run)
    written = {part["sample_id"] for part in read_log(run.states)}
    assert {"b_gen0", "d_gen0"} <= written and "a_gen0" not in written
    forwards.clear()
    extract(run)
    missing = {LENGTHS[name] for name in LENGTHS if name not in written}
    assert forwards == [CHECKED, *sorted(missing, reverse=True)]
    assert list(rows(run)) == list(LENGTHS)


KILLED = """
import os, signal, sys, time
import rebuild.capture.batches
from extract_hidden_states import Around, extract_hidden_states
from pathlib import Path
from rebuild.states.parts import read_log

arguments = eval(sys.argv[1])
plain = rebuild.capture.batches.capture_batch

def deadly(target, sequences):
    if len(sequences[0]) == 20:
        while len(read_log(arguments["folder"])) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(target, sequences)

rebuild.capture.batches.capture_batch = deadly
extract_hidden_states(**arguments)
"""


def test_after_a_kill_only_the_samples_without_a_recorded_file_are_computed(run, forwards):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, repr(run.arguments()).replace("PosixPath", "Path")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert killed.returncode == -signal.SIGKILL
    assert not run.index.exists()
    extract(run)
    assert forwards == [CHECKED, 20, 9]
    assert files(run) == [f"{name}.ckpt" for name in sorted(LENGTHS)]
    assert [row["sha256"] for row in rows(run).values()] == [
        sha256_file(run.index.parent / row["file"]) for row in rows(run).values()
    ]


@pytest.fixture
def interrupted(run, monkeypatch):
    """A run whose parts are all written and recorded, but whose index is not."""

    def stop(*_):
        raise SystemExit(143)

    with monkeypatch.context() as killed:
        killed.setattr(step, "write_index", stop)
        with pytest.raises(SystemExit):
            extract(run)
    return run


def test_when_only_the_index_is_missing_no_model_is_loaded(interrupted, monkeypatch):
    monkeypatch.delattr(rebuild.capture.model, "load_whole")
    extract(interrupted)
    assert list(rows(interrupted)) == list(LENGTHS)


def test_a_truncated_and_a_flipped_part_are_computed_again(interrupted, forwards):
    whole = {path.name: path.read_bytes() for path in interrupted.states.glob("*.ckpt")}
    os.truncate(interrupted.states / "a_gen0.ckpt", len(whole["a_gen0.ckpt"]) - 1)
    flipped = bytearray(whole["c_gen0.ckpt"])
    flipped[len(flipped) // 2] ^= 1
    (interrupted.states / "c_gen0.ckpt").write_bytes(flipped)
    extract(interrupted)
    assert forwards == [CHECKED, 20, 9]
    assert {path.name: path.read_bytes() for path in interrupted.states.glob("*.ckpt")} == whole


def test_a_changed_sample_is_computed_again_and_a_dropped_ones_file_goes(interrupted, forwards):
    (interrupted.states / ".b_gen0.ckpt.4242.tmp").touch()
    kept = {name: size for name, size in LENGTHS.items() if name != "b_gen0"}
    set_samples(interrupted, {**kept, "c_gen0": 10, "new_gen0": 12})
    extract(interrupted)
    assert forwards == [20, 12, 10]
    assert files(interrupted) == [
        f"{name}.ckpt" for name in ("a_gen0", "c_gen0", "d_gen0", "new_gen0")
    ]


@pytest.mark.parametrize(
    "change",
    [{"layers": [1, 2, 4]}, {"dtype": "bfloat16"}, {"fingerprint": "states of old"}],
)
def test_parts_made_in_another_way_are_computed_again(interrupted, forwards, change):
    extract(interrupted, **change)
    assert len(forwards) == 1 + len(LENGTHS)


def test_parts_of_another_model_are_computed_again(interrupted, forwards, llama):
    write_manifest(interrupted.manifest, llama, content_sha256="another")
    extract(interrupted)
    assert len(forwards) == 1 + len(LENGTHS)


def test_samples_are_cut_and_those_with_nothing_left_to_train_on_are_counted(run):
    set_samples(run, {"short": 9, "cut": 24, "prompt_alone": 44})
    extract(run, max_length=14)
    index = rows(run)
    assert {name: row["seq_len"] for name, row in index.items()} == {"short": 9, "cut": 14}
    assert load(run, index["cut"])["loss_mask"].tolist() == [0] * 8 + [1] * 6
    assert read_metadata(run.index)["left_out"] == "1"


def test_answers_of_another_model_stop_before_any_work(run, forwards):
    row = tokenized_row("a_gen0", 9)
    write_tokenized(run.tokenized, [row], model_sha256="f" * 64)
    with pytest.raises(StepError, match="another model's answers") as stopped:
        extract(run)
    assert stopped.value.seen.endswith("f" * 12)
    assert forwards == []


def test_layers_that_the_model_does_not_have_stop_before_any_work(run, forwards):
    with pytest.raises(StepError, match="no layer 8"):
        extract(run, layers=[1, 8])
    assert forwards == []


def test_a_disk_that_takes_no_more_stops_the_shard_and_keeps_what_it_took(run, monkeypatch):
    plain = rebuild.extraction.capturing.write_sample

    def full_disk(shard, sample, *rest):
        if sample.sample_id == "a_gen0":
            raise OSError(28, "No space left on device")
        return plain(shard, sample, *rest)

    monkeypatch.setattr(rebuild.extraction.capturing, "write_sample", full_disk)
    with pytest.raises(StepError, match="could not be recorded") as stopped:
        extract(run)
    assert stopped.value.where == "shard 00000, sample a_gen0"
    assert "No space left on device" in stopped.value.seen
    assert not run.index.exists()
    assert {part["sample_id"] for part in read_log(run.states)} == {"b_gen0", "c_gen0", "d_gen0"}


def test_the_model_waits_for_a_slow_disk(run, monkeypatch, forwards):
    set_samples(run, {f"s{size}": size for size in range(10, 25)})
    capturing = rebuild.extraction.capturing
    plain, ahead, written = capturing.write_sample, [], []

    def slow(*arguments):
        time.sleep(0.05)
        parts = plain(*arguments)
        written.append(arguments)
        ahead.append(len(forwards) - 1 - len(written))
        return parts

    monkeypatch.setattr(capturing, "write_sample", slow)
    extract(run)
    assert 1 <= max(ahead) <= capturing.QUEUED + capturing.WRITERS + 1


def test_the_log_says_how_fast_it_went_and_where_the_states_are(run, capsys):
    extract(run)
    said = capsys.readouterr().err
    assert "shard 00000: 4 samples, 0 already whole; layers [1, 3, 4]" in said
    assert "the capture against a plain forward by transformers: 1 samples" in said
    assert "104/104 tokens (100 %)" in said
    assert "4/4 samples" in said
    assert str(run.index) in said


def test_on_a_gpu_only_the_leased_one_is_visible_before_the_model_is_loaded(run, monkeypatch):
    gpu = Device("gpu:1", "gpu", 1, "GPU-1a2b", "H200", 1 << 37)
    seen = {}

    def fake_load(folder, **how):
        seen.update(how, visible=os.environ["CUDA_VISIBLE_DEVICES"])
        return plain(folder, **{**how, "devices": ["cpu"]})

    plain = rebuild.capture.model.load_whole
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(step, "select_devices", lambda setting: [gpu])
    monkeypatch.setattr(rebuild.capture.model, "load_whole", fake_load)
    extract(run)
    assert seen == {
        "visible": "GPU-1a2b",
        "devices": ["cuda:0"],
        "dtype": "bfloat16",
        "trust_remote_code": False,
    }
    assert read_metadata(run.index)["compute_dtype"] == "bfloat16"
