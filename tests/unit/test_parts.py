"""The log of finished parts: what is kept, what is done again."""

import pytest

from rebuild.files import atomic_path, sha256_file
from rebuild.states.parts import (
    begin_log,
    read_log,
    record_part,
    remove_strays,
    whole_parts,
)


def make_part(root, sample_id, content=b"states", made_from="now"):
    path = root / "00000" / f"{sample_id}.ckpt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return {
        "sample_id": sample_id,
        "file": f"00000/{sample_id}.ckpt",
        "bytes": len(content),
        "sha256": sha256_file(path),
        "made_from": made_from,
    }


@pytest.fixture
def parts(tmp_path):
    return [make_part(tmp_path, name) for name in ("a", "b", "c")]


def kept(tmp_path, parts, wanted=("a", "b", "c")):
    return sorted(whole_parts(parts, dict.fromkeys(wanted, "now"), tmp_path))


def test_recorded_parts_are_read_back_in_order(tmp_path, parts):
    begin_log(tmp_path / "log", parts[:1])
    for part in parts[1:]:
        record_part(tmp_path / "log", part)
    assert read_log(tmp_path / "log") == parts


def test_no_log_means_no_parts(tmp_path):
    assert read_log(tmp_path / "log") == []


@pytest.mark.parametrize("rest", [b'{"sample_id": "b", "fi', b"\0\0\0\0", b"[]\n", b"\xff"])
def test_a_line_that_a_crash_cut_short_counts_as_not_written(tmp_path, parts, rest):
    begin_log(tmp_path / "log", parts[:1])
    with open(tmp_path / "log" / ".parts.jsonl", "ab") as log:
        log.write(rest)
    assert read_log(tmp_path / "log") == parts[:1]
    begin_log(tmp_path / "log", read_log(tmp_path / "log"))
    record_part(tmp_path / "log", parts[2])
    assert read_log(tmp_path / "log") == [parts[0], parts[2]]


def test_parts_that_are_as_recorded_are_kept(tmp_path, parts):
    assert kept(tmp_path, parts) == ["a", "b", "c"]


def test_a_part_that_is_cut_short_flipped_or_gone_is_not_kept(tmp_path, parts):
    folder = tmp_path / "00000"
    (folder / "a.ckpt").write_bytes(b"state")
    (folder / "b.ckpt").write_bytes(b"statEs")
    (folder / "c.ckpt").unlink()
    assert kept(tmp_path, parts) == []


def test_a_part_of_other_circumstances_or_of_no_sample_is_not_kept(tmp_path, parts):
    other = make_part(tmp_path, "d", made_from="before")
    assert kept(tmp_path, [*parts, other], wanted=("a", "b", "d")) == ["a", "b"]


def test_strays_are_removed_and_nothing_else_is_touched(tmp_path):
    folder = tmp_path / "00000"
    (folder / "deeper").mkdir(parents=True)
    (tmp_path / "target.ckpt").touch()
    (folder / "link.ckpt").symlink_to(tmp_path / "target.ckpt")
    names = ["a.ckpt", "old.ckpt", "notes.txt", ".gitkeep", ".mine.tmp", ".old.ckpt.77.tmp"]
    for name in [*names, "deeper/x.ckpt"]:
        (folder / name).touch()
    assert remove_strays(folder, ".ckpt", {"a.ckpt"}) == [
        ".old.ckpt.77.tmp",
        "link.ckpt",
        "old.ckpt",
    ]
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert left == {"a.ckpt", "notes.txt", ".gitkeep", ".mine.tmp", "deeper", "deeper/x.ckpt"}
    assert (tmp_path / "target.ckpt").exists()


def test_what_an_atomic_write_leaves_behind_when_killed_is_a_stray(tmp_path):
    with atomic_path(tmp_path / "one.ckpt") as temporary:
        temporary.touch()
        assert remove_strays(tmp_path, ".ckpt", set()) == [temporary.name]
        temporary.touch()


def test_a_folder_that_is_not_there_has_no_strays(tmp_path):
    assert remove_strays(tmp_path / "none", ".ckpt", set()) == []
