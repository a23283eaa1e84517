"""The server's command and environment, held against the parser of the SGLang that is installed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.serving.devices import Device, select_devices
from rebuild.serving.flags import GOVERNED, cpu_overrides, server_arguments, server_environment
from rebuild.serving.installed_flags import (
    ask_parser,
    check_command,
    check_flags,
    describe_installation,
    installed_flags,
    translate_flags,
)

STAND_IN = Path(__file__).resolve().parents[2] / "envs" / "cpu" / "stand_in"
GPUS = [Device(f"gpu:{n}", "gpu", n, f"GPU-{n}", "H200", 141 << 30) for n in range(4)]
CPU = select_devices(["cpu"])
DENSE = {"path": "/models/smol", "hybrid": False, "trust_remote_code": False}
HYBRID = {"path": "/models/qwen", "hybrid": True, "trust_remote_code": False}
PRODUCTION: dict[str, Any] = {
    "reasoning-parser": "qwen3",
    "tool-call-parser": "qwen3_coder",
    "mem-fraction-static": 0.8,
    "max-running-requests": 128,
    "context-length": 8192,
    "mamba-scheduler-strategy": "no_buffer",
    "enable-hierarchical-cache": True,
    "hicache-ratio": 2,
    "speculative-algorithm": "NEXTN",
    "speculative-num-steps": 3,
    "speculative-eagle-topk": 1,
    "speculative-num-draft-tokens": 4,
    "cuda-graph-bs-decode": [1, 2, 4, 8],
    "default-chat-template-kwargs": {"enable_thinking": True},
    "disable-radix-cache": False,
    "random-seed": None,
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return installed_flags(server_environment(CPU, STAND_IN))


def arguments(flags: dict[str, Any], **changes: Any) -> list[str]:
    settings = {"model": DENSE, "devices": GPUS[:1], "tensor_parallel": 1}
    ports = {"port": 21000, "nccl_port": 21001, "served_name": "smol-1"}
    return server_arguments(flags, **settings | ports | changes)


def value_of(flag: str, command: list[str]) -> str:
    assert command.count(flag) == 1
    return command[command.index(flag) + 1]


def test_what_the_workflow_relies_on_is_always_said() -> None:
    command = arguments({}, tensor_parallel=4, devices=GPUS)
    assert value_of("--model-path", command) == "/models/smol"
    assert value_of("--served-model-name", command) == "smol-1"
    assert value_of("--host", command) == "127.0.0.1"
    assert value_of("--port", command) == "21000"
    assert value_of("--nccl-port", command) == "21001"
    assert value_of("--tp-size", command) == "4"
    assert value_of("--tokenizer-worker-num", command) == "1"
    assert value_of("--sampling-defaults", command) == "openai"
    assert "--enable-metrics" in command
    assert "--trust-remote-code" not in command
    assert "--trust-remote-code" in arguments({}, model=DENSE | {"trust_remote_code": True})


def test_values_become_arguments_by_their_kind() -> None:
    command = arguments(PRODUCTION)
    assert value_of("--mem-fraction-static", command) == "0.8"
    assert "--enable-hierarchical-cache" in command
    assert "--disable-radix-cache" not in command
    assert "--random-seed" not in command
    at = command.index("--cuda-graph-bs-decode")
    assert command[at + 1 : at + 5] == ["1", "2", "4", "8"]
    thinking = json.loads(value_of("--default-chat-template-kwargs", command))
    assert thinking == {"enable_thinking": True}


@pytest.mark.parametrize("flag", GOVERNED)
def test_a_flag_that_is_decided_elsewhere_is_refused_with_the_place(flag: str) -> None:
    with pytest.raises(StepError, match="decided elsewhere") as refused:
        arguments({flag: 1})
    assert GOVERNED[flag] in str(refused.value)


def test_a_gpu_command_has_no_trace_of_the_cpu() -> None:
    command = " ".join(arguments(PRODUCTION, model=HYBRID))
    for trace in ("cpu", "torch_native", "float32", "max-total-tokens", "no-overlap"):
        assert trace not in command
    assert cpu_overrides(PRODUCTION, model=HYBRID, devices=GPUS) == {}


def test_on_the_cpu_what_it_needs_takes_the_place_of_what_the_user_said() -> None:
    flags = {"dtype": "bfloat16", "mem-fraction-static": 0.8, "context-length": 4096}
    command = arguments(flags, devices=CPU)
    assert value_of("--device", command) == "cpu"
    assert value_of("--dtype", command) == "float32"
    assert value_of("--attention-backend", command) == "torch_native"
    assert value_of("--sampling-backend", command) == "pytorch"
    assert value_of("--max-total-tokens", command) == "16384"
    assert value_of("--context-length", command) == "4096"
    assert "--mem-fraction-static" not in command
    assert "--disable-overlap-schedule" not in command


@pytest.mark.parametrize(("asked", "given"), [(128, "32"), (8, "8"), (None, "32")])
def test_on_the_cpu_a_smaller_limit_of_the_users_stands(asked: int | None, given: str) -> None:
    command = arguments({"max-running-requests": asked}, devices=CPU)
    assert value_of("--max-running-requests", command) == given


def test_on_the_cpu_a_hybrid_model_gets_what_its_states_need() -> None:
    overrides = cpu_overrides(PRODUCTION, model=HYBRID, devices=CPU)
    assert overrides["mamba-radix-cache-strategy"] == "no_buffer"
    assert overrides["disable-overlap-schedule"] is True
    assert overrides["max-mamba-cache-size"] == 16
    dropped = {flag for flag, value in overrides.items() if value is None}
    assert dropped == {
        "mem-fraction-static",
        "enable-hierarchical-cache",
        "hicache-ratio",
        "speculative-algorithm",
        "speculative-num-steps",
        "speculative-eagle-topk",
        "speculative-num-draft-tokens",
    }


def test_a_gpu_server_never_sees_the_stand_in() -> None:
    paths = os.pathsep.join(["/somewhere", str(STAND_IN), f"{STAND_IN}/"])
    given = {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    environment = server_environment(GPUS[2:], STAND_IN, given)
    assert environment["PYTHONPATH"] == "/somewhere"
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "SGLANG_USE_CPU_ENGINE" not in environment and "OMP_NUM_THREADS" not in environment


def test_a_cpu_server_sees_the_stand_in_first_and_no_gpu() -> None:
    environment = server_environment(CPU, STAND_IN, {"PYTHONPATH": "/somewhere"})
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(STAND_IN), "/somewhere"]
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_the_installed_parser_takes_the_whole_production_command(installed: dict[str, Any]) -> None:
    flags, _ = check_flags(PRODUCTION, installed)
    on_gpus = arguments(flags, model=HYBRID, devices=GPUS, tensor_parallel=4)
    on_a_cpu = arguments(flags, model=HYBRID, devices=CPU)
    answer = ask_parser([on_gpus, on_a_cpu], server_environment(CPU, STAND_IN))
    assert answer["refusals"] == [None, None]


def test_a_command_that_only_the_installed_parser_can_judge_is_refused_in_its_words() -> None:
    command = arguments({"max-running-requests": "many"})
    with pytest.raises(StepError, match="invalid int value: 'many'"):
        check_command(command, server_environment(CPU, STAND_IN))


def test_the_governed_flags_are_flags_of_the_installed_sglang(installed: dict[str, Any]) -> None:
    assert set(GOVERNED) <= installed.keys()


def test_a_renamed_flag_is_translated_with_a_notice(installed: dict[str, Any]) -> None:
    flags, notices = check_flags({"mamba-scheduler-strategy": "no_buffer"}, installed)
    assert flags == {"mamba-radix-cache-strategy": "no_buffer"}
    assert "--mamba-scheduler-strategy --mamba-radix-cache-strategy" in notices[0]


def test_the_new_name_is_translated_for_an_sglang_that_knows_only_the_old_one() -> None:
    old = {"mamba-scheduler-strategy": {"takes_value": True, "choices": ["auto", "no_buffer"]}}
    flags, notices = check_flags({"mamba-radix-cache-strategy": "no_buffer"}, old)
    assert flags == {"mamba-scheduler-strategy": "no_buffer"}
    assert len(notices) == 1


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("max-runing-requests", "max-running-requests"),
        ("mem_fraction_static", "mem-fraction-static"),
        ("--context-length", "context-length"),
    ],
)
def test_an_unknown_flag_is_refused_with_the_nearest_name(
    installed: dict[str, Any], wrong: str, near: str
) -> None:
    with pytest.raises(StepError, match=f"does not know: {wrong}") as refused:
        check_flags({wrong: 1}, installed)
    assert near in refused.value.expected


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("reasoning-parser", "qwen33", "qwen3"),
        ("reasoning-parser", True, "qwen3"),
        ("context-length", True, "a value"),
        ("enable-hierarchical-cache", 1, "takes no value"),
    ],
)
def test_a_value_that_the_flag_does_not_take_is_refused(
    installed: dict[str, Any], flag: str, value: Any, expected: str
) -> None:
    with pytest.raises(StepError, match=flag) as refused:
        check_flags({flag: value}, installed)
    assert expected in refused.value.expected


def test_the_parser_is_asked_once_for_one_installation(
    tmp_path: Path, installed: dict[str, Any]
) -> None:
    cache = tmp_path / "flags.json"
    kept = {"installation": describe_installation(), "options": installed}
    cache.write_text(json.dumps(kept))
    assert installed_flags({}, cache) == installed  # with this environment SGLang cannot be asked
    assert translate_flags({"mamba-scheduler-strategy": "auto"}, CPU, STAND_IN, cache) == {
        "mamba-radix-cache-strategy": "auto"
    }


def test_another_installation_is_asked_again(tmp_path: Path, installed: dict[str, Any]) -> None:
    cache = tmp_path / "flags.json"
    cache.write_text(json.dumps({"installation": {"version": "0.5.11"}, "options": {}}))
    assert installed_flags(server_environment(CPU, STAND_IN), cache) == installed
    assert json.loads(cache.read_text())["installation"] == describe_installation()


def test_an_sglang_that_cannot_be_imported_is_an_error_that_says_so() -> None:
    with pytest.raises(StepError, match="cannot be imported"):
        installed_flags(
            os.environ | {"PYTHONPATH": "", "SGLANG_USE_CPU_ENGINE": "0", "PYTHONHOME": "/no"}
        )


def test_without_flags_nothing_is_asked() -> None:
    assert translate_flags({}, CPU, STAND_IN) == {}
