"""The page as text: its numbers are the evidence's, what is missing is left out with a word, and its policy is strict."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from make_report import make_report
from tests.support.judged import HOSTILE, evidence, hostile_evidence, write, write_run


class Reader(HTMLParser):
    """Collects the elements of a page, and the text below each id."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.texts.append(" ")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def report(
    folder: Path, *parts: dict[str, Any], accept: dict[str, str] | None = None, **more: Any
) -> str:
    paths = write_run(folder / "demo", *parts, **more)
    page = folder / "demo" / "report.html"
    make_report(paths, page, results=folder / "demo", accept=accept or {})
    return page.read_text()


def words(page: str) -> str:
    """Return the page's text, elements apart, all kinds of white space as single spaces."""
    reader = Reader()
    reader.feed(page.partition("<body>")[2])
    return " ".join("".join(reader.texts).split())


def total_of(page: str, name: str) -> int:
    found = re.search(rf'id="{name}">([\d,]+)', page)
    assert found
    return int(found[1].replace(",", ""))


def test_a_run_that_passes_says_so_first(tmp_path: Path):
    text = words(report(tmp_path, evidence("canary", rows=64), evidence("00000")))
    assert text.startswith("Audit of run demo ✓ Pass 2 shards: 2 pass.")
    assert "What failed" not in text


def test_a_run_that_fails_says_what_failed_where_why_and_shows_samples(tmp_path: Path):
    text = words(report(tmp_path, evidence("00000"), evidence("00001", empty=174)))
    assert text.startswith("Audit of run demo ✕ Fail 2 shards: 1 pass, 1 fail.")
    failed = text.partition("Look at these samples first")[2].partition("Shards ✓")[0]
    assert "empty_answer_share 1 of 2 shards; worst in 00001: 174 of 200 rows" in failed
    assert "There 87 %, over all shards 43.5 %; the limit is 1 %." in failed
    assert "An answer that says nothing teaches the drafter to draft nothing." in failed
    assert r"p0_gen0 in 00001 answer '<think>\n\n</think>' of row 0" in failed


def test_a_waived_shard_is_shown_with_its_reason(tmp_path: Path):
    reason = "all prompts ask for a single <word>"
    page = report(tmp_path, evidence("00000", empty=100), waived={"00000": reason})
    text = words(page)
    assert text.startswith("Audit of run demo ! Waived 1 shard: 0 pass, 1 waived.")
    assert f"00000 {reason} empty_answer_share" in text
    assert "<word>" not in page


def test_a_waiver_that_is_only_configured_is_shown_too(tmp_path: Path):
    text = words(report(tmp_path, evidence("00000", empty=100), accept={"00000": "known"}))
    assert "00000 known empty_answer_share" in text


def test_one_failure_outweighs_any_waiver(tmp_path: Path):
    parts = [evidence("00000", empty=100), evidence("00001", empty=100)]
    text = words(report(tmp_path, *parts, waived={"00000": "known"}))
    assert "✕ Fail 2 shards: 0 pass, 1 fail, 1 waived." in text
    assert "Waivers These failed their audit" in text


@pytest.mark.parametrize("shards", [1, 300])
def test_the_totals_are_those_of_the_evidence(tmp_path: Path, shards: int):
    parts = [evidence(f"{n:05d}", rows=50 + n % 7, seed=n + 1) for n in range(shards)]
    page = report(tmp_path, *parts)
    rows = sum(part["rows"]["tokenized"] for part in parts)
    tokens = sum(part["distribution"]["mask_sum"]["total"] for part in parts)
    assert total_of(page, "total-rows") == rows
    assert total_of(page, "total-supervised") == tokens
    bars = re.findall(r'class="bar"[^>]*data-rows="(\d+)"', page)
    assert sum(map(int, bars)) == 5 * rows
    assert f"all {rows:,} {rows:,} {rows:,} {rows:,} 100 % {tokens:,} 100 %" in words(page)
    assert page.count('class="cell ') == shards


def test_the_run_as_a_whole_is_judged_and_not_counted_twice(tmp_path: Path):
    whole = evidence("run", rows=400, empty=300)
    page = report(tmp_path, evidence("00000"), evidence("00001"), whole)
    assert total_of(page, "total-rows") == 400
    text = words(page)
    assert "2 shards: 2 pass. The run as a whole: fail." in text
    assert text.startswith("Audit of run demo ✕ Fail")


def test_the_canary_is_one_of_the_shards_with_checks_of_its_own(tmp_path: Path):
    page = report(tmp_path, evidence("canary", rows=10), evidence("00000"), evidence("00001"))
    assert total_of(page, "total-rows") == 410
    assert "The canary" in words(page)


def test_no_rows_at_all_are_said_to_be_none(tmp_path: Path):
    text = words(report(tmp_path, evidence("00000", rows=0)))
    assert "No chart: there are no rows." in text
    assert "? not judged" in text


def test_no_evidence_at_all_is_not_judged(tmp_path: Path):
    text = words(report(tmp_path))
    assert text.startswith("Audit of run demo ? Not judged There is no evidence to judge by.")
    assert "No shard has been audited." in text


def test_evidence_of_an_older_version_leaves_out_what_it_does_not_have(tmp_path: Path):
    part = evidence()
    part["schema_version"] = "1"
    del part["examples"]
    masks = part["distribution"]["mask_sum"]
    del masks["histogram"]
    part["distribution"] = {
        "mask_sum": masks,
        "finish_reason": {"stop": 200},
        "source": {"code": 200},
    }
    text = words(report(tmp_path, part))
    for said in [
        "No chart: the evidence of some shard has no bins",
        "Not in this evidence: sequence length, reasoning, answer, prompt length.",
        "The evidence does not say what each source yields.",
        "The evidence does not say whether the text's own tokens would be other ones.",
        "The evidence holds no conversations to read.",
    ]:
        assert said in text


@pytest.mark.parametrize(
    "part",
    [
        {"shard": "00000"},
        {"shard": "00000", "verdict": "fail", "checks": [{"name": "x", "verdict": "fail"}]},
        {
            "shard": "00000",
            "verdict": "pass",
            "rows": None,
            "checks": None,
            "distribution": [],
            "examples": {},
        },
        {
            "shard": "00000",
            "rows": {"tokenized": "many"},
            "distribution": {"mask_sum": {"rows": None}},
        },
        {
            "shard": "00000",
            "distribution": {"sources": {"a": None}, "retokenization": {"examples": [3]}},
        },
    ],
)
def test_foreign_evidence_makes_a_page_all_the_same(tmp_path: Path, part: dict[str, Any]):
    path = write(tmp_path / "demo" / "audit" / "00000.json", part)
    page = tmp_path / "report.html"
    make_report([path], page, results=tmp_path / "demo", accept={})
    assert "Audit of run demo" in words(page.read_text())


def test_times_tokens_model_and_recipe_are_on_the_page(tmp_path: Path):
    text = words(report(tmp_path, evidence("00000"), evidence("00001")))
    assert "generate_shard 2 3.0 h 1.5 h" in text
    assert "hub:Qwen/Qwen3.6-27B" in text
    assert "sampling.chat_template_kwargs.enable_thinking True" in text
    assert "rejected: too_long 20" in text


def test_nothing_but_the_evidence_has_to_be_there(tmp_path: Path):
    path = write(tmp_path / "demo" / "audit" / "00000.json", evidence())
    page = tmp_path / "report.html"
    make_report([path], page, results=tmp_path / "demo", accept={})
    assert "No job has left its time." in words(page.read_text())


def test_every_hostile_text_stays_text(tmp_path: Path):
    page = report(tmp_path, hostile_evidence())
    reader = Reader()
    reader.feed(page)
    kinds = {tag for tag, _ in reader.tags}
    assert kinds.isdisjoint(
        {"script", "img", "iframe", "input", "textarea", "form", "object", "base"}
    )
    attributes = [(name, value) for _, attrs in reader.tags for name, value in attrs.items()]
    assert [name for name, _ in attributes if name.startswith("on") or name == "style"] == []
    links = [value for name, value in attributes if name in {"href", "src", "action"}]
    assert [link for link in links if link != "data:," and not str(link).startswith("#")] == []
    text = words(page)
    assert [each for each in HOSTILE[:5] if " ".join(each.split()) not in text] == []


def test_the_page_is_whole_utf_8_without_control_characters(tmp_path: Path):
    page = report(tmp_path, hostile_evidence())
    assert re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", page) == []


def test_the_policy_allows_the_pages_own_style_and_nothing_else(tmp_path: Path):
    page = report(tmp_path, evidence())
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    assert f'content="{policy}"' in page
    assert "url(" not in style
    assert "@import" not in style


def test_every_link_leads_to_a_place_on_the_page(tmp_path: Path):
    page = report(tmp_path, *(evidence(f"{n:05d}", empty=100 * (n % 2)) for n in range(4)))
    targets = set(re.findall(r' id="([^"]+)"', page))
    assert set(re.findall(r'href="#([^"]+)"', page)) - targets == set()


def test_many_sources_are_cut_to_the_largest_and_the_rest_in_one_row(tmp_path: Path):
    part = evidence()
    row = part["distribution"]["sources"]["code"]
    part["distribution"]["sources"] = {f"source-{n}": row for n in range(100)}
    text = words(report(tmp_path, part))
    assert "40 smaller sources" in text
    assert f"all {100 * row['prompts']:,}" in text


def test_the_worst_failure_comes_first(tmp_path: Path):
    part = evidence(empty=150)
    part["checks"][3] |= {"verdict": "fail", "severity": 1000.0}
    text = words(report(tmp_path, part))
    assert text.index("✕ fail median_loss_tokens") < text.index("✕ fail empty_answer_share")


def test_what_failed_in_a_shard_is_not_told_again_of_the_run(tmp_path: Path):
    parts = [evidence("00000"), evidence("00001", empty=150), evidence("run", rows=400, empty=150)]
    parts[2]["checks"].append(parts[2]["checks"][1] | {"name": "near_duplicate_share"})
    text = words(report(tmp_path, *parts))
    failed = text.partition("Look at these samples first")[2].partition(" Shards ✓")[0]
    assert failed.count("✕ fail empty_answer_share") == 1
    assert "✕ fail near_duplicate_share the run as a whole" in failed
