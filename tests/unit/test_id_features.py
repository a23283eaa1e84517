"""Numbers that tell whether rows repeat themselves and whether two are equal, held against plain loops."""

import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.audit.checks import MOST_COMPRESSED
from rebuild.audit.id_features import (
    FEWEST,
    GRAM,
    TAIL,
    VARIED,
    compression,
    grams,
    repeated_share,
    repetition,
    row_hashes,
)
from rebuild.tokens.masks import row_starts

Rows = list[list[int]]
few_ids = st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=6)
any_ids = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6)


def flat(rows: Rows, kind: type = np.int32) -> tuple[np.ndarray, np.ndarray]:
    """Return rows as the functions take them."""
    starts = row_starts(np.array([len(row) for row in rows], dtype=np.int64))
    return np.array([value for row in rows for value in row], dtype=kind), starts


def repeated_by_hand(row: list[int]) -> float:
    """Return the share of a row's 8-grams that it has said before, by a loop."""
    seen: set[tuple[int, ...]] = set()
    again = 0
    for start in range(len(row) - GRAM + 1):
        gram = tuple(row[start : start + GRAM])
        again += gram in seen
        seen.add(gram)
    return again / max(len(row) - GRAM + 1, 1)


@given(few_ids)
def test_repeated_8_grams_are_those_that_a_loop_counts(rows: Rows) -> None:
    expected = [repeated_by_hand(row) for row in rows]
    shares = repeated_share(*grams(*flat(rows), GRAM), len(rows))
    assert shares.tolist() == pytest.approx(expected)


@given(few_ids, st.integers(1, 4))
def test_grams_are_equal_where_their_values_are_and_stay_within_their_row(
    rows: Rows, length: int
) -> None:
    expected = [
        (owner, tuple(row[start : start + length]))
        for owner, row in enumerate(rows)
        for start in range(len(row) - length + 1)
    ]
    hashes, owners = grams(*flat(rows), length)
    assert owners.tolist() == [owner for owner, _ in expected]
    by_gram = dict(zip([gram for _, gram in expected], hashes.tolist(), strict=True))
    assert [by_gram[gram] for _, gram in expected] == hashes.tolist()
    assert len(set(by_gram.values())) == len(by_gram)


@given(any_ids)
def test_row_hashes_are_equal_exactly_where_rows_are(rows: Rows) -> None:
    hashes = row_hashes(*flat([*rows, *rows])).tolist()
    assert hashes[: len(rows)] == hashes[len(rows) :]
    for one, first in zip(rows, hashes, strict=False):
        for other, second in zip(rows, hashes, strict=False):
            assert (first == second) == (one == other)


@given(st.lists(st.integers(0, 5), max_size=6))
def test_a_row_hash_is_0_only_for_an_empty_row(row: list[int]) -> None:
    assert (row_hashes(*flat([row]))[0] == 0) == (not row)


def test_row_hashes_tell_apart_the_order_of_the_same_ids() -> None:
    rows = [[1, 2, 3], [3, 2, 1], [2, 1, 3], [1, 2, 3, 0], [0, 1, 2, 3], [0], [0, 0]]
    assert len(set(row_hashes(*flat(rows)).tolist())) == len(rows)


def test_a_million_different_rows_have_different_hashes() -> None:
    values = np.arange(1_000_000, dtype=np.int64)
    assert len(np.unique(row_hashes(values, np.arange(1_000_001)))) == 1_000_000


def natural(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 100_000) for _ in range(length)]


def test_a_loop_at_the_end_counts_as_much_as_one_all_along() -> None:
    loop = natural(1, 10) * 100
    late = natural(2, 10_000) + loop
    whole, tail, sound = repetition(*flat([loop, late, natural(3, 2000)])).tolist()
    assert whole == pytest.approx(repeated_by_hand(loop))
    assert tail == pytest.approx(repeated_by_hand(late[-TAIL:]))
    assert tail > 0.9 > 0.1 > repeated_by_hand(late)
    assert sound == 0


@given(st.lists(st.lists(st.integers(0, 1), max_size=2 * TAIL), max_size=3))
def test_repetition_is_the_larger_of_the_whole_row_and_its_end(rows: Rows) -> None:
    expected = [
        max(repeated_by_hand(row), repeated_by_hand(row[-TAIL:])) if len(row) >= FEWEST else 0
        for row in rows
    ]
    assert repetition(*flat(rows)).tolist() == pytest.approx(expected)


def test_rows_too_short_to_loop_are_not_judged() -> None:
    short, long = [7] * (FEWEST - 1), [7] * FEWEST
    assert repetition(*flat([short, long])).tolist() == pytest.approx([0, 56 / 57])
    assert compression(*flat([short]))[0] == 1 < compression(*flat([long]))[0]


@given(st.lists(st.lists(st.integers(0, 9), max_size=200), max_size=4))
def test_compression_is_zlibs_of_each_row_alone(rows: Rows) -> None:
    def ratio(row: list[int]) -> float:
        raw = np.array(row, dtype=np.int32).tobytes()
        return len(raw) / len(zlib.compress(raw, 1)) if len(row) >= FEWEST else 1

    assert compression(*flat(rows)).tolist() == pytest.approx([ratio(row) for row in rows])


def test_compression_sees_a_list_whose_entries_differ_only_in_their_number() -> None:
    entries = [[n, *range(50_000, 50_006)] for n in range(200)]
    row = [value for entry in entries for value in entry]
    assert repetition(*flat([row]))[0] == 0
    assert compression(*flat([row]))[0] > 8 > 2 > compression(*flat([natural(1, len(row))]))[0]


def test_compression_leaves_out_rows_whose_ids_differ_unless_they_are_suspected() -> None:
    varied = natural(1, 60) + natural(2, 60) + natural(1, 60)  # two thirds of its ids are new
    assert compression(*flat([varied]))[0] == 1
    asked = compression(*flat([varied, varied]), suspected=np.array([True, False]))
    assert asked[0] > 1.2 and asked[1] == 1


@given(st.integers(1, 4), st.integers(0, 8), st.sampled_from([1, 2, 256]), st.integers(0, 150_000))
def test_rows_that_are_left_out_could_not_have_been_compressed_as_lists_are(
    numbers: int, others: int, step: int, first: int
) -> None:
    """Entries of consecutive numbers and the same other ids are what zlib makes smallest."""
    same = natural(3, others)
    entries = [
        [*(first + step * (numbers * entry + n) for n in range(numbers)), *same]
        for entry in range(2000 // (numbers + others))
    ]
    row = [value for entry in entries for value in entry]
    if len(set(row)) > VARIED * len(row):
        sure = compression(*flat([row]), suspected=np.array([True]))[0]
        assert sure < MOST_COMPRESSED


def test_nothing_comes_of_nothing() -> None:
    for rows in ([], [[]], [[], []]):
        for function in (row_hashes, repetition, compression):
            assert len(function(*flat(rows))) == len(rows)
