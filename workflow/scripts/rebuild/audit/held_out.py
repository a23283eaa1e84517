"""A list of texts that no prompt may share, such as the benchmark that the drafter is going to be measured on.

Shared means a run of 13 words, as in the GPT-3 paper (Brown et al. 2020, appendix C); a shorter text as a whole.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rebuild.errors import StepError
from rebuild.prompts.messages import conversation_entries, kept_messages
from rebuild.prompts.refusal import Refusal
from rebuild.prompts.rows import read_rows

WORDS = 13
FEWEST = 4  # words; "Hello!" is no sign of anything
# Scripts without spaces between words have each of their characters for a word.
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")


@dataclass(frozen=True)
class HeldOut:
    """The 13-word runs of the listed texts, and the texts that are shorter than that."""

    runs: frozenset[str]
    short: frozenset[str]

    def shared(self, messages: list[dict[str, Any]] | None) -> str:
        """Return what the user's messages share with the list, "" for nothing."""
        for message in messages or []:
            if message["role"] != "user":
                continue
            words = split_words(message["content"] or "")
            whole = " ".join(words)
            if whole in self.short:
                return whole
            found = next((run for run in word_runs(words) if run in self.runs), "")
            if found:
                return found
        return ""


def read_held_out(path: Path) -> HeldOut:
    """Return the list in a file: one text a line (.txt), or prompts of any kind that `prompts.path` takes.

    Raises:
        StepError: it cannot be read, a row is no prompt, or nothing is in it.
    """
    texts = read_lines(path) if path.suffix == ".txt" else read_prompts(path)
    runs: set[str] = set()
    short: set[str] = set()
    for text in texts:
        words = split_words(text)
        runs.update(word_runs(words))
        if FEWEST <= len(words) < WORDS:
            short.add(" ".join(words))
    if not runs and not short:
        raise StepError(
            "the held-out list is empty, so nothing could be found to be on it",
            where=f"audit.decontaminate: {path}",
            expected=f"texts of at least {FEWEST} words",
            seen=f"{len(texts)} rows",
            remedy="name the right file, or set audit.decontaminate: null",
        )
    return HeldOut(frozenset(runs), frozenset(short))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file.

    Raises:
        StepError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StepError(
            "the held-out list cannot be read",
            where=f"audit.decontaminate: {path}",
            expected="a text file in UTF-8, one text a line",
            seen=f"{type(error).__name__}: {error}",
        ) from error


def read_prompts(path: Path) -> list[str]:
    """Return what users say in a file of prompts.

    Raises:
        StepError: a row is no prompt.
    """
    texts = []
    for row in read_rows(path):
        try:
            messages = kept_messages(conversation_entries(row.columns())[1])
        except Refusal as refusal:
            raise StepError(
                "a row of the held-out list is no prompt: what it holds would not be looked for",
                where=f"audit.decontaminate: {path}, {row.file}, line {row.line}",
                expected="rows as prompts.path takes them (messages, turns, prompt), or a .txt file",
                seen=f"{refusal}: {row.excerpt()}",
                remedy="mend or remove the row",
            ) from refusal
        texts += [message["content"] for message in messages if message["role"] == "user"]
    return texts


def split_words(text: str) -> list[str]:
    """Return the words of a text, lower case, without punctuation."""
    return WORD.findall(text.lower())


def word_runs(words: list[str]) -> list[str]:
    """Return every run of 13 words."""
    return [" ".join(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)]
