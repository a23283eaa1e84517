"""SpecForge files: names that carry the sample id, and the layout on disk."""

import hashlib
import re
import resource
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rebuild.errors import StepError
from rebuild.states.specforge import file_name, write_sample

LONG = "long" * 100
WEIRD = [
    "plain-id_gen0",
    "../../etc/passwd",
    "/absolute",
    ".hidden",
    "..",
    "a b\tc\nd",
    "日本語 🙂",
    "100%",
    "con:aux?*|<>\"'",
    "a\x00b",
    LONG,
    LONG + "x",
    "\ud800",
]


def states(length, width=6, seed=0):
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_a_plain_id_is_the_files_name():
    assert file_name("mt-bench_81_gen1") == "mt-bench_81_gen1.ckpt"
    assert file_name("a/b é") == "a%2Fb%20%C3%A9.ckpt"
    assert file_name(".hidden") == "%2Ehidden.ckpt"


@pytest.mark.parametrize("sample_id", WEIRD)
def test_a_weird_id_gives_a_file_directly_in_the_folder(sample_id, tmp_path):
    write_sample(tmp_path / file_name(sample_id), [1, 2], [0, 1], states(2))
    (file,) = tmp_path.iterdir()
    assert file.parent == tmp_path
    assert file.is_file()


def test_different_ids_never_share_a_file_even_where_one_is_written_like_the_others_name():
    ids = [*WEIRD, "%2Ehidden", "a%2Fb", "a/b", file_name(LONG).removesuffix(".ckpt")]
    assert len({file_name(sample_id) for sample_id in ids}) == len(ids)


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_names_are_safe_and_tell_ids_apart(one, other):
    name = file_name(one)
    assert re.fullmatch(r"[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]*\.ckpt", name)
    assert len(name) <= 205
    assert (file_name(other) == name) == (other == one)


def test_the_file_holds_the_three_tensors_in_the_readers_shapes_and_types(tmp_path):
    path = tmp_path / "one.ckpt"
    write_sample(path, [5, 6, 7], [0, 1, 1], states(3))
    sample = torch.load(path, weights_only=True, mmap=True)
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in sample.items()} == {
        "input_ids": (torch.int64, (3,)),
        "loss_mask": (torch.int64, (3,)),
        "hidden_states": (torch.bfloat16, (3, 6)),
    }
    assert sample["input_ids"].tolist() == [5, 6, 7]
    assert sample["loss_mask"].tolist() == [0, 1, 1]
    assert torch.equal(sample["hidden_states"], states(3))


def test_the_same_sample_gives_the_same_bytes_under_any_name(tmp_path):
    paths = [tmp_path / "one.ckpt", tmp_path / "another.ckpt"]
    for path in paths:
        write_sample(path, [5, 6, 7], [0, 1, 1], states(3))
    assert len({hashlib.sha256(path.read_bytes()).digest() for path in paths}) == 1
    assert not any("another" in name for name in zipfile.ZipFile(paths[1]).namelist())


def test_only_the_samples_own_states_are_stored_not_the_tensor_they_are_cut_from(tmp_path):
    write_sample(tmp_path / "whole.ckpt", [1, 2], [1, 1], states(2))
    write_sample(tmp_path / "cut.ckpt", [1, 2], [1, 1], states(5000)[:, :3].reshape(-1, 6)[:2])
    assert (tmp_path / "cut.ckpt").stat().st_size == (tmp_path / "whole.ckpt").stat().st_size


def test_a_disk_that_takes_no_more_is_named_and_nothing_is_left_behind(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StepError) as stopped:
            write_sample(tmp_path / "one.ckpt", [1] * 500, [1] * 500, states(500))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stopped.value.where == str(tmp_path / "one.ckpt")
    assert stopped.value.expected == "room for 6000 bytes"
    assert "bytes are free there" in stopped.value.seen
    assert list(tmp_path.iterdir()) == []
