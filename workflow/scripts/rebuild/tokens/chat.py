"""Conversations as token ids: exactly the ids that the server makes of the same request, and where a thought ends.

The rules are those of SGLang 0.5.23 (srt/entrypoints/openai: serving_chat.py `_apply_jinja_template`, protocol.py).
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import orjson
from jinja2 import TemplateError
from tokenizers import Tokenizer

from rebuild.errors import StepError
from rebuild.tokens.tool_types import standardize_types

Message = dict[str, Any]

SENT_KEYS = ("role", "content", "tool_call_id", "name", "reasoning_content", "tool_calls")
FUNCTION_KEYS = ("description", "name", "parameters")
MARKERS_THAT_STOP = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
THINK_END = "</think>"
THINK_START = "<think>"
PRESERVE = "preserve_thinking"  # Qwen3.6's name for keeping past thoughts in the history


class UnrenderableError(ValueError):
    """The chat template or the server refuses this one conversation; the others are not affected."""


def load_tokenizer(model_path: Path, trust_remote_code: bool) -> Any:
    """Return the model's tokenizer, which cuts text as its own tokenizer.json says.

    Raises:
        StepError: it cannot be loaded without code from the model, is not there, or has no chat template.
    """
    from transformers import AutoTokenizer  # half a gigabyte, only for those who load one

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise StepError(
            "the model's tokenizer cannot be loaded",
            where=str(model_path),
            expected="tokenizer.json and tokenizer_config.json",
            seen=f"{type(error).__name__}: {error}",
            remedy="take the tokenizer files that the model was published with; if it needs code from the model that "
            "you have read and trust, set model.trust_remote_code: true",
        ) from error
    restore_components(tokenizer, model_path / "tokenizer.json")
    if not tokenizer.chat_template:
        raise StepError(
            "the model has no chat template: it cannot answer conversations",
            where=str(model_path),
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            seen="neither",
            remedy="use the instruction-tuned model, or put its chat_template.jinja beside the weights",
        )
    return tokenizer


def restore_components(tokenizer: Any, tokenizer_json: Path) -> None:
    """Undo what some classes of transformers 5 do: put their own pre-tokenizer over the one in tokenizer.json.

    The server does the same (hf_transformers/tokenizer.py `_fix_v5_tokenizer_components`); DeepSeek's distilled models
    are among those that need it.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not tokenizer_json.is_file():
        return
    own = Tokenizer.from_file(str(tokenizer_json))
    both = own.pre_tokenizer is not None and backend.pre_tokenizer is not None
    if both and type(own.pre_tokenizer) is not type(backend.pre_tokenizer):
        backend.pre_tokenizer = own.pre_tokenizer
        backend.decoder = own.decoder


def template_sha256(tokenizer: Any) -> str:
    """Return the hash of the chat template, or of all of them where there are several by name."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def to_chat_messages(rows: list[Message]) -> list[Message]:
    """Return the messages of a Parquet row as OpenAI-compatible servers take them: no empty keys, tool calls parsed."""
    messages = []
    for row in rows:
        message = {key: value for key, value in row.items() if value is not None}
        if "tool_calls" in message:
            message["tool_calls"] = json.loads(message["tool_calls"])
        messages.append(message)
    return messages


def render_prompt(
    tokenizer: Any,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    template_kwargs: dict[str, Any],
) -> list[int]:
    """Return the prompt's ids, ending where the assistant's answer begins: the server's own for this request.

    Raises:
        UnrenderableError: the template refuses the conversation, or the server would.
    """
    if not messages or messages[-1]["role"] == "assistant":
        raise UnrenderableError("a prompt must end with a message that the model is to answer")
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    ids = apply_template(tokenizer, messages, tools, template_kwargs | how)
    return [int(token) for token in ids]


def apply_template(
    tokenizer: Any,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    arguments: dict[str, Any],
) -> Any:
    """Return what the chat template makes of a conversation, `arguments` saying whether text or ids.

    Raises:
        UnrenderableError: the template refuses the conversation, or the server would.
    """
    try:
        return tokenizer.apply_chat_template(
            [template_message(message) for message in messages],
            tools=[template_tool(tool) for tool in tools] if tools else None,
            **arguments,
        )
    except (TemplateError, TypeError, KeyError) as error:
        raise UnrenderableError(f"{type(error).__name__}: {error}") from error


def template_arguments(given: dict[str, Any], *, keep_reasoning: bool) -> dict[str, Any]:
    """Return the chat template's arguments: those given, and the one that keeps the thoughts of earlier answers."""
    return given | ({PRESERVE: True} if keep_reasoning else {})


def template_message(message: Message) -> Message:
    """Return a message as the server hands it to the template.

    It knows only certain keys (of a user message only two), drops those without a value, takes absent content as
    empty text, and turns the arguments of tool calls from JSON text into an object.

    Raises:
        UnrenderableError: a tool call's arguments are no JSON object; the server answers 400.
    """
    keys = SENT_KEYS[:2] if message["role"] == "user" else SENT_KEYS
    kept = {key: message[key] for key in keys if message.get(key) is not None}
    kept.setdefault("content", "")
    if "tool_calls" in kept:
        kept["tool_calls"] = [template_call(call) for call in kept["tool_calls"]]
    return kept


def template_call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call as the template sees it: every field of the server's model, arguments as an object."""
    arguments = call["function"].get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise UnrenderableError(f"a tool call's arguments are not JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise UnrenderableError("a tool call's arguments are not a JSON object")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": call["function"].get("name"), "arguments": arguments},
    }


def template_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as the server writes it into the prompt.

    Of the function only known keys stay, as given and in their order; absent ones follow as null. Types in the
    parameters that JSON Schema does not know are renamed. Templates print the whole object, so each detail is in the ids.
    """
    given = tool["function"]
    late = given.get("defer_loading", tool.get("defer_loading"))
    known = {key: given.get(key) for key in FUNCTION_KEYS}
    known["parameters"] = standardize_types(known["parameters"])
    optional = {"strict": given.get("strict"), "defer_loading": late}
    known |= {key: value for key, value in optional.items() if value is not None}
    order = [key for key in given if key in known] + [key for key in known if key not in given]
    return {
        "type": tool.get("type", "function"),
        "function": {key: known[key] for key in order},
        "defer_loading": tool.get("defer_loading"),
    }


def stop_ids(tokenizer: Any, eos_token_ids: list[int]) -> frozenset[int]:
    """Return the ids at which the server ends an answer: the manifest's, the tokenizer's, and known end markers."""
    added = tokenizer.get_added_vocab()
    markers = [added[text] for text in MARKERS_THAT_STOP if text in added]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset([*eos_token_ids, *own, *markers])


def token_id(tokenizer: Any, text: str) -> int | None:
    """Return the id of a token such as `</think>` (THINK_END), None where the vocabulary has no such token."""
    found = tokenizer.get_vocab().get(text)
    return None if found is None else int(found)


def split_reasoning(
    response_ids: list[int], think_end_id: int | None
) -> tuple[list[int], list[int]] | None:
    """Split an answer whose prompt left a thought open at its first `</think>`, which belongs to neither part.

    Returns None while the thought is not closed.
    """
    if think_end_id is None or think_end_id not in response_ids:
        return None
    end = response_ids.index(think_end_id)
    return response_ids[:end], response_ids[end + 1 :]
