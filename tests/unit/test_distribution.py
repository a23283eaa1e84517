"""Distributions of lengths, finish reasons and sources: right in themselves, and such that parts add up."""

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.audit.digest import DIGEST
from rebuild.audit.distribution import EDGES, count_rows, distribution, most_frequent, spread, tally

lengths = st.lists(st.integers(0, 400_000), max_size=30)


def table(*rows: dict[str, Any]) -> pa.Table:
    """Return a digest; numbers that a row does not give are unknown."""
    missing = {
        "mask_sum": -1,
        "seq_len": -1,
        "prompt_tokens": -1,
        "answer_tokens": -1,
        "reasoning_tokens": -1,
        "trained": False,
        "whole": False,
        "prompt_key": 0,
        "answer_key": 0,
        "context_key": 0,
        "before_id": -1,
    }
    return pa.Table.from_pylist([missing | row for row in rows], schema=DIGEST)


def by_hand(values: list[int]) -> list[int]:
    """Return the histogram by a loop."""
    bins = [sum(low <= value < high for value in values) for low, high in pairwise(EDGES)]
    return [*bins, sum(value >= EDGES[-1] for value in values)]


@given(lengths)
def test_a_histogram_counts_every_value_once_in_its_bin(values: list[int]) -> None:
    histogram = spread(np.array(values, dtype=np.int32))["histogram"]
    assert histogram["rows"] == by_hand(values)
    assert sum(histogram["rows"]) == len(values)
    assert histogram["edges"] == list(EDGES)


@given(lengths, lengths)
def test_histograms_rows_and_totals_of_parts_add_up(one: list[int], other: list[int]) -> None:
    parts = [spread(np.array(values, dtype=np.int32)) for values in (one, other)]
    whole = spread(np.array(one + other, dtype=np.int32))
    assert whole["rows"] == parts[0]["rows"] + parts[1]["rows"]
    assert whole["total"] == parts[0]["total"] + parts[1]["total"] == sum(one + other)
    bins = zip(*(part["histogram"]["rows"] for part in parts), strict=True)
    assert whole["histogram"]["rows"] == [sum(pair) for pair in bins]


def test_edges_are_whole_rising_and_reach_beyond_any_context() -> None:
    assert all(low < high for low, high in pairwise(EDGES))
    assert EDGES[:9] == (0, 1, 2, 3, 4, 6, 8, 12, 16)
    assert EDGES[-1] >= 131_072


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30))
def test_quantiles_reach_from_the_least_to_the_largest_over_the_median(values: list[int]) -> None:
    quantiles = spread(np.array(values))["quantiles"]
    assert list(quantiles) == ["0", "0.01", "0.1", "0.25", "0.5", "0.75", "0.9", "0.99", "1"]
    assert quantiles["0"] == min(values) and quantiles["1"] == max(values)
    assert quantiles["0.5"] == statistics.median(values)
    assert sorted(quantiles.values()) == list(quantiles.values())


def test_a_total_of_many_long_rows_does_not_overflow() -> None:
    assert spread(np.full(100_000, 131_072, dtype=np.int32))["total"] == 13_107_200_000


def test_the_most_frequent_values_come_first_the_smaller_of_equals_before() -> None:
    values = np.array([5, 5, 9, 9, 7, 7, 7, 1])
    expected = [(7, 3), (5, 2), (9, 2)]
    assert most_frequent(values, 3) == [{"value": v, "rows": n} for v, n in expected]
    assert most_frequent(np.array([], dtype=int), 3) == []


def test_lengths_that_nobody_knows_are_left_out() -> None:
    seen = distribution(table({"mask_sum": 7, "prompt_tokens": 3}, {"prompt_tokens": 5}))
    assert seen["mask_sum"]["rows"] == 1
    assert seen["prompt_tokens"]["total"] == 8
    assert "reasoning_tokens" not in seen


def test_values_without_a_name_are_counted_as_none() -> None:
    column = table({"status": "ok"}, {"status": None}, {"status": "ok"})["status"]
    assert tally(column) == {"none": 1, "ok": 2}


def test_sources_are_told_from_prompts_to_supervised_tokens() -> None:
    seen = distribution(
        table(
            {"source": "b", "prompt_key": 1, "status": "ok", "trained": True, "mask_sum": 10},
            {"source": "b", "prompt_key": 1, "status": "truncated", "trained": True, "mask_sum": 5},
            {"source": "b", "prompt_key": 2, "status": "error"},
            {"source": "a", "prompt_key": 2**63, "status": "tool_calls"},
            {"source": None, "prompt_key": 4, "status": None},
        )
    )["sources"]
    keys = ["prompts", "generated", "answered", "trained", "loss_tokens"]
    assert list(seen) == ["", "a", "b"]
    assert [seen["b"][key] for key in keys] == [2, 3, 2, 2, 15]
    assert [seen["a"][key] for key in keys] == [1, 1, 1, 0, 0]
    assert [seen[""][key] for key in keys] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("counts", [{}, {"in": 3, "dropped": {"too_long": 1}}])
def test_rows_are_counted_by_status_and_fate(counts: dict[str, Any]) -> None:
    digest = table({"status": "ok", "trained": True}, {"status": "error"}, {"status": "truncated"})
    assert count_rows(digest, 2, counts) == {
        "prompts": 2,
        "generated": 3,
        "ok": 1,
        "truncated": 1,
        "tool_calls": 0,
        "skipped": 0,
        "error": 1,
        "tokenized": 1,
        "dropped": counts.get("dropped", {}),
    }


def test_nothing_is_distributed_as_nothing(tmp_path: Path) -> None:
    assert distribution(DIGEST.empty_table()) == {"finish_reason": {}, "sources": {}}
