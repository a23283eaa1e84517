"""The report as a browser shows it: drawn, readable on any screen, and deaf to what its data says."""

from itertools import pairwise
from pathlib import Path

import pytest

from make_report import make_report
from tests.support.browser import Page
from tests.support.judged import HOSTILE, evidence, hostile_evidence, write_run

SCHEMES = ["light", "dark"]

# Text and the background behind it, as WCAG 2 measures their contrast; charts count as text of their fill.
CONTRASTS = """
(() => {
  const rgb = text => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  document.querySelectorAll('details').forEach(each => each.open = true);
  const found = [];
  for (const element of document.querySelectorAll('body *')) {
    const says = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    const bar = element.matches('.bar, .faint');
    if (!(says || bar) || element.tagName === 'title' || element.tagName === 'TITLE') continue;
    const style = getComputedStyle(element);
    const colour = element.namespaceURI.endsWith('svg') ? style.fill : style.color;
    found.push([ratio(light(rgb(colour)), light(behind(element))), bar, element.outerHTML.slice(0, 80)]);
  }
  return found;
})()
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Reports of runs that pass, fail, hold nothing, are hostile, and have many shards."""
    folder = tmp_path_factory.mktemp("reports")
    runs = {
        "pass": [
            evidence("canary", rows=64, seed=3),
            *(evidence(f"{n:05d}", seed=n + 1) for n in range(4)),
        ],
        "fail": [
            evidence("00000"),
            evidence("00001", empty=174),
            evidence("00002", empty=150),
            evidence("run"),
        ],
        "none": [evidence("00000", rows=0)],
        "hostile": [hostile_evidence()],
        "many": [
            evidence(f"{n:05d}", rows=20, seed=n + 1, empty=10 * (n % 97 == 3)) for n in range(600)
        ],
    }
    pages = {}
    for name, parts in runs.items():
        results = folder / name
        paths = write_run(results, *parts, waived={"00002": "asks for a single word"})
        pages[name] = results / "report.html"
        make_report(paths, pages[name], results=results, accept={})
    return pages


NAMES = ["pass", "fail", "none", "hostile", "many"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_complained_of_and_nothing_but_the_page_is_asked_for(
    page: Page, reports: dict[str, Path], name: str
):
    page.open(reports[name])
    page.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.complaints() == []
    assert page.failures() == []
    asked = [address for address in page.requests() if address != "data:,"]
    assert asked == [reports[name].resolve().as_uri()]


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("name", NAMES)
def test_the_page_never_scrolls_sideways(
    page: Page, reports: dict[str, Path], name: str, width: int
):
    page.open(reports[name], width=width)
    page.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.ask("document.documentElement.scrollWidth") <= width
    beyond = "[...document.querySelectorAll('header, section, nav, figure')].map(e => e.getBoundingClientRect())"
    assert page.ask(f"{beyond}.every(box => box.left >= 0 && box.right <= {width})")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["pass", "fail", "many"])
def test_every_text_can_be_read_in_both_colour_schemes(
    page: Page, reports: dict[str, Path], name: str, scheme: str
):
    page.open(reports[name], scheme=scheme)
    found = page.ask(CONTRASTS)
    assert len(found) > 200
    faint = [(ratio, text) for ratio, bar, text in found if ratio < (3 if bar else 4.5)]
    assert faint == []


def test_the_two_colour_schemes_differ(page: Page, reports: dict[str, Path]):
    grounds = []
    for scheme in SCHEMES:
        page.open(reports["pass"], scheme=scheme)
        grounds.append(page.ask("getComputedStyle(document.documentElement).backgroundColor"))
    assert grounds[0] != grounds[1]


@pytest.mark.parametrize("width", [360, 1280])
def test_every_chart_is_drawn_and_says_what_it_is(page: Page, reports: dict[str, Path], width: int):
    page.open(reports["pass"], width=width)
    charts = page.ask(
        "[...document.querySelectorAll('svg.chart')].map(e => [e.getBoundingClientRect().width, "
        "e.getBoundingClientRect().height, e.getAttribute('aria-label'), e.querySelector('title').textContent])"
    )
    assert len(charts) == 5
    for wide, high, label, title in charts:
        assert wide > 250
        assert high > 120
        assert label.startswith(f"{title}: histogram; the fullest bin, ")


def test_bars_are_as_high_as_their_rows(page: Page, reports: dict[str, Path]):
    page.open(reports["fail"])
    bars = page.ask(
        "[...document.querySelectorAll('svg.chart')].map(svg => [...svg.querySelectorAll('.bar')].map("
        "bar => [Number(bar.dataset.rows), bar.getBoundingClientRect().height]))"
    )
    for chart in bars:
        rows, height = max(chart)
        assert height > 50
        for these, high in chart:
            assert high == pytest.approx(height * these / rows, abs=0.05)


def test_charts_that_are_read_together_have_the_same_axes(page: Page, reports: dict[str, Path]):
    page.open(reports["pass"])
    ticks = page.ask(
        "[...document.querySelectorAll('svg.chart')].map("
        "svg => [...svg.querySelectorAll('.tick')].map(e => e.textContent).join(' '))"
    )
    assert ticks[2] == ticks[3]


@pytest.mark.parametrize("width", [360, 1280])
def test_the_labels_of_an_axis_do_not_overlap(page: Page, reports: dict[str, Path], width: int):
    page.open(reports["many"], width=width)
    labels = page.ask(
        "[...document.querySelectorAll('svg.chart')].map(svg => [...svg.querySelectorAll('text[text-anchor=middle].tick')]"
        ".map(e => e.getBoundingClientRect()).filter(box => box.width).map(box => [box.left, box.right]))"
    )
    for chart in labels:
        assert len(chart) >= 3
        for before, after in pairwise(chart):
            assert before[1] + 2 < after[0]


def test_hostile_texts_are_shown_and_nothing_of_them_acts(page: Page, reports: dict[str, Path]):
    page.open(reports["hostile"])
    page.ask("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert page.ask("[typeof window.owned, document.title]") == [
        "undefined",
        "Fail: audit of hostile",
    ]
    foreign = (
        "script, img, iframe, input, object, embed, form, svg[onload], a[href^='javascript'], base"
    )
    assert page.ask(f'document.querySelectorAll("{foreign}").length') == 0
    assert (
        page.ask("[...document.links].filter(a => !a.getAttribute('href').startsWith('#')).length")
        == 0
    )
    handlers = "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).filter(a => /^on|^style$/.test(a.name))"
    assert page.ask(f"{handlers}.length") == 0
    answers = page.ask("[...document.querySelectorAll('pre.answer')].map(e => e.textContent)")
    assert answers[:5] == HOSTILE[:5]


def test_what_could_not_be_seen_is_shown_as_its_code_point(page: Page, reports: dict[str, Path]):
    page.open(reports["hostile"])
    answers = page.ask("[...document.querySelectorAll('pre.answer')].map(e => e.textContent)")
    assert "\\x1b[31mred\\x1b[0m \\x00 NUL \\x07 bell \\x9b31m" in answers
    shown = "\\ud800 half, \\u202etxet desrever\\u202c, \\ufeff mark, \\u2028 line"
    assert shown in answers


def test_the_policy_lets_no_script_run_even_if_one_got_in(
    page: Page, reports: dict[str, Path], tmp_path: Path
):
    spoilt = tmp_path / "spoilt.html"
    text = reports["pass"].read_text().replace("<main>", "<main><script>window.owned = 1</script>")
    spoilt.write_text(text)
    page.open(spoilt)
    assert page.ask("typeof window.owned") == "undefined"
    assert any("Content Security Policy" in line for line in page.complaints())


@pytest.mark.parametrize("name", ["fail", "many"])
def test_every_cell_of_the_grid_leads_to_its_shard(page: Page, reports: dict[str, Path], name: str):
    page.open(reports[name])
    lost = "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a => !document.getElementById(a.getAttribute('href').slice(1)))"
    assert page.ask(f"{lost}.length") == 0
    page.ask("location.hash = document.querySelector('.cell.is-fail').getAttribute('href')")
    row = page.ask(
        "(() => { const box = document.querySelector('tr:target').getBoundingClientRect(); return [box.top, box.height]; })()"
    )
    assert 0 <= row[0] < 900
    assert row[1] > 0


def test_a_verdict_is_never_told_by_colour_alone(page: Page, reports: dict[str, Path]):
    page.open(reports["many"])
    cells = page.ask(
        "[...document.querySelectorAll('.cell')].map(e => [e.className, e.textContent, e.getAttribute('aria-label')])"
    )
    assert len(cells) == 600
    for kind, sign, label in cells:
        verdict = kind.rpartition("is-")[2]
        assert label.endswith(f": {verdict}")
        assert sign == {"pass": "", "fail": "✕", "waived": "!"}[verdict]
