"""The client's own ceiling: rows/s, CPU seconds a row and peak memory against a server that costs nothing.

    python benchmarks/client_ceiling.py [--prompts 20000] [--rounds 5]

Measured: a generate job (rendering, asking, checking, log, table) on 20,000 short prompts, each reply looked up by the
server (`instant_server.py`). Against: `speculators regenerate-responses` of speculators 0.9.0, as published, on the
same server, questions and concurrency, run in pairs with ours. Neither side's imports and tokenizer loading are in its
seconds. Ours is also told apart into the whole job and the answering alone, with prompts rendered before the server is
ready. Goals: three times its rows/s; the same memory for 5,000, 20,000 and 80,000 prompts (within a tenth).
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

from measuring import (
    ROOT,
    Cost,
    demo_model,
    in_pairs,
    instant_server,
    load,
    run_child,
    spread,
    verdict,
    write_prompts,
)

from benchmarks.instant_server import QUESTIONS

PEERS = ROOT / ".cache" / "bench-peers"
GOAL = 3.0
FLAT = 1.1
MAX_TOKENS = 512


def questions(count: int) -> list[str]:
    """Return `count` questions that the instant server knows."""
    return [QUESTIONS[number % len(QUESTIONS)] for number in range(count)]


def ask_ours(
    folder: Path, count: int, url: str, model: Path, concurrency: int, ready: str = "late"
) -> tuple[Cost, dict[str, float]]:
    """Run our job in a process of its own; return its cost, and its own clock's readings."""
    work = folder / "ours"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    prompts = write_prompts(work / "prompts.parquet", questions(count))
    script = str(Path(__file__).with_name("answer_prompts.py"))
    arguments = [str(prompts), str(work), url, str(model), str(concurrency), ready]
    cost = run_child([sys.executable, script, *arguments])
    measured = json.loads(cost.output.splitlines()[-1])
    if measured["ok"] != count:
        raise RuntimeError(f"{measured['ok']} of {count} rows are ok:\n{cost.output[-2000:]}")
    return cost, measured


def ask_theirs(
    folder: Path, count: int, url: str, model: Path, concurrency: int
) -> tuple[Cost, float]:
    """Run speculators' command; return its cost, and the seconds that it counts itself."""
    work = folder / "theirs"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    dataset = work / "prompts.jsonl"
    with open(dataset, "w", encoding="utf-8") as lines:
        for number, question in enumerate(questions(count)):
            message = {"role": "user", "content": question}
            lines.write(json.dumps({"id": f"p{number:06d}", "messages": [message]}) + "\n")
    command = [sys.executable, "-m", "speculators", "regenerate-responses"]
    command += ["--endpoint", f"{url}/v1/chat/completions", "--model", str(model)]
    command += ["--dataset", str(dataset), "--outfile", str(work / "out.jsonl")]
    command += ["--concurrency", str(concurrency), "--max-tokens", str(MAX_TOKENS)]
    cache = {"HF_DATASETS_CACHE": str(work / "cache"), "PYTHONPATH": str(PEERS)}
    cost = run_child(command, **cache)
    done = re.search(r"Pipeline complete in .* \((\d+) ok", cost.output)
    rate = re.search(r"Throughput: ([\d.]+) req/s", cost.output)
    if not done or not rate or int(done[1]) != count:
        raise RuntimeError(f"speculators did not answer all:\n{cost.output[-2000:]}")
    return cost, count / float(rate[1])


def compare(folder: Path, count: int, rounds: int, url: str, model: Path, concurrency: int) -> str:
    """Return the lines that set ours beside theirs."""
    common = (url, model, concurrency)
    idle = ask_theirs(folder, 1, *common)[0].cpu_s  # imports and tokenizer
    pairs = in_pairs(
        rounds,
        lambda: ask_ours(folder, count, *common),
        lambda: ask_theirs(folder, count, *common),
    )
    ours, theirs = zip(*pairs, strict=True)
    answering = [count / clock["answering_s"] for _, clock in ours]
    whole = [count / clock["whole_s"] for _, clock in ours]
    rates = [count / seconds for _, seconds in theirs]
    ratio = [mine / other for mine, other in zip(answering, rates, strict=True)]
    cpu = [1e6 * clock["cpu_s"] / count for _, clock in ours]
    their_cpu = [1e6 * (cost.cpu_s - idle) / count for cost, _ in theirs]
    return "\n".join(
        [
            "| | ours | speculators |",
            "|---|---|---|",
            f"| rows/s while answering | {spread(answering, 0)} | {spread(rates, 0)} |",
            f"| rows/s of the whole job: read, render, answer, write | {spread(whole, 0)} | |",
            f"| CPU µs a row, the whole job | {spread(cpu, 0)} | {spread(their_cpu, 0)} |",
            f"| peak memory, MB | {spread([c.peak_mb for c, _ in ours], 0)} | {spread([c.peak_mb for c, _ in theirs], 0)} |",
            "",
            f"Rows/s while answering, ours ÷ theirs: **{spread(ratio)}**; goal {GOAL:.0f}: {verdict(ratio, GOAL)}.",
        ]
    )


def memory(folder: Path, sizes: list[int], url: str, model: Path, concurrency: int) -> str:
    """Return the line that tells whether memory depends on the number of prompts."""
    peaks = [ask_ours(folder, size, url, model, concurrency)[0].peak_mb for size in sizes]
    listed = ", ".join(
        f"{size:,} prompts {peak:.0f} MB" for size, peak in zip(sizes, peaks, strict=True)
    )
    growth = max(peaks) / min(peaks)
    return f"Peak memory: {listed}: × {growth:.2f}; goal {FLAT}: {verdict([-growth], -FLAT)}."


def main() -> None:
    """Print the section of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="+", default=[5_000, 20_000, 80_000])
    parser.add_argument("--model", type=Path, help="a model's folder instead of the demo's")
    given = parser.parse_args()
    model = demo_model(given.model)
    with tempfile.TemporaryDirectory() as name, instant_server(model, Path(name)) as url:
        folder = Path(name)
        table = compare(folder, given.prompts, given.rounds, url, model, given.concurrency)
        flat = memory(folder, given.sizes, url, model, given.concurrency)
    print("\n## The client against an instant server (`client_ceiling.py`)\n")
    print(
        f"{given.prompts:,} prompts, {given.concurrency} at a time, {given.rounds} pairs; load {load()} at the end.\n"
    )
    print(f"{table}\n\n{flat}")


if __name__ == "__main__":
    main()
