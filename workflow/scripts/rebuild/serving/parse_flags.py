"""Says what the installed SGLang's own parser knows and thinks of given commands; run as a process of its own.

    python -P parse_flags.py ANSWER.json < commands.json

It imports SGLang, which takes seconds and needs a server's environment, and nothing of this package.
"""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def build_parser() -> argparse.ArgumentParser:
    """Return SGLang's argument parser."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang")
    ServerArgs.add_cli_args(parser)
    return parser


def describe_options(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Return, for each flag without its dashes, whether it takes a value and which ones it allows."""
    options: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        choices = None if action.choices is None else sorted(str(value) for value in action.choices)
        about = {"takes_value": action.nargs != 0, "choices": choices}
        options |= {name[2:]: about for name in action.option_strings if name.startswith("--")}
    return options


def refusal(parser: argparse.ArgumentParser, arguments: list[str]) -> str | None:
    """Return why the parser refuses the arguments, or None when it takes them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(arguments)
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2]
    return None


if __name__ == "__main__":
    parser = build_parser()
    answer = {
        "options": describe_options(parser),
        "refusals": [refusal(parser, arguments) for arguments in json.load(sys.stdin)],
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))
