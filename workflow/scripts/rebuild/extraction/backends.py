"""The two backends of capture, opened on leased devices: transformers, and SGLang's own capture.

Each yields the plain references of the checked samples beside what captures: with transformers they come from the very
weights that are then cut down; with SGLang from a process of their own, before the server takes the device.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rebuild.extraction.checked import Checked
from rebuild.model.manifest import ensure_model, load_manifest
from rebuild.serving.devices import Device
from rebuild.serving.installed_flags import translate_flags
from rebuild.serving.lease import Lease
from rebuild.states.captured import CaptureAll, Wanted
from rebuild.states.reference import Reference


@dataclass(frozen=True)
class Target:
    """What is captured: the staged model, the wanted states, and how transformers computes them."""

    manifest: Path
    wanted: Wanted
    dtype: str
    batch_tokens: int | None
    temperatures: tuple[float, ...]


@dataclass(frozen=True)
class ServerSettings:
    """How the server of the SGLang backend is started: settings of `server`, and where its files go."""

    server: dict[str, Any]
    logs: Path
    scratch: Path
    stand_in: Path


@dataclass(frozen=True)
class Opened:
    """A backend at work, the references of the checked samples, and what batching does to a few of them."""

    capture_all: CaptureAll
    references: list[Reference]
    batching: Callable[[Sequence[Sequence[int]]], list[float]] | None = None


@contextmanager
def open_transformers(target: Target, lease: Lease, checked: Sequence[Checked]) -> Iterator[Opened]:
    """Load the model with transformers, take the references from it, and cut it down to what is wanted."""
    devices = torch_devices(lease.devices)
    # Only now: CUDA reads its environment once, when some library first asks what devices there are.
    from rebuild.capture.batches import batching_error, capture_all
    from rebuild.capture.forward import plain_reference
    from rebuild.capture.model import cut, load_whole

    whole = load_whole(
        ensure_model(target.manifest),
        dtype=target.dtype,
        devices=devices,
        trust_remote_code=load_manifest(target.manifest)["trust_remote_code"],
    )
    references = [
        plain_reference(whole, case.sample.input_ids.tolist(), target.temperatures)
        for case in checked
    ]
    model = cut(whole, target.wanted)
    batching = None
    if target.batch_tokens:
        batching = partial(batching_error, model, batch_tokens=target.batch_tokens)
    yield Opened(
        partial(capture_all, model, batch_tokens=target.batch_tokens), references, batching
    )


@contextmanager
def open_engine(
    target: Target,
    settings: ServerSettings,
    lease: Lease,
    checked: Sequence[Checked],
    longest: int,
) -> Iterator[Opened]:
    """Take the references in a process of their own, then start an SGLang server that captures."""
    from rebuild.capture.apart import references_apart

    references = references_apart(
        ensure_model(target.manifest),
        [case.sample.input_ids.tolist() for case in checked],
        folder=settings.scratch,
        dtype=target.dtype,
        devices=torch_devices(lease.devices),
        temperatures=target.temperatures,
        trust_remote_code=load_manifest(target.manifest)["trust_remote_code"],
    )
    with engine(target, settings, lease, longest) as capture_all:
        yield Opened(capture_all, references)


def engine(
    target: Target, settings: ServerSettings, lease: Lease, longest: int
) -> AbstractContextManager[CaptureAll]:
    """Return the context of a server that captures samples of up to `longest` tokens."""
    from rebuild.capture.engine import engine_capture

    cache = settings.logs.parent / "installed_flags.json"
    server = settings.server
    return engine_capture(
        dict(load_manifest(target.manifest)),
        wanted=target.wanted,
        flags=translate_flags(server["flags"], lease.devices, settings.stand_in, cache),
        tensor_parallel=server["tensor_parallel"],
        lease=lease,
        stand_in=settings.stand_in,
        logs=settings.logs,
        scratch=settings.scratch,
        longest=longest,
        ready_s=server["ready_s"],
        stall_s=server["stall_s"],
    )


def torch_devices(devices: Sequence[Device]) -> list[str]:
    """Return torch's names of the leased devices, and show this process no others."""
    if devices[0].kind != "gpu":
        return ["cpu"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device.uuid for device in devices)
    return [f"cuda:{number}" for number in range(len(devices))]
