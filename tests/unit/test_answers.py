"""What a reply is worth: Qwen3.6's real tokenizer, and replies as SGLang's own parsers cut them."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.generate.answers import Judge, Rendered, rendered_prompt
from rebuild.tokens.chat import (
    THINK_END,
    THINK_START,
    load_tokenizer,
    render_prompt,
    stop_ids,
    token_id,
)
from tests.support.conversations import WEATHER

Reply = dict[str, Any]
Parse = Callable[..., tuple[str | None, str, list[dict[str, Any]]]]

CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
END = "<|im_end|>"


@pytest.fixture(scope="session")
def tokenizer(qwen36_tokenizer: Path) -> Any:
    return load_tokenizer(qwen36_tokenizer, trust_remote_code=False)


@pytest.fixture(scope="session")
def judge(tokenizer: Any) -> Judge:
    start, end = token_id(tokenizer, THINK_START), token_id(tokenizer, THINK_END)
    return Judge(tokenizer, stop_ids(tokenizer, []), start, end)


@pytest.fixture(scope="session")
def sglang_parse() -> Iterator[Parse]:
    """SGLang's parsers as its chat endpoint uses them, with the production configuration's names."""
    with patch.dict(os.environ):  # importing SGLang sets some variables
        from sglang.srt.entrypoints.openai.protocol import Tool
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
        from sglang.srt.parser.reasoning_parser import ReasoningParser

        def parse(
            text: str, thinking: bool, offered: list[dict[str, Any]], reasoning_parser: bool
        ) -> tuple[str | None, str, list[dict[str, Any]]]:
            reasoning, calls = None, []
            if reasoning_parser:
                parser = ReasoningParser("qwen3", stream_reasoning=False, force_reasoning=thinking)
                reasoning, text = parser.parse_non_stream(text)
            tools = FunctionCallParser([Tool(**tool) for tool in offered], "qwen3_coder")
            if tools.has_tool_call(text):
                text, calls = tools.parse_non_stream(text)
            return reasoning or None, text or "", [as_call(item) for item in calls]

        yield parse


def as_call(item: Any) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.parameters}
    return {"id": f"call_{item.tool_index}", "type": "function", "function": function}


class Case(NamedTuple):
    """A reply with all that it is judged by."""

    reply: Reply
    rendered: Rendered
    prompt: list[int]

    def judged(self, judge: Judge, **changes: Any) -> dict[str, Any]:
        """Return the outcome; `changes` replace fields of the choice, its message or the usage."""
        reply = json.loads(json.dumps(self.reply))
        choice = reply["choices"][0]
        for place in (choice, choice["message"], reply["usage"]):
            place.update({key: changes[key] for key in changes if key in place})
        return judge.outcome(reply, self.rendered, lambda: self.prompt)


@pytest.fixture(scope="session")
def ask(tokenizer: Any, judge: Judge, sglang_parse: Parse) -> Callable[..., Case]:
    """A server that says just this, a text or ids, and stops where its stop token is part of it."""

    def say(
        said: str | list[int],
        *,
        question: str = "Why?",
        thinking: bool = True,
        tools: list[dict[str, Any]] | None = None,
        reasoning_parser: bool = True,
    ) -> Case:
        kwargs = {"enable_thinking": thinking}
        messages = [{"role": "user", "content": question}]
        prompt = render_prompt(tokenizer, messages, tools, kwargs)
        ids = tokenizer.encode(said) if isinstance(said, str) else said
        stopped = ids[-1] in judge.stop_ids
        text = tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=True)
        reasoning, content, calls = sglang_parse(text, thinking, tools or [], reasoning_parser)
        message = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        choice = {
            "message": message | {"tool_calls": calls or None},
            "finish_reason": ("tool_calls" if calls else "stop") if stopped else "length",
            "prompt_token_ids": prompt,
            "response_token_ids": ids,
            "logprobs": None,
        }
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        rendered = rendered_prompt(prompt, judge, offers_tools=tools is not None)
        return Case({"choices": [choice], "usage": usage}, rendered, prompt)

    return say


def texts(row: dict[str, Any]) -> tuple[str, str | None, str]:
    assert row["error"] is None
    return row["status"], row["reasoning"], row["content"]


# Thoughts


def test_an_answer_without_a_thought_is_what_the_ids_say(ask: Any, judge: Judge):
    row = ask(" Because.\n" + END, thinking=False).judged(judge)
    assert texts(row) == ("ok", None, " Because.\n")
    assert row["reasoning_tokens"] == 0 and row["tool_calls"] is None


@pytest.mark.parametrize("reasoning_parser", [True, False])
def test_a_thought_ends_at_its_end_marker_whether_the_server_knows_of_thoughts_or_not(
    ask: Any, judge: Judge, tokenizer: Any, reasoning_parser: bool
):
    thought = "Let me see.\n\nYes."
    case = ask(f"{thought}\n</think>\n\nBecause.{END}", reasoning_parser=reasoning_parser)
    row = case.judged(judge)
    assert texts(row) == ("ok", thought, "Because.")
    assert row["reasoning_tokens"] == len(tokenizer.encode(thought + "\n"))


def test_a_blank_thought_is_a_thought_that_says_nothing(ask: Any, judge: Judge):
    assert texts(ask(f"\n</think>\n\nBecause.{END}").judged(judge)) == ("ok", "", "Because.")


def test_a_second_end_marker_belongs_to_the_answer(ask: Any, judge: Judge):
    row = ask(f"So.\n</think>\n\nWrite </think> there.{END}").judged(judge)
    assert texts(row) == ("ok", "So.", "Write </think> there.")


@pytest.mark.parametrize("said", ["Let me see. ", f"I give up.{END}"])
def test_a_thought_that_never_ends_is_a_truncated_answer_also_where_the_model_stopped(
    ask: Any, judge: Judge, tokenizer: Any, said: str
):
    row = ask(said).judged(judge)
    assert texts(row) == ("truncated", said.removesuffix(END).strip(), "")
    assert row["reasoning_tokens"] == len(tokenizer.encode(said.removesuffix(END)))


def test_an_answer_that_is_cut_after_its_thought_is_truncated_with_what_it_said(
    ask: Any, judge: Judge
):
    row = ask("So.\n</think>\n\nBecause of").judged(judge)
    assert texts(row) == ("truncated", "So.", "Because of")


def test_a_model_that_opens_its_thought_itself_is_split_alike(ask: Any, judge: Judge):
    closed = ask(f"<think>\nSo.\n</think>\n\nBecause.{END}", thinking=False)
    assert texts(closed.judged(judge)) == ("ok", "So.", "Because.")
    unclosed = ask(f"<think>\nSo{END}", thinking=False)
    assert texts(unclosed.judged(judge)) == ("truncated", "So", "")


def test_a_marker_in_the_users_text_opens_no_thought(judge: Judge, tokenizer: Any):
    turn = "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert not judge.thought_open(tokenizer.encode(turn))
    assert judge.thought_open(tokenizer.encode(turn + "<think>\n"))
    assert not judge.thought_open(tokenizer.encode(turn + "<think>\n\n</think>\n\n"))


def test_a_server_that_ends_the_thought_elsewhere_than_the_ids_is_not_believed(
    ask: Any, judge: Judge, tokenizer: Any
):
    spelled = tokenizer.encode("I write </") + tokenizer.encode("think> here.")
    for rest in (f"\n</think>\n\nBecause.{END}", END):
        row = ask(spelled + tokenizer.encode(rest)).judged(judge)
        assert (row["status"], row["error"].split(":")[0]) == ("error", "thought")


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<\ufffd"), max_size=60)


@given(thought=TEXT, answer=TEXT)
def test_every_thought_and_every_answer_come_back_as_they_were_sampled(
    ask: Any, judge: Judge, tokenizer: Any, thought: str, answer: str
):
    ids = [tokenizer.encode(part) for part in (thought, f"</think>{answer}{END}")]
    row = ask(ids[0] + ids[1]).judged(judge)
    sampled = [tokenizer.decode(ids[0]), tokenizer.decode(ids[1][1:-1])]
    assert texts(row) == ("ok", sampled[0].strip(), sampled[1].strip())
    assert row["reasoning_tokens"] == len(ids[0])
    assert row["response_token_ids"] == ids[0] + ids[1]


# Tool calls


def test_a_tool_call_is_kept_as_a_call_and_what_was_said_ahead_of_it_as_content(
    ask: Any, judge: Judge
):
    row = ask(f"So.\n</think>\n\nI look.\n\n{CALL}{END}", tools=[WEATHER]).judged(judge)
    assert texts(row) == ("tool_calls", "So.", "I look.")
    (call,) = json.loads(row["tool_calls"])
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}


def test_a_call_out_of_an_open_thought_ends_the_thought(ask: Any, judge: Judge, tokenizer: Any):
    row = ask(f"I look.\n{CALL}{END}", tools=[WEATHER]).judged(judge)
    assert texts(row) == ("tool_calls", "I look.", "")
    assert row["reasoning_tokens"] == len(tokenizer.encode("I look.\n"))


def test_ahead_of_a_call_a_server_without_a_reasoning_parser_leaves_the_thought_in_the_text(
    judge: Judge, ask: Callable[..., Case]
):
    served = ask(
        f"So.\n</think>\n\nI look.\n\n{CALL}{END}", tools=[WEATHER], reasoning_parser=False
    )
    assert texts(served.judged(judge)) == ("tool_calls", "So.", "I look.")


@pytest.mark.parametrize("cut", ["<tool_call>", "<tool_call>\n<func", CALL[:60]])
def test_a_call_that_is_cut_is_a_truncated_answer_and_no_call(ask: Any, judge: Judge, cut: str):
    row = ask(f"So.\n</think>\n\nI look.\n\n{cut}", tools=[WEATHER]).judged(judge)
    assert texts(row) == ("truncated", "So.", f"I look.\n\n{cut}")
    assert row["tool_calls"] is None


def test_a_call_out_of_an_open_thought_that_is_cut_or_not_asked_for_is_part_of_the_thought(
    ask: Any, judge: Judge
):
    cut = ask("I look.\n<tool_call>\n<func", tools=[WEATHER]).judged(judge)
    assert texts(cut) == ("truncated", "I look.\n<tool_call>\n<func", "")
    stray = ask(f"I look.\n{CALL}{END}").judged(judge)
    assert texts(stray) == ("truncated", f"I look.\n{CALL}", "")


def test_what_only_looks_like_a_call_is_said(ask: Any, judge: Judge):
    said = f"So.\n</think>\n\n<tool_call>\nnone\n</tool_call>{END}"
    expected = ("ok", "So.", "<tool_call>\nnone\n</tool_call>")
    assert texts(ask(said, tools=[WEATHER]).judged(judge)) == expected
    assert texts(ask(said).judged(judge)) == expected


def test_a_call_that_the_ids_do_not_hold_is_not_believed(ask: Any, judge: Judge):
    case = ask(f"So.\n</think>\n\n{CALL}{END}", tools=[WEATHER])
    call = case.reply["choices"][0]["message"]["tool_calls"][0]
    other = call | {"function": {"name": "delete_all", "arguments": "{}"}}
    assert case.judged(judge, tool_calls=[other])["error"].startswith("text: ")
    assert case.judged(judge, tool_calls=None)["error"].startswith("no_calls: ")


# What may differ between ids and text


@pytest.mark.parametrize("shown", ["", "\ufffd"])
def test_an_emoji_that_is_cut_is_no_fault(ask: Any, judge: Judge, tokenizer: Any, shown: str):
    whole = tokenizer.encode("So.\n</think>\n\nOtters 🦦")
    case = ask(whole[:-1])
    assert tokenizer.decode(whole[:-1]).endswith("\ufffd")
    assert case.judged(judge, content=f"\n\nOtters {shown}")["status"] == "truncated"


@pytest.mark.parametrize(
    "served", ["Caf\u00e9 nin\u0303o", "Cafe\u0301 ni\u00f1o", " Café\n niño "]
)
def test_composed_and_decomposed_accents_and_white_space_are_the_same_text(
    ask: Any, judge: Judge, tokenizer: Any, served: str
):
    decomposed = (
        tokenizer.encode("Cafe") + tokenizer.encode("\u0301 nin") + tokenizer.encode("\u0303o")
    )
    case = ask([*decomposed, tokenizer.eos_token_id], thinking=False)
    row = case.judged(judge, content=served)
    assert texts(row) == ("ok", None, "Cafe\u0301 nin\u0303o")


# Faults

FAULTS: dict[str, dict[str, Any]] = {
    "finish_reason: 'abort'": {"finish_reason": "abort"},
    "finish_reason: None": {"finish_reason": None},
    "finish_reason: 'content_filter'": {"finish_reason": "content_filter"},
    "no_ids: the reply": {"response_token_ids": []},
    "no_ids: ": {"prompt_token_ids": None},
    "token_count: usage says 5": {"completion_tokens": 5},
    "token_count: usage says None": {"completion_tokens": None},
    "no_calls: ": {"finish_reason": "tool_calls"},
    "text: ": {"content": "Because"},
    "text: the": {"content": "Because. So there."},
    "text: the ids": {"reasoning_content": ""},
    "malformed_reply: TypeError": {"message": None},
    "malformed_reply: TypeError: <class 'list'>": {"response_token_ids": "1 2"},
    "malformed_reply: TypeError: token": {"response_token_ids": [1, "2"]},
    "malformed_reply: TypeError: token ids": {"prompt_token_ids": [2**31]},
    "malformed_reply: TypeError: str": {"content": [{"type": "text", "text": "Because."}]},
    "malformed_reply: TypeError: str | None": {"finish_reason": {"type": "stop"}},
    "malformed_reply: KeyError": {"tool_calls": [{"id": "call_0"}]},
    "malformed_reply: TypeError: <class 'dict'>": {"logprobs": [0.0]},
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_faulty_reply_is_an_error_with_its_reason(ask: Any, judge: Judge, reason: str):
    case = ask(f"So.\n</think>\n\nBecause.{END}")
    assert case.judged(judge)["status"] == "ok"
    row = case.judged(judge, **FAULTS[reason])
    assert row["status"] == "error"
    assert row["error"].startswith(reason)


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [None]}, {"choices": [{}]}])
def test_what_is_no_chat_completion_is_an_error(judge: Judge, reply: Reply):
    row = judge.outcome(reply, Rendered(0, b"", False), list)
    assert row["status"] == "error" and row["error"].startswith("malformed_reply: ")


def test_a_stop_without_a_stop_id_is_an_error(ask: Any, judge: Judge):
    case = ask("So.\n</think>\n\nBecause.")
    assert case.judged(judge)["status"] == "truncated"
    assert case.judged(judge, finish_reason="stop")["error"].startswith("no_stop_id: ")


def test_another_prompt_than_ours_is_an_error_that_says_where_they_part(ask: Any, judge: Judge):
    case = ask(f"So.\n</think>\n\nBecause.{END}")
    other = [*case.prompt[:4], 99, *case.prompt[5:]]
    error = case.judged(judge, prompt_token_ids=other)["error"]
    assert error.startswith("prompt_ids: ") and "first difference at 4: [99, " in error
    shorter = case.judged(judge, prompt_token_ids=case.prompt[:-1])["error"]
    assert f"rendered {len(case.prompt) - 1} ids, we {len(case.prompt)}" in shorter


def test_an_error_keeps_what_came(ask: Any, judge: Judge):
    case = ask(f"So.\n</think>\n\nBecause.{END}")
    row = case.judged(judge, finish_reason="abort")
    assert row["response_token_ids"] == case.reply["choices"][0]["response_token_ids"]
    assert (row["reasoning"], row["content"]) == ("So.\n", "\n\nBecause.")


def test_log_probabilities_are_kept_one_for_every_sampled_token(ask: Any, judge: Judge):
    case = ask(f"Yes.{END}", thinking=False)
    assert case.judged(judge)["response_logprobs"] is None
    content = [{"token": "t", "logprob": -number / 2} for number in range(3)]
    row = case.judged(judge, logprobs={"content": content})
    assert row["response_logprobs"] == [0.0, -0.5, -1.0]
