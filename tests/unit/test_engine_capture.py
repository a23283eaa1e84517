"""Capture by the engine: how its server is started, what the hook in it writes, and what is made of the files."""

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rebuild.capture.engine as engine_module
import rebuild.capture.engine_requests as requests_module
from rebuild.capture.engine import capture_all, emptied, open_session
from rebuild.capture.engine_flags import (
    AUXILIARY,
    NEEDED,
    PAGE,
    WITHOUT_GRAPHS,
    Layers,
    capture_method,
    capture_purpose,
    keep_flags,
)
from rebuild.capture.engine_hook import Collector, make_hook
from rebuild.errors import StepError
from rebuild.serving.devices import Device, select_devices
from rebuild.serving.flags import Purpose, server_arguments, server_environment
from rebuild.serving.installed_flags import ask_parser, describe_installation
from rebuild.serving.server import ServerDied
from rebuild.states.captured import Captured, SampleError, Wanted
from tests.support.capturing_server import LAYERS, CapturingServer, Script
from tests.support.generate_jobs import wait_until

STAND_IN = Path(__file__).resolve().parents[2] / "envs" / "cpu" / "stand_in"
PACKAGE = Path(describe_installation()["path"])
GPUS = [Device("gpu:0", "gpu", 0, "GPU-0", "H200", 141 << 30)]
CPU = select_devices(["cpu"])
MODEL = {
    "path": "/models/qwen",
    "hybrid": True,
    "trust_remote_code": False,
    "num_hidden_layers": 64,
    "context_length": 8192,
}
TAPS = Wanted((1, 16, 61))
ALL = Wanted((0, 3, 5), pre_norm=True, post_norm=True)
INSTALLED = dict.fromkeys((*NEEDED, *AUXILIARY, "disable-prefill-cuda-graph"))


# How the server is started


def purpose(flags: dict[str, Any] | None = None, **changes: Any) -> Purpose:
    given: dict[str, Any] = {
        "model": MODEL,
        "devices": GPUS,
        "wanted": TAPS,
        "method": "DFLASH",
        "installed": INSTALLED,
        "folder": Path("/dev/shm/states"),
        "longest": 4096,
    }
    return capture_purpose(flags or {}, **given | changes)


def command(flags: dict[str, Any], devices: list[Device], **changes: Any) -> list[str]:
    return server_arguments(
        flags,
        model=MODEL,
        devices=devices,
        tensor_parallel=1,
        port=21000,
        nccl_port=21001,
        served_name="qwen-1",
        purpose=purpose(flags, devices=devices, **changes),
    )


def value_of(flag: str, arguments: list[str]) -> str:
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize("devices", [GPUS, CPU])
def test_the_capture_flags_go_before_the_users_and_the_cpus(devices: list[Device]) -> None:
    flags = {"chunked-prefill-size": -1, "speculative-algorithm": "NEXTN"}
    arguments = command(flags, devices)
    assert value_of("--speculative-algorithm", arguments) == "DFLASH"
    assert int(value_of("--chunked-prefill-size", arguments)) > 4096
    at = arguments.index("--return-aux-hidden-state-layer-ids")
    assert arguments[at + 1 : at + 4] == ["1", "16", "61"]
    for flag in ("enable-return-aux-hidden-states", "disable-radix-cache", "skip-tokenizer-init"):
        assert f"--{flag}" in arguments


def test_hooks_run_outside_cuda_graphs_only_so_there_are_none() -> None:
    assert "--disable-prefill-cuda-graph" in command({}, GPUS)
    assert "cuda-graph-bs-prefill" not in keep_flags({"cuda-graph-bs-prefill": [512]})


@pytest.mark.parametrize("given", [None, 100, 8192, 50000])
@pytest.mark.parametrize("devices", [GPUS, CPU])
def test_no_sample_is_prefilled_in_pieces(devices: list[Device], given: int | None) -> None:
    flags = purpose({"max-prefill-tokens": given}, devices=devices, longest=3000).flags
    # A prefill takes samples while it has fewer tokens than this, so the last one may be as long as any, in whole pages.
    assert flags["chunked-prefill-size"] >= flags["max-prefill-tokens"] - 1 + 3000 + PAGE - 1
    if given:
        assert flags["max-prefill-tokens"] == given


@pytest.mark.parametrize(
    ("flags", "longest", "raised"),
    [
        ({}, 4096, None),
        ({}, 8192, 8208),  # as long as the model's whole context
        ({"context-length": 2048}, 2040, 2056),
        ({"context-length": 2048}, 2000, None),
    ],
)
def test_the_context_holds_the_longest_sample_and_what_the_server_keeps_free(
    flags: dict[str, Any], longest: int, raised: int | None
) -> None:
    started = purpose(flags, longest=longest)
    assert started.flags.get("context-length") == raised
    assert started.variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"


@pytest.mark.parametrize(
    ("devices", "given", "enough"),
    [(GPUS, None, None), (GPUS, 4096, 12560), (CPU, None, None), (CPU, 4096, 6416)],
)
def test_the_cache_holds_a_whole_prefill(
    devices: list[Device], given: int | None, enough: int | None
) -> None:
    flags = {"max-total-tokens": given} if given else {}
    assert purpose(flags, devices=devices).flags.get("max-total-tokens") == enough


def test_on_the_cpu_the_cache_grows_with_the_longest_sample() -> None:
    arguments = command({}, CPU, longest=20000)
    assert int(value_of("--max-total-tokens", arguments)) > 22000


def test_flags_that_contradict_capturing_are_left_out_and_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = {"enable-hierarchical-cache": True, "hicache-ratio": 2, "mem-fraction-static": 0.8}
    assert keep_flags(flags | {"reasoning-parser": "qwen3"}) == {"mem-fraction-static": 0.8}
    said = capsys.readouterr().err
    assert "enable-hierarchical-cache, hicache-ratio" in said and "reasoning-parser" in said
    purpose({"disable-radix-cache": False})
    assert "other values" in capsys.readouterr().err


def test_the_server_finds_the_hook_and_keeps_its_own_way_otherwise() -> None:
    started = purpose()
    (spec,) = json.loads(started.flags["forward-hooks"])
    module, factory = spec["hook_factory"].split(":")
    assert started.modules is not None
    assert (started.modules / f"{module.replace('.', '/')}.py").is_file()
    assert factory == make_hook.__name__
    environment = server_environment(CPU, STAND_IN, {"PYTHONPATH": "/mine"}, started)
    paths = [str(STAND_IN), "/mine", str(started.modules)]
    assert environment["PYTHONPATH"].split(os.pathsep) == paths


def test_the_last_layer_comes_from_the_final_norm_and_not_from_the_engine() -> None:
    started = purpose(wanted=Wanted((1, 63)))
    assert started.flags["return-aux-hidden-state-layer-ids"] == [1]
    (spec,) = json.loads(started.flags["forward-hooks"])
    assert spec["config"]["pre_norm"] is True and "model.norm" in spec["target_modules"]
    alone = purpose(wanted=Wanted((63,)), method=None).flags
    assert "speculative-algorithm" not in alone
    assert "enable-return-aux-hidden-states" not in alone


def test_the_installed_parser_takes_the_whole_command() -> None:
    installed = INSTALLED | dict.fromkeys(WITHOUT_GRAPHS)
    commands = [
        command({"mem-fraction-static": 0.8}, devices, installed=installed)
        for devices in (GPUS, CPU)
    ]
    assert ask_parser(commands, server_environment(CPU, STAND_IN))["refusals"] == [None, None]


@pytest.mark.parametrize("layers", [(3, 1), (1, 1), (64,), (-1,)])
def test_layers_that_the_model_does_not_have_or_in_no_order_are_refused(
    layers: tuple[int, ...],
) -> None:
    with pytest.raises(StepError, match="0 to 63"):
        Layers.of(Wanted(layers), 64)


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        ("LlamaForCausalLM", "DFLASH"),
        ("Qwen3_5ForCausalLM", "DFLASH"),
        ("Qwen3_5ForConditionalGeneration", "DFLASH"),
        ("Qwen3_5MoeForConditionalGeneration", "DFLASH"),
        ("Qwen3ForCausalLM", "DFLASH"),
        ("Phi3ForCausalLM", "DFLASH"),  # a Llama by inheritance
        ("Qwen2ForCausalLM", "EAGLE3"),
        ("Glm4MoeForCausalLM", "EAGLE3"),
    ],
)
def test_the_way_is_one_that_the_installed_model_knows(architecture: str, method: str) -> None:
    layers = Layers.of(TAPS, 64)
    assert capture_method(architecture, layers, INSTALLED, PACKAGE) == method


@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "NobodysModel"])
def test_a_model_that_captures_nothing_is_refused_before_a_server_starts(architecture: str) -> None:
    with pytest.raises(StepError, match=f"{architecture} has none of") as refused:
        capture_method(architecture, Layers.of(TAPS, 64), INSTALLED, PACKAGE)
    assert "transformers" in refused.value.remedy


def test_an_sglang_without_the_flags_is_refused_by_their_names() -> None:
    old = dict.fromkeys(NEEDED)  # such as 0.5.11
    with pytest.raises(StepError, match="no --enable-return-aux-hidden-states"):
        capture_method("LlamaForCausalLM", Layers.of(TAPS, 64), old, PACKAGE)
    last = Layers.of(Wanted((63,), post_norm=True), 64)
    assert capture_method("LlamaForCausalLM", last, old, PACKAGE) is None


# The hook in the server


def config_for(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {"prefix": "capture-", "taps": 2, "pre_norm": True, "post_norm": True}
    return given | {"folder": str(folder)} | changes


def forward(names: list[str] | None, lengths: list[int], **changes: Any) -> SimpleNamespace:
    given = {
        "rids": names,
        "forward_mode": SimpleNamespace(is_extend=lambda: True),
        "extend_seq_lens_cpu": lengths,
        "extend_prefix_lens_cpu": [0] * len(lengths),
    }
    return SimpleNamespace(**given | changes)


def run_model(hook: Any, batch: SimpleNamespace, *, packed: bool = False, **changes: Any) -> None:
    """Call the hook as the engine's final norm and logits processor would, for a batch of ids 0, 1, 2, …"""
    total = sum(batch.extend_seq_lens_cpu)
    rows = torch.arange(total, dtype=torch.float32)[:, None].expand(-1, 4)
    taps: Any = [rows + 0.25, rows + 0.5]
    if packed:
        taps = torch.cat(taps, -1)
    given = {"normed": rows + 2, "before": rows + 1, "taps": taps, "ids": torch.arange(total)}
    given |= changes
    if given["before"] is not None:
        hook(None, (torch.zeros(total, 4), torch.zeros(total, 4)), (rows + 2, given["before"]))
    hook(None, (given["ids"], given["normed"], None, batch, given["taps"]), SimpleNamespace())


def written(folder: Path, names: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return the files of these requests, once they are whole."""
    wait_until(lambda: all((folder / f"{name}.safetensors").exists() for name in names))
    return [load_file(folder / f"{name}.safetensors") for name in names]


@pytest.mark.parametrize("packed", [False, True])
def test_each_sequence_of_a_batch_gets_a_file_with_its_own_rows(
    tmp_path: Path, packed: bool
) -> None:
    names = ["capture-a", "capture-b"]
    run_model(make_hook(config_for(tmp_path)), forward(names, [3, 2]), packed=packed)
    first, second = written(tmp_path, names)
    assert first["token_ids"].tolist() == [0, 1, 2] and second["token_ids"].tolist() == [3, 4]
    assert second["taps"].shape == (2, 2, 4) and second["taps"].dtype == torch.bfloat16
    assert second["taps"][:, :, 0].tolist() == [[3.25, 3.5], [4.25, 4.5]]
    assert second["pre_norm"][:, 0].tolist() == [4, 5]
    assert second["post_norm"][:, 0].tolist() == [5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n}.safetensors" for n in names]


def test_a_name_is_there_before_the_request_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Collector, "write_all", lambda self: None)  # a disk that hangs
    run_model(make_hook(config_for(tmp_path)), forward(["capture-a"], [3]))
    assert [path.name for path in tmp_path.iterdir()] == ["capture-a.part"]


def test_a_norm_without_a_second_input_is_taken_by_its_input(tmp_path: Path) -> None:
    hook = make_hook(config_for(tmp_path, taps=0))
    hook(None, (torch.full((2, 4), 7.0),), torch.zeros(2, 4))
    run_model(hook, forward(["capture-a"], [2]), before=None, taps=None)
    (states,) = written(tmp_path, ["capture-a"])
    assert states["pre_norm"][:, 0].tolist() == [7, 7]
    assert "taps" not in states


def test_what_the_norm_keeps_is_a_copy(tmp_path: Path) -> None:
    hook = make_hook(config_for(tmp_path))
    buffer = torch.full((2, 4), 7.0, dtype=torch.bfloat16)
    hook(None, (buffer, buffer), (buffer, buffer))
    buffer.zero_()
    run_model(hook, forward(["capture-a"], [2]), before=None)
    (states,) = written(tmp_path, ["capture-a"])
    assert states["pre_norm"][:, 0].tolist() == [7, 7]


@pytest.mark.parametrize(
    "batch",
    [
        forward(["warm-up"], [2]),
        forward(None, [2]),
        forward(
            ["capture-a"], [2], forward_mode=SimpleNamespace(is_extend=lambda: False)
        ),  # a decode
    ],
)
def test_what_is_not_a_prefill_of_ours_is_let_pass(tmp_path: Path, batch: SimpleNamespace) -> None:
    run_model(make_hook(config_for(tmp_path)), batch)
    assert list(tmp_path.iterdir()) == []


def test_a_request_of_others_in_the_same_batch_gets_no_file(tmp_path: Path) -> None:
    run_model(make_hook(config_for(tmp_path)), forward(["../else", "capture-a"], [2, 1]))
    (states,) = written(tmp_path, ["capture-a"])
    assert states["token_ids"].tolist() == [2]


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    run_model(make_hook(config_for(tmp_path)), forward(["capture-a"], [2]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"taps": None}, "0 auxiliary hidden states, not 2"),
        ({"taps": [torch.zeros(5, 4)]}, "1 auxiliary hidden states, not 2"),
        ({"before": None}, "norm that was not called"),
        ({"normed": torch.zeros(2, 4)}, "5 tokens came with"),
    ],
)
def test_states_that_are_absent_or_too_few_end_the_server(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(RuntimeError, match=says):
        run_model(make_hook(config_for(tmp_path)), forward(["capture-a"], [5]), **changes)


def test_a_sequence_whose_beginning_is_not_in_the_batch_ends_the_server(tmp_path: Path) -> None:
    batch = forward(["capture-a", "capture-b"], [2, 2], extend_prefix_lens_cpu=[0, 64])
    with pytest.raises(RuntimeError, match="capture-b: 64"):
        run_model(make_hook(config_for(tmp_path)), batch)


def test_a_file_that_cannot_be_written_is_marked_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("rebuild.capture.engine_hook.save_file", full)
    run_model(make_hook(config_for(tmp_path)), forward(["capture-a"], [2]))
    failed = tmp_path / "capture-a.failed"
    wait_until(failed.exists)
    assert [path.name for path in tmp_path.iterdir()] == ["capture-a.failed"]
    assert "No space left" in capfd.readouterr().err


# What is made of the files


@pytest.fixture(autouse=True)
def eagerness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.05)
    monkeypatch.setattr(requests_module, "END_S", 0.2)


@pytest.fixture
def session() -> Iterator[Any]:
    with open_session() as opened:
        yield opened


def sound(_ids: list[int]) -> None:
    return None


def only(fault: str, ids: list[int]) -> Script:
    return lambda seen: fault if seen == ids else None


def test_states_come_with_the_sample_that_they_are_of(tmp_path: Path, session: Any) -> None:
    samples = [[1, 2, 3], [4], [5, 6]]
    with CapturingServer(tmp_path, sound, ALL) as server:
        got = dict(capture_all(server.engine(session), samples))
    assert sorted(got) == [0, 1, 2]
    states = got[2]
    assert states.taps.shape == (2, 3, 8)
    assert (
        states.taps[:, :, 0].tolist()
        == torch.tensor([[500.0, 503, 505], [600, 603, 605]]).bfloat16().tolist()
    )
    assert states.pre_norm is not None and states.post_norm is not None
    assert torch.equal(states.pre_norm, states.taps[:, 2])
    assert list(tmp_path.glob("capture-*")) == []


def test_the_last_layer_can_be_had_alone(tmp_path: Path, session: Any) -> None:
    with CapturingServer(tmp_path, sound, Wanted((LAYERS - 1,))) as server:
        ((_, states),) = capture_all(server.engine(session), [[1, 2]])
    assert states.taps[:, 0, 0].tolist() == torch.tensor([105.0, 205]).bfloat16().tolist()
    assert states.pre_norm is None and states.post_norm is None


def test_a_final_state_can_be_had_without_any_layer(tmp_path: Path, session: Any) -> None:
    with CapturingServer(tmp_path, sound, Wanted((), post_norm=True)) as server:
        ((_, states),) = capture_all(server.engine(session), [[1, 2]])
    assert states.taps.shape == (2, 0, 8)
    assert states.post_norm is not None and states.post_norm.shape == (2, 8)


def test_equal_samples_are_captured_once_and_given_to_both(tmp_path: Path, session: Any) -> None:
    with CapturingServer(tmp_path, sound, ALL) as server:
        got = dict(capture_all(server.engine(session), [[1, 2], [3], [1, 2]]))
        assert sorted(server.asked) == [[1, 2], [3]]
    assert got[0] is got[2]


def test_several_are_in_flight_but_no_more_than_the_caller_keeps_up_with(
    tmp_path: Path, session: Any
) -> None:
    samples = [[number] * 50 for number in range(20)]
    with CapturingServer(tmp_path, sound, ALL, pause_s=0.05) as server:
        capturing = capture_all(server.engine(session, at_once=200), samples)
        for taken in range(1, 21):
            next(capturing)
            allowed = min(taken + 3, 20)  # 4 of 50 tokens, the one that is taken among them
            wait_until(partial(lambda count: len(server.asked) >= count, allowed))
            assert len(server.asked) == allowed
        assert next(capturing, None) is None


def test_a_sample_longer_than_what_may_be_in_flight_goes_alone(
    tmp_path: Path, session: Any
) -> None:
    with CapturingServer(tmp_path, sound, ALL) as server:
        got = dict(capture_all(server.engine(session, at_once=10), [[1] * 50, [2] * 50]))
    assert sorted(got) == [0, 1]


def test_what_was_not_taken_is_left_when_the_caller_stops(tmp_path: Path, session: Any) -> None:
    with CapturingServer(tmp_path, sound, ALL) as server:
        capturing = capture_all(server.engine(session, at_once=10), [[n] * 10 for n in range(9)])
        next(capturing)
        capturing.close()  # type: ignore[attr-defined]
        assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("400", "refused a sample"),
        ("aborts", "no room"),
        ("is not called", "did not see a sample"),
        ("fails to write", "could not write"),
        ("writes for ever", "not written within"),
        ("other ids", "8 at place 1"),
        ("short states", "another shape"),
        ("another dtype", "float16"),
    ],
)
def test_a_sample_that_is_not_captured_as_asked_stops_the_job_with_its_position(
    tmp_path: Path, session: Any, fault: str, says: str
) -> None:
    samples = [[1, 2], [9, 8], [3, 4]]
    with (
        CapturingServer(tmp_path, only(fault, [9, 8]), ALL) as server,
        pytest.raises(StepError, match=says) as stopped,
    ):
        list(capture_all(server.engine(session), samples))
    assert stopped.value.where.startswith("2 tokens; server log")
    assert stopped.value.position == 1
    assert not isinstance(stopped.value, ServerDied)


def test_a_server_that_fails_a_request_is_one_that_another_may_replace(
    tmp_path: Path, session: Any
) -> None:
    with (
        CapturingServer(tmp_path, only("500", [9]), ALL) as server,
        pytest.raises(ServerDied, match="HTTP 500"),
    ):
        list(capture_all(server.engine(session), [[9]]))


def test_a_server_that_ends_is_told_by_its_status(tmp_path: Path, session: Any) -> None:
    with CapturingServer(tmp_path, only("hangs", [9]), ALL) as server:
        capturing = capture_all(server.engine(session, stall_s=60), [[1], [9]])
        done: list[tuple[int, Captured]] = [next(capturing)]
        server.status = -9
        with pytest.raises(ServerDied, match="SIGKILL"):
            done.extend(capturing)
    assert [position for position, _ in done] == [0]


def test_a_server_whose_tokens_do_not_move_is_given_up(tmp_path: Path, session: Any) -> None:
    with CapturingServer(tmp_path, only("hangs", [9]), ALL) as server:
        server.moving = False
        with pytest.raises(ServerDied, match="no token in .* with 1 samples in flight"):
            list(capture_all(server.engine(session), [[9]]))


def test_a_server_that_is_slow_is_waited_for(tmp_path: Path, session: Any) -> None:
    with CapturingServer(tmp_path, sound, ALL, pause_s=1.2) as server:
        assert len(list(capture_all(server.engine(session, stall_s=0.5), [[1], [2]]))) == 2


def test_a_server_that_cannot_be_reached_is_lost(tmp_path: Path, session: Any) -> None:
    with CapturingServer(tmp_path, sound, ALL) as server:
        engine = server.engine(session)
    with pytest.raises(ServerDied, match="a request failed"):
        list(capture_all(engine, [[1]]))


@pytest.mark.parametrize(
    ("ids", "says"),
    [([], "0 tokens"), ([1] * 101, "101 tokens"), ([1, 1000], "to 1000"), ([-1], "from -1")],
)
def test_a_sample_that_the_server_cannot_take_is_refused_before_any_is_sent(
    tmp_path: Path, session: Any, ids: list[int], says: str
) -> None:
    with CapturingServer(tmp_path, sound, ALL) as server:
        with pytest.raises(SampleError, match="not one that the server can capture") as refused:
            list(capture_all(server.engine(session), [[1], ids]))
        assert says in refused.value.seen
        assert server.asked == []


def test_what_an_earlier_attempt_left_in_the_folder_is_not_taken(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    folder.mkdir()
    (folder / "capture-old.safetensors").touch()
    with emptied(folder):
        assert list(folder.iterdir()) == []
    assert not folder.exists()
