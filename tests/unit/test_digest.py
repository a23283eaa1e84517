"""The digest of a shard: what it keeps of every row, and that it comes back from its file as it was."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from rebuild.audit.digest import DIGEST, make_digest, numbers, read_digest, unpack_sketches
from rebuild.audit.facts import Facts
from rebuild.audit.id_features import row_hashes
from rebuild.audit.near_duplicates import sketch_texts
from tests.support.shards import (
    Row,
    ask,
    clean_answers,
    make_answer,
    make_truncated,
    make_unanswered,
    write_shard,
)


def digest_of(run: Path, answers: list[Row], **settings: object) -> pa.Table:
    """Return the digest that the real audit of these answers writes."""
    shard = write_shard(run, answers, **settings)
    shard.audit()
    return read_digest(shard.digest)


def rows_of(digest: pa.Table) -> dict[str, Row]:
    return {row["sample_id"]: row for row in digest.to_pylist()}


@pytest.fixture
def mixed() -> list[Row]:
    """A row of every fate."""
    return [
        make_answer("whole", tokens=50, reasoning_tokens=20),
        make_truncated("cut", 60),
        make_answer("lost", prompt_token_ids=[1] * 5000),
        make_unanswered("gone", "error"),
        make_answer("talk", 0, tokens=40, source=None),
        make_answer("talk", 1, tokens=41),
    ]


def test_every_generated_row_has_one_with_what_became_of_it(
    tmp_path: Path, mixed: list[Row]
) -> None:
    digest = digest_of(tmp_path, mixed)
    assert digest.schema.equals(DIGEST)
    assert digest["sample_id"].to_pylist() == [row["sample_id"] for row in mixed]
    assert digest["trained"].to_pylist() == [True, True, False, False, True, True]
    assert digest["whole"].to_pylist() == [True, False, False, False, True, True]
    assert digest["mask_sum"].to_pylist() == [50, 60, -1, -1, 40, 41]
    assert digest["source"].to_pylist() == ["test"] * 4 + [None, "test"]
    assert digest["finish_reason"].to_pylist()[:4] == ["stop", "length", "stop", None]


def test_lengths_are_as_the_engine_counts_them_and_unknown_ones_minus_one(
    tmp_path: Path, mixed: list[Row]
) -> None:
    rows = rows_of(digest_of(tmp_path, mixed))
    whole, cut, gone = (rows[f"{name}_gen0"] for name in ("whole", "cut", "gone"))
    assert (whole["answer_tokens"], whole["reasoning_tokens"]) == (30, 20)
    assert (cut["answer_tokens"], cut["reasoning_tokens"]) == (60, -1)
    assert (gone["answer_tokens"], gone["prompt_tokens"], gone["seq_len"]) == (-1, -1, -1)


def test_rows_that_max_length_cut_are_not_whole(tmp_path: Path) -> None:
    digest = digest_of(
        tmp_path, [make_answer("a", tokens=50), make_answer("b", tokens=20)], max_length=40
    )
    assert digest["seq_len"].to_pylist() == [40, 29]
    assert digest["whole"].to_pylist() == [False, True]


def test_answers_are_known_by_the_hash_of_their_ids_also_beside_rows_without_one(
    tmp_path: Path, mixed: list[Row]
) -> None:
    rows = rows_of(digest_of(tmp_path, mixed))
    ids = np.array(mixed[0]["response_token_ids"])
    assert rows["whole_gen0"]["answer_key"] == row_hashes(ids, np.array([0, len(ids)]))[0]
    assert rows["gone_gen0"]["answer_key"] == 0


def test_turns_of_one_prompt_have_its_key_and_only_the_first_its_sketch(
    tmp_path: Path, mixed: list[Row]
) -> None:
    digest = digest_of(tmp_path, mixed)
    keys = digest["prompt_key"].to_pylist()
    assert keys[4] == keys[5] and len(set(keys)) == 5
    sketches, rows = unpack_sketches(digest["sketch"])
    assert rows.tolist() == [0, 1, 2, 3, 4]
    asked = "\n".join(ask("talk", turn)["content"] for turn in range(2))
    assert sketches[4].tolist() == sketch_texts([asked])[0].tolist()


def test_the_same_shard_has_the_same_digest(tmp_path: Path) -> None:
    answers = clean_answers(30)
    assert digest_of(tmp_path / "a", answers).equals(digest_of(tmp_path / "b", answers))


def test_a_shard_without_rows_has_a_digest_without_rows(tmp_path: Path) -> None:
    digest = digest_of(tmp_path, [])
    assert len(digest) == 0 and digest.schema.equals(DIGEST)
    sketches, rows = unpack_sketches(digest["sketch"])
    assert sketches.shape == (0, 16) and len(rows) == 0


def test_a_set_of_which_only_training_rows_are_known_is_told_by_its_masks() -> None:
    samples = pd.DataFrame({"sample_id": ["a", "b"], "mask_sum": [7, 9], "seq_len": [10, 20]})
    samples = samples.assign(ids_len=[10, 20], answer_key=np.array([2**63 + 1, 5], np.uint64))
    samples["context_key"] = np.array([3, 2**64 - 1], np.uint64)
    samples["before_id"] = [198, 198]
    sketches = sketch_texts(["the question of the first row", ""])
    digest = make_digest(Facts(samples=samples, sketches=sketches))
    assert digest["trained"].to_pylist() == [True, True]
    assert digest["prompt_tokens"].to_pylist() == [3, 11]
    assert digest["answer_tokens"].to_pylist() == [7, 9]
    assert digest["answer_key"].to_pylist() == [2**63 + 1, 5]
    assert digest["prompt_key"].to_pylist() == [3, 2**64 - 1]
    assert [value is None for value in digest["sketch"].to_pylist()] == [False, True]


def test_numbers_of_several_parts_come_as_one_array(tmp_path: Path) -> None:
    digest = digest_of(tmp_path, clean_answers(4))
    twice = pa.concat_tables([digest, digest])
    assert numbers(twice, "mask_sum").tolist() == 2 * digest["mask_sum"].to_pylist()
