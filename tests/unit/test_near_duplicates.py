"""Nearly equal texts are found, held against the exact share of common grams of every pair."""

import random
from itertools import combinations

import numpy as np
import pytest

from rebuild.audit.near_duplicates import (
    BINS,
    EMPTY,
    GRAM_BYTES,
    is_near,
    near_copies,
    sketch_rows,
    sketch_texts,
)
from rebuild.tokens.masks import row_starts
from tests.support.real_shards import prose, question


def text_grams(text: str) -> set[bytes]:
    """Return the 12-byte grams of a text as sketches see it."""
    raw = " ".join(text.lower().split()).encode()
    return {raw[n : n + GRAM_BYTES] for n in range(len(raw) - GRAM_BYTES + 1)}


def resemblance(one: str, other: str) -> float:
    """Return the exact share of common grams (Jaccard)."""
    first, second = text_grams(one), text_grams(other)
    return len(first & second) / len(first | second)


def edited(text: str, words: int, chance: random.Random) -> str:
    """Return a text with some of its words replaced."""
    parts = text.split()
    for place in chance.sample(range(len(parts)), words):
        parts[place] = f"{chance.randrange(10_000)}x"
    return " ".join(parts)


def copies(texts: list[str]) -> list[int]:
    return near_copies(sketch_texts(texts)).tolist()


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Forty texts, and copies of each with 0 to 20 words replaced."""
    chance = random.Random(0)
    originals = [prose(chance, 8) for _ in range(40)]
    return originals + [edited(t, n, chance) for t in originals for n in (0, 1, 2, 5, 20)]


def test_what_is_found_is_nearly_equal_and_what_is_nearly_equal_is_found(texts: list[str]) -> None:
    found = copies(texts)
    assert found[:40] == [-1] * 40
    pairs = [(n, n % 40 if n < 40 else (n - 40) // 5) for n in range(40, len(texts))]
    likeness = {n: resemblance(texts[n], texts[own]) for n, own in pairs}
    assert min(likeness.values()) < 0.5 and max(likeness.values()) == 1
    for n, own in pairs:
        assert found[n] < n
        if found[n] >= 0:
            assert resemblance(texts[n], texts[found[n]]) >= 0.5
        if likeness[n] >= 0.95:
            assert found[n] == own
    near = [n for n, like in likeness.items() if like >= 0.85]
    assert np.mean([found[n] >= 0 for n in near]) > 0.9


def test_the_share_of_equal_bins_estimates_the_share_of_common_grams(texts: list[str]) -> None:
    sketches = sketch_texts(texts)
    errors = [
        np.mean(sketches[one] == sketches[other]) - resemblance(texts[one], texts[other])
        for one, other in combinations(range(0, len(texts), 3), 2)
    ]
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.125  # of 16 coin tosses: at most 1 / sqrt(4 * 16)


def test_different_questions_are_no_copies() -> None:
    chance = random.Random(1)
    assert copies([question(chance) for _ in range(2000)]).count(-1) >= 1980


def test_case_and_white_space_do_not_count() -> None:
    text = prose(random.Random(2), 3)
    assert copies([text, text.upper(), f"\n\n {text.replace(' ', '  ')}\t"]) == [-1, 0, 0]


def test_every_copy_points_at_the_first_of_them() -> None:
    chance = random.Random(3)
    one, other = prose(chance, 6), prose(chance, 6)
    assert copies([one, other, one, one, other, one]) == [-1, -1, 0, 0, 1, 0]


def test_a_system_prompt_that_all_rows_begin_with_makes_them_no_copies() -> None:
    rng = np.random.default_rng(4)
    rows = [rng.integers(0, 50_000, 40).tolist() for _ in range(30)]
    common = rng.integers(0, 50_000, 400).tolist()
    values = np.array([value for row in rows for value in common + row])
    starts = row_starts(np.full(30, 440))
    assert (near_copies(sketch_rows(values, starts, 5))[1:] >= 0).mean() > 0.5
    without = sketch_rows(values, starts, 5, boilerplate=True)
    assert near_copies(without).tolist() == [-1] * 30


@pytest.mark.parametrize("text", ["", "Hi", "Hello there", " \n ", "日本"])
def test_texts_of_less_than_a_few_words_are_never_copies(text: str) -> None:
    assert copies([text, text, text]) == [-1, -1, -1]


def test_a_text_shorter_than_a_gram_has_an_empty_sketch() -> None:
    sketches = sketch_texts(["too short", "just long enough"])
    assert sketches.shape == (2, BINS)
    assert (sketches[0] == EMPTY).all() and (sketches[1] != EMPTY).any()


def test_texts_of_all_the_world_and_broken_ones_have_sketches() -> None:
    texts = [
        "Wie weit ist es von Köln nach Übersee?",
        "東京から大阪までどのくらいですか",
        "\ud800 half of a pair",
    ]
    sketches = sketch_texts(texts + texts)
    assert (sketches[:3] == sketches[3:]).all()


def test_nothing_has_no_copies() -> None:
    assert copies([]) == []


def test_bins_that_neither_text_fills_say_nothing() -> None:
    one, other = np.full((1, BINS), EMPTY), np.full((1, BINS), EMPTY)
    one[0, :8] = other[0, :8] = 7
    other[0, 6:8] = 9
    assert is_near(one, other).tolist() == [True]  # 6 of 8
    other[0, 5] = 9
    assert is_near(one, other).tolist() == [False]


def bands(*values: int) -> np.ndarray:
    """Return a sketch whose four bands hold four times the same value each."""
    return np.repeat(np.array(values, dtype=np.uint32), 4)


def test_a_row_that_is_near_to_two_others_points_at_the_first_of_them() -> None:
    sketches = np.stack([bands(1, 2, 3, 4), bands(9, 2, 3, 5), bands(1, 2, 3, 5)])
    assert near_copies(sketches).tolist() == [-1, -1, 0]


def test_a_sketch_of_which_less_than_half_is_filled_tells_nothing() -> None:
    half = bands(1, 2, EMPTY, EMPTY)
    less = half.copy()
    less[7] = EMPTY
    assert near_copies(np.stack([half, half])).tolist() == [-1, 0]
    assert near_copies(np.stack([less, less])).tolist() == [-1, -1]
