"""Which devices a setting stands for, with the real nvidia-ml-py over a stub of the driver's library."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.serving.devices import device_limit, select_devices
from tests.support.nvml.nvml_stub import build_stub, stub_environment

SCRIPTS = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
ASK = """
import json, sys, time
from dataclasses import asdict
from rebuild.serving.devices import device_limit, select_devices
from rebuild.errors import StepError
setting = json.loads(sys.argv[1])
began = time.process_time()
try:
    limit = device_limit(setting)
    seconds = time.process_time() - began
    devices = [asdict(device) for device in select_devices(setting)]
    print(json.dumps({"devices": devices, "limit": limit, "seconds": seconds, "torch": "torch" in sys.modules}))
except StepError as error:
    print(json.dumps({"error": str(error)}))
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("nvml"))


def ask(stub: Path, setting: Any = "auto", count: int = 4, **environment: str) -> dict[str, Any]:
    environ = stub_environment(stub, count, **environment) | {"PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, "-c", ASK, json.dumps(setting)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def indices(answer: dict[str, Any]) -> list[int]:
    return [device["index"] for device in answer["devices"]]


def test_auto_is_every_gpu_with_its_uuid_name_and_memory(stub: Path) -> None:
    answer = ask(stub)
    assert indices(answer) == [0, 1, 2, 3]
    assert answer["limit"] == 4
    assert answer["devices"][3] == {
        "id": "gpu:3",
        "kind": "gpu",
        "index": 3,
        "uuid": "GPU-00000003-0000-0000-0000-000000000000",
        "name": "Stub GPU",
        "memory_bytes": 141 << 30,
    }


def test_the_default_limit_costs_less_than_a_tenth_of_a_second_and_no_torch(stub: Path) -> None:
    answer = ask(stub)
    assert answer["seconds"] < 0.1
    assert not answer["torch"]


def test_a_node_without_driver_has_one_cpu_slot(stub: Path) -> None:
    answer = ask(stub, STUB_NVML_INIT="9")
    assert [device["id"] for device in answer["devices"]] == ["cpu"]
    assert answer["limit"] == 1


def test_a_node_with_a_driver_and_no_gpu_has_one_cpu_slot(stub: Path) -> None:
    assert [device["kind"] for device in ask(stub, count=0)["devices"]] == ["cpu"]


def test_a_driver_that_does_not_fit_its_library_is_an_error_and_not_a_cpu(stub: Path) -> None:
    error = ask(stub, STUB_NVML_INIT="18")["error"]
    assert "mismatch" in error and "devices: [cpu]" in error


def test_a_broken_driver_does_not_matter_to_who_wants_the_cpu(stub: Path) -> None:
    assert ask(stub, ["cpu"], STUB_NVML_INIT="18")["limit"] == 1


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("2", [2]), ("3,1", [3, 1]), ("GPU-00000002", [2]), ("GPU-00000001-0000,0", [1, 0])],
)
def test_what_a_scheduler_made_visible_is_what_there_is(
    stub: Path, visible: str, expected: list[int]
) -> None:
    assert indices(ask(stub, CUDA_VISIBLE_DEVICES=visible)) == expected


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_leave_the_cpu(stub: Path, hidden: str) -> None:
    answer = ask(stub, CUDA_VISIBLE_DEVICES=hidden)
    assert [device["kind"] for device in answer["devices"]] == ["cpu"]


def test_a_visible_gpu_that_is_not_there_is_an_error(stub: Path) -> None:
    assert "CUDA_VISIBLE_DEVICES=7" in ask(stub, CUDA_VISIBLE_DEVICES="7")["error"]
    assert "CUDA_VISIBLE_DEVICES=0" in ask(stub, CUDA_VISIBLE_DEVICES="0", count=0)["error"]


def test_gpus_that_may_not_be_opened_do_not_count_as_in_cuda(stub: Path) -> None:
    answer = ask(stub, STUB_NVML_FORBIDDEN="1")
    assert [device["uuid"][:12] for device in answer["devices"]] == [
        "GPU-00000000",
        "GPU-00000002",
        "GPU-00000003",
    ]
    assert indices(answer) == [0, 1, 2]


def test_a_list_names_indices_uuids_and_cpu_slots(stub: Path) -> None:
    answer = ask(stub, [3, "1", "GPU-00000000", "cpu:1"])
    assert [device["id"] for device in answer["devices"]] == ["gpu:3", "gpu:1", "gpu:0", "cpu:1"]
    assert answer["limit"] == 4


def test_a_list_may_only_name_what_the_scheduler_left(stub: Path) -> None:
    error = ask(stub, [0], CUDA_VISIBLE_DEVICES="2")["error"]
    assert "'0'" in error and "2 = GPU-00000002" in error


@pytest.mark.parametrize("wrong", ["9", "GPU-", "cpu:x", "gpu0", "GPU-0000000"])
def test_an_unknown_or_ambiguous_device_is_refused_with_what_there_is(
    stub: Path, wrong: str
) -> None:
    error = ask(stub, [wrong])["error"]
    assert wrong in error and "0 = GPU-00000000-0000-0000-0000-000000000000 (Stub GPU" in error


@pytest.mark.parametrize("setting", [["cpu", "cpu"], []])
def test_no_device_or_one_named_twice_is_refused(setting: list[str | int]) -> None:
    with pytest.raises(StepError, match="no device, or one of them twice"):
        select_devices(setting)


def test_two_cpu_slots_are_two_devices() -> None:
    assert [device.uuid for device in select_devices(["cpu:0", "cpu:1"])] == ["cpu:0", "cpu:1"]


def test_a_list_is_counted_without_asking_for_gpus() -> None:
    assert device_limit([0, 1, 2, 3]) == 4


def test_a_cpu_slot_has_the_nodes_memory() -> None:
    memory = select_devices(["cpu"])[0].memory_bytes
    assert memory == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
