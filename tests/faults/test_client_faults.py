"""What a row, or the job, must become for each way in which a server can misbehave."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.generate import client
from rebuild.generate.answers import Judge
from rebuild.generate.asking import Asker
from rebuild.generate.breaker import Breaker
from rebuild.generate.client import Endpoint
from rebuild.generate.generated_table import write_generated
from rebuild.generate.generation import ShardGeneration
from rebuild.generate.partial_log import PartialLog
from rebuild.generate.text_answers import text_outcome
from rebuild.serving.serving import first_cause
from rebuild.tables import PROMPTS, TableWriter, iter_rows
from rebuild.tokens.chat import load_tokenizer, stop_ids
from tests.support.scripted_server import ScriptedServer

SAMPLING = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": 32,
    "chat_template_kwargs": {},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    return load_tokenizer(tiny_llama, False)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(client, "QUEUE_S", 1.0)
    monkeypatch.setattr(client, "SLOWEST_TOKENS_PER_S", 100.0)


def write_prompts(path: Path, questions: list[list[str]]) -> None:
    none = dict.fromkeys(["reasoning_content", "tool_calls", "tool_call_id", "name"])
    with TableWriter(path, PROMPTS, {"content_sha256": "0"}) as writer:
        for number, turns in enumerate(questions):
            messages = [none | {"role": "user", "content": text} for text in turns]
            writer.write(
                [
                    {
                        "prompt_id": f"p{number}",
                        "source": "test",
                        "messages": messages,
                        "tools": None,
                        "extra": "{}",
                    }
                ]
            )


def ask_shard(
    tokenizer: Any,
    server: ScriptedServer,
    folder: Path,
    questions: list[list[str]],
    *,
    concurrency: int = 4,
    context: int = 2048,
    alive: Callable[[], bool] = lambda: True,
    allow_template: bool = False,
) -> list[dict[str, Any]]:
    """Answer the questions on the scripted server as a job would, and return the finished rows."""
    prompts, generated = folder / "prompts.parquet", folder / "generated.parquet"
    write_prompts(prompts, questions)
    without_ids = partial(text_outcome, thinks=False) if allow_template else None
    judge = Judge(tokenizer, stop_ids(tokenizer, []), None, None, without_ids)
    asker = Asker(
        tokenizer,
        judge,
        context,
        SAMPLING,
        min_answer_tokens=8,
        max_attempts=3,
        keep_reasoning=False,
    )
    with PartialLog(folder / "answers.jsonl") as log:
        shard = ShardGeneration(prompts, log, asker)

        async def run() -> None:
            shard.prepare(asyncio.get_running_loop())
            await shard.ask_all([Endpoint(server.url, "scripted", alive)], concurrency)

        try:
            asyncio.run(run())
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
        write_generated(generated, prompts, log, {}, keep_reasoning=False)
    return list(iter_rows(generated))


def when(text: str, fault: str, times: int = 10**6) -> Callable[[dict[str, Any], int], str | None]:
    """Return a script in which requests whose last message holds `text` meet `fault`, the first `times` times."""

    def script(body: dict[str, Any], asked_before: int) -> str | None:
        return fault if text in body["messages"][-1]["content"] and asked_before < times else None

    return script


QUESTIONS = [["What colour is the sky?"], ["And the FAULTY sea?"], ["And grass?"]]


def test_a_healthy_server_answers_every_prompt(tokenizer: Any, tmp_path: Path):
    with ScriptedServer(tokenizer, lambda body, asked: None) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS)
    assert [(row["sample_id"], row["status"], row["content"]) for row in rows] == [
        ("p0_gen0", "ok", "Blue."),
        ("p1_gen0", "ok", "Blue."),
        ("p2_gen0", "ok", "Blue."),
    ]
    assert all(tokenizer.decode(row["response_token_ids"][:-1]) == "Blue." for row in rows)


@pytest.mark.parametrize("fault", ["500", "503", "429", "408", "disconnect", "html", "hang"])
def test_what_may_pass_is_tried_again_and_becomes_a_plain_answer(
    tokenizer: Any, tmp_path: Path, fault: str
):
    with ScriptedServer(tokenizer, when("FAULTY", fault, times=2)) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS)
    assert [(row["status"], row["attempt"]) for row in rows] == [("ok", 1), ("ok", 3), ("ok", 1)]


@pytest.mark.parametrize("fault", ["500", "disconnect", "hang"])
def test_what_never_passes_becomes_an_error_row_after_the_last_attempt(
    tokenizer: Any, tmp_path: Path, fault: str
):
    with ScriptedServer(tokenizer, when("FAULTY", fault)) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS)
        asked = sum("FAULTY" in body["messages"][-1]["content"] for body in server.requests)
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert "(3 attempts)" in rows[1]["error"] and asked == 3


@pytest.mark.parametrize("fault", ["400", "401", "404", "422"])
def test_a_permanent_refusal_is_asked_once_and_becomes_an_error_row(
    tokenizer: Any, tmp_path: Path, fault: str
):
    with ScriptedServer(tokenizer, when("FAULTY", fault)) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS)
        asked = sum("FAULTY" in body["messages"][-1]["content"] for body in server.requests)
    assert rows[1]["error"].startswith(f"request: HTTP {fault}: ") and asked == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("abort", "finish_reason: 'abort' is no answer"),
        ("no finish", "finish_reason: None is no answer"),
        ("no ids", "no_ids: "),
        ("no response ids", "no_ids: "),
        ("other text", "text: "),
        ("other prompt", "prompt_ids: "),
        ("no stop id", "no_stop_id: "),
        ("miscounted", "token_count: "),
        ("no choices", "malformed_reply: "),
    ],
)
def test_http_200_with_a_wrong_answer_is_an_error_row_with_its_reason(
    tokenizer: Any, tmp_path: Path, fault: str, reason: str
):
    with ScriptedServer(tokenizer, when("FAULTY", fault)) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS)
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert rows[1]["error"].startswith(reason)


def test_a_reply_without_ids_is_an_answer_by_its_finish_reason_where_that_is_allowed(
    tokenizer: Any, tmp_path: Path
):
    with ScriptedServer(tokenizer, when("FAULTY", "no ids")) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS, allow_template=True)
    assert [(row["status"], row["content"]) for row in rows] == [("ok", "Blue.")] * 3
    assert rows[1]["prompt_token_ids"] == rows[1]["response_token_ids"] == []
    assert (rows[1]["finish_reason"], rows[1]["error"]) == ("stop", None)
    assert rows[0]["response_token_ids"]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no ids, abort", "finish_reason: 'abort' is no answer"),
        ("no ids, other prompt", "prompt_tokens: the server counts "),
        ("no response ids", "no_ids: "),
        ("other text", "text: "),
        ("other prompt", "prompt_ids: "),
        ("no stop id", "no_stop_id: "),
    ],
)
def test_a_wrong_answer_is_an_error_row_also_where_ids_may_be_missing(
    tokenizer: Any, tmp_path: Path, fault: str, reason: str
):
    with ScriptedServer(tokenizer, when("FAULTY", fault)) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS, allow_template=True)
    assert [row["status"] for row in rows] == ["ok", "error", "ok"]
    assert rows[1]["error"].startswith(reason)


def test_a_slow_drip_is_an_answer(tokenizer: Any, tmp_path: Path):
    with ScriptedServer(tokenizer, when("FAULTY", "slow drip")) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS)
    assert [(row["status"], row["attempt"]) for row in rows] == [("ok", 1)] * 3


def test_a_dead_server_is_no_rows_fault(tokenizer: Any, tmp_path: Path):
    server = ScriptedServer(tokenizer, lambda body, asked: None)
    server.url = "http://127.0.0.1:9"
    with pytest.raises(client.ServerLost):
        ask_shard(tokenizer, server, tmp_path, QUESTIONS, alive=lambda: False)
    assert (tmp_path / "answers.jsonl").read_bytes() == b""


def test_an_error_in_the_first_turn_ends_the_conversation_with_a_row_for_each_turn(
    tokenizer: Any, tmp_path: Path
):
    with ScriptedServer(tokenizer, when("FAULTY", "abort")) as server:
        rows = ask_shard(tokenizer, server, tmp_path, [["FAULTY?", "And then?", "And then?"]])
    assert [row["status"] for row in rows] == ["error", "skipped", "skipped"]
    assert rows[2]["error"] == "conversation_ended: turn 0 is error"


def test_a_prompt_without_room_for_an_answer_is_skipped_without_a_request(
    tokenizer: Any, tmp_path: Path
):
    with ScriptedServer(tokenizer, lambda body, asked: None) as server:
        rows = ask_shard(tokenizer, server, tmp_path, [["word " * 300], ["Short?"]], context=128)
        assert len(server.requests) == 1
    assert [row["status"] for row in rows] == ["skipped", "ok"]
    assert rows[0]["error"].startswith("prompt_too_long: its ")


def test_max_tokens_never_exceeds_what_the_prompt_leaves_of_the_context(
    tokenizer: Any, tmp_path: Path
):
    with ScriptedServer(tokenizer, lambda body, asked: None) as server:
        rows = ask_shard(tokenizer, server, tmp_path, [["Short?"]], context=64)
        request = server.requests[0]
    room = 64 - len(rows[0]["prompt_token_ids"])
    assert request["max_tokens"] == room - 1 < SAMPLING["max_tokens"]


def test_every_sampling_parameter_is_explicit_in_every_request(tokenizer: Any, tmp_path: Path):
    with ScriptedServer(tokenizer, lambda body, asked: None) as server:
        ask_shard(tokenizer, server, tmp_path, [["Short?"]])
        request = server.requests[0]
    assert {name: request[name] for name in SAMPLING if name != "chat_template_kwargs"} == {
        name: value for name, value in SAMPLING.items() if name != "chat_template_kwargs"
    }
    assert request["return_token_ids"] is True and request["stream"] is False


def test_no_more_conversations_are_in_flight_than_configured(tokenizer: Any, tmp_path: Path):
    questions = [[f"Question {number}?"] for number in range(40)]
    with ScriptedServer(tokenizer, when("Question", "slow drip")) as server:
        ask_shard(tokenizer, server, tmp_path, questions, concurrency=7)
        assert server.most_in_flight == 7


def test_the_longest_conversations_are_asked_first(tokenizer: Any, tmp_path: Path):
    questions = [["Short?"], ["A much longer question, is it not?"], ["One?", "Two?"]]
    with ScriptedServer(tokenizer, lambda body, asked: None) as server:
        ask_shard(tokenizer, server, tmp_path, questions, concurrency=1)
        asked = [body["messages"][-1]["content"] for body in server.requests]
    assert asked == ["One?", "Two?", "A much longer question, is it not?", "Short?"]


def test_failures_in_a_row_stop_the_job_and_name_the_commonest_error(
    tokenizer: Any, tmp_path: Path
):
    questions = [[f"Question {number}?"] for number in range(60)]
    with (
        ScriptedServer(tokenizer, when("Question", "abort")) as server,
        pytest.raises(StepError, match=r"finish_reason: 'abort'") as stopped,
    ):
        ask_shard(tokenizer, server, tmp_path, questions)
    assert "20 of the last 20 requests failed" in str(stopped.value)
    assert len(server.requests) < 30


def test_half_of_a_hundred_failures_stop_the_job_although_others_succeed():
    breaker = Breaker()
    outcomes = ["request: HTTP 500", None] * 49
    for outcome in outcomes:
        breaker.record(outcome)
    breaker.record("text: differs")
    with pytest.raises(StepError, match="HTTP 500"):
        breaker.record("request: HTTP 500")


def test_a_second_start_asks_only_what_the_first_did_not_log(tokenizer: Any, tmp_path: Path):
    with (
        ScriptedServer(tokenizer, when("grass", "disconnect")) as server,
        pytest.raises(client.ServerLost),
    ):
        ask_shard(tokenizer, server, tmp_path, QUESTIONS, alive=lambda: False, concurrency=1)
    logged = [json.loads(line)["prompt_id"] for line in (tmp_path / "answers.jsonl").open("rb")]
    assert logged == ["p1", "p0"]
    with ScriptedServer(tokenizer, lambda body, asked: None) as server:
        rows = ask_shard(tokenizer, server, tmp_path, QUESTIONS)
        assert [body["messages"][-1]["content"] for body in server.requests] == ["And grass?"]
    assert [row["status"] for row in rows] == ["ok"] * 3


def test_a_conversation_resumes_at_the_turn_it_reached(tokenizer: Any, tmp_path: Path):
    turns = [["One?", "Two?", "FAULTY three?"]]
    with (
        ScriptedServer(tokenizer, when("FAULTY", "disconnect")) as server,
        pytest.raises(client.ServerLost),
    ):
        ask_shard(tokenizer, server, tmp_path, turns, alive=lambda: False)
    with ScriptedServer(tokenizer, lambda body, asked: None, answer="Red.") as server:
        rows = ask_shard(tokenizer, server, tmp_path, turns)
        assert [len(body["messages"]) for body in server.requests] == [5]
    assert [row["content"] for row in rows] == ["Blue.", "Blue.", "Red."]
