"""The names of a run's shards, and which of them wait for the canary."""

from pathlib import Path
from typing import Any

CANARY = "canary"
WHOLE_RUN = (
    "run"  # stands where a shard's name would, in evidence and waivers of the run as a whole
)


def shard_names(config: dict[str, Any]) -> list[str]:
    """Return the shards of a complete configuration in the order of their work: the canary, if there is one, comes first."""
    numbered = [f"{number:05d}" for number in range(config["prompts"]["shards"])]
    return [CANARY, *numbered] if config["plan"]["canary"] else numbered


def needed(path: str, result: str) -> str | list[str]:
    """Return `path` as the one input of a job that makes `result`, or none if the result is there and the path is not.

    Snakemake makes a job again when an input, even an ancient one, is missing and made anew by another job: a result
    that was paid for would be paid for twice.
    """
    return [] if Path(result).exists() and not Path(path).exists() else path


def awaits_canary(shard: str, shards: list[str]) -> bool:
    """Whether a shard is generated only when the canary is approved: all are, but for the canary itself."""
    return CANARY in shards and shard != CANARY
