"""The flags of the SGLang that is installed here, asked of its own parser, and the user's held against them."""

import difflib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.files import read_json, write_json
from rebuild.serving.devices import Device
from rebuild.serving.flags import Flags, server_environment
from rebuild.step import say

PARSE_SCRIPT = Path(__file__).with_name("parse_flags.py")
# Names of one flag in different versions; a flag that is not installed becomes the other that is.
RENAMED = [("mamba-scheduler-strategy", "mamba-radix-cache-strategy")]


def translate_flags(
    flags: Flags, devices: list[Device], stand_in: Path, cache: Path | None = None
) -> Flags:
    """Return `server.flags` as the SGLang that is installed here calls them, and log what changed.

    Raises:
        StepError: a flag or value that it does not take.
    """
    if not flags:
        return {}
    checked, notices = check_flags(
        flags, installed_flags(server_environment(devices, stand_in), cache)
    )
    for notice in notices:
        say(notice)
    return checked


def installed_flags(environ: Mapping[str, str], cache: Path | None = None) -> dict[str, Any]:
    """Return the installed SGLang's flags: name -> {takes_value, choices}.

    Asking takes some 4 s, so the answer is kept in `cache` (JSON) for as long as the same SGLang is
    installed. `environ` is that of a server (`server_environment`).
    """
    installation = describe_installation()
    if cache is not None and cache.exists():
        kept = read_json(cache)
        if kept["installation"] == installation:
            return dict(kept["options"])
    options = ask_parser([], environ)["options"]
    if cache is not None:
        write_json(cache, {"installation": installation, "options": options})
    return dict(options)


def describe_installation() -> dict[str, str]:
    """Return which SGLang is installed, and where."""
    package = distribution("sglang")
    return {"version": package.version, "path": str(package.locate_file("sglang"))}


def check_flags(flags: Flags, installed: Mapping[str, Any]) -> tuple[Flags, list[str]]:
    """Return the flags under the names that the installed SGLang knows, and a notice for each one renamed.

    Raises:
        StepError: an unknown flag, a flag without the value it takes or with one it does not take or allow.
    """
    checked: Flags = {}
    notices: list[str] = []
    for flag, value in flags.items():
        name = current_name(flag, installed)
        if name != flag:
            notices.append(f"the installed SGLang calls --{flag} --{name}: translated")
        check_value(name, value, installed[name])
        checked[name] = value
    return checked, notices


def current_name(flag: str, installed: Mapping[str, Any]) -> str:
    """Return the flag's name in the installed SGLang."""
    if flag in installed:
        return flag
    for names in RENAMED:
        if flag in names:
            for other in names:
                if other in installed:
                    return other
    near = difflib.get_close_matches(flag.lstrip("-").replace("_", "-"), installed, n=3, cutoff=0.5)
    raise StepError(
        f"`server.flags` holds a flag that the installed SGLang does not know: {flag}",
        expected=f"perhaps {' or '.join(near)}" if near else "a flag of `sglang serve --help`",
        seen=f"SGLang {describe_installation()['version']}",
        remedy="correct it in `server.flags` (flags are written without their dashes)",
    )


def check_value(flag: str, value: Any, option: Mapping[str, Any]) -> None:
    """Raise a StepError when the value cannot be one of the flag's."""
    if value is None or value is False:
        return
    choices = option["choices"]
    values = value if isinstance(value, list) else [value]
    if option["takes_value"] and value is True:
        expected = f"one of {', '.join(choices)}" if choices else "a value"
    elif not option["takes_value"] and value is not True:
        expected = "true or false: the flag takes no value"
    elif choices and value is not True and any(str(item) not in choices for item in values):
        expected = f"one of {', '.join(choices)}"
    else:
        return
    raise StepError(
        f"the installed SGLang does not take this value of `server.flags`: {flag}",
        expected=expected,
        seen=repr(value),
        remedy="correct it in `server.flags`",
    )


def check_command(arguments: list[str], environ: Mapping[str, str]) -> None:
    """Have the installed SGLang's own parser read a whole command (some 4 s; no model is loaded).

    Raises:
        StepError: it refuses the command.
    """
    refusal = ask_parser([arguments], environ)["refusals"][0]
    if refusal is not None:
        raise StepError(
            "the installed SGLang refuses the server's command",
            expected="flags and values that SGLang's parser takes",
            seen=refusal,
            remedy="correct `server.flags`",
        )


def ask_parser(commands: list[list[str]], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return `parse_flags.py`'s answer: all options, and each command's refusal or None."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        done = subprocess.run(
            [sys.executable, "-P", PARSE_SCRIPT, answer],
            input=json.dumps(commands),
            capture_output=True,
            text=True,
            env=dict(environ),
        )
        if done.returncode != 0:
            raise StepError(
                "the installed SGLang cannot be imported",
                seen=done.stderr.strip()[-2000:],
                remedy="install what envs/gpu (or envs/cpu) lists into this environment",
            )
        return dict(read_json(answer))
