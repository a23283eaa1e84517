"""File names that carry a sample's id, for formats that leave names free."""

import hashlib
from urllib.parse import quote

LONGEST_STEM = 200  # bytes; most file systems allow 255, and the temporary file's name is longer


def file_name(sample_id: str, suffix: str) -> str:
    """Return the file's name for a sample: its id, percent-encoded where it is not plainly safe, and the suffix.

    Different ids give different names, none of which starts with a dot or leaves the folder. A long one ends in
    `%~` and the id's hash, which no encoded id contains.
    """
    stem = quote(sample_id, safe="", errors="surrogatepass")
    if stem.startswith("."):
        stem = "%2E" + stem[1:]
    if len(stem) > LONGEST_STEM:
        mark = "%~" + hashlib.sha256(sample_id.encode("utf-8", "surrogatepass")).hexdigest()
        stem = stem[: LONGEST_STEM - len(mark)] + mark
    return stem + suffix
