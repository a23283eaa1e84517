"""A shard's folder when its samples are written: strays go, and the data set comes, the same for the same samples."""

import hashlib
import resource
import subprocess
import sys

import pytest
from datasets import load_from_disk

from rebuild.errors import StepError
from rebuild.files import atomic_path
from rebuild.formats import saved_dataset
from rebuild.formats.shard_files import finish_shard, remove_strays
from tests.support.captured import make_sample
from tests.support.trees import ROOT

SAMPLES = [make_sample(f"{length}_gen0", length) for length in (9, 4, 700)]


def digests(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows(folder):
    return load_from_disk(str(folder / "speculators")).with_format(None).to_list()


def expected(samples):
    return [
        {
            "input_ids": sample.input_ids.tolist(),
            "loss_mask": sample.loss_mask.tolist(),
            "seq_len": len(sample),
            "sample_id": sample.sample_id,
        }
        for sample in samples
    ]


def touch(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def left(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["speculators", "speculators_fp8"])
def test_the_data_set_has_the_samples_in_order_as_torch_tensors(name, tmp_path):
    finish_shard(tmp_path, [name], SAMPLES)
    assert rows(tmp_path) == expected(SAMPLES)
    assert load_from_disk(str(tmp_path / "speculators")).format["type"] == "torch"


def test_more_samples_than_a_batch_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_dataset, "BATCH", 2)
    finish_shard(tmp_path, ["speculators"], SAMPLES)
    assert rows(tmp_path) == expected(SAMPLES)


def test_a_shard_without_samples_has_an_empty_data_set(tmp_path):
    finish_shard(tmp_path, ["speculators"], [])
    assert rows(tmp_path) == []


def test_other_formats_need_nothing_beside_their_files(tmp_path):
    finish_shard(tmp_path, ["specforge", "modelopt"], SAMPLES)
    assert list(tmp_path.iterdir()) == []


def test_the_same_samples_give_the_same_bytes_in_any_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path += ['workflow/scripts'];"
        "from tests.unit.test_format_shard_files import SAMPLES, finish_shard;"
        "finish_shard(Path(sys.argv[1]), ['speculators'], SAMPLES)"
    )
    for name in ("one", "another"):
        subprocess.run([sys.executable, "-c", code, tmp_path / name], cwd=ROOT, check=True)
    assert digests(tmp_path / "one") == digests(tmp_path / "another")
    assert digests(tmp_path / "one").keys() == {
        "speculators/data-00000-of-00001.arrow",
        "speculators/dataset_info.json",
        "speculators/state.json",
    }


def test_it_may_be_done_again_with_the_same_or_with_other_samples(tmp_path):
    finish_shard(tmp_path, ["speculators"], SAMPLES)
    before = digests(tmp_path)
    finish_shard(tmp_path, ["speculators"], SAMPLES)
    assert digests(tmp_path) == before
    finish_shard(tmp_path, ["speculators"], SAMPLES[1:])
    assert rows(tmp_path) == expected(SAMPLES[1:])
    assert digests(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_set_that_is_cut_short_is_none_and_is_made_anew(tmp_path, monkeypatch, moved):
    finish_shard(tmp_path, ["speculators"], SAMPLES)
    remaining = iter(range(moved))

    def killed(path):
        if next(remaining, None) is None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saved_dataset, "sync_file", killed)
        with pytest.raises(KeyboardInterrupt):
            finish_shard(tmp_path, ["speculators"], SAMPLES[:1])
    with pytest.raises(FileNotFoundError, match="Directory"):
        rows(tmp_path)
    finish_shard(tmp_path, ["speculators"], SAMPLES[:1])
    assert rows(tmp_path) == expected(SAMPLES[:1])


def test_what_a_kill_left_of_an_earlier_try_does_not_stay(tmp_path):
    touch(tmp_path, ["speculators/.saving/set/data-00000-of-00001.arrow"])
    finish_shard(tmp_path, ["speculators"], SAMPLES)
    assert not (tmp_path / "speculators" / ".saving").exists()


def test_a_disk_that_takes_no_more_is_named_and_nothing_is_left_behind(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StepError) as stopped:
            finish_shard(tmp_path, ["speculators"], SAMPLES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stopped.value.where == str(tmp_path / "speculators")
    assert stopped.value.expected == f"room for {5 * sum(map(len, SAMPLES))} bytes"
    assert "File too large" in stopped.value.seen
    assert left(tmp_path) == set()


def test_strays_are_removed_and_nothing_else_is_touched(tmp_path):
    folder = tmp_path / "00000"
    kept = ["a.ckpt", "a.pt", "speculators/hidden_states/hs_0.safetensors"]
    others = [
        "notes.txt",
        ".gitkeep",
        ".mine.tmp",
        ".parts.jsonl",
        "deeper/x.ckpt",
        "hs_7.safetensors",
        "speculators/state.json",
        "speculators/token_freq.pt",
        "speculators/x.ckpt",
        "speculators/hidden_states/hs_x.safetensors",
        "speculators/hidden_states/notes.txt",
    ]
    strays = [
        ".old.ckpt.77.tmp",
        "old.ckpt",
        "old.ckpt.gz",
        "old.pt",
        "speculators/.state.json.8.tmp",
        "speculators/hidden_states/.hs_3.safetensors.9.tmp",
        "speculators/hidden_states/hs_1.safetensors",
    ]
    touch(folder, [*kept, *others, *strays])
    (tmp_path / "target.ckpt").touch()
    (folder / "link.ckpt").symlink_to(tmp_path / "target.ckpt")
    assert sorted(remove_strays(folder, set(kept))) == sorted([*strays, "link.ckpt"])
    assert left(folder) == {*kept, *others}
    assert (tmp_path / "target.ckpt").exists()


def test_what_an_atomic_write_leaves_behind_when_killed_is_a_stray(tmp_path):
    with atomic_path(tmp_path / "one.ckpt") as temporary:
        temporary.touch()
        assert remove_strays(tmp_path, set()) == [temporary.name]
        temporary.touch()


def test_a_folder_that_is_not_there_has_no_strays(tmp_path):
    assert remove_strays(tmp_path / "none", set()) == []


def test_finishing_keeps_the_files_of_all_formats_and_removes_those_of_no_sample(tmp_path):
    kept = [f"{sample.sample_id}{suffix}" for sample in SAMPLES for suffix in (".ckpt", ".pt")]
    kept += [f"speculators/hidden_states/hs_{row}.safetensors" for row in range(3)]
    touch(tmp_path, [*kept, "gone.ckpt", "gone.pt", "speculators/hidden_states/hs_3.safetensors"])
    finish_shard(tmp_path, ["specforge", "modelopt", "speculators"], SAMPLES)
    assert {path for path in left(tmp_path) if not path.endswith((".json", ".arrow"))} == {*kept}


def test_a_format_that_is_no_longer_wanted_leaves_no_files_to_be_read(tmp_path):
    touch(tmp_path, [f"{sample.sample_id}.pt" for sample in SAMPLES])
    finish_shard(tmp_path, ["specforge"], SAMPLES)
    assert left(tmp_path) == set()
