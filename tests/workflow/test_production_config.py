"""The production configuration: as it stands on a tiny Qwen3.6 that talks, and its command under SGLang's own parser."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from snakemake.utils import update_config
from transformers import AutoTokenizer

from rebuild.files import read_json
from rebuild.serving.devices import Device, select_devices
from rebuild.serving.flags import server_arguments, server_environment
from rebuild.serving.installed_flags import check_command, translate_flags
from rebuild.start.config import complete_config, load_schema
from rebuild.states.layers import dflash_layers
from rebuild.tables import iter_rows
from tests.support.talking_qwen36 import talking_qwen36
from tests.support.talks import TALKS, Talk
from tests.support.trees import ROOT, copy_tree, run_snakemake, write_config
from tests.workflow.conftest import Run

PRODUCTION = "config/qwen3.6-27b.yaml"
STAND_IN = ROOT / "envs" / "cpu" / "stand_in"
THINK_END, CALL_START = 248069, 248058

# What becomes of the generations that are no plain answers; generations that are not named are.
ENDINGS = {
    "known call_gen0": ("tool_calls", "tool_calls"),
    "two known calls_gen0": ("tool_calls", "tool_calls"),
    "unknown call_gen0": ("tool_calls", "tool_calls"),
    "unknown call_gen1": ("skipped", None),
    "call in an open thought_gen0": ("tool_calls", "tool_calls"),
    "endless thought_gen0": ("truncated", "length"),
    "endless thought_gen1": ("skipped", None),
    "thought that only stops_gen0": ("truncated", "stop"),
    "endless answer_gen0": ("truncated", "length"),
}
TURNS_AND_CALLS = [talk for talk in TALKS if talk.id in ("system prompt", "known call")]
SAID = {f"{talk.id}_gen{turn}": said for talk in TALKS for turn, said in enumerate(talk.says)}
Row = dict[str, Any]


@pytest.fixture(scope="module")
def model() -> Path:
    return talking_qwen36()


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def run_production(
    folder: Path, model: Path, talks: list[Talk], *targets: str, **changes: Any
) -> Run:
    """Run the real workflow on the production configuration with only what must be another swapped."""
    tree = copy_tree(folder / "tree")
    prompts = tree / "prompts.jsonl"
    lines = [json.dumps(talk.row(), ensure_ascii=False) + "\n" for talk in talks]
    prompts.write_text("".join(lines), encoding="utf-8")
    swapped = {
        "run": "miniature",
        "prompts": {"path": str(prompts), "shards": 1},  # 14 prompts are too few for 457 shards
        "model": {"source": str(model), "revision": None},
        "sampling": {"max_tokens": 128},  # what never ends would take minutes for 7,168 tokens
        "devices": ["cpu"],
    }
    config = write_config(tree, **swapped | changes)
    arguments = ["--cores", "all", "--configfile", PRODUCTION, str(config)]
    done = run_snakemake(tree, *targets, *arguments)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    return Run(tree, tree / "results" / "miniature", config, output)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole workflow, hidden states included."""
    return run_production(tmp_path_factory.mktemp("production"), model, TALKS)


@pytest.fixture(scope="module")
def preserving_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The answers when later turns see earlier thoughts; a flag is given by the name that it had in older versions."""
    renamed = {"mamba-scheduler-strategy": "no_buffer", "mamba-radix-cache-strategy": None}
    return run_production(
        tmp_path_factory.mktemp("preserving"),
        model,
        TURNS_AND_CALLS,
        "generated",
        generate={"history_reasoning": "preserve"},
        server={"flags": renamed},
    )


def rows_of(run: Run, phase: str) -> dict[str, Row]:
    """Return the rows of a phase by sample id."""
    rows = iter_rows(run.results / phase / "00000.parquet")
    return {row["sample_id"]: row for row in rows}


def log_of(run: Run, rule: str) -> str:
    return (run.results / "logs" / rule / "00000.log").read_text()


# Answers


def test_every_turn_ends_as_the_model_ended_it(run: Run):
    rows = rows_of(run, "generated")
    plain = {sample: ("ok", "stop") for sample in SAID}
    endings = {sample: (row["status"], row["finish_reason"]) for sample, row in rows.items()}
    assert endings == plain | ENDINGS
    assert {row["error"] for row in rows.values()} == {
        None,
        "conversation_ended: turn 0 is truncated",
        "conversation_ended: the result of turn 0's call is unknown",
    }


def test_the_model_says_what_it_was_taught_so_that_thought_and_answer_are_known(
    run: Run, tokenizer: Any
):
    rows = rows_of(run, "generated")
    for sample, said in SAID.items():
        taught = tokenizer.encode(said.text())
        assert rows[sample]["response_token_ids"] == taught[: rows[sample]["completion_tokens"]]
        assert rows[sample]["completion_tokens"] == min(len(taught), 128)


def test_thought_and_answer_are_parted_where_the_thought_ends(run: Run):
    rows = rows_of(run, "generated")
    for sample, said in SAID.items():
        row = rows[sample]
        if said.forever:
            continue
        assert (row["reasoning"], row["content"]) == (said.thought, said.answer or "")
        ids = row["response_token_ids"]
        ends = [ids.index(token) for token in (THINK_END, CALL_START) if token in ids]
        assert row["reasoning_tokens"] == (ends[0] if ends else len(ids) - 1)


def test_what_was_cut_is_flagged_and_a_thought_that_never_ended_is_no_empty_answer(run: Run):
    rows = rows_of(run, "generated")
    thought, answer = rows["endless thought_gen0"], rows["endless answer_gen0"]
    assert thought["content"] == ""
    assert SAID["endless thought_gen0"].text().startswith(thought["reasoning"])
    assert thought["reasoning_tokens"] == thought["completion_tokens"] == 128
    assert answer["reasoning"] == SAID["endless answer_gen0"].thought
    assert answer["content"].startswith("Here they are:\n- and then the next of them\n- and then")


def test_calls_are_the_models_and_only_the_result_of_the_very_call_is_given_to_it(run: Run):
    rows = rows_of(run, "generated")
    for sample, said in SAID.items():
        calls = json.loads(rows[sample]["tool_calls"] or "[]")
        made = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        assert made == list(said.calls)
    results = [m for m in rows["two known calls_gen1"]["messages"] if m["role"] == "tool"]
    calls = json.loads(rows["two known calls_gen0"]["tool_calls"])
    assert [m["tool_call_id"] for m in results] == [call["id"] for call in calls]
    assert [m["content"] for m in results] == ['{"temp": 22}', '{"temp": 31}']


@pytest.mark.parametrize("history_reasoning", ["strip", "preserve"])
def test_every_prompt_is_qwens_own_rendering_of_the_conversation_so_far(
    run: Run, preserving_run: Run, tokenizer: Any, history_reasoning: str
):
    preserve = history_reasoning == "preserve"
    rows = rows_of(preserving_run if preserve else run, "generated")
    asked = set()
    for talk in TURNS_AND_CALLS if preserve else TALKS:
        for turn, (history, _) in enumerate(talk.lessons()):
            rendered = tokenizer.apply_chat_template(
                history,
                tools=talk.shown_tools(),
                add_generation_prompt=True,
                return_dict=False,
                enable_thinking=True,
                preserve_thinking=preserve,
            )
            sample = f"{talk.id}_gen{turn}"
            assert rows[sample]["prompt_token_ids"] == rendered
            asked.add(sample)
    assert asked == {sample for sample, row in rows.items() if row["status"] != "skipped"}


def test_a_later_turn_sees_earlier_thoughts_only_where_they_are_preserved(
    run: Run, preserving_run: Run, tokenizer: Any
):
    first, call = SAID["system prompt_gen0"], SAID["known call_gen0"]
    for one, seen in ((run, False), (preserving_run, True)):
        rows = rows_of(one, "generated")
        prompt = tokenizer.decode(rows["system prompt_gen1"]["prompt_token_ids"])
        assert (first.thought in prompt) is seen
        assert first.answer in prompt
        assert prompt.endswith("<|im_start|>assistant\n<think>\n")
        after_call = tokenizer.decode(rows["known call_gen1"]["prompt_token_ids"])
        assert f"<think>\n{call.thought}\n</think>" in after_call  # of the same turn
        recipe = (one.results / "recipe.json").read_text()
        assert ('"preserve"' in recipe) is seen


# Later phases


def test_training_rows_are_the_engines_own_ids_cut_ones_included(run: Run):
    generated, tokenized = rows_of(run, "generated"), rows_of(run, "tokenized")
    assert set(tokenized) == set(SAID)
    for sample, row in tokenized.items():
        prompt, response = (generated[sample][f"{k}_token_ids"] for k in ("prompt", "response"))
        assert row["input_ids"] == prompt + response
        assert row["loss_mask"] == [0] * len(prompt) + [1] * len(response)
        assert row["mask_origin"] == "engine"


def test_the_audit_passes_within_the_production_limits_and_says_what_it_saw(run: Run):
    evidence = read_json(run.results / "audit" / "00000.json")
    checks = {check["name"]: check for check in evidence["checks"]}
    assert evidence["verdict"] == "pass"
    assert checks["truncated_share"]["limit"] == 0.1
    cut = {case["sample_id"] for case in checks["truncated_share"]["evidence"]}
    assert cut == {sample for sample, (status, _) in ENDINGS.items() if status == "truncated"}
    for name in ("unbalanced_rows", "malformed_rows", "usage_mismatch_rows", "error_share"):
        assert checks[name]["count"] == 0
    for name in ("empty_answer_share", "trivial_answer_share", "dropped_share"):
        assert checks[name]["count"] == 0
    assert checks["unreached_share"]["count"] == 2


def test_the_layers_of_the_configuration_are_extracted(run: Run):
    layers = yaml.safe_load((ROOT / PRODUCTION).read_text())["hidden_states"]["layers"]
    index = rows_of(run, "hidden_states")
    assert set(index) == set(SAID)
    for row in index.values():
        assert row["layers"] == layers and row["dtype"] == "bfloat16"
        assert row["finite"] and row["zero_rows"] == 0


# The server's command


def test_the_servers_log_line_has_the_configurations_flags_and_names_what_the_cpu_replaces(
    run: Run,
):
    log = log_of(run, "generate_shard")
    command = next(line for line in log.splitlines() if " --model-path " in line)
    for flag in ("reasoning-parser qwen3", "tool-call-parser qwen3_coder", "context-length 8192"):
        assert f" --{flag} " in command
    assert "mem-fraction-static" not in command
    replaced = next(line for line in log.splitlines() if "take the place of the config's" in line)
    assert "'mem-fraction-static': None" in replaced and "'device': 'cpu'" in replaced
    assert "the server runs 16 requests at once" in log  # as many as the configuration insists on


def test_a_flags_name_from_another_version_is_translated_and_the_log_says_so(preserving_run: Run):
    log = log_of(preserving_run, "generate_shard")
    assert "calls --mamba-scheduler-strategy --mamba-radix-cache-strategy: translated" in log
    command = next(line for line in log.splitlines() if " --model-path " in line)
    assert " --mamba-radix-cache-strategy no_buffer" in command


CPU = select_devices(["cpu"])  # where SGLang can be asked on any machine
GPU = Device("gpu:0", "gpu", 0, "GPU-0", "RTX PRO 6000", 96 << 30)
MANIFEST = {"path": "/models/Qwen3.6-27B", "hybrid": True, "trust_remote_code": False}
TRACES = {
    "of the demo": ("smol", "package:", "demo", "results/"),
    "of the CPU": ("cpu", "torch_native", "pytorch", "float32", "max-total-tokens", "max-mamba"),
}


def production_config(text: str) -> dict[str, Any]:
    """Return the configuration as a production run sees it: laid over the default, and complete."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    update_config(config, yaml.safe_load(text))
    return complete_config(
        config, load_schema(ROOT / "workflow" / "schemas" / "config.schema.yaml")
    )


def with_options(text: str) -> str:
    """Return the configuration with the flags that it only mentions switched on."""
    return re.sub(r"^    # ([a-z-]+): (\S+)", r"    \1: \2", text, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def known_flags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is kept which flags SGLang knows."""
    return tmp_path_factory.mktemp("flags") / "installed.json"


def production_command(text: str, known_flags: Path) -> list[str]:
    """Return the server's command on one GPU, which need not be there."""
    server = production_config(text)["server"]
    return server_arguments(
        translate_flags(server["flags"], CPU, STAND_IN, known_flags),
        model=MANIFEST,
        devices=[GPU],
        tensor_parallel=server["tensor_parallel"],
        port=30000,
        nccl_port=30001,
        served_name="Qwen3.6-27B-1",
    )


@pytest.mark.parametrize("variant", [str, with_options])
def test_the_installed_sglang_takes_the_whole_production_command(variant: Any, known_flags: Path):
    text = variant((ROOT / PRODUCTION).read_text())
    command = production_command(text, known_flags)
    flags = {part.removeprefix("--") for part in command if part.startswith("--")}
    named = set(yaml.safe_load(text)["server"]["flags"])
    assert named <= flags
    assert ("speculative-algorithm" in named) is (variant is with_options)
    check_command(command, server_environment(CPU, STAND_IN))


@pytest.mark.parametrize("kind", TRACES)
def test_the_production_command_has_no_trace(kind: str, known_flags: Path):
    command = production_command((ROOT / PRODUCTION).read_text(), known_flags)
    environ = server_environment([GPU], STAND_IN, {"PYTHONPATH": str(STAND_IN)})
    seen = " ".join([*command, *environ, *environ.values()]).lower()
    assert [trace for trace in TRACES[kind] if trace in seen] == []


def test_nothing_of_the_default_configuration_is_right_only_for_the_demo():
    config = production_config((ROOT / PRODUCTION).read_text())
    named = yaml.safe_load((ROOT / PRODUCTION).read_text())
    assert config["server"]["flags"] == named["server"]["flags"]
    assert config["model"]["source"] == "hub:Qwen/Qwen3.6-27B"
    assert config["sampling"] == named["sampling"]
    assert config["hidden_states"]["layers"] == dflash_layers(64)
