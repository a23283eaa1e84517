"""Kills driver, job and server of a real extraction at random moments, and checks after each that nothing is lost.

Used by the tests with a few kills; with as many as are wanted:

    PYTHONPATH=workflow/scripts python -m tests.faults.extraction_kills FOLDER transformers|sglang [KILLS] [SEED]

Every other kill comes at a random number of recorded files, in the middle of the capture; the others at a random time.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rebuild.files import sha256_file
from rebuild.shards import CANARY
from rebuild.states.parts import read_log
from rebuild.tables import iter_rows
from tests.faults.kill_matrix import Matrix, check_nothing_left, end_driver, victim
from tests.support.approved_runs import RUN, approved_run, states_config
from tests.support.models import demo_model
from tests.support.real_shards import smollm2
from tests.support.trees import run_snakemake

STATES = Path("results", RUN, "hidden_states")
KILL, TERM = signal.SIGKILL, signal.SIGTERM
# By backend: whose end, and by which signal, in the order in which they come.
DEATHS = {
    "transformers": [("job", KILL), ("driver", TERM), ("driver", KILL), ("job", TERM)],
    "sglang": [
        ("scheduler", KILL),
        ("job", KILL),
        ("driver", TERM),
        ("server", KILL),
        ("driver", KILL),
        ("server", TERM),
        ("job", TERM),
        ("scheduler", TERM),
    ],
}
# A server prefills one sample at a time, so that it is still at work when the first ones are on the disk.
ONE_BY_ONE = {"max-prefill-tokens": 64}
POLL_S = 0.02
STARTED_WITHIN_S = 300.0


@dataclass
class Extraction(Matrix):
    """A tree in which the canary's states are captured and killed again and again; `kept` are finished files' stamps."""

    target: str = f"{STATES}/{CANARY}.parquet"
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def states(self) -> Path:
        return self.tree / STATES

    @property
    def finished(self) -> bool:
        return (self.tree / self.target).exists()

    def parts(self) -> list[dict[str, Any]]:
        """Return the parts that are recorded as finished."""
        return read_log(self.states / CANARY)

    def log(self) -> str:
        """Return the log of the last attempt."""
        path = self.tree / "results" / RUN / "logs" / "extract_hidden_states" / f"{CANARY}.log"
        return path.read_text() if path.exists() else ""


@dataclass(frozen=True)
class Death:
    """Whose end it is, by which signal, and when: in the middle of the capture or at any time."""

    name: str
    number: signal.Signals
    moment: Callable[[Extraction], bool]
    when: str

    def __str__(self) -> str:
        return f"{self.name} {self.number.name} {self.when}"


def prepare(base: Path, folder: Path, model: Path, **settings: Any) -> Extraction:
    """Return a copy of an approved run to be extracted with these settings."""
    shutil.copytree(base, folder, symlinks=True)
    return Extraction(folder, states_config(folder, model, flags=ONE_BY_ONE, **settings))


def deaths(backend: str, count: int, chance: random.Random, parts: int, longest: float) -> Any:
    """Yield `count` deaths; their moments are drawn from the number of parts, and from the seconds of a whole run."""
    for number in range(count):
        name, kind = DEATHS[backend][number % len(DEATHS[backend])]
        if number % 2 == 0:
            at = chance.randint(1, parts // 3)
            yield Death(name, kind, after_parts(at), f"after {at} parts")
        else:
            seconds = chance.uniform(0.2, 0.7) * longest
            yield Death(name, kind, after_seconds(seconds), f"after {seconds:.1f} s")


def after_parts(count: int) -> Callable[[Extraction], bool]:
    """Return what tells that `count` parts are recorded."""
    return lambda extraction: len(extraction.parts()) >= count


def after_seconds(seconds: float) -> Callable[[Extraction], bool]:
    """Return what tells that so much time has passed since now."""
    over = time.monotonic() + seconds
    return lambda extraction: time.monotonic() > over


def kill_once(extraction: Extraction, death: Death, goes_on: bool) -> None:
    """Start the run and kill one of its processes; then see what is left when the driver has ended as well.

    `goes_on` lets a driver that lives go on to the end: a lost server is replaced by its job, a lost job begun again.
    """
    before = extraction.parts()
    driver = extraction.start()
    deadline = time.monotonic() + STARTED_WITHIN_S
    while time.monotonic() < deadline and driver.poll() is None and not extraction.finished:
        if death.moment(extraction) and strike(extraction, death, driver.pid):
            break
        time.sleep(POLL_S)
    else:
        extraction.seen[f"{death.name}: not there"] += 1
    if death.name == "driver" or extraction.finished:
        end_driver(driver, ask=False)
    else:
        let_go_on(extraction, driver, death, goes_on)
    check_nothing_left(extraction, str(death))
    check_kept(extraction, str(death), len(before))


def strike(extraction: Extraction, death: Death, driver: int) -> bool:
    """Kill the process and note it, if it is there, and what was finished by then."""
    pid = victim(extraction.tree, death.name, driver)
    if pid is None:
        return False
    os.kill(pid, death.number)
    extraction.kept |= stamps(extraction)
    extraction.seen[f"{death.name} {death.number.name}"] += 1
    return True


def let_go_on(
    extraction: Extraction, driver: "subprocess.Popen[bytes]", death: Death, to_the_end: bool
) -> None:
    """Have the driver go on, to the end or for a moment."""
    if not to_the_end:
        time.sleep(random.uniform(0, 3))
        driver.kill()
        driver.wait()
        return
    status = driver.wait(STARTED_WITHIN_S)
    log = extraction.log()
    if status != 0:
        extraction.problems.append(f"{death}: it did not go on to the end:\n{log}")
    elif death.name == "job" and " 0 already whole" in log:
        extraction.problems.append(f"{death}: the job began anew")
    else:
        extraction.seen["went on to the end"] += 1
        extraction.seen["server replaced"] += "the server was lost" in log


def check_kept(extraction: Extraction, what: str, before: int) -> None:
    """Note a problem if a file that was recorded is not, or was written again."""
    now = stamps(extraction)
    if len(now) < before:
        extraction.problems.append(f"{what}: {len(now)} parts, {before} before")
    again = [file for file, stamp in extraction.kept.items() if now.get(file) != stamp]
    if again:
        extraction.problems.append(f"{what}: lost or written again: {again}")
    extraction.kept |= now


def stamps(extraction: Extraction) -> dict[str, tuple[int, int]]:
    """Return what tells one writing of a file from another, of every file that is recorded as finished."""
    found = {}
    for part in extraction.parts():
        facts = (extraction.states / part["file"]).stat()
        found[part["file"]] = (facts.st_ino, facts.st_mtime_ns)
    return found


def digests(extraction: Extraction) -> dict[str, str]:
    """Return the SHA-256 of every file for trainers by its name, as the index says and as the files are."""
    rows = list(iter_rows(extraction.tree / extraction.target))
    found = {row["file"]: sha256_file(extraction.states / row["file"]) for row in rows}
    assert found == {row["file"]: row["sha256"] for row in rows}
    return found


def keep_finished(killed: Extraction, undisturbed: Extraction) -> None:
    """Compare a finished shard with the undisturbed one, look for what it should not have left, and begin anew."""
    ours, theirs = digests(killed), digests(undisturbed)
    if ours != theirs:
        other = sorted(file for file in ours | theirs if ours.get(file) != theirs.get(file))
        killed.problems.append(f"other files than in the undisturbed run: {other}")
    leftovers = [*killed.states.rglob("*.tmp"), *killed.states.glob(".reserved-*")]
    leftovers += [*(killed.tree / "results" / RUN / ".partial").glob("hidden_states/*")]
    files = {path.relative_to(killed.states).as_posix() for path in killed.states.rglob("*.ckpt")}
    leftovers += sorted(files - set(ours))
    if leftovers:
        killed.problems.append(f"left when all was finished: {leftovers}")
    killed.seen["finished and compared"] += 1
    shutil.rmtree(killed.states)
    killed.kept.clear()


def run_whole(extraction: Extraction) -> float:
    """Run without a kill and return the seconds that it took."""
    began = time.monotonic()
    done = run_snakemake(extraction.tree, *extraction.command()[3:])
    if done.returncode != 0:
        extraction.problems.append((done.stdout + done.stderr)[-4000:] + extraction.log())
    return time.monotonic() - began


def run_matrix(
    base: Path, folder: Path, backend: str, kills: int, seed: int
) -> tuple[Extraction, Extraction]:
    """Return an undisturbed extraction and one with `kills` kills, both finished, of a run that `base` holds."""
    model, settings = demo_model(), {"backend": backend, "cross_check": False}
    undisturbed = prepare(base, folder / "undisturbed", model, **settings)
    longest = run_whole(undisturbed)
    assert undisturbed.problems == [], undisturbed.problems
    parts = len(undisturbed.parts())
    killed = prepare(base, folder / "killed", model, **settings)
    chance = random.Random(seed)
    for number, death in enumerate(deaths(backend, kills, chance, parts, longest)):
        kill_once(killed, death, goes_on=number % 4 == 0)
        if killed.finished:
            keep_finished(killed, undisturbed)
        print(f"kill {number + 1}/{kills}, {death}: {dict(killed.seen)}", flush=True)
    had = len(killed.parts())
    run_whole(killed)
    if killed.finished:
        if f"{parts} samples, {had} already whole" not in killed.log():
            killed.problems.append(f"{had} parts were whole, but the log says:\n{killed.log()}")
        keep_finished(killed, undisturbed)
    return undisturbed, killed


if __name__ == "__main__":
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 40
    chosen = int(sys.argv[4]) if len(sys.argv) > 4 else int(time.time())
    print(f"{count} kills, backend {sys.argv[2]}, seed {chosen}")
    root = Path(sys.argv[1]).resolve()
    approved = approved_run(root / "approved", demo_model(), smollm2, canary=16, rows=1)
    _, result = run_matrix(approved, root, sys.argv[2], count, chosen)
    print(json.dumps({"seen": result.seen, "problems": result.problems}, indent=1))
    sys.exit(1 if result.problems else 0)
