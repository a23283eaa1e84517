"""The command that shows masks, on a small built run: which samples, which tokenizer, how it looks."""

import io
import os
import pty
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rebuild.errors import StepError
from rebuild.files import write_json
from rebuild.tables import TOKENIZED, TableWriter, iter_rows
from show_masks import load_vocabulary, parse_arguments, show_masks, wants_colours
from tests.support.shards import Row, Shard, make_answer, make_disaster, write_shard
from tests.support.trees import ROOT

MANIFEST = {
    "schema_version": "1",
    "source": "local",
    "revision": None,
    "origin": None,
    "files": {},
    "content_sha256": "",
    "chat_template_sha256": "",
    "architecture": "Qwen3ForCausalLM",
    "num_hidden_layers": 1,
    "hidden_size": 1,
    "vocab_size": 151936,
    "context_length": 1,
    "dtype": "float32",
    "hybrid": False,
    "eos_token_ids": [151645],
    "trust_remote_code": False,
    "fingerprint": "",
}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory, qwen3_tokenizer: Path) -> Shard:
    """Forty answers of ten tokens and the disaster, in row groups of sixteen, beside their model's manifest."""
    answers = [*(make_answer(f"p{n:02}", tokens=10) for n in range(40)), make_disaster("empty")]
    shard = write_shard(tmp_path_factory.mktemp("results") / "run", answers)
    rows = list(iter_rows(shard.tokenized))
    with TableWriter(shard.tokenized, TOKENIZED, {}, row_group=16) as writer:
        writer.write(rows)
    write_json(shard.run / "model" / "manifest.json", MANIFEST | {"path": str(qwen3_tokenizer)})
    return shard


@pytest.fixture(autouse=True)
def one_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a tokenizer loaded once for all tests."""
    monkeypatch.setattr("show_masks.load_vocabulary", loaded)


loaded = cache(load_vocabulary)


def show(tokenized: Path, *words: str, **changes: Any) -> str:
    """Return what the command prints for these words."""
    output = io.StringIO()
    show_masks(output=output, **parse_arguments([str(tokenized), *words]) | changes)
    return output.getvalue()


def names(text: str) -> list[str]:
    return [line.strip("─ ") for line in text.splitlines() if line.startswith("──")]


def command(shard: Shard, *words: str, **settings: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run the command as people type it."""
    script = ROOT / "workflow" / "scripts" / "show_masks.py"
    return subprocess.run(
        [sys.executable, str(script), str(shard.tokenized), *words],
        timeout=120,
        stdin=subprocess.DEVNULL,
        **settings,
    )


def test_named_samples_are_shown_in_the_order_of_asking(shard: Shard) -> None:
    text = show(shard.tokenized, "--sample", "empty_gen0", "p17_gen0")
    assert names(text) == ["empty_gen0", "p17_gen0"]
    assert "⟦‹<think>›⏎\n⏎\n‹</think>›⏎\n⏎\nOK.‹<|im_end|>›⟧" in text
    assert "supervised 7 of 16 tokens, in 1 run: 9 to 15" in text


def test_every_row_can_be_named_whatever_row_group_it_is_in(shard: Shard) -> None:
    everything = [row["sample_id"] for row in iter_rows(shard.tokenized)]
    assert names(show(shard.tokenized, "--sample", *everything)) == everything


def test_three_random_samples_are_shown_and_how_to_see_them_again(shard: Shard) -> None:
    text = show(shard.tokenized)
    again = text.rstrip().splitlines()[-1]
    assert again.startswith("3 of 41 samples at random; again: --seed ")
    assert len(names(text)) == 3
    assert show(shard.tokenized, *again.split()[-2:]) == text


def test_other_seeds_choose_others_and_more_than_there_are_is_all(shard: Shard) -> None:
    chosen = {tuple(names(show(shard.tokenized, "--seed", str(seed)))) for seed in range(5)}
    assert len(chosen) > 1
    assert len(names(show(shard.tokenized, "--random", "1000"))) == 41


def test_an_unknown_sample_stops_and_the_nearest_ids_are_named(shard: Shard) -> None:
    with pytest.raises(StepError, match="there is no sample 'empty'") as stop:
        show(shard.tokenized, "--sample", "empty")
    assert stop.value.seen.startswith("41 other ids; nearest are 'empty_gen0'")


def test_a_sample_that_is_there_twice_is_shown_twice(shard: Shard, tmp_path: Path) -> None:
    twice: list[Row] = [row for row in iter_rows(shard.tokenized) if row["turn"] == 0][:1] * 2
    with TableWriter(tmp_path / "twice.parquet", TOKENIZED, {}) as writer:
        writer.write(twice)
    model = str(shard.run / "model")
    text = show(tmp_path / "twice.parquet", "--sample", "p00_gen0", "--model", model)
    assert names(text) == ["p00_gen0"] * 2


def test_another_kind_of_file_is_refused(shard: Shard) -> None:
    with pytest.raises(StepError, match="not a file of tokenized samples"):
        show(shard.generated)


@pytest.mark.parametrize("given", ["folder", "manifest", "manifest's folder"])
def test_the_tokenizer_may_be_given(
    shard: Shard, tmp_path: Path, qwen3_tokenizer: Path, given: str
) -> None:
    elsewhere = tmp_path / "copy.parquet"
    elsewhere.write_bytes(shard.tokenized.read_bytes())
    manifest = shard.run / "model" / "manifest.json"
    places = {"folder": qwen3_tokenizer, "manifest": manifest, "manifest's folder": manifest.parent}
    words = ["--sample", "empty_gen0", "--model", str(places[given])]
    assert show(elsewhere, *words) == show(shard.tokenized, *words[:2])


def test_without_a_model_the_command_stops_and_says_what_it_looked_for(
    shard: Shard, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "tokenized" / "copy.parquet"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(shard.tokenized.read_bytes())
    with pytest.raises(StepError, match="model's manifest"):
        show(elsewhere)
    gone = MANIFEST | {"path": str(tmp_path / "gone")}
    write_json(tmp_path / "model" / "manifest.json", gone)
    with pytest.raises(StepError, match="folder is gone") as stop:
        show(elsewhere)
    assert "--model" in stop.value.remedy


def test_ids_that_the_tokenizer_does_not_have_are_named(shard: Shard, tmp_path: Path) -> None:
    row = next(iter_rows(shard.tokenized))
    row["input_ids"][-1] = 151_900
    with TableWriter(tmp_path / "odd.parquet", TOKENIZED, {}) as writer:
        writer.write([row])
    text = show(tmp_path / "odd.parquet", "--model", str(shard.run / "model"))
    assert "! ids that the tokenizer does not have, such as 151900" in text
    assert "‹<id 151900>›⟧" in text


def test_a_page_is_written_whole_and_its_place_is_said(shard: Shard, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "masks.html"
    text = show(shard.tokenized, "--sample", "empty_gen0", "--html", str(page))
    assert text == f"1 of 41 samples: {page}\n"
    assert '<span class="supervised special">&lt;think&gt;</span>' in page.read_text()
    assert list(page.parent.iterdir()) == [page]


def test_long_context_is_shortened_unless_all_of_it_is_asked_for(
    shard: Shard, tmp_path: Path
) -> None:
    row = next(iter_rows(shard.tokenized))
    longer = {
        "input_ids": [1000] * 500 + row["input_ids"],
        "loss_mask": [0] * 500 + row["loss_mask"],
    }
    with TableWriter(tmp_path / "long.parquet", TOKENIZED, {}) as writer:
        writer.write([row | longer | {"seq_len": row["seq_len"] + 500}])
    words = ["--model", str(shard.run / "model")]
    assert "‹… 389 tokens of context left out …›" in show(tmp_path / "long.parquet", *words)
    assert "left out" not in show(tmp_path / "long.parquet", *words, "--all")


@pytest.mark.parametrize(
    ("choice", "terminal", "environ", "expected"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {}, False),
    ],
)
def test_colours_are_for_terminals_that_want_them(
    monkeypatch: pytest.MonkeyPatch,
    choice: str,
    terminal: bool,
    environ: dict[str, str],
    expected: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert wants_colours(choice, terminal) is expected


def test_the_command_colours_a_terminal_and_no_file(shard: Shard) -> None:
    words = ["--sample", "empty_gen0"]
    piped = command(shard, *words, capture_output=True, check=True).stdout
    assert b"\x1b" not in piped
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    command(shard, *words, stdout=theirs, check=True, env=environ | {"TERM": "xterm"})
    os.close(theirs)
    assert b"\x1b[1;7;32m<think>\x1b[0m" in os.read(ours, 1 << 16)
    os.close(ours)


def test_the_command_ends_with_the_message_and_without_a_traceback(shard: Shard) -> None:
    done = command(shard, "--sample", "nobody", capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("there is no sample 'nobody'\n  where: ")
    assert "what to do" in done.stderr


def test_make_masks_hands_its_variables_to_the_command(tmp_path: Path) -> None:
    given = ["FILE=a/b.parquet", "SAMPLES=p1_gen0 p2_gen0", "HTML=masks.html"]
    make = ["make", "--dry-run", "masks", f"VENV={tmp_path}", *given]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    # within `make test`, make also says which folder it enters and leaves
    (line,) = [line for line in done.stdout.splitlines() if "show_masks.py" in line]
    line = line.partition("python workflow/scripts/show_masks.py ")[2]
    arguments = parse_arguments(shlex.split(line))
    assert arguments["tokenized"] == Path("a/b.parquet")
    assert arguments["samples"] == ["p1_gen0", "p2_gen0"]
    assert arguments["page"] == Path("masks.html")
