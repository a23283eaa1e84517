"""The reference of the configuration, config/README.md, written from the schema.

Run as `python -m rebuild.start.config_reference SCHEMA README`; a test compares the file with a fresh one.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rebuild.files import atomic_path
from rebuild.start.config import Schema, expectation, load_schema, schema_keys

HEAD = """\
# The configuration

Written by `make config-docs` from `workflow/schemas/config.schema.yaml`; change that file, not this one.

{about}

`config.yaml` holds every key with its default. For a run of your own, put the keys that differ into a second file and
give it with `--configfile`: it is laid over `config.yaml` key by key, except that a list replaces the whole list. Single
keys can be given on the command line: `--config run=trial 'sampling={{temperature: 0}}'`.
"""
TABLE = ["| key | default | unit | allowed | meaning |", "|---|---|---|---|---|"]


def config_reference(schema: Schema) -> str:
    """Return the reference as Markdown: one section for each key of the first level, one row for each setting."""
    sections = [section(name, part) for name, part in schema["properties"].items()]
    return "\n".join([HEAD.format(about=schema["description"].strip()), *sections])


def section(name: str, part: Schema) -> str:
    """Return the section of one key of the first level."""
    if "properties" not in part:
        return "\n".join([f"## `{name}`", "", *TABLE, row(name, part), ""])
    rows = [row(key, setting) for key, setting in settings(part, f"{name}.")]
    return "\n".join([f"## `{name}`", "", in_cell(part["description"]), "", *TABLE, *rows, ""])


def settings(part: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
    """Yield the keys of a section that take a value, or that hold nothing yet; groups of keys are not rows."""
    for key, setting in schema_keys(part, prefix):
        if not setting.get("properties"):
            yield key, setting


def row(key: str, setting: Schema) -> str:
    """Return one row of the table."""
    cells = [
        in_code(key),
        in_code(json.dumps(setting.get("default", {}), ensure_ascii=False)),
        in_cell(setting.get("unit", "")),
        in_code(expectation(setting)),
        in_cell(setting["description"]),
    ]
    return f"| {' | '.join(cells)} |"


def in_cell(text: str) -> str:
    """Return text as Markdown that stays in its table cell and shows its angle brackets."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def in_code(text: str) -> str:
    """Return text as Markdown code that stays in its table cell."""
    return "`" + text.replace("|", "\\|") + "`"


if __name__ == "__main__":
    schema_file, readme = map(Path, sys.argv[1:])
    with atomic_path(readme) as temporary:
        temporary.write_text(config_reference(load_schema(schema_file)))
