"""The prompts that are rendered here are, id for id, those that the real server answers."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from rebuild.tokens.chat import load_tokenizer, render_prompt, to_chat_messages
from tests.support.conversations import CONVERSATIONS, UNUSUAL_TOOLS, WEATHER

TOOLS: dict[str, list[dict[str, Any]]] = {
    "without tools": [],
    "with tools": [WEATHER, *UNUSUAL_TOOLS],
}
QWEN_KWARGS: dict[str, dict[str, Any]] = {
    "thinking": {},
    "without thinking": {"enable_thinking": False},
    "with past thoughts": {"preserve_thinking": True},
}
IN_FLIGHT = 8


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_server: Any) -> Any:
    return load_tokenizer(smollm2_server.model_path, trust_remote_code=False)


@pytest.fixture(scope="module")
def qwen36_tokenizer(qwen36_server: Any) -> Any:
    return load_tokenizer(qwen36_server.model_path, trust_remote_code=False)


def served_ids(server: Any, request: dict[str, Any]) -> list[int]:
    """Ask for one token and return the ids of the prompt that the server made of the request."""
    settings = {"model": server.model_name, "max_tokens": 1, "return_token_ids": True}
    reply = requests.post(f"{server.url}/v1/chat/completions", json=request | settings, timeout=300)
    assert reply.status_code == 200, reply.text
    ids: list[int] = reply.json()["choices"][0]["prompt_token_ids"]
    return ids


def assert_same_rendering(
    server: Any, tokenizer: Any, tools: list[dict[str, Any]], template_kwargs: dict[str, Any]
) -> None:
    """Compare every conversation, first as text, so that a difference can be read."""
    messages = [to_chat_messages(rows) for rows in CONVERSATIONS.values()]
    requests_made = [
        {"messages": m, "chat_template_kwargs": template_kwargs}
        | ({"tools": tools} if tools else {})
        for m in messages
    ]
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        served = list(pool.map(lambda request: served_ids(server, request), requests_made))
    for name, message, theirs in zip(CONVERSATIONS, messages, served, strict=True):
        ours = render_prompt(tokenizer, message, tools, template_kwargs)
        assert tokenizer.decode(ours) == tokenizer.decode(theirs), name
        assert ours == theirs, name


@pytest.mark.parametrize("tools", TOOLS)
def test_smollm2_prompts_equal_the_servers(
    smollm2_server: Any, smollm2_tokenizer: Any, tools: str
) -> None:
    assert_same_rendering(smollm2_server, smollm2_tokenizer, TOOLS[tools], {})


@pytest.mark.parametrize("template_kwargs", QWEN_KWARGS)
@pytest.mark.parametrize("tools", TOOLS)
def test_qwen36_prompts_equal_the_servers(
    qwen36_server: Any, qwen36_tokenizer: Any, tools: str, template_kwargs: str
) -> None:
    assert_same_rendering(
        qwen36_server, qwen36_tokenizer, TOOLS[tools], QWEN_KWARGS[template_kwargs]
    )
