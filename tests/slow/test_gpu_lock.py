"""The locks against the package index. What is resolved is not downloaded: the index serves metadata apart."""

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envs.lock import ENVS, dry_run, is_cuda, read_pins

GPU = ENVS / "gpu" / "requirements.txt"
CPU = ENVS / "cpu" / "requirements.txt"
DEV = ENVS / "dev" / "requirements.txt"


def resolved(*arguments):
    """Resolve with dependencies, so that pip itself refuses pins that contradict each other."""
    return {item["metadata"]["name"]: item["metadata"] for item in dry_run(arguments)}


def versions(packages):
    return {name: metadata["version"] for name, metadata in packages.items()}


@pytest.fixture(scope="module")
def gpu():
    return resolved("-r", str(GPU))


def test_pip_installs_exactly_the_gpu_lock_and_needs_no_option_for_its_pre_releases(gpu):
    assert versions(gpu) == read_pins(GPU)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_pins_meet_every_requirement_of_every_package(gpu, python):
    pins = {canonicalize_name(name): metadata["version"] for name, metadata in gpu.items()}
    machine = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    machine |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    unmet, checked = [], 0
    for name, metadata in gpu.items():
        for line in metadata.get("requires_dist", []):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(machine):
                checked += 1
                pinned = pins.get(canonicalize_name(requirement.name))
                if not pinned or not requirement.specifier.contains(pinned, prereleases=True):
                    unmet.append(f"{name}: {line}")
    assert not unmet
    assert checked > 500


@pytest.mark.parametrize(
    ("lock", "python"),
    [(GPU, "3.11"), (GPU, "3.12"), (CPU, "3.11"), (CPU, "3.12"), (CPU, "3.13")],
    ids=lambda value: value if isinstance(value, str) else value.parent.name,
)
def test_every_pin_has_a_file_for_each_python_that_the_lock_names(lock, python, tmp_path):
    """Without dependencies: pip cannot judge their markers for a Python that it does not run on."""
    arguments = ["--no-deps", "--python-version", python, "--target", str(tmp_path)]
    assert versions(resolved(*arguments, "-r", str(lock))) == read_pins(lock)


@pytest.mark.parametrize("lock", [GPU, CPU], ids=["gpu", "cpu"])
def test_the_development_lock_fits_beside(lock):
    found = versions(resolved("-r", str(lock), "-r", str(DEV)))
    expected = read_pins(lock) | read_pins(DEV)
    brought_by_torch = {name for name in found.keys() - expected.keys() if is_cuda(name)}
    assert {name: found[name] for name in found.keys() - brought_by_torch} == expected
    assert not brought_by_torch or lock == CPU
