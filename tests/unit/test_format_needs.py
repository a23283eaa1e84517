"""What formats need, which exclude each other, and how large they are."""

import subprocess
import sys

import pytest

from rebuild.errors import StepError
from rebuild.formats.catalog import FORMATS
from rebuild.formats.needs import (
    NEEDS,
    bytes_per_file,
    bytes_per_token,
    check_formats,
    wanted_states,
)
from rebuild.formats.saved_dataset import save_dataset
from tests.support.captured import make_captured, make_sample
from tests.support.trees import ROOT

LAST = ["none", "pre_norm", "post_norm"]


def test_every_format_has_its_needs():
    assert FORMATS.keys() == NEEDS.keys()


@pytest.mark.parametrize(
    ("formats", "include_last", "pre_norm", "post_norm"),
    [
        (["specforge"], "none", False, False),
        (["specforge"], "post_norm", False, True),
        (["specforge_eagle3"], "none", False, True),
        (["speculators"], "none", True, False),
        (["speculators_fp8"], "post_norm", True, False),
        (["modelopt"], "none", False, True),
        (["modelopt"], "pre_norm", True, True),
        (["specforge", "speculators"], "none", True, False),
        (["specforge", "speculators", "modelopt"], "post_norm", True, True),
    ],
)
def test_final_states_are_captured_for_the_formats_that_store_them(
    formats, include_last, pre_norm, post_norm
):
    assert wanted_states(formats, include_last) == (pre_norm, post_norm)


@pytest.mark.parametrize(
    ("formats", "include_last", "layers", "fault"),
    [
        ([], "none", None, "none is named"),
        (["specforg"], "none", None, "no format 'specforg'"),
        (["modelopt", "modelopt"], "none", None, "modelopt is named twice"),
        (["specforge", "specforge_eagle3"], "none", [1, 2, 3], "reads every .ckpt below a folder"),
        (["speculators_fp8", "speculators"], "none", None, "in the same folder"),
        (["specforge"], "pre_norm", None, "no place for"),
        (["modelopt", "specforge"], "pre_norm", None, "no place for"),
        (["modelopt"], "last", None, "'last' is none of"),
        (["specforge_eagle3"], "pre_norm", None, "none of them stores"),
        (["speculators"], "post_norm", [4], "none of them stores"),
        (["specforge_eagle3"], "none", [1, 2, 3, 4, 5], "takes exactly 3 layers"),
        (["modelopt", "specforge_eagle3"], "none", [1], "specforge_eagle3 takes exactly 3 layers"),
    ],
)
def test_contradictions_stop(formats, include_last, layers, fault):
    with pytest.raises(StepError, match="hidden_states.formats") as stopped:
        check_formats(formats, include_last, layers)
    assert fault in stopped.value.what
    assert str(formats) in stopped.value.seen


@pytest.mark.parametrize(
    ("formats", "include_last", "layers"),
    [
        (["specforge", "speculators", "modelopt"], "post_norm", [1, 8, 15, 22, 29]),
        (["specforge_eagle3", "speculators_fp8", "modelopt"], "none", [2, 32, 61]),
        (["specforge_eagle3"], "post_norm", None),
        (["speculators", "modelopt"], "post_norm", [4]),
        (["modelopt"], "pre_norm", [1, 2]),
    ],
)
def test_what_fits_together_passes(formats, include_last, layers):
    check_formats(formats, include_last, layers)


def test_figures_of_the_27b_model_are_those_of_its_formats():
    size = {name: bytes_per_token(name, 5, 5120, "none") for name in FORMATS}
    assert size["specforge"] == 5 * 5120 * 2 + 16
    assert size["speculators"] == 6 * 5120 * 2 + 13
    assert size["speculators_fp8"] == 6 * 5120 + 17
    assert size["modelopt"] == 6 * 5120 * 2 + 16
    assert bytes_per_token("specforge", 5, 5120, "post_norm") == 6 * 5120 * 2 + 16
    assert bytes_per_token("specforge_eagle3", 3, 5120, "none") == 4 * 5120 * 2 + 16


@pytest.mark.parametrize("include_last", LAST)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("length", "layers", "hidden"), [(1, 1, 1), (7, 3, 16), (300, 6, 64)])
def test_a_file_takes_what_is_said_per_token_and_at_most_what_is_said_per_file(
    name, include_last, length, layers, hidden, tmp_path
):
    sample = make_sample("x" * 150, length)
    captured = make_captured(length, layers, hidden)
    content = FORMATS[name].tensors(sample, captured, include_last)
    written = FORMATS[name].write(tmp_path / "file", content)
    around = written.bytes - length * bytes_per_token(name, layers, hidden, include_last)
    if name.startswith("speculators"):
        around += length * 5  # in the data set
    assert 0 < around <= bytes_per_file(name)


def test_a_row_of_the_data_set_takes_what_is_said_too(tmp_path):
    sizes = []
    for count in (100, 200):
        save_dataset(tmp_path, [make_sample(f"{'x' * 60}{number}", 40) for number in range(count)])
        sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    a_row = (sizes[1] - sizes[0]) / 100
    assert 40 * 5 < a_row < 40 * 5 + bytes_per_file("speculators_fp8") - 264  # the longest header


def test_needs_import_nothing_heavy():
    code = (
        "import sys, rebuild.formats.needs; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT / "workflow/scripts", check=True)
