"""The configuration: closed at every depth, complete, and forgiving only of how a value was spelt."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from snakemake.cli import parse_config

from rebuild.errors import StepError
from rebuild.start.config import complete_config, load_schema, schema_keys

SCHEMA = load_schema(Path("workflow/schemas/config.schema.yaml"))
DEFAULTS = complete_config({}, SCHEMA)
SECTIONS = [key for key, part in SCHEMA["properties"].items() if "properties" in part]


def completed(text: str) -> dict[str, Any]:
    """Complete a configuration written in YAML."""
    return complete_config(yaml.safe_load(text) or {}, SCHEMA)


def from_command_line(*entries: str) -> dict[str, Any]:
    """Complete what Snakemake makes of `--config` entries."""
    return complete_config(parse_config(entries), SCHEMA)


def refusal(text: str) -> str:
    with pytest.raises(StepError) as error:
        completed(text)
    return str(error.value)


# What is filled in


def test_no_configuration_at_all_is_complete_and_valid():
    Draft202012Validator(SCHEMA).validate(DEFAULTS)
    keys = {path for path, _ in schema_keys(SCHEMA)}
    given = {f"{a}.{b}" for a in SECTIONS for b in DEFAULTS[a]} | set(DEFAULTS)
    assert given <= keys
    assert {key for key in keys if key.count(".") < 2} <= given


def test_the_default_configuration_file_says_what_the_schema_says():
    assert completed(Path("config/config.yaml").read_text()) == DEFAULTS


def test_a_value_that_is_given_is_kept_and_its_neighbours_get_their_defaults():
    config = completed("sampling: {temperature: 0.7}")
    assert config["sampling"] == DEFAULTS["sampling"] | {"temperature": 0.7}


def test_a_section_whose_keys_are_all_commented_out_has_its_defaults():
    assert completed("sampling:\naudit:\n  limits:\n") == DEFAULTS


def test_completing_does_not_change_what_was_given():
    given = {"sampling": {"temperature": 1}, "audit": {"accept": {1: "seen by hand"}}}
    complete_config(given, SCHEMA)
    assert given == {"sampling": {"temperature": 1}, "audit": {"accept": {1: "seen by hand"}}}


def test_what_is_complete_stays_as_it_is():
    assert complete_config(DEFAULTS, SCHEMA) == DEFAULTS


# Unknown keys


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("promts: {}", "unknown key 'promts'; did you mean 'prompts'?"),
        ("sampling: {temprature: 1}", "'sampling.temprature'; did you mean 'sampling.temperature'?"),
        ("temperature: 1", "'temperature'; did you mean 'sampling.temperature'?"),
        ("generate: {temperature: 1}", "'generate.temperature'; did you mean 'sampling.temperature'?"),
        (
            "generate: {max_length: 1}",
            "'generate.max_length'; did you mean 'tokenize.max_length' or 'hidden_states.max_length'?",
        ),
        ("1: 2", "unknown key '1'"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_the_right_one(text: str, said: str):
    assert said in refusal(text)


@pytest.mark.parametrize("section", ["", *SECTIONS, "audit.limits"])
def test_every_section_is_closed(section: str):
    config: dict[str, Any] = {"qqqqqq": 1}
    for key in reversed(section.split(".") if section else []):
        config = {key: config}
    name = f"{section}.qqqqqq".strip(".")
    with pytest.raises(StepError, match=f"unknown key '{name}'$|unknown key '{name}'\n"):
        complete_config(config, SCHEMA)


def test_all_mistakes_are_told_at_once():
    said = refusal("promts: {}\nsampling: {top_p: 2, temperature: hot}\nprompts: {shards: 0}")
    assert "4 errors" in said
    assert all(name in said for name in ["promts", "top_p", "temperature", "shards"])


# Wrong values


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompts: {shards: 0}", "prompts.shards is 0; expected integer >= 1"),
        ("prompts: {shards: 2.5}", "prompts.shards is 2.5; expected integer"),
        ("prompts: {shards: true}", "prompts.shards is True; expected integer"),
        ("prompts: {max_rejected: 1.1}", "prompts.max_rejected is 1.1; expected number >= 0 <= 1"),
        ("sampling: {top_p: 0}", "sampling.top_p is 0; expected number > 0 <= 1"),
        ("sampling: {top_p: ''}", "sampling.top_p is ''; expected number"),
        ("prompts: {assign: random}", "prompts.assign is 'random'; expected one of interleave, contiguous"),
        ("generate: {concurrency: many}", "generate.concurrency is 'many'; expected 'auto' or integer >= 1"),
        ("hidden_states: {layers: []}", "hidden_states.layers is []; expected 'auto' or array"),
        ("hidden_states: {layers: [1, 1]}", "hidden_states.layers is [1, 1]"),
        ("devices: []", "devices is []"),
        ("run: a/b", "run is 'a/b'; expected string matching"),
        ("run: ..", "run is '..'; expected string matching"),
        ("run: true", "run is True; expected string matching"),
        ("model: {source: null}", "model.source is None; expected string"),
        ("server: {flags: [1]}", "server.flags is [1]; expected object"),
        ("sampling: 1", "sampling is 1; expected object"),
        ("audit: {accept: {shard1: looks fine}}", "audit.accept is 'shard1'; expected"),
        ("audit: {accept: {canaries: looks fine}}", "audit.accept is 'canaries'; expected"),
        ("plan: {canary: -1}", "plan.canary is -1; expected integer >= 0"),
        ("audit: {accept: {'00001': ''}}", "audit.accept.00001 is ''; expected string matching \\S"),
    ],
)  # fmt: skip
def test_a_forbidden_value_is_told_with_what_is_allowed(text: str, said: str):
    assert said in refusal(text)


# Spellings


@pytest.mark.parametrize(
    ("entry", "path", "value"),
    [
        ("generate={concurrency: 7}", "generate.concurrency", 7),
        ("generate={concurrency: auto}", "generate.concurrency", "auto"),
        ("sampling={temperature: 0.50}", "sampling.temperature", 0.5),
        ("prompts={limit: null}", "prompts.limit", None),
        ("model={revision: null}", "model.revision", None),
        ("model={revision: 0123456}", "model.revision", "0123456"),
        ("model={trust_remote_code: true}", "model.trust_remote_code", True),
        ("hidden_states={layers: [1, 20]}", "hidden_states.layers", [1, 20]),
        ("devices=[0, cpu:1]", "devices", ["0", "cpu:1"]),
        ("run=2026", "run", "2026"),
        ("run=2026-11-30", "run", "2026-11-30"),
        ("sampling={chat_template_kwargs: {enable_thinking: false}}", "sampling.chat_template_kwargs", {"enable_thinking": False}),
        ("server={flags: {page-size: 64, model: [a, 1]}}", "server.flags", {"page-size": 64, "model": ["a", 1]}),
        ("server={flags: {version: 1.10, tag: 007}}", "server.flags", {"version": "1.10", "tag": "007"}),
        ("audit={accept: {00012: short on purpose}}", "audit.accept", {"00012": "short on purpose"}),
        ("audit={accept: {12: short on purpose}}", "audit.accept", {"00012": "short on purpose"}),
    ],
)  # fmt: skip
def test_the_command_line_gives_values_of_the_right_type(entry: str, path: str, value: Any):
    section, _, key = path.partition(".")
    config = from_command_line(entry)
    seen = config[section][key] if key else config[section]
    assert (seen, type(seen)) == (value, type(value))


def test_a_date_in_yaml_is_a_name_as_it_was_written():
    assert yaml.safe_load("run: 2026-11-30") == {"run": datetime.date(2026, 11, 30)}
    assert completed("run: 2026-11-30")["run"] == "2026-11-30"


def test_a_whole_number_with_a_decimal_point_is_a_whole_number():
    shards = completed("prompts: {shards: 8.0}")["prompts"]["shards"]
    assert (shards, type(shards)) == (8, int)


@pytest.mark.parametrize(
    ("text", "shard"),
    [('"00012": x', "00012"), ("00001: x", "00001"), ("00008: x", "00008"), ("7: x", "00007")],
)
def test_a_waiver_names_its_shard_in_five_digits(text: str, shard: str):
    assert completed(f"audit: {{accept: {{{text}}}}}")["audit"]["accept"] == {shard: "x"}


def test_a_waiver_is_refused_where_yaml_may_have_read_another_shard():
    assert yaml.safe_load("00012: x") == {10: "x"}
    assert "quotes" in refusal("audit: {accept: {00012: x}}")


def test_text_stays_text_where_text_is_wanted():
    config = completed("model: {source: '123'}\nprompts: {path: 'true'}\nrun: '007'")
    assert (config["model"]["source"], config["prompts"]["path"], config["run"]) == ("123", "true", "007")  # fmt: skip


# Anything at all

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)
PATHS = [path.split(".") for path, _ in schema_keys(SCHEMA)]


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(PATHS), VALUES)
def test_any_value_at_any_key_is_completed_or_refused_in_words(path: list[str], value: Any):
    config = value
    for key in reversed(path):
        config = {key: config}
    try:
        complete = complete_config(config, SCHEMA)
    except StepError as error:
        assert "config" in error.remedy or "quotes" in error.remedy
    else:
        assert complete.keys() == DEFAULTS.keys()
        assert complete_config(complete, SCHEMA) == complete


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_without_end_are_refused_wherever_they_stand(number: float):
    given = {"hidden_states": {"max_disk_gb": number, "limits": {"rms_factor": number}}}
    with pytest.raises(StepError) as refused:
        complete_config(given, SCHEMA)
    assert refused.value.what.count("expected a finite number") == 2
    assert "hidden_states.limits.rms_factor is" in refused.value.what
