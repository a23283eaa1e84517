"""A data set is judged in batches of an even size, however it comes."""

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import audit_dataset
from audit_dataset import even_batches


def batch_of(numbers: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": pa.array(numbers, pa.int64())})


def sizes(lengths: list[int]) -> list[int]:
    """Return the sizes of the batches that batches of these lengths become, after a look at their rows."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    given_ones = [
        batch_of([*range(start, start + length)])
        for start, length in zip(starts, lengths, strict=True)
    ]
    made = [*even_batches(given_ones)]
    assert [n for batch in made for n in batch["n"].to_pylist()] == [*range(sum(lengths))]
    return [len(batch) for batch in made]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_dataset, "BATCH_ROWS", 10)


@given(st.lists(st.integers(0, 30), max_size=8))
def test_no_batch_is_too_large_and_no_two_neighbours_would_fit_in_one(lengths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(audit_dataset, "BATCH_ROWS", 10)
        made = sizes(lengths)
    assert all(0 < size <= 10 for size in made)
    assert all(one + other > 10 for one, other in pairwise(made))


@pytest.mark.usefixtures("small")
def test_small_batches_are_gathered_and_large_ones_cut() -> None:
    assert sizes([1] * 25) == [10, 10, 5]
    assert sizes([25]) == [10, 10, 5]
    assert sizes([4, 4, 4, 4]) == [8, 8]
    assert sizes([]) == sizes([0, 0]) == []


def test_few_long_rows_are_a_batch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_dataset, "BATCH_BYTES", 64)  # eight numbers
    assert sizes([3] * 5) == [6, 6, 3]
    assert sizes([9, 9]) == [9, 9]
