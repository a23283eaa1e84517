"""The benchmarks run on small sizes and count what they claim to count. No timing is asserted here."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import measuring
from rebuild.capture.batches import capture_all
from rebuild.serving.devices import select_devices
from rebuild.serving.external import ExternalServers
from rebuild.serving.lease import Lease, lease_devices
from rebuild.states.captured import Wanted
from rebuild.tables import iter_rows
from rebuild.tokens.chat import load_tokenizer

sys.path.append(str(Path(measuring.__file__).parent))  # where programs find what lies beside them

import audit_rate
import capture_rate
import client_ceiling
import data_jobs
import instant_server
import serving_rate
import startup_overlap
import tokenize_rate
import write_rate
from serving_rate import Rate, Span


class Instant(ExternalServers):
    """The instant server with what the benchmarks use of a server of ours."""

    def __init__(self, url: str, lease: Lease) -> None:
        super().__init__([url])
        self.url = url
        self.lease = lease
        self.model_name = instant_server.MODEL


@pytest.fixture(scope="module")
def url(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with measuring.instant_server(tiny_llama, tmp_path_factory.mktemp("instant")) as address:
        yield address


def test_our_side_of_the_client_benchmark_answers_every_prompt(
    url: str, tiny_llama: Path, tmp_path: Path
):
    cost, clock = client_ceiling.ask_ours(tmp_path, 70, url, tiny_llama, 8)
    assert clock["ok"] == 70
    assert 0 < clock["answering_s"] < clock["whole_s"] < cost.wall_s
    assert 0 < clock["cpu_s"] < cost.cpu_s
    assert cost.peak_mb > 50


def test_the_start_up_benchmark_measures_the_wait_for_the_first_request(
    url: str, tiny_llama: Path, tmp_path: Path
):
    first, whole = startup_overlap.waits(tmp_path, 70, 1, url, tiny_llama, "at once")
    assert 0 <= first[0] < whole[0]


def test_both_sides_of_the_rate_benchmark_get_the_same_tokens(
    url: str, tiny_llama: Path, tmp_path: Path
):
    with lease_devices(1, select_devices(["cpu"]), folder=tmp_path / "leases") as lease:
        asked = (Instant(url, lease), tiny_llama, instant_server.QUESTIONS[:6], 100, 2)
        ours = serving_rate.ask_ours(*asked)
        theirs = serving_rate.ask_theirs(*asked)
    tokenizer = load_tokenizer(tiny_llama, False)
    assert ours.tokens == theirs.tokens == 6 * (len(tokenizer.encode(instant_server.ANSWER)) + 1)
    assert min(ours.steady, ours.overall, theirs.steady, theirs.overall) > 0


def test_all_sides_of_the_tokenize_benchmark_make_the_same_rows(
    qwen3_tokenizer: Path, tmp_path: Path
):
    tokenize_rate.write_inputs(tmp_path, 12, qwen3_tokenizer)
    known = (qwen3_tokenizer, tmp_path / "conversations.jsonl")
    with measuring.running_server("render_server.py", *known, folder=tmp_path) as url:
        told = {
            name: [side()]
            for name, side in tokenize_rate.sides(tmp_path, qwen3_tokenizer, url).items()
        }
    tokenize_rate.check(told, 12)
    ids = {name: runs[0].get("ids") for name, runs in told.items()}
    said = {name: runs[0].get("supervised") for name, runs in told.items()}
    # SpecForge puts a system prompt of 11 ids ahead; both supervise the line feed that the template ends a turn with.
    assert ids["ids"] == ids["template"] == ids["speculators"] - 12 == ids["specforge"] - 12 * 12
    assert said["ids"] == said["template"] == said["speculators"] - 12 == said["specforge"] - 12
    lines = tokenize_rate.table(told)
    assert "ours, engine ids ÷ speculators: **" in lines and "÷ SpecForge: **" in lines
    with pytest.raises(RuntimeError, match=r"\[12\] rows of 13"):
        tokenize_rate.check(told, 13)


def test_the_audit_benchmark_judges_synthetic_rows_that_pass(demo_model: Path, tmp_path: Path):
    lines = audit_rate.measure(tmp_path, 600, 40, 40, 1, 2, demo_model)
    assert [line.split(" | ")[1] for line in lines.splitlines()[2:5]] == ["600", "40", "40"]
    assert "Peak memory under 1000 MB: reached." in lines


def test_synthetic_rows_are_as_long_as_real_ones_and_all_different(tmp_path: Path):
    folder = audit_rate.write_rows(tmp_path / "set", 2000)
    rows = [row for file in folder.iterdir() for row in iter_rows(file)]
    assert 400 < sum(row["seq_len"] for row in rows) / len(rows) < 600
    assert len({tuple(row["input_ids"]) for row in rows}) == len({r["sample_id"] for r in rows})
    assert len(rows) == 2000
    for row in rows:
        assert row["loss_tokens"] == sum(row["loss_mask"]) and row["input_ids"][-1] == 2


def test_an_audit_that_condemns_the_synthetic_rows_is_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
):
    told = {"rows": 5, "verdict": "fail", "failed": ["looping_share"]}
    monkeypatch.setattr(audit_rate, "run_job", lambda *arguments: told)
    with pytest.raises(RuntimeError, match="looping_share"):
        audit_rate.look(1, [], 5)


def test_a_jobs_peak_memory_is_its_own(tmp_path: Path):
    ballast = bytearray(300 << 20)
    file = next(audit_rate.write_rows(tmp_path / "set", 10).iterdir())
    told = measuring.run_job("read", file)
    assert told["rows"] == 10 and len(ballast) == 300 << 20
    assert 20 < told["peak_mb"] < 300 < data_jobs.peak_mb()


def test_every_round_another_side_is_first():
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) or {"n": len(order)} for name in "abc"}
    told = measuring.in_turns(2, sides)
    assert "".join(order) == "abcbca"
    assert told["a"] == [{"n": 1}, {"n": 6}]


def test_memory_that_grows_with_the_prompts_is_told(monkeypatch: pytest.MonkeyPatch):
    def growing(folder: Path, count: int, *rest: object) -> tuple[measuring.Cost, dict[str, float]]:
        return measuring.Cost(1.0, 1.0, 500 + count / 100, ""), {}

    monkeypatch.setattr(client_ceiling, "ask_ours", growing)
    line = client_ceiling.memory(Path(), [1_000, 2_000], "", Path(), 1)
    assert (
        line
        == "Peak memory: 1,000 prompts 510 MB, 2,000 prompts 520 MB: × 1.02; goal 1.1: reached."
    )
    line = client_ceiling.memory(Path(), [1_000, 50_000], "", Path(), 1)
    assert line.endswith("× 1.96; goal 1.1: **under the goal**.")


def test_a_job_whose_rows_are_not_all_answers_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    half = measuring.Cost(1.0, 1.0, 1.0, '{"ok": 1}')
    monkeypatch.setattr(client_ceiling, "run_child", lambda command: half)
    with pytest.raises(RuntimeError, match="1 of 2 rows"):
        client_ceiling.ask_ours(tmp_path, 2, "", Path(), 2)


def test_the_instant_server_gives_the_ids_under_the_names_of_sglang_and_of_vllm(tiny_llama: Path):
    tokenizer = load_tokenizer(tiny_llama, False)
    replies = instant_server.canned_replies(tokenizer)
    head, body = replies[instant_server.QUESTIONS[7]].split(b"\r\n\r\n")
    reply = orjson.loads(body)
    choice = reply["choices"][0]
    assert f"content-length: {len(body)}".encode() in head
    assert choice["prompt_token_ids"] == reply["prompt_token_ids"]
    assert choice["response_token_ids"] == choice["token_ids"]
    assert instant_server.QUESTIONS[7] in tokenizer.decode(reply["prompt_token_ids"])
    assert reply["usage"]["completion_tokens"] == len(choice["token_ids"])


def test_the_steady_rate_ends_where_the_last_request_starts():
    spans = [Span(0, 4, 40), Span(0, 2, 40), Span(2, 6, 20)]
    assert serving_rate.measure(spans) == Rate(
        tokens=100, steady=(20 + 40) / 2, overall=100 / 6, drain_s=4
    )


def test_sglangs_requests_start_as_soon_as_a_place_is_free():
    details = {"ttfts": [3.0, 1.0, 1.0, 5.0], "output_lens": [1, 2, 3, 4]}
    spans = list(serving_rate.spans_of(details, concurrency=2))
    assert spans == [Span(0, 3, 1), Span(0, 1, 2), Span(1, 2, 3), Span(2, 7, 4)]


def test_pairs_take_turns_in_who_is_first():
    order: list[str] = []
    pairs = measuring.in_pairs(2, lambda: order.append("we"), lambda: order.append("they"))
    assert order == ["we", "they", "they", "we"]
    assert len(pairs) == 2


def test_pairs_on_both_sides_of_the_goal_decide_nothing():
    assert measuring.verdict([0.97, 1.1], 0.97) == "reached"
    assert measuring.verdict([0.8, 0.96], 0.97) == "**under the goal**"
    assert measuring.verdict([0.8, 1.2], 0.97).startswith("**undecided**")


def test_a_child_that_fails_is_no_measurement():
    with pytest.raises(RuntimeError, match="no such thing"):
        measuring.run_child([sys.executable, "-c", "raise SystemExit('no such thing')"])


@pytest.mark.parametrize("threads", [1, 2])
def test_the_writing_benchmark_measures_files_of_the_size_that_it_says(
    threads: int, tmp_path: Path
):
    line = write_rate.measure("specforge_eagle3", tmp_path, 60, 3, 2, threads)
    megabytes = 60 * (3 + 1) * 5120 * 2 / 1e6
    assert line.startswith(f"| specforge_eagle3 | {threads} | {megabytes:.0f} |")
    assert list(tmp_path.iterdir()) == []


LAYERS = Wanted((0, 2))


def test_all_sides_of_the_capture_benchmark_take_every_token(tiny_llama: Path):
    samples = [[5] * length for length in (3, 30, 7, 12, 20)]
    told = capture_rate.beside_forwards(tiny_llama, samples, 2, 2, "float32", LAYERS)
    capture_rate.check(told, 72)
    runs = [run for side in told.values() for run in side]
    assert all(run["wall_s"] > 0 for run in runs)
    # counted in ticks: a single tiny forward may take none
    assert sum(run["cpu_s"] for run in runs) > 0
    assert capture_rate.table(told).count("\n") == 1 + len(told) == 4
    with pytest.raises(RuntimeError, match=r"bare forward.*\[72, 72\] tokens of 73"):
        capture_rate.check({"bare": told["bare"]}, 73)


def test_the_padded_loop_has_the_states_that_ours_captures(tiny_llama: Path):
    samples = [[number * 7 + place for place in range(9 + 8 * number)] for number in range(3)]
    target = capture_rate.load_cut(tiny_llama, "float32", LAYERS)
    ours = dict(capture_all(target, samples))
    whole = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    padded = list(capture_rate.padded_states(whole, samples, LAYERS.layers, 2))
    for position, states in enumerate(padded):
        expected = ours[position].taps.flatten(1).float()
        assert (states - expected).norm() < 0.01 * expected.norm()
    assert len(padded) == 3


def test_samples_of_the_capture_benchmark_are_of_all_lengths_and_mostly_short():
    lengths = capture_rate.mixed_lengths(24)
    assert (min(lengths), max(lengths)) == (24, 1400)
    assert sorted(lengths)[12] < 250 and lengths != sorted(lengths)
    samples = capture_rate.make_samples(24, 50)
    assert [len(ids) for ids in samples] == lengths and samples == capture_rate.make_samples(24, 50)
    assert [len(ids) for ids in capture_rate.longest_first(samples)] == sorted(lengths)[::-1]


def test_the_capture_is_held_against_both_goals_by_the_clock_and_by_cpu_seconds():
    def run(wall_s: float, cpu_s: float) -> dict[str, float]:
        return {"tokens": 100, "wall_s": wall_s, "cpu_s": cpu_s}

    told = {"ours": [run(1, 1)] * 2, "bare": [run(0.96, 0.9)] * 2, "padded": [run(3.5, 2.9)] * 2}
    bare, padded = capture_rate.ratios(told).splitlines()
    assert "**0.960 (0.960 to 0.960)**; goal 0.95: reached; by CPU seconds 0.900" in bare
    assert bare.endswith("**under the goal**") and "goal 3: reached" in padded
    engine = {"engine": [run(1, 0.1)], "alone": [run(2, 2)]}
    line = capture_rate.engine_ratio(engine)
    assert line.endswith("**2.00 (2.00 to 2.00)**; by CPU seconds 20.00 (20.00 to 20.00)")


def test_the_cpu_seconds_of_a_server_count_and_it_stands_still_while_ours_is_measured():
    burn = (
        "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", burn]
    began = capture_rate.cpu_seconds()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert capture_rate.cpu_seconds() - began >= 0.25
        server = psutil.Process(child.pid)
        side = capture_rate.with_children_paused(
            lambda: {"paused": becomes(server, lambda status: status == psutil.STATUS_STOPPED)}
        )
        assert side() == {"paused": True}
        assert becomes(server, lambda status: status != psutil.STATUS_STOPPED)
        child.stdin.close()


def becomes(process: psutil.Process, like: Callable[[str], bool]) -> bool:
    """Return whether a process comes into such a state soon."""
    deadline = time.monotonic() + 10
    while not like(process.status()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return like(process.status())


def test_a_job_of_the_memory_benchmark_writes_every_samples_states(tmp_path: Path):
    told = capture_rate.extract(tmp_path, 3)
    lengths = (3 * capture_rate.mixed_lengths(20))[:3]
    assert told["rows"] == 3
    assert told["bytes"] > sum(lengths) * 3 * data_jobs.WIDE["hidden_size"] * 2
    assert told["peak_mb"] > 100


def test_memory_that_grows_with_the_samples_is_told(monkeypatch: pytest.MonkeyPatch):
    peaks = {"60": 500.0, "600": 600.0}
    monkeypatch.setattr(
        capture_rate, "extract", lambda folder, samples: {"peak_mb": peaks[folder.name]}
    )
    line = capture_rate.memory(Path(), [60, 600])
    assert line.startswith("Peak memory: 60 samples 500 MB, 600 samples 600 MB: × 1.20; goal 1.1: ")
    assert line.endswith("**under the goal**.")


def test_a_job_that_leaves_samples_out_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(capture_rate, "run_job", lambda *arguments: {"rows": 2})
    with pytest.raises(RuntimeError, match="2 files of 3 samples"):
        capture_rate.extract(tmp_path, 3)
