"""Exporting one shard: every approved sample once, as it is, in lines that any JSON reader takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from export_shard import export_shard
from rebuild.errors import StepError
from rebuild.files import sha256_file, write_json
from rebuild.tables import iter_rows
from tests.support.shards import Row, Shard, clean_answers, make_answer, rewrite, write_shard


def export(shard: Shard, **settings: Any) -> list[Row]:
    """Approve the shard as it is now, export it, and return the lines."""
    write_json(shard.approved, {"tokenized_sha256": sha256_file(shard.tokenized)})
    target = shard.run / "export" / "00000.jsonl"
    export_shard(shard.tokenized, shard.approved, target, **settings)
    with open(target, encoding="utf-8") as lines:
        rows = list(lines)
    assert all(row.endswith("\n") for row in rows)
    return [json.loads(row) for row in rows]


def test_a_line_has_the_samples_ids_and_mask_and_says_where_it_comes_from(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, [make_answer("a", turn=1, tokens=3)])
    [row] = iter_rows(shard.tokenized)
    assert export(shard) == [
        {
            "id": "a_gen1",
            "primary_id": "a",
            "input_ids": row["input_ids"],
            "loss_mask": [0] * 9 + [1] * 3,
            "metadata": {
                "source": "test",
                "turn": 1,
                "finish_reason": "stop",
                "mask_origin": "engine",
            },
        }
    ]


@pytest.mark.parametrize("batch_rows", [1, 7, 1000])
def test_every_sample_is_there_once_and_in_its_place(tmp_path: Path, batch_rows: int) -> None:
    shard = write_shard(tmp_path, clean_answers(50))
    kept = [
        (row["sample_id"], row["input_ids"], row["loss_mask"]) for row in iter_rows(shard.tokenized)
    ]
    lines = export(shard, batch_rows=batch_rows)
    assert [(line["id"], line["input_ids"], line["loss_mask"]) for line in lines] == kept


def test_a_name_of_any_characters_stays_on_its_line(tmp_path: Path) -> None:
    name = 'a "quoted" \\ name with \u2028 and 🦦'
    [line] = export(write_shard(tmp_path, [make_answer(name)]))
    assert line["id"] == f"{name}_gen0"


def test_a_shard_without_samples_becomes_an_empty_file(tmp_path: Path) -> None:
    assert export(write_shard(tmp_path, [])) == []


def test_samples_that_nobody_approved_are_not_exported(tmp_path: Path) -> None:
    shard = write_shard(tmp_path, clean_answers(3))
    export(shard)
    rewrite(shard.tokenized, lambda rows: rows[:2])
    target = tmp_path / "export" / "again.jsonl"
    with pytest.raises(StepError, match="not the ones that were approved"):
        export_shard(shard.tokenized, shard.approved, target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ({"loss_mask": [0] * 5}, "5 mask values"),
        ({"loss_mask": [0] * 108 + [2]}, "1 of them neither 0 nor 1"),
        ({"loss_mask": [0] * 108 + [None]}, "1 of them neither 0 nor 1"),
        ({"input_ids": [5] * 108 + [-1]}, "1 of them null or negative"),
        ({"input_ids": [5] * 108 + [None]}, "1 of them null or negative"),
        ({"input_ids": [], "loss_mask": []}, "0 ids"),
        ({"input_ids": None, "loss_mask": None}, "0 ids"),
    ],
    ids=["short mask", "odd mask", "null in the mask", "negative id", "null id", "empty", "null"],
)
def test_a_waived_row_that_a_trainer_would_stop_at_stops_here_and_is_named(
    tmp_path: Path, fault: Row, seen: str
) -> None:
    shard = write_shard(
        tmp_path, [*clean_answers(3), make_answer("bad"), *clean_answers(2, seed=1)]
    )
    rewrite(shard.tokenized, lambda rows: [*rows[:3], rows[3] | fault, *rows[4:]])
    with pytest.raises(StepError, match="sample 'bad_gen0' cannot be exported") as stop:
        export(shard)
    assert seen in stop.value.seen
    assert not (tmp_path / "export" / "00000.jsonl").exists()
