"""Questions with a known answer, put to a fresh server before it gets any work.

A server can be up, healthy and wrong: damaged weights, a broken kernel, the wrong quantization. Each golden prompt
(`server.golden`) is answered greedily and held against the first ids that it must give, or against the least mean
log-probability that a sound model has for its own greedy answer.
"""

import asyncio
from typing import Any

import aiohttp

from rebuild.generate.answers import sampled_logprobs
from rebuild.generate.client import Endpoint, RequestFailed, ServerLost, ask

JUDGED_TOKENS = 16


async def check_golden(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    golden: list[dict[str, Any]],
    template_kwargs: dict[str, Any],
    timeout_s: float | None,
) -> None:
    """Put every golden prompt to the server, and wait at most `timeout_s` seconds for each.

    Raises:
        ServerLost: an answer is not as it must be; the server is not to be trusted.
    """
    for entry in golden:
        try:
            async with asyncio.timeout(timeout_s):
                reply, _ = await ask(session, endpoint, golden_body(entry, template_kwargs), 1)
            fault = golden_fault(entry, reply["choices"][0])
        except TimeoutError:
            fault = f"no answer in {timeout_s} s"
        except RequestFailed as error:
            fault = str(error)
        except (KeyError, IndexError, TypeError) as error:
            fault = f"malformed reply: {type(error).__name__}: {error}"
        if fault:
            raise ServerLost(f"golden prompt {entry['prompt']!r}: {fault}")


def golden_body(entry: dict[str, Any], template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the request for one golden prompt: greedy, as many tokens as are judged, with log-probabilities."""
    tokens = [len(entry.get("first_ids", [])), JUDGED_TOKENS if "min_logprob" in entry else 0]
    return {
        "messages": [{"role": "user", "content": entry["prompt"]}],
        "max_tokens": max(tokens),
        "temperature": 0,
        "repetition_penalty": 1.0,  # a server may have another default from the model's files
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "return_token_ids": True,
        "logprobs": True,
        "chat_template_kwargs": template_kwargs,
    }


def golden_fault(entry: dict[str, Any], choice: dict[str, Any]) -> str | None:
    """Return what is wrong with the answer to a golden prompt, or None."""
    ids = choice.get("response_token_ids") or []
    expected = entry.get("first_ids") or []
    if ids[: len(expected)] != expected:
        return f"expected first ids {expected}, seen {ids[: len(expected)]}"
    if "min_logprob" not in entry:
        return None
    logprobs = sampled_logprobs(choice) or []
    mean = sum(logprobs) / len(logprobs) if logprobs else float("-inf")
    if not mean >= entry["min_logprob"]:
        return f"expected a mean log-probability of {entry['min_logprob']} or more, seen {mean:.3f}"
    return None
