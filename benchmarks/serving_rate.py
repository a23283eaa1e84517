"""The rate of our job on a real server, against the rate that SGLang's own benchmark gets out of the same process.

    python benchmarks/serving_rate.py [--prompts 48] [--max-tokens 96] [--concurrency 16] [--rounds 5]

Measured: output tokens/s of a generate job's client on a real SGLang server. Against: `python -m sglang.bench_serving`
(backend sglang-oai-chat, no streaming, as ours) on the same server process, prompts, token limit and concurrency, in
pairs with ours and with the server's cache flushed before each. Decoding is greedy and the questions ask for more than
the limit, so that both get the same tokens; both counts are printed. Both rates are taken in the same way, from each
request's start and end: tokens, spread evenly over their request, from the first request to the last one's start (the
steady part) and to the last answer (drain included). Server start-up and drain are shown apart.
Goal: steady rate, ours ÷ theirs, at least 0.97.
"""

import argparse
import asyncio
import contextlib
import heapq
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import requests
from answer_prompts import make_benchmark_asker, options
from measuring import ROOT, demo_model, in_pairs, load, run_child, spread, verdict, write_prompts

from rebuild.generate.generation import ShardGeneration
from rebuild.generate.partial_log import PartialLog
from rebuild.serving.devices import select_devices
from rebuild.serving.flags import server_environment
from rebuild.serving.lease import lease_devices
from rebuild.serving.server import Server, start_server
from rebuild.serving.serving import answer_shard

GOAL = 0.97
READY_S = 1800.0
STAND_IN = ROOT / "envs" / "cpu" / "stand_in"
TOPICS = ["a lighthouse", "a lost dog", "the first winter", "a clever baker", "two rivers", "a map"]
HEROES = ["a sailor", "a girl of nine", "an old king", "a gardener", "a thief", "twin brothers"]
PLACES = ["in the mountains", "by the sea", "in a great city", "on an island"]


class Span(NamedTuple):
    """One request: when it was sent, when its answer was there (seconds), and the tokens of the answer."""

    start: float
    end: float
    tokens: int


@dataclass(frozen=True)
class Rate:
    """One run: output tokens and tokens/s in the steady part and in all, the drain's seconds, the first wait."""

    tokens: int
    steady: float
    overall: float
    drain_s: float
    first_request_s: float = 0.0


class TimedShard(ShardGeneration):
    """A shard that notes when each of its requests began and ended."""

    spans: list[Span]

    def record(self, row: dict[str, Any]) -> None:
        """Log the row as always, and note its times."""
        super().record(row)
        now = time.monotonic()
        self.spans.append(Span(now - row["latency_s"], now, len(row["response_token_ids"])))


def stories(count: int) -> list[str]:
    """Return `count` different requests for long answers."""
    every = [
        f"Write a long and detailed story about {topic} and {hero} {place}."
        for place in PLACES
        for hero in HEROES
        for topic in TOPICS
    ]
    if count > len(every):
        raise SystemExit(f"there are only {len(every)} prompts")
    return every[:count]


def measure(spans: list[Span], first_request_s: float = 0.0) -> Rate:
    """Return the rates of a run from its requests."""
    began = min(span.start for span in spans)
    last_start = max(span.start for span in spans)
    done = max(span.end for span in spans)
    tokens = sum(span.tokens for span in spans)
    return Rate(
        tokens,
        sum(tokens_until(last_start, span) for span in spans) / (last_start - began),
        tokens / (done - began),
        done - last_start,
        first_request_s,
    )


def tokens_until(moment: float, span: Span) -> float:
    """Return how many of a request's tokens were there at a moment, if they came evenly."""
    if span.end <= moment:
        return span.tokens
    return span.tokens * (moment - span.start) / (span.end - span.start)


def ask_ours(
    server: Server, model: Path, questions: list[str], max_tokens: int, concurrency: int
) -> Rate:
    """Answer the questions as a generate job does."""
    flush(server)
    asker = make_benchmark_asker(model, max_tokens)
    with tempfile.TemporaryDirectory() as name:
        prompts = write_prompts(Path(name) / "prompts.parquet", questions)
        with PartialLog(Path(name) / "answers.jsonl") as log:
            shard = TimedShard(prompts, log, asker)
            shard.spans = []
            start = lambda: contextlib.nullcontext(server)  # noqa: E731
            timing = asyncio.run(answer_shard(shard, start, options(concurrency)))
    if set(shard.statuses) - {"ok", "truncated"}:
        raise RuntimeError(f"not all questions were answered: {shard.statuses}")
    return measure(shard.spans, timing.first_request_s)


def ask_theirs(
    server: Server, model: Path, questions: list[str], max_tokens: int, concurrency: int
) -> Rate:
    """Have SGLang's benchmark ask the questions."""
    flush(server)
    with tempfile.TemporaryDirectory() as name:
        dataset, result = Path(name) / "prompts.jsonl", Path(name) / "result.jsonl"
        with open(dataset, "w", encoding="utf-8") as lines:
            for question in questions:
                turns = [{"content": question}, {"content": "Once upon a time."}]
                lines.write(json.dumps({"conversations": turns}) + "\n")
        command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"]
        command += ["--base-url", server.url, "--model", str(model), "--tokenizer", str(model)]
        command += ["--served-model-name", server.model_name]
        command += ["--dataset-name", "custom", "--dataset-path", str(dataset)]
        command += ["--num-prompts", str(len(questions)), "--sharegpt-output-len", str(max_tokens)]
        command += ["--max-concurrency", str(concurrency), "--warmup-requests", "0"]
        command += ["--disable-ignore-eos", "--disable-stream", "--disable-tqdm"]
        command += ["--output-file", str(result), "--output-details"]
        cost = run_child(command, **server_environment(server.lease.devices, STAND_IN))
        details = json.loads(result.read_text())
    if details["completed"] != len(questions):
        raise RuntimeError(f"{details['completed']} answers only:\n{cost.output[-3000:]}")
    return measure(list(spans_of(details, concurrency)))


def spans_of(details: dict[str, Any], concurrency: int) -> Iterator[Span]:
    """Yield SGLang's requests; without streaming its `ttfts` are their whole latencies.

    It notes no starts, but sends the requests in order, each as soon as one of `concurrency` places is free.
    """
    free = [0.0] * concurrency
    for latency, tokens in zip(details["ttfts"], details["output_lens"], strict=True):
        start = heapq.heappop(free)
        heapq.heappush(free, start + latency)
        yield Span(start, start + latency, tokens)


def flush(server: Server) -> None:
    """Empty the server's prefix cache."""
    requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()


def table(pairs: list[tuple[Rate, Rate]]) -> str:
    """Return the lines that set ours beside theirs."""
    ours, theirs = zip(*pairs, strict=True)

    def line(title: str, digits: int, name: str) -> str:
        cells = [spread([getattr(rate, name) for rate in side], digits) for side in (ours, theirs)]
        return f"| {title} | {cells[0]} | {cells[1]} |"

    steady = [mine.steady / other.steady for mine, other in pairs]
    overall = [mine.overall / other.overall for mine, other in pairs]
    return "\n".join(
        [
            "| | ours | sglang.bench_serving |",
            "|---|---|---|",
            line("output tokens", 0, "tokens"),
            line("tokens/s, steady", 1, "steady"),
            line("tokens/s, drain included", 1, "overall"),
            line("drain, s", 2, "drain_s"),
            f"| from readiness to the first request, s | {spread([r.first_request_s for r in ours], 3)} | |",
            "",
            f"Steady rate, ours ÷ theirs: **{spread(steady, 3)}**; goal {GOAL}: "
            f"{verdict(steady, GOAL)}. Drain included: {spread(overall, 3)}.",
        ]
    )


@contextlib.contextmanager
def serve(model: Path, folder: Path) -> Iterator[tuple[Server, float]]:
    """Start a server as a job does, and yield it with the seconds until it was ready."""
    manifest = {"path": str(model), "hybrid": False, "trust_remote_code": False}
    with lease_devices(1, select_devices("auto"), folder=folder / "leases") as lease:
        began = time.monotonic()
        with start_server(
            flags={},
            model=manifest,
            tensor_parallel=1,
            lease=lease,
            folder=folder,
            stand_in=STAND_IN,
        ) as server:
            server.wait_ready(READY_S)
            yield server, time.monotonic() - began


def main() -> None:
    """Print the section of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a model's folder instead of the demo's")
    given = parser.parse_args()
    model = demo_model(given.model)
    asked = (model, stories(given.prompts), given.max_tokens, given.concurrency)
    with tempfile.TemporaryDirectory() as name, serve(model, Path(name)) as (server, startup_s):
        ask_ours(server, model, asked[1][: given.concurrency], 8, given.concurrency)  # warm-up
        pairs = in_pairs(
            given.rounds, lambda: ask_ours(server, *asked), lambda: ask_theirs(server, *asked)
        )
    print("\n## Our job against SGLang's own benchmark on one server (`serving_rate.py`)\n")
    print(
        f"{given.prompts} prompts, {given.max_tokens} tokens at most, {given.concurrency} at a time, "
        f"{given.rounds} pairs; server ready after {startup_s:.1f} s; load {load()} at the end.\n"
    )
    print(table(pairs))


if __name__ == "__main__":
    main()
