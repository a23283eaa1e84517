"""Captures of many sequences: one at a time, or several of similar length padded on the right; never packed."""

from collections.abc import Iterator, Sequence

import torch

from rebuild.capture.forward import capture, capture_batch
from rebuild.capture.memory import free_memory, is_out_of_memory, too_large
from rebuild.capture.model import Target
from rebuild.states.captured import Captured
from rebuild.step import say

SIMILAR = 0.75  # a sample shorter than this part of its bucket's longest would mostly be padding
SMALLEST = 1e-12  # a norm that nothing is divided by less than


def capture_all(
    target: Target, sequences: Sequence[Sequence[int]], batch_tokens: int | None = None
) -> Iterator[tuple[int, Captured]]:
    """Yield each sequence's position and its states, in the given order, which is best the longest first.

    One sequence a forward, or neighbours of similar length that padded have at most `batch_tokens` tokens. When a
    bucket does not fit into memory, it and all after it are halved. Nothing is kept of what was yielded.

    Raises:
        TooLarge: a single sequence does not fit; it has its position and its length.
    """
    lengths = [len(ids) for ids in sequences]
    at, limit = 0, batch_tokens
    while at < len(lengths):
        bucket = next_bucket(lengths, at, limit)
        captured = try_capture(target, sequences, bucket)
        if not captured:
            free_memory()
            smaller = len(bucket) // 2 * max(lengths[place] for place in bucket)
            if limit == batch_tokens:
                say(
                    f"{len(bucket)} samples of up to {lengths[at]} tokens do not fit into memory at once: "
                    f"buckets are smaller from here on, of {smaller} tokens instead of {limit}"
                )
            limit = smaller
            continue
        captured.reverse()
        for position in bucket:
            yield position, captured.pop()
        at = bucket.stop


def next_bucket(lengths: Sequence[int], at: int, limit: int | None) -> range:
    """Return the positions from `at` on that go into one forward, at least the one."""
    shortest = longest = lengths[at]
    end = at + 1
    while limit is not None and end < len(lengths):
        shortest, longest = min(shortest, lengths[end]), max(longest, lengths[end])
        if (end + 1 - at) * longest > limit or shortest < SIMILAR * longest:
            break
        end += 1
    return range(at, end)


def try_capture(
    target: Target, sequences: Sequence[Sequence[int]], bucket: range
) -> list[Captured]:
    """Return the bucket's captures, or none if it does not fit into memory but a smaller one might.

    The error ends here, and with it what its frames hold of the device.
    """
    try:
        return capture_batch(target, [sequences[position] for position in bucket])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if len(bucket) == 1:
            raise too_large(bucket.start, len(sequences[bucket.start]), error) from error
        return []


def batching_error(
    target: Target, sequences: Sequence[Sequence[int]], batch_tokens: int
) -> list[float]:
    """Return for each wanted layer how far padded batches are from one sample at a time.

    It is the relative error |batched - alone| / |alone|, the mean over a sequence's tokens and the largest of the
    sequences. A median would not do: often more than half of the tokens come out equal to the bit.
    """
    errors = torch.zeros(len(target.wanted.layers))
    for position, batched in capture_all(target, sequences, batch_tokens):
        alone = capture(target, sequences[position]).taps.float()
        distance = (batched.taps.float() - alone).norm(dim=-1)
        relative = distance / alone.norm(dim=-1).clamp_min(SMALLEST)
        errors = torch.maximum(errors, relative.mean(dim=0).nan_to_num(nan=torch.inf))
    return errors.tolist()
