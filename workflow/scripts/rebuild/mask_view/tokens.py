"""Token ids as the bytes that each of them stands for, for people to look at.

A token need not be whole characters, so it has no text of its own: `tokenizer.decode` of one id shows U+FFFD, and hides
which byte it was.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rebuild.mask_view.text import Token

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's byte fallback
SPACE = "▁"  # SentencePiece's


def byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of GPT-2's byte-level alphabet.

    Printable bytes of Latin-1 stand for themselves, the others in their order for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


ALPHABET = byte_alphabet()


@dataclass(frozen=True)
class Vocabulary:
    """What is needed of a tokenizer: its added tokens by id, how many ids it has, and how it writes bytes."""

    tokenizer: Any
    added: dict[int, str]
    size: int
    byte_level: bool


def read_vocabulary(tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a transformers tokenizer, fast or slow."""
    added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    size = max(len(tokenizer), max(added, default=-1) + 1)
    return Vocabulary(tokenizer, added, size, tokenizer.convert_tokens_to_string(["Ġ"]) == " ")


def to_tokens(
    vocabulary: Vocabulary, ids: Sequence[int | None], mask: Sequence[int | None]
) -> list[Token]:
    """Return the tokens of a row; where the mask is too short they are context, where it is too long nothing is.

    All added tokens (`<think>` among them) and ids that the vocabulary does not have are special.
    """
    known = {number: id_bytes(vocabulary, number) for number in set(ids)}
    return [
        to_token(vocabulary, number, known[number], flag == 1)
        for number, flag in zip_longest(ids, mask[: len(ids)])
    ]


def to_token(
    vocabulary: Vocabulary, number: int | None, raw: bytes | None, supervised: bool
) -> Token:
    """Return one token; an id without bytes is shown as a number."""
    if raw is None:
        return Token(f"<id {number}>".encode(), supervised, special=True)
    return Token(raw, supervised, special=number in vocabulary.added)


def unknown_ids(vocabulary: Vocabulary, ids: Sequence[int | None]) -> list[int | None]:
    """Return the ids of a row that the vocabulary does not have, each once, in their order."""
    return [number for number in dict.fromkeys(ids) if id_bytes(vocabulary, number) is None]


def id_bytes(vocabulary: Vocabulary, number: int | None) -> bytes | None:
    """Return the bytes that an id stands for, None if there is no such id."""
    if number is None or not 0 <= number < vocabulary.size:
        return None
    if number in vocabulary.added:
        return vocabulary.added[number].encode("utf-8", "surrogatepass")
    (piece,) = vocabulary.tokenizer.convert_ids_to_tokens([number])
    return None if piece is None else piece_bytes(piece, vocabulary.byte_level)


def piece_bytes(piece: str, byte_level: bool) -> bytes:
    """Return the bytes of a token as vocabularies write it: in the byte-level alphabet, or in SentencePiece's way."""
    if byte_level and all(character in ALPHABET for character in piece):
        return bytes(ALPHABET[character] for character in piece)
    if match := BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE, " ").encode("utf-8", "surrogatepass")
