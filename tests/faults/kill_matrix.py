"""Kills driver, job and server of a real generate shard at random moments, and checks after each that nothing is lost.

Used by the tests with a few kills, and by `make bench-faults` with a hundred:

    PYTHONPATH=workflow/scripts python -m tests.faults.kill_matrix FOLDER [KILLS] [SEED]
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebuild.serving.lease import try_lock
from rebuild.tables import iter_rows
from tests.support.models import demo_model
from tests.support.trees import (
    copy_tree,
    environment,
    run_snakemake,
    snakemake_command,
    write_config,
)

VICTIMS = ["driver", "job", "server"]
SIGNALS = [signal.SIGKILL, signal.SIGTERM]
TARGET = "results/kills/generated/00000.parquet"
LONGEST_WAIT_S = 60.0
GONE_WITHIN_S = 30.0
TIMELESS = ("latency_s", "attempt")  # what may differ between two runs of the same answers


@dataclass
class Matrix:
    """A tree in which one shard is generated and killed again and again, and what was seen."""

    tree: Path
    config: Path
    target: str = TARGET
    seen: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def command(self) -> list[str]:
        return snakemake_command(
            self.target, "--rerun-incomplete", "--cores", "2", "--configfile", str(self.config)
        )

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the driver as a person would, in a session of its own."""
        with open(self.tree / "driver.log", "ab") as log:
            return subprocess.Popen(
                self.command(),
                cwd=self.tree,
                env=environment(self.tree),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


def prepare(folder: Path, model: Path, prompts: int = 16) -> Matrix:
    """Return a tree with one shard of the demo's prompts, answered greedily."""
    tree = copy_tree(folder)
    config = write_config(
        tree,
        run="kills",
        prompts={"shards": 1, "limit": prompts},
        model={"source": str(model)},
        sampling={"temperature": 0, "top_p": 1, "max_tokens": 48},
        generate={"concurrency": 4},
        server={"max_restarts": 50},
    )
    return Matrix(tree, config)


def processes_of(tree: Path) -> dict[int, str]:
    """Return the living processes that work in the tree or serve for it, as pid: role."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            here = (entry / "cwd").readlink() == tree
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if here and not dead and int(entry.name) != os.getpid():
            found[int(entry.name)] = role(command)
    return found


def role(command: str) -> str:
    """Return what a process is, from its command line."""
    if "launch_server.py" in command:
        return "server"
    if command.startswith("sglang::scheduler"):
        return "scheduler"
    if "generate_shard.py" in command or "extract_hidden_states.py" in command:
        return "job"
    return "driver" if "snakemake" in command and ".snakemake/scripts" not in command else "other"


def victim(tree: Path, name: str, driver: int) -> int | None:
    """Return the process to kill, or None while it is not there."""
    if name == "driver":
        return driver
    pids = sorted(pid for pid, kind in processes_of(tree).items() if kind == name)
    return pids[0] if pids else None


def kill_once(matrix: Matrix, name: str, number: signal.Signals, wait_s: float) -> None:
    """Start the run, kill one of its processes after `wait_s` seconds, and check what is left."""
    driver = matrix.start()
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.1)
    pid = victim(matrix.tree, name, driver.pid)
    if driver.poll() is not None or pid is None:
        matrix.seen[f"{name}: not there"] += 1
    else:
        matrix.seen[f"{name} {number.name}"] += 1
        os.kill(pid, number)
    if name == "driver" or pid is None:
        end_driver(driver, pid is None)
        check_nothing_left(matrix, f"{name} {number.name} after {wait_s:.1f} s")
    else:
        go_on_for_a_while(matrix, driver, f"{name} {number.name} after {wait_s:.1f} s")


def end_driver(driver: "subprocess.Popen[bytes]", ask: bool) -> None:
    """Wait for a killed driver; one that was not killed is asked to end."""
    if ask and driver.poll() is None:
        driver.terminate()
    try:
        driver.wait(GONE_WITHIN_S)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()


def go_on_for_a_while(matrix: Matrix, driver: "subprocess.Popen[bytes]", what: str) -> None:
    """After the death of a job or server the driver lives: let it go on, then kill it as well."""
    time.sleep(random.uniform(0, 3))
    if driver.poll() is None:
        driver.kill()
    driver.wait()
    check_nothing_left(matrix, what + ", then driver SIGKILL")


def check_nothing_left(matrix: Matrix, what: str) -> None:
    """Note a problem if processes or the lease outlive their driver."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while (left := processes_of(matrix.tree)) and time.monotonic() < deadline:
        time.sleep(0.2)
    if left:
        matrix.problems.append(f"{what}: processes left {left}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    lock = matrix.tree / ".leases" / "cpu.lock"
    if not lock.exists():
        return
    descriptor = try_lock(lock)
    if descriptor is None:
        matrix.problems.append(f"{what}: the lease is still held")
    else:
        os.close(descriptor)


def logged(tree: Path) -> list[str]:
    """Return the sample ids in the partial log, in the order in which they were finished."""
    logs = list((tree / "results" / "kills" / ".partial").rglob("answers.jsonl"))
    lines = [line for log in logs for line in log.read_bytes().splitlines()]
    ids = []
    for line in lines:
        try:
            ids.append(json.loads(line)["sample_id"])
        except ValueError:
            continue  # the torn last line of a killed job
    return ids


def answers(tree: Path) -> list[dict[str, Any]]:
    """Return the finished rows without what may differ from run to run."""
    rows = list(iter_rows(tree / TARGET))
    return [{key: row[key] for key in row if key not in TIMELESS} for row in rows]


def run_matrix(model: Path, folder: Path, kills: int, seed: int) -> tuple[Matrix, Matrix]:
    """Return an undisturbed run and one with `kills` kills, both finished."""
    undisturbed = prepare(folder / "undisturbed", model)
    began = time.monotonic()
    done = run_snakemake(undisturbed.tree, *undisturbed.command()[3:])
    longest = min(time.monotonic() - began, LONGEST_WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    killed = prepare(folder / "killed", model)
    chance = random.Random(seed)
    pairs = [(name, number) for number in SIGNALS for name in VICTIMS]
    for count in range(kills):
        name, number = pairs[count % len(pairs)]
        kill_once(killed, name, number, chance.uniform(0.3, 1.0) * longest)
        if (killed.tree / TARGET).exists():
            keep_finished(killed, undisturbed)
        print(f"kill {count + 1}/{kills}: {dict(killed.seen)}", flush=True)
    done = run_snakemake(killed.tree, *killed.command()[3:])
    if done.returncode != 0:
        killed.problems.append("the resumed run failed:\n" + (done.stdout + done.stderr)[-4000:])
    else:
        keep_finished(killed, undisturbed)
    return undisturbed, killed


def keep_finished(killed: Matrix, undisturbed: Matrix) -> None:
    """Compare a finished shard with the undisturbed one, count double questions, and begin anew."""
    asked = Counter(logged(killed.tree))
    killed.problems += [f"{sample} was asked {n} times" for sample, n in asked.items() if n > 1]
    if answers(killed.tree) != answers(undisturbed.tree):
        pairs = zip(answers(killed.tree), answers(undisturbed.tree), strict=False)
        names = [a["sample_id"] for a, b in pairs if a != b]
        killed.problems.append(f"other rows than in the undisturbed run: {names}")
    killed.seen["finished and compared"] += 1
    for path in [killed.tree / TARGET, *(killed.tree / "results/kills/.partial").rglob("*")]:
        if path.is_file():
            path.unlink()


if __name__ == "__main__":
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    chosen = int(sys.argv[3]) if len(sys.argv) > 3 else int(time.time())
    print(f"{count} kills, seed {chosen}")
    _, result = run_matrix(demo_model(), Path(sys.argv[1]).resolve(), count, chosen)
    print(json.dumps({"seen": result.seen, "problems": result.problems}, indent=1))
    sys.exit(1 if result.problems else 0)
