"""Folders are whole or absent, made once, and copies equal their origin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rebuild.errors import StepError
from rebuild.files import sha256_file
from rebuild.model.copies import build_once, check_space, copy_model
from rebuild.model.files import FileFacts, hash_files
from tests.support.packages import REPOSITORY

BUILD_SLOWLY = """
import sys, time
from pathlib import Path
from rebuild.model.copies import build_once

def build(folder):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    (folder / "half").touch()
    time.sleep(1)
    (folder / "whole").touch()

found = build_once(Path(sys.argv[1]), build)
assert sorted(path.name for path in found.iterdir()) == ["half", "whole"]
"""


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """A folder of two files, one of them in a subfolder."""
    folder = tmp_path / "origin"
    (folder / "chat_templates").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "chat_templates" / "a.jinja").write_text("x" * 1000)
    return folder


@pytest.fixture
def files(origin: Path) -> dict[str, FileFacts]:
    """What is recorded of the origin."""
    return hash_files(origin, ["chat_templates/a.jinja", "config.json"])


def test_two_processes_at_once_build_the_folder_once(tmp_path: Path) -> None:
    target, log = tmp_path / "deep" / "model", tmp_path / "log"
    command = [sys.executable, "-c", BUILD_SLOWLY, str(target), str(log)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow" / "scripts")}
    both = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert log.read_text() == "built\n"


def test_a_build_that_fails_leaves_nothing_and_the_next_one_begins_afresh(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("broke off")

    def build(folder: Path) -> None:
        assert list(folder.iterdir()) == []
        (folder / "whole").touch()

    with pytest.raises(RuntimeError, match="broke off"):
        build_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    assert (build_once(tmp_path / "model", build) / "whole").exists()


def test_what_a_killed_build_left_is_no_model(tmp_path: Path) -> None:
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "half").touch()
    found = build_once(tmp_path / "model", lambda folder: (folder / "whole").touch())
    assert [path.name for path in found.iterdir()] == ["whole"]


def test_a_download_goes_on_where_it_broke_off(tmp_path: Path) -> None:
    def fetch(folder: Path) -> None:
        seen.append([path.name for path in folder.iterdir()])
        (folder / "part").touch()
        if len(seen) == 1:
            raise ConnectionError("gone")

    seen: list[list[str]] = []
    with pytest.raises(ConnectionError):
        build_once(tmp_path / "model", fetch, resume=True)
    build_once(tmp_path / "model", fetch, resume=True)
    assert seen == [[], ["part"]]


def test_the_copy_holds_the_recorded_files_and_no_others(
    origin: Path, files: dict[str, FileFacts], tmp_path: Path
) -> None:
    (origin / "README.md").touch()
    target = tmp_path / "shm" / "model"
    copy_model(origin, target, files)
    assert hash_files(target, list(files)) == files
    assert not (target / "README.md").exists()


def test_a_whole_copy_is_used_as_it_is(
    origin: Path, files: dict[str, FileFacts], tmp_path: Path
) -> None:
    copy_model(origin, tmp_path / "copy", files)
    before = (tmp_path / "copy" / "config.json").stat()
    copy_model(origin, tmp_path / "copy", files)
    after = (tmp_path / "copy" / "config.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_copy_that_was_changed_cut_or_emptied_is_made_again(
    origin: Path, files: dict[str, FileFacts], tmp_path: Path, content: str | None
) -> None:
    copy_model(origin, tmp_path / "copy", files)
    broken = tmp_path / "copy" / "config.json"
    broken.unlink() if content is None else broken.write_text(content)
    copy_model(origin, tmp_path / "copy", files)
    assert sha256_file(broken) == files["config.json"]["sha256"]


def test_an_origin_that_changed_after_it_was_recorded_is_not_copied(
    origin: Path, files: dict[str, FileFacts], tmp_path: Path
) -> None:
    (origin / "config.json").write_text("[]")
    with pytest.raises(StepError, match=r"differs(.|\n)*config\.json"):
        copy_model(origin, tmp_path / "copy", files)
    assert not (tmp_path / "copy").exists()


def test_too_little_space_is_said_before_anything_is_copied(
    origin: Path, files: dict[str, FileFacts], tmp_path: Path
) -> None:
    huge: dict[str, FileFacts] = {**files, "config.json": {"size": 10**18, "sha256": ""}}
    with pytest.raises(StepError, match=r"1000000000000001000 bytes(.|\n)*model\.stage_to"):
        copy_model(origin, tmp_path / "shm" / "copy", huge)
    assert [path.name for path in (tmp_path / "shm").iterdir()] == [".copy.lock"]


def test_enough_space_is_no_error(tmp_path: Path) -> None:
    check_space(tmp_path, 1)
