"""The histograms of the report: the bins that matter, and the same axes for those that are read together."""

from xml.etree import ElementTree

import pytest

from rebuild.report.lengths import draw_charts, widened
from tests.support.judged import evidence, spread


def test_every_distribution_of_the_evidence_has_its_chart():
    charts = draw_charts([evidence()])
    assert [chart.title for chart in charts] == [
        "Supervised tokens per row", "Sequence length", "Reasoning", "Answer", "Prompt length",
    ]  # fmt: skip
    assert all(chart.picture for chart in charts)


def test_what_no_shard_has_gets_no_chart():
    part = evidence()
    del part["distribution"]["reasoning_tokens"]
    assert "Reasoning" not in [chart.title for chart in draw_charts([part, {}])]


def test_a_distribution_without_bins_keeps_its_numbers():
    part = evidence()
    del part["distribution"]["mask_sum"]["histogram"]
    chart = draw_charts([part])[0]
    assert chart.picture is None
    assert chart.spread.total == part["distribution"]["mask_sum"]["total"]


def test_reasoning_and_answers_have_the_same_bins_and_heights():
    part = evidence()
    part["distribution"]["reasoning_tokens"] = spread([4000] * 10)
    part["distribution"]["answer_tokens"] = spread([2] * 1000)
    pictures = [
        chart.picture for chart in draw_charts([part]) if chart.title in ("Reasoning", "Answer")
    ]
    ticks = [
        [text.text for text in ElementTree.fromstring(str(picture)).iter("text")][:-1]
        for picture in pictures
    ]
    assert ticks[0] == ticks[1]
    assert "1k" in ticks[0]


def test_the_bin_of_the_median_is_named():
    part = {"distribution": {"mask_sum": spread([3, 5, 5, 90])}}
    assert draw_charts([part])[0].median == "4–7"


@pytest.mark.parametrize(
    ("bins", "count", "wide"),
    [
        ((5, 5), 36, (1, 9)),
        ((0, 0), 36, (0, 7)),
        ((35, 35), 36, (28, 35)),
        ((1, 1), 3, (0, 2)),
        ((2, 20), 36, (2, 20)),
    ],
)
def test_a_few_bins_are_shown_among_their_neighbours(
    bins: tuple[int, int], count: int, wide: tuple[int, int]
):
    assert widened(bins, count) == wide
