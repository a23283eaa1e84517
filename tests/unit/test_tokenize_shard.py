"""Tokenizing one shard: rows kept, rows dropped by reason, nothing rendered again."""

import json
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.tables import TOKENIZED, iter_rows, open_parquet, read_metadata
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
    shard = write_shard(tmp_path, [make_answer("a", tokens=50), make_truncated("b")], max_length=20)
    whole, cut = tokenized_rows(shard)
    assert whole["input_ids"] == QWEN3_PROMPT + [1000 + i for i in range(11)]
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
