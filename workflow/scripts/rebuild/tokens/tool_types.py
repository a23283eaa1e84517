"""Type names in tool schemas, as the server renames them before they reach the prompt.

Follows SGLang 0.5.23, srt/function_call/utils.py `normalize_json_schema_types`: prompts rendered here must equal its own.
"""

from typing import Any

STANDARD = {"string", "number", "integer", "boolean", "object", "array", "null"}
ALIASES = {
    "string": "str text varchar char enum uuid date datetime time timestamp binary blob bytea bytes varbinary",
    "boolean": "bool",
    "integer": "bigint smallint tinyint",
    "number": "double decimal real numeric",
    "array": "arr tuple set",
    "object": "map",
}
BY_ALIAS = {alias: standard for standard, names in ALIASES.items() for alias in names.split()}
PREFIXES = {
    "integer": ("int", "uint", "long", "short", "unsigned"),
    "number": ("num", "float"),
    "array": ("list",),
    "object": ("dict",),
}
AFTER_PREFIX = "0123456789[<( \t"
SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
SCHEMAS_IN_LIST = {"anyOf", "oneOf", "allOf", "prefixItems"}
ONE_SCHEMA = {
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
}


def standardize_types(schema: Any) -> Any:
    """Return a copy of the JSON Schema with type names such as `varchar`, `int32` or `list[str]` made standard ones."""
    if isinstance(schema, list):
        return [standardize_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: standardize_value(key, value) for key, value in schema.items()}


def standardize_value(key: str, value: Any) -> Any:
    """Return what one keyword of a schema becomes: only types change, and only where a schema is expected."""
    if key == "type" and isinstance(value, list):
        return list({repr(name): name for name in map(standard_type, value)}.values())
    if key == "type":
        return standard_type(value)
    if key in SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: standardize_types(schema) for name, schema in value.items()}
    if key in ONE_SCHEMA or (key in SCHEMAS_IN_LIST and isinstance(value, list)):
        return standardize_types(value)
    return value


def standard_type(name: Any) -> Any:
    """Return the standard name for one type name; one that is not recognised stays as it is."""
    if not isinstance(name, str) or name in STANDARD:
        return name
    base = name.split("(", 1)[0].strip().lower()
    if base in STANDARD:
        return base
    if base in BY_ALIAS:
        return BY_ALIAS[base]
    for standard, prefixes in PREFIXES.items():
        if any(
            base == p or (base.startswith(p) and base[len(p)] in AFTER_PREFIX) for p in prefixes
        ):
            return standard
    return name
