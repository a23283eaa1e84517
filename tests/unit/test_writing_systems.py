"""Scripts of texts, held against the names that Unicode gives to letters."""

import unicodedata
from collections import Counter

import pytest

from rebuild.audit.writing_systems import BLOCKS, FEWEST_LETTERS, count_scripts, other_script

INDIC = "BENGALI GURMUKHI GUJARATI ORIYA TAMIL TELUGU KANNADA MALAYALAM SINHALA"
NAMES = {
    "Latin": {"LATIN"},
    "Greek": {"GREEK", "COPTIC"},
    "Han and Kana": {"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"},
    "Indic": set(INDIC.split()),
}
SAMPLES = {
    "Latin": "Zażółć gęślą jaźń, Việt Nam, Übergröße",
    "Greek": "Πού είναι ο σταθμός; ᾿Αθῆναι",
    "Cyrillic": "Где находится вокзал, ґанок?",
    "Armenian": "Որտեղ է կայարանը",
    "Hebrew": "איפה תחנת הרכבת",
    "Arabic": "أين محطة القطار، کجاست",
    "Devanagari": "स्टेशन कहाँ है",
    "Indic": "நிலையம் எங்கே স্টেশন",
    "Thai": "สถานีอยู่ที่ไหน",
    "Georgian": "სად არის სადგური",
    "Hangul": "역이 어디에 있습니까",
    "Han and Kana": "駅はどこですか、カフェ、车站在哪里",
}
ENGLISH = "The station is behind the old town hall."
RUSSIAN = "Вокзал находится за старой ратушей."


@pytest.mark.parametrize("script", SAMPLES)
def test_a_text_is_of_the_script_that_it_is_written_in(script: str) -> None:
    assert set(count_scripts(SAMPLES[script])) == {script}


def test_every_letter_is_of_the_script_that_its_unicode_name_says() -> None:
    letters = Counter()
    for point in [*range(0x3000), *range(0x3040, 0xD7A4), *range(0x20000, 0x20100)]:
        name = unicodedata.name(chr(point), "").split(" ")[0]
        if unicodedata.category(chr(point)) not in ("Lu", "Ll", "Lo"):
            continue
        for script in count_scripts(chr(point)):
            letters[script] += 1
            assert name in NAMES.get(script, {script.upper()}), f"U+{point:04X} is {name}"
    assert set(letters) == {script for _, script in BLOCKS if script}


def test_digits_signs_and_emoji_are_of_no_script() -> None:
    assert count_scripts("12 + 34 = 46 €, 🦦 – «…» ½ ①\n\t") == {}
    assert count_scripts("") == {}


def test_letters_are_counted_one_by_one_and_accents_not_at_all() -> None:
    assert count_scripts("Cafe\u0301 и 東京") == {"Latin": 4, "Cyrillic": 1, "Han and Kana": 2}


def test_half_of_a_surrogate_pair_is_no_letter() -> None:
    assert count_scripts("a\ud800b") == {"Latin": 2}


def test_an_answer_in_another_script_is_told_in_words() -> None:
    assert other_script(ENGLISH, RUSSIAN) == "Cyrillic, asked in Latin"
    assert other_script(RUSSIAN, ENGLISH) == "Latin, asked in Cyrillic"
    assert other_script("駅はどこですか。" * 4, RUSSIAN) == "Cyrillic, asked in Han and Kana"


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (ENGLISH, ENGLISH),
        (ENGLISH, f"{ENGLISH} «{RUSSIAN}»"),
        (ENGLISH, f"{RUSSIAN} {RUSSIAN} means: {ENGLISH}"),
        ("Где вокзал?", ENGLISH),  # too few letters to tell
        (RUSSIAN, "OK."),
        (RUSSIAN, "12345 " * 20),
        ("", ENGLISH),
        (f"Translate: {RUSSIAN} {ENGLISH}", ENGLISH),
    ],
)
def test_answers_that_are_in_the_questions_script_or_unclear_are_not_told(
    question: str, answer: str
) -> None:
    assert other_script(question, answer) is None


def test_a_tenth_of_the_questions_script_is_enough() -> None:
    assert other_script("a" * 20, "я" * 90 + "a" * 10) is None
    assert other_script("a" * 20, "я" * 91 + "a" * 10) == "Cyrillic, asked in Latin"


def test_twenty_letters_are_the_fewest_that_are_judged() -> None:
    assert other_script("a" * FEWEST_LETTERS, "я" * FEWEST_LETTERS) is not None
    assert other_script("a" * FEWEST_LETTERS, "я" * (FEWEST_LETTERS - 1)) is None
    assert other_script("a" * (FEWEST_LETTERS - 1), "я" * FEWEST_LETTERS) is None
