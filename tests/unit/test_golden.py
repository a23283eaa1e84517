"""Golden prompts: what a fresh server's answer must be, and that every entry checks something."""

from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.serving.golden import JUDGED_TOKENS, golden_body, golden_fault
from rebuild.start.config import complete_config, load_schema

SCHEMA = load_schema(Path("workflow/schemas/config.schema.yaml"))
PROMPT = {"prompt": "What is 2 + 2?"}


def choice(ids: list[int] | None, logprobs: list[float] | None = None) -> dict[str, Any]:
    """Return a choice as SGLang gives it."""
    content = [{"logprob": value} for value in logprobs] if logprobs else None
    return {"response_token_ids": ids, "logprobs": {"content": content} if content else None}


@pytest.mark.parametrize(
    ("expected", "ids", "right"),
    [
        ([5, 6], [5, 6], True),
        ([5, 6], [5, 6, 7], True),
        ([5, 6], [5, 7], False),
        ([5, 6], [5], False),
        ([5, 6], [], False),
        ([5, 6], None, False),
    ],
)
def test_an_answer_must_begin_with_the_first_ids(
    expected: list[int], ids: list[int] | None, right: bool
):
    fault = golden_fault(PROMPT | {"first_ids": expected}, choice(ids))
    assert (fault is None) == right


def test_wrong_ids_are_said_beside_the_expected_ones():
    fault = golden_fault(PROMPT | {"first_ids": [5, 6]}, choice([5, 7, 8]))
    assert fault == "expected first ids [5, 6], seen [5, 7]"


@pytest.mark.parametrize(
    ("logprobs", "right"),
    [([-0.5, -1.5], True), ([-0.5, -1.6], False), ([float("nan")], False), (None, False)],
)
def test_the_mean_log_probability_must_reach_the_least_one(
    logprobs: list[float] | None, right: bool
):
    fault = golden_fault(PROMPT | {"min_logprob": -1}, choice([5, 6], logprobs))
    assert (fault is None) == right
    assert right or "log-probability of -1 or more, seen" in str(fault)


def test_both_bounds_hold_together():
    entry = PROMPT | {"first_ids": [5], "min_logprob": -1}
    assert golden_fault(entry, choice([5], [-0.2])) is None
    assert golden_fault(entry, choice([6], [-0.2])) is not None
    assert golden_fault(entry, choice([5], [-2.0])) is not None


def test_a_golden_prompt_is_asked_greedily_and_for_no_more_tokens_than_are_judged():
    body = golden_body(PROMPT | {"first_ids": [5, 6, 7]}, {"enable_thinking": False})
    assert body["messages"] == [{"role": "user", "content": "What is 2 + 2?"}]
    assert (body["temperature"], body["repetition_penalty"], body["max_tokens"]) == (0, 1, 3)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    for bound in ({"min_logprob": -1}, {"min_logprob": -1, "first_ids": [5]}):
        assert golden_body(PROMPT | bound, {})["max_tokens"] == JUDGED_TOKENS


def refusal(*entries: dict[str, Any]) -> str:
    with pytest.raises(StepError) as refused:
        complete_config({"server": {"golden": list(entries)}}, SCHEMA)
    return str(refused.value)


def test_an_entry_that_would_check_nothing_is_refused():
    said = refusal(PROMPT | {"min_logprob": -1}, PROMPT)
    assert f"server.golden.1 is {PROMPT}" in said
    assert "expected object with prompt, and first_ids or min_logprob" in said


def test_a_misspelt_bound_is_refused_even_beside_a_right_one():
    said = refusal(PROMPT | {"first_ids": [5], "min_logprb": -1})
    assert "unknown key 'server.golden.0.min_logprb'" in said


@pytest.mark.parametrize(
    "bound", [{"first_ids": [5, 6]}, {"min_logprob": -2.5}, {"first_ids": [5], "min_logprob": -2}]
)
def test_an_entry_with_a_bound_is_accepted(bound: dict[str, Any]):
    config = complete_config({"server": {"golden": [PROMPT | bound]}}, SCHEMA)
    assert config["server"]["golden"] == [PROMPT | bound]
