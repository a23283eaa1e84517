"""A training row as text for people: supervised tokens, context and special tokens told apart, nothing of it executable.

Pure: tokens in, text out. `mask_view_tokens` makes tokens of ids, `mask_view_page` has the page for browsers.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

ABOUT = ["source", "finish_reason", "mask_origin", "seq_len"]
EDGE = 60  # tokens of a long stretch of context that are shown at either end

RESET = "\x1b[0m"
SUPERVISED, SUPERVISED_SPECIAL = "\x1b[32m", "\x1b[1;7;32m"
CONTEXT, CONTEXT_SPECIAL = "\x1b[2m", "\x1b[7m"
LEFT_OUT, FAULT, HEADING = "\x1b[33m", "\x1b[1;31m", "\x1b[1m"

# Without colours these stand for them; where they occur in the text itself they are escaped.
BRACKETS = "⟦⟧‹›"

VISIBLE = {"\n": "⏎\n", "\t": "⇥\t"}
HIDDEN = {
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
}  # controls, format characters (bidi, zero width), separators
JOINERS = {"\u200c", "\u200d"}  # parts of words and of emoji


@dataclass(frozen=True)
class Token:
    """One token: its bytes, which need be no whole characters, and whether it is supervised, and special."""

    raw: bytes
    supervised: bool
    special: bool = False


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens that look alike, as text that can be shown; `left_out` ones are only counted."""

    text: str
    tokens: int
    supervised: bool
    special: bool = False
    left_out: bool = False


@dataclass(frozen=True)
class View:
    """What is shown of one sample: its name, the facts about it by name, what is wrong with it, and its text."""

    sample_id: str
    facts: dict[str, str]
    faults: list[str]
    segments: list[Segment]


def view_sample(row: dict[str, Any], tokens: Sequence[Token], *, whole: bool = False) -> View:
    """Return the view of a row of a tokenized table; long stretches of context are shortened unless `whole`."""
    runs = supervised_runs(tokens)
    supervised = sum(end - start for start, end in runs)
    facts = {name: one_line(row.get(name)) for name in ABOUT}
    facts["supervised"] = f"{supervised} of {len(tokens)} tokens, {runs_in_words(runs)}"
    shown = segments(tokens, None if whole else EDGE)
    return View(one_line(row.get("sample_id")), facts, find_faults(row, supervised), list(shown))


def find_faults(row: dict[str, Any], supervised: int) -> list[str]:
    """Return, in words, where ids, mask and lengths of a row contradict each other."""
    ids, mask = row["input_ids"] or [], row["loss_mask"] or []
    odd = [value for value in mask if value not in (0, 1)]
    faults = []
    if len(ids) != len(mask):
        faults.append(f"{len(ids)} ids, but {len(mask)} mask values")
    if odd:
        faults.append(f"{len(odd)} mask values are neither 0 nor 1, the first of them {odd[0]}")
    if row.get("seq_len", len(ids)) != len(ids):
        faults.append(f"seq_len is {row['seq_len']}, but there are {len(ids)} ids")
    if row.get("loss_tokens", supervised) != supervised:
        faults.append(f"loss_tokens is {row['loss_tokens']}, but {supervised} are supervised")
    return faults


def supervised_runs(tokens: Sequence[Token]) -> list[tuple[int, int]]:
    """Return the runs of neighbouring supervised tokens: first position, and the one after the last."""
    flags = [False, *(token.supervised for token in tokens), False]
    edges = [at for at in range(len(flags) - 1) if flags[at] != flags[at + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def runs_in_words(runs: Sequence[tuple[int, int]], at_most: int = 8) -> str:
    """Return where the runs lie, positions counted from 0."""
    named = ", ".join(f"{start} to {end - 1}" for start, end in runs[:at_most])
    more = f" and {len(runs) - at_most} more" if len(runs) > at_most else ""
    return (
        f"in {len(runs)} runs: {named}{more}".replace("in 1 runs", "in 1 run") if runs else "no run"
    )


def segments(tokens: Sequence[Token], edge: int | None) -> Iterator[Segment]:
    """Yield the tokens as segments; of long stretches of context only `edge` tokens at either end, None for all."""
    for supervised, stretch in groupby(tokens, key=lambda token: token.supervised):
        run = list(stretch)
        head, tail = (0, 0) if edge is None else (whole_at(run, edge), whole_at(run, -edge))
        if supervised or edge is None or tail - head <= edge:
            yield from spoken(run)
        else:
            yield from spoken(run[:head])
            text = f"… {tail - head:,} tokens of context left out …"
            yield Segment(text, tail - head, supervised=False, left_out=True)
            yield from spoken(run[tail:])


def whole_at(run: Sequence[Token], cut: int) -> int:
    """Return the position of `cut` (negative: from the end) or one of the next three, where no character is cut apart."""
    start = min(cut, len(run)) if cut >= 0 else max(len(run) + cut, 0)
    inside = (at for at in range(start, min(start + 4, len(run))) if not continues(run[at]))
    return next(inside, start)


def continues(token: Token) -> bool:
    """Return whether a token begins in the middle of a character (a continuation byte of UTF-8)."""
    return bool(token.raw) and 0x80 <= token.raw[0] < 0xC0


def spoken(run: Sequence[Token]) -> Iterator[Segment]:
    """Yield tokens of one kind of mask: each special one by itself, the text between them as one."""
    for special, stretch in groupby(run, key=lambda token: token.special):
        part = list(stretch)
        for some in ([token] for token in part) if special else [part]:
            raw = b"".join(token.raw for token in some)
            text = visible(raw.decode("utf-8", "backslashreplace"))
            yield Segment(text, len(some), some[0].supervised, special)


def visible(text: str) -> str:
    """Return the text with line ends and tabs marked, and with all else that acts or hides written as an escape."""
    return text if text.isprintable() else "".join(map(visible_character, text))


def visible_character(character: str) -> str:
    """Return a character as it is shown; no terminal obeys it any more."""
    if character in VISIBLE:
        return VISIBLE[character]
    if unicodedata.category(character) in HIDDEN and character not in JOINERS:
        return character.encode("unicode_escape").decode()
    return character


def one_line(value: Any) -> str:
    """Return a value of a column as text on one line."""
    return "unknown" if value is None else visible(str(value)).replace("\n", "").replace("\t", "")


def terminal_text(view: View, *, colours: bool) -> str:
    """Return a sample for the terminal: a heading, and its text in colours, or with brackets in their place."""
    facts = list(view.facts.items())
    lines = [
        paint(f"── {view.sample_id} ──", HEADING if colours else ""),
        " · ".join(f"{name} {value}" for name, value in facts[:-1]),
        " ".join(facts[-1]),
        *(paint(f"! {fault}", FAULT if colours else "") for fault in view.faults),
    ]
    text = coloured(view.segments) if colours else bracketed(view.segments)
    return "\n".join([*lines, "", text, ""])


def coloured(shown: Iterable[Segment]) -> str:
    """Return segments in ANSI colours, which end with every line so that pagers keep them apart."""
    return "".join(paint(segment.text, colour(segment)) for segment in shown)


def colour(segment: Segment) -> str:
    """Return the escape sequence that a segment is painted with."""
    if segment.left_out:
        return LEFT_OUT
    if segment.supervised:
        return SUPERVISED_SPECIAL if segment.special else SUPERVISED
    return CONTEXT_SPECIAL if segment.special else CONTEXT


def paint(text: str, code: str) -> str:
    """Return the text with each of its lines painted; an empty code leaves it as it is."""
    if not code:
        return text
    return "\n".join(f"{code}{line}{RESET}" if line else "" for line in text.split("\n"))


def bracketed(shown: Iterable[Segment]) -> str:
    """Return segments without colours: ⟦supervised⟧, ‹special token›; such brackets of the text's own are escaped."""
    text = ""
    for supervised, run in groupby(shown, key=lambda segment: segment.supervised):
        inside = "".join(without_brackets(segment) for segment in run)
        text += f"⟦{inside}⟧" if supervised else inside
    return text


def without_brackets(segment: Segment) -> str:
    """Return a segment's text, in brackets if it is no text, with all brackets of its own escaped."""
    own = {ord(mark): mark.encode("unicode_escape").decode() for mark in BRACKETS}
    text = segment.text.translate(own)
    return f"‹{text}›" if segment.special or segment.left_out else text
