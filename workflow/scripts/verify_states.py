"""Verify finished hidden states: is every file that the indexes name there, and as it was written?

A command, not a step of the workflow: python workflow/scripts/verify_states.py results/demo
"""

import argparse
import sys
from pathlib import Path
from typing import TextIO

from rebuild.errors import StepError
from rebuild.progress import Progress
from rebuild.states.parts import is_whole
from rebuild.tables import iter_rows

COLUMNS = ["sample_id", "file", "bytes", "sha256"]
NAMED = 20  # damaged files that are named


def verify_states(run: Path, output: TextIO) -> None:
    """Read every file of hidden states below `run` (results/<run>) and compare size and SHA-256 with its shard's index.

    Raises:
        StepError: files are missing or not as they were written; says how to have them made again.
    """
    folder = run / "hidden_states"
    indexes = sorted(folder.glob("*.parquet"))
    rows = [(index, row) for index in indexes for row in iter_rows(index, COLUMNS)]
    progress = Progress(len(rows), "files")
    damaged = []
    for index, row in rows:
        if not is_whole(row, folder):
            damaged.append((index, row))
        progress.update()
    if damaged:
        raise damage(damaged)
    total = sum(row["bytes"] for _, row in rows)
    print(
        f"{len(rows)} files of {len(indexes)} shards, {total / 1e6:.1f} MB, are as they were written",
        file=output,
    )


def damage(damaged: list[tuple[Path, dict[str, str]]]) -> StepError:
    """Return the error for files that are not as their index says."""
    indexes = sorted({str(index) for index, _ in damaged})
    names = [f"{row['file']} (sample {row['sample_id']})" for _, row in damaged[:NAMED]]
    more = f", and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
    return StepError(
        f"{len(damaged)} files of hidden states are missing or damaged",
        where=", ".join(indexes),
        expected="size and SHA-256 as in the index",
        seen=", ".join(names) + more,
        remedy=f"have their samples captured again, and no others: rm {' '.join(indexes)}, then start as before",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Verify the hidden states of a run.")
    parser.add_argument("run", type=Path, help="results/<run>")
    try:
        verify_states(parser.parse_args().run, sys.stdout)
    except StepError as error:
        sys.exit(error.describe())
