"""Ids and mask: supervised tokens are exactly the response, its stop id included."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rebuild.tokens.masks import join_ids, mask_facts
from tests.support.shards import QWEN3_DISASTER, QWEN3_PROMPT

IDS = pa.list_(pa.int32())
some_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)


def join(
    rows: list[tuple[list[int], list[int]]], max_length: int | None = None
) -> list[tuple[list[int], list[int]]]:
    prompts = pa.array([prompt for prompt, _ in rows], type=IDS)
    responses = pa.array([response for _, response in rows], type=IDS)
    input_ids, loss_mask = join_ids(prompts, responses, max_length)
    return list(zip(input_ids.to_pylist(), loss_mask.to_pylist(), strict=True))


def facts_of(*masks: list[int]) -> list[dict[str, int]]:
    columns = mask_facts(pa.array(masks, type=pa.list_(pa.int8())))
    return [{name: int(column[i]) for name, column in columns.items()} for i in range(len(masks))]


def test_supervised_tokens_are_exactly_the_sampled_ones_with_their_stop_token() -> None:
    [(ids, mask)] = join([(QWEN3_PROMPT, QWEN3_DISASTER)])
    assert ids == QWEN3_PROMPT + QWEN3_DISASTER
    assert mask == [0] * 9 + [1] * 7


def test_rows_keep_their_order_and_their_own_lengths() -> None:
    assert join([([1], [2, 3]), ([], [4]), ([5, 6], []), ([7], [8])]) == [
        ([1, 2, 3], [0, 1, 1]),
        ([4], [1]),
        ([5, 6], [0, 0]),
        ([7, 8], [0, 1]),
    ]


def test_only_rows_over_the_length_are_cut_and_on_the_right() -> None:
    assert join([([1, 2], [3, 4]), ([5], [6]), ([7, 8, 9, 10], [11])], max_length=3) == [
        ([1, 2, 3], [0, 0, 1]),
        ([5, 6], [0, 1]),
        ([7, 8, 9], [0, 0, 0]),
    ]


def test_no_rows_give_no_rows() -> None:
    assert join([]) == []


def test_the_columns_have_the_types_of_the_tokenized_file() -> None:
    input_ids, loss_mask = join_ids(pa.array([[1]], type=IDS), pa.array([[2]], type=IDS), None)
    assert (input_ids.type, loss_mask.type) == (IDS, pa.list_(pa.int8()))


def test_a_slice_of_a_batch_is_joined_like_the_whole() -> None:
    prompts = pa.array([[1], [2, 2], [3]], type=IDS).slice(1)
    responses = pa.array([[9], [8], [7, 7]], type=IDS).slice(1)
    assert join_ids(prompts, responses, None)[0].to_pylist() == [[2, 2, 8], [3, 7, 7]]


@given(
    st.lists(st.tuples(some_ids, some_ids), max_size=8), st.one_of(st.none(), st.integers(1, 12))
)
def test_joining_equals_the_plain_definition_for_any_rows(
    rows: list[tuple[list[int], list[int]]], max_length: int | None
) -> None:
    plain = [((p + r)[:max_length], ([0] * len(p) + [1] * len(r))[:max_length]) for p, r in rows]
    assert join(rows, max_length) == plain


def test_facts_of_a_mask_say_where_its_ones_are() -> None:
    assert facts_of([0, 0, 1, 1, 1]) == [
        {"mask_len": 5, "mask_sum": 3, "mask_first": 2, "mask_odd": 0}
    ]


def test_a_mask_without_ones_has_no_first_one() -> None:
    for facts in facts_of([0, 0], [], [0]):
        assert (facts["mask_sum"], facts["mask_first"]) == (0, -1)


def test_entries_that_are_neither_0_nor_1_are_counted_and_not_summed() -> None:
    [facts] = facts_of([0, 2, 1, -1])
    assert (facts["mask_odd"], facts["mask_sum"]) == (2, 1)


@given(st.lists(st.lists(st.sampled_from([0, 1]), max_size=8), min_size=1, max_size=8))
def test_facts_equal_the_plain_definition_for_any_masks(masks: list[list[int]]) -> None:
    for mask, facts in zip(masks, facts_of(*masks), strict=True):
        assert facts["mask_len"] == len(mask)
        assert facts["mask_sum"] == sum(mask)
        assert facts["mask_first"] == (mask.index(1) if 1 in mask else -1)
