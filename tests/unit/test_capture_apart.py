"""References from a process of its own: the same as in this one, and whatever stops it is said here."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from rebuild.capture.apart import references_apart
from rebuild.capture.forward import plain_reference
from rebuild.capture.model import load_whole
from rebuild.errors import StepError
from rebuild.serving.processes import start_time
from tests.support.tiny_states import LAYERS, make_ids, save_model
from tests.support.trees import ROOT


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("llama"))


def ask(folder, results, sequences, **changes):
    options = {"dtype": "float32", "devices": ["cpu"], **changes}
    return references_apart(folder, sequences, folder=results, **options)


def test_references_are_the_same_as_in_this_process_and_leave_no_file(llama, tmp_path):
    sequences = [make_ids(23, seed=1), make_ids(9, seed=2)]
    references = ask(llama, tmp_path / "results", sequences, temperatures=[0.7])
    whole = load_whole(llama, dtype="float32", devices=["cpu"])
    for reference, ids in zip(references, sequences, strict=True):
        here = plain_reference(whole, ids, [0.7])
        assert reference.positions == here.positions == list(range(len(ids)))
        assert torch.equal(reference.layers, here.layers)
        assert torch.equal(reference.post_norm, here.post_norm)
        assert list(reference.logprobs) == [0.7, 1.0]
        for temperature, values in here.logprobs.items():
            assert np.array_equal(reference.logprobs[temperature], values)
    assert list((tmp_path / "results").iterdir()) == []


def test_what_stops_the_process_is_raised_here_in_its_own_words(llama, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS + 1
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(StepError) as stopped:
        ask(folder, tmp_path / "results", [make_ids(5, seed=3)])
    assert stopped.value.where == str(folder)
    assert stopped.value.what == "the model's files lack some of its weights"
    assert f"layers.{LAYERS}." in stopped.value.seen


def test_an_unforeseen_error_is_raised_here_with_its_message(llama, tmp_path, capfd):
    with pytest.raises(StepError) as stopped:
        ask(llama, tmp_path / "results", [[1, 2, 10**6]])
    assert stopped.value.seen.startswith("IndexError: ")
    assert "Traceback" in capfd.readouterr().err
    assert list((tmp_path / "results").iterdir()) == []


STARTER = """
import os, sys, time
from pathlib import Path
sys.path[:0] = ["workflow/scripts"]
from rebuild.capture import apart

def wait(path, reference):
    print(os.getpid(), flush=True)
    time.sleep(300)

def load_whole(*args, **kwargs):
    pass

if __name__ == "__main__":
    apart.references_apart(Path("model"), [[1]], folder=Path(sys.argv[1]), dtype="float32", devices=["cpu"])
else:  # the process of the references imports this file first
    apart.load_whole = apart.plain_reference = lambda *args, **kwargs: None
    apart.write_reference = wait
"""


@pytest.fixture
def waiting(tmp_path):
    """A process that waits for references, and the id of the one that does not finish them."""
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    command = [sys.executable, str(script), str(tmp_path / "results")]
    starter = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    yield starter, int(starter.stdout.readline())
    starter.kill()
    starter.communicate()


def is_gone(pid, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while start_time(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    return start_time(pid) is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_ends_with_the_one_that_asked(waiting, number):
    starter, pid = waiting
    starter.send_signal(number)
    assert starter.wait(10) != 0
    assert is_gone(pid)


def test_a_process_that_is_killed_is_said_to_have_been(waiting):
    starter, pid = waiting
    os.kill(pid, signal.SIGKILL)
    _, error = starter.communicate(timeout=20)
    assert "StepError" in error
    assert "signal 9" in error
