"""Text and numbers as the report shows them: nothing invisible, nothing that a browser or terminal would act on."""

import re

from markupsafe import Markup

# Control characters but tab and line feed, halves of surrogate pairs, what turns the direction of text around, what
# ends lines for some programs only, and code points that are no characters.
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)


def visible(text: str) -> str:
    """Return `text` with every character that could not be seen, or would act, as its code point in ASCII."""
    return HIDDEN.sub(_code_point, text)


def _code_point(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shown(value: object) -> object:
    """Return what a template writes for a value: grouped digits, visible text; markup of our own as it is."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return grouped(value)
    return "" if value is None else visible(str(value))


def grouped(value: float) -> str:
    """Return a number with its thousands grouped and, if it is a fraction, four significant digits."""
    if isinstance(value, int) or (abs(value) >= 1000 and abs(value) < 1e15):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def compact(value: float) -> str:
    """Return a number of rows for an axis, in at most five characters."""
    for size, suffix in [(1e9, "G"), (1e6, "M"), (1e3, "k")]:
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:g}"


def token_edge(value: float) -> str:
    """Return a number of tokens for an axis; k is 1,024, as in the names of context lengths."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 512 == 0 else f"{value:g}"


def percent(part: float, whole: float) -> str:
    """Return `part` of `whole` in per cent; tiny and nearly full shares do not become 0 or 100."""
    if not whole:
        return "none"
    return percentage(part / whole)


def percentage(share: float) -> str:
    """Return a share (1 is everything) in per cent."""
    points = 100 * share
    if 0 < points < 0.95:
        text = f"{points:.2g}"
    elif 99.9 < points < 100:
        text = f"{points:.3f}"
    else:
        text = f"{points:.1f}".removesuffix(".0")
    return f"{text}\u202f%"


def duration(seconds: float) -> str:
    """Return a time in the unit that it is read best in: seconds, minutes, or hours."""
    if seconds < 60:
        return f"{seconds:.1f}\u202fs"
    if seconds < 3600:
        return f"{seconds / 60:.1f}\u202fmin"
    return f"{seconds / 3600:,.1f}\u202fh"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 shard, 2 shards."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
