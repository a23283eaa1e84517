"""Data sets from elsewhere: what their ids and masks alone tell, and what their model's tokenizer adds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from audit_dataset import audit_dataset
from rebuild.errors import StepError
from rebuild.files import read_json
from tests.support.disaster import Sample, build_samples
from tests.support.shards import failed_checks

ROWS = 100
Change = Callable[[list[int]], list[int]]


@pytest.fixture(scope="module")
def tokenizer(qwen3_tokenizer: Path) -> Any:
    return AutoTokenizer.from_pretrained(qwen3_tokenizer, local_files_only=True)


@pytest.fixture(scope="module")
def sound(tokenizer: Any) -> list[Sample]:
    return build_samples(tokenizer, ROWS, share=0)


def rows_of(samples: list[Sample], **columns: Any) -> list[dict[str, Any]]:
    """Return samples as rows of JSONL."""
    return [
        {"id": s.sample_id, "input_ids": s.input_ids, "loss_mask": s.loss_mask} | columns
        for s in samples
    ]


def judge(folder: Path, rows: list[dict[str, Any]], model: Path | None = None) -> dict[str, Any]:
    """Return the evidence on rows, written as JSONL."""
    path, evidence = folder / "set.jsonl", folder / "evidence.json"
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    try:
        audit_dataset(path, evidence, limits={}, model=model)
    except StepError as refused:
        assert "failed its audit" in refused.what
    found: dict[str, Any] = read_json(evidence)
    return found


def masked(rows: list[dict[str, Any]], change: Change) -> list[dict[str, Any]]:
    return [row | {"loss_mask": change(row["loss_mask"])} for row in rows]


def late(mask: list[int]) -> list[int]:
    """Begin a token late and end with the row."""
    return [value if place != mask.index(1) else 0 for place, value in enumerate(mask)]


def without_end(mask: list[int]) -> list[int]:
    """Leave out the last supervised token."""
    last = len(mask) - 1 - mask[::-1].index(1)
    return [value if place != last else 0 for place, value in enumerate(mask)]


def test_sound_rows_fail_nothing(tmp_path: Path, sound: list[Sample], qwen3_tokenizer: Path):
    for model in (None, qwen3_tokenizer):
        assert failed_checks(judge(tmp_path, rows_of(sound), model)) == set()


def test_a_mask_over_everything_is_caught_without_a_tokenizer(tmp_path: Path, sound: list[Sample]):
    everything = masked(rows_of(sound), lambda mask: [1] * len(mask))
    assert "unprompted_rows" in failed_checks(judge(tmp_path, everything))


def test_a_mask_the_wrong_way_round_is_caught_without_a_tokenizer(
    tmp_path: Path, sound: list[Sample]
):
    inverted = masked(rows_of(sound), lambda mask: [1 - value for value in mask])
    assert "unprompted_rows" in failed_checks(judge(tmp_path, inverted))


def test_a_mask_that_leaves_the_stop_token_out_is_caught_by_the_tokenizer(
    tmp_path: Path, sound: list[Sample], qwen3_tokenizer: Path
):
    rows = masked(rows_of(sound), without_end)
    assert failed_checks(judge(tmp_path, rows, qwen3_tokenizer)) == {"wrong_end_rows"}


def test_masks_that_begin_a_token_late_are_caught_where_answers_begin_differently(
    tmp_path: Path, sound: list[Sample]
):
    rows = [
        row
        | {"input_ids": [*row["input_ids"][:begin], 5000 + number, *row["input_ids"][begin + 1 :]]}
        for number, row in enumerate(rows_of(sound))
        for begin in [row["loss_mask"].index(1)]
    ]
    assert "odd_start_share" not in failed_checks(judge(tmp_path, rows))
    assert "odd_start_share" in failed_checks(judge(tmp_path, masked(rows, late)))


def test_rows_of_several_answers_are_judged_answer_by_answer(
    tmp_path: Path, sound: list[Sample], tokenizer: Any, qwen3_tokenizer: Path
):
    pairs = list(zip(sound[::2], sound[1::2], strict=True))
    rows = [
        {
            "id": one.sample_id,
            "input_ids": one.input_ids + other.input_ids,
            "loss_mask": one.loss_mask + other.loss_mask,
        }
        for one, other in pairs
    ]
    assert failed_checks(judge(tmp_path, rows, qwen3_tokenizer)) == set()
    empty = tokenizer.encode("<think>\n\n</think>\n\nOK.<|im_end|>")
    for row in rows[:20]:
        row["input_ids"], row["loss_mask"] = (
            row["input_ids"] + row["input_ids"][:9] + empty,
            row["loss_mask"] + [0] * 9 + [1] * len(empty),
        )
    assert "empty_answer_share" in failed_checks(judge(tmp_path, rows, qwen3_tokenizer))


def test_cut_rows_are_known_by_their_finish_reason_or_by_their_end(
    tmp_path: Path, sound: list[Sample], qwen3_tokenizer: Path
):
    cut = [
        row | {"input_ids": row["input_ids"][:-9], "loss_mask": row["loss_mask"][:-9]}
        for row in rows_of(sound)
    ]
    assert "truncated_share" in failed_checks(judge(tmp_path, cut, qwen3_tokenizer))
    told = rows_of(sound, metadata={"finish_reason": "length"})
    said = judge(tmp_path, [row | {"finish_reason": "length"} for row in told])
    assert "truncated_share" in failed_checks(said)


@pytest.mark.parametrize("times", [2, 5, ROWS])
def test_prompts_that_are_asked_again_are_counted_however_often(
    tmp_path: Path, sound: list[Sample], times: int
):
    rows = rows_of(sound)
    for number, row in enumerate(rows):
        first = rows[number - number % times]
        begin = first["loss_mask"].index(1)
        own = row["input_ids"][row["loss_mask"].index(1) :]
        row["input_ids"] = first["input_ids"][:begin] + own
        row["loss_mask"] = [0] * begin + [1] * len(own)
    checks = judge(tmp_path, rows)["checks"]
    (check,) = [check for check in checks if check["name"] == "near_duplicate_share"]
    assert (check["count"], check["of"]) == (ROWS - ROWS // times, ROWS)


def test_an_id_that_occurs_again_is_caught(tmp_path: Path, sound: list[Sample]):
    rows = rows_of(sound)
    rows[7]["id"] = rows[3]["id"]
    evidence = judge(tmp_path, rows)
    assert failed_checks(evidence) == {"repeated_id_rows"}
