"""Show people what of a sample is trained on: its text by the loss mask, in the terminal or as a page.

A command, not a step of the workflow: python workflow/scripts/show_masks.py results/demo/tokenized/00000.parquet
"""

import argparse
import bisect
import difflib
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from rebuild.errors import StepError
from rebuild.files import atomic_path
from rebuild.mask_view.page import masks_page
from rebuild.mask_view.text import View, terminal_text, view_sample
from rebuild.mask_view.tokens import Vocabulary, read_vocabulary, to_tokens, unknown_ids
from rebuild.model.manifest import load_manifest
from rebuild.tables import open_parquet

NEEDED = {"sample_id", "input_ids", "loss_mask"}
SHOWN = [*NEEDED, "source", "finish_reason", "mask_origin", "seq_len", "loss_tokens"]
NEIGHBOURS = (
    1000  # ids around an unknown one, in alphabetical order, that may be the one that was meant
)


def show_masks(
    tokenized: Path,
    output: TextIO,
    *,
    samples: Sequence[str],
    count: int,
    seed: int | None,
    model: Path | None,
    page: Path | None,
    whole: bool,
    colours: bool,
) -> None:
    """Write the named `samples` of a tokenized file, or `count` random ones, to `output`, or as HTML to `page`.

    `seed` makes the choice repeatable. `model` is a folder with the tokenizer or a run's model manifest; without it, it
    is the model of the run that the file lies in. Long stretches of context are shortened unless `whole`.

    Raises:
        StepError: no such sample, not a tokenized file, or no tokenizer.
    """
    names = sample_names(tokenized)
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    chosen = named_rows(names, samples, tokenized) if samples else random_rows(names, count, seed)
    rows = read_rows(tokenized, chosen)
    vocabulary = load_vocabulary(*find_model(tokenized, model))
    views = (view_row(vocabulary, row, whole) for row in rows)
    if page:
        write_page(page, tokenized, views)
        print(f"{len(chosen)} of {len(names)} samples: {page}", file=output)
    else:
        for view in views:
            print(terminal_text(view, colours=colours), file=output)
    if not samples:
        print(f"{len(chosen)} of {len(names)} samples at random; again: --seed {seed}", file=output)


def sample_names(tokenized: Path) -> list[str]:
    """Return the ids of all samples, in order.

    Raises:
        StepError: the file has not the columns of a tokenized one.
    """
    file = open_parquet(tokenized)
    absent = NEEDED - set(file.schema_arrow.names)
    if absent:
        raise StepError(
            "this is not a file of tokenized samples",
            where=str(tokenized),
            expected=f"columns {', '.join(sorted(NEEDED))}",
            seen=f"columns {', '.join(file.schema_arrow.names)}",
            remedy="name a file like results/<run>/tokenized/<shard>.parquet",
        )
    names: list[str] = file.read(columns=["sample_id"])["sample_id"].to_pylist()
    return names


def named_rows(names: Sequence[str], wanted: Sequence[str], tokenized: Path) -> list[int]:
    """Return the rows of the wanted samples in the order of asking; an id that occurs twice has two.

    Raises:
        StepError: names the first that is not there, and the ids nearest to it.
    """
    chosen: list[int] = []
    for name in wanted:
        found = [row for row, other in enumerate(names) if other == name]
        if not found:
            near = ", ".join(map(repr, nearest(name, names)))
            raise StepError(
                f"there is no sample {name!r}",
                where=str(tokenized),
                expected="the sample_id of one of its rows",
                seen=f"{len(names)} other ids; nearest are {near}" if near else "no rows",
                remedy="name one of these, or let chance choose: --random 3",
            )
        chosen += found
    return chosen


def nearest(name: str, names: Sequence[str], count: int = 3) -> list[str]:
    """Return the ids most like `name`, of those next to it in alphabetical order."""
    ordered = sorted({other for other in names if other})
    place = bisect.bisect(ordered, name)
    around = ordered[max(0, place - NEIGHBOURS) : place + NEIGHBOURS]
    return difflib.get_close_matches(name, around, n=count, cutoff=0)


def whole_number(text: str) -> int:
    """Return a number of samples.

    Raises:
        ValueError: it is not a whole number from 1 on; argparse says so.
    """
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def random_rows(names: Sequence[str], count: int, seed: int) -> list[int]:
    """Return `count` different rows that chance chooses, in order; all of them if there are no more."""
    return sorted(random.Random(seed).sample(range(len(names)), min(count, len(names))))


def read_rows(tokenized: Path, chosen: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the chosen rows, of the file only the row groups that hold them."""
    file = open_parquet(tokenized)
    columns = [name for name in SHOWN if name in file.schema_arrow.names]
    starts = [0]
    for group in range(file.num_row_groups):
        starts.append(starts[-1] + file.metadata.row_group(group).num_rows)
    for row in chosen:
        group = bisect.bisect_right(starts, row) - 1
        yield from file.read_row_group(group, columns).slice(row - starts[group], 1).to_pylist()


def find_model(tokenized: Path, given: Path | None) -> tuple[Path, bool]:
    """Return the folder of the model whose tokens these are, and whether code that comes with it may run.

    Raises:
        StepError: there is none.
    """
    place = given or tokenized.parent.parent / "model" / "manifest.json"
    if place.is_dir() and not (place / "manifest.json").is_file():
        return place, False
    manifest = load_manifest(place / "manifest.json" if place.is_dir() else place)
    folders = [Path(name) for name in (manifest["path"], manifest["origin"]) if name]
    for folder in folders:
        if folder.is_dir():
            return folder, manifest["trust_remote_code"]
    raise StepError(
        "the model's folder is gone, and its tokenizer with it",
        where=str(place),
        expected=" or ".join(map(str, folders)),
        seen="no such folder",
        remedy="name a folder that has the tokenizer: --model FOLDER",
    )


def load_vocabulary(folder: Path, trust_remote_code: bool) -> Vocabulary:
    """Return the vocabulary of the tokenizer in a model's folder."""
    from rebuild.tokens.chat import (
        load_tokenizer,  # here: seconds, which a wrong argument need not cost
    )

    return read_vocabulary(load_tokenizer(folder, trust_remote_code))


def view_row(vocabulary: Vocabulary, row: dict[str, Any], whole: bool) -> View:
    """Return the view of one row, ids without a token among its faults."""
    ids, mask = row["input_ids"] or [], row["loss_mask"] or []
    view = view_sample(row, to_tokens(vocabulary, ids, mask), whole=whole)
    if unknown := unknown_ids(vocabulary, ids):
        view.faults.append(f"ids that the tokenizer does not have, such as {unknown[0]}")
    return view


def write_page(page: Path, tokenized: Path, views: Iterator[View]) -> None:
    """Write the samples as a page that appears whole or not at all."""
    with atomic_path(page) as temporary:
        temporary.write_text(masks_page(f"Loss masks of {tokenized}", views), encoding="utf-8")


def parse_arguments(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the arguments of `show_masks` as a command line gives them."""
    parser = argparse.ArgumentParser(description="Show what of a sample is trained on.")
    parser.add_argument("tokenized", type=Path, help="results/<run>/tokenized/<shard>.parquet")
    parser.add_argument("--sample", nargs="+", default=[], metavar="ID", dest="samples")
    parser.add_argument(
        "--random", type=whole_number, default=3, metavar="N", dest="count", help="3"
    )
    parser.add_argument("--seed", type=int, help="choose the same random samples again")
    parser.add_argument("--html", type=Path, metavar="FILE", dest="page", help="write a page")
    parser.add_argument("--model", type=Path, help="folder with the tokenizer, or a model manifest")
    parser.add_argument("--all", action="store_true", dest="whole", help="shorten no context")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto")
    arguments = vars(parser.parse_args(words))
    arguments["colours"] = wants_colours(arguments.pop("color"), sys.stdout.isatty())
    return arguments


def wants_colours(choice: str, terminal: bool) -> bool:
    """Return whether to use colours: always, never, or on a terminal unless NO_COLOR is set or it knows none."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return choice == "always" or (choice == "auto" and terminal and not plain)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    try:
        show_masks(output=sys.stdout, **parse_arguments())
    except StepError as error:
        sys.exit(error.describe())
