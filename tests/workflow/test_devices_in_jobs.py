"""Jobs and devices: the real Snakefile under real Snakemake, generate jobs that lease a device and note when they had it."""

from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.dummies import calls, dummy_tree, run_tree
from tests.support.trees import write_config

SLOTS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]

# Leases as `generate_shard` does, and keeps the device until `together` jobs have one, or for a moment.
LEASING = """
import json, time
from pathlib import Path
from rebuild.serving.devices import select_devices
from rebuild.serving.lease import check_granted, lease_devices
from rebuild.step import begin_step

def note(event, devices):
    line = {"event": event, "shard": snakemake.wildcards.shard, "at": time.monotonic(), "devices": devices}
    with open("calls", "a") as calls:
        calls.write(json.dumps(line) + "\\n")

def others_have_one(count):
    lines = [json.loads(line) for line in Path("calls").read_text().splitlines()]
    return len({line["shard"] for line in lines if line["event"] == "leased"}) >= count

begin_step(snakemake.log[0])
wanted = snakemake.params.server["tensor_parallel"]
check_granted(wanted, snakemake.resources.gpu)
note("started", [])
with lease_devices(wanted, select_devices(snakemake.params.devices)) as lease:
    devices = [device.id for device in lease.devices]
    note("leased", devices)
    deadline = time.monotonic() + 60
    while not others_have_one(int(Path("together").read_text())) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    note("freed", devices)
Path(snakemake.output.generated).write_text("")
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree whose generate jobs only lease devices."""
    folder = dummy_tree(tmp_path / "tree")
    (folder / "workflow" / "scripts" / "generate_shard.py").write_text(LEASING)
    return folder


def generate(tree: Path, shards: int, *arguments: str, together: int = 1, **changes: Any) -> Any:
    """Run the generate phase with that many shards; return Snakemake's end."""
    (tree / "together").write_text(str(together))
    config = write_config(tree, prompts={"shards": shards}, devices=SLOTS, **changes)
    return run_tree(tree, "generated", "--configfile", str(config), "--cores", "16", *arguments)


def leases(tree: Path) -> dict[str, list[tuple[float, float, str]]]:
    """Return, by device, when it was leased by which shard, in order of time."""
    ends = {call["shard"]: call["at"] for call in calls(tree, "freed")}
    found: dict[str, list[tuple[float, float, str]]] = {}
    for call in calls(tree, "leased"):
        for device in call["devices"]:
            found.setdefault(device, []).append((call["at"], ends[call["shard"]], call["shard"]))
    return {device: sorted(spans) for device, spans in found.items()}


def assert_never_shared(tree: Path, jobs: int, devices: int = 1) -> None:
    spans = leases(tree)
    assert sum(map(len, spans.values())) == jobs * devices
    assert set(spans) == set(SLOTS)
    for device, held in spans.items():
        for before, after in pairwise(held):
            assert before[1] <= after[0], f"{device}: {before} and {after}"


def most_at_once(tree: Path) -> int:
    """Return how many jobs had been started and not yet done with their device at the same time."""
    started = {call["shard"]: call["at"] for call in calls(tree, "started")}
    ends = {call["shard"]: call["at"] for call in calls(tree, "freed")}
    return max(sum(started[s] <= at < ends[s] for s in started) for at in started.values())


def test_sixteen_jobs_on_four_devices_never_share_one_without_any_resources_given(tree: Path):
    done = generate(tree, 16, together=4)
    assert done.returncode == 0, done.stdout
    assert_never_shared(tree, jobs=16)
    assert most_at_once(tree) <= 4


def test_when_more_jobs_run_than_there_are_devices_the_leases_keep_them_apart(tree: Path):
    done = generate(tree, 12, "--resources", "gpu=12", together=4)
    assert done.returncode == 0, done.stdout
    assert_never_shared(tree, jobs=12)
    assert most_at_once(tree) > 4


def test_jobs_on_different_devices_run_at_the_same_time(tree: Path):
    done = generate(tree, 4, together=4)
    assert done.returncode == 0, done.stdout
    spans = leases(tree)
    assert set(spans) == set(SLOTS)
    times = [span for held in spans.values() for span in held]
    for one, other in combinations(times, 2):
        assert one[0] < other[1] and other[0] < one[1], f"{one} and {other}"


def test_jobs_of_two_devices_each_share_none_either(tree: Path):
    done = generate(tree, 6, server={"tensor_parallel": 2})
    assert done.returncode == 0, done.stdout
    assert_never_shared(tree, jobs=6, devices=2)
    assert most_at_once(tree) <= 2
