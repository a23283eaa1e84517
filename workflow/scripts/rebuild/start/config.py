"""The configuration: a closed schema, its defaults, and errors that name the nearest right key."""

import datetime
import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from rebuild.errors import StepError

Schema = dict[str, Any]


def load_schema(path: Path) -> Schema:
    """Return the parsed JSON schema (kept as YAML)."""
    schema: Schema = yaml.safe_load(path.read_text(encoding="utf-8"))
    return schema


def complete_config(config: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """Return `config` with every default of the schema filled in.

    Raises:
        StepError: an unknown key (with the nearest right one), or a value that the schema forbids.
    """
    complete: dict[str, Any] = with_defaults(meant(config, schema), schema)
    audit = complete.get("audit")
    if isinstance(audit, dict) and isinstance(audit.get("accept"), dict):
        complete["audit"] = audit | {"accept": shard_names(audit["accept"])}
    problems = [*unknown_keys(complete, schema), *forbidden_values(complete, schema)]
    if problems:
        raise StepError(
            f"the configuration has {len(problems)} error{'s' if len(problems) > 1 else ''}:\n  - "
            + "\n  - ".join(problems),
            remedy="every key, its unit and its default are in config/README.md",
        )
    return complete


def meant(value: Any, schema: Schema) -> Any:
    """Return `value` in the type that its part of the schema wants, where only its spelling came out as another.

    `--config` gives nested values as text ("7", "false"); YAML reads `run: 2026` as a number, and a section whose
    keys are all commented out as null. What nothing fits is returned as it is.
    """
    if "properties" in schema:
        section = {} if value is None else value
        if not isinstance(section, dict):
            return value
        return {
            key: meant(part, schema["properties"].get(key, {})) for key, part in section.items()
        }
    if isinstance(value, dict):
        inner = schema.get("additionalProperties", {})
        return {key: meant(part, inner) for key, part in value.items()}
    if not schema:
        return [meant(item, {}) for item in value] if isinstance(value, list) else exact(value)
    wanted = Draft202012Validator(schema)
    return next((spelt for spelt in spellings(value) if wanted.is_valid(spelt)), value)


def spellings(value: Any) -> Iterator[Any]:
    """Yield what may have been meant by `value`, the likeliest first."""
    if value == "null":
        yield None
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    yield value
    if isinstance(value, str):
        yield from_text(value)
    elif isinstance(value, list):
        yield [from_text(item) for item in value]
    elif isinstance(value, int | datetime.date) and not isinstance(value, bool):
        yield str(value)


def from_text(value: Any) -> Any:
    """Return the number, boolean or null that a text spells, if it spells one; any other value as it is."""
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError):
        return value
    return value if isinstance(parsed, dict | list) else parsed


def exact(value: Any) -> Any:
    """Return what a text spells if it could not be spelt otherwise ("false", "0.5", but not "1.10")."""
    parsed = from_text(value)
    return parsed if isinstance(value, str) and json.dumps(parsed) == value else value


def shard_names(waivers: dict[Any, Any]) -> dict[str, Any]:
    """Return the waivers with five-digit shards as keys.

    Raises:
        StepError: YAML read a number as octal, so that it is not certain which shard was written.
    """
    for key in waivers:
        if isinstance(key, int) and key > 7:
            raise StepError(
                f"it is not certain which shard audit.accept means by {key}",
                expected='five digits in quotes, such as "00012" (without quotes YAML reads it as octal: 10)',
                seen=f"the number {key}",
                remedy="put the shard into quotes",
            )
    return {
        str(key).zfill(5) if str(key).isdecimal() else str(key): waivers[key] for key in waivers
    }


def with_defaults(value: Any, schema: Schema) -> Any:
    """Return `value` with the defaults of `schema` for whatever is missing, at every depth."""
    properties = schema.get("properties")
    if properties is None or not isinstance(value, dict):
        return value
    filled = dict(value)
    for key, part in properties.items():
        if "properties" in part:
            filled[key] = with_defaults(filled.get(key, {}), part)
        elif "default" in part:
            filled.setdefault(key, part["default"])
    return filled


def unknown_keys(config: dict[str, Any], schema: Schema) -> list[str]:
    """Return one sentence for every key that the schema does not know, naming the nearest one it does."""
    known = [path for path, _ in schema_keys(schema)]
    return [
        f"unknown key {path!r}" + nearest_key(path, known) for path in _unknown(config, schema, "")
    ]


def _unknown(value: Any, schema: Schema, prefix: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _unknown(item, schema.get("items", {}), f"{prefix}{number}.")
    properties = schema.get("properties", {})
    if schema.get("additionalProperties") is not False or not isinstance(value, dict):
        return
    for key, part in value.items():
        if key not in properties:
            yield f"{prefix}{key}"
        else:
            yield from _unknown(part, properties[key], f"{prefix}{key}.")


def nearest_key(path: str, known: list[str]) -> str:
    """Return `; did you mean …?` for the known keys most like `path`: the right name elsewhere, or a misspelt one."""
    section, _, name = path.rpartition(".")
    others = [key for key in known if not path.startswith(f"{key}.")]
    siblings = [key for key in others if key.rpartition(".")[0] == section]
    exact = [key for key in others if key.rpartition(".")[2] == name]
    near = exact or like(name, siblings) or like(name, others)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def like(name: str, keys: list[str]) -> list[str]:
    """Return the keys whose last part is most like `name`, if one is."""
    leaves = [key.rpartition(".")[2] for key in keys]
    close = difflib.get_close_matches(name, leaves, n=1, cutoff=0.7)
    return [key for key, leaf in zip(keys, leaves, strict=True) if leaf in close]


def schema_keys(schema: Schema, prefix: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield every key of the schema as a dotted path, with its part of the schema."""
    for key, part in schema.get("properties", {}).items():
        yield f"{prefix}{key}", part
        yield from schema_keys(part, f"{prefix}{key}.")


def forbidden_values(config: dict[str, Any], schema: Schema) -> list[str]:
    """Return one sentence for every value that the schema forbids: the key, what was seen, what is expected."""
    found = []
    for error in Draft202012Validator(schema).iter_errors(config):
        if error.validator == "additionalProperties":
            continue  # told better by unknown_keys
        key = ".".join(map(str, error.absolute_path)) or "the configuration"
        found.append(f"{key} is {error.instance!r}; expected {expectation(error.schema)}")
    return found + [f"{key} is {value}; expected a finite number" for key, value in endless(config)]


def endless(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dotted key of every number that is infinite or none at all (YAML's .inf and .nan), and the number."""
    if isinstance(value, dict | list):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from endless(part, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield prefix, value


def expectation(schema: Any) -> str:
    """Return in words what a part of the schema allows."""
    if "oneOf" in schema:
        return " or ".join(expectation(part) for part in schema["oneOf"])
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    kinds = schema.get("type", "value")
    words = [" or ".join(kinds) if isinstance(kinds, list) else str(kinds)]
    bounds = {
        "minimum": ">=",
        "exclusiveMinimum": ">",
        "maximum": "<=",
        "minLength": "of length >=",
        "minItems": "of length >=",
        "pattern": "matching",
    }
    words += [f"{sign} {schema[name]}" for name, sign in bounds.items() if name in schema]
    if schema.get("uniqueItems"):
        words.append("without repeats")
    needed = list(schema.get("required", []))
    if "anyOf" in schema:
        needed.append(" or ".join(part["required"][0] for part in schema["anyOf"]))
    if needed:
        words.append("with " + ", and ".join(needed))
    return " ".join(words)
