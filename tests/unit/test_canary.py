"""The specification of the canary: sources in proportion, and of each source short and long, few turns and many."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.prompts.canary import Strata, choose_canary
from rebuild.strata import share_out, spread


def prompt(source: str, turns: int = 1, chars: int = 10) -> dict[str, Any]:
    """Return a prompt of so many user messages, the first one with all of the characters."""
    texts = ["x" * chars, *[""] * (turns - 1)]
    messages = [{"role": "user", "content": text} for text in texts]
    return {"source": source, "messages": messages, "tools": None}


def strata(*prompts: dict[str, Any]) -> Strata:
    seen = Strata()
    for one in prompts:
        seen.add(one)
    return seen


def chosen(prompts: list[dict[str, Any]], size: int) -> list[dict[str, Any]]:
    portions = choose_canary(strata(*prompts), size)
    return [prompts[number] for portion in portions.values() for number in portion.chosen]


# How many of each source


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        ({"a": 50, "b": 50}, 4, {"a": 2, "b": 2}),
        ({"a": 60, "b": 30, "c": 10}, 10, {"a": 6, "b": 3, "c": 1}),
        ({"a": 55, "b": 30, "c": 15}, 5, {"a": 3, "b": 1, "c": 1}),  # 2.75, 1.5, 0.75
        ({"a": 980, "b": 10, "c": 10}, 10, {"a": 8, "b": 1, "c": 1}),  # the large one pays
        ({"a": 50, "b": 50}, 5, {"a": 3, "b": 2}),  # of equals the first
        ({"a": 10, "b": 70, "c": 20}, 2, {"b": 2}),  # 1.4 and remainders of 0.2, 0.4, 0.4
        ({"a": 1, "b": 1, "c": 1}, 2, {"a": 1, "b": 1}),
    ],
)
def test_sources_give_in_proportion(rows: dict[str, int], size: int, expected: dict[str, int]):
    assert share_out(rows, size) == expected


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.data())
def test_the_shares_add_up_and_no_source_is_asked_for_more_than_it_has(
    counts: list[int], data: st.DataObject
):
    rows = {f"{number:02d}": count for number, count in enumerate(counts)}
    size = data.draw(st.integers(1, max(1, sum(counts) - 1)))
    given_by = share_out(rows, size)
    assert sum(given_by.values()) == size
    assert all(1 <= count <= rows[name] for name, count in given_by.items())
    if size >= len(rows):
        assert set(given_by) == set(rows)


# Which of a source


@given(st.integers(1, 400), st.data())
def test_positions_are_different_and_evenly_apart(length: int, data: st.DataObject):
    count = data.draw(st.integers(1, length))
    places = data.draw(st.integers(1, 12))
    positions = spread(length, count, data.draw(st.integers(0, places - 1)), places)
    assert len(set(positions)) == count
    assert positions[0] >= 0 and positions[-1] < length
    gaps = [after - before for before, after in pairwise(positions)]
    assert all(length // count <= gap <= length // count + 1 for gap in gaps)


def test_sources_that_give_one_prompt_each_give_short_and_long_ones():
    prompts = [prompt(source, chars=chars) for chars in range(1, 101) for source in "abcd"]
    lengths = {one["source"]: len(one["messages"][0]["content"]) for one in chosen(prompts, 4)}
    assert lengths == {"a": 13, "b": 38, "c": 63, "d": 88}


def test_numbers_of_turns_are_there_in_proportion():
    prompts = [prompt("a", turns, chars) for chars in range(1, 51) for turns in (1, 1, 1, 2, 4)]
    turns = Counter(len(one["messages"]) for one in chosen(prompts, 25))
    assert turns == {1: 15, 2: 5, 4: 5}


def test_long_and_short_are_there_of_every_number_of_turns():
    prompts = [prompt("a", turns, chars) for chars in range(1, 101) for turns in (1, 2)]
    for turns in (1, 2):
        lengths = [
            len(one["messages"][0]["content"])
            for one in chosen(prompts, 10)
            if len(one["messages"]) == turns
        ]
        assert min(lengths) <= 20 and max(lengths) >= 80


def test_the_length_is_counted_in_characters_of_texts_tool_calls_and_tools():
    seen = strata(
        prompt("a", chars=7),
        {
            "source": "a",
            "messages": [{"role": "user", "content": "é👋", "tool_calls": "[12]"}],
            "tools": "[3]",
        },
    )
    assert list(seen.chars) == [7, 9]


def test_no_canary_has_no_portions():
    assert choose_canary(strata(prompt("a"), prompt("b")), 0) == {}


def test_a_portion_says_how_many_prompts_its_source_has():
    portions = choose_canary(strata(*[prompt("b")] * 3, *[prompt("a")] * 5), 4)
    assert {name: (len(p.chosen), p.of) for name, p in portions.items()} == {
        "a": (3, 5),
        "b": (1, 3),
    }


def test_the_order_of_the_sources_in_the_files_makes_no_difference():
    first = [prompt("a", chars=n) for n in range(1, 41)]
    second = [prompt("b", chars=n) for n in range(1, 21)]
    assert chosen(first + second, 9) == chosen(second + first, 9)
