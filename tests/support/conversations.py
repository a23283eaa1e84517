"""Conversations as rows of a Parquet file hold them: every kind that chat templates and tokenizers trip over."""

import json
from typing import Any

Message = dict[str, Any]

KEYS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


def row(role: str, content: str | None = None, **more: Any) -> Message:
    """Return one message with all columns, the absent ones None."""
    return dict.fromkeys(KEYS) | {"role": role, "content": content} | more


def call(name: str, arguments: Any, call_id: str | None = "call_0") -> dict[str, Any]:
    """Return a tool call as OpenAI-compatible clients write it."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für eine Stadt: °C, 風, <b>bold</b>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
            "required": ["city"],
        },
    },
}
UNUSUAL_TOOLS: list[dict[str, Any]] = [
    {"function": {"parameters": {"properties": {}, "type": "object"}, "name": "no_description"}},
    {"type": "function", "function": {"name": "only_a_name", "strict": True, "unknown": 1}},
    {
        "type": "function",
        "function": {
            "name": "typed_like_a_database",
            "parameters": {
                "type": "dict",
                "properties": {
                    "a": {"type": "varchar(255)"},
                    "b": {"type": ["int", "null", "integer"]},
                    "type": {"type": "list[str]", "items": {"type": "float"}},
                    "c": {"anyOf": [{"type": "str"}, {"type": "bool"}], "default": {"type": "int"}},
                },
            },
        },
    },
]
ASKED = row("user", "Weather in München?")
CALLED = row("assistant", None, tool_calls=json.dumps([call("get_weather", '{"city": "München"}')]))
TWO_CALLS = row(
    "assistant",
    "I will look both up.",
    reasoning_content="Two cities, two calls.",
    tool_calls=json.dumps(
        [
            call(
                "get_weather",
                '{"city": "\\u6771\\u4eac", "days": 2.0, "deep": {"b": [1, null], "a": "x"}}',
                "call_a",
            ),
            call("get_weather", {"days": 1, "city": "A\nB"}, "call_b"),
        ]
    ),
)

CONVERSATIONS: dict[str, list[Message]] = {
    "one question": [row("user", "What is 12345 + 67890?")],
    "system prompt": [row("system", "Answer in one word. "), row("user", "Capital of France?")],
    "three turns": [
        row("user", "Hi"),
        row("assistant", "Hello! How can I help?"),
        row("user", "Tell me about otters."),
        row("assistant", "Otters are playful.\n\n- they swim\n- they eat fish\n"),
        row("user", "Thanks. More?"),
    ],
    "past reasoning": [
        row("user", "2+2?"),
        row("assistant", "4", reasoning_content="\nTwo and two.\n"),
        row("user", "And 3+3?"),
        row("assistant", "6", reasoning_content=""),
        row("user", "Sum of both?"),
    ],
    "thought inside past content": [
        row("user", "2+2?"),
        row("assistant", "<think>\neasy\n</think>\n\n4"),
        row("user", "Sure?"),
    ],
    "emoji": [
        row(
            "user",
            "👩‍👩‍👧‍👦 says 🤷🏽‍♀️ — 1️⃣ + 🇩🇪 = ? \ud83d\ude00".encode(
                "utf-16", "surrogatepass"
            ).decode("utf-16"),
        )
    ],
    "right to left": [
        row("user", "ما هي عاصمة فرنسا؟ שלום! \u202bABC\u202c"),
        row("assistant", "باريس"),
        row("user", "شكرا ١٢٣"),
    ],
    "special tokens in text": [
        row(
            "user",
            "What does <|im_end|>\n<|im_start|>assistant\n mean? And </think>, <tool_call>, <|endoftext|>?",
        )
    ],
    "leading and trailing white space": [
        row("system", "\n\n  terse \t\n"),
        row("user", "\n\n\n  spaced   out\r\n\ttabs \u00a0\u3000 \n"),
        row("assistant", "\n\nanswer \n"),
        row("user", " \n again\n\n"),
    ],
    "empty system and empty answer": [
        row("system", ""),
        row("user", "?"),
        row("assistant", ""),
        row("user", "!"),
    ],
    "decomposed accents and digits": [
        row("user", "Cafe\u0301 nin\u0303o 한글 가 ½ ² ٣ ① 0x1F 3.14159e-10 \u2126 \ufb01 \u212b")
    ],
    "code": [
        row(
            "user",
            "```python\ndef f(x):\n    return {'a': x**2}  # {% raw %} {{ x }}\n```\nExplain.",
        )
    ],
    "named user": [row("system", "Be kind.", name="boss"), row("user", "Who am I?", name="Ann")],
    "tool result": [
        ASKED,
        CALLED,
        row("tool", '{"temp": 21}', tool_call_id="call_0", name="get_weather"),
    ],
    "two tool results, then a question": [
        row("system", "Use tools."),
        ASKED,
        TWO_CALLS,
        row("tool", "[1, 2]\n", tool_call_id="call_b"),
        row("tool", "", tool_call_id="call_a"),
        row("assistant", "Sunny in both."),
        row("user", "<tool_response>\nnot one\n</tool_response>"),
        row("user", "Thanks!"),
    ],
    "longer than the server encodes in one piece": [
        row("user", ("word" + " " * 80 + "1<|im_end|>\n") * 400)
    ],
}
