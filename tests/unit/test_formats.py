"""Every format's files: what is in them, that they are whole, and the same for the same sample."""

import hashlib
import resource
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rebuild import files
from rebuild.errors import StepError
from rebuild.formats import speculators
from rebuild.formats.catalog import FORMATS
from rebuild.states.captured import Captured
from tests.support.captured import HIDDEN, LAYERS, make_captured, make_sample

TORCH = ["specforge", "specforge_eagle3", "modelopt"]
SAFETENSORS = ["speculators", "speculators_fp8"]
SAMPLE, CAPTURED = make_sample(), make_captured()
S = len(SAMPLE)


def write(name, path, captured=CAPTURED, include_last="none", sample=SAMPLE):
    kind = FORMATS[name]
    return kind.write(path, kind.tensors(sample, captured, include_last))


def read(name, path):
    return torch.load(path, weights_only=True, mmap=True) if name in TORCH else load_file(path)


def written(name, path, include_last="none"):
    """Write the sample and return what is in its file."""
    write(name, path, include_last=include_last)
    return read(name, path)


def layout(content):
    return {
        key: (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in content.items()
        if isinstance(value, torch.Tensor)
    }


TOKENS = {"input_ids": ("int64", (S,)), "loss_mask": ("int64", (S,))}
TAPS = ("bfloat16", (S, LAYERS * HIDDEN))
FINAL = ("bfloat16", (S, HIDDEN))
STACKED = (S, LAYERS + 1, HIDDEN)


@pytest.mark.parametrize(
    ("name", "include_last", "expected"),
    [
        ("specforge", "none", TOKENS | {"hidden_states": TAPS}),
        (
            "specforge",
            "post_norm",
            TOKENS
            | {"hidden_states": TAPS, "target_last_hidden_states": ("bfloat16", (1, S, HIDDEN))},
        ),
        (
            "specforge_eagle3",
            "none",
            TOKENS
            | {
                "hidden_state": ("bfloat16", (1, S, HIDDEN)),
                "aux_hidden_state": ("bfloat16", (1, S, LAYERS * HIDDEN)),
            },
        ),
        (
            "speculators",
            "none",
            {"token_ids": ("int64", (S,)), "hidden_states": ("bfloat16", STACKED)},
        ),
        (
            "speculators_fp8",
            "none",
            {
                "token_ids": ("int64", (S,)),
                "hidden_states_scales": ("float32", (S, 1, 1)),
                "hidden_states": ("float8_e4m3fn", STACKED),
            },
        ),
        ("modelopt", "none", TOKENS | {"hidden_states": FINAL, "aux_hidden_states": TAPS}),
        (
            "modelopt",
            "pre_norm",
            TOKENS
            | {"hidden_states": FINAL, "aux_hidden_states": TAPS, "hidden_states_prenorm": FINAL},
        ),
    ],
)
def test_a_file_holds_the_readers_keys_in_its_shapes_and_types(
    name, include_last, expected, tmp_path
):
    content = written(name, tmp_path / "file", include_last)
    assert layout(content) == expected
    if name in TORCH:
        assert content["input_ids"].tolist() == SAMPLE.input_ids.tolist()
        assert content["loss_mask"].tolist() == SAMPLE.loss_mask.tolist()


def test_states_are_where_the_formats_have_them(tmp_path):
    flat = CAPTURED.taps.reshape(S, -1)
    pre, post = CAPTURED.pre_norm, CAPTURED.post_norm
    found = written("specforge", tmp_path / "a", "post_norm")
    assert torch.equal(found["hidden_states"], flat)
    assert torch.equal(found["target_last_hidden_states"][0], post)
    found = written("specforge_eagle3", tmp_path / "b")
    assert torch.equal(found["aux_hidden_state"][0], flat)
    assert torch.equal(found["hidden_state"][0], post)
    found = written("modelopt", tmp_path / "c", "pre_norm")
    assert torch.equal(found["aux_hidden_states"], flat)
    assert torch.equal(found["hidden_states"], post)
    assert torch.equal(found["hidden_states_prenorm"], pre)
    assert found["conversation_id"] == SAMPLE.sample_id
    found = written("speculators", tmp_path / "d")
    assert torch.equal(found["hidden_states"][:, :-1], CAPTURED.taps)
    assert torch.equal(found["hidden_states"][:, -1], pre)
    assert found["token_ids"].tolist() == SAMPLE.input_ids.tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_key_and_dtype_of_the_index_are_those_of_the_layers_states(name, tmp_path):
    kind = FORMATS[name]
    states = written(name, tmp_path / "file")[kind.key]
    assert states.dtype == getattr(torch, kind.dtype)
    assert states.numel() >= S * LAYERS * HIDDEN


@pytest.mark.parametrize("name", FORMATS)
def test_size_and_checksum_are_the_files(name, tmp_path):
    captured = make_captured(500, hidden=256)  # large enough to be hashed beside the writing
    facts = write(name, tmp_path / "file", captured, sample=make_sample(length=500))
    content = (tmp_path / "file").read_bytes()
    assert facts.bytes == len(content)
    assert facts.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_sample_gives_the_same_bytes_under_any_name(name, tmp_path):
    one, another = (write(name, tmp_path / path) for path in ("one", "another"))
    assert one == another
    if name in TORCH:
        assert not any(
            "another" in part for part in zipfile.ZipFile(tmp_path / "another").namelist()
        )


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_samples_own_states_are_stored_not_the_tensor_they_are_cut_from(name, tmp_path):
    batch = make_captured(5000)
    part = Captured(batch.taps[:S], batch.pre_norm[:S], batch.post_norm[:S])
    own = Captured(part.taps.clone(), part.pre_norm.clone(), part.post_norm.clone())
    assert write(name, tmp_path / "cut", part) == write(name, tmp_path / "own", own)


@pytest.mark.parametrize("name", FORMATS)
def test_states_in_any_order_of_memory_are_stored_alike(name, tmp_path):
    turned = replace(CAPTURED, taps=CAPTURED.taps.transpose(0, 1).contiguous().transpose(0, 1))
    assert not turned.taps.is_contiguous()
    assert write(name, tmp_path / "turned", turned) == write(name, tmp_path / "plain")


@pytest.mark.parametrize("name", SAFETENSORS)
def test_blocks_of_any_size_give_the_same_bytes(name, tmp_path, monkeypatch):
    facts = write(name, tmp_path / "one")
    for limit in ("PIECE_VALUES", "SERIAL_VALUES"):
        for values in (1, 2 * (LAYERS + 1) * HIDDEN, 3 * HIDDEN):
            monkeypatch.setattr(speculators, limit, values)
            assert write(name, tmp_path / "several") == facts


def test_a_tensor_in_pieces_says_what_it_will_be():
    states = FORMATS["speculators_fp8"].tensors(SAMPLE, CAPTURED, "none")["hidden_states"]
    assert states.whole().dtype == states.dtype
    assert states.whole().shape == states.shape
    assert states.whole().nbytes == states.nbytes


def test_a_token_of_zeros_is_zero_in_fp8_and_not_nan(tmp_path):
    captured = make_captured()
    captured.taps[2], captured.pre_norm[2] = 0, 0
    write("speculators_fp8", tmp_path / "file", captured)
    found = load_file(tmp_path / "file")
    restored = found["hidden_states"].float() * found["hidden_states_scales"]
    assert (restored[2] == 0).all()
    assert restored.isfinite().all()


@pytest.mark.parametrize("name", ["specforge_eagle3", "speculators", "speculators_fp8", "modelopt"])
def test_a_final_state_that_was_not_captured_is_an_error_not_a_file_without_it(name):
    with pytest.raises(ValueError, match="was not captured"):
        FORMATS[name].tensors(SAMPLE, Captured(CAPTURED.taps), "none")


@pytest.mark.parametrize("name", FORMATS)
def test_a_disk_that_takes_no_more_is_named_and_nothing_is_left_behind(name, tmp_path):
    sample, captured = make_sample(length=500), make_captured(500)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(StepError) as stopped:
            write(name, tmp_path / "sub" / "file", captured, sample=sample)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert stopped.value.where == str(tmp_path / "sub" / "file")
    assert stopped.value.expected.startswith("room for ")
    assert "File too large" in stopped.value.seen
    assert "bytes are free there" in stopped.value.seen
    assert list((tmp_path / "sub").iterdir()) == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_on_the_disk_before_it_has_its_name(name, tmp_path, monkeypatch):
    done = []
    real = {step: getattr(files, step) for step in ("sync_file", "sync_folder")}
    for step, call in real.items():
        monkeypatch.setattr(
            files,
            step,
            lambda path, step=step, call=call: (done.append((step, path.name)), call(path)),
        )
    write(name, tmp_path / "file")
    (first, temporary), second = done
    assert first == "sync_file"
    assert temporary.startswith(".file.")
    assert second == ("sync_folder", tmp_path.name)
