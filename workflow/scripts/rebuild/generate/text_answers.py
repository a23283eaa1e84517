"""What a reply without token ids is worth (`tokenize.allow_template`): an answer by its finish reason and its texts.

Where the server has a reasoning parser, its word counts; elsewhere the thought ends at the first `</think>` of the text.
A reply that lets both be true is no answer: ids and mask made of it later would be a guess.
"""

from rebuild.generate.answers import ANSWERED, Rendered, Row, failed
from rebuild.tokens.chat import THINK_END, THINK_START


def text_outcome(fields: Row, rendered: Rendered, *, thinks: bool) -> Row:
    """Return what a reply without ids decides: texts and status, or the error that disqualifies it.

    `thinks` says whether the model's vocabulary has think markers; elsewhere they are text like any other.
    """
    finish = fields["finish_reason"]
    if finish not in ANSWERED:
        return failed(f"finish_reason: {finish!r} is no answer")
    if finish == "tool_calls" and not fields["tool_calls"]:
        return failed("no_calls: finish_reason tool_calls, but no call came")
    if fields["prompt_tokens"] not in (None, rendered.length):
        return failed(
            f"prompt_tokens: the server counts {fields['prompt_tokens']}, we {rendered.length}: "
            "it does not render prompts as this model's chat template does"
        )
    texts = fields["reasoning"], fields["content"] or ""
    parts = split_text(*texts, rendered.thought_open) if thinks else texts
    if parts is None:
        return failed(
            "thought: the prompt opens one, and the reply neither holds it apart nor ends it; "
            "switch on the server's reasoning parser"
        )
    return said(fields, *parts)


def split_text(
    reasoning: str | None, content: str, thought_open: bool
) -> tuple[str | None, str] | None:
    """Return thought (None without one) and answer, both as they came; None where the text does not tell.

    A thought without an end has an empty answer.
    """
    if reasoning is not None:
        return reasoning, content
    opened = content.lstrip().startswith(THINK_START)
    if not opened and not thought_open:
        return None, content
    if not opened and THINK_END not in content:
        return None
    thought, _, answer = content.partition(THINK_END)
    return thought.lstrip().removeprefix(THINK_START) if opened else thought, answer


def said(fields: Row, thought: str | None, answer: str) -> Row:
    """Return texts and status of an answer, without the white space around a thought; one that only thinks is truncated."""
    status = ANSWERED[fields["finish_reason"]]
    if thought is not None:
        thought, answer = thought.strip(), answer.strip()
        status = status if answer or status == "tool_calls" else "truncated"
    return {
        "status": status,
        "reasoning": thought,
        "content": answer,
        "tool_calls": fields["tool_calls"] if status == "tool_calls" else None,
        "reasoning_tokens": None,
        "error": None,
    }
