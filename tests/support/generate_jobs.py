"""Real generate jobs on a tiny model: in this process, or in one of their own that can be killed.

PYTHONPATH=workflow/scripts:. python -m tests.support.generate_jobs FOLDER/job.json
"""

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generate_shard import generate_shard
from rebuild.generate import generated_table
from rebuild.serving.devices import select_devices
from rebuild.serving.lease import open_folder, read_record, record_path
from rebuild.start.config import complete_config, load_schema
from rebuild.step import begin_step
from rebuild.tables import iter_rows
from shard_prompts import shard_prompts
from stage_model import stage_model
from tests.support.trees import ROOT

SCHEMA = load_schema(ROOT / "workflow" / "schemas" / "config.schema.yaml")
GREEDY = {"temperature": 0, "top_p": 1}
PATHS = ("prompts", "model_manifest", "generated", "partial", "server_logs", "stand_in")
PATIENCE_S = 300.0

Row = dict[str, Any]


@dataclass(frozen=True)
class GenerateJob:
    """The generate phase of one shard in a folder of its own, to be run again and again."""

    folder: Path
    settings: dict[str, Any]

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return the arguments of `generate_shard`, configuration sections changed key by key."""
        given = {name: self.settings.get(name, {}) | changes.get(name, {}) for name in changes}
        config = complete_config(self.settings | given, SCHEMA)
        return {
            "prompts": self.folder / "prompts" / "00000.parquet",
            "model_manifest": self.folder / "manifest.json",
            "generated": self.folder / "generated.parquet",
            "server": config["server"],
            "sampling": config["sampling"],
            "generate": config["generate"],
            "devices": ["cpu"],
            "gpus_granted": 1,
            "partial": self.folder / "partial",
            "server_logs": self.folder / "server_logs",
            "stand_in": ROOT / "envs" / "cpu" / "stand_in",
            "fingerprint": "test",
            "allow_template": config["tokenize"]["allow_template"],
        }

    def run(self, **changes: Any) -> list[Row]:
        """Run the job in this process and return the finished rows."""
        arguments = self.arguments(**changes)
        generate_shard(**arguments)
        return list(iter_rows(arguments["generated"]))

    def start(self, slow_table_s: float = 0, **changes: Any) -> "subprocess.Popen[bytes]":
        """Start the job in a process of its own; its log is `job.log`."""
        arguments = {
            name: str(value) if name in PATHS else value
            for name, value in self.arguments(**changes).items()
        }
        call = self.folder / "job.json"
        call.write_text(json.dumps({"arguments": arguments, "slow_table_s": slow_table_s}))
        paths = os.pathsep.join([str(ROOT / "workflow" / "scripts"), str(ROOT)])
        (self.folder / "job.log").unlink(missing_ok=True)
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.generate_jobs", str(call)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
        )

    def log(self) -> str:
        """Return what the job in a process of its own has said so far."""
        path = self.folder / "job.log"
        return path.read_text() if path.exists() else ""

    def answers(self) -> Path | None:
        """Return the log of finished answers, as soon as there is one."""
        return next(self.folder.glob("partial/*/answers.jsonl"), None)

    def logged(self) -> list[Row]:
        """Return the rows in the log of finished answers, in their order."""
        path = self.answers()
        lines = path.read_bytes().split(b"\n") if path else [b""]
        return [json.loads(line) for line in lines[:-1]]

    def server_logs(self) -> list[str]:
        """Return the names of the logs of all servers so far."""
        return sorted(path.name for path in (self.folder / "server_logs").glob("server-*.log"))


def make_job(folder: Path, model: Path, questions: list[str], **settings: Any) -> GenerateJob:
    """Return a job with these one-turn prompts, everything before it done by the real earlier phases."""
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    shard_prompts(
        source,
        folder / "prompts",
        ["00000"],
        canary=0,
        assign="interleave",
        max_rejected=0,
        limit=None,
        fingerprint="test",
    )
    stage_model(
        str(model),
        folder / "manifest.json",
        revision=None,
        stage_to=None,
        models_dir=folder / "models",
        trust_remote_code=False,
        layers=None,
        generated=folder / "generated",
        fingerprint="test",
    )
    return GenerateJob(folder, settings)


class Lent:
    """A running server that a job takes for one of its own, and that outlives the job."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def __enter__(self) -> Any:
        return self.server

    def __exit__(self, *exc: object) -> None:
        """Leave it running."""


def serving_processes() -> dict[str, int]:
    """Return the processes of the server on the CPU slot, as its lease's record names them: {"scheduler": pid, …}."""
    record = read_record(record_path(open_folder(None), select_devices(["cpu"])[0]))
    found = {"main": record["session"]} if "session" in record else {}
    for pid in record.get("members", {}):
        command = Path(f"/proc/{pid}/cmdline")
        if command.exists() and command.read_bytes().startswith(b"sglang::scheduler"):
            found["scheduler"] = int(pid)
    return found


@contextmanager
def meanwhile(*steps: tuple[Callable[[], Any], Callable[[], Any]]) -> Iterator[list[Any]]:
    """Beside the block, wait for each step's condition and then do its act; yields what the acts have returned."""
    results: list[Any] = []
    stop = threading.Event()

    def go() -> None:
        for condition, act in steps:
            while not condition():
                if stop.wait(0.02):
                    return
            results.append(act())

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield results
    finally:
        stop.set()
        thread.join()


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Wait until the condition holds; stop the test when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what the test waits for has not come")
        time.sleep(0.02)


def slow_down_the_table(seconds: float) -> None:
    """Have every prompt take a while when the table is written, and say so in the log."""
    replay = generated_table.replay

    @functools.wraps(replay)
    def slow(*arguments: Any) -> Any:
        print("writing the table", flush=True)
        time.sleep(seconds)
        return replay(*arguments)

    generated_table.replay = slow


def main(path: Path) -> None:
    """Run the job that the file describes."""
    call = json.loads(path.read_text())
    begin_step(str(path.with_name("job.log")))
    if call["slow_table_s"]:
        slow_down_the_table(call["slow_table_s"])
    arguments = call["arguments"]
    generate_shard(**arguments | {name: Path(arguments[name]) for name in PATHS})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
