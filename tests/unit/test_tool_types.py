"""Type names in tool schemas become what the server makes of them, where it does, and stay elsewhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.tokens.tool_types import STANDARD, standard_type, standardize_types

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "properties", "items", "anyOf", "x"]), inner)
    ),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        ("string", "string"),
        ("String", "string"),
        ("varchar(255)", "string"),
        ("str", "string"),
        ("datetime", "string"),
        ("bool", "boolean"),
        ("int", "integer"),
        ("int32", "integer"),
        ("unsigned int", "integer"),
        ("bigint", "integer"),
        ("float64", "number"),
        ("decimal(10,2)", "number"),
        ("list[str]", "array"),
        ("tuple", "array"),
        ("dict[str, int]", "object"),
        ("map", "object"),
        ("internal", "internal"),
        ("list_price", "list_price"),
        ("Any", "Any"),
        (None, None),
        (7, 7),
    ],
)
def test_a_type_name_becomes_a_standard_one_or_stays(given_name: Any, expected: Any) -> None:
    assert standard_type(given_name) == expected


def test_types_change_in_every_place_of_a_schema_and_nowhere_else() -> None:
    schema = {
        "type": "dict",
        "properties": {"type": {"type": "int"}, "many": {"type": "list", "items": {"type": "str"}}},
        "anyOf": [{"type": "float"}, True],
        "additionalProperties": {"type": "bool"},
        "default": {"type": "int"},
        "enum": ["int"],
        "description": "int",
    }
    assert standardize_types(schema) == {
        "type": "object",
        "properties": {
            "type": {"type": "integer"},
            "many": {"type": "array", "items": {"type": "string"}},
        },
        "anyOf": [{"type": "number"}, True],
        "additionalProperties": {"type": "boolean"},
        "default": {"type": "int"},
        "enum": ["int"],
        "description": "int",
    }


def test_several_types_that_become_one_are_named_once() -> None:
    assert standardize_types({"type": ["int", "null", "integer"]}) == {"type": ["integer", "null"]}


def test_the_order_of_keys_stays() -> None:
    schema = {"required": ["a"], "type": "map", "properties": {"b": {}, "a": {}}}
    assert list(standardize_types(schema)) == ["required", "type", "properties"]
    assert list(standardize_types(schema)["properties"]) == ["b", "a"]


@given(json_values)
def test_nothing_is_left_to_do_the_second_time(schema: Any) -> None:
    once = standardize_types(schema)
    assert standardize_types(once) == once


@given(st.sampled_from(sorted(STANDARD)))
def test_standard_names_stay(name: str) -> None:
    assert standard_type(name) == name
