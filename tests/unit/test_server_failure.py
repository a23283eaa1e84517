"""What a server's end is put down to; the lines are SGLang's, torch's and the kernel's own."""

from pathlib import Path

import pytest

from rebuild.serving.failure import TAIL_LINES, explain_status, probable_cause, read_tail


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "ERROR: [Errno 98] error while attempting to bind: address already in use",
            "port was taken",
        ),
        ("sglang serve: error: unrecognized arguments: --x 1", "correct `server.flags`"),
        (
            "sglang serve: error: argument --tp-size: invalid int value: 'a'",
            "correct `server.flags`",
        ),
        ("Not enough memory. Please try to increase --mem-fraction-static.", "raise mem-fraction"),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
            "lower mem-fraction",
        ),
        ("OSError: Repo id must be in the form 'repo_name': '/absent'", "check `model.source`"),
        ("Segmentation fault", "read the server's log"),
    ],
)
def test_known_ends_come_with_advice(line: str, advice: str) -> None:
    assert advice in probable_cause(f"INFO loading\n{line}\nTraceback ends")


@pytest.mark.parametrize(
    ("status", "words"), [(2, "status 2"), (-9, "memory runs out"), (-15, "signal SIGTERM")]
)
def test_an_exit_status_is_said_in_words(status: int, words: str) -> None:
    assert words in explain_status(status)


def test_the_tail_is_the_last_lines_of_a_long_log_whatever_its_bytes(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes(b"\xff\xfe noise\n" * 5000 + b"".join(b"line %d\n" % n for n in range(100)))
    tail = read_tail(log).splitlines()
    assert len(tail) == TAIL_LINES
    assert tail[-1] == "line 99"
