"""Pieces of a file on their way to the disk: hashed beside the writing, all of them, in their order."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from rebuild.errors import StepError
from rebuild.formats import speculators
from rebuild.formats.catalog import FORMATS
from rebuild.formats.writing import LARGE, HashedFile, write_file
from tests.support.captured import make_captured, make_sample

SOON_S = 10.0


class SlowDigest:
    """A digest that does not begin with a piece before it may."""

    def __init__(self, may: Event) -> None:
        self.may = may
        self.pieces: list[int] = []

    def update(self, piece: memoryview) -> None:
        if piece.nbytes >= LARGE and not self.may.wait(SOON_S):
            raise TimeoutError("nobody let the digest begin")
        self.pieces.append(piece.nbytes)


@pytest.fixture
def may() -> Event:
    return Event()


@pytest.fixture
def hashed(tmp_path, may):
    with ThreadPoolExecutor(1) as helper, open(tmp_path / "file", "wb") as file:
        slow = HashedFile(file, helper)
        slow.digest = SlowDigest(may)
        yield slow
        may.set()


def test_a_piece_whose_memory_goes_away_is_hashed_when_it_is_written(hashed, may):
    with ThreadPoolExecutor(1) as caller:
        writing = caller.submit(hashed.write, bytes(LARGE))
        with pytest.raises(TimeoutError):
            writing.result(timeout=0.1)
        may.set()
        assert writing.result(timeout=SOON_S) == LARGE
    assert hashed.digest.pieces == [LARGE]


def test_facts_are_those_of_all_that_was_written(tmp_path):
    pieces = [bytes([value]) * size for value, size in enumerate((3, LARGE, 5 * LARGE, 7, LARGE))]

    def fill(file: HashedFile) -> None:
        for piece in pieces:
            file.write(piece)
            assert file.facts().bytes == file.bytes

    facts = write_file(tmp_path / "file", fill, 0)
    whole = b"".join(pieces)
    assert (tmp_path / "file").read_bytes() == whole
    assert (facts.bytes, facts.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())


@pytest.mark.parametrize("name", ["speculators", "speculators_fp8"])
def test_states_made_in_large_pieces_have_their_files_checksum(name, tmp_path, monkeypatch):
    monkeypatch.setattr(speculators, "PIECE_VALUES", LARGE)
    kind, captured = FORMATS[name], make_captured(900, hidden=256)
    content = kind.tensors(make_sample(length=900), captured, "none")
    assert len(list(content["hidden_states"].make())) > 10
    with torch.inference_mode():
        facts = kind.write(tmp_path / "file", content)
    assert facts.sha256 == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_full_disk_is_called_so_in_every_format(name, tmp_path, monkeypatch):
    sample, captured = make_sample("a_gen0", 400), make_captured(400)
    plain = HashedFile.append

    def full(self, view):
        if self.bytes + view.nbytes > 5000:
            raise OSError(28, "No space left on device")
        plain(self, view)

    monkeypatch.setattr(HashedFile, "append", full)
    kind = FORMATS[name]
    with pytest.raises(StepError, match="could not be written") as stopped:
        kind.write(tmp_path / "a", kind.tensors(sample, captured, "none"))
    assert "No space left on device" in stopped.value.seen
    assert list(tmp_path.iterdir()) == []
