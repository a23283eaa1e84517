"""Training rows reduced to numbers, each held against a plain computation of the same."""

from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rebuild.audit.id_features import row_hashes
from rebuild.audit.sample_facts import aligned_mask, chosen, mask_runs, sample_facts, text_columns
from rebuild.tables import TOKENIZED
from rebuild.tokens.masks import row_starts

Masks = list[list[int]]
MASK = pa.list_(pa.int8())
some_masks = st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=6)


def starts_of(rows: list[list[int]]) -> np.ndarray:
    return row_starts(np.array([len(row) for row in rows], dtype=np.int64))


def flags(rows: Masks) -> np.ndarray:
    return np.array([value == 1 for row in rows for value in row], dtype=bool)


def tokenized(*rows: dict[str, Any]) -> pa.Table:
    """Return a tokenized table; columns that a row does not give are null."""
    full = [dict.fromkeys(TOKENIZED.names) | row for row in rows]
    return pa.Table.from_pylist(full, schema=TOKENIZED)


def facts(*rows: dict[str, Any], vocab_size: int | None = None) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = sample_facts(tokenized(*rows), vocab_size).to_dict("records")
    return made


@given(some_masks)
def test_runs_of_supervised_ids_are_those_that_groupby_finds(masks: Masks) -> None:
    lengths = [[len([*run]) for one, run in groupby(mask) if one] for mask in masks]
    counts, longest = mask_runs(flags(masks), starts_of(masks))
    assert counts.tolist() == [len(runs) for runs in lengths]
    assert longest.tolist() == [max(runs, default=0) for runs in lengths]


@given(some_masks)
def test_chosen_ids_are_those_under_the_flags_of_each_row(masks: Masks) -> None:
    ids = np.arange(sum(map(len, masks)))
    values, starts = chosen(ids, flags(masks), starts_of(masks))
    place, expected = 0, []
    for mask in masks:
        expected.append([place + n for n, one in enumerate(mask) if one])
        place += len(mask)
    assert [part.tolist() for part in np.split(values, starts[1:-1])][: len(masks)] == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_masks_of_another_length_than_their_ids_supervise_nothing(
    sizes: list[tuple[int, int]],
) -> None:
    masks = pa.array([[1] * own for _, own in sizes], type=MASK)
    lengths = np.array([ids for ids, _ in sizes], dtype=np.int64)
    expected = [ids == own for ids, own in sizes for _ in range(ids)]
    assert aligned_mask(masks, lengths).tolist() == expected


def test_a_row_is_told_in_numbers() -> None:
    [row] = facts(
        {"sample_id": "a", "input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1], "seq_len": 5}
    )
    assert (row["ids_len"], row["mask_len"], row["mask_sum"], row["mask_first"]) == (5, 5, 3, 1)
    assert (row["mask_runs"], row["mask_longest"], row["last_id"]) == (2, 2, 9)
    assert (row["ids_bad"], row["mask_odd"], row["loss_tokens"]) == (0, 0, -1)


def test_keys_are_the_hashes_of_what_is_supervised_and_of_the_rest() -> None:
    rows = facts(
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [1, 2, 9, 9], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [8, 8, 3, 4], "loss_mask": [0, 0, 1, 1]},
    )
    [answer, context] = row_hashes(np.array([3, 4, 1, 2]), np.array([0, 2, 4])).tolist()
    assert [row["answer_key"] == answer for row in rows] == [True, False, True]
    assert [row["context_key"] == context for row in rows] == [True, True, False]


def test_negative_ids_and_ids_beyond_the_vocabulary_are_counted() -> None:
    rows = facts(
        {"input_ids": [0, 99, 100, -1], "loss_mask": [0, 0, 1, 1]},
        {"input_ids": [99], "loss_mask": [1]},
        vocab_size=100,
    )
    assert [(row["ids_bad"], row["ids_high"]) for row in rows] == [(1, 1), (0, 0)]
    assert "ids_high" not in facts({"input_ids": [7], "loss_mask": [1]})[0]


def test_a_row_without_ids_is_told_as_empty_and_leaves_its_neighbours_alone() -> None:
    before, empty, after = facts(
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"input_ids": None, "loss_mask": [1, 1]},
        {"input_ids": [3, 4], "loss_mask": [1, 1]},
    )
    assert (empty["ids_len"], empty["mask_len"], empty["last_id"]) == (0, 2, -1)
    assert (empty["mask_runs"], empty["answer_key"]) == (0, 0)
    assert (before["mask_runs"], before["last_id"]) == (1, 2)
    assert (after["mask_runs"], after["mask_longest"], after["last_id"]) == (1, 2, 4)


def test_a_slice_of_a_table_gives_the_facts_of_its_rows() -> None:
    rows = [{"sample_id": f"s{n}", "input_ids": [n] * n, "loss_mask": [1] * n} for n in range(1, 9)]
    whole = tokenized(*rows)
    part = sample_facts(whole.slice(3, 3), None)
    expected = sample_facts(whole, None).iloc[3:6].reset_index(drop=True)
    assert part.to_dict() == expected.to_dict()
    batch = whole.to_batches()[0].slice(3, 3)
    assert sample_facts(batch, None).to_dict() == expected.to_dict()


def test_no_rows_have_all_columns_with_their_types() -> None:
    none, some = sample_facts(tokenized(), 9), sample_facts(tokenized({"input_ids": [1]}), 9)
    assert list(none.columns) == list(some.columns)
    assert none.dtypes.to_dict() == some.dtypes.to_dict()


def test_columns_that_a_data_set_lacks_are_not_made_up() -> None:
    lists = {"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}
    rows = sample_facts(pa.table(lists), None)
    assert not {"prompt_id", "finish_reason", "turn"} & set(rows.columns)


def test_texts_stay_what_they_are_nulls_included() -> None:
    table = tokenized({"sample_id": "ä\n"}, {"sample_id": None})
    column = text_columns(table, ["sample_id"])["sample_id"]
    assert column[0] == "ä\n"
    assert column.isna().tolist() == [False, True]
