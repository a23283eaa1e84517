"""The specification of the spill and of the assignment of its rows to shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.errors import StepError
from rebuild.prompt_spill import Spill, assign_rows


def test_records_are_read_back_by_number(tmp_path):
    with Spill(tmp_path / "new") as spill:
        for record in (b"one", b"", b"three"):
            spill.append(record)
        spill.flush()
        assert [spill.read(number) for number in (2, 0, 1)] == [b"three", b"one", b""]
        assert [spill.size(number) for number in range(len(spill))] == [3, 0, 5]


def test_the_spill_leaves_no_file_even_while_it_is_open(tmp_path):
    with Spill(tmp_path) as spill:
        spill.append(b"one")
        spill.flush()
        assert list(tmp_path.iterdir()) == []


def test_interleave_gives_row_i_to_shard_i_mod_n():
    assert assign_rows(5, 2, "interleave") == [range(0, 5, 2), range(1, 5, 2)]


def test_contiguous_gives_runs_of_almost_equal_length():
    assert assign_rows(10, 4, "contiguous") == [
        range(0, 2),
        range(2, 5),
        range(5, 7),
        range(7, 10),
    ]


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from(["interleave", "contiguous"]))
def test_every_row_has_one_shard_and_no_shard_is_empty(shards, more, assign):
    parts = assign_rows(shards + more, shards, assign)
    assert sorted(number for part in parts for number in part) == list(range(shards + more))
    assert len(parts) == shards
    assert max(map(len, parts)) - min(map(len, parts)) in (0, 1)
    assert min(map(len, parts)) >= 1


def test_fewer_rows_than_shards_stop_the_step():
    with pytest.raises(StepError, match="fewer prompts than shards"):
        assign_rows(3, 4, "contiguous")
