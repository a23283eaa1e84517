"""Answer the prompts of one shard on an SGLang server of this job's own."""

import asyncio
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rebuild.files import sha256_json
from rebuild.generate.answers import Judge
from rebuild.generate.asking import Asker
from rebuild.generate.generated_table import write_generated
from rebuild.generate.generation import ShardGeneration
from rebuild.generate.partial_log import PartialLog
from rebuild.generate.text_answers import text_outcome
from rebuild.model.manifest import Model, ensure_model, load_manifest
from rebuild.serving.devices import select_devices
from rebuild.serving.external import ExternalServers
from rebuild.serving.installed_flags import translate_flags
from rebuild.serving.lease import Lease, check_granted, lease_devices
from rebuild.serving.server import start_server
from rebuild.serving.serving import AnyServer, ServingOptions, Timing, answer_shard
from rebuild.shards import CANARY
from rebuild.step import begin_step, say
from rebuild.tables import read_metadata
from rebuild.tokens.chat import THINK_END, THINK_START, load_tokenizer, stop_ids, token_id


def generate_shard(
    prompts: Path,
    model_manifest: Path,
    generated: Path,
    *,
    server: dict[str, Any],
    sampling: dict[str, Any],
    generate: dict[str, Any],
    devices: str | list[str | int],
    gpus_granted: int,
    partial: Path,
    server_logs: Path,
    stand_in: Path,
    fingerprint: str,
    allow_template: bool = False,
) -> None:
    """Write the generated table of one shard; what an earlier attempt finished is kept and not asked again.

    Finished answers are in `partial`/<fingerprint of everything that determines an answer>/ until the table is whole.

    Raises:
        StepError: no device, no working server, failing requests, or prompts without their rows.
    """
    model = load_manifest(model_manifest)
    with lease_for(server, devices, gpus_granted) as lease:
        ensure_model(model_manifest)
        facts = {
            "fingerprint": fingerprint,
            "model_sha256": model["content_sha256"],
            "prompts_sha256": read_metadata(prompts)["content_sha256"],
            "device_kind": lease.devices[0].kind if lease else "external",
        }
        folder = partial / sha256_json(facts)[:16]
        whole = folder / "generated.parquet"
        if whole.exists():
            say(f"taking over the finished table of an earlier attempt: {whole}")
        else:
            with PartialLog(folder / "answers.jsonl") as log:
                say_what_is_kept(log)
                without_ids = bool(server["external"]) and allow_template
                logprobs = wants_logprobs(generate["logprobs"], prompts.stem)
                asker = make_asker(
                    model, server, sampling, generate, without_ids=without_ids, logprobs=logprobs
                )
                shard = ShardGeneration(prompts, log, asker)
                options = ServingOptions(
                    ready_s=server["ready_s"],
                    stall_s=server["stall_s"],
                    max_restarts=server["max_restarts"],
                    min_running_requests=server["min_running_requests"],
                    concurrency=generate["concurrency"],
                    golden=server["golden"],
                )
                start = server_starter(server, model, lease, server_logs, stand_in)
                timing = asyncio.run(answer_shard(shard, start, options))
                statuses = write_generated(
                    whole,
                    prompts,
                    log,
                    facts | describe(timing),
                    keep_reasoning=asker.keep_reasoning,
                )
                say(f"rows: {dict(statuses)}; {timing}")
        link_whole(whole, generated)


def make_asker(
    model: Model,
    server: dict[str, Any],
    sampling: dict[str, Any],
    generate: dict[str, Any],
    *,
    without_ids: bool = False,
    logprobs: bool = False,
) -> Asker:
    """Return what puts generations to a server of this model; `without_ids` takes answers that come as text alone.

    With `logprobs` every sampled token's log-probability is asked for as well.
    """
    tokenizer = load_tokenizer(Path(model["path"]), model["trust_remote_code"])
    think_end = token_id(tokenizer, THINK_END)
    judge_texts = functools.partial(text_outcome, thinks=think_end is not None)
    judge = Judge(
        tokenizer,
        stop_ids(tokenizer, model["eos_token_ids"]),
        token_id(tokenizer, THINK_START),
        think_end,
        judge_texts if without_ids else None,
    )
    context = server["flags"].get("context-length") or model["context_length"]
    asker = Asker(
        tokenizer,
        judge,
        context,
        sampling,
        generate["min_answer_tokens"],
        generate["max_attempts"],
        keep_reasoning=generate["history_reasoning"] == "preserve",
        logprobs=logprobs,
    )
    asker.check_history()
    return asker


def wants_logprobs(setting: str, shard: str) -> bool:
    """Tell whether `generate.logprobs` asks for log-probabilities in this shard."""
    return setting == "all" or (setting == "canary" and shard == CANARY)


@contextmanager
def lease_for(
    server: dict[str, Any], devices: str | list[str | int], gpus_granted: int
) -> Iterator[Lease | None]:
    """Lease the devices that a server of our own needs; external ones need none."""
    if server["external"]:
        yield None
        return
    check_granted(server["tensor_parallel"], gpus_granted)
    with lease_devices(server["tensor_parallel"], select_devices(devices)) as lease:
        yield lease


def server_starter(
    server: dict[str, Any], model: Model, lease: Lease | None, logs: Path, stand_in: Path
) -> Callable[[], AnyServer]:
    """Return a function that starts the next server, each with a log of its own that no retry overwrites."""

    flags = {}
    if lease is not None:
        cache = logs.parent / "installed_flags.json"
        flags = translate_flags(server["flags"], lease.devices, stand_in, cache)

    def start() -> AnyServer:
        if lease is None:
            return ExternalServers(server["external"])
        return start_server(
            flags=flags,
            model=dict(model),
            tensor_parallel=server["tensor_parallel"],
            lease=lease,
            folder=logs,
            stand_in=stand_in,
            attempt=1 + len(list(logs.glob("server-*.log"))),
        )

    return start


def say_what_is_kept(log: PartialLog) -> None:
    """Log what an earlier attempt left."""
    if log.rows or log.dropped or log.retried:
        say(
            f"an earlier attempt finished {log.rows} generations: kept; {log.retried} failed ones are asked again, "
            f"{log.dropped} torn lines dropped ({log.path})"
        )


def describe(timing: Timing) -> dict[str, str]:
    """Return the job's timing as file metadata."""
    return {"timing": json.dumps({name: round(value, 3) for name, value in vars(timing).items()})}


def link_whole(whole: Path, generated: Path) -> None:
    """Give the finished table its place in one move.

    The link in the partial folder stays until the next phase has read the table: should this job be killed before
    Snakemake notes its success, the next attempt takes the table over.
    """
    generated.parent.mkdir(parents=True, exist_ok=True)
    temporary = generated.with_name(f".{generated.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(whole, temporary)
    except OSError:  # a file system without hard links
        shutil.copyfile(whole, temporary)
    temporary.replace(generated)


if __name__ == "__main__":
    begin_step(snakemake.log[0])
    generate_shard(
        prompts=Path(snakemake.input.prompts),
        model_manifest=Path(snakemake.input.model),
        generated=Path(snakemake.output.generated),
        server=snakemake.params.server,
        sampling=snakemake.params.sampling,
        generate=snakemake.params.generate,
        devices=snakemake.params.devices,
        gpus_granted=snakemake.resources.gpu,
        partial=Path(snakemake.params.partial),
        server_logs=Path(snakemake.params.server_logs),
        stand_in=Path(snakemake.params.stand_in),
        fingerprint=snakemake.params.fingerprint,
        allow_template=snakemake.params.allow_template,
    )
