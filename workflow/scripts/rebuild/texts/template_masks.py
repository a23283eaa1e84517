"""Token ids of answers that came as text alone, by the chat template: exact and verified, or refused with the reason.

An answer's place in the rendering is where that of its prompt, generation prompt included, ends. Prompt and answer are
tokenized apart, as a server does that first reads the one and then samples the other, so the cut is between tokens
wherever a tokenizer would merge across it. What the template makes of the answer must be the answer, character by
character; between thought and answer it may put white space and the end marker.

Two things no text tells: the white space that a server's parsers left out, which is as the template writes it, and
whether a tool call came out of a thought that was still open, which is taken as closed.
"""

import json
import unicodedata
from dataclasses import dataclass
from typing import Any, NamedTuple

from rebuild.generate.conversation import answer_message
from rebuild.texts.template_checks import (
    ENDED,
    SHOWN,
    Row,
    UnstableError,
    check_calls,
    check_said,
    first_difference,
    said_text,
)
from rebuild.tokens.chat import (
    THINK_START,
    Message,
    UnrenderableError,
    apply_template,
    stop_ids,
    to_chat_messages,
)

PROBE = "dflashprobe"


class Ids(NamedTuple):
    """The ids of a prompt, generation prompt included, and of its answer up to its stop token or where it was cut."""

    prompt: list[int]
    response: list[int]


class Texts(NamedTuple):
    """What a prompt and its answer are tokenized from; `ends` says whether a stop token is the last of the answer."""

    prompt: str
    response: str
    ends: bool


@dataclass(frozen=True)
class Template:
    """A model's chat template with its arguments; `ends` are the stop tokens' texts, `special` those that text must not spell."""

    tokenizer: Any
    arguments: dict[str, Any]
    stops: frozenset[int]
    ends: tuple[str, ...]
    special: frozenset[str]

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, *, prompt: bool
    ) -> str:
        """Return a conversation's text, as a prompt with what opens the answer.

        Raises:
            UnrenderableError: the template refuses it, or the server would.
        """
        how = {"add_generation_prompt": prompt, "tokenize": False}
        return str(apply_template(self.tokenizer, messages, tools, self.arguments | how))

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of every text as a server makes them; the tokenizer uses all its threads."""
        encoded = self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, special tokens included."""
        return str(
            self.tokenizer.decode(
                ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )


def make_template(
    tokenizer: Any, arguments: dict[str, Any], eos_token_ids: list[int] | None = None
) -> Template:
    """Return the template of `tokenizer` with the arguments that the server gets; ids are the model's own end tokens."""
    stops = stop_ids(tokenizer, eos_token_ids or [])
    added = tokenizer.added_tokens_decoder
    ends = tuple(str(added[token]) for token in sorted(stops) if token in added)
    special = {str(token) for token in added.values() if token.special}
    return Template(tokenizer, arguments, stops, ends, frozenset([*special, *ends]))


def template_ids(rows: list[Row], template: Template) -> list[Ids | UnstableError]:
    """Return the ids of every row (messages, tools, reasoning, content, tool_calls, finish_reason, status), or why not."""
    texts = [texts_or_reason(row, template) for row in rows]
    good = [text for text in texts if isinstance(text, Texts)]
    encoded = iter(template.encode([part for text in good for part in text[:2]]) if good else [])
    found: list[Ids | UnstableError] = []
    for text in texts:
        if isinstance(text, Texts):
            ids = Ids(next(encoded), next(encoded))
            found.append(fault_of_ids(ids, text, template) or ids)
        else:
            found.append(text)
    return found


def texts_or_reason(row: Row, template: Template) -> Texts | UnstableError:
    """Return the texts of a row's prompt and answer, or why the template does not give them."""
    try:
        return answer_texts(row, template)
    except UnstableError as error:
        return error
    except UnrenderableError as error:
        return UnstableError("unrenderable", str(error))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        return UnstableError("unrenderable", f"no chat messages: {type(error).__name__}: {error}")


def answer_texts(row: Row, template: Template) -> Texts:
    """Return the texts of a row's prompt and answer.

    Raises:
        UnstableError, UnrenderableError: the template does not render the answer as it was.
    """
    check_said(row, template.special)
    history = to_chat_messages(row["messages"] or [])
    answer = to_chat_messages([answer_message(row)])
    tools = json.loads(row["tools"]) if row["tools"] else None
    if not history or history[-1]["role"] == "assistant":
        raise UnrenderableError("a prompt must end with a message that the model is to answer")
    prompt = template.render(history, tools, prompt=True)
    whole = template.render(history + answer, tools, prompt=False)
    body, end = answer_body(prompt, whole, template)
    plain, calls = body, answer[0].pop("tool_calls", [])
    if calls:
        without = template.render(history + answer, tools, prompt=False)
        plain, _ = answer_body(prompt, without, template)
        check_calls(body, plain, calls)
    said = said_text(plain, row, thought_open=prompt.rstrip().endswith(THINK_START))
    if row["finish_reason"] not in ENDED:
        return Texts(prompt, said, False)
    return Texts(prompt, said + body[len(plain) :] + end, True)


def answer_body(prompt: str, whole: str, template: Template) -> tuple[str, str]:
    """Return what follows the prompt up to the stop token that ends it, and that token; white space may come after it.

    Raises:
        UnstableError: the whole does not begin with the prompt, or has no such end.
    """
    if not whole.startswith(prompt):
        raise UnstableError("history_rewritten", first_difference(prompt, whole))
    rest = whole[len(prompt) :].rstrip()
    end = next((text for text in template.ends if rest.endswith(text)), None)
    if end is None:
        raise UnstableError("no_end_marker", f"{rest[-SHOWN:]!r}, expected {template.ends}")
    return rest.removesuffix(end), end


def fault_of_ids(ids: Ids, texts: Texts, template: Template) -> UnstableError | None:
    """Return what is wrong with ids, or None: they must decode to their text, and stop only at the end.

    Text is compared in NFC, which some tokenizers make of it. What a tokenizer loses of the prompt (bytes that it does not
    know), it loses in the server too; the answer must come back whole, where it follows its prompt.
    """
    seen = nfc(template.decode(ids.prompt + ids.response))
    expected = nfc(texts.prompt + texts.response)
    if seen != expected:
        expected = nfc(template.decode(ids.prompt) + texts.response)
    if seen != expected:
        return UnstableError("not_reversible", first_difference(expected, seen))
    stops = [place for place, token in enumerate(ids.response) if token in template.stops]
    if stops != ([len(ids.response) - 1] if texts.ends else []):
        return UnstableError("special_token", f"stop tokens at {stops} of {len(ids.response)} ids")
    return None


def nfc(text: str) -> str:
    """Return text with its accents composed."""
    return unicodedata.normalize("NFC", text)


def injected_system(template: Template) -> str:
    """Return what the template writes ahead of a first user message and no message holds, empty if nothing.

    It is what precedes the first user message and not a later one, special tokens apart: a default system prompt, say.
    """
    question, answer = {"role": "user", "content": PROBE}, {"role": "assistant", "content": "."}
    try:
        first = template.render([question], None, prompt=False)
        later = template.render([question, answer, question], None, prompt=False)
    except UnrenderableError:
        return ""
    ahead, header = first[: first.rfind(PROBE)], later[: later.rfind(PROBE)]
    while ahead and header and ahead[-1] == header[-1]:
        ahead, header = ahead[:-1], header[:-1]
    for token in template.special:
        ahead = ahead.replace(token, "")
    return ahead.strip()
