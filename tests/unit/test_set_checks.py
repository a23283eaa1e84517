"""The checks of a whole set, held against scipy and plain loops."""

import math
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rebuild.audit.chance import allowed_count
from rebuild.audit.near_duplicates import sketch_texts
from rebuild.audit.set_checks import (
    FEWEST_TO_COMPARE,
    KOLMOGOROV,
    answer_lengths,
    find_length_shift,
    find_mask_sum_mode,
    find_median_loss_tokens,
    find_near_duplicates,
    find_poor_source,
    find_repeated_answers,
    median_bound,
    share_bound,
    source_yields,
)
from tests.unit.test_distribution import table


def with_lengths(values: list[int]) -> pa.Table:
    return table(*({"answer_tokens": value} for value in values))


def trained(*rows: dict[str, Any]) -> pa.Table:
    """Return a digest of rows that are trained on as they are."""
    whole = {"trained": True, "whole": True, "sample_id": "a", "excerpt": "'Hm.'"}
    return table(*(whole | row for row in rows))


some_lengths = st.lists(st.integers(0, 50), min_size=FEWEST_TO_COMPARE, max_size=60)


# Lengths against the canary's


@given(some_lengths, some_lengths)
def test_the_distance_of_lengths_is_scipys(own: list[int], other: list[int]) -> None:
    finding = find_length_shift(with_lengths(own), with_lengths(other))
    assert finding is not None
    assert finding.value == pytest.approx(stats.ks_2samp(own, other, method="asymp").statistic)


def test_lengths_of_one_distribution_pass_and_those_of_another_do_not() -> None:
    rng = np.random.default_rng(0)

    def draw(scale: float, rows: int) -> pa.Table:
        return with_lengths((rng.lognormal(5, 0.6, rows) * scale).astype(int).tolist())

    for _ in range(30):
        same = find_length_shift(draw(1, 200), draw(1, 200))
        other = find_length_shift(draw(1, 200), draw(2.5, 200))
        assert same is not None and other is not None
        assert same.bound == 0 and other.bound > 0.25


def test_what_chance_takes_away_is_the_distance_that_it_exceeds_once_in_a_thousand() -> None:
    assert stats.kstwobign.sf(KOLMOGOROV) == pytest.approx(0.001, rel=0.01)
    finding = find_length_shift(with_lengths([1] * 50), with_lengths([9] * 200))
    assert finding is not None
    assert finding.value == 1
    assert finding.bound == pytest.approx(1 - KOLMOGOROV * math.sqrt(250 / (50 * 200)))


@pytest.mark.parametrize(("own", "other"), [(7, 100), (100, 7), (0, 100), (100, 0)])
def test_a_handful_of_answers_says_nothing_of_a_distribution(own: int, other: int) -> None:
    assert find_length_shift(with_lengths([5] * own), with_lengths([9] * other)) is None
    assert find_length_shift(with_lengths([5] * 100), None) is None


def test_an_answers_length_has_its_thought_and_rows_without_one_have_none() -> None:
    rows = [(5, 10), (7, -1), (-1, -1), (0, 3)]
    digest = table(
        *({"answer_tokens": said, "reasoning_tokens": thought} for said, thought in rows)
    )
    assert answer_lengths(digest).tolist() == [15, 7, 3]


# One length, one answer, one question


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=20))
def test_the_most_frequent_length_is_that_of_a_counter(rows: list[tuple[int, bool]]) -> None:
    finding = find_mask_sum_mode(
        trained(*({"mask_sum": length, "whole": whole} for length, whole in rows)), None
    )
    counts = Counter(length for length, whole in rows if whole)
    assert finding.count == max(counts.values(), default=0)
    assert finding.of == counts.total()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=20))
def test_repeated_answers_are_those_that_two_prompts_have(
    rows: list[tuple[int, int, bool]],
) -> None:
    keys = [2**63 + answer if answer else 0 for answer, _, _ in rows]
    finding = find_repeated_answers(
        trained(
            *(
                {"answer_key": key, "prompt_key": prompt, "whole": whole}
                for key, (_, prompt, whole) in zip(keys, rows, strict=True)
            )
        ),
        None,
    )
    prompts = defaultdict(set)
    judged = [(key, row[1]) for key, row in zip(keys, rows, strict=True) if key and row[2]]
    for key, prompt in judged:
        prompts[key].add(prompt)
    assert finding.count == sum(len(prompts[key]) > 1 for key, _ in judged)
    assert finding.of == len(judged)


def test_the_answer_of_most_prompts_is_named_first() -> None:
    keys = [7, 7, 9, 9, 9, 5]
    rows = [{"answer_key": k, "prompt_key": n, "sample_id": f"p{n}"} for n, k in enumerate(keys)]
    finding = find_repeated_answers(trained(*rows), None)
    assert [name for name, _ in finding.cases] == ["p2", "p3", "p4", "p0", "p1"]
    assert finding.cases[0][1] == "3 prompts have the answer 'Hm.'"
    assert "the most frequent one 3 prompts" in finding.what


def test_near_copies_name_the_prompt_that_asks_the_same() -> None:
    texts = ["How deep is the harbour at low tide, please?", "Who painted the last lighthouse?"]
    texts.append(texts[0].upper())
    rows = [
        {"sample_id": f"p{n}", "sketch": sketch.tobytes()}
        for n, sketch in enumerate(sketch_texts(texts))
    ]
    later_turn = {"sample_id": "p0_gen1", "sketch": None}
    finding = find_near_duplicates(table(rows[0], later_turn, *rows[1:]), None)
    assert finding is not None
    assert (finding.count, finding.of) == (1, 3)
    assert finding.cases == [("p2", "asks nearly what p0 asks")]
    assert find_near_duplicates(table(later_turn), None) is None


# Sources


def from_source(name: str | None, kept: int, lost: int) -> list[dict[str, Any]]:
    return [{"source": name, "trained": n < kept} for n in range(kept + lost)]


def test_yields_are_counted_by_source() -> None:
    digest = table(*from_source("b", 3, 1), *from_source("a", 0, 2), *from_source(None, 1, 0))
    assert source_yields(digest) == {"": (1, 1), "a": (0, 2), "b": (3, 4)}


def test_the_poorest_source_is_the_one_whose_loss_chance_does_not_explain() -> None:
    """Two of two may be chance where fourteen of sixteen hardly are."""
    digest = table(
        *from_source("tiny", 0, 2), *from_source("poor", 2, 14), *from_source("good", 50, 0)
    )
    finding = find_poor_source(digest, None)
    assert finding is not None
    assert (finding.count, finding.of) == (14, 16)
    assert "'poor'" in finding.what and len(finding.cases) == 10


def test_a_source_beyond_a_stricter_limit_is_not_hidden_by_a_tiny_one() -> None:
    digest = table(*from_source("tiny", 0, 2), *from_source("large", 600, 400))
    finding = find_poor_source(digest, None)
    assert finding is not None
    assert finding.count > allowed_count(0.2, finding.of)


@given(st.integers(1, 500), st.data())
def test_the_bound_of_a_share_is_scipys(rows: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, rows))
    interval = stats.binomtest(count, rows, 0.5).proportion_ci(1 - 2 * 0.001, method="wilson")
    assert share_bound(count, rows) == pytest.approx(interval.low, abs=1e-4)


def test_among_sources_that_chance_explains_the_poorest_is_named() -> None:
    digest = table(*from_source("a", 5, 1), *from_source("b", 5, 3))
    finding = find_poor_source(digest, None)
    assert finding is not None and (finding.count, finding.of) == (3, 8)


def test_sources_that_have_no_names_are_not_judged() -> None:
    assert find_poor_source(table(*from_source(None, 1, 9)), None) is None
    assert find_poor_source(table(), None) is None


# The median


def test_the_median_is_that_of_the_training_rows() -> None:
    rows = [{"mask_sum": n, "seq_len": 100, "sample_id": f"p{n}"} for n in (50, 10, 40, 20, 30)]
    finding = find_median_loss_tokens(trained(*rows, {"trained": False, "mask_sum": -1}), None)
    assert (finding.value, finding.count, finding.of) == (30, 2, 5)
    assert [name for name, _ in finding.cases] == ["p10", "p20", "p30", "p40", "p50"]


def test_no_training_rows_have_no_median() -> None:
    finding = find_median_loss_tokens(table({"mask_sum": -1}), None)
    assert (finding.count, finding.of) == (0, 0) and math.isnan(finding.value)


@pytest.mark.parametrize("rows", [10, 11, 50, 101, 1000])
def test_the_bound_of_a_median_is_the_value_that_the_sign_test_allows(rows: int) -> None:
    values = np.random.default_rng(rows).permutation(rows)
    bound = int(median_bound(values))
    below = int((values <= bound).sum())  # a median above the bound would leave so many below it
    assert stats.binom.sf(below - 1, rows, 0.5) < 0.001
    assert stats.binom.sf(below - 2, rows, 0.5) >= 0.001
    assert allowed_count(0.5, rows) == below - 1


def test_the_median_of_fewer_than_ten_values_has_no_bound() -> None:
    assert median_bound(np.arange(9)) == math.inf
    assert median_bound(np.arange(10)) < math.inf
