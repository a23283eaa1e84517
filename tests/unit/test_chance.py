"""What chance explains: the allowance that keeps small shards from being condemned by noise."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.audit.chance import CHANCE, allowed_count


def exact_tail(count: int, rows: int, share: Fraction) -> Fraction:
    """Probability of `count` or more successes, in exact arithmetic."""
    return sum(
        (math.comb(rows, k) * share**k * (1 - share) ** (rows - k) for k in range(count, rows + 1)),
        Fraction(0),
    )


@given(st.integers(0, 60), st.integers(1, 99))
def test_one_more_than_allowed_is_rarer_than_chance_and_the_allowed_count_is_not(
    rows: int, percent: int
) -> None:
    allowed = allowed_count(percent / 100, rows)
    share = Fraction(percent, 100)
    assert exact_tail(allowed + 1, rows, share) < CHANCE
    assert allowed <= math.floor(share * rows) or exact_tail(allowed, rows, share) >= CHANCE


@pytest.mark.parametrize(
    ("rows", "allowed"), [(0, 0), (1, 1), (8, 4), (16, 6), (1_000, 130), (1_000_000, 100_928)]
)
def test_a_limit_of_a_tenth_allows_much_in_few_rows_and_hardly_more_than_a_tenth_in_many(
    rows: int, allowed: int
) -> None:
    assert allowed_count(0.1, rows) == allowed


def test_a_limit_of_zero_allows_nothing_and_of_one_everything() -> None:
    assert allowed_count(0, 50) == 0
    assert allowed_count(1, 50) == 50
