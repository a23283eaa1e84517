"""A generate job as a benchmark sees it: the job's own parts in a process of their own, with a clock around them.

    python benchmarks/answer_prompts.py PROMPTS FOLDER URL MODEL CONCURRENCY READY

Asks the server at URL. READY says when it counts as ready: `at once`, or `late`, when all prompts are rendered, as it
is with a real server, which takes longer to load than prompts to render. Prints one line of JSON.
"""

import asyncio
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from measuring import GREEDY

from generate_shard import make_asker
from rebuild.generate.asking import Asker
from rebuild.generate.generated_table import write_generated
from rebuild.generate.generation import ShardGeneration
from rebuild.generate.partial_log import PartialLog
from rebuild.serving.external import ExternalServers
from rebuild.serving.serving import ServingOptions, answer_shard

NEVER_S = 3600.0


class LateServer(ExternalServers):
    """A server that is ready once the shard's prompts are rendered."""

    def __init__(self, url: str, shard: ShardGeneration) -> None:
        super().__init__([url])
        self.shard = shard

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for the last prompt, then for the server."""
        while self.shard.queue.qsize() < len(self.shard.table):
            time.sleep(0.02)
        super().wait_ready(timeout_s)


def make_benchmark_asker(model: Path, max_tokens: int) -> Asker:
    """Return what puts greedy generations to a server of this model."""
    manifest: Any = {
        "path": str(model),
        "trust_remote_code": False,
        "eos_token_ids": [],
        "context_length": 2048,
    }
    generate = {"min_answer_tokens": 1, "max_attempts": 3, "history_reasoning": "strip"}
    return make_asker(manifest, {"flags": {}}, GREEDY | {"max_tokens": max_tokens}, generate)


def options(concurrency: int) -> ServingOptions:
    """Return serving options without second chances: a benchmark that lost its server says so."""
    return ServingOptions(
        ready_s=NEVER_S,
        stall_s=NEVER_S,
        max_restarts=0,
        min_running_requests=1,
        concurrency=concurrency,
        golden=[],
    )


def answer_prompts(
    prompts: Path, folder: Path, url: str, model: Path, concurrency: int, ready: str
) -> dict[str, float]:
    """Answer a shard and write its table; return rows and seconds, CPU seconds without those of imports included."""
    asker = make_benchmark_asker(model, max_tokens=512)
    began, cpu = time.monotonic(), cpu_seconds()
    with PartialLog(folder / "answers.jsonl") as log:
        shard = ShardGeneration(prompts, log, asker)

        def start() -> ExternalServers:
            return LateServer(url, shard) if ready == "late" else ExternalServers([url])

        timing = asyncio.run(answer_shard(shard, start, options(concurrency)))
        statuses = write_generated(
            folder / "generated.parquet", prompts, log, {}, keep_reasoning=False
        )
    return {
        "ok": statuses["ok"],
        "whole_s": time.monotonic() - began,
        "answering_s": timing.answering_s,
        "first_request_s": timing.first_request_s,
        "cpu_s": cpu_seconds() - cpu,
    }


def cpu_seconds() -> float:
    """Return the CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    table, work, address, model_folder, limit, readiness = sys.argv[1:]
    measured = answer_prompts(
        Path(table), Path(work), address, Path(model_folder), int(limit), readiness
    )
    print(json.dumps(measured))
