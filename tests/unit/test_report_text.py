"""Text and numbers of the report: nothing invisible, nothing that acts, nothing that reads as what it is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from rebuild.report.text import (
    compact,
    duration,
    grouped,
    percent,
    percentage,
    plural,
    shown,
    token_edge,
    visible,
)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\x00b", "a\\x00b"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("\x9b31m\x7f", "\\x9b31m\\x7f"),
        ("half \ud800", "half \\ud800"),
        ("\u202eback\u2066", "\\u202eback\\u2066"),
        ("\ufeff\u2028", "\\ufeff\\u2028"),
        ("a\r\nb", "a\\x0d\nb"),
    ],
)
def test_what_cannot_be_seen_is_shown_as_its_code_point(text: str, seen: str):
    assert visible(text) == seen


@pytest.mark.parametrize("text", ["two\nlines\tand a tab", "naïve 日本語 हिन्दी 👩‍💻", "<b>&amp;"])
def test_text_that_can_be_seen_stays_as_it_is(text: str):
    assert visible(text) == text


@given(st.text(st.characters()))
def test_any_text_can_be_written_as_utf_8_afterwards(text: str):
    assert visible(visible(text).encode().decode()) == visible(text)


def test_markup_of_our_own_is_not_touched_and_nothing_is_shown_for_none():
    assert shown(Markup("<b>")) == Markup("<b>")
    assert shown(None) == ""
    assert shown(1234567) == "1,234,567"
    assert shown(True) == "True"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1,234,567"),
        (0.5, "0.5"),
        (156.0, "156"),
        (1234.5678, "1,235"),
        (0.000123456, "0.0001235"),
    ],
)
def test_numbers_are_grouped(value: float, text: str):
    assert grouped(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (250, "250"), (1000, "1k"), (2500, "2.5k"), (1_000_000, "1M"), (3.2e9, "3.2G")],
)
def test_rows_on_an_axis_are_short(value: float, text: str):
    assert compact(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (512, "512"),
        (1024, "1k"),
        (32768, "32k"),
        (131072, "128k"),
        (1536, "1.5k"),
        (1000, "1000"),
    ],
)
def test_tokens_on_an_axis_are_named_like_context_lengths(value: float, text: str):
    assert token_edge(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0"), (1, "100"), (0.87, "87"), (0.2754, "27.5"), (0.005, "0.5"), (1e-6, "0.0001"),
        (0.99999, "99.999"), (0.0099, "1"), (2.5, "250"),
    ],
)  # fmt: skip
def test_a_share_is_never_rounded_to_nothing_or_to_all(share: float, text: str):
    assert percentage(share) == f"{text}\u202f%"


def test_a_share_of_nothing_is_none():
    assert percent(0, 0) == "none"
    assert percent(1, 4) == "25\u202f%"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (59.94, "59.9 s"), (90, "1.5 min"), (3600, "1.0 h"), (4.5e6, "1,250.0 h")],
)
def test_a_time_is_in_the_unit_that_it_is_read_best_in(seconds: float, text: str):
    assert duration(seconds).replace("\u202f", " ") == text


def test_a_noun_is_in_the_plural_unless_there_is_one():
    assert [plural(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
