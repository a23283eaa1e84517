"""A real server that stays, for faults that do not end it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rebuild.model.manifest import load_manifest
from rebuild.serving.devices import select_devices
from rebuild.serving.lease import lease_devices
from rebuild.serving.server import Server, start_server
from tests.support.generate_jobs import make_job
from tests.support.trees import ROOT


@pytest.fixture(scope="session")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the tiny model that takes no processor time while it has no work. Not to be stopped."""
    folder = tmp_path_factory.mktemp("server")
    manifest = make_job(folder, tiny_llama, ["?"]).arguments()["model_manifest"]
    with (
        lease_devices(1, select_devices(["cpu"]), folder=folder / "leases") as lease,
        start_server(
            flags={"sleep-on-idle": True},
            model=dict(load_manifest(manifest)),
            tensor_parallel=1,
            lease=lease,
            folder=folder,
            stand_in=ROOT / "envs" / "cpu" / "stand_in",
        ) as running,
    ):
        running.wait_ready(600)
        yield running
