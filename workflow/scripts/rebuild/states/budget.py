"""Room on the disk for a shard's hidden states, made sure of before the first forward pass.

Jobs that run at once share the disk: each holds a reservation, a locked file beside the shards' folders, as long as it
works. What it has reserved and not yet written is not free for the others. A reservation without its lock is a dead
job's and counts for nothing.
"""

import fcntl
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from rebuild.errors import StepError
from rebuild.files import read_json
from rebuild.step import say

GB = 10**9
KEPT_FREE = 256 * 2**20  # for logs, tables and whatever else writes to the disk
HALF = 0.55  # what FP8 takes of the same states in bfloat16, ids and scales included
RESERVED = ".reserved-"


@dataclass(frozen=True)
class Size:
    """What samples take on the disk: bytes per token and per sample, over all formats that are written."""

    per_token: int
    per_sample: int

    def of(self, lengths: Sequence[int]) -> int:
        """Return the bytes of samples of these lengths."""
        return self.per_token * sum(lengths) + self.per_sample * len(lengths)


@contextmanager
def reserved(
    folder: Path, shard: str, size: Size, lengths: Sequence[int], max_gb: float | None
) -> Iterator[int]:
    """Reserve room in `folder` (results/<run>/hidden_states) for samples of these lengths, or stop; yield the bytes.

    Raises:
        StepError: they do not fit the free disk, or not what `hidden_states.max_disk_gb` leaves of it.
    """
    needed = size.of(lengths)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{RESERVED}{shard}"
    with open(folder / ".reserving", "a") as gate, open(path, "a+") as mine:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(mine, fcntl.LOCK_EX)
        promised = sum(outstanding(other, folder) for other in reservations(folder, path))
        room = shutil.disk_usage(folder).free - promised - KEPT_FREE
        say(f"hidden states: {in_gb(needed)} to write, {in_gb(max(0, room))} free for them")
        if needed > room:
            kept = f"the disk ({in_gb(KEPT_FREE)} of it are kept free, {in_gb(promised)} are for other jobs)"
            raise too_much(kept, room, needed, size, lengths, where=str(folder))
        if max_gb is not None:
            left = int(max_gb * GB) - used(folder) - promised
            if needed > left:
                raise too_much(
                    f"hidden_states.max_disk_gb = {max_gb:g}",
                    left,
                    needed,
                    size,
                    lengths,
                    where=str(folder),
                )
        mine.truncate(0)
        mine.write(f"{needed} {folder_bytes(folder / shard)}")
        mine.flush()
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield needed
        finally:
            path.unlink(missing_ok=True)


def reservations(folder: Path, mine: Path) -> list[Path]:
    """Return the reservations of other jobs that are alive; those of dead ones are removed."""
    alive = []
    for path in sorted(folder.glob(f"{RESERVED}*")):
        if path != mine and is_held(path):
            alive.append(path)
    return alive


def is_held(reservation: Path) -> bool:
    """Tell whether the job of a reservation is alive; remove the reservation if it is not."""
    try:
        with open(reservation) as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            reservation.unlink(missing_ok=True)
            return False
    except BlockingIOError:
        return True
    except FileNotFoundError:  # it has just finished
        return False


def outstanding(reservation: Path, folder: Path) -> int:
    """Return the bytes that a living job has reserved and not written yet."""
    try:
        needed, before = map(int, reservation.read_text().split())
    except (FileNotFoundError, ValueError):  # it has just finished, or reserves nothing yet
        return 0
    written = folder_bytes(folder / reservation.name.removeprefix(RESERVED)) - before
    return max(0, needed - written)


def used(folder: Path) -> int:
    """Return the bytes of all hidden states that are there."""
    return sum(folder_bytes(path) for path in folder.iterdir() if path.is_dir())


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder, links not followed; 0 if it is not there."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(where, name).lstat().st_size
            except FileNotFoundError:  # another job has just renamed it
                continue
    return total


def check_whole_run(
    folder: Path,
    size: Size,
    lengths: Sequence[int],
    manifest: Path,
    samples: int | None,
    max_gb: float | None,
) -> None:
    """Say what the whole run's hidden states will take, judging by the canary's; stop if that is more than is allowed.

    Raises:
        StepError: more than `hidden_states.max_disk_gb`.
    """
    shards = read_json(manifest)["shards"]
    turns = sum(facts["user_turns"] for facts in shards.values())
    of_canary = max(1, shards["canary"]["user_turns"])
    factor = max(of_canary, min(turns, samples or turns)) / of_canary
    total = int(size.of(lengths) * factor)
    say(f"judging by the canary, the whole run's hidden states will take {in_gb(total)}")
    if max_gb is not None and total > max_gb * GB:
        raise too_much(
            f"hidden_states.max_disk_gb = {max_gb:g}",
            int(max_gb * GB),
            total,
            size,
            lengths,
            where=f"{folder}, the whole run judging by its canary",
            factor=factor,
        )
    free = shutil.disk_usage(folder).free
    if total > free:
        say(f"WARNING: {in_gb(free)} are free. Jobs that do not fit will stop before they start")


def too_much(
    what: str,
    room: int,
    needed: int,
    size: Size,
    lengths: Sequence[int],
    *,
    where: str,
    factor: float = 1.0,
) -> StepError:
    """Return the error for states that do not fit, with the choices and their figures."""
    room = max(0, room)
    tokens = int(sum(lengths) * factor)
    return StepError(
        f"the hidden states do not fit {what}",
        where=where,
        expected=f"at most {in_gb(room)}",
        seen=f"{in_gb(needed)}: {tokens} tokens in {round(len(lengths) * factor)} samples, {size.per_token} bytes a token",
        remedy="one of these: " + "; ".join(choices(room, needed, size, lengths, factor)),
    )


def choices(room: int, needed: int, size: Size, lengths: Sequence[int], factor: float) -> list[str]:
    """Return what can be done about states that do not fit, with figures; what would not help is left out."""
    share, longest = 100 * room // max(1, needed), longest_that_fits(room / factor, size, lengths)
    listed = ["make room"]
    if share:
        listed.append(
            f"capture fewer samples (hidden_states.samples: about {share} % of them fit; a part with the mix of the whole)"
        )
    if longest > 1:
        listed.append(f"cut them (hidden_states.max_length: {longest} would fit)")
    if room > needed * HALF:
        listed.append(
            "write FP8 where the trainer reads it (hidden_states.formats: [speculators_fp8], about half of bfloat16)"
        )
    return [*listed, "keep no states at all and train online from the export (snakemake exported)"]


def longest_that_fits(room: float, size: Size, lengths: Sequence[int]) -> int:
    """Return the greatest length to which the samples can be cut so that they fit `room` bytes; 0 if none does."""
    ordered = sorted(lengths)
    below = [0, *accumulate(ordered)]

    def bytes_at(length: int) -> int:
        shorter = bisect_right(ordered, length)
        tokens = below[shorter] + length * (len(ordered) - shorter)
        return size.per_token * tokens + size.per_sample * len(ordered)

    lengths_tried = range(1, (ordered[-1] if ordered else 0) + 1)
    return bisect_right(lengths_tried, room, key=bytes_at)


def in_gb(size: int) -> str:
    """Return bytes as people say them."""
    return f"{size / GB:.3g} GB" if size >= GB else f"{size / 10**6:.3g} MB"
