"""All shards of a run as one data path for speculators: rows, links, and what is not whole."""

import os
import shutil

import pytest
from datasets import load_from_disk

from join_speculators import join_speculators
from rebuild.errors import StepError
from rebuild.formats.shard_files import finish_shard
from tests.support.captured import make_sample, write_empty_index

SHARDS = {"canary": [5, 6], "00000": [4, 9, 7], "00001": [], "00002": [8]}


def write_shard(folder, lengths):
    """Write a shard's data set, and files that say whose states they would be."""
    samples = [make_sample(f"{folder.name}_{length}", length) for length in lengths]
    states = folder / "speculators" / "hidden_states"
    states.mkdir(parents=True)
    for row, sample in enumerate(samples):
        (states / f"hs_{row}.safetensors").write_text(sample.sample_id)
    finish_shard(folder, ["speculators"], samples)


@pytest.fixture
def run(tmp_path):
    for shard, lengths in SHARDS.items():
        write_shard(tmp_path / shard, lengths)
    return tmp_path


def join(run, shards=SHARDS):
    indexes = [write_empty_index(run / f"{shard}.parquet") for shard in shards]
    join_speculators(indexes, run / "speculators")
    return run / "speculators"


def ids(joined):
    """Return the rows' sample ids by the data set, and by the states."""
    saved = load_from_disk(str(joined))
    states = joined / "hidden_states"
    files = [(states / f"hs_{row}.safetensors").read_text() for row in range(len(saved))]
    assert len(list(states.iterdir())) == len(files)
    return list(saved["sample_id"]), files


def all_ids(shards=SHARDS):
    return [f"{shard}_{length}" for shard, lengths in shards.items() for length in lengths]


def test_rows_and_states_follow_the_shards_in_order(run):
    by_rows, by_states = ids(join(run))
    assert by_rows == by_states == all_ids()
    assert load_from_disk(str(run / "speculators")).format["type"] == "torch"


def test_states_and_rows_are_relative_links_so_that_the_run_can_be_moved(run, tmp_path):
    joined = join(run)
    links = [path for path in joined.rglob("*") if path.is_symlink()]
    assert len(links) == len(all_ids()) + len(SHARDS)
    assert not any(os.readlink(link).startswith("/") for link in links)
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    shutil.move(run, moved)
    assert ids(moved / "speculators") == (all_ids(), all_ids())


def test_joining_again_takes_in_what_has_changed(run):
    join(run)
    shutil.rmtree(run / "00002")
    write_shard(run / "00002", [8, 11])
    assert ids(join(run)) == (
        all_ids(SHARDS | {"00002": [8, 11]}),
        all_ids(SHARDS | {"00002": [8, 11]}),
    )
    fewer = {"canary": SHARDS["canary"], "00000": SHARDS["00000"]}
    assert ids(join(run, fewer)) == (all_ids(fewer), all_ids(fewer))


def test_the_same_shards_give_the_same_fingerprint_and_others_another(run):
    same = {load_from_disk(str(join(run)))._fingerprint for _ in range(2)}
    assert len(same) == 1
    assert load_from_disk(str(join(run, ["00000"])))._fingerprint not in same


def test_only_empty_shards_make_an_empty_set(run):
    assert ids(join(run, ["00001"])) == ([], [])


def test_nothing_is_left_beside_it_not_even_of_a_kill(run):
    join(run)
    before = {path.name for path in run.iterdir()}
    for name in (".speculators.making", ".speculators.old"):
        (run / name / "hidden_states").mkdir(parents=True)
    join(run)
    assert "speculators" in before and {path.name for path in run.iterdir()} == before


def test_an_index_that_is_cut_short_stops_the_join(run):
    join(run)
    index = run / "00000.parquet"
    index.write_bytes(index.read_bytes()[:50])
    with pytest.raises(StepError, match="cannot read the Parquet file"):
        join_speculators([index], run / "speculators")


@pytest.mark.parametrize(
    ("broken", "seen"),
    [
        ("00000/speculators/hidden_states/hs_1.safetensors", "it is missing"),
        ("00000/speculators/state.json", "No such file"),
        ("00000/speculators/data-00000-of-00001.arrow", "No such file"),
    ],
)
def test_a_shard_that_is_not_whole_stops_and_what_was_joined_before_stays(run, broken, seen):
    join(run)
    (run / broken).unlink()
    with pytest.raises(StepError) as stopped:
        join(run)
    assert "00000/speculators" in stopped.value.where
    assert seen in stopped.value.seen
    assert (run / "speculators" / "state.json").exists()


def test_a_data_set_that_is_cut_short_stops(run):
    arrow = run / "00000" / "speculators" / "data-00000-of-00001.arrow"
    arrow.write_bytes(arrow.read_bytes()[:700])
    with pytest.raises(StepError, match="not whole"):
        join(run)
