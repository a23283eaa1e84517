"""Readers of any tokenized dataset: each format, broken rows that must be seen, and what is refused."""

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict

from rebuild.datasets.columns import BATCH_ROWS, BATCH_TOKENS, DATASET
from rebuild.datasets.readers import describe_dataset, read_dataset
from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.tables import TOKENIZED, TableWriter
from tests.support.captured import write_specforge

IDS = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
MASKS = [[0, 1, 1], [0, 1], [0, 0, 1, 1]]
TOO_LARGE = 2**40


def read(path, **options):
    """Return all rows of a dataset, and check that each batch has the columns of a dataset."""
    batches = list(read_dataset(path, **options))
    assert all(batch.schema == DATASET for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


def column(path, name):
    return [row[name] for row in read(path)]


def write_parquet(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def write_lines(path, *rows):
    """Write rows as lines of JSON; what is text already is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    with gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w") as handle:
        handle.write("".join(f"{line}\n" for line in lines))
    return path


def save_torch(path, **values):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(values, path)
    return path


def tokenized_row(number):
    return {
        "sample_id": f"p{number}_gen0",
        "prompt_id": f"p{number}",
        "turn": 0,
        "source": "letters",
        "input_ids": IDS[number],
        "loss_mask": MASKS[number],
        "seq_len": len(IDS[number]),
        "loss_tokens": sum(MASKS[number]),
        "mask_origin": "engine",
        "finish_reason": "stop",
    }


def write_tokenized(path, *numbers):
    with TableWriter(path, TOKENIZED, {}) as table:
        table.write([tokenized_row(number) for number in numbers])
    return path


# Our shards and other Parquet


def test_shards_of_this_workflow_are_read_whole_in_order_from_their_folder(tmp_path):
    write_tokenized(tmp_path / "00001.parquet", 2)
    write_tokenized(tmp_path / "00000.parquet", 0, 1)
    (tmp_path / ".00002.parquet.77.tmp").write_bytes(b"being written")
    assert read(tmp_path) == [tokenized_row(number) | {"text": None} for number in range(3)]
    found = describe_dataset(tmp_path)
    assert (found.format, found.rows) == ("tokenized shards of this workflow", 3)
    assert [file.name for file in found.files] == ["00000.parquet", "00001.parquet"]


def test_a_single_shard_is_read(tmp_path):
    path = write_tokenized(tmp_path / "00000.parquet", 1)
    assert column(path, "sample_id") == ["p1_gen0"]


@pytest.mark.parametrize(
    "name", ["loss_mask", "assistant_masks", "assistant_mask", "completion_mask"]
)
def test_parquet_of_others_is_read_under_each_name_of_the_mask(tmp_path, name):
    path = write_parquet(tmp_path / "train.parquet", input_ids=IDS, **{name: MASKS})
    assert column(path, "loss_mask") == MASKS
    assert column(path, "input_ids") == IDS
    assert describe_dataset(path).format == "Parquet"


def test_a_row_without_an_id_is_named_by_its_file_and_its_number_from_0(tmp_path):
    write_parquet(tmp_path / "data" / "a.parquet", input_ids=IDS, loss_mask=MASKS)
    write_parquet(tmp_path / "data" / "b.parquet", id=[7, None, 9], input_ids=IDS, loss_mask=MASKS)
    names = column(tmp_path, "sample_id")
    assert names[:3] == ["data/a.parquet[0]", "data/a.parquet[1]", "data/a.parquet[2]"]
    assert names[3:] == ["7", "data/b.parquet[1]", "9"]


def test_what_a_format_does_not_have_is_null(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", input_ids=IDS, loss_mask=MASKS)
    (row, *_) = read(path)
    absent = set(DATASET.names) - {"sample_id", "input_ids", "loss_mask"}
    assert {name for name in row if row[name] is None} == absent


def test_columns_are_found_under_speculators_names_and_inside_the_metadata(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet",
        id=["p_gen1"],
        primary_id=["p"],
        input_ids=[[1, 2]],
        loss_mask=[[0, 1]],
        text=["ab"],
        metadata=[{"idx": 3, "finish_reason": "length"}],
    )
    (row,) = read(path)
    assert (row["sample_id"], row["prompt_id"], row["text"]) == ("p_gen1", "p", "ab")
    assert row["finish_reason"] == "length"
    assert read(path, text=False)[0]["text"] is None


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64()), pa.large_list(pa.uint32()), pa.list_(pa.float32()), pa.list_(pa.int16())],
)  # fmt: skip
def test_numbers_of_any_type_are_read(tmp_path, kind):
    path = write_parquet(
        tmp_path / "a.parquet", input_ids=pa.array(IDS, kind), loss_mask=pa.array(MASKS, kind)
    )
    assert (column(path, "input_ids"), column(path, "loss_mask")) == (IDS, MASKS)


def test_lists_of_fixed_size_and_masks_of_true_and_false_are_read(tmp_path):
    ids = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    path = write_parquet(tmp_path / "a.parquet", input_ids=ids, loss_mask=[[False, True]] * 2)
    assert (column(path, "input_ids"), column(path, "loss_mask")) == (
        [[1, 2], [3, 4]],
        [[0, 1]] * 2,
    )


def test_labels_of_minus_100_are_unsupervised_and_the_others_supervised(tmp_path):
    labels = [[-100, 6, 7], [-100, 9], [-100, -100, 3, 4]]
    path = write_parquet(tmp_path / "a.parquet", input_ids=IDS, labels=labels)
    assert column(path, "loss_mask") == MASKS


def test_labels_that_are_other_tokens_than_the_ids_show_as_odd_values_of_the_mask(tmp_path):
    shifted = [[6, 7, -100], [9, -100], [-100, 3, 4, -100]]
    path = write_parquet(tmp_path / "a.parquet", input_ids=IDS, labels=shifted)
    assert column(path, "loss_mask") == [[2, 2, 0], [2, 0], [0, 2, 2, 0]]


def test_labels_of_another_length_than_the_ids_keep_their_length(tmp_path):
    labels = [[-100, 6, 7], [], [8], [5, None, None]]
    path = write_parquet(
        tmp_path / "a.parquet", input_ids=[[5, 6], [8], None, [5, 6]], labels=labels
    )
    assert column(path, "loss_mask") == [[0, 1, 2], [], [2], [1, 2, 2]]


def test_a_loss_mask_goes_before_labels(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet", input_ids=[[1, 2]], labels=[[1, 2]], loss_mask=[[0, 1]]
    )
    assert column(path, "loss_mask") == [[0, 1]]


# Saved datasets


def save(data, folder, **options):
    data.save_to_disk(folder, **options)
    return folder


@pytest.fixture
def columns():
    return {"input_ids": IDS, "loss_mask": MASKS, "seq_len": [3, 2, 4]}


def test_a_saved_dataset_is_read_in_the_order_of_its_rows(tmp_path, columns):
    data = Dataset.from_dict(columns).select([2, 0, 1])
    path = save(data, tmp_path / "saved", num_shards=2)
    torch.save({"1": 1}, path / "token_freq.pt")  # as prepare-data leaves it there
    assert column(path, "input_ids") == [IDS[2], IDS[0], IDS[1]]
    assert column(path, "seq_len") == [4, 3, 2]
    assert column(path, "sample_id") == ["saved[0]", "saved[1]", "saved[2]"]
    assert describe_dataset(path).rows == 3


def test_the_files_of_a_saved_dataset_are_in_the_order_of_its_state(tmp_path, columns):
    path = save(Dataset.from_dict(columns), tmp_path / "saved", num_shards=3)
    state = read_json(path / "state.json")
    state["_data_files"].reverse()
    write_json(path / "state.json", state)
    assert column(path, "input_ids") == IDS[::-1]


def test_every_split_of_a_dictionary_of_datasets_is_read(tmp_path, columns):
    parts = DatasetDict(
        train=Dataset.from_dict(columns), test=Dataset.from_dict(columns).select([1])
    )
    path = save(parts, tmp_path / "saved")
    names = ["train[0]", "train[1]", "train[2]", "test[0]"]
    assert column(path, "sample_id") == names
    assert describe_dataset(path).rows == 4


def test_a_saved_dataset_that_lacks_a_file_is_refused_and_the_file_named(tmp_path, columns):
    path = save(Dataset.from_dict(columns), tmp_path / "saved", num_shards=3)
    (path / "data-00001-of-00003.arrow").unlink()
    with pytest.raises(StepError, match="no data-00001-of-00003.arrow"):
        read(path)


def test_a_saved_dataset_whose_state_is_torn_or_uses_an_index_file_is_refused(tmp_path, columns):
    path = save(Dataset.from_dict(columns), tmp_path / "saved")
    write_json(path / "state.json", read_json(path / "state.json") | {"_indices_data_files": ["a"]})
    with pytest.raises(StepError, match="which rows"):
        read(path)
    (path / "state.json").write_text('{"_data_files": [')
    with pytest.raises(StepError, match="JSONDecodeError"):
        read(path)


# Lines of JSON


def test_rows_of_speculators_are_read(tmp_path):
    row = {"id": "p_gen0", "primary_id": "p", "input_ids": [1, 2], "loss_mask": [0, 1]}
    row |= {"text": "a\u2028b", "metadata": {"idx": 0, "finish_reason": "stop"}}
    (read_row,) = read(write_lines(tmp_path / "a.jsonl", row))
    found = {name: value for name, value in read_row.items() if value is not None}
    assert found == {
        "sample_id": "p_gen0",
        "prompt_id": "p",
        "input_ids": [1, 2],
        "loss_mask": [0, 1],
        "text": "a\u2028b",
        "finish_reason": "stop",
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_rows_of_specforge_are_read_and_named_by_their_line(tmp_path, name):
    path = write_lines(
        tmp_path / name,
        {"input_ids": IDS[0], "loss_mask": MASKS[0]},
        "  ",
        {"input_ids": [IDS[1]], "loss_mask": [MASKS[1]]},
    )
    assert column(path, "sample_id") == [f"{name}:1", f"{name}:3"]
    assert (column(path, "input_ids"), column(path, "loss_mask")) == (IDS[:2], MASKS[:2])


def test_a_folder_of_lines_is_read_also_where_its_first_file_is_empty(tmp_path):
    write_lines(tmp_path / "00000.jsonl")
    write_lines(tmp_path / "00001.jsonl", {"input_ids": [1], "loss_mask": [1]})
    assert column(tmp_path, "sample_id") == ["00001.jsonl:1"]
    assert describe_dataset(tmp_path).rows is None


def test_labels_are_read_from_lines_too(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"input_ids": [1, 2], "labels": [-100, 2]})
    assert column(path, "loss_mask") == [[0, 1]]


def test_what_only_pythons_parser_takes_is_read(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        '\ufeff{"id": "bom", "input_ids": [1], "loss_mask": [1]}',
        '{"id": "nan", "input_ids": [1, NaN], "loss_mask": [0, 1]}',
        '{"id": "half", "input_ids": [1], "loss_mask": [1], "text": "\\ud83d"}',
    )
    assert column(path, "input_ids") == [[1], [1, -1], [1]]
    assert column(path, "text") == [None, None, "?"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_torn_line_is_refused_with_file_line_and_the_command_that_shows_it(tmp_path, name):
    path = write_lines(
        tmp_path / name, {"input_ids": [1], "loss_mask": [1]}, '{"input_ids": [1], "loss_ma'
    )
    with pytest.raises(StepError) as caught:
        read(path)
    message = str(caught.value)
    assert f"{path}, line 2" in message
    assert '"loss_ma' in message
    command = message.partition("`")[2].partition("`")[0]
    shown = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout == '{"input_ids": [1], "loss_ma\n'


def test_a_line_that_is_no_object_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"input_ids": [1], "loss_mask": [1]}, "[1, 2]")
    with pytest.raises(StepError, match="JSON of type list"):
        read(path)


def test_a_compressed_file_that_is_cut_short_is_refused_with_the_last_whole_line(tmp_path):
    rows = [{"input_ids": [n, n * n], "loss_mask": [0, 1]} for n in range(20000)]
    path = write_lines(tmp_path / "a.jsonl.gz", *rows)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(StepError, match=r"after line 1\d{4}"):
        read(path)


# Files of torch


def test_files_of_specforge_are_read_in_the_order_of_their_paths(tmp_path):
    for number, name in enumerate(["a/1.ckpt", "a/0.ckpt", "b.ckpt"]):
        (tmp_path / "a").mkdir(exist_ok=True)
        write_specforge(tmp_path / name, IDS[number], MASKS[number])
    assert column(tmp_path, "sample_id") == ["a/0.ckpt", "a/1.ckpt", "b.ckpt"]
    assert column(tmp_path, "input_ids") == [IDS[1], IDS[0], IDS[2]]
    assert column(tmp_path, "loss_mask") == [MASKS[1], MASKS[0], MASKS[2]]
    assert describe_dataset(tmp_path).rows == 3


def test_extracted_states_are_read_although_their_index_lies_beside_them(tmp_path):
    (tmp_path / "00000").mkdir()
    write_specforge(tmp_path / "00000" / "p_gen0.ckpt", [1, 2], [0, 1])
    write_parquet(tmp_path / "00000.parquet", sample_id=["p_gen0"], file=["00000/p_gen0.ckpt"])
    assert column(tmp_path, "sample_id") == ["00000/p_gen0.ckpt"]


def test_tensors_of_one_row_and_compressed_files_are_read(tmp_path):
    plain = save_torch(
        tmp_path / "a.ckpt", input_ids=torch.tensor([[1, 2]]), loss_mask=torch.tensor([[0, 1]])
    )
    with gzip.open(tmp_path / "b.ckpt.gz", "wb") as packed:
        packed.write(plain.read_bytes())
    assert column(tmp_path, "input_ids") == [[1, 2], [1, 2]]
    assert column(tmp_path, "sample_id") == ["a.ckpt", "b.ckpt.gz"]


def test_dumps_of_modelopt_are_read_with_their_conversations(tmp_path):
    save_torch(
        tmp_path / "c1.pt",
        input_ids=torch.tensor([1, 2]),
        loss_mask=torch.tensor([False, True]),
        aux_hidden_states=torch.ones(2, 8),
        conversation_id="c1",
    )
    (row,) = read(tmp_path)
    assert (row["sample_id"], row["prompt_id"]) == ("c1.pt", "c1")
    assert (row["input_ids"], row["loss_mask"]) == ([1, 2], [0, 1])


def test_files_in_torchs_old_format_are_read(tmp_path):
    sample = {"input_ids": torch.tensor([1, 2]), "loss_mask": torch.tensor([0, 1])}
    torch.save(sample, tmp_path / "a.ckpt", _use_new_zipfile_serialization=False)
    assert column(tmp_path, "input_ids") == [[1, 2]]


class Attack:
    """What a pickle may carry: a command that runs when it is read."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def attacks(marker):
    sample = {"input_ids": torch.tensor([1]), "loss_mask": torch.tensor([1]), "x": Attack(marker)}
    for new in (True, False):
        buffer = io.BytesIO()
        torch.save(sample, buffer, _use_new_zipfile_serialization=new)
        yield buffer.getvalue()
    yield pickle.dumps({"x": Attack(marker)}, protocol=2)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("suffix", [".ckpt", ".ckpt.gz", ".pt"])
def test_code_in_a_file_does_not_run_and_the_file_is_named(tmp_path, number, suffix, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    marker = tmp_path / "ran"
    content = list(attacks(marker))[number]
    path = tmp_path / "data" / f"bad{suffix}"
    save_torch(
        tmp_path / "data" / "a.ckpt", input_ids=torch.tensor([1]), loss_mask=torch.tensor([1])
    )
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    with pytest.raises(StepError, match=rf"bad{suffix}") as caught:
        read(path.parent)
    assert "could run code" in str(caught.value)
    assert "posix.mkdir" in str(caught.value)
    assert "weights_only" not in str(caught.value)  # torch's advice is to read it all the same
    assert "add_safe_globals" not in str(caught.value)
    assert not marker.exists()
    unsafe = (
        pickle.loads if number == 2 else lambda raw: torch.load(io.BytesIO(raw), weights_only=False)
    )
    unsafe(content)  # the attack is a real one
    assert marker.exists()


@pytest.mark.parametrize("kept", [0, 10, 400])
def test_a_file_of_torch_that_is_cut_short_is_refused_and_named(tmp_path, kept):
    path = save_torch(
        tmp_path / "a.ckpt", input_ids=torch.arange(99), loss_mask=torch.ones(99).long()
    )
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StepError, match="a.ckpt"):
        read(tmp_path)


def test_a_file_of_torch_that_is_no_dictionary_is_refused(tmp_path):
    torch.save([torch.tensor([1])], tmp_path / "a.ckpt")
    with pytest.raises(StepError, match="object of type list"):
        read(tmp_path)


def test_hidden_states_are_not_read_from_the_disk(tmp_path):
    states = torch.ones(64, 1 << 19)  # 128 MB a file
    for number in range(3):
        save_torch(
            tmp_path / f"{number}.ckpt",
            input_ids=torch.arange(64),
            loss_mask=torch.ones(64).long(),
            hidden_states=states,
        )
    del states
    assert peak_growth(tmp_path, "torch") < 110


# Broken rows come as they are


def broken_rows():
    """Yield pairs of what a row holds, and what comes of it, for ids and for mask."""
    yield {"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, ([1, 2, 3], [0, 1])
    yield {"input_ids": [], "loss_mask": []}, ([], [])
    yield {"input_ids": None, "loss_mask": [1]}, (None, [1])
    yield {"input_ids": [-5, 2], "loss_mask": [7, -3]}, ([-5, 2], [7, -3])
    yield (
        {"input_ids": [TOO_LARGE, -TOO_LARGE], "loss_mask": [300, -300]},
        (
            [2**31 - 1, -(2**31)],
            [127, -128],
        ),
    )
    yield {"input_ids": [1, None], "loss_mask": [None, 1]}, ([1, None], [None, 1])
    yield {"input_ids": [[1], [2]], "loss_mask": [[1, 1], [1]]}, (None, None)


def fractional_rows():
    yield {"input_ids": [1.0, 2.5], "loss_mask": [0.5, 1.0]}, ([1, -1], [-1, 1])
    yield (
        {"input_ids": [1e300, -1e300], "loss_mask": [1e9, float("inf")]},
        (
            [2**31 - 1, -(2**31)],
            [127, -1],
        ),
    )


def json_rows():
    yield {"input_ids": ["a", 2], "loss_mask": "11"}, ([None, 2], None)
    yield {"input_ids": 5, "loss_mask": {"a": 1}}, (None, None)
    yield {"input_ids": [1]}, ([1], None)
    yield {"loss_mask": [True, False, 1]}, (None, [1, 0, 1])
    yield {"input_ids": [2**70, 1], "loss_mask": [1, 1]}, ([2**31 - 1, 1], [1, 1])


def seen(path):
    return [(row["input_ids"], row["loss_mask"]) for row in read(path)]


GOOD = {"input_ids": [1, 2], "loss_mask": [0, 1]}


@pytest.mark.parametrize(
    ("row", "expected"), [*broken_rows(), *fractional_rows(), *json_rows()], ids=str
)
def test_a_broken_line_reaches_the_audit_and_leaves_its_neighbours_alone(tmp_path, row, expected):
    path = write_lines(tmp_path / "a.jsonl", GOOD, row, GOOD)
    assert seen(path) == [([1, 2], [0, 1]), expected, ([1, 2], [0, 1])]


@pytest.mark.parametrize(("row", "expected"), [*broken_rows(), *fractional_rows()], ids=str)
def test_a_broken_row_of_parquet_reaches_the_audit_and_leaves_its_neighbours_alone(
    tmp_path, row, expected
):
    nested = expected == (None, None)
    good = {name: [value] for name, value in GOOD.items()} if nested else GOOD
    rows = {name: [good[name], row[name], good[name]] for name in GOOD}
    path = write_parquet(tmp_path / "a.parquet", **rows)
    assert seen(path) == [([1, 2], [0, 1]), expected, ([1, 2], [0, 1])]


def test_a_tensor_of_several_rows_and_a_file_without_a_mask_reach_the_audit(tmp_path):
    whole = {"input_ids": torch.tensor([1, 2]), "loss_mask": torch.tensor([0, 1])}
    save_torch(tmp_path / "0.ckpt", **whole)
    save_torch(tmp_path / "1.ckpt", input_ids=torch.ones(2, 3).long(), loss_mask=torch.tensor([1]))
    save_torch(tmp_path / "2.ckpt", input_ids=torch.tensor([5]))
    save_torch(
        tmp_path / "3.ckpt", input_ids=torch.tensor([1.5]), loss_mask=torch.tensor([7, -1, 0.5])
    )
    expected = [([1, 2], [0, 1]), (None, [1]), ([5], None), ([-1], [7, -1, -1])]
    assert seen(tmp_path) == expected


def test_large_unsigned_numbers_do_not_wrap_around(tmp_path):
    ids = pa.array([[2**64 - 1, 2**32 + 5]], pa.list_(pa.uint64()))
    path = write_parquet(tmp_path / "a.parquet", input_ids=ids, loss_mask=[[1, 1]])
    assert column(path, "input_ids") == [[2**31 - 1] * 2]


def test_columns_of_the_wrong_type_beside_ids_and_mask_are_read_as_far_as_they_go(tmp_path):
    path = write_parquet(
        tmp_path / "a.parquet",
        input_ids=IDS,
        loss_mask=MASKS,
        turn=[0.5, 1.0, float("nan")],
        seq_len=["3", "two", None],
        source=[1, 2, None],
    )
    assert column(path, "turn") == [None, 1, None]
    assert column(path, "source") == ["1", "2", None]
    assert column(path, "seq_len")[1:] == [None, None]


# What is refused


def refusal(path):
    with pytest.raises(StepError) as caught:
        read(path)
    with pytest.raises(StepError):
        describe_dataset(path)
    return str(caught.value)


def test_what_is_no_dataset_is_refused_with_what_was_seen_and_what_is_known(tmp_path):
    write_parquet(tmp_path / "prompts.parquet", prompt_id=["a"], messages=["b"])
    write_lines(tmp_path / "chats.jsonl", {"conversations": []})
    message = refusal(tmp_path)
    assert "prompts.parquet with prompt_id, messages" in message
    assert "chats.jsonl with conversations" in message
    assert "save_to_disk" in message
    assert "--config dataset=PATH" in message


def test_folders_of_other_files_and_paths_that_are_not_there_are_refused(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    assert "a folder with weights.bin" in refusal(tmp_path)
    assert "a file of another kind" in refusal(tmp_path / "weights.bin")
    assert "no such file or folder" in refusal(tmp_path / "nowhere")


def test_two_datasets_in_one_folder_are_refused_and_both_named(tmp_path):
    write_tokenized(tmp_path / "a.parquet", 0)
    write_lines(tmp_path / "a.jsonl", {"input_ids": [1], "loss_mask": [1]})
    message = refusal(tmp_path)
    assert "several datasets" in message
    assert "lines of JSON and Parquet" in message


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_set_with_nothing_but_an_attention_mask_is_refused(tmp_path, kind):
    row = {"input_ids": [1, 2], "attention_mask": [1, 1]}
    if kind == "jsonl":
        path = write_lines(tmp_path / "a.jsonl", row)
    else:
        path = write_parquet(tmp_path / "a.parquet", **{name: [row[name]] for name in row})
    with pytest.raises(StepError) as caught:
        read(path)
    assert "attention_mask tells padding apart" in str(caught.value)
    assert "loss_mask" in caught.value.expected


def test_columns_that_are_no_lists_of_numbers_are_refused_with_their_type(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", input_ids=["1 2", "3"], loss_mask=[[1], [1]])
    with pytest.raises(StepError, match="input_ids holds no lists of numbers") as caught:
        read(path)
    assert caught.value.seen == "string"


def test_a_damaged_parquet_or_arrow_file_is_refused_and_named(tmp_path, columns):
    good = write_tokenized(tmp_path / "a" / "00000.parquet", 0, 1)
    content = good.read_bytes()
    (tmp_path / "a" / "00001.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(StepError, match=r"00001\.parquet"):
        read(tmp_path / "a")
    path = save(Dataset.from_dict(columns), tmp_path / "saved")
    file = path / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:-300])
    with pytest.raises(StepError, match="data-00000-of-00001.arrow"):
        read(path)


# Memory

PEAK = """
    import sys
    import pyarrow.compute, pyarrow.parquet
    if sys.argv[2] == "torch":
        import torch
        torch.save({"a": torch.ones(3)}, sys.argv[1] + ".warm")
        torch.load(sys.argv[1] + ".warm", weights_only=True, mmap=True)
    from pathlib import Path
    from rebuild.datasets.readers import read_dataset
    def peak():  # getrusage would count the parent's memory before the exec
        status = dict(line.split(":") for line in Path("/proc/self/status").open())
        return int(status["VmHWM"].split()[0]) / 1024
    before = peak()
    rows = sum(batch.num_rows for batch in read_dataset(Path(sys.argv[1])))
    print(rows, peak() - before)
"""


def peak_growth(path, *options):
    """Return by how many MB a process of its own grows while it reads the dataset."""
    command = [sys.executable, "-c", textwrap.dedent(PEAK), str(path), *(options or ["-"])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(["workflow/scripts", "."])}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[1])


@pytest.mark.parametrize(("kind", "limit"), [("parquet", 380), ("saved", 230)])
def test_memory_does_not_depend_on_the_size_of_a_dataset_or_of_its_row_groups(
    tmp_path, kind, limit
):
    rows, length = 40_000, 1000
    offsets = pa.array(np.arange(rows + 1) * length, pa.int32())
    ids = pa.array(np.random.default_rng(0).integers(0, 150_000, rows * length))
    mask = pa.array(np.ones(rows * length, np.int64))
    table = pa.table(
        {
            "input_ids": pa.ListArray.from_arrays(offsets, ids),
            "loss_mask": pa.ListArray.from_arrays(offsets, mask),
        }
    )
    assert table.nbytes > 600e6
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows, compression="none")
    else:
        Dataset(table).save_to_disk(tmp_path)
    del table, ids, mask
    assert peak_growth(tmp_path) < limit


def test_batches_are_bounded_in_rows_and_in_tokens(tmp_path):
    short = write_parquet(tmp_path / "a.parquet", input_ids=[[1]] * 5000, loss_mask=[[1]] * 5000)
    assert max(batch.num_rows for batch in read_dataset(short)) == BATCH_ROWS
    count, length = 100, BATCH_TOKENS // 10
    ids = pa.array(np.zeros(count * length, np.int32))
    lists = pa.ListArray.from_arrays(pa.array(np.arange(count + 1) * length, pa.int32()), ids)
    long = write_parquet(tmp_path / "b.parquet", input_ids=lists, loss_mask=lists)
    assert {batch.num_rows for batch in read_dataset(long)} == {10}
