"""ModelOpt's way of reading: every `.pt` below a folder, with `weights_only`, and the keys and shapes that it takes."""

from pathlib import Path

import pytest
import torch

from rebuild.formats.catalog import FORMATS
from rebuild.formats.shard_files import finish_shard
from tests.support.captured import HIDDEN, LAYERS, make_captured, make_sample

LENGTHS = {"plain_gen0": 40, "two/parts é_gen1": 17, ".hidden": 64, "x" * 300: 31}


@pytest.fixture(scope="module", params=["none", "pre_norm"])
def include_last(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def run(include_last: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's hidden states: two shards, a second format beside this one, and a file of no sample, which is removed."""
    run = tmp_path_factory.mktemp("hidden_states")
    formats = ["modelopt", "speculators"]
    for number, (sample_id, length) in enumerate(LENGTHS.items()):
        folder, sample = run / f"0000{number % 2}", make_sample(sample_id, length)
        for name in formats:
            kind = FORMATS[name]
            content = kind.tensors(sample, make_captured(length, seed=number), include_last)
            kind.write(folder / kind.path(sample_id, number // 2), content)
    (run / "00000" / "another.pt").touch()
    for shard in range(2):
        samples = [make_sample(*item) for item in list(LENGTHS.items())[shard::2]]
        finish_shard(run / f"0000{shard}", formats, samples)
    return run


def test_every_file_below_the_folder_is_a_conversation(run: Path, include_last: str) -> None:
    found = {}
    for path in run.rglob("*.pt"):
        content = torch.load(path, weights_only=True)
        found[content["conversation_id"]] = content
    assert found.keys() == LENGTHS.keys()
    for number, (sample_id, length) in enumerate(LENGTHS.items()):
        content, sample = found[sample_id], make_sample(sample_id, length)
        captured = make_captured(length, seed=number)
        assert content["input_ids"].tolist() == sample.input_ids.tolist()
        assert content["loss_mask"].tolist() == sample.loss_mask.tolist()
        assert {content[key].dtype for key in ("input_ids", "loss_mask")} == {torch.int64}
        assert content["aux_hidden_states"].shape == (length, LAYERS * HIDDEN)
        assert torch.equal(content["aux_hidden_states"], captured.taps.flatten(1))
        assert torch.equal(content["hidden_states"], captured.post_norm)
        if include_last == "pre_norm":
            assert torch.equal(content["hidden_states_prenorm"], captured.pre_norm)
        assert ("hidden_states_prenorm" in content) == (include_last == "pre_norm")
