"""Adding up evidence: the sums are those of the shards, and what cannot be added up is not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.report.totals import (
    Histogram,
    checked_histogram,
    median_bin,
    sum_counts,
    sum_histograms,
    sum_sources,
    sum_spread,
    used_bins,
)
from tests.support.judged import EDGES, evidence, spread

NUMBERS = st.lists(st.integers(0, 100_000), max_size=50)


def with_spread(values: list[int]) -> dict[str, Any]:
    return {"distribution": {"mask_sum": spread(values)}}


@given(NUMBERS, NUMBERS)
def test_the_spread_of_two_shards_is_that_of_their_rows_together(one: list[int], two: list[int]):
    joined = sum_spread([with_spread(one), with_spread(two)], "mask_sum")
    whole = sum_spread([with_spread(one + two)], "mask_sum")
    assert joined
    assert whole
    assert joined.rows == len(one + two)
    assert joined.total == sum(one + two)
    assert joined.histogram == whole.histogram
    assert (joined.least, joined.most) == (whole.least, whole.most)


@given(NUMBERS.filter(bool))
def test_the_bin_of_the_median_holds_the_middle_row(values: list[int]):
    histogram = checked_histogram(spread(values)["histogram"])
    assert histogram
    index = median_bin(histogram)
    assert index is not None
    low, high = histogram.bounds(index)
    middle = sorted(values)[(len(values) - 1) // 2]
    assert low <= middle
    assert high is not None
    assert middle < high


def test_without_rows_there_is_no_median_and_no_used_bin():
    empty = Histogram((0, 1, 2), (0, 0))
    assert median_bin(empty) is None
    assert used_bins([empty, None]) is None


def test_used_bins_reach_over_all_histograms():
    assert used_bins([Histogram((0, 1, 2, 4), (0, 3, 0)), Histogram((0, 1, 2, 4), (0, 0, 1))]) == (
        1,
        2,
    )


def test_shards_with_other_bins_are_not_added_up():
    one, other = {"edges": [0, 1, 2], "rows": [1, 2]}, {"edges": [0, 1, 3], "rows": [1, 2]}
    assert sum_histograms([one, one]) == Histogram((0, 1, 2), (2, 4))
    assert sum_histograms([one, other]) is None
    assert sum_histograms([one, {}]) is None
    assert sum_histograms([]) is None


@pytest.mark.parametrize(
    "part",
    [
        {}, {"edges": [], "rows": []}, {"edges": [0, 1], "rows": [1, 2, 3]}, {"edges": [0, 0], "rows": [1]},
        {"edges": [1, 0], "rows": [1]}, {"edges": [0, "1"], "rows": [1]}, {"edges": None, "rows": 3},
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_histogram_is_none(part: dict[str, Any]):
    assert checked_histogram(part) is None


def test_bins_are_named_by_the_whole_numbers_that_they_hold():
    histogram = Histogram((0, 1, 2, 4, 1024), (1, 1, 1, 1, 1))
    names = [histogram.named(index) for index in range(5)]
    assert names == ["0", "1", "2–3", "4–1,023", "≥ 1,024"]


def test_a_part_of_a_histogram_keeps_its_edges():
    assert Histogram((0, 1, 2, 4), (5, 6, 7)).between(1, 2) == Histogram((1, 2, 4), (6, 7))


def test_counts_are_added_up_by_name_and_what_is_no_number_is_left_out():
    counts = [{"a": 1, "b": 2}, {"a": 3, "dropped": {"x": 1}, "c": None}, None, "text"]
    assert sum_counts(counts) == {"a": 4, "b": 2}


def test_the_yield_of_a_source_is_that_of_all_its_shards():
    parts = [evidence(seed=seed) for seed in (1, 2)]
    total = sum_sources(parts)
    masks = sum(part["distribution"]["mask_sum"]["total"] for part in parts)
    assert sum(row["loss_tokens"] for row in total.values()) == masks
    assert sum(row["trained"] for row in total.values()) == 400


def test_the_most_frequent_values_are_added_up():
    joined = sum_spread([with_spread([7, 7, 9]), with_spread([7, 8, 8, 8])], "mask_sum")
    assert joined
    assert joined.frequent[:2] == [(7, 3), (8, 3)]


@pytest.mark.parametrize("part", [{}, {"distribution": None}, {"distribution": {"mask_sum": []}}])
def test_a_distribution_that_no_shard_has_is_none(part: dict[str, Any]):
    assert sum_spread([part], "mask_sum") is None


def test_the_test_evidence_has_the_bins_of_the_contract():
    assert EDGES[:5] == [0, 1, 2, 4, 8]
