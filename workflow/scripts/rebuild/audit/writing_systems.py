"""Which script a text is written in: a simple way to see an answer in another language than its question."""

import numpy as np

FEWEST_LETTERS = 20
FOREIGN = (
    0.1  # an answer with less than this share of the question's script is written in another one
)

# First code points of the blocks that hold letters, each with its script ("" for none); Unicode 16, Blocks.txt.
BLOCKS = (
    (0x0000, ""),
    (0x0041, "Latin"),
    (0x005B, ""),
    (0x0061, "Latin"),
    (0x007B, ""),
    (0x00C0, "Latin"),
    (0x0250, ""),
    (0x0370, "Greek"),
    (0x0400, "Cyrillic"),
    (0x0530, "Armenian"),
    (0x0590, "Hebrew"),
    (0x0600, "Arabic"),
    (0x0700, ""),
    (0x0900, "Devanagari"),
    (0x0980, "Indic"),
    (0x0E00, "Thai"),
    (0x0E80, ""),
    (0x10A0, "Georgian"),
    (0x1100, "Hangul"),
    (0x1200, ""),
    (0x1E00, "Latin"),
    (0x1F00, "Greek"),
    (0x2000, ""),
    (0x3040, "Han and Kana"),
    (0x3100, ""),
    (0x3400, "Han and Kana"),
    (0xA000, ""),
    (0xAC00, "Hangul"),
    (0xD7B0, ""),
    (0xF900, "Han and Kana"),
    (0xFB00, ""),
    (0x20000, "Han and Kana"),
    (0x323B0, ""),
)
STARTS = np.array([start for start, _ in BLOCKS], dtype=np.uint32)
SCRIPTS = tuple(dict.fromkeys(script for _, script in BLOCKS if script))
BLOCK_SCRIPT = np.array([SCRIPTS.index(name) if name else len(SCRIPTS) for _, name in BLOCKS])


def count_scripts(text: str) -> dict[str, int]:
    """Return the number of letters of each script in a text, none of those that do not occur."""
    points = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
    blocks = np.searchsorted(STARTS, points, side="right") - 1
    counts = np.bincount(BLOCK_SCRIPT[blocks], minlength=len(SCRIPTS) + 1)
    return {name: int(n) for name, n in zip(SCRIPTS, counts, strict=False) if n}


def other_script(question: str, answer: str) -> str | None:
    """Return e.g. "Latin, asked in Cyrillic" for an answer in another script than its question; None if not or unclear.

    Unclear are texts of fewer than 20 letters.
    """
    asked, said = count_scripts(question), count_scripts(answer)
    if min(sum(asked.values()), sum(said.values())) < FEWEST_LETTERS:
        return None
    main, own = max(asked, key=asked.__getitem__), max(said, key=said.__getitem__)
    if said.get(main, 0) >= FOREIGN * sum(said.values()):
        return None
    return f"{own}, asked in {main}"
