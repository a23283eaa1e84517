"""The configuration is its own documentation: a closed, described schema, and files that say the same."""

import difflib
from collections.abc import Iterator
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from rebuild.audit.checks import CHECKS
from rebuild.audit.set_checks import SET_CHECKS
from rebuild.start.config import complete_config, load_schema, schema_keys
from rebuild.start.config_reference import config_reference
from tests.support.trees import ROOT

SCHEMA = load_schema(ROOT / "workflow" / "schemas" / "config.schema.yaml")
KEYS = dict(schema_keys(SCHEMA))
SETTINGS = {key: part for key, part in KEYS.items() if "properties" not in part}
CONFIG = ROOT / "config" / "config.yaml"


def objects(part: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema and every part of it that describes a mapping."""
    if part.get("type") == "object":
        yield path, part
    for name, child in part.get("properties", {}).items():
        yield from objects(child, f"{path}.{name}".lstrip("."))


def test_the_schema_is_a_valid_schema():
    Draft202012Validator.check_schema(SCHEMA)


def test_every_key_is_described_in_sentences():
    assert [
        key for key, part in KEYS.items() if not part["description"].strip().endswith(".")
    ] == []


def test_every_setting_has_a_unit_and_a_default():
    assert [key for key, part in SETTINGS.items() if not {"unit", "default"} <= part.keys()] == []


def test_every_mapping_with_known_keys_is_closed():
    grouped = {path: part for path, part in objects(SCHEMA) if "properties" in part}
    assert [
        path for path, part in grouped.items() if part.get("additionalProperties") is not False
    ] == []


def test_every_mapping_with_free_keys_says_what_maps_to_what():
    free = {path: part for path, part in objects(SCHEMA) if "properties" not in part}
    assert [path for path, part in free.items() if ": " not in part.get("unit", "")] == []


def test_the_defaults_alone_are_a_complete_and_valid_configuration():
    complete = complete_config({}, SCHEMA)
    assert set(complete) == set(SCHEMA["properties"])


def test_config_yaml_holds_every_key_with_its_default():
    assert yaml.safe_load(CONFIG.read_text()) == complete_config({}, SCHEMA)


def test_config_yaml_has_the_keys_in_the_schemas_order():
    written = yaml.safe_load(CONFIG.read_text())
    assert list(written) == list(SCHEMA["properties"])
    for name, part in SCHEMA["properties"].items():
        if "properties" in part:
            assert list(written[name]) == list(part["properties"])


def test_the_limits_of_the_audit_are_those_of_its_checks():
    limits = SCHEMA["properties"]["audit"]["properties"]["limits"]["properties"]
    assert {name: part["default"] for name, part in limits.items()} == {
        check.name: check.default for check in (*CHECKS, *SET_CHECKS)
    }


def test_the_reference_is_what_the_schema_says_now():
    written = (ROOT / "config" / "README.md").read_text()
    fresh = config_reference(SCHEMA)
    changes = "\n".join(difflib.unified_diff(written.splitlines(), fresh.splitlines(), lineterm=""))
    assert written == fresh, f"run `make config-docs`:\n{changes}"


def test_the_reference_has_a_row_for_every_setting():
    rows = (ROOT / "config" / "README.md").read_text().splitlines()
    documented = [row.split("`")[1] for row in rows if row.startswith("| `")]
    assert documented == list(SETTINGS)
