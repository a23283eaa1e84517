"""A server that costs next to nothing: what a client reaches against it is the client's own ceiling.

    python benchmarks/instant_server.py MODEL PORT_FILE

It answers chat completions as SGLang does, with the ids of prompt and answer, both looked up: each of the QUESTIONS
was rendered before the first request. The ids are in the reply a second time under the names that vLLM gives them,
so that clients of either read the same bytes. Requests are not parsed beyond what finds the question.
"""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import uvloop
from transformers import AutoTokenizer

# As many as keep the look-up small; a shard repeats them under prompt ids of their own.
QUESTIONS = [
    f"In two sentences: what would a {trade} of the {century}th century say about {matter}?"
    for trade in ["baker", "sailor", "printer", "mason", "teacher", "farmer", "clerk", "smith"]
    for century in range(11, 21)
    for matter in ["the weather", "bread", "taxes", "the sea", "a lost letter", "the harvest"]
]
ANSWER = (
    "They would say that it is never quite what it was in the days of their parents, and that somebody ought to do "
    "something about it. Then they would go back to work, because the day is short and the work is long."
)
MODEL = "instant"
RUNNING = 64  # requests at once, as /server_info reports it


def canned_replies(tokenizer: object) -> dict[str, bytes]:
    """Return the HTTP response to every question."""
    answer = [*tokenizer.encode(ANSWER), tokenizer.eos_token_id]
    replies = {}
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        choice = {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": ANSWER,
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": answer[-1],
            "prompt_token_ids": prompt,
            "response_token_ids": answer,
            "token_ids": answer,
        }
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(answer),
            "total_tokens": len(prompt) + len(answer),
        }
        reply = {
            "id": "instant",
            "object": "chat.completion",
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": prompt,
        }
        replies[question] = as_http(reply)
    return replies


def as_http(body: object) -> bytes:
    """Return a whole HTTP response."""
    raw = orjson.dumps(body)
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


class Answering(asyncio.Protocol):
    """One connection: finds whole requests in what arrives, and writes each one's reply at once."""

    def __init__(self, replies: dict[str, bytes]) -> None:
        self.replies = replies
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what replies are written to."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer every request that has arrived whole."""
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end].lower()
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            whole = end + 4 + length
            if len(self.received) < whole:
                return
            body, self.received = self.received[end + 4 : whole], self.received[whole:]
            self.transport.write(self.reply(head.split(b" ", 2)[1], body))

    def reply(self, path: bytes, body: bytes) -> bytes:
        """Return the response to one request."""
        if path == b"/v1/chat/completions":
            return self.replies[orjson.loads(body)["messages"][-1]["content"]]
        if path == b"/v1/models":
            return as_http({"data": [{"id": MODEL}]})
        return as_http({"max_running_requests": RUNNING})


async def serve(model: str, port_file: Path) -> None:
    """Serve until killed."""
    replies = canned_replies(AutoTokenizer.from_pretrained(model, local_files_only=True))
    await serve_replies(lambda: Answering(replies), port_file)


async def serve_replies(connect: Callable[[], asyncio.Protocol], port_file: Path) -> None:
    """Serve on a free port, written to `port_file` once the server listens, until it is killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(connect, "127.0.0.1", 0)
    temporary = port_file.with_suffix(".tmp")
    temporary.write_text(str(server.sockets[0].getsockname()[1]))
    temporary.replace(port_file)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], Path(sys.argv[2])))
