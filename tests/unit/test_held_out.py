"""The held-out list: what it shares with prompts, and which files it may be."""

import json
from pathlib import Path
from typing import Any

import pytest

from rebuild.audit.held_out import WORDS, HeldOut, read_held_out, split_words, word_runs
from rebuild.errors import StepError

TEXT = "A farmer has seventeen sheep and all but nine of them run away at night; how many are left?"


def listed(tmp_path: Path, *texts: str) -> HeldOut:
    path = tmp_path / "listed.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return read_held_out(path)


def asks(*texts: str, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": text} for text in texts]


def test_thirteen_words_in_a_row_are_shared_whatever_is_around_them(tmp_path: Path) -> None:
    held_out = listed(tmp_path, TEXT)
    words = TEXT.split()
    inside = f"Well: {' '.join(words[3 : 3 + WORDS])}?! Or so."
    assert held_out.shared(asks(inside)) == " ".join(split_words(TEXT)[3 : 3 + WORDS])
    assert held_out.shared(asks(TEXT.upper().replace(" ", "\n"))) != ""


def test_twelve_words_in_a_row_are_not(tmp_path: Path) -> None:
    held_out = listed(tmp_path, TEXT)
    words = TEXT.split()
    assert held_out.shared(asks(" ".join(words[:12]))) == ""
    assert held_out.shared(asks(" ".join([*words[:12], "instead", *words[13:]]))) == ""


def test_a_shorter_text_is_shared_only_as_a_whole(tmp_path: Path) -> None:
    held_out = listed(tmp_path, "What is 12 times 13?")
    assert held_out.shared(asks("what is 12 TIMES 13")) == "what is 12 times 13"
    assert held_out.shared(asks("What is 12 times 13, please?")) == ""


def test_three_words_are_no_sign_of_anything(tmp_path: Path) -> None:
    held_out = listed(tmp_path, "How are you?", "How are you doing?")
    assert held_out.shared(asks("How are you?")) == ""
    assert held_out.shared(asks("How are you doing?")) != ""


def test_only_what_users_say_counts_and_any_of_it(tmp_path: Path) -> None:
    held_out = listed(tmp_path, TEXT)
    for role in ("assistant", "system", "tool"):
        assert held_out.shared(asks(TEXT, role=role)) == ""
    assert held_out.shared(asks("Hello there, my friend", TEXT)) != ""


@pytest.mark.parametrize("messages", [None, [], [{"role": "user", "content": None}]])
def test_rows_without_questions_share_nothing(tmp_path: Path, messages: Any) -> None:
    assert listed(tmp_path, TEXT).shared(messages) == ""


def test_words_are_runs_of_letters_and_digits_of_any_script() -> None:
    assert split_words("Où est l'été? — В 3 часа, 東京!") == [
        "où",
        "est",
        "l",
        "été",
        "в",
        "3",
        "часа",
        "東",
        "京",
    ]


def test_a_held_out_text_in_a_script_without_spaces_is_found(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text(
        "潮の満ち引きはなぜ起こるのか、子どもに説明してください。\n", encoding="utf-8"
    )
    listed = read_held_out(tmp_path / "list.txt")
    asked = {
        "role": "user",
        "content": "質問です。潮の満ち引きはなぜ起こるのか、子どもに説明してください。",
    }
    assert listed.shared([asked])
    assert not listed.shared(
        [asked | {"content": "東京の天気について短い詩を書いてください。お願いします。"}]
    )


def test_a_text_of_n_words_has_n_less_twelve_runs() -> None:
    words = [str(n) for n in range(20)]
    assert len(word_runs(words)) == 8
    assert word_runs(words[:12]) == []
    assert word_runs(words)[7].split() == words[7:]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": TEXT},
        {"messages": asks("Hello there, my friend", TEXT)},
        {"turns": [TEXT]},
        {"conversations": [{"from": "human", "value": TEXT}]},
    ],
    ids=["prompt", "messages", "turns", "conversations"],
)
def test_a_list_may_be_prompts_of_any_kind(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "benchmark.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert read_held_out(path).shared(asks(TEXT)) != ""


def test_what_assistants_say_in_the_list_is_not_on_it(tmp_path: Path) -> None:
    path = tmp_path / "benchmark.jsonl"
    row = {"messages": [*asks("What is 12 times 13?"), *asks(TEXT, role="assistant")]}
    path.write_text(json.dumps(row) + "\n")
    assert read_held_out(path).shared(asks(TEXT)) == ""


@pytest.mark.parametrize("content", [b"", b"\n\n", b"Hi\nHow are you?\n"])
def test_a_list_that_could_match_nothing_stops(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "listed.txt"
    path.write_bytes(content)
    with pytest.raises(StepError, match="the held-out list is empty") as stopped:
        read_held_out(path)
    assert "audit.decontaminate: null" in stopped.value.remedy


def test_a_list_that_cannot_be_read_stops_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"audit\.decontaminate: .*absent\.txt"):
        read_held_out(tmp_path / "absent.txt")
    path = tmp_path / "latin.txt"
    path.write_bytes("Où est l'été dernier".encode("latin-1"))
    with pytest.raises(StepError, match="the held-out list cannot be read"):
        read_held_out(path)


def test_a_row_that_is_no_prompt_stops_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "benchmark.jsonl"
    path.write_text(json.dumps({"prompt": TEXT}) + '\n{"answer": 42}\n')
    with pytest.raises(StepError, match=r"benchmark\.jsonl, line 2"):
        read_held_out(path)
