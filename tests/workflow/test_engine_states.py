"""Hidden states captured by a real SGLang server, held layer by layer against a plain forward of transformers.

One server of the demo's model, and one of Qwen3.6 in miniature, whose layers are of two kinds.
"""

import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rebuild.capture.engine import engine_capture
from rebuild.capture.engine_requests import Engine
from rebuild.model.manifest import describe_config
from rebuild.serving.devices import select_devices
from rebuild.serving.installed_flags import translate_flags
from rebuild.serving.lease import lease_devices
from rebuild.serving.processes import session_processes
from rebuild.serving.server import ServerDied
from rebuild.states.captured import Captured, Wanted
from tests.support.trees import ROOT

STAND_IN = ROOT / "envs" / "cpu" / "stand_in"
# What a production configuration may set, and a capturing server can have no use for.
FLAGS = {
    "reasoning-parser": "qwen3",
    "tool-call-parser": "qwen3_coder",
    "speculative-algorithm": "NEXTN",
    "enable-hierarchical-cache": True,
    "chunked-prefill-size": 512,
    "context-length": 1024,
}
LENGTHS = [40, 300, 1, 150, 2100, 64, 300]  # one is more than a CPU's prefill and the flags' chunk
AGREEMENT = 0.01  # relative error, median over tokens; bfloat16 alone makes 0.002
APART = 0.05  # what neighbouring layers differ by at least


@contextmanager
def capturing(model: Path, folder: Path, wanted: Wanted) -> Iterator[Any]:
    manifest = describe_config(model, None) | {"path": str(model), "trust_remote_code": False}
    with lease_devices(1, select_devices(["cpu"]), folder=folder / "leases") as lease:
        flags = translate_flags(FLAGS, lease.devices, STAND_IN, folder / "installed_flags.json")
        with engine_capture(
            manifest,
            wanted=wanted,
            flags=flags,
            tensor_parallel=1,
            lease=lease,
            stand_in=STAND_IN,
            logs=folder / "logs",
            scratch=folder / "scratch",
            longest=max(LENGTHS),
            ready_s=600,
            stall_s=120,
        ) as capture_all:
            yield capture_all


def make_samples() -> list[list[int]]:
    """Return random samples, two of them equal."""
    chance = random.Random(0)
    samples = [[chance.randrange(1000, 40000) for _ in range(length)] for length in LENGTHS]
    samples[-1] = list(samples[1])
    return samples


class Plain:
    """A model as transformers runs it, in float32, one sample at a time."""

    def __init__(self, model: Path) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.decoder = loaded.get_decoder().eval()
        self.before: list[Tensor] = []
        self.decoder.norm.register_forward_pre_hook(
            lambda _module, args: self.before.append(args[0][0])
        )

    @torch.inference_mode()
    def states(self, ids: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Return the output of every layer, and the last one's after the final norm."""
        output = self.decoder(
            input_ids=torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False
        )
        # The last of `hidden_states` is after the norm.
        layers = [states[0] for states in output.hidden_states[1:-1]]
        return [*layers, self.before.pop()], output.last_hidden_state[0]


def error(seen: Tensor, expected: Tensor) -> float:
    """Return the relative error of states [S, H], the median over tokens."""
    norms = (seen.float() - expected).norm(dim=1) / expected.norm(dim=1)
    return float(norms.median())


def check_states(plain: Plain, samples: list[list[int]], got: dict[int, Captured], wanted: Wanted):
    """Hold everything captured against transformers, and against the layers beside the right ones."""
    assert sorted(got) == list(range(len(samples)))
    for position, ids in enumerate(samples):
        layers, normed = plain.states(ids)
        states = got[position]
        assert states.taps.shape == (len(ids), len(wanted.layers), normed.shape[1])
        assert states.pre_norm is not None and states.post_norm is not None
        errors = [error(states.taps[:, n], layers[k]) for n, k in enumerate(wanted.layers)]
        errors += [error(states.pre_norm, layers[-1]), error(states.post_norm, normed)]
        assert max(errors) < AGREEMENT, f"sample {position}: {errors}"
        beside = [
            error(states.taps[:, n], layers[k + step])
            for n, k in enumerate(wanted.layers)
            for step in (-1, 1)
            if 0 <= k + step < len(layers)
        ]
        beside += [error(states.pre_norm, normed), error(states.post_norm, layers[-1])]
        assert len(ids) < 40 or min(beside) > APART, f"sample {position}: {beside}"


def test_a_dense_model_is_captured_as_transformers_computes_it(
    demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Wanted((0, 1, 15, 28, 29), pre_norm=True, post_norm=True)
    samples = make_samples()
    with capturing(demo_model, tmp_path, wanted) as capture_all:
        got = dict(capture_all(samples))
        again = dict(
            capture_all(samples[:2])
        )  # the server has seen them: nothing may come from a cache
        left = list((tmp_path / "scratch" / "captured").iterdir())
    assert left == []
    assert torch.equal(got[1].taps, got[6].taps)
    assert error(again[1].taps.flatten(1), got[1].taps.flatten(1).float()) < AGREEMENT
    said = capsys.readouterr().err
    for flag in ("speculative-algorithm", "enable-hierarchical-cache", "reasoning-parser"):
        assert f"capturing without {flag}" in said
    check_states(Plain(demo_model), samples, got, wanted)


def test_a_hybrid_model_is_captured_as_transformers_computes_it_until_its_server_dies(
    tiny_qwen36: Path, tmp_path: Path
) -> None:
    wanted = Wanted((0, 3, 4, 6, 7), pre_norm=True, post_norm=True)
    samples = make_samples()
    with capturing(tiny_qwen36, tmp_path, wanted) as capture_all:
        got = dict(capture_all(samples))
        engine = engine_of(capture_all)
        check_death(capture_all, engine, samples)
    assert session_processes(engine.server.pid) == {}
    check_states(Plain(tiny_qwen36), samples, got, wanted)


def engine_of(capture_all: Any) -> Engine:
    """Return the engine behind what captures."""
    assert isinstance(capture_all, partial)
    (engine,) = capture_all.args
    assert isinstance(engine, Engine)
    return engine


def check_death(capture_all: Any, engine: Engine, samples: list[list[int]]) -> None:
    """Kill the server's process that computes: the sample in flight is reported, the one before it was had."""
    capturing_more = capture_all([samples[0], *([samples[4][n:] for n in range(40)])])
    first, _ = next(capturing_more)
    for pid in map(int, session_processes(engine.server.pid)):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sglang::scheduler"):
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(ServerDied) as died:
        list(capturing_more)
    assert first == 0
    assert str(engine.server.log) in died.value.where
