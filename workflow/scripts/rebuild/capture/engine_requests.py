"""One sample put to a capturing server: the request, the file that the hook writes for it, and what can go wrong."""

import itertools
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import requests

from rebuild.capture.engine_files import read_states
from rebuild.capture.engine_flags import PREFIX, Layers
from rebuild.capture.engine_hook import FAILED, PART, WHOLE
from rebuild.errors import StepError
from rebuild.serving.failure import explain_status, read_tail
from rebuild.serving.server import Server
from rebuild.states.captured import Captured, Wanted

LOOK_S = 0.005  # between two looks for a file that is being written
END_S = 5.0  # what a server that lets go of a request has to end in, before it counts as alive

Ids = Sequence[int]


@dataclass(frozen=True)
class Engine:
    """A ready server that captures, what its files must hold, and limits: ids, tokens of a sample, tokens in flight."""

    server: Server
    session: requests.Session
    folder: Path
    wanted: Wanted
    layers: Layers
    hidden_size: int
    vocabulary: int
    longest: int
    at_once: int
    stall_s: float
    numbers: Iterator[int] = field(default_factory=itertools.count)
    run: str = field(default_factory=lambda: uuid.uuid4().hex[:8])


class Stopped(Exception):
    """Nobody waits for this sample any more."""


def capture_one(engine: Engine, ids: Ids, stopping: threading.Event) -> Captured:
    """Have one sample prefilled and return its states.

    Raises:
        StepError: the server refused it, or its states are not what was asked for.
        ServerDied: the server failed the request.
    """
    name = f"{PREFIX}{engine.run}-{next(engine.numbers)}"
    where = f"{len(ids)} tokens; server log {engine.server.log}"
    prefill(engine, name, ids, where)
    path = await_file(engine, name, where, stopping)
    try:
        return read_states(path, ids, engine.wanted, engine.layers, engine.hidden_size, where)
    finally:
        path.unlink()


def prefill(engine: Engine, name: str, ids: Ids, where: str) -> None:
    """Send one sample under a name; its one generated token is not looked at.

    Raises:
        StepError: the server refused the sample.
        ServerDied: the server did not answer, or with a failure of its own.
    """
    body = {
        "rid": name,
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    try:
        answer = engine.session.post(f"{engine.server.url}/generate", json=body)
        reply = answer.json()
    except requests.RequestException as error:
        raise lost(engine.server, f"a request failed: {type(error).__name__}: {error}") from error
    if answer.status_code >= 500:
        raise lost(engine.server, f"HTTP {answer.status_code}: {answer.text[:500]}")
    finish = reply.get("meta_info", {}).get("finish_reason") or {}
    if answer.status_code != 200 or finish.get("type") == "abort":
        raise StepError(
            "the server refused a sample",
            where=where,
            expected="HTTP 200, and a token after the sample",
            seen=f"HTTP {answer.status_code}: {answer.text[:500]}",
            remedy="its ids must be the model's, and context-length in `server.flags` hold the longest sample",
        )


def lost(server: Server, what: str) -> StepError:
    """Return the error for a server that failed a request: its own end, if that is why, before what was seen of it."""
    deadline = time.monotonic() + END_S
    while (status := server.exit_status()) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if status is not None:
        what = f"the server ended at work, {explain_status(status)}"
    return server.died(what)


def await_file(engine: Engine, name: str, where: str, stopping: threading.Event) -> Path:
    """Return the file of a sample that has been prefilled, as soon as it is whole.

    Raises:
        StepError: the hook did not see the sample, or could not write the file.
    """
    whole = engine.folder / f"{name}{WHOLE}"
    deadline = time.monotonic() + engine.stall_s
    while not whole.exists():
        if stopping.is_set():
            raise Stopped
        writing = (engine.folder / f"{name}{PART}").exists()
        if not whole.exists() and (not writing or time.monotonic() > deadline):
            raise no_file(engine, name, where, writing)
        time.sleep(LOOK_S)
    return whole


def no_file(engine: Engine, name: str, where: str, writing: bool) -> StepError:
    """Return the error for states that did not come: the hook failed, is still at it, or was not called."""
    tail = "the log ends:\n" + read_tail(engine.server.log)
    what = "the hook in the server did not see a sample that the server prefilled"
    remedy = "this SGLang does not run its modules as hooks need it: set hidden_states.backend: transformers"
    if (engine.folder / f"{name}{FAILED}").exists():
        what = "the hook in the server could not write a sample's states"
        remedy = f"the reason is in the server's log; is there room in {engine.folder}?"
    elif writing:
        what = f"a sample's states were not written within {engine.stall_s:.0f} s"
        remedy = f"the disk of {engine.folder} is too slow or hangs"
    return StepError(
        what, where=where, expected=f"{name}{WHOLE} in {engine.folder}", seen=tail, remedy=remedy
    )
