"""A drafter's own configuration: whose layers it names, and how they are counted."""

import json

import pytest

from rebuild.errors import StepError
from rebuild.states.drafter import check_target, read_drafter, settle_layers

Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 5120,
    "num_target_layers": 64,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
}
EAGLE3 = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}, "hidden_size": 2048}
SPECULATORS = {
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 17, 32, 47, 62],
    "dflash_config": {"target_layer_ids": [9]},
}
SPECULATORS_EAGLE3 = {
    "speculators_model_type": "eagle3",
    "eagle_aux_hidden_state_layer_ids": [2, 16, 29],
}


def drafter(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return read_drafter(str(folder))


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (Z_LAB, [1, 16, 31, 46, 61]),
        (EAGLE3, [1, 15, 28]),
        (SPECULATORS, [1, 16, 31, 46, 61]),
        (SPECULATORS_EAGLE3, [1, 15, 28]),
    ],
    ids=["z-lab", "eagle3", "speculators", "speculators-eagle3"],
)
def test_every_family_gives_its_layers_in_our_ids(tmp_path, config, layers):
    assert drafter(tmp_path, config).layers == layers


def test_the_file_itself_may_be_named(tmp_path):
    drafter(tmp_path, Z_LAB)
    assert read_drafter(str(tmp_path / "config.json")).layers == [1, 16, 31, 46, 61]


def test_auto_takes_the_drafters_layers(tmp_path):
    assert settle_layers("auto", drafter(tmp_path, Z_LAB)) == [1, 16, 31, 46, 61]
    assert settle_layers([1, 16, 31, 46, 61], drafter(tmp_path, Z_LAB)) == [1, 16, 31, 46, 61]
    assert settle_layers([3, 4], None) == [3, 4]


def test_layers_that_contradict_the_drafter_are_refused(tmp_path):
    with pytest.raises(StepError) as caught:
        settle_layers([2, 17, 32, 47, 62], drafter(tmp_path, Z_LAB))
    assert caught.value.seen == "hidden_states.layers: [2, 17, 32, 47, 62]"
    assert "[1, 16, 31, 46, 61]" in caught.value.expected


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ("{", "JSONDecodeError"),
        ('{"dflash_config": {"target_layer_ids": [1.5]}}', "TypeError: 1.5 is no layer id"),
        ("[1]", "AttributeError"),
    ],
)
def test_an_unreadable_configuration_is_named(tmp_path, config, seen):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(StepError, match="cannot be read") as caught:
        read_drafter(str(tmp_path))
    assert seen in caught.value.seen and str(tmp_path) in caught.value.where


def test_a_configuration_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StepError, match="cannot be read"):
        read_drafter(str(tmp_path / "nothing"))


def test_a_configuration_without_layers_is_refused(tmp_path):
    with pytest.raises(StepError, match="names no layers"):
        drafter(tmp_path, {"hidden_size": 5120, "num_hidden_layers": 1})


@pytest.mark.parametrize(("layers", "width", "named"), [(63, 5120, "layers"), (64, 4096, "width")])
def test_a_drafter_for_another_target_is_refused(tmp_path, layers, width, named):
    found = drafter(tmp_path, Z_LAB)
    check_target(found, 64, 5120)
    with pytest.raises(StepError, match=f"its number of {named} differs"):
        check_target(found, layers, width)
