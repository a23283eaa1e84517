"""What can be told before anything is planned: settings that would only fail hours later."""

from pathlib import Path
from typing import Any

from rebuild.errors import StepError


def check_start(config: dict[str, Any], shards: list[str], gpus: int, results: Path) -> None:
    """Stop a start that must fail later: no prompts, waivers for no shard, servers that need more devices than there are.

    `gpus` is the limit of --resources gpu (0 is none); `results` is the run's folder.

    Raises:
        StepError: names the key and what is wrong with it.
    """
    check_prompts(config["prompts"]["path"], results / "prompts" / "manifest.json")
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


def check_waivers(accept: dict[str, str], shards: list[str]) -> None:
    """Stop if a waiver is for a shard that the run does not have: a slip that would leave the real one failing.

    Raises:
        StepError: names the waivers.
    """
    unknown = sorted(set(accept) - set(shards))
    if unknown:
        raise StepError(
            "a waiver is for no shard of this run",
            where="audit.accept",
            expected=f"shards from {shards[0]!r} to {shards[-1]!r}, as five digits in quotes",
            seen=", ".join(map(repr, unknown)),
            remedy="correct the shard's name",
        )
