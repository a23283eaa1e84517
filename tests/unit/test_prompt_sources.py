"""The specification of a source: which files it is, and when it is still the same."""

import subprocess
import sys
from pathlib import Path

import pytest

from rebuild.errors import StepError
from rebuild.prompts.sources import check_unchanged, source_files, source_identity

SCRIPTS = Path(__file__).parents[2] / "workflow/scripts"


@pytest.mark.parametrize("name", ["missing.jsonl", "notes.txt", "empty"])
def test_a_source_without_prompt_files_stops_the_step(tmp_path, name):
    (tmp_path / "notes.txt").write_text("Hi")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StepError, match="no prompts found"):
        source_files(tmp_path / name)


def test_the_identity_of_a_source_is_its_files_sizes_and_hashes(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p/one.jsonl").write_bytes(b"abc")
    (entry,) = source_identity(tmp_path)
    assert entry == {
        "path": "p/one.jsonl",
        "size": 3,
        "mtime_ns": (tmp_path / "p/one.jsonl").stat().st_mtime_ns,
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    assert source_identity(tmp_path / "p/one.jsonl")[0]["path"] == "one.jsonl"


def test_a_known_hash_is_used_again_until_size_or_time_changes(tmp_path):
    file = tmp_path / "one.jsonl"
    file.write_bytes(b"abc")
    known = [entry | {"sha256": "remembered"} for entry in source_identity(file)]
    assert source_identity(file, known)[0]["sha256"] == "remembered"
    file.write_bytes(b"abcd")
    assert source_identity(file, known)[0]["sha256"] != "remembered"


def test_a_source_that_changes_while_it_is_read_stops_the_step(tmp_path):
    (tmp_path / "one.jsonl").write_bytes(b"abc")
    identity = source_identity(tmp_path)
    check_unchanged(tmp_path, identity)
    (tmp_path / "two.jsonl").write_bytes(b"abc")
    with pytest.raises(StepError, match=r"changed while(.|\n)*two\.jsonl"):
        check_unchanged(tmp_path, identity)


def test_a_snakefile_can_import_it_without_any_library():
    code = "import rebuild.prompts.sources, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPTS, check=True, capture_output=True, text=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "rebuild" in loaded
    assert not loaded & {"orjson", "pyarrow", "numpy", "pandas", "torch", "transformers"}
