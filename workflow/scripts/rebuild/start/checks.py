"""What can be told before anything is planned: settings that would only fail hours later."""

from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.shards import CANARY

WHOLE_RUN = "run"  # where a waiver is not for one shard


def check_start(config: dict[str, Any], shards: list[str], gpus: int, results: Path) -> None:
    """Stop a start that must fail later: no or too few prompts, waivers for no shard, too few devices for a server.

    `gpus` is the limit of --resources gpu (0 is none); `results` is the run's folder.

    Raises:
        StepError: names the key and what is wrong with it.
    """
    check_prompts(config["prompts"]["path"], results / "prompts" / "manifest.json")
    check_limit(config["prompts"]["limit"], config["prompts"]["shards"], config["plan"]["canary"])
    check_waivers(config["audit"]["accept"], shards)
    server = config["server"]
    if not server["external"] and 0 < gpus < server["tensor_parallel"]:
        raise StepError(
            "a server needs more devices than there are",
            where="server.tensor_parallel",
            expected=f"at most {gpus}, the limit of --resources gpu= (by default the number of devices)",
            seen=str(server["tensor_parallel"]),
            remedy="lower it, or run where there are more devices",
        )


def check_prompts(path: str, manifest: Path) -> None:
    """Stop if the prompts are not there and have not been cut into shards before.

    Raises:
        StepError: prompts.path names nothing.
    """
    if manifest.exists() or Path(path).exists():
        return
    raise StepError(
        f"there are no prompts at {path}",
        where="prompts.path",
        expected="a .jsonl, .jsonl.gz or .parquet file, or a folder of them, on this machine",
        seen=f"no such file or folder (looked from {Path.cwd()})",
        remedy="correct prompts.path; relative paths count from where snakemake is started",
    )


def check_limit(limit: int | None, shards: int, canary: int) -> None:
    """Stop if so few prompts are to be used that the canary and the shards cannot all have some.

    Raises:
        StepError: says how many are needed.
    """
    if limit is not None and limit < canary + shards:
        raise StepError(
            "prompts.limit leaves too few prompts for the shards",
            where="prompts.limit",
            expected=f"at least {canary + shards}: {canary} for plan.canary, and one for each of {shards} shards",
            seen=str(limit),
            remedy="raise prompts.limit, or lower plan.canary or prompts.shards",
        )


def check_waivers(accept: dict[str, str], shards: list[str]) -> None:
    """Stop if a waiver is for a shard that the run does not have: a slip that would leave the real one failing.

    The whole run, which is judged as well, goes by the name `run`.

    Raises:
        StepError: names the waivers.
    """
    unknown = sorted(set(accept) - {*shards, WHOLE_RUN})
    if unknown:
        raise StepError(
            "a waiver is for no shard of this run",
            where="audit.accept",
            expected=f"{named(shards)}, or {WHOLE_RUN!r} for the run as a whole",
            seen=", ".join(map(repr, unknown)),
            remedy="correct the shard's name",
        )


def named(shards: list[str]) -> str:
    """Return in words what the shards of a run are called."""
    numbered = [shard for shard in shards if shard != CANARY]
    digits = f"shards from {numbered[0]!r} to {numbered[-1]!r}, as five digits in quotes"
    return f"{CANARY!r}, {digits}" if CANARY in shards else digits
