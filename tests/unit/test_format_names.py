"""Names of files that carry a sample's id."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.formats.names import file_name

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


def test_a_plain_id_is_the_files_name():
    assert file_name("mt-bench_81_gen1", ".ckpt") == "mt-bench_81_gen1.ckpt"
    assert file_name("a/b é", ".pt") == "a%2Fb%20%C3%A9.pt"
    assert file_name(".hidden", ".ckpt") == "%2Ehidden.ckpt"


@pytest.mark.parametrize("sample_id", WEIRD)
def test_a_weird_id_gives_a_file_directly_in_the_folder(sample_id, tmp_path):
    (tmp_path / file_name(sample_id, ".ckpt")).touch()
    (file,) = tmp_path.iterdir()
    assert file.parent == tmp_path
    assert file.is_file()


def test_different_ids_never_share_a_file_even_where_one_is_written_like_the_others_name():
    ids = [*WEIRD, "%2Ehidden", "a%2Fb", "a/b", file_name(LONG, "")]
    assert len({file_name(sample_id, ".ckpt") for sample_id in ids}) == len(ids)


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_names_are_safe_and_tell_ids_apart(one, other):
    name = file_name(one, ".ckpt")
    assert re.fullmatch(r"[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]*\.ckpt", name)
    assert len(name) <= 205
    assert (file_name(other, ".ckpt") == name) == (other == one)
