"""A stand-in for the render endpoint of a vLLM server that costs next to nothing: each rendering was made beforehand.

    python benchmarks/render_server.py MODEL CONVERSATIONS PORT_FILE

speculators has conversations rendered and tokenized by a server. Whatever asks this one pays for its own work alone.
It knows the conversations of a JSONL file: each with and without its answer, and with the generation prompt. Requests
are told apart by the texts of their messages.
"""

import json
import sys
from pathlib import Path
from typing import Any

import orjson
import uvloop
from instant_server import Answering, as_http, serve_replies
from transformers import AutoTokenizer

Key = tuple[str, bool]


def renderings(tokenizer: Any, conversations: Path) -> dict[Key, bytes]:
    """Return the HTTP response to every request that boundaries of the conversations are found by."""
    replies = {}
    for line in conversations.read_text(encoding="utf-8").split("\n")[:-1]:
        messages = json.loads(line)["conversations"]
        for asked, prompt in [(messages[:-1], True), (messages[:-1], False), (messages, False)]:
            ids = tokenizer.apply_chat_template(
                asked, add_generation_prompt=prompt, return_dict=False
            )
            replies[key(asked, prompt)] = as_http({"token_ids": ids})
    return replies


def key(messages: list[dict[str, Any]], prompt: bool) -> Key:
    """Return what tells a request apart."""
    return "\0".join(message["content"] for message in messages), prompt


class Rendering(Answering):
    """One connection whose requests are for renderings."""

    def reply(self, path: bytes, body: bytes) -> bytes:
        """Return the response to one request."""
        asked = orjson.loads(body)
        return self.replies[key(asked["messages"], asked["add_generation_prompt"])]


async def serve(model: str, conversations: Path, port_file: Path) -> None:
    """Serve until killed."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    replies = renderings(tokenizer, conversations)
    await serve_replies(lambda: Rendering(replies), port_file)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
