"""What becomes of a shard when its server hangs, crashes, never starts or answers wrongly, and when its job is stopped.

The server is the real one, on a tiny model. One shard goes through all that can befall it: three servers are lost to a
hang, a crash and a kill, which ends the job; then the job is told to stop in each of its stages; then it is finished.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

import generate_shard as generate_module
from rebuild.errors import StepError
from rebuild.model.manifest import load_manifest
from rebuild.serving.devices import select_devices
from rebuild.serving.lease import lease_devices, lock_path, open_folder, try_lock
from rebuild.serving.processes import session_processes
from rebuild.serving.server import Server, ServerDied
from rebuild.tables import iter_rows, read_metadata
from tests.support import models
from tests.support.generate_jobs import (
    GREEDY,
    GenerateJob,
    Lent,
    Row,
    make_job,
    serving_processes,
    wait_until,
)

CPU = select_devices(["cpu"])
QUESTIONS = [f"Question number {number}?" for number in range(40)]
STALL_S = 3.0
SOON_S = 120.0  # a server drains for up to 20 s, and the machine may be busy


# A shard that everything befalls


@dataclass(frozen=True)
class Attempt:
    """A job that ended before its shard was finished: how, what it said, and what it left."""

    status: int
    said: str
    seconds: float  # from the signal to the job's end
    finished_before: list[Row]
    finished: list[Row]
    servers: int
    left: dict[int, int]
    table: bool


@dataclass(frozen=True)
class Story:
    """A shard's way through all faults."""

    job: GenerateJob
    losses: list[tuple[int, dict[str, int], list[Row]]]  # servers, processes, rows at each fault
    battered: Attempt
    stopped: dict[str, Attempt]
    rows: list[Row]


def strike(job: GenerateJob, process: str, number: signal.Signals) -> Callable[[], Any]:
    """Return an act that signals a process of the job's server, and says what was there."""

    def act() -> tuple[int, dict[str, int], list[Row]]:
        there, finished = serving_processes(), job.logged()
        os.kill(there[process], number)
        return len(job.server_logs()), there, finished

    return act


def batter(job: GenerateJob) -> tuple[Attempt, list[Any]]:
    """Run the job; hang its first server, crash the second one's scheduler, kill the third."""
    process = job.start(server={"max_restarts": 2, "stall_s": STALL_S})
    strikes = [
        ("scheduler", signal.SIGSTOP),
        ("scheduler", signal.SIGKILL),
        ("main", signal.SIGKILL),
    ]
    losses = []
    for number, (victim, blow) in enumerate(strikes, start=1):
        wait_while_alive(job, process, lambda n=number: len(job.server_logs()) == n)
        rows = len(job.logged()) + 3
        wait_while_alive(job, process, lambda n=rows: len(job.logged()) >= n)
        losses.append(strike(job, victim, blow)())
    status = process.wait(SOON_S)
    return describe(job, status, 0.0, losses[-1][1], losses[-1][2]), losses


def wait_while_alive(
    job: GenerateJob, process: "subprocess.Popen[bytes]", condition: Callable[[], Any]
) -> None:
    """Wait until the condition holds; the job must not end before."""

    def holds() -> Any:
        assert process.poll() is None, job.log()
        return condition()

    wait_until(holds)


def stop(job: GenerateJob, moment: Callable[[], Any], **settings: Any) -> Attempt:
    """Start the job, tell it to stop at the moment, and wait for its end."""
    process = job.start(**settings)
    wait_while_alive(job, process, moment)
    there, finished = serving_processes(), job.logged()
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    status = process.wait(SOON_S)
    return describe(job, status, time.monotonic() - began, there, finished)


def describe(
    job: GenerateJob, status: int, seconds: float, there: dict[str, int], before: list[Row]
) -> Attempt:
    left = session_processes(there["main"]) if there else {}
    table = (job.folder / "generated.parquet").exists()
    return Attempt(
        status, job.log(), seconds, before, job.logged(), len(job.server_logs()), left, table
    )


def stop_in_every_stage(job: GenerateJob, server: Server) -> dict[str, Attempt]:
    """Tell the job to stop while it waits for a device, loads, decodes, and writes its table."""
    servers, rows = len(job.server_logs()), len(job.logged())
    with lease_devices(1, CPU):
        stopped = {"waiting": stop(job, lambda: "waiting for 1 of 1 devices" in job.log())}
    stopped["loading"] = stop(job, lambda: len(job.server_logs()) > servers and serving_processes())
    stopped["decoding"] = stop(job, lambda: len(job.logged()) >= rows + 5)
    run_on(server, job)
    forget_table(job)
    stopped["writing"] = stop(job, lambda: "writing the table" in job.log(), slow_table_s=0.2)
    return stopped


def run_on(server: Server | None, job: GenerateJob) -> list[Row]:
    """Run the job in this process on a server that is there already, or where none may be started."""

    def start(**arguments: Any) -> Lent:
        assert server is not None, "a server was started"
        return Lent(server)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_module, "start_server", start)
        return job.run()


def forget_success(job: GenerateJob) -> None:
    """Leave the folder as a job leaves it that is killed before Snakemake notes its success."""
    (job.folder / "generated.parquet").unlink()


def forget_table(job: GenerateJob) -> None:
    """Leave the folder as a job leaves it that is killed before its table is written."""
    forget_success(job)
    next(job.folder.glob("partial/*/generated.parquet")).unlink()


@pytest.fixture(scope="module")
def story(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Story:
    sampling = GREEDY | {"max_tokens": 384}
    folder = tmp_path_factory.mktemp("story")
    job = make_job(folder, tiny_llama, QUESTIONS, sampling=sampling, generate={"concurrency": 4})
    battered, losses = batter(job)
    stopped = stop_in_every_stage(job, request.getfixturevalue("server"))
    return Story(job, losses, battered, stopped, run_on(None, job))


def test_a_server_that_makes_no_token_is_replaced_although_it_lives(story: Story):
    _, there, _ = story.losses[0]
    assert "server lost: no token in" in story.battered.said
    assert "with 4 requests in flight" in story.battered.said
    assert session_processes(there["main"]) == {}


def test_a_server_whose_scheduler_crashed_is_replaced(story: Story):
    lost = [line for line in story.battered.said.splitlines() if "server lost: " in line]
    assert len(lost) == 3
    assert "no token in" in lost[1] or "it ended at work" in lost[1]  # SGLang's own end takes 5 s
    assert session_processes(story.losses[1][1]["main"]) == {}


def test_a_server_that_is_killed_as_when_memory_runs_out_is_noticed_by_its_end(story: Story):
    assert "server lost: it ended at work, killed by SIGKILL (the kernel" in story.battered.said


def test_every_replacement_has_a_port_of_its_own(story: Story):
    starts = [line for line in story.battered.said.splitlines() if "starting server" in line]
    ports = [line.partition("--port ")[2].split()[0] for line in starts]
    assert len(set(ports)) == len(ports) == 3


def test_after_the_permitted_restarts_the_job_fails_with_the_servers_own_last_words(story: Story):
    said = story.battered.said.partition("STOPPED: ")[2]
    assert story.battered.status == 1
    assert said.startswith("3 servers failed one after another; the last: it ended at work, ")
    assert "server-3.log" in said and "The server is fired up and ready to roll!" in said
    assert "finished answers are kept, a new start goes on after them" in said
    assert not story.battered.table


@pytest.mark.parametrize("stage", ["waiting", "loading", "decoding", "writing"])
def test_a_job_that_is_told_to_stop_ends_soon_and_leaves_nothing_running(story: Story, stage: str):
    attempt = story.stopped[stage]
    assert attempt.status == 128 + signal.SIGTERM
    assert "stopping on SIGTERM" in attempt.said
    assert attempt.seconds < 45  # most of it the server's own way of ending
    assert attempt.left == {}
    assert not attempt.table


@pytest.mark.parametrize("stage", ["waiting", "loading", "decoding", "writing"])
def test_what_was_finished_before_a_stop_is_in_the_log_and_nothing_torn(story: Story, stage: str):
    attempt = story.stopped[stage]
    assert attempt.finished[: len(attempt.finished_before)] == attempt.finished_before
    assert len(attempt.finished) >= 9


def test_each_stage_was_met_where_it_should_be(story: Story):
    assert [attempt.servers for attempt in story.stopped.values()] == [3, 4, 5, 5]
    finished = [len(attempt.finished) for attempt in story.stopped.values()]
    assert len(story.battered.finished) == finished[0] == finished[1] < finished[2] < finished[3]
    assert finished[3] == len(QUESTIONS)


def test_a_stopped_jobs_half_written_table_is_gone(story: Story):
    assert [path.name for path in story.job.folder.rglob("*.tmp")] == []


def test_the_lease_is_free_after_it_all(story: Story):
    descriptor = try_lock(lock_path(open_folder(None), CPU[0]))
    assert descriptor is not None
    os.close(descriptor)


def test_no_answer_was_asked_for_again_after_it_was_logged(story: Story):
    asked = Counter(row["sample_id"] for row in story.job.logged())
    assert len(asked) == len(QUESTIONS)
    assert set(asked.values()) == {1}


def test_the_finished_table_is_complete_and_holds_every_logged_answer_as_it_was(story: Story):
    prompts = iter_rows(story.job.folder / "prompts" / "00000.parquet", ["prompt_id"])
    assert [row["prompt_id"] for row in story.rows] == [row["prompt_id"] for row in prompts]
    assert Counter(row["status"] for row in story.rows) == {"truncated": len(QUESTIONS)}
    logged = {row["sample_id"]: row["response_token_ids"] for row in story.job.logged()}
    assert {row["sample_id"]: row["response_token_ids"] for row in story.rows} == logged


# Servers that never get ready


@pytest.mark.parametrize(
    ("flags", "starts", "words"),
    [
        ({"schedule-conservativeness": "much"}, 1, "invalid float value: 'much'"),
        ({"context-length": 999999}, 2, "context_length"),
    ],
    ids=["a value that its parser refuses", "a value that it refuses later"],
)
def test_a_start_that_cannot_succeed_is_not_repeated_to_the_last(
    tiny_llama: Path, tmp_path: Path, flags: dict[str, Any], starts: int, words: str
):
    job = make_job(tmp_path, tiny_llama, QUESTIONS[:2])
    with pytest.raises(StepError, match="the server ended before it was ready") as stopped:
        job.run(server={"flags": flags, "max_restarts": 3})
    assert len(job.server_logs()) == starts
    assert words in stopped.value.seen
    assert f"server-{starts}.log" in stopped.value.where


# A server that is lent to jobs: for what does not end it


@pytest.fixture
def starts(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have jobs use the running server; returns a list that grows with every start."""
    made: list[int] = []

    def start(**arguments: Any) -> Lent:
        made.append(arguments["attempt"])
        return Lent(server)

    monkeypatch.setattr(generate_module, "start_server", start)
    return made


@pytest.fixture
def job(tiny_llama: Path, tmp_path: Path) -> GenerateJob:
    sampling = GREEDY | {"max_tokens": 24}
    return make_job(tmp_path, tiny_llama, QUESTIONS[:6], sampling=sampling)


@pytest.fixture
def long_job(tiny_llama: Path, tmp_path: Path) -> GenerateJob:
    return make_job(tmp_path, tiny_llama, QUESTIONS, sampling=GREEDY | {"max_tokens": 128})


def greedy_answer(server: Server, prompt: str, tokens: int) -> Row:
    """Return the server's own greedy answer."""
    request = {
        "model": server.model_name,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
    }
    reply = requests.post(f"{server.url}/v1/chat/completions", json=request, timeout=300).json()
    choice: Row = reply["choices"][0]
    return choice


def test_a_server_that_answers_a_golden_prompt_rightly_gets_the_work(
    job: GenerateJob, server: Server, starts: list[int]
):
    ids = greedy_answer(server, "Say something.", 4)["response_token_ids"]
    golden = [{"prompt": "Say something.", "first_ids": ids, "min_logprob": -100}]
    assert len(job.run(server={"golden": golden})) == 6
    assert len(starts) == 1


@pytest.mark.parametrize("bound", ["first_ids", "min_logprob"])
def test_servers_that_answer_a_golden_prompt_wrongly_get_no_work_and_end_the_job(
    job: GenerateJob, server: Server, starts: list[int], bound: str
):
    ids = greedy_answer(server, "Say something.", 2)["response_token_ids"]
    wrong = {"first_ids": [ids[0], ids[1] + 1], "min_logprob": -0.001}
    golden = [{"prompt": "Say something.", bound: wrong[bound]}]
    with pytest.raises(StepError) as stopped:
        job.run(server={"golden": golden, "max_restarts": 2})
    said = stopped.value.what
    assert said.startswith("3 servers failed one after another; the last: golden prompt 'Say som")
    assert f"{wrong[bound]}" in said
    assert "seen" in said and (bound == "min_logprob" or f"seen {ids}" in said)
    assert len(starts) == 3
    assert job.logged() == []


def test_a_server_that_runs_fewer_requests_than_the_floor_is_asked_nothing(
    job: GenerateJob, server: Server, starts: list[int]
):
    before = server.tokens_generated()
    with pytest.raises(StepError, match="runs only 32 requests at once") as stopped:
        job.run(server={"min_running_requests": 33})
    assert "mem-fraction-static" in stopped.value.remedy
    assert "disable-radix-cache" in stopped.value.remedy
    assert len(starts) == 1 and job.logged() == []
    assert server.tokens_generated() == before


def test_auto_keeps_a_tenth_more_conversations_in_flight_than_the_server_runs(
    long_job: GenerateJob, starts: list[int], capfd: pytest.CaptureFixture[str]
):
    assert len(long_job.run()) == len(QUESTIONS)
    said = capfd.readouterr().err
    assert "runs 32 requests at once: 36 conversations in flight" in said


def vanishing(job: GenerateJob, server: Server) -> "Proxy":
    """Return a server that is gone as soon as it has answered four prompts."""
    return Proxy(server, alive=lambda: len(job.logged()) < 4)


def lend_in_turn(patch: pytest.MonkeyPatch, *servers: Any) -> None:
    """Have the job's first start give the first server, the next one the second."""
    queue = list(servers)
    patch.setattr("rebuild.serving.serving.WATCH_S", 0.05)
    patch.setattr(generate_module, "start_server", lambda **_: Lent(queue.pop(0)))


def test_a_table_says_how_many_servers_it_took(
    long_job: GenerateJob, server: Server, monkeypatch: pytest.MonkeyPatch
):
    lend_in_turn(monkeypatch, vanishing(long_job, server), server)
    assert len(long_job.run(generate={"concurrency": 4})) == len(QUESTIONS)
    facts = read_metadata(long_job.folder / "generated.parquet")
    assert json.loads(facts["timing"])["server_starts"] == 2
    assert set(Counter(row["sample_id"] for row in long_job.logged()).values()) == {1}


def test_a_server_that_never_gets_ready_after_one_that_answered_is_no_answers_loss(
    long_job: GenerateJob, server: Server, monkeypatch: pytest.MonkeyPatch
):
    lend_in_turn(monkeypatch, vanishing(long_job, server), never_ready(server))
    with pytest.raises(StepError, match="2 servers failed .* last: it was not ready") as stopped:
        long_job.run(server={"max_restarts": 1}, generate={"concurrency": 2})
    assert "finished answers are kept" in stopped.value.remedy
    assert 4 <= len(long_job.logged()) < len(QUESTIONS)


class Proxy:
    """A server of which some methods are others."""

    def __init__(self, server: Server, **others: Callable[..., Any]) -> None:
        self.server = server
        self.__dict__ |= others

    def __getattr__(self, name: str) -> Any:
        return getattr(self.server, name)


def never_ready(server: Server) -> Proxy:
    def wait_ready(timeout_s: float) -> None:
        raise ServerDied("it was not ready", remedy="wait longer")

    return Proxy(server, wait_ready=wait_ready)


# What a later attempt finds


def test_a_finished_table_whose_success_was_not_noted_is_taken_over_without_a_server(
    job: GenerateJob, starts: list[int]
):
    rows = job.run()
    facts = read_metadata(job.folder / "generated.parquet")
    forget_success(job)
    assert run_on(None, job) == rows
    assert read_metadata(job.folder / "generated.parquet") == facts


def test_a_resume_with_everything_logged_starts_no_server(job: GenerateJob, starts: list[int]):
    rows = job.run()
    forget_table(job)
    assert run_on(None, job) == rows


def test_errors_of_an_earlier_attempt_are_asked_again_and_nothing_else(
    job: GenerateJob, starts: list[int]
):
    rows = job.run()
    forget_table(job)
    log = job.answers()
    assert log is not None
    failed = log.read_bytes().replace(b'"status":"truncated"', b'"status":"error"', 2)
    log.write_bytes(failed)
    asked_again = [row["sample_id"] for row in job.logged()[:2]]
    timeless = [row | {"latency_s": None} for row in job.run()]
    assert timeless == [row | {"latency_s": None} for row in rows]
    assert sorted(row["sample_id"] for row in job.logged()[6:]) == sorted(asked_again)
    assert len(starts) == 2


def other_model(job: GenerateJob) -> GenerateJob:
    folder = job.folder / "other_model"
    shutil.copytree(load_manifest(job.folder / "manifest.json")["path"], folder)
    models.build_tiny_llama(folder, folder, seed=1)
    return make_job(job.folder, folder, QUESTIONS[:6], **job.settings)


def other_prompts(job: GenerateJob) -> GenerateJob:
    model = Path(load_manifest(job.folder / "manifest.json")["path"])
    return make_job(job.folder, model, QUESTIONS[1:7], **job.settings)


@pytest.mark.parametrize("change", [other_model, other_prompts])
def test_answers_of_another_model_or_other_prompts_never_mix_in(
    job: GenerateJob, starts: list[int], change: Callable[[GenerateJob], GenerateJob]
):
    job.run()
    before = job.answers()
    assert before is not None
    kept = before.read_bytes()
    changed = change(job)
    changed.run()
    logs = sorted(job.folder.glob("partial/*/answers.jsonl"))
    assert len(starts) == 2
    assert before.read_bytes() == kept
    other = next(path for path in logs if path != before)
    assert len(logs) == 2 and len(other.read_bytes().splitlines()) == 6
    assert json.loads(other.read_bytes().splitlines()[0])["status"] == "truncated"
