"""Finished hidden states are held against their index: what is lost or damaged is named, with the way to mend it."""

import io

import pytest

from rebuild.errors import StepError
from rebuild.files import sha256_file
from rebuild.tables import HIDDEN_STATES, TableWriter
from verify_states import verify_states


@pytest.fixture
def run(tmp_path):
    for shard in ("canary", "00000"):
        folder = tmp_path / "hidden_states" / shard
        folder.mkdir(parents=True)
        rows = []
        for name in ("a", "b"):
            path = folder / f"{name}.ckpt"
            path.write_bytes(f"states of {shard} {name}".encode())
            rows.append(
                dict.fromkeys(HIDDEN_STATES.names)
                | {
                    "sample_id": name,
                    "file": f"{shard}/{name}.ckpt",
                    "bytes": path.stat().st_size,
                    "sha256": sha256_file(path),
                }
            )
        with TableWriter(folder.with_suffix(".parquet"), HIDDEN_STATES, {}) as writer:
            writer.write(rows)
    return tmp_path


def test_whole_files_are_counted(run):
    said = io.StringIO()
    verify_states(run, said)
    assert said.getvalue().startswith("4 files of 2 shards")


def spoil(path, how):
    content = path.read_bytes()
    if how == "lost":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if how == "cut short" else content.replace(b"s", b"S", 1))


@pytest.mark.parametrize("how", ["lost", "cut short", "flipped"])
def test_a_damaged_file_is_named_with_its_sample_and_the_way_to_mend_it(run, how):
    spoil(run / "hidden_states" / "00000" / "b.ckpt", how)
    with pytest.raises(StepError, match="1 files of hidden states are missing or damaged") as found:
        verify_states(run, io.StringIO())
    index = run / "hidden_states" / "00000.parquet"
    assert found.value.seen == "00000/b.ckpt (sample b)"
    assert f"rm {index}, then" in found.value.remedy


def test_an_index_that_is_cut_short_is_named(run):
    index = run / "hidden_states" / "canary.parquet"
    index.write_bytes(index.read_bytes()[:40])
    with pytest.raises(StepError, match="cannot read the Parquet file") as found:
        verify_states(run, io.StringIO())
    assert str(index) in found.value.what
