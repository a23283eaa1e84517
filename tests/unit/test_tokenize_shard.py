"""Tokenizing one shard: rows kept, rows dropped by reason, nothing rendered again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.tables import TOKENIZED, iter_rows, open_parquet, read_metadata
from rebuild.texts.rows import TextRows
from rebuild.tokens.chat import load_tokenizer, render_prompt
from stage_model import stage_model
from tests.support.shards import (
    QWEN3_DISASTER,
    QWEN3_PROMPT,
    Row,
    Shard,
    clean_answers,
    make_answer,
    make_disaster,
    make_truncated,
    make_unanswered,
    write_shard,
)


def tokenized_rows(shard: Shard) -> list[Row]:
    return list(iter_rows(shard.tokenized))


def counts(shard: Shard) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(read_metadata(shard.tokenized)["counts"])
    return told


def dropped(shard: Shard) -> dict[str, int]:
    return {reason: count for reason, count in counts(shard)["dropped"].items() if count}


def test_a_row_is_the_engines_prompt_and_response_with_mask_0_and_1(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [make_disaster("a")])
    assert tokenized_rows(shard) == [
        {
            "sample_id": "a_gen0",
            "prompt_id": "a",
            "turn": 0,
            "source": "test",
            "input_ids": QWEN3_PROMPT + QWEN3_DISASTER,
            "loss_mask": [0] * 9 + [1] * 7,
            "seq_len": 16,
            "loss_tokens": 7,
            "mask_origin": "engine",
            "finish_reason": "stop",
        }
    ]


def test_the_file_has_the_columns_and_types_of_the_contract(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(3))
    assert open_parquet(shard.tokenized).schema_arrow.equals(TOKENIZED)


def test_answers_that_finished_called_a_tool_or_were_cut_become_rows_in_order(
    tmp_path: Path,
) -> None:
    tool = make_answer("b", status="tool_calls", finish_reason="tool_calls", tool_calls="[{}]")
    answers = [make_answer("a"), tool, make_truncated("c"), make_answer("d", turn=0)]
    rows = tokenized_rows(write_shard(tmp_path, answers))
    assert [row["sample_id"] for row in rows] == ["a_gen0", "b_gen0", "c_gen0", "d_gen0"]
    assert [row["finish_reason"] for row in rows] == ["stop", "tool_calls", "length", "stop"]


def test_rows_without_an_answer_are_dropped_and_counted_by_reason(tmp_path: Path) -> None:
    answers = [
        make_answer("a"),
        make_unanswered("b", "error"),
        make_unanswered("c", "skipped"),
        make_unanswered("d", "skipped"),
    ]
    shard = write_shard(tmp_path, answers)
    assert counts(shard) == {
        "in": 4,
        "out": 1,
        "dropped": {
            "status_error": 1,
            "status_skipped": 2,
            "unstable_template": 0,
            "truncated": 0,
            "too_few_loss_tokens": 0,
            "too_long": 0,
        },
    }
    assert read_metadata(shard.tokenized)["rows"] == "1"


def test_truncated_answers_are_dropped_only_on_request(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [make_answer("a"), make_truncated("b")], truncated="drop")
    assert [row["sample_id"] for row in tokenized_rows(shard)] == ["a_gen0"]
    assert dropped(shard) == {"truncated": 1}


def test_long_rows_are_cut_on_the_right_and_their_finish_reason_still_tells(
    tmp_path: Path,
) -> None:
    long = make_answer("a", tokens=50)
    shard = write_shard(tmp_path, [long, make_truncated("b")], max_length=20)
    whole, cut = tokenized_rows(shard)
    assert whole["input_ids"] == QWEN3_PROMPT + long["response_token_ids"][:11]
    assert (whole["seq_len"], whole["loss_tokens"], whole["finish_reason"]) == (20, 11, "stop")
    assert sum(cut["loss_mask"]) == cut["loss_tokens"] == 11
    assert cut["finish_reason"] == "length"


def test_rows_are_left_whole_without_a_maximum_length(tmp_path: Path) -> None:
    [row] = tokenized_rows(write_shard(tmp_path, [make_answer("a", tokens=9000)], max_length=None))
    assert (row["seq_len"], row["loss_tokens"]) == (9009, 9000)


@pytest.mark.parametrize(
    ("tokens", "max_length", "fate"),
    [
        (4, 100, {}),
        (3, 100, {"too_few_loss_tokens": 1}),
        (50, 13, {}),
        (50, 12, {"too_long": 1}),
        (50, 5, {"too_long": 1}),
        (3, 5, {"too_few_loss_tokens": 1}),
    ],
)
def test_rows_left_with_too_few_supervised_tokens_are_dropped_and_the_reason_told(
    tmp_path: Path, tokens: int, max_length: int, fate: dict[str, int]
) -> None:
    shard = write_shard(
        tmp_path, [make_answer("a", tokens=tokens)], max_length=max_length, min_loss_tokens=4
    )
    assert dropped(shard) == fate
    assert len(tokenized_rows(shard)) == 1 - sum(fate.values())


def test_the_metadata_carries_where_the_rows_come_from(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(1), fingerprint="tokenized-1", max_length=None)
    metadata = read_metadata(shard.tokenized)
    assert metadata["fingerprint"] == "tokenized-1"
    assert metadata["generated_fingerprint"] == "generated-1"
    assert metadata["model_sha256"] == "model-1"
    assert metadata["max_length"] == "null"


@pytest.mark.parametrize(
    "missing",
    [
        {"response_token_ids": None},
        {"prompt_token_ids": None},
        {"prompt_token_ids": []},
        {"response_token_ids": [], "completion_tokens": 5},
    ],
)
def test_an_answer_without_ids_stops_and_the_sample_is_named(tmp_path: Path, missing: Row) -> None:
    row = make_answer("b") | missing
    with pytest.raises(StepError, match=r"sample b_gen0 has no token ids") as stop:
        write_shard(tmp_path, [make_answer("a"), row])
    assert "return_token_ids" in stop.value.remedy
    assert not Shard(tmp_path).tokenized.exists()


def test_an_answer_of_no_tokens_is_dropped_not_taken_for_missing_ids(tmp_path: Path) -> None:
    silent = make_answer("a", response_token_ids=[], content="")
    assert dropped(write_shard(tmp_path, [silent])) == {"too_few_loss_tokens": 1}


def test_an_unknown_status_stops_and_the_sample_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepError, match="sample b_gen0 has an unknown status") as stop:
        write_shard(tmp_path, [make_answer("a"), make_answer("b", status="aborted")])
    assert "aborted" in stop.value.seen


def test_a_shard_without_rows_becomes_a_file_without_rows(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [])
    assert tokenized_rows(shard) == []
    assert counts(shard)["in"] == 0


def test_the_same_answers_give_the_same_bytes_again(tmp_path: Path) -> None:
    first = write_shard(tmp_path / "1", clean_answers(20)).tokenized.read_bytes()
    assert write_shard(tmp_path / "2", clean_answers(20)).tokenized.read_bytes() == first


def test_batches_of_any_size_give_the_same_rows(tmp_path: Path) -> None:
    answers = [*clean_answers(7), make_unanswered("x", "error"), make_truncated("y")]
    whole = tokenized_rows(write_shard(tmp_path / "whole", answers, max_length=60))
    pieces = tokenized_rows(write_shard(tmp_path / "pieces", answers, max_length=60, batch_rows=2))
    assert pieces == whole


# Answers that came without ids


@pytest.fixture(scope="session")
def texts(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], TextRows]:
    """What makes ids of texts by the demo model's own template, as the rule would."""
    manifest = tmp_path_factory.mktemp("model") / "manifest.json"
    stage_model(
        str(demo_model),
        manifest,
        revision=None,
        stage_to=None,
        models_dir=manifest.parent / "models",
        trust_remote_code=False,
        layers=None,
        generated=manifest.parent / "generated",
        fingerprint="test",
    )
    return lambda: TextRows(manifest, {}, keep_reasoning=False)


def without_ids(prompt: str, content: str, **changes: Any) -> Row:
    """Return an answer that a server gave as text alone, to a short question."""
    nothing: dict[str, Any] = {"prompt_token_ids": [], "response_token_ids": []}
    asked = {"messages": [{"role": "user", "content": "Hi"}], "completion_tokens": 9}
    return make_answer(prompt, content=content, **nothing) | asked | changes


def test_an_answer_without_ids_becomes_a_row_by_the_template_beside_those_of_the_engine(
    tmp_path: Path, texts: Any, demo_model: Path
) -> None:
    answers = [make_answer("a"), without_ids("b", "Blue."), make_disaster("c")]
    shard = write_shard(tmp_path, answers, texts=texts())
    rows = tokenized_rows(shard)
    assert [(row["sample_id"], row["mask_origin"]) for row in rows] == [
        ("a_gen0", "engine"),
        ("b_gen0", "template"),
        ("c_gen0", "engine"),
    ]
    tokenizer = load_tokenizer(demo_model, False)
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "Hi"}], None, {})
    assert rows[1]["input_ids"] == prompt + tokenizer.encode("Blue.<|im_end|>")
    assert rows[1]["loss_mask"] == [0] * len(prompt) + [1] * rows[1]["loss_tokens"]
    assert rows[2]["input_ids"] == QWEN3_PROMPT + QWEN3_DISASTER
    assert open_parquet(shard.tokenized).schema_arrow.equals(TOKENIZED)


def test_the_engines_rows_are_the_same_with_and_without_the_template(
    tmp_path: Path, texts: Any
) -> None:
    answers = [*clean_answers(7), make_unanswered("x", "error"), make_truncated("y")]
    plain = tokenized_rows(write_shard(tmp_path / "plain", answers))
    allowed = texts()
    shard = write_shard(tmp_path / "allowed", answers, texts=allowed)
    assert tokenized_rows(shard) == plain
    assert "template" not in vars(allowed)  # no tokenizer was loaded


def test_answers_that_the_template_does_not_render_are_dropped_counted_and_named(
    tmp_path: Path, texts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = [without_ids(f"bad{n}", "Blue <|im_end|> or not.") for n in range(7)]
    lost = without_ids("lost", "Blue.", reasoning="So.")
    answers = [without_ids("b", "Blue."), *bad, lost, make_answer("a")]
    shard = write_shard(tmp_path, answers, texts=texts(), batch_rows=3)
    assert [row["sample_id"] for row in tokenized_rows(shard)] == ["b_gen0", "a_gen0"]
    assert dropped(shard) == {"unstable_template": 8}
    told = json.loads(read_metadata(shard.tokenized)["template"])
    assert told["rows"] == 9
    assert told["unstable"] == {"special_token": 7, "thought_changed": 1}
    log = capsys.readouterr().err
    assert "bad0_gen0: special_token: <|im_end|> in 'Blue <|im_end|> or not.'" in log
    assert "bad4_gen0" in log and "bad5_gen0" not in log and "… and 3 more" in log


def test_a_system_prompt_that_no_message_holds_is_reported_not_refused(
    tmp_path: Path, texts: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    system = {"role": "system", "content": "Be kind."}
    own = [system, {"role": "user", "content": "Hi"}]
    answers = [without_ids("a", "Blue."), without_ids("b", "Blue.", messages=own)]
    shard = write_shard(tmp_path, answers, texts=texts())
    assert counts(shard)["out"] == 2
    injected = json.loads(read_metadata(shard.tokenized)["template"])["injected_system"]
    assert injected["rows"] == 1 and "AI assistant named SmolLM" in injected["text"]
    assert "AI assistant named SmolLM" in capsys.readouterr().err


def test_limits_hold_for_rows_by_the_template_too(tmp_path: Path, texts: Any) -> None:
    cut = without_ids("cut", "Blue as", status="truncated", finish_reason="length")
    long = without_ids("long", "word " * 80 + "end.")
    answers = [cut, long, without_ids("none", "")]
    shard = write_shard(tmp_path, answers, texts=texts(), truncated="drop", max_length=40)
    assert [(row["sample_id"], row["seq_len"]) for row in tokenized_rows(shard)] == [
        ("long_gen0", 40)
    ]
    assert dropped(shard) == {"truncated": 1, "too_few_loss_tokens": 1}


@pytest.mark.parametrize("lacking", ["prompt_token_ids", "response_token_ids"])
def test_half_of_the_ids_are_no_text_row(tmp_path: Path, texts: Any, lacking: str) -> None:
    with pytest.raises(StepError, match="sample a_gen0 has no token ids"):
        write_shard(tmp_path, [make_answer("a") | {lacking: []}], texts=texts())


def test_batches_of_any_size_give_the_same_rows_by_the_template(tmp_path: Path, texts: Any) -> None:
    answers = [without_ids(f"p{n}", "Blue." * n, turn=n % 3) for n in range(1, 9)]
    whole = write_shard(tmp_path / "whole", answers, texts=texts())
    pieces = write_shard(tmp_path / "pieces", answers, texts=texts(), batch_rows=3)
    assert tokenized_rows(pieces) == tokenized_rows(whole)
