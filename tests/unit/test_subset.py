"""A subset of samples: about as many as asked for, each shard, source and length in proportion, always the same ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.states.samples import Sample
from rebuild.states.subset import choose_samples, shard_quota


def sample(number, length, source):
    return Sample(f"{number}_gen0", np.zeros(length, np.int32), np.ones(length, np.int8), source)


def manifest(canary, *others, assign="contiguous"):
    named = {f"{number:05d}": {"user_turns": turns} for number, turns in enumerate(others)}
    first = {"canary": {"user_turns": canary}} if canary else {}
    return {"assign": assign, "shards": first | named}


def test_the_canary_is_taken_whole_and_counts():
    of = manifest(8, 30, 30)
    assert shard_quota(20, "canary", of) is None
    assert [shard_quota(20, name, of) for name in ("00000", "00001")] == [6, 6]


def test_interleaved_shards_are_taken_one_after_another():
    of = manifest(8, 30, 30, 30, assign="interleave")
    names = ("00000", "00001", "00002")
    assert [shard_quota(50, name, of) for name in names] == [None, 12, 0]
    assert [shard_quota(68, name, of) for name in names] == [None, None, 0]
    assert [shard_quota(98, name, of) for name in names] == [None, None, None]
    assert shard_quota(50, "canary", of) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(0, 500))
def test_contiguous_shards_give_in_proportion_and_add_up(turns, wanted):
    of = manifest(0, *turns)
    quotas = [shard_quota(wanted, name, of) for name in of["shards"]]
    total = sum(turns)
    if wanted >= max(1, total):
        assert set(quotas) == {None}
        return
    assert sum(quotas) == (wanted if total else 0)
    for own, quota in zip(turns, quotas, strict=True):
        assert abs(quota - wanted * own / max(1, total)) < 1


def test_fewer_than_the_canary_leaves_the_others_nothing():
    assert shard_quota(5, "00000", manifest(8, 30)) == 0


def test_sources_and_lengths_keep_their_proportions():
    samples = [sample(n, 10 + n % 100, "long" if n % 4 else "short") for n in range(400)]
    chosen = choose_samples(samples, 40)
    assert len(chosen) == 40
    assert sum(s.source == "short" for s in chosen) == 10
    lengths = sorted(len(s) for s in chosen)
    assert lengths[0] < 20 and lengths[-1] > 100
    assert np.mean(lengths) == pytest.approx(np.mean([len(s) for s in samples]), rel=0.05)


def test_the_samples_keep_their_order_and_the_choice_is_the_same_again():
    samples = [sample(n, 5 + n * 7 % 31, f"s{n % 3}") for n in range(50)]
    chosen = choose_samples(samples, 17)
    assert [samples.index(s) for s in chosen] == sorted(samples.index(s) for s in chosen)
    assert chosen == choose_samples(samples, 17)


@pytest.mark.parametrize(("count", "expected"), [(None, 3), (3, 3), (9, 3), (0, 0), (1, 1)])
def test_the_ends_of_the_range(count, expected):
    samples = [sample(n, 5, "a") for n in range(3)]
    assert len(choose_samples(samples, count)) == expected
