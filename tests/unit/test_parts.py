"""The log of finished parts: what is kept, what is done again."""

import resource
import threading

import pytest

from rebuild.files import sha256_file
from rebuild.states.parts import Due, Key, begin_log, read_log, record_parts, whole_parts


def make_part(root, sample_id, content=b"states", made_from="now"):
    path = root / "00000" / f"{sample_id}.ckpt"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return {
        "sample_id": sample_id,
        "format": "specforge",
        "file": f"00000/{sample_id}.ckpt",
        "bytes": len(content),
        "sha256": sha256_file(path),
        "made_from": made_from,
    }


@pytest.fixture
def parts(tmp_path):
    return [make_part(tmp_path, name) for name in ("a", "b", "c")]


def kept(tmp_path, parts, wanted=("a", "b", "c")):
    due = {Key(name, "specforge"): Due(f"00000/{name}.ckpt", "now") for name in wanted}
    return sorted(key.sample_id for key in whole_parts(parts, due, tmp_path))


def test_recorded_parts_are_read_back_in_order(tmp_path, parts):
    begin_log(tmp_path / "log", parts[:1])
    record_parts(tmp_path / "log", parts[1:])
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
    record_parts(tmp_path / "log", parts[2:])
    assert read_log(tmp_path / "log") == [parts[0], parts[2]]


def test_a_line_that_a_full_disk_took_only_half_of_is_an_error(tmp_path, parts):
    """Files of a limited size end as a full disk does: the write takes what fits, and says so only by its count."""
    begin_log(tmp_path / "log", parts[:1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "log" / ".parts.jsonl").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left on device"):
            record_parts(tmp_path / "log", parts[1:2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_log(tmp_path / "log") == parts[:1]


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


def test_a_part_of_another_format_or_in_another_place_is_not_kept(tmp_path, parts):
    due = {
        Key("a", "modelopt"): Due("00000/a.ckpt", "now"),
        Key("b", "specforge"): Due("00000/other.ckpt", "now"),
        Key("c", "specforge"): Due("00000/c.ckpt", "now"),
    }
    assert list(whole_parts(parts, due, tmp_path)) == [Key("c", "specforge")]


def test_writers_do_not_mix_their_lines(tmp_path):
    folder = tmp_path / "log"
    begin_log(folder, [])
    large = [{"sample_id": str(n), "rms": [0.123456789] * 3000} for n in range(16)]
    threads = [threading.Thread(target=record_parts, args=(folder, [part])) for part in large]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_log(folder), key=lambda part: int(part["sample_id"])) == large
