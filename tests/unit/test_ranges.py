"""The canary's sizes of each layer as the range for all others."""

import pytest
import torch

from rebuild.errors import StepError
from rebuild.states.judgement import measure_layer
from rebuild.states.ranges import check_sizes, read_canary
from rebuild.tables import HIDDEN_STATES, TableWriter


def row(sample, sizes, logprob=None):
    usual = dict.fromkeys(HIDDEN_STATES.names)
    return usual | {
        "sample_id": sample,
        "layers": [1, 3],
        "token_rms": sizes,
        "logprob": logprob,
        "format": "specforge",
    }


@pytest.fixture
def seen(tmp_path):
    path = tmp_path / "canary.parquet"
    with TableWriter(path, HIDDEN_STATES, {}) as writer:
        writer.write([row("a", [1.0, 4.0], -0.5), row("b", [2.0, 6.0]), row("b", [2.0, 6.0])])
    return read_canary(path)


def facts(first, second):
    return [
        measure_layer(torch.full((5, 8), size), layer) for layer, size in ((1, first), (3, second))
    ]


def test_the_canarys_index_gives_the_range_of_every_layer(seen):
    assert seen.samples == 2
    assert dict(seen.sizes) == {1: (1.0, 2.0), 3: (4.0, 6.0)}
    assert seen.logprobs == pytest.approx([-0.5])


@pytest.mark.parametrize("sizes", [(1.5, 5.0), (0.51, 11.9), (3.9, 2.1)])
def test_sizes_within_the_factor_pass(seen, sizes):
    check_sizes(facts(*sizes), seen, factor=2, where="sample")


@pytest.mark.parametrize(("sizes", "layer"), [((0.4, 5), 1), ((1, 13), 3), ((4.1, 13), 1)])
def test_a_layer_of_another_size_is_named_with_the_range(seen, sizes, layer):
    with pytest.raises(StepError, match=f"states of layer {layer} are of another size") as caught:
        check_sizes(facts(*sizes), seen, factor=2, where="shard 00000, sample x")
    assert caught.value.where == "shard 00000, sample x"
    assert "2 samples of the canary" in caught.value.expected


def test_a_few_huge_tokens_do_not_set_the_size(seen):
    states = torch.full((9, 8), 1.5)
    states[0] = 28_288.0
    fact = measure_layer(states, 1)
    assert fact.token_rms == pytest.approx(1.5) and fact.rms > 9000
    check_sizes([fact], seen, factor=2, where="sample")
