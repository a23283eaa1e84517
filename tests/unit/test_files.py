"""Files that are either whole or not there, also when their writer is killed."""

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rebuild.files import atomic_path, read_json, sha256_file, sha256_json, write_json

WRITER = """
import os, sys
from pathlib import Path
from rebuild.files import atomic_path

with atomic_path(Path(sys.argv[1])) as temporary:
    temporary.write_text("half of the new")
    print("written", flush=True)
    sys.stdin.readline()
    temporary.write_text(f"all of {sys.argv[2]}")
"""


def start_writer(path: Path, name: str = "the new") -> "subprocess.Popen[str]":
    """Start a process that is in the middle of writing `path` when this returns, and ends it on a line of input."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name],
        env=os.environ | {"PYTHONPATH": "workflow/scripts"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout and writer.stdout.readline() == "written\n"
    return writer


def names(folder: Path) -> list[str]:
    """Return the names of all files in the folder, hidden ones too."""
    return sorted(file.name for file in folder.iterdir())


def test_what_is_written_appears_under_its_name_and_folders_are_made(tmp_path: Path):
    path = tmp_path / "new" / "folder" / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == path.parent and not path.exists()
    assert path.read_text() == "new"
    assert names(path.parent) == ["file"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_path(path) as temporary:
        temporary.write_text("half")
        _ = 1 / 0
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with start_writer(path) as writer:
        writer.send_signal(signal.SIGKILL)
    assert path.read_text() == "old"
    assert list(tmp_path.glob("*.json")) == [path]  # what it left is hidden and named otherwise


def test_a_leftover_of_a_killed_process_of_the_same_number_is_not_written_through(tmp_path: Path):
    path, finished = tmp_path / "file", tmp_path / "finished elsewhere"
    finished.write_text("whole")
    os.link(finished, tmp_path / f".file.{os.getpid()}.tmp")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert finished.read_text() == "whole"


def test_of_two_writers_the_later_one_wins_whole(tmp_path: Path):
    path = tmp_path / "file"
    with start_writer(path, "the first") as first, start_writer(path, "the second") as second:
        second.communicate("\n")
        assert path.read_text() == "all of the second"
        first.communicate("\n")
    assert path.read_text() == "all of the first"
    assert names(tmp_path) == ["file"]


def test_the_umask_decides_who_may_read(tmp_path: Path):
    before = os.umask(0o027)
    try:
        write_json(tmp_path / "file", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_json_comes_back_as_it_was_in_any_locale(tmp_path: Path):
    value = {"reason": "zu lang … 太长 🙂", "rows": [1, 2.5, None, True]}
    path = tmp_path / "file.json"
    code = "import json, sys, pathlib; from rebuild.files import write_json; "
    code += "write_json(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))"
    environ = os.environ | {"PYTHONPATH": "workflow/scripts", "LC_ALL": "C", "PYTHONUTF8": "0"}
    environ |= {"PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(path), json.dumps(value)]
    subprocess.run(command, env=environ, check=True)
    assert read_json(path) == value
    assert "太长" in path.read_text(encoding="utf-8")


def test_a_value_that_json_does_not_know_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file.json"
    write_json(path, "old")
    with pytest.raises(TypeError):
        write_json(path, {"path": Path()})
    assert read_json(path) == "old"
    assert names(tmp_path) == ["file.json"]


def test_a_files_hash_is_sha256sums(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3_000_000))
    listed = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout
    assert sha256_file(path) == listed.split()[0]


def test_a_values_hash_depends_on_content_alone():
    value = {"b": [1, {"y": None, "x": "ü\ud800"}], "a": 0.5}
    turned = {"a": 0.5, "b": [1, {"x": "ü\ud800", "y": None}]}
    assert sha256_json(value) == sha256_json(turned)
    assert sha256_json(value) != sha256_json({**value, "a": 0.25})
    assert sha256_json([1, 2]) != sha256_json([2, 1])
    canonical = json.dumps({"a": 1, "b": "ü"}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)  # fmt: skip
    assert sha256_json({"b": "ü", "a": 1}) == hashlib.sha256(canonical.encode()).hexdigest()
