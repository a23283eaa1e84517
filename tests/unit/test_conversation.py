"""How a prompt unfolds into generations, and how a log of them is replayed."""

import json
from typing import Any

from rebuild.generate.conversation import begin_conversation, replay

CALL = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}


def message(role: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(
        ["content", "reasoning_content", "tool_calls", "tool_call_id", "name"], None
    )
    return empty | {"role": role, "content": content} | more


def prompt(*messages: dict[str, Any], tools: str | None = None) -> dict[str, Any]:
    return {"prompt_id": "p", "source": "s", "tools": tools, "messages": list(messages)}


def answer(conversation: Any, content: str = "yes", status: str = "ok", **more: Any) -> Any:
    row = conversation.skeleton() | {"content": content, "status": status} | more
    return row, conversation.accept(row)


TWO_TURNS = prompt(message("system", "Be brief."), message("user", "A?"), message("user", "B?"))


def test_the_second_turn_sees_the_models_own_first_answer():
    conversation = begin_conversation(TWO_TURNS, False)
    assert [m["role"] for m in conversation.skeleton()["messages"]] == ["system", "user"]
    answer(conversation, "my own answer")
    row = conversation.skeleton()
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("system", "Be brief."),
        ("user", "A?"),
        ("assistant", "my own answer"),
        ("user", "B?"),
    ]
    assert (row["sample_id"], row["turn"]) == ("p_gen1", 1)
    answer(conversation)
    assert conversation.finished


def test_a_truncated_answer_ends_the_conversation_and_every_later_turn_has_its_row():
    for status in ("truncated", "error", "skipped"):
        conversation = begin_conversation(TWO_TURNS, False)
        _, out_of_reach = answer(conversation, status=status)
        assert [(row["sample_id"], row["status"]) for row in out_of_reach] == [
            ("p_gen1", "skipped")
        ]
        assert out_of_reach[0]["error"] == f"conversation_ended: turn 0 is {status}"
        assert conversation.finished


def recorded_prompt(arguments: str = '{"city":"Oslo"}') -> dict[str, Any]:
    recorded_call = [
        {
            "id": "old",
            "type": "function",
            "function": {"name": "weather", "arguments": arguments},
        }
    ]
    return prompt(
        message("user", "Weather in Oslo?"),
        message("assistant", tool_calls=json.dumps(recorded_call)),
        message("tool", "4 degrees", tool_call_id="old"),
        message("user", "And tomorrow?"),
    )


def test_a_tool_call_goes_on_with_the_recorded_result_of_that_very_call():
    conversation = begin_conversation(recorded_prompt(), False)
    answer(conversation, "", "tool_calls", tool_calls=json.dumps([CALL]))
    last = conversation.skeleton()["messages"][-1]
    assert (last["role"], last["content"], last["tool_call_id"]) == ("tool", "4 degrees", "call_0")
    assert conversation.skeleton()["sample_id"] == "p_gen1"
    answer(conversation, "Four degrees.")
    assert conversation.skeleton()["messages"][-1]["content"] == "And tomorrow?"


def test_a_tool_call_with_other_arguments_ends_the_conversation_and_no_result_is_invented():
    conversation = begin_conversation(recorded_prompt('{"city":"Bergen"}'), False)
    _, out_of_reach = answer(conversation, "", "tool_calls", tool_calls=json.dumps([CALL]))
    assert [row["error"] for row in out_of_reach] == [
        "conversation_ended: the result of turn 0's call is unknown"
    ]


def test_a_recorded_result_is_used_once_so_that_a_model_that_repeats_its_call_cannot_loop():
    conversation = begin_conversation(recorded_prompt(), False)
    answer(conversation, "", "tool_calls", tool_calls=json.dumps([CALL]))
    _, out_of_reach = answer(conversation, "", "tool_calls", tool_calls=json.dumps([CALL]))
    assert len(out_of_reach) == 1 and conversation.finished


def test_results_go_to_the_calls_that_they_answer_and_stand_in_the_order_of_the_calls():
    calls = [
        CALL | {"id": f"new_{n}", "function": {"name": f"f{n}", "arguments": "{}"}} for n in (0, 1)
    ]
    old = [call | {"id": f"old_{n}"} for n, call in enumerate(calls)]
    for ids in (["old_1", "old_0"], [None, "old_0"]):
        recorded = [
            message("assistant", tool_calls=json.dumps(old)),
            message("tool", "of f1", tool_call_id=ids[0]),
            message("tool", "of f0", tool_call_id=ids[1]),
        ]
        conversation = begin_conversation(prompt(message("user", "Both?"), *recorded), False)
        answer(conversation, "", "tool_calls", tool_calls=json.dumps(calls))
        results = conversation.skeleton()["messages"][-2:]
        assert [(m["content"], m["tool_call_id"]) for m in results] == [
            ("of f0", "new_0"),
            ("of f1", "new_1"),
        ]


def test_a_thought_that_led_to_a_call_stays_until_its_turn_is_answered():
    for keep, left in ((False, None), (True, "because")):
        conversation = begin_conversation(recorded_prompt(), keep)
        call = json.dumps([CALL])
        answer(conversation, "", "tool_calls", tool_calls=call, reasoning="because")
        during = conversation.skeleton()
        answer(conversation, "Four degrees.", reasoning="so")
        after = conversation.skeleton()
        thoughts = [m["reasoning_content"] for m in during["messages"] if m["role"] == "assistant"]
        assert thoughts == ["because"]
        assert [m["reasoning_content"] for m in after["messages"]][1] == left


def test_replaying_a_log_gives_the_state_in_which_it_was_left():
    live = begin_conversation(TWO_TURNS, False)
    first, _ = answer(live, "one")
    conversation, rows = replay(TWO_TURNS, [first], False)
    assert rows == [first]
    assert conversation.skeleton() == live.skeleton()


def test_replaying_rebuilds_rows_out_of_reach_which_are_never_logged():
    live = begin_conversation(TWO_TURNS, False)
    first, out_of_reach = answer(live, "cut", "truncated")
    conversation, rows = replay(TWO_TURNS, [first], False)
    assert rows == [first, *out_of_reach]
    assert conversation.finished


def test_replaying_stops_at_a_gap():
    live = begin_conversation(TWO_TURNS, False)
    answer(live, "one")
    second, _ = answer(live, "two")
    conversation, rows = replay(TWO_TURNS, [second], False)
    assert rows == [] and conversation.turn == 0


def test_a_thought_is_in_the_history_only_when_it_is_to_be_preserved():
    for keep, seen in ((False, None), (True, "because")):
        conversation = begin_conversation(TWO_TURNS, keep)
        answer(conversation, "yes", reasoning="because")
        assert conversation.skeleton()["messages"][-2]["reasoning_content"] == seen
