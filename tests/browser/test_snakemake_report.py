"""When a start makes the report, and what Snakemake's own report (snakemake --report) makes of it, without a network."""

import json
from pathlib import Path

import pytest

from make_report import make_report
from tests.support.browser import Page
from tests.support.dummies import calls, dummy_tree, planned, run_tree
from tests.support.judged import evidence, write_run
from tests.support.trees import run_snakemake

FAILING = "\nif snakemake.wildcards.get('shard') == {shard!r}:\n    raise SystemExit(1)\n"
NO_NETWORK = dict.fromkeys(
    ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9"
)
# With one category of results, the menu calls it Results.
CLICK_RESULTS = "[...document.querySelectorAll('*')].filter(e => !e.children.length && e.textContent === 'Results').pop().click()"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return dummy_tree(tmp_path / "tree")


def refuse(tree: Path, shard: str) -> None:
    """Have the approval of one shard fail."""
    script = tree / "workflow" / "scripts" / "approve_shard.py"
    script.write_text(script.read_text() + FAILING.format(shard=shard))


def test_the_report_is_the_last_job_so_that_the_times_of_all_are_on_it(tree: Path):
    done = run_tree(tree)
    assert done.returncode == 0, done.stdout
    events = [(call["event"], call["rule"]) for call in calls(tree)]
    assert events[-2:] == [("start", "make_report"), ("end", "make_report")]
    assert planned(tree) == {}


def test_a_shard_that_fails_its_audit_does_not_stop_the_report(tree: Path):
    refuse(tree, "00001")
    assert run_tree(tree).returncode != 0
    assert (tree / "results" / "demo" / "report.html").exists()
    assert not (tree / "results" / "demo" / "audit" / "00001.approved").exists()


def test_the_target_report_wants_evidence_and_no_more(tree: Path):
    jobs = planned(tree, "report", "--config", "plan={canary: 0}")
    assert jobs["audit_shard"] == 2
    assert jobs["make_report"] == 1
    assert {"approve_shard", "extract_hidden_states"}.isdisjoint(jobs)


def test_a_canary_that_failed_is_reported_on_without_the_shards_that_it_stops(tmp_path: Path):
    tree = dummy_tree(tmp_path / "tree", canary=2)
    refuse(tree, "canary")
    assert run_tree(tree).returncode != 0
    evidence = tree / "results" / "demo" / "audit" / "canary.json"
    evidence.write_text(json.dumps({"verdict": "fail"}))
    assert planned(tree, "report") == {"make_report": 1}


def test_a_waiver_makes_the_report_anew(tree: Path):
    assert run_tree(tree).returncode == 0
    plan = planned(tree, "--config", 'audit={accept: {"00001": "known"}}')
    assert plan["make_report"] == 1
    assert "extract_hidden_states" not in plan


def test_snakemakes_own_report_holds_the_page_without_a_network(
    tree: Path, page: Page, monkeypatch: pytest.MonkeyPatch
):
    assert run_tree(tree).returncode == 0
    paths, report = write_run(tree / "made", evidence()), tree / "results" / "demo" / "report.html"
    make_report(paths, report, results=tree / "made", accept={})
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)
    done = run_snakemake(tree, "--report", "whole.html", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    page.open(tree / "whole.html")
    page.ask(CLICK_RESULTS)
    page.ask("new Promise(done => setTimeout(done, 300))")
    assert "Audit" in page.ask("document.body.innerText")
    page.ask("document.querySelector('[iconname=eye]').click()")
    page.ask("new Promise(done => setTimeout(done, 300))")
    assert page.ask("document.querySelector('iframe').src").startswith("data:text/html")
    assert "What the audit found in run" in (tree / "whole.html").read_text()
    assert page.failures() == []
    assert [line for line in page.complaints() if "rror" in line] == []
    assert [address for address in page.requests() if address.startswith("http")] == []
