"""Servers that somebody else runs: asked like our own, never stopped, waited for when they go.

The server is the real one, on a tiny model; before it stands a router that can be cut off.
"""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import generate_shard as generate_module
from rebuild.errors import StepError
from rebuild.generate import client
from rebuild.generate.answers import essence
from rebuild.serving import external, serving
from rebuild.serving.devices import select_devices
from rebuild.serving.lease import lease_devices
from rebuild.serving.server import Server
from tests.support.generate_jobs import GREEDY, GenerateJob, Lent, Row, make_job, meanwhile
from tests.support.router import Router

QUESTIONS = [f"Question number {number}?" for number in range(24)]
TIMELESS = ("latency_s", "attempt")
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WATCH_S", 0.1)
    monkeypatch.setattr(external, "POLL_S", 0.1)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.1)


@pytest.fixture
def job(tiny_llama: Path, tmp_path: Path) -> GenerateJob:
    sampling = GREEDY | {"max_tokens": 64}
    return make_job(tmp_path, tiny_llama, QUESTIONS, sampling=sampling, generate={"concurrency": 4})


@pytest.fixture
def router(server: Server) -> Iterator[Router]:
    with Router(server.url) as running:
        yield running


def told(rows: list[Row]) -> list[Row]:
    """Return the rows without what may differ from one run of the same answers to another."""
    return [{key: row[key] for key in row if key not in TIMELESS} for row in rows]


@pytest.fixture(scope="module")
def own_rows(
    server: Server, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Row]:
    """What a job with a server of its own makes of the same prompts."""
    sampling = GREEDY | {"max_tokens": 64}
    job = make_job(tmp_path_factory.mktemp("own"), tiny_llama, QUESTIONS, sampling=sampling)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_module, "start_server", lambda **_: Lent(server))
        return told(job.run())


def test_an_external_server_gives_the_rows_of_our_own_and_goes_on_running(
    job: GenerateJob, server: Server, own_rows: list[Row]
):
    with lease_devices(1, select_devices(["cpu"])):  # it waits for no device
        rows = job.run(server={"external": [server.url]}, generate={"concurrency": "auto"})
    assert told(rows) == own_rows
    assert job.server_logs() == []
    assert server.alive() and server.ready()


def test_two_external_servers_share_the_work_and_give_the_same_rows(
    job: GenerateJob, server: Server, router: Router, own_rows: list[Row]
):
    rows = job.run(server={"external": [server.url, f"{router.url}/v1/"]})
    assert told(rows) == own_rows
    assert 0 < router.asked < len(QUESTIONS)


def test_an_external_server_that_goes_and_comes_back_costs_only_what_was_in_flight(
    job: GenerateJob, router: Router, own_rows: list[Row], capfd: pytest.CaptureFixture[str]
):
    def come_back() -> float:
        time.sleep(1.5)
        router.mend()
        return time.monotonic()

    steps = [
        (lambda: len(job.logged()) >= 5, router.cut),
        (lambda: router.down, come_back),
    ]
    with meanwhile(*steps):
        rows = job.run(server={"external": [router.url], "ready_s": 60})
    assert told(rows) == own_rows
    assert "server lost: " in capfd.readouterr().err
    assert set(Counter(row["sample_id"] for row in job.logged()).values()) == {1}


def test_an_external_server_that_stays_away_ends_the_job_and_a_later_one_goes_on(
    job: GenerateJob, router: Router, own_rows: list[Row]
):
    with (
        meanwhile((lambda: len(job.logged()) >= 5, router.cut)),
        pytest.raises(StepError, match="did not answer within 1 s") as stopped,
    ):
        job.run(server={"external": [router.url], "ready_s": 1, "max_restarts": 3})
    said = str(stopped.value)
    assert f"where: server.external: {router.url}" in said
    assert "see to these servers; finished answers are kept" in said
    finished = len(job.logged())
    assert 5 <= finished < len(QUESTIONS)
    router.mend()
    asked = router.asked
    assert told(job.run(server={"external": [router.url]})) == own_rows
    assert router.asked - asked == len(QUESTIONS) - finished


def test_a_server_that_is_not_there_is_waited_for_once(job: GenerateJob):
    with pytest.raises(StepError) as stopped:
        job.run(server={"external": [NOWHERE], "ready_s": 1, "max_restarts": 3})
    assert stopped.value.what == f"{NOWHERE} did not answer within 1 s"


def test_answers_without_ids_are_error_rows_stop_the_job_and_are_asked_again(
    job: GenerateJob, router: Router, own_rows: list[Row]
):
    router.keeps_ids = False
    with pytest.raises(StepError, match="of the last 20 requests failed") as stopped:
        job.run(server={"external": [router.url]})
    assert "no_ids: the reply holds no token ids" in stopped.value.seen
    errors = job.logged()
    assert {row["status"] for row in errors} == {"error"}
    router.keeps_ids = True
    assert told(job.run(server={"external": [router.url]})) == own_rows
    assert len(job.logged()) == len(errors) + len(QUESTIONS)


def test_answers_without_ids_are_the_same_answers_as_text_where_that_is_allowed(
    job: GenerateJob, router: Router, own_rows: list[Row]
):
    router.keeps_ids = False
    rows = job.run(server={"external": [router.url]}, tokenize={"allow_template": True})
    assert all(row["prompt_token_ids"] == row["response_token_ids"] == [] for row in rows)
    kept = ("sample_id", "status", "finish_reason", "prompt_tokens", "completion_tokens")
    same = [[row[key] for key in kept] for row in rows]
    assert same == [[row[key] for key in kept] for row in own_rows]
    own_texts = [essence(row["content"]) for row in own_rows]
    assert [essence(row["content"]) for row in rows] == own_texts


def test_a_router_that_does_not_tell_how_much_it_runs_at_once_needs_a_number(
    job: GenerateJob, router: Router, own_rows: list[Row]
):
    router.hidden = ("/server_info",)
    through_it: dict[str, Any] = {"external": [router.url]}
    with pytest.raises(StepError, match="does not tell how many requests") as stopped:
        job.run(server=through_it, generate={"concurrency": "auto"})
    assert "set generate.concurrency to a number" in stopped.value.remedy
    assert "404" in stopped.value.seen
    assert router.asked == 0
    assert told(job.run(server=through_it, generate={"concurrency": 4})) == own_rows


def test_an_external_server_is_held_against_golden_prompts_too(job: GenerateJob, router: Router):
    golden = [{"prompt": "Say something.", "first_ids": [1, 2, 3]}]
    with pytest.raises(StepError, match="golden prompt 'Say something.': expected first ids"):
        job.run(server={"external": [router.url], "golden": golden, "max_restarts": 1})
    assert job.logged() == []
