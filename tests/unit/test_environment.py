"""The environments: their locks agree, a failed installation is noticed, and the CPU stand-in keeps its place."""

import os
import re
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from envs.cpu.stand_in.sglang_cpu_stand_in import kernels, placeholders
from envs.lock import is_cuda, read_pins

ROOT = Path(__file__).resolve().parents[2]
ENVS = ROOT / "envs"
STAND_IN = ENVS / "cpu" / "stand_in"
TORCH_STACK = {"torch", "torchvision", "triton"}


def wanted(kind):
    lines = [line.partition("#")[0].strip() for line in (ENVS / kind / "requirements.in").open()]
    return [Requirement(line) for line in lines if line]


# Locks


@pytest.mark.parametrize(
    "lock",
    [
        *("cpu/requirements.txt", "cpu/requirements-no-deps.txt", "dev/requirements.txt"),
        *("gpu/requirements.txt", "gpu/requirements-no-deps.txt"),
    ],
)
def test_a_lock_pins_every_package_once_and_exactly(lock):
    lines = [line for line in (ENVS / lock).read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line) for line in lines)
    names = [canonicalize_name(line.split("==")[0]) for line in lines]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", ["cpu", "gpu", "dev"])
def test_a_lock_meets_the_requirements_it_is_made_from(kind):
    lock = read_pins(ENVS / kind / "requirements.txt")
    pins = {canonicalize_name(name): version for name, version in lock.items()}
    for requirement in wanted(kind):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement


def test_both_machines_run_the_same_versions_of_all_but_torch():
    cpu = read_pins(ENVS / "cpu/requirements.txt")
    gpu = read_pins(ENVS / "gpu/requirements.txt")
    different = {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]}
    assert different <= TORCH_STACK
    assert len(cpu.keys() & gpu.keys()) > 100
    sglang = read_pins(ENVS / "cpu/requirements-no-deps.txt")["sglang"]
    assert sglang == gpu["sglang"] == "0.5.23"


def test_the_cpu_lock_leaves_cuda_to_whatever_torch_the_machine_gets():
    assert not [name for name in read_pins(ENVS / "cpu/requirements.txt") if is_cuda(name)]


def test_the_gpu_lock_pins_the_pre_releases_that_pip_would_not_choose():
    assert re.fullmatch(r"4\.0\.0b\d+", read_pins(ENVS / "gpu/requirements.txt")["flash-attn-4"])


def test_the_development_lock_repeats_nothing_of_the_others():
    dev = read_pins(ENVS / "dev/requirements.txt").keys()
    assert not dev & read_pins(ENVS / "cpu/requirements.txt").keys()
    assert not dev & read_pins(ENVS / "gpu/requirements.txt").keys()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_the_conda_file_has_the_locks_pins(kind):
    dependencies = yaml.safe_load((ENVS / f"{kind}.yaml").read_text())["dependencies"]
    pins = read_pins(ENVS / kind / "requirements.txt")
    assert dependencies[-1]["pip"] == [f"{name}=={version}" for name, version in pins.items()]
    bare = read_pins(ENVS / kind / "requirements-no-deps.txt")
    arguments = " ".join(f"{name}=={version}" for name, version in bare.items())
    script = (ENVS / f"{kind}.post-deploy.sh").read_text()
    assert script.endswith(f"python -m pip install --no-deps {arguments}\n")


# Making .venv


def folder_of_commands(folder, python3):
    for name in ("sh", "dirname", "cat"):
        (folder / name).symlink_to(shutil.which(name))
    python = folder / "python3"
    python.write_text(python3)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(folder)


def test_a_machine_without_a_usable_python_is_told_what_is_missing(tmp_path):
    old = '#!/bin/sh\n[ "$1" != --version ] || { echo Python 3.9.2; exit 0; }\nexit 1\n'
    run = subprocess.run(
        ["sh", ENVS / "make_venv.sh", tmp_path / "venv", "cpu"],
        env={"PATH": folder_of_commands(tmp_path, old)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "needs Python 3.11 to 3.13" in run.stderr and "seen: Python 3.9.2" in run.stderr
    assert not (tmp_path / "venv").exists()


def test_a_failed_installation_stops_make_and_is_tried_again(tmp_path):
    pip = tmp_path / "venv" / "bin" / "pip"
    pip.parent.mkdir(parents=True)
    python = pip.with_name("python")
    for file in (pip, python):
        file.write_text("#!/bin/sh\necho no index >&2\nexit 1\n")
        file.chmod(0o755)
    for _ in range(2):
        run = subprocess.run(
            ["make", f"VENV={tmp_path / 'venv'}", "KIND=cpu", "venv"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert run.returncode != 0 and "no index" in run.stderr
    assert not (tmp_path / "venv" / "installed-cpu").exists()


# The CPU stand-in and a real sgl_kernel

ACTIVATE = """
import sys
from sglang_cpu_stand_in import guard
guard.NVIDIA_TRACES = sys.argv[1:]
import sglang
from sglang.srt.platforms import current_platform
import sgl_kernel
spec = sgl_kernel.__spec__
print(type(current_platform).__name__, type(spec.loader).__name__, spec.origin)
"""


def import_sglang(*traces, path=(), **environment):
    names = ["PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "OPENBLAS_CORETYPE"]
    inherited = {name: os.environ[name] for name in names if name in os.environ}
    paths = {"PYTHONPATH": os.pathsep.join(map(str, [STAND_IN, *path]))}
    return subprocess.run(
        [sys.executable, "-c", ACTIVATE, *map(str, traces)],
        env={**inherited, "HF_HUB_OFFLINE": "1", **paths, **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def real_kernel(tmp_path):
    folder = tmp_path / "site"
    (folder / "sgl_kernel").mkdir(parents=True)
    (folder / "sgl_kernel" / "__init__.py").write_text("def silu_and_mul(): ...\n")
    metadata = folder / "sglang_kernel-0.4.10.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang-kernel\nVersion: 0.4.10\n")
    return folder


@pytest.fixture
def nvidia_driver(tmp_path):
    device = tmp_path / "nvidiactl"
    device.touch()
    return device


def test_sglang_finds_the_stand_in_where_no_real_kernel_is():
    run = import_sglang(SGLANG_USE_CPU_ENGINE="1", SGLANG_PLATFORM="cpu_stand_in")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("CpuSRTPlatform")
    assert ("PlaceholderFinder" in run.stdout) == (find_spec("sgl_kernel") is None)


def test_the_stand_in_never_comes_before_a_real_kernel(real_kernel):
    run = import_sglang(path=[real_kernel], SGLANG_USE_CPU_ENGINE="1")
    assert str(real_kernel / "sgl_kernel" / "__init__.py") in run.stdout, run.stderr
    assert "steps aside: a real sgl_kernel is installed" in run.stderr


def test_no_file_of_the_stand_in_can_be_imported_as_the_real_package():
    names = {path.stem for path in STAND_IN.iterdir()}
    assert "sglang_cpu_stand_in" in names
    assert names.isdisjoint({"sgl_kernel", "torchvision", "sitecustomize", "usercustomize"})


def test_the_stand_in_refuses_beside_an_nvidia_driver(nvidia_driver):
    run = import_sglang(nvidia_driver, SGLANG_USE_CPU_ENGINE="1", SGLANG_PLATFORM="cpu_stand_in")
    assert run.returncode != 0 and not run.stdout
    assert "ImportError: The CPU stand-in for sgl_kernel refuses to run" in run.stderr
    assert "install envs/gpu/requirements.txt" in run.stderr


def test_beside_a_driver_the_override_allows_the_stand_in_but_not_before_a_real_kernel(
    nvidia_driver, real_kernel
):
    override = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_STAND_IN_BESIDE_GPU": "1"}
    run = import_sglang(nvidia_driver, **override)
    assert run.returncode == 0 and run.stdout.startswith("CpuSRTPlatform"), run.stderr
    run = import_sglang(nvidia_driver, path=[real_kernel], **override)
    assert str(real_kernel) in run.stdout, run.stderr


def test_without_the_cpu_engine_the_stand_in_does_nothing(real_kernel):
    code = "from sglang_cpu_stand_in.platform import activate; import sys; n = len(sys.meta_path); "
    code += "print(activate(), len(sys.meta_path) - n)"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(STAND_IN)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "None 0\n"


# Placeholders


@pytest.fixture
def imaginary(monkeypatch):
    def real(x: int) -> int:
        return x + 1

    finder = placeholders.PlaceholderFinder("imaginary", {"imaginary.part": [real]})
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "imaginary"]:
        del sys.modules[name]


def test_a_placeholder_can_be_imported_subclassed_and_asked_for_but_not_called(imaginary):
    from imaginary.deep.down import Thing
    from imaginary.part import real

    assert real(1) == 2
    assert not isinstance(3, Thing) and issubclass(type("Mine", (Thing,), {}), Thing)
    with pytest.raises(NotImplementedError, match=r"imaginary\.deep\.down\.Thing\.MODE was called"):
        Thing.MODE(1)
    with pytest.raises(AttributeError):
        Thing.__wrapped__  # noqa: B018


# Operators, against transformers' own

KEYS, VALUES, K, V, TAPS = 2, 4, 8, 6, 4


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gated_delta_inputs(tokens):
    q, k = random(1, tokens, KEYS, K, seed=1), random(1, tokens, KEYS, K, seed=2)
    v = random(1, tokens, VALUES, V, seed=3)
    a, b = random(tokens, VALUES, seed=4), random(tokens, VALUES, seed=5)
    return q, k, v, a, b


def reference_delta_rule(q, k, v, g, beta, state):
    q, k = (x.repeat_interleave(VALUES // KEYS, dim=2) for x in (q, k))
    return reference.torch_recurrent_gated_delta_rule(
        q, k, v, g, beta, state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def test_prefill_equals_transformers_for_every_sequence_of_the_batch():
    q, k, v, a, b = gated_delta_inputs(9)
    decay, bias = random(VALUES, seed=6), random(VALUES, seed=7)
    pool, before = random(5, VALUES, V, K, seed=8), random(5, VALUES, V, K, seed=8)
    g, beta = kernels.fused_gdn_gating_cpu(decay, a, b, bias)
    torch.testing.assert_close(
        g[0], -decay.exp() * torch.nn.functional.softplus(a + bias), rtol=1e-6, atol=1e-6
    )
    out, _, _ = kernels.chunk_gated_delta_rule_cpu(
        *(q, k, v, g, beta),
        initial_state=pool,
        initial_state_indices=torch.tensor([3, -1, 1]),
        cu_seqlens=torch.tensor([0, 5, 6, 9]),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    for slot, rows in ((3, slice(0, 5)), (1, slice(6, 9))):
        start = before[slot].transpose(-1, -2)[None]
        parts = (x[:, rows] for x in (q, k, v, g, beta))
        expected, state = reference_delta_rule(*parts, start)
        torch.testing.assert_close(out[:, rows], expected)
        torch.testing.assert_close(pool[slot], state[0].transpose(-1, -2))
    untouched = [0, 2, 4]
    assert torch.equal(pool[untouched], before[untouched]) and not out[0, 5].any()


def test_decoding_token_by_token_equals_prefill():
    q, k, v, a, b = gated_delta_inputs(6)
    decay, bias = random(VALUES, seed=6), random(VALUES, seed=7)
    whole, stepwise = random(1, VALUES, V, K, seed=8), random(1, VALUES, V, K, seed=8)
    slot, both = torch.tensor([0]), {"use_qk_l2norm_in_kernel": True}
    gates = kernels.fused_gdn_gating_cpu(decay, a, b, bias)
    states = {"initial_state": whole, "initial_state_indices": slot}
    bounds = torch.tensor([0, 6])
    expected, _, _ = kernels.chunk_gated_delta_rule_cpu(
        q, k, v, *gates, **states, cu_seqlens=bounds, head_first=False, **both
    )
    for t in range(6):
        token = slice(t, t + 1)
        out = kernels.fused_sigmoid_gating_delta_rule_update_cpu(
            **{"q": q[:, token], "k": k[:, token], "v": v[:, token], "a": a[token], "b": b[token]},
            **{"A_log": decay, "dt_bias": bias, "cu_seqlens": torch.tensor([0, 1])},
            **{"initial_state_source": stepwise, "initial_state_indices": slot, **both},
            softplus_beta=1.0,
            softplus_threshold=20.0,
        )
        torch.testing.assert_close(out, expected[:, token])
    torch.testing.assert_close(stepwise, whole)


def test_convolution_equals_transformers_in_prefill_and_decoding():
    x, weight, bias = random(V, 7, seed=1), random(V, TAPS, seed=2), random(V, seed=3)
    states = random(3, V, TAPS - 1, seed=4)
    expected = reference.causal_conv1d_fn(x[None], weight, bias, "silu")[0]
    prefill = kernels.causal_conv1d_fn_cpu(
        x[:, :5].contiguous(),
        weight,
        bias,
        activation="silu",
        conv_states=states,
        has_initial_state=torch.tensor([False]),
        cache_indices=torch.tensor([2]),
        query_start_loc=torch.tensor([0, 5]),
        seq_lens_cpu=[5],
    )
    torch.testing.assert_close(prefill, expected[:, :5])
    for t in (5, 6):
        out = kernels.causal_conv1d_update_cpu(
            x[None, :, t], states, weight, bias, "silu", conv_state_indices=torch.tensor([2])
        )
        torch.testing.assert_close(out[0], expected[:, t])
    assert torch.equal(states[2], x[:, 4:]) and torch.equal(states[:2], random(3, V, 3, seed=4)[:2])


def test_query_and_key_norms_equal_transformers():
    tokens, heads, size = 3, 2, 8
    q_gate, k = random(tokens, heads * 2 * size, seed=1), random(tokens, size, seed=2)
    norm = reference.Qwen3_5RMSNorm(size, eps=1e-6)
    norm.weight.data = random(size, seed=3)
    q, keys, gate = kernels.fused_qk_gemma_rmsnorm_with_gate_cpu(
        q_gate, k, norm.weight.data, norm.weight.data, 1e-6, size, heads
    )
    split = q_gate.view(tokens, heads, 2 * size)
    torch.testing.assert_close(q.view(tokens, heads, size), norm(split[..., :size]).detach())
    torch.testing.assert_close(keys, norm(k).detach())
    assert torch.equal(gate.view(tokens, heads, size), split[..., size:])


def test_output_gate_and_projections_keep_their_parts_apart():
    x, gate = random(3, 8, seed=1), random(3, 2, 4, seed=2)
    expected = x * gate.view(3, 8).sigmoid()
    kernels.fused_sigmoid_mul_cpu(x, gate)
    torch.testing.assert_close(x, expected)
    qkv_width, z_width = 2 * KEYS * K + VALUES * V, VALUES * V
    qkvz, ba = random(3, qkv_width + z_width, seed=3), random(3, 2 * VALUES, seed=4)
    qkv, z, b, a = kernels.fused_qkvzba_split_reshape_cat_contiguous_cpu(
        qkvz, ba, KEYS, VALUES, K, V
    )
    assert torch.equal(torch.cat([qkv, z.reshape(3, z_width)], dim=-1), qkvz)
    assert torch.equal(torch.cat([b, a], dim=-1), ba)


def test_each_request_gets_its_own_cache_places():
    table = torch.zeros(3, 6, dtype=torch.int32)
    places = torch.tensor([11, 12, 13, 21])
    starts, ends = torch.tensor([0, 4]), torch.tensor([3, 5])
    kernels.assign_req_to_token_pool_cpu(torch.tensor([2, 0]), table, starts, ends, places, 6)
    assert table.tolist() == [[0, 0, 0, 0, 21, 0], [0] * 6, [11, 12, 13, 0, 0, 0]]
