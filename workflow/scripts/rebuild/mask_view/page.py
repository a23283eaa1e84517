"""Samples with their masks as one HTML page that needs nothing else: no script, no font, no network."""

from collections.abc import Iterable
from html import escape

from rebuild.mask_view.text import Segment, View

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1c1e21; --dim: #667078; --line: #d9dee3;
  --own: #0b5a2b; --own-back: #d8f3e0; --mark: #e8ebee; --fault: #a11; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181b; --text: #e6e9ec; --dim: #97a1aa; --line: #343a40;
    --own: #b6f2c9; --own-back: #173f28; --mark: #30363c; --fault: #ff9a9a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; margin: 0; font-size: .9rem; }
dt { color: var(--dim); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: 1rem 0; font: .875rem/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.context { color: var(--dim); }
.supervised { color: var(--own); background: var(--own-back); }
.special { font-weight: 700; border: 1px solid currentColor; border-radius: .2rem; padding: 0 .15rem; }
.context.special { background: var(--mark); }
.left-out { font-style: italic; background: var(--mark); padding: 0 .3rem; }
.fault { color: var(--fault); font-weight: 700; }
"""
LEGEND = (
    '<p><span class="supervised">trained on</span> · <span class="context">context</span> · '
    '<span class="context special">special token</span> · ⏎ end of a line · ⇥ tab · '
    "\\x1b, \\u202e: a byte or character that cannot be shown</p>"
)


def masks_page(title: str, views: Iterable[View]) -> str:
    """Return the page; all that comes from the data is escaped."""
    samples = "\n".join(map(sample_section, views))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{LEGEND}
{samples}
</body>
</html>
"""


def sample_section(view: View) -> str:
    """Return one sample: its name, the facts, what is wrong, and its text."""
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in view.facts.items()
    )
    faults = "".join(f'<p class="fault">{escape(fault)}</p>' for fault in view.faults)
    text = "".join(map(span, view.segments))
    # The line end behind <pre> is the one that HTML drops, so that the text keeps its own.
    return f"<section>\n<h2>{escape(view.sample_id)}</h2>\n<dl>{facts}</dl>\n{faults}<pre>\n{text}</pre>\n</section>"


def span(segment: Segment) -> str:
    """Return a segment in the look of its kind."""
    if segment.left_out:
        kinds = "left-out"
    else:
        kinds = "supervised" if segment.supervised else "context"
        kinds += " special" if segment.special else ""
    return f'<span class="{kinds}">{escape(segment.text)}</span>'
