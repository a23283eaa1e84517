"""Charts: bars in proportion, round ticks, and well-formed SVG with every text escaped."""

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.report.charts import draw_histogram, draw_share, labelled, nice_ticks
from rebuild.report.totals import Histogram

HISTOGRAM = Histogram((0, 1, 2, 4, 8), (0, 30, 1, 10))


def drawn(histogram: Histogram, **keywords: str) -> ElementTree.Element:
    texts = {"title": "Lengths", "unit": "tokens per row"} | keywords
    return ElementTree.fromstring(draw_histogram(histogram, **texts))


def heights(svg: ElementTree.Element) -> list[float]:
    return [float(bar.attrib["height"]) for bar in svg.iter("rect") if bar.attrib["class"] == "bar"]


def test_bars_are_in_proportion_to_their_rows():
    none, most, least, some = heights(drawn(HISTOGRAM))
    assert none == 0
    assert most / some == pytest.approx(3, rel=1e-3)
    assert most / least == pytest.approx(30, rel=1e-3)


def test_every_bar_has_its_numbers():
    titles = [bar.findtext("title") for bar in drawn(HISTOGRAM).iter("rect")]
    assert "1 tokens per row: 30 rows (73.2\u202f%)" in titles
    assert "4–7 tokens per row: 10 rows (24.4\u202f%)" in titles


def test_a_bin_with_too_few_rows_to_see_is_marked():
    marks = [rect for rect in drawn(Histogram((0, 1, 2, 4), (1_000_000, 1, 0))).iter("rect")]
    assert [mark.attrib["data-rows"] for mark in marks if mark.attrib["class"] == "faint"] == ["1"]


def test_a_chart_is_told_in_a_sentence():
    label = drawn(HISTOGRAM).attrib["aria-label"]
    assert label == (
        "Lengths: histogram; the fullest bin, 1 tokens per row, holds 73.2\u202f% of 41 rows"
    )


def test_both_axes_say_what_they_count():
    axes = [text.text for text in drawn(HISTOGRAM).iter("text") if text.attrib["class"] == "axis"]
    assert axes == ["rows", "tokens per row"]


def test_texts_are_escaped():
    svg = drawn(HISTOGRAM, title='<script>"', unit="</svg>'&")
    assert svg.findtext("title") == '<script>"'
    assert not list(svg.iter("script"))


def test_no_rows_at_all_are_a_chart_without_bars():
    assert heights(drawn(Histogram((0, 1), (0,)))) == [0]


def test_an_open_bin_has_a_bar():
    assert len(heights(drawn(Histogram((0, 1, 1024), (1, 2, 3))))) == 3


@given(st.integers(0, 10**9))
def test_ticks_are_few_whole_and_reach_the_highest_bar(highest: int):
    ticks = nice_ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] >= highest
    assert 2 <= len(ticks) <= 6
    assert all(tick == int(tick) for tick in ticks)


@pytest.mark.parametrize(
    ("part", "whole", "width"), [(1, 4, 25), (0, 4, 0), (5, 0, 0), (9, 3, 100)]
)
def test_a_share_is_as_long_as_it_says(part: int, whole: int, width: float):
    room, bar = ElementTree.fromstring(draw_share(part, whole)).iter("rect")
    assert float(room.attrib["width"]) == 100
    assert float(bar.attrib["width"]) == width


def test_labels_are_few_and_on_powers_of_two_where_bins_are_finer():
    edges = (6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0)
    assert [edges[n] for n in labelled(edges)] == [8, 16, 32, 64, 128]
    assert list(labelled((0.0, 1.0, 2.0))) == [0, 1, 2]
