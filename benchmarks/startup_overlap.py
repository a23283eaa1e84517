"""Start-up overlap: how long after the server is ready the first request goes out, on a shard of 20,000 prompts.

    python benchmarks/startup_overlap.py [--prompts 20000] [--rounds 5]

Measured: our own job's figure `first_request_s` (from the server's readiness to the first prompt on its way), once
with a server that is ready at once, while the prompts are still being sorted and rendered, and once with one that is
ready after the last of them, as servers that load for minutes are. Goal for both: under 0.5 s, at worst.
"""

import argparse
import tempfile
from pathlib import Path

from client_ceiling import ask_ours
from measuring import demo_model, instant_server, load, spread, verdict

GOAL_S = 0.5


def waits(
    folder: Path, count: int, rounds: int, url: str, model: Path, ready: str
) -> tuple[list[float], list[float]]:
    """Return for every round the wait for the first request, and the seconds of the whole job."""
    clocks = [ask_ours(folder, count, url, model, 64, ready)[1] for _ in range(rounds)]
    return [clock["first_request_s"] for clock in clocks], [clock["whole_s"] for clock in clocks]


def main() -> None:
    """Print the section of RESULTS.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a model's folder instead of the demo's")
    given = parser.parse_args()
    model = demo_model(given.model)
    print("\n## From readiness to the first request (`startup_overlap.py`)\n")
    with tempfile.TemporaryDirectory() as name, instant_server(model, Path(name)) as url:
        for ready in ["at once", "late"]:
            first, whole = waits(Path(name), given.prompts, given.rounds, url, model, ready)
            print(
                f"- server ready {ready}: {spread(first, 3)} s, goal {GOAL_S} s at worst: "
                f"{verdict([-max(first)], -GOAL_S)} (whole job {spread(whole, 1)} s)"
            )
    print(f"\n{given.prompts:,} prompts, {given.rounds} runs each; load {load()} at the end.")


if __name__ == "__main__":
    main()
