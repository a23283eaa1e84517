"""Generated rows reduced to what the audit judges and to what a person reads of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rebuild.audit.answer_facts import (
    COLUMNS,
    SHOWN,
    Asked,
    answer_facts,
    example,
    people,
    read_asked,
    showable,
)
from rebuild.audit.id_features import row_hashes
from rebuild.audit.near_duplicates import sketch_texts
from rebuild.audit.target import Target
from rebuild.tables import GENERATED, PROMPTS, TableWriter
from tests.support.conversations import row as message
from tests.support.real_shards import clean_data, qwen3

NOTHING_ASKED = Asked({}, {}, sketch_texts([]))
ENGLISH = "Where is the station, please? I am in a hurry."
RUSSIAN = "Вокзал находится за старой ратушей."


@pytest.fixture(scope="module")
def qwen(qwen3_tokenizer: Path) -> Target:
    return qwen3(qwen3_tokenizer).target


def facts(
    *rows: dict[str, Any], asked: Asked = NOTHING_ASKED, target: Target | None = None
) -> list[dict[str, Any]]:
    """Return the facts about rows whose absent columns are null."""
    full = [dict.fromkeys(GENERATED.names) | row for row in rows]
    batch = pa.Table.from_pylist(full, schema=GENERATED).select(COLUMNS)
    made: list[dict[str, Any]] = answer_facts(batch, asked, target).to_dict("records")
    return made


def answered(**columns: Any) -> dict[str, Any]:
    return {"status": "ok", "messages": [message("user", ENGLISH)], "content": "Yes."} | columns


def asked_prompts(tmp_path: Path, *prompts: list[dict[str, Any]]) -> Asked:
    """Return what is known of prompts p0, p1, … with these messages."""
    path = tmp_path / "prompts.parquet"
    rows = [{"prompt_id": f"p{n}", "messages": messages} for n, messages in enumerate(prompts)]
    with TableWriter(path, PROMPTS, {}) as writer:
        writer.write([dict.fromkeys(PROMPTS.names) | row for row in rows])
    return read_asked(path)


def test_prompts_are_known_by_their_turns_their_voices_and_what_users_say(tmp_path: Path) -> None:
    talk = [
        message("system", "Be brief."),
        message("user", "One question to begin with"),
        message("assistant", "An answer."),
        message("user", "Another question"),
    ]
    asked = asked_prompts(tmp_path, talk, [message("user", "Something else entirely")])
    assert asked.user_turns == {"p0": 2, "p1": 1}
    assert asked.voices["p0"] == people([talk[0], talk[1], talk[3]])
    texts = ["One question to begin with\nAnother question", "Something else entirely"]
    assert asked.sketches.tolist() == sketch_texts(texts).tolist()


def test_a_history_is_held_against_its_prompt_as_far_as_it_goes(tmp_path: Path) -> None:
    first, second = message("user", "One"), message("user", "Two")
    said, told = message("assistant", "Whatever"), message("tool", "21 degrees")
    asked = asked_prompts(tmp_path, [first, second])
    histories = {
        False: [[first], [first, said, second], [first, said, told, said, second]],
        True: [
            [second],
            [first, said, first],
            [message("system", "Two"), first],
            [first, second, second],
        ],
    }
    for otherwise, given in histories.items():
        rows = facts(
            *(answered(prompt_id="p0", messages=messages) for messages in given), asked=asked
        )
        assert [row["asked_otherwise"] for row in rows] == [otherwise] * len(given)


def test_rows_of_prompts_that_nobody_knows_are_not_held_against_them() -> None:
    assert not facts(answered(prompt_id="stranger"))[0]["asked_otherwise"]


def test_a_user_turn_is_counted_by_what_users_have_said() -> None:
    history = [message("user", "One"), message("assistant", "A"), message("user", "Two")]
    rows = facts(answered(), answered(messages=history), answered(messages=None))
    assert [row["user_turn"] for row in rows] == [1, 2, 0]


def test_unknown_counts_are_minus_one() -> None:
    [row] = facts(answered(completion_tokens=7))
    assert (row["completion_tokens"], row["prompt_tokens"], row["turn"]) == (7, -1, -1)


def test_keys_are_the_hashes_of_the_engines_ids() -> None:
    rows = facts(answered(prompt_token_ids=[1, 2], response_token_ids=[3]), answered())
    [prompt, response] = row_hashes(np.array([1, 2, 3]), np.array([0, 2, 3])).tolist()
    assert [(row["prompt_key"], row["response_key"]) for row in rows] == [
        (prompt, response),
        (0, 0),
    ]


def test_an_answer_in_another_script_is_told_and_one_that_failed_is_not() -> None:
    rows = facts(answered(content=RUSSIAN), answered(content=RUSSIAN, status="error"))
    assert [row["other_script"] for row in rows] == ["Cyrillic, asked in Latin", ""]


def test_an_excerpt_is_of_the_answer_else_of_the_thought_and_shows_what_is_invisible() -> None:
    rows = facts(
        answered(content="a\n\x1b" + "b" * 200, reasoning="Hm."),
        answered(content="", reasoning="Hm."),
        answered(content=None),
    )
    assert rows[0]["excerpt"] == repr("a\n\x1b" + "b" * 77)
    assert rows[0]["excerpt"].isprintable()
    assert [row["excerpt"] for row in rows[1:]] == ["'Hm.'", "''"]


def test_without_a_target_nothing_is_said_of_templates_and_ids() -> None:
    assert not {"difference", "says_otherwise", "thinks"} & set(facts(answered())[0])


def test_rows_without_an_answer_have_nothing_wrong_with_it(qwen: Target) -> None:
    for row in facts(*(answered(status=s) for s in ("error", "skipped")), target=qwen):
        assert (row["difference"], row["says_otherwise"], row["thinks"]) == ("", False, False)


def test_answers_without_the_engines_ids_are_judged_by_their_thought_alone(qwen: Target) -> None:
    whole, blank, cut = facts(
        answered(reasoning="Let me see."),
        answered(reasoning=" \n"),
        answered(status="truncated"),
        target=qwen,
    )
    assert [row["thought_missing"] for row in (whole, blank, cut)] == [False, True, False]
    assert all(row["thinks"] and not row["says_otherwise"] for row in (whole, blank, cut))


def test_columns_have_the_same_types_with_and_without_rows(qwen3_tokenizer: Path) -> None:
    speaker = qwen3(qwen3_tokenizer)
    rows = pa.Table.from_pylist(clean_data(speaker, 2).rows, schema=GENERATED).select(COLUMNS)
    some = answer_facts(rows, NOTHING_ASKED, speaker.target)
    none = answer_facts(rows.slice(0, 0), NOTHING_ASKED, speaker.target)
    assert some.dtypes.to_dict() == none.dtypes.to_dict()


def test_an_example_is_what_a_person_reads_of_a_row() -> None:
    history = [message("user", "One"), message("assistant", "A"), message("user", "Two")]
    row = dict.fromkeys(GENERATED.names) | answered(
        sample_id="a", source="s", messages=history, reasoning="Hm."
    )
    assert example(row) == {
        "sample_id": "a",
        "source": "s",
        "status": "ok",
        "prompt": "Two",
        "reasoning": "Hm.",
        "answer": "Yes.",
    }
    failed = row | {"status": "error", "content": None, "error": "HTTP 503", "messages": None}
    assert (example(failed)["answer"], example(failed)["prompt"]) == ("HTTP 503", "")
    assert example(row | {"content": "", "tool_calls": "[1]"})["answer"] == "[1]"


def test_what_is_shown_is_short_and_steers_nothing() -> None:
    assert showable(None) is None
    assert showable("tab\t, new\nline, ä, 東, 🦦") == "tab\t, new\nline, ä, 東, 🦦"
    assert showable("\x1b[2J\u202ex\u200b\ufeff\x00\x85") == "�[2J�x����"
    assert showable("\ud800") == "?"
    long = showable("x" * 10_000)
    assert long == "x" * SHOWN + " …"
    assert showable("x" * SHOWN) == "x" * SHOWN
