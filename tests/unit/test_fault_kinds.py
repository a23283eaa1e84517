"""Every kind of fault, built into shards of real tokens, and the checks that catch it; sound shards that none may flag.

Each test of a fault says exactly which checks fail: one that stays silent is a hole, one too many a false alarm.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rebuild.generate.answers import said_ids
from tests.support.conversations import row as message
from tests.support.real_shards import (
    Data,
    Said,
    Speaker,
    clean_data,
    converse,
    cut_short,
    healthy,
    long_talk,
    make_prompt,
    one_turn,
    prose,
    question,
    qwen3,
    qwen36,
    smollm2,
    tool_talk,
    unanswered,
    write_data,
)
from tests.support.shards import Row, failed_checks, rewrite

ROWS = 40
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def qwen(qwen3_tokenizer: Path) -> Speaker:
    return qwen3(qwen3_tokenizer)


@pytest.fixture(scope="module")
def silent(qwen3_tokenizer: Path) -> Speaker:
    """Qwen3 with its thinking switched off."""
    return qwen3(qwen3_tokenizer, enable_thinking=False)


@pytest.fixture(scope="module")
def smol(demo_model: Path) -> Speaker:
    return smollm2(demo_model)


@pytest.fixture(scope="module")
def later_qwen(qwen36_tokenizer: Path) -> Speaker:
    return qwen36(qwen36_tokenizer)


@pytest.fixture(scope="module")
def thinking(qwen: Speaker) -> Data:
    """Sound answers of Qwen3."""
    return clean_data(qwen, ROWS)


@pytest.fixture(scope="module")
def plain(smol: Speaker) -> Data:
    """Sound answers of SmolLM2."""
    return clean_data(smol, ROWS)


@pytest.fixture
def audit(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Write a shard of some data, change its tokenized rows if told to, and audit it."""

    def run(
        speaker: Speaker,
        data: Data,
        tokenized: Callable[[list[Row]], list[Row]] | None = None,
        **how: Any,
    ) -> dict[str, Any]:
        shard = write_data(tmp_path, data)
        if tokenized:
            rewrite(shard.tokenized, tokenized)
        return shard.audit(speaker.target, **how)

    return run


def said_again(
    speaker: Speaker, data: Data, says: Callable[[int, random.Random], str], rows: int
) -> Data:
    """Return data of single questions with the first `rows` answered otherwise."""
    kept = Data(data.prompts[rows:], data.rows[rows:])
    new = Data([], [])
    for place, prompt in enumerate(data.prompts[:rows]):
        new += converse(speaker, prompt, [Said(says(place, random.Random(place)))])
    return new + kept


def response(row: Row, ids: list[int], **more: Any) -> Row:
    """Return a row with another response, counted as the engine would."""
    return row | {"response_token_ids": ids, "completion_tokens": len(ids), **more}


def prompted(row: Row, ids: list[int]) -> Row:
    """Return a row with another prompt, counted as the engine would."""
    return row | {"prompt_token_ids": ids, "prompt_tokens": len(ids)}


def first(change: Callable[[Row], Row], rows: int = 1) -> Callable[[list[Row]], list[Row]]:
    """Return a change of the first tokenized rows."""
    return lambda all_rows: [*map(change, all_rows[:rows]), *all_rows[rows:]]


def masked(row: Row, mask: list[int]) -> Row:
    return row | {"loss_mask": mask, "loss_tokens": sum(mask)}


def named(evidence: dict[str, Any], name: str) -> list[str]:
    """Return the samples that a check names."""
    [check] = [check for check in evidence["checks"] if check["name"] == name]
    return [case["sample_id"] for case in check["evidence"]]


# The disaster


def test_the_disaster_of_87_percent_fails_every_check_that_looks_at_what_is_said(
    audit: Any, qwen: Speaker, thinking: Data
) -> None:
    bad = said_again(qwen, thinking, lambda *_: f"{EMPTY_THOUGHT}OK.", rows=round(0.87 * ROWS))
    evidence = audit(qwen, bad)
    assert failed_checks(evidence) == {
        "empty_answer_share",
        "missing_reasoning_share",
        "mask_sum_mode_share",
        "repeated_answer_share",
        "short_answer_share",
        "median_loss_tokens",
    }
    assert evidence["distribution"]["mask_sum"]["most_frequent"][0] == {"value": 7, "rows": 35}


def test_the_disaster_is_caught_where_the_prompt_already_ended_the_thought(
    audit: Any, qwen: Speaker, silent: Speaker
) -> None:
    bad = said_again(silent, clean_data(silent, ROWS), lambda *_: "OK.", rows=35)
    found = {
        "trivial_answer_share",
        "mask_sum_mode_share",
        "repeated_answer_share",
        "short_answer_share",
        "median_loss_tokens",
    }
    assert failed_checks(audit(silent, bad)) == found
    meant_to_think = {"rendered_otherwise_rows", "missing_reasoning_share"}
    assert failed_checks(audit(qwen, bad)) == found | meant_to_think


# Templates


def test_prompts_that_end_with_an_empty_thought_although_thinking_is_on_are_caught(
    audit: Any, qwen: Speaker, silent: Speaker
) -> None:
    evidence = audit(qwen, clean_data(silent, ROWS))
    assert failed_checks(evidence) == {"rendered_otherwise_rows", "missing_reasoning_share"}
    [check] = [c for c in evidence["checks"] if c["name"] == "rendered_otherwise_rows"]
    assert check["count"] == ROWS
    assert r"'<think>\n\n</think>\n\n' instead of ''" in check["evidence"][0]["seen"]


def test_a_history_whose_answers_are_wrapped_in_empty_thoughts_is_caught(
    audit: Any, qwen: Speaker, thinking: Data
) -> None:
    talk = long_talk(qwen, "talk", turns=3)

    def wrap(place: int, row: Row) -> Row:
        text = qwen.judge.tokenizer.decode(row["prompt_token_ids"])
        opening = "<|im_start|>assistant\n"
        *past, last = text.split(opening)
        return prompted(row, qwen.encode((opening + EMPTY_THOUGHT).join(past) + opening + last))

    evidence = audit(qwen, thinking + talk.changed(wrap))
    assert failed_checks(evidence) == {"rendered_otherwise_rows"}
    assert named(evidence, "rendered_otherwise_rows") == ["talk_gen1", "talk_gen2"]


@pytest.mark.parametrize("opening", ["", EMPTY_THOUGHT])
def test_answers_without_their_thought_or_with_a_blank_one_are_caught(
    audit: Any, qwen: Speaker, thinking: Data, opening: str
) -> None:
    bad = said_again(qwen, thinking, lambda _, chance: opening + prose(chance, 6), rows=16)
    assert failed_checks(audit(qwen, bad)) == {"missing_reasoning_share"}


def test_thoughts_that_the_prompt_opens_and_the_answer_closes_at_once_are_caught(
    audit: Any, later_qwen: Speaker
) -> None:
    data = clean_data(later_qwen, ROWS)
    bad = said_again(
        later_qwen, data, lambda _, chance: f"\n</think>\n\n{prose(chance, 6)}", rows=16
    )
    assert failed_checks(audit(later_qwen, data)) == set()
    assert failed_checks(audit(later_qwen, bad)) == {"missing_reasoning_share"}


def test_a_blank_thought_is_no_fault_where_thinking_is_off(audit: Any, silent: Speaker) -> None:
    evidence = audit(silent, clean_data(silent, 20))
    assert failed_checks(evidence) == set()


def test_another_system_prompt_than_the_messages_have_is_caught(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    def inject(place: int, row: Row) -> Row:
        said = [message("system", "Answer like a pirate."), *row["messages"]]
        return prompted(row, smol.render(said, None))

    evidence = audit(smol, plain.changed(inject, rows=1))
    assert failed_checks(evidence) == {"rendered_otherwise_rows"}
    assert named(evidence, "rendered_otherwise_rows") == ["p0_gen0"]


# Ends


def test_an_answer_whose_stop_token_is_missing_is_caught(
    audit: Any, qwen: Speaker, thinking: Data
) -> None:
    unended = thinking.changed(lambda _, r: response(r, r["response_token_ids"][:-1]), rows=1)
    evidence = audit(qwen, unended)
    assert failed_checks(evidence) == {"wrong_end_rows", "text_mismatch_rows"}
    assert named(evidence, "wrong_end_rows") == ["p0_gen0"]


def test_a_stop_token_that_was_lost_on_the_way_to_training_is_caught(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    def lose(row: Row) -> Row:
        shorter = masked(row, row["loss_mask"][:-1])
        return shorter | {"input_ids": row["input_ids"][:-1], "seq_len": row["seq_len"] - 1}

    evidence = audit(smol, plain, first(lose))
    assert failed_checks(evidence) == {"wrong_end_rows", "usage_mismatch_rows"}


def test_a_stop_token_that_was_added_to_a_cut_answer_is_caught(
    audit: Any, qwen: Speaker, thinking: Data
) -> None:
    cut = cut_short(qwen, "cut")
    ended = cut.changed(lambda _, r: response(r, [*r["response_token_ids"], qwen.stop_id]))
    assert failed_checks(audit(qwen, thinking + cut)) == set()
    evidence = audit(qwen, thinking + ended)
    assert failed_checks(evidence) == {"wrong_end_rows"}
    assert named(evidence, "wrong_end_rows") == ["cut_gen0"]


@pytest.mark.parametrize("served", ["reasoning", "content"])
def test_thoughts_that_never_end_and_count_as_success_are_caught(
    audit: Any, qwen: Speaker, thinking: Data, served: str
) -> None:
    def call_it_ok(place: int, row: Row) -> Row:
        ids = qwen.encode(f"<think>\n{prose(random.Random(place), 9)}")
        texts = {"reasoning": None, "content": "", served: qwen.judge.decode(ids)}
        return response(row, [*ids, qwen.stop_id], **texts)

    found = {"empty_answer_share"}
    if served == "content":
        found |= {"missing_reasoning_share", "stray_marker_share"}
    assert failed_checks(audit(qwen, thinking.changed(call_it_ok, rows=16))) == found


def test_cut_answers_that_count_as_success_are_counted_as_truncated(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    def cut(place: int, row: Row) -> Row:
        ids = row["response_token_ids"][:-1][: 34 + place]
        return response(row, ids, finish_reason="length", content=smol.judge.decode(ids))

    assert failed_checks(audit(smol, plain.changed(cut, rows=30))) == {"truncated_share"}


# Masks


def test_a_mask_that_is_shifted_by_one_is_caught_in_either_direction(
    audit: Any, qwen: Speaker, thinking: Data
) -> None:
    early = first(lambda row: masked(row, [*row["loss_mask"][1:], 0]), ROWS)
    late = first(lambda row: masked(row, [0, *row["loss_mask"][:-1]]), ROWS)
    caught = {"usage_mismatch_rows", "wrong_end_rows"}
    assert failed_checks(audit(qwen, thinking, early)) == caught
    assert failed_checks(audit(qwen, thinking, late)) == {"usage_mismatch_rows"}


def test_a_mask_over_the_prompt_is_caught(audit: Any, smol: Speaker, plain: Data) -> None:
    everything = first(lambda row: masked(row, [1] * row["seq_len"]))
    evidence = audit(smol, plain, everything)
    assert failed_checks(evidence) == {"usage_mismatch_rows", "unprompted_rows"}
    assert named(evidence, "usage_mismatch_rows") == ["p0_gen0"]


def test_a_mask_with_a_hole_is_caught(audit: Any, qwen: Speaker, thinking: Data) -> None:
    holed = first(lambda row: masked(row, [*row["loss_mask"][:-9], 0, *row["loss_mask"][-8:]]))
    found = {"usage_mismatch_rows", "scattered_mask_rows"}
    assert failed_checks(audit(qwen, thinking, holed)) == found


def test_a_mask_without_two_neighbouring_ones_is_caught(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    def every_other(row: Row) -> Row:
        return masked(row, [flag * (n % 2) for n, flag in enumerate(row["loss_mask"])])

    def last_only(row: Row) -> Row:
        return masked(row, [0] * (row["seq_len"] - 1) + [1])

    def none_at_all(row: Row) -> Row:
        return masked(row, [0] * row["seq_len"])

    found = {"usage_mismatch_rows", "unpaired_mask_rows"}
    assert failed_checks(audit(smol, plain, first(every_other))) == found | {"scattered_mask_rows"}
    assert failed_checks(audit(smol, plain, first(last_only))) == found
    assert failed_checks(audit(smol, plain, first(none_at_all))) == found | {"scattered_mask_rows"}


def test_ids_that_are_not_the_engines_are_caught_although_every_count_is(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    def other_word(place: int) -> Callable[[Row], Row]:
        def change(row: Row) -> Row:
            ids = list(row["input_ids"])
            ids[place] = ids[place] + 1
            return row | {"input_ids": ids}

        return change

    for place in (4, -5):  # in the prompt, in the answer
        evidence = audit(smol, plain, first(other_word(place)))
        assert failed_checks(evidence) == {"usage_mismatch_rows"}
        assert named(evidence, "usage_mismatch_rows") == ["p0_gen0"]


def test_training_rows_with_each_others_tokens_are_caught(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    """Both rows are as long as before, so that only the ids themselves can tell."""
    one, other = (r for r in plain.rows[:2])
    length = min(len(one["response_token_ids"]), len(other["response_token_ids"]))
    width = min(len(one["prompt_token_ids"]), len(other["prompt_token_ids"]))

    def alike(place: int, row: Row) -> Row:
        ids = [*row["response_token_ids"][: length - 1], smol.stop_id]
        said = response(row, ids, content=smol.judge.decode(ids[:-1]))
        return prompted(said, row["prompt_token_ids"][-width:])

    def swap(rows: list[Row]) -> list[Row]:
        ids = [rows[1]["input_ids"], rows[0]["input_ids"]]
        return [row | {"input_ids": own} for row, own in zip(rows[:2], ids, strict=True)] + rows[2:]

    data = plain.changed(alike, rows=2)
    before, after = audit(smol, data), audit(smol, data, swap)
    assert failed_checks(after) - failed_checks(before) == {"usage_mismatch_rows"}
    assert named(after, "usage_mismatch_rows") == ["p0_gen0", "p1_gen0"]


@pytest.mark.parametrize("usage", ["prompt_tokens", "completion_tokens"])
def test_one_token_that_the_engine_did_not_count_is_caught(
    audit: Any, qwen: Speaker, thinking: Data, usage: str
) -> None:
    off_by_one = thinking.changed(lambda _, row: row | {usage: row[usage] + 1}, rows=1)
    evidence = audit(qwen, off_by_one)
    assert failed_checks(evidence) == {"usage_mismatch_rows"}
    assert named(evidence, "usage_mismatch_rows") == ["p0_gen0"]


# Repetition


def test_one_answer_to_many_prompts_is_caught(audit: Any, qwen: Speaker, thinking: Data) -> None:
    canned = healthy(qwen, random.Random(3)).text
    bad = said_again(qwen, thinking, lambda *_: canned, rows=16)
    assert failed_checks(audit(qwen, bad)) == {"repeated_answer_share", "mask_sum_mode_share"}


def test_answers_that_were_copied_to_one_other_prompt_each_are_caught(
    audit: Any, qwen: Speaker, thinking: Data
) -> None:
    bad = said_again(
        qwen, thinking, lambda place, _: healthy(qwen, random.Random(place // 2)).text, rows=20
    )
    assert failed_checks(audit(qwen, bad)) == {"repeated_answer_share"}


def loop(chance: random.Random) -> str:
    """Return a sentence said over and over."""
    return prose(chance, 2) + chance.randint(30, 60) * f" {prose(chance, 1)}"


def loop_at_the_end(chance: random.Random) -> str:
    """Return a long answer that gets stuck in its last third."""
    return prose(chance, 60) + chance.randint(20, 25) * f" {prose(chance, 1)}"


def numbered_list(chance: random.Random) -> str:
    """Return a list whose entries differ only in their number, which few 8-grams see."""
    entries = range(1, chance.randint(100, 300))
    return "\n".join(f"{n}. I am sorry for the delay." for n in entries)


@pytest.mark.parametrize("says", [loop, loop_at_the_end, numbered_list])
@pytest.mark.parametrize("model", ["qwen", "smol"])
def test_answers_that_loop_are_caught(
    audit: Any,
    request: pytest.FixtureRequest,
    model: str,
    says: Callable[[random.Random], str],
) -> None:
    speaker = request.getfixturevalue(model)
    data = request.getfixturevalue({"qwen": "thinking", "smol": "plain"}[model])
    stuck = said_again(
        speaker, data, lambda _, chance: speaker.wrapped("Let me see.", says(chance)), rows=30
    )
    evidence = audit(speaker, stuck)
    assert failed_checks(evidence) == {"looping_share"}
    [check] = [check for check in evidence["checks"] if check["name"] == "looping_share"]
    assert check["count"] == 30


# Tokenizers


def test_answers_by_another_models_tokenizer_are_caught(
    audit: Any, qwen: Speaker, smol: Speaker, thinking: Data
) -> None:
    def in_smollm2(place: int, row: Row) -> Row:
        text = qwen.judge.tokenizer.decode(said_ids(row))
        return response(row, [*smol.encode(text), smol.stop_id])

    found = {"text_mismatch_rows", "wrong_end_rows"}
    assert failed_checks(audit(qwen, thinking.changed(in_smollm2))) == found


def test_a_whole_shard_of_another_model_is_caught(
    audit: Any, qwen: Speaker, smol: Speaker, thinking: Data, plain: Data
) -> None:
    found = {"text_mismatch_rows", "wrong_end_rows", "rendered_otherwise_rows"}
    assert failed_checks(audit(qwen, plain)) == found | {"missing_reasoning_share"}
    evidence = audit(smol, thinking)
    assert failed_checks(evidence) == found | {"foreign_id_rows", "stray_marker_share"}
    assert len(named(evidence, "foreign_id_rows")) == 10


def test_one_id_beyond_the_vocabulary_is_caught_and_named(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    def foreign(row: Row) -> Row:
        return row | {"input_ids": [49152, *row["input_ids"][1:]]}

    evidence = audit(smol, plain, first(foreign))
    assert failed_checks(evidence) == {"foreign_id_rows", "usage_mismatch_rows"}
    assert named(evidence, "foreign_id_rows") == ["p0_gen0"]


# Wrong rows


def swapped(data: Data, *columns: str) -> Data:
    """Return the data with these columns of its first two rows exchanged."""
    partner = {0: data.rows[1], 1: data.rows[0]}
    return data.changed(
        lambda place, row: row | {name: partner[place][name] for name in columns}, rows=2
    )


PROMPT = ("prompt_token_ids", "prompt_tokens")
ANSWER = ("response_token_ids", "completion_tokens", "reasoning_tokens")
TEXT = ("reasoning", "content")


@pytest.mark.parametrize(
    ("columns", "caught"),
    [
        (("messages",), {"asked_otherwise_rows", "rendered_otherwise_rows"}),
        (PROMPT, {"rendered_otherwise_rows"}),
        (("messages", *PROMPT), {"asked_otherwise_rows"}),
        (("messages", *PROMPT, *ANSWER, *TEXT), {"asked_otherwise_rows"}),
        (ANSWER, {"text_mismatch_rows"}),
        (TEXT, {"text_mismatch_rows"}),
    ],
    ids=["messages", "prompt ids", "prompts", "whole rows", "answer ids", "texts"],
)
def test_a_prompt_that_is_answered_in_another_ones_row_is_caught(
    audit: Any, qwen: Speaker, thinking: Data, columns: tuple[str, ...], caught: set[str]
) -> None:
    evidence = audit(qwen, swapped(thinking, *columns))
    assert failed_checks(evidence) == caught
    for name in caught:
        assert named(evidence, name) == ["p0_gen0", "p1_gen0"]


# Texts


@pytest.mark.parametrize("text", ["reasoning", "content"])
def test_one_word_that_the_ids_do_not_say_is_caught(
    audit: Any, qwen: Speaker, thinking: Data, text: str
) -> None:
    edited = thinking.changed(lambda _, row: row | {text: f"{row[text]} Indeed."}, rows=1)
    evidence = audit(qwen, edited)
    assert failed_checks(evidence) == {"text_mismatch_rows"}
    assert named(evidence, "text_mismatch_rows") == ["p0_gen0"]


def with_marker(speaker: Speaker, row: Row, marker: list[int]) -> Row:
    """Return a row with ids put in before its last words."""
    ids = row["response_token_ids"]
    changed = [*ids[:-6], *marker, *ids[-6:]]
    tail = speaker.judge.decode([*marker, *ids[-6:-1]])
    kept = row["content"].removesuffix(speaker.judge.decode(ids[-6:-1]))
    return response(row, changed, content=kept + tail)


@pytest.mark.parametrize("marker", ["<think>", "</think>", "<|im_start|>", "<|endoftext|>"])
def test_markers_of_a_conversation_inside_answers_are_caught(
    audit: Any, qwen: Speaker, thinking: Data, marker: str
) -> None:
    [token] = qwen.encode(marker)
    strayed = thinking.changed(lambda _, row: with_marker(qwen, row, [token]), rows=8)
    evidence = audit(qwen, strayed)
    assert failed_checks(evidence) == {"stray_marker_share"}
    assert named(evidence, "stray_marker_share") == [f"p{n}_gen0" for n in range(8)]


def test_markers_that_answers_spell_out_are_caught(
    audit: Any, qwen: Speaker, thinking: Data
) -> None:
    spelled = [*qwen.encode("<|"), *qwen.encode("im_start"), *qwen.encode("|>user")]
    strayed = thinking.changed(lambda _, row: with_marker(qwen, row, spelled), rows=8)
    assert failed_checks(audit(qwen, strayed)) == {"stray_marker_share"}


def test_a_model_that_runs_on_into_the_users_next_turn_is_caught(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    def run_on(place: int, chance: random.Random) -> str:
        return f"{prose(chance, 5)}<|im_end|>\n<|im_start|>user\n{question(chance)}"

    assert failed_checks(audit(smol, said_again(smol, plain, run_on, rows=8))) == {
        "stray_marker_share"
    }


RUSSIAN = [
    "ветер",
    "город",
    "зимой",
    "стоит",
    "мост",
    "через",
    "реку",
    "старый",
    "дом",
    "белый",
    "лес",
    "поёт",
    "тихо",
    "окно",
    "вечером",
]


def russian(place: int, chance: random.Random) -> str:
    sentences = [" ".join(chance.sample(RUSSIAN, 6)) for _ in range(chance.randint(5, 12))]
    return ". ".join(sentences) + "."


def test_answers_in_another_script_than_their_questions_are_caught(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    evidence = audit(smol, said_again(smol, plain, russian, rows=16))
    assert failed_checks(evidence) == {"other_script_share"}
    [check] = [check for check in evidence["checks"] if check["name"] == "other_script_share"]
    assert check["evidence"][0]["seen"].startswith("Cyrillic, asked in Latin: ")


# Prompts and sources


def test_prompts_that_are_asked_again_with_another_word_are_caught(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    chance = random.Random(7)
    again = Data([], [])
    for place, prompt in enumerate(plain.prompts[:16]):
        asked = prompt["messages"][0]["content"].upper() + " Thanks"
        again += one_turn(smol, f"again{place}", asked, healthy(smol, chance))
    evidence = audit(smol, plain + again)
    assert failed_checks(evidence) == {"near_duplicate_share"}
    [check] = [check for check in evidence["checks"] if check["name"] == "near_duplicate_share"]
    assert (check["count"], check["of"]) == (16, ROWS + 16)
    assert check["evidence"][0] == {
        "sample_id": "again0_gen0",
        "seen": "asks nearly what p0_gen0 asks",
    }


def test_a_source_that_leaves_nothing_is_caught_although_it_is_small(
    audit: Any, smol: Speaker
) -> None:
    data = clean_data(smol, 200, seed=5)
    for place in range(15):
        lost = unanswered(smol, f"lost{place}", "skipped", "prompt_too_long: 9000 tokens")
        data += lost.changed(lambda _, row: row | {"source": "contracts"})
    evidence = audit(smol, data)
    assert failed_checks(evidence) == {"source_loss_share"}
    [check] = [check for check in evidence["checks"] if check["name"] == "source_loss_share"]
    assert check["seen"].startswith("15 of 15 rows of source 'contracts'")


def test_a_prompt_on_the_held_out_list_is_caught_also_as_a_later_question(
    tmp_path: Path, audit: Any, smol: Speaker, plain: Data
) -> None:
    chance = random.Random(11)
    benchmark = [question(chance) for _ in range(2)]
    words = benchmark[0].split()
    listed = tmp_path / "benchmark.txt"
    listed.write_text("\n".join([*benchmark, "Sort these four numbers!"]) + "\n")
    long = f"Please: {' '.join(words[2:18])} and so on"
    later = make_prompt("later", [message("user", question(chance)), message("user", benchmark[1])])
    asked = [
        one_turn(smol, "long", long, healthy(smol, chance)),
        one_turn(smol, "short", "sort THESE four numbers", healthy(smol, chance)),
        one_turn(smol, "part", "Sort these four numbers quickly", healthy(smol, chance)),
        one_turn(smol, "few", " ".join(words[2:14]), healthy(smol, chance)),  # twelve words
        converse(smol, later, [healthy(smol, chance), healthy(smol, chance)]),
    ]
    evidence = audit(smol, sum(asked, plain), held_out=listed)
    assert failed_checks(evidence) == {"contaminated_rows"}
    assert named(evidence, "contaminated_rows") == ["long_gen0", "short_gen0", "later_gen1"]
    [check] = [check for check in evidence["checks"] if check["name"] == "contaminated_rows"]
    assert check["of"] == ROWS + 5
    assert failed_checks(audit(smol, plain, held_out=listed)) == set()


def test_answers_of_other_lengths_than_the_canarys_are_caught(
    tmp_path: Path, smol: Speaker
) -> None:
    canary = write_data(tmp_path, clean_data(smol, 200, seed=1), "canary")
    assert failed_checks(canary.audit(smol.target)) == set()
    same = write_data(tmp_path, clean_data(smol, 200, seed=2, name="q"), "00000")
    assert failed_checks(same.audit(smol.target, canary=canary.digest)) == set()
    wordy = said_again(
        smol,
        clean_data(smol, 200, seed=3),
        lambda _, chance: prose(chance, chance.randint(14, 30)),
        rows=200,
    )
    longer = write_data(tmp_path, wordy, "00001")
    evidence = longer.audit(smol.target, canary=canary.digest)
    assert failed_checks(evidence) == {"length_shift"}
    [check] = [check for check in evidence["checks"] if check["name"] == "length_shift"]
    assert "(median 374, in the canary 125)" in check["seen"]


# Sound data

CODE = """Here is the loop:

```python
for name in names:
    print(name)
    print(name)
    print(name)
for name in names:
    print(name)
```

It prints every name four times."""
TABLE = """| day | open | closed |
|-----|------|--------|
| Monday | 9:00 | 17:00 |
| Tuesday | 9:00 | 17:00 |
| Wednesday | 9:00 | 17:00 |
| Thursday | 9:00 | 17:00 |
| Friday | 9:00 | 13:00 |

We are closed at weekends."""
UNUSUAL = {
    "emoji": "Otters 🦦 hold hands 👩‍👩‍👧‍👦 while they sleep 😴, which is 🇩🇪 for lovely. {}",
    "decomposed accents": "Cafe\u0301 nin\u0303o \u2126 \ufb01 A\u030angstro\u0308m, said twice. {}",
    "code": CODE + "\n\n{}",
    "table": TABLE + "\n\n{}",
    "leading newlines": "\n\n\n{}",
    "trailing white space": "{} \n\n",
    "angle brackets": "Use a < b && c > d, or <b>bold</b>, <|> and </ think >. {}",
    "other scripts, quoted": "The word is Москва, 東京 or باريس. {}",
    "formulas": "Then $\\sum_{{i=0}}^n x_i^2 \\le \\frac{{1}}{{2}}$ \u2014 always. {}",
}


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 5, 20, 200])
@pytest.mark.parametrize("model", ["qwen", "smol"])
def test_sound_answers_fail_no_check(
    audit: Any, request: pytest.FixtureRequest, model: str, rows: int, seed: int
) -> None:
    speaker = request.getfixturevalue(model)
    evidence = audit(speaker, clean_data(speaker, rows, seed))
    assert failed_checks(evidence) == set()
    assert evidence["verdict"] == "pass"


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("model", ["qwen", "later_qwen", "smol"])
def test_conversations_and_cut_answers_fail_no_check(
    audit: Any, request: pytest.FixtureRequest, model: str, seed: int
) -> None:
    speaker = request.getfixturevalue(model)
    data = clean_data(speaker, 10, seed)
    for place in range(5):
        data += long_talk(speaker, f"talk{place}", turns=2 + place % 3, seed=seed)
        data += cut_short(speaker, f"cut{place}", seed)
        if speaker.thinks:
            data += tool_talk(speaker, f"tool{place}", seed)
    statuses = {row["status"] for row in data.rows}
    assert statuses >= {"ok", "truncated"} | ({"tool_calls"} if speaker.thinks else set())
    assert failed_checks(audit(speaker, data)) == set()


@pytest.mark.parametrize("model", ["qwen", "smol"])
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_but_sound_texts_fail_no_check(
    audit: Any, request: pytest.FixtureRequest, model: str, kind: str
) -> None:
    speaker = request.getfixturevalue(model)
    data = clean_data(speaker, 2)
    for place in range(12):
        chance = random.Random(place)
        text = UNUSUAL[kind].format(prose(chance, chance.randint(2, 12)))
        said = Said(speaker.wrapped(prose(chance, 3), text))
        data += one_turn(speaker, f"odd{place}", question(chance), said)
    assert {row["error"] for row in data.rows} == {None}
    assert failed_checks(audit(speaker, data)) == set()


def test_answers_that_were_cut_inside_an_emoji_fail_no_check(
    audit: Any, smol: Speaker, plain: Data
) -> None:
    def cut(place: int, row: Row) -> Row:
        ids = smol.encode(f"{prose(random.Random(place), 5)} 👩‍👩‍👧‍👦")[: -1 - place]
        content = smol.judge.decode(ids)
        return response(row, ids, content=content, finish_reason="length", status="truncated")

    data = plain.changed(cut, rows=6)
    assert sum(row["content"].endswith("�") for row in data.rows) >= 2
    assert failed_checks(audit(smol, data)) == set()


def test_sound_answers_cut_to_the_length_of_a_row_fail_no_check(
    tmp_path: Path, qwen: Speaker, thinking: Data
) -> None:
    shard = write_data(tmp_path, thinking, max_length=250)
    evidence = shard.audit(qwen.target)
    assert evidence["distribution"]["seq_len"]["quantiles"]["1"] == 250
    assert failed_checks(evidence) == set()
