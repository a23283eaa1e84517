"""Captures hidden states with the serving engine: what a drafter will see when it serves beside this model.

One SGLang server prefills the samples, several at a time, and a hook in its process (`engine_hook`) writes each
sample's states to a file. Here the samples are sent, and the files are read, checked and removed.
"""

import functools
import shutil
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import requests

from rebuild.capture.engine_flags import (
    Layers,
    batch_tokens,
    capture_method,
    capture_purpose,
    keep_flags,
)
from rebuild.capture.engine_requests import Engine, Ids, capture_one
from rebuild.errors import StepError
from rebuild.serving.failure import explain_status
from rebuild.serving.flags import Flags, server_environment
from rebuild.serving.installed_flags import describe_installation, installed_flags
from rebuild.serving.lease import Lease
from rebuild.serving.server import ServerDied, start_server
from rebuild.states.captured import CaptureAll, Captured, SampleError, Wanted
from rebuild.step import say

MOST_AT_ONCE = 128  # samples; each has a thread that waits for its answer
WATCH_S = 1.0  # between two looks at the server while it works


@contextmanager
def engine_capture(
    model: dict[str, Any],
    *,
    wanted: Wanted,
    flags: Flags,
    tensor_parallel: int,
    lease: Lease,
    stand_in: Path,
    logs: Path,
    scratch: Path,
    longest: int,
    ready_s: float,
    stall_s: float,
) -> Iterator[CaptureAll]:
    """Start a server of `model` (its manifest) and yield what captures samples of at most `longest` tokens with it.

    `flags` are the user's, as the installed SGLang calls them. `scratch` is a folder of this job's own on a fast disk or
    in memory, which gets the states of a few prefills at a time. Samples are sent no faster than the caller takes their
    states.

    Raises:
        StepError: the installed SGLang cannot capture this model, or what it captured is not what was asked for.
        ServerDied: the server did not start, ended, or hangs; another one may do better with what is left.
    """
    environment = server_environment(lease.devices, stand_in)
    installed = installed_flags(environment, logs.parent / "installed_flags.json")
    layers = Layers.of(wanted, model["num_hidden_layers"])
    package = Path(describe_installation()["path"])
    method = capture_method(model["architecture"], layers, installed, package)
    say(
        f"layers {list(wanted.layers)}, captured by the engine in its way for {method or 'no drafter'}"
    )
    kept = keep_flags(flags)
    folder = scratch / "captured"
    purpose = capture_purpose(
        kept,
        model=model,
        devices=lease.devices,
        wanted=wanted,
        method=method,
        installed=installed,
        folder=folder,
        longest=longest,
    )
    with (
        emptied(folder),
        start_server(
            flags=kept,
            model=model,
            tensor_parallel=tensor_parallel,
            lease=lease,
            folder=logs,
            stand_in=stand_in,
            attempt=1 + len(list(logs.glob("server-*.log"))),
            purpose=purpose,
        ) as server,
        open_session() as session,
    ):
        server.wait_ready(ready_s)
        engine = Engine(
            server=server,
            session=session,
            folder=folder,
            wanted=wanted,
            layers=layers,
            hidden_size=model["hidden_size"],
            vocabulary=model["vocab_size"],
            longest=longest,
            at_once=2 * (batch_tokens(kept, lease.devices) + longest),
            stall_s=stall_s,
        )
        yield functools.partial(capture_all, engine)


@contextmanager
def emptied(folder: Path) -> Iterator[None]:
    """Make the folder anew, whatever an earlier attempt left in it, and remove it in the end."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_session() -> requests.Session:
    """Return a session for MOST_AT_ONCE requests at a time to this machine."""
    session = requests.Session()
    session.trust_env = False  # no proxy between us and our own machine
    session.mount("http://", requests.adapters.HTTPAdapter(pool_maxsize=MOST_AT_ONCE))
    return session


def capture_all(engine: Engine, samples: Sequence[Ids]) -> Iterator[tuple[int, Captured]]:
    """Yield each sample's position and states as they are ready; equal samples are captured once.

    Samples whose states are ready but not yet taken count as in flight, so a caller that lags is waited for. What has
    been yielded is done; after an error, a new server needs only the rest.

    Raises:
        StepError: a sample was refused, or its states are not what was asked for.
        ServerDied: the server ended, or no token moved for `stall_s` seconds.
    """
    left = iter(grouped(samples, engine))
    flying: dict[Future[Captured], tuple[Ids, list[int]]] = {}
    stopping = threading.Event()
    pool = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="capture")
    following = next_group(left, samples)
    try:
        while following or flying:
            while following and has_room(engine, [ids for ids, _ in flying.values()], following[0]):
                ids, positions = following
                future = pool.submit(capture_one, engine, ids, stopping)
                flying[future] = following
                following = next_group(left, samples)
            future = wait_for_one(engine, list(flying))
            positions = flying[future][1]
            captured = result_of(future, positions[0])
            for position in positions:
                yield position, captured
            del flying[future]
    finally:
        stopping.set()
        pool.shutdown(wait=False, cancel_futures=True)


def grouped(samples: Sequence[Ids], engine: Engine) -> list[list[int]]:
    """Return the positions of equal samples together, by digests of their ids, after checking every sample.

    Raises:
        SampleError: a sample is not one that the server can capture.
    """
    places: dict[bytes, list[int]] = {}
    for position, ids in enumerate(samples):
        check_sample(ids, position, engine)
        digest = sha256(array("q", ids).tobytes()).digest()
        places.setdefault(digest, []).append(position)
    return list(places.values())


def next_group(left: Iterator[list[int]], samples: Sequence[Ids]) -> tuple[Ids, list[int]] | None:
    """Return the ids and the positions of the next samples that are equal, or None after the last."""
    positions = next(left, None)
    return None if positions is None else (samples[positions[0]], positions)


def result_of(future: "Future[Captured]", position: int) -> Captured:
    """Return a sample's states.

    Raises:
        ServerDied: the server failed it.
        SampleError: anything else that is wrong with the sample; it has its position.
    """
    try:
        return future.result()
    except ServerDied:
        raise
    except StepError as error:
        raise SampleError.about(position, error) from error


def check_sample(ids: Ids, position: int, engine: Engine) -> None:
    """Stop if a sample has no token, more than the server was started for, or one that the model does not know.

    The server would take such ids for granted and end in the middle of its work.
    """
    if 0 < len(ids) <= engine.longest and min(ids) >= 0 and max(ids) < engine.vocabulary:
        return
    error = StepError(
        "a sample is not one that the server can capture",
        expected=f"1 to {engine.longest} tokens, ids from 0 to {engine.vocabulary - 1}",
        seen=f"{len(ids)} tokens, ids from {min(ids, default=None)} to {max(ids, default=None)}",
        remedy="the samples must be tokenized for this model, and `longest` hold for all of them",
    )
    raise SampleError.about(position, error)


def has_room(engine: Engine, flying: Sequence[Ids], ids: Ids) -> bool:
    """Tell whether one more sample may be sent."""
    tokens = sum(len(other) for other in flying) + len(ids)
    return not flying or (len(flying) < MOST_AT_ONCE and tokens <= engine.at_once)


def wait_for_one(engine: Engine, flying: Sequence["Future[Captured]"]) -> "Future[Captured]":
    """Return the first of the samples that are ready, while the server lives and its tokens move.

    The wait is in short pieces, since Python handles signals between them.

    Raises:
        ServerDied: it ended, or no token moved for `stall_s` seconds.
    """
    counted, moved = -1, time.monotonic()
    while True:
        done, _ = wait(flying, timeout=WATCH_S, return_when=FIRST_COMPLETED)
        if done:
            return next(future for future in flying if future in done)
        status = engine.server.exit_status()
        if status is not None:
            raise engine.server.died(f"the server ended at work, {explain_status(status)}")
        now = time.monotonic()
        with suppress(requests.RequestException):  # it may be too busy to tell
            tokens = engine.server.tokens_generated()
            if tokens != counted:
                counted, moved = tokens, now
        if now - moved > engine.stall_s:
            raise engine.server.died(
                f"no token in {now - moved:.0f} s with {len(flying)} samples in flight"
            )
