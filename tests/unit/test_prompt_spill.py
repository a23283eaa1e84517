"""The specification of the spill and of the assignment of its rows to shards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.errors import StepError
from rebuild.prompts.spill import Spill, assign_rows, check_enough, rows_without


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
    assert assign_rows(range(5), 2, "interleave") == [range(0, 5, 2), range(1, 5, 2)]


def test_contiguous_gives_runs_of_almost_equal_length():
    assert assign_rows(range(10), 4, "contiguous") == [
        range(0, 2),
        range(2, 5),
        range(5, 7),
        range(7, 10),
    ]


@pytest.mark.parametrize(
    ("assign", "parts"), [("interleave", [[0, 4], [2, 5]]), ("contiguous", [[0, 2], [4, 5]])]
)
def test_rows_are_counted_without_those_that_are_taken(assign, parts):
    rows = rows_without(6, [1, 3])
    assert [list(part) for part in assign_rows(rows, 2, assign)] == parts


@given(
    st.integers(1, 300),
    st.integers(0, 300),
    st.sets(st.integers(0, 99)),
    st.sampled_from(["interleave", "contiguous"]),
)
def test_every_row_has_one_shard_and_no_shard_is_empty(shards, more, taken, assign):
    count = shards + more + len(taken)
    taken = {number for number in taken if number < count}
    parts = assign_rows(rows_without(count, sorted(taken)), shards, assign)
    assert sorted(number for part in parts for number in part) == sorted({*range(count)} - taken)
    assert all(list(part) == sorted(part) for part in parts)
    assert len(parts) == shards
    assert max(map(len, parts)) - min(map(len, parts)) in (0, 1)
    assert min(map(len, parts)) >= 1


@pytest.mark.parametrize(("shards", "canary"), [(5, 0), (2, 3), (1, 4)])
def test_rows_that_are_too_few_for_the_canary_and_every_shard_stop_the_step(shards, canary):
    check_enough(5, shards, canary)
    with pytest.raises(StepError, match="too few prompts for the shards") as stopped:
        check_enough(4, shards, canary)
    assert stopped.value.expected.startswith("at least 5 accepted prompts")
    assert ("for the canary" in stopped.value.expected) is (canary > 0)
