"""A copy of the workflow whose jobs only write their names: what Snakemake decides to run, without the cost of running it."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tests.support.trees import copy_tree, environment, run_snakemake, snakemake_command

TIMEOUT_S = 60

# While the file `hold` names the job's rule, the job waits; `calls` gets a line at a job's start and end.
DUMMY = """
import json, os, time
from pathlib import Path
from rebuild.prompts.sources import source_identity
from rebuild.step import begin_step

def note(event):
    job = {"event": event, "rule": snakemake.rule, "shard": snakemake.wildcards.get("shard"), "pid": os.getpid()}
    with open("calls", "a") as calls:
        calls.write(json.dumps(job | {"gpu": snakemake.resources.get("gpu")}) + "\\n")

begin_step(snakemake.log[0])
note("start")
hold = Path("hold")
try:
    while hold.exists() and hold.read_text() == snakemake.rule:
        time.sleep(0.05)
    for output in snakemake.output:
        Path(output).write_text(snakemake.rule)
    if snakemake.rule == "shard_prompts":
        sources = source_identity(Path(snakemake.input.source))
        Path(snakemake.output.manifest).write_text(json.dumps({"sources": sources}))
finally:
    note("end")
"""


def dummy_tree(folder: Path, canary: int = 0) -> Path:
    """Copy the tree into `folder`, with a dummy in place of every script, 2 shards, and two CPU slots as devices.

    `canary` is the number of prompts of one; by default there is none.
    """
    copy_tree(folder)
    for script in (folder / "workflow" / "scripts").glob("*.py"):
        script.write_text(DUMMY)
    config = folder / "config" / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["prompts"]["shards"] = 2
    settings["plan"]["canary"] = canary
    settings["devices"] = ["cpu:0", "cpu:1"]
    config.write_text(yaml.safe_dump(settings))
    return folder


def planned(tree: Path, *arguments: str) -> dict[str, int]:
    """Return what a dry-run would run: jobs by rule, target rules left out."""
    done = run_snakemake(tree, "--dry-run", *arguments, timeout_s=TIMEOUT_S)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    if "Nothing to be done" in output:
        return {}
    table = output.rpartition("Job stats:")[2].partition("total")[0]
    jobs = {rule: int(count) for rule, count in re.findall(r"^(\w+_\w+) +(\d+)$", table, re.M)}
    assert jobs or "all" in table, output
    return jobs


def run_tree(tree: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the workflow in the tree; the whole output is in `stdout`."""
    done = run_snakemake(tree, "--cores", "4", *arguments, timeout_s=TIMEOUT_S)
    done.stdout += done.stderr
    return done


@contextmanager
def live_driver(tree: Path, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start the workflow in the tree without waiting for it; what is left of it at the end is killed."""
    with open(tree / "driver.log", "ab") as log:
        driver = subprocess.Popen(
            snakemake_command("--cores", "4", *arguments),
            cwd=tree,
            env=environment(tree),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield driver
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()


def calls(tree: Path, *events: str) -> list[dict[str, Any]]:
    """Return the noted starts and ends of jobs, or only those events, in order of time."""
    lines = (tree / "calls").read_text().splitlines() if (tree / "calls").exists() else []
    return [call for call in map(json.loads, lines) if not events or call["event"] in events]


def started(tree: Path) -> dict[str, int]:
    """Return how many jobs of each rule were started."""
    return dict(Counter(call["rule"] for call in calls(tree, "start")))


def wait_for_job(tree: Path, rule: str) -> int:
    """Return the process id of the first job of a rule, as soon as there is one."""

    def pids() -> list[int]:
        return [call["pid"] for call in calls(tree, "start") if call["rule"] == rule]

    wait_until(pids)
    return pids()[0]


def wait_until(condition: Callable[[], Any]) -> None:
    """Wait until the condition holds; stop the test when it takes too long."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what the test waits for has not come")
        time.sleep(0.05)
