"""Samples as extraction reads them: checked, cut, hashed."""

import numpy as np
import pytest

from rebuild.errors import StepError
from rebuild.states.samples import Sample, cut, iter_samples
from tests.support.tiny_states import VOCABULARY, tokenized_row, write_tokenized


def read(tmp_path, *rows):
    return list(iter_samples(write_tokenized(tmp_path / "00000.parquet", list(rows)), VOCABULARY))


def sample(mask, ids=None):
    return Sample("a", np.array(ids or mask, dtype=np.int32), np.array(mask, dtype=np.int8))


def test_samples_come_in_the_tables_order_with_their_own_tokens(tmp_path):
    rows = [tokenized_row("b", 9), tokenized_row("a", 30), tokenized_row("c", 12)]
    samples = read(tmp_path, *rows)
    assert [s.sample_id for s in samples] == ["b", "a", "c"]
    assert [s.input_ids.tolist() for s in samples] == [row["input_ids"] for row in rows]
    assert [s.loss_mask.tolist() for s in samples] == [row["loss_mask"] for row in rows]


def test_an_empty_shard_has_no_samples(tmp_path):
    assert read(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"seq_len": 8}, "9 ids, 9 mask values, seq_len 8"),
        ({"loss_mask": [1] * 8}, "9 ids, 8 mask values, seq_len 9"),
        ({"input_ids": None}, "0 ids, 9 mask values, seq_len 9"),
        ({"input_ids": [], "loss_mask": [], "seq_len": 0}, "0 ids, 0 mask values, seq_len 0"),
        ({"input_ids": [1] * 8 + [VOCABULARY]}, f"ids from 1 to {VOCABULARY}, vocabulary of 512"),
        ({"input_ids": [-1] + [1] * 8}, "ids from -1 to 1, vocabulary of 512"),
        ({"loss_mask": [0, 0, 0, 0, 0, 0, 0, 1, 2]}, "mask values [0, 1, 2]"),
        ({"loss_mask": [0] * 9}, "0 supervised tokens, no two of them neighbours"),
        ({"loss_mask": [0, 1] * 4 + [0]}, "4 supervised tokens, no two of them neighbours"),
        ({"sample_id": ""}, "it has no id"),
    ],
)
def test_a_row_that_nothing_could_be_trained_on_stops_and_is_named(changes, seen, tmp_path):
    with pytest.raises(StepError) as stopped:
        read(tmp_path, tokenized_row("good", 9), {**tokenized_row("bad_gen0", 9), **changes})
    assert stopped.value.seen == seen
    assert "00000.parquet" in stopped.value.where
    assert repr(changes.get("sample_id", "bad_gen0")) in stopped.value.where


def test_an_id_that_occurs_twice_stops(tmp_path):
    with pytest.raises(StepError, match="its id occurs twice"):
        read(tmp_path, tokenized_row("a", 9), tokenized_row("a", 12))


def test_a_sample_is_cut_on_the_right_and_only_if_it_is_longer():
    whole = sample([0, 1, 1, 1], ids=[5, 6, 7, 8])
    assert cut(whole, None) is whole
    assert cut(whole, 4) is whole
    shorter = cut(whole, 3)
    assert (shorter.input_ids.tolist(), shorter.loss_mask.tolist()) == ([5, 6, 7], [0, 1, 1])


def test_a_cut_that_leaves_nothing_to_train_on_leaves_no_sample():
    assert cut(sample([0, 1, 1, 1]), 2) is None


def test_what_a_sample_is_made_from_changes_with_ids_mask_length_and_circumstances():
    hashes = {
        sample([0, 1, 1]).made_from("model a"),
        sample([0, 1, 1]).made_from("model b"),
        sample([1, 1, 1], ids=[0, 1, 1]).made_from("model a"),
        sample([0, 1, 1], ids=[9, 1, 1]).made_from("model a"),
        sample([0, 1, 1, 1]).made_from("model a"),
    }
    assert len(hashes) == 5
    assert sample([0, 1, 1]).made_from("model a") in hashes
