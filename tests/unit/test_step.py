"""How a step begins, seen from outside: real processes, real signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rebuild.step import DRIVER_PID

ENVIRON = {key: value for key, value in os.environ.items() if key != DRIVER_PID}
ENVIRON["PYTHONPATH"] = "workflow/scripts"

WAITING = """
import sys, time
from pathlib import Path
from rebuild.step import begin_step
begin_step(sys.argv[1])
try:
    print("ready")
    time.sleep(60)
finally:
    time.sleep(0.2)
    print("cleaned up")
"""


def command(code: str, log: Path) -> list[str]:
    return [sys.executable, "-c", code, str(log)]


def run_step(code: str, log: Path, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run a step whose body is `code`, and return what it leaves outside its log."""
    body = f"import sys; from rebuild.step import begin_step; begin_step(sys.argv[1])\n{code}"
    return subprocess.run(
        command(body, log), env=ENVIRON | environ, capture_output=True, text=True, timeout=60
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.02)


def says(log: Path, text: str) -> Callable[[], bool]:
    return lambda: log.exists() and text in log.read_text()


def test_all_output_of_a_step_and_its_children_is_in_its_log_in_order(tmp_path: Path):
    log = tmp_path / "logs" / "new" / "step.log"
    code = """
import os, subprocess
from rebuild.step import say
print("by print")
subprocess.run(["sh", "-c", "echo by a child; echo and its errors >&2"])
os.write(2, b"by a library in C\\n")
say("by say")
print("🙂 and \\ud800")
"""
    done = run_step(code, log, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lines = log.read_text().splitlines()
    assert lines[:4] == ["by print", "by a child", "and its errors", "by a library in C"]
    assert lines[4].endswith(" by say")
    assert lines[5] == "🙂 and \\ud800"


def test_the_log_of_an_earlier_attempt_is_replaced(tmp_path: Path):
    log = tmp_path / "step.log"
    log.write_text("of the first attempt, and longer\n")
    run_step("print('second')", log)
    assert log.read_text() == "second\n"


def test_a_traceback_is_in_the_log(tmp_path: Path):
    log = tmp_path / "step.log"
    done = run_step("def divide():\n    return 1 / 0\ndivide()", log)
    assert done.returncode == 1
    assert "in divide" in log.read_text()
    assert log.read_text().endswith("ZeroDivisionError: division by zero\n")


def test_a_step_error_has_the_last_words_after_its_traceback_and_cause(tmp_path: Path):
    log = tmp_path / "step.log"
    code = """
from rebuild.errors import StepError
try:
    int("x")
except ValueError as error:
    raise StepError("no count", where="shard 00003, prompt 17", expected="a number", seen="x", remedy="count") from error
"""
    assert run_step(code, log).returncode == 1
    text = log.read_text()
    assert text.index("ValueError: invalid literal") < text.index("STOPPED")
    assert text.splitlines()[-5:] == [
        "STOPPED: no count",
        "  where: shard 00003, prompt 17",
        "  expected: a number",
        "  seen: x",
        "  what to do: count",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_step_clean_up(tmp_path: Path, number: signal.Signals):
    log = tmp_path / "step.log"
    with subprocess.Popen(command(WAITING, log), env=ENVIRON) as step:
        wait_until(says(log, "ready"))
        step.send_signal(number)
        assert step.wait(30) == 128 + number
    first, told, last = log.read_text().splitlines()
    assert (first, last) == ("ready", "cleaned up")
    assert told[9:].startswith(f"stopping on {number.name}: ")


def test_a_second_signal_does_not_break_the_clean_up(tmp_path: Path):
    log = tmp_path / "step.log"
    with subprocess.Popen(command(WAITING, log), env=ENVIRON) as step:
        wait_until(says(log, "ready"))
        step.send_signal(signal.SIGINT)
        wait_until(says(log, "stopping"))
        step.send_signal(signal.SIGTERM)
        assert step.wait(30) == 128 + signal.SIGINT
    assert log.read_text().endswith("cleaned up\n")


def test_a_signal_ends_a_step_that_is_in_an_event_loop(tmp_path: Path):
    log = tmp_path / "step.log"
    code = """
import asyncio, sys
from rebuild.step import begin_step
begin_step(sys.argv[1])
async def work():
    try:
        print("ready")
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.1)
        print("cleaned up")
asyncio.run(work())
"""
    with subprocess.Popen(command(code, log), env=ENVIRON) as step:
        wait_until(says(log, "ready"))
        step.terminate()
        assert step.wait(30) == 143
    assert "cleaned up" in log.read_text()


# A process that starts its arguments as Snakemake starts a script: from a thread that waits for it
DRIVER = """
import os, subprocess, sys, threading, time
job = [str(os.getpid()) if part == "PID" else part for part in sys.argv[1:]]
threading.Thread(target=subprocess.run, args=(job,), daemon=True).start()
time.sleep(60)
"""


def start_driver(*job: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", DRIVER, *job], env=ENVIRON)


def test_a_step_ends_when_its_parent_is_killed(tmp_path: Path):
    log = tmp_path / "step.log"
    with start_driver(*command(WAITING, log)) as driver:
        wait_until(says(log, "ready"))
        driver.kill()
    wait_until(says(log, "cleaned up"))
    assert "stopping on SIGTERM" in log.read_text()


def test_a_step_behind_a_shell_ends_when_the_driver_is_killed(tmp_path: Path):
    log = tmp_path / "step.log"
    line = f'{DRIVER_PID}=$0 "$@"; true'  # not the shell's last command, so that it stays
    with start_driver("sh", "-c", line, "PID", *command(WAITING, log)) as driver:
        wait_until(says(log, "ready"))
        driver.kill()
    wait_until(says(log, "cleaned up"))


def test_a_step_whose_driver_died_before_it_began_ends_at_once(tmp_path: Path):
    log = tmp_path / "step.log"
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    done = run_step("print('working')", log, **{DRIVER_PID: str(dead.pid)})
    assert done.returncode == 143
    (told,) = log.read_text().splitlines()
    assert told[9:].startswith("stopping on SIGTERM: ")
