"""Servers that somebody else runs (`server.external`): asked like our own, never started or stopped."""

import time
from functools import partial
from types import TracebackType
from typing import Any, Self

import requests

from rebuild.errors import StepError
from rebuild.generate.client import Endpoint
from rebuild.serving.server import ServerDied
from rebuild.step import say

POLL_S = 2.0
ANSWER_S = 10.0
TRIES = 3  # a busy server may leave one question after its life unanswered


class ExternalServers:
    """One or more running OpenAI-compatible servers of the same model; used where `rebuild.serving.server.Server` is."""

    counts_tokens = False

    def __init__(self, urls: list[str]) -> None:
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        self.log = ", ".join(self.urls)
        self.names: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the servers running: they are not ours."""

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every server names its model.

        Raises:
            ServerDied: one of them did not within `timeout_s` seconds.
        """
        began = time.monotonic()
        while None in (names := [served_name(url) for url in self.urls]):
            if time.monotonic() - began > timeout_s:
                silent = [url for url, name in zip(self.urls, names, strict=True) if name is None]
                raise self.died(f"{', '.join(silent)} did not answer within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        self.names = [name for name in names if name is not None]
        say(f"external servers: {dict(zip(self.urls, self.names, strict=True))}")

    def endpoints(self) -> list[Endpoint]:
        """Return where to ask, one endpoint a server."""
        return [
            Endpoint(url, name, partial(answers, url))
            for url, name in zip(self.urls, self.names, strict=True)
        ]

    def alive(self) -> bool:
        """Tell whether every server still answers."""
        return all(answers(url) for url in self.urls)

    def effective_running_requests(self) -> int:
        """Return how many requests the servers run at once in all, as SGLang reports it.

        Raises:
            StepError: one of them is not SGLang itself (a router, say) and does not tell.
            requests.RequestException: one of them cannot be reached.
        """
        try:
            return sum(running_requests(url) for url in self.urls)
        except (requests.HTTPError, KeyError, ValueError, TypeError) as error:
            raise StepError(
                "an external server does not tell how many requests it runs at once",
                where=self.log,
                expected="SGLang's /server_info",
                seen=f"{type(error).__name__}: {error}",
                remedy="set generate.concurrency to a number instead of auto, and leave server.min_running_requests at 1",
            ) from error

    def tokens_generated(self) -> int:
        """Tell nothing: others may use these servers too, so their count says nothing of our requests."""
        return 0

    def died(self, what: str) -> ServerDied:
        """Return the error for a lost external server."""
        return ServerDied(
            what,
            where=f"server.external: {self.log}",
            expected="running OpenAI-compatible servers",
            remedy="see to these servers",
        )


def served_name(url: str) -> str | None:
    """Return the first model that the server at `url` serves, or None while it does not answer."""
    try:
        return str(fetch(f"{url}/v1/models")["data"][0]["id"])
    except (requests.RequestException, ValueError, KeyError, IndexError, TypeError):
        return None


def answers(url: str) -> bool:
    """Tell whether the server at `url` answers, at one of a few tries."""
    for _ in range(TRIES):
        if served_name(url) is not None:
            return True
        time.sleep(POLL_S / TRIES)
    return False


def running_requests(url: str) -> int:
    """Return SGLang's own figure of the requests that it runs at once."""
    info = fetch(f"{url}/server_info")
    states = info.get("internal_states") or [info]
    return sum(
        int(s.get("effective_max_running_requests_per_dp") or s["max_running_requests"])
        for s in states
    )


def fetch(url: str) -> dict[str, Any]:
    """Return the JSON object at `url`, asked without a proxy, as all requests to these servers are.

    Raises:
        requests.RequestException: no answer, or none that is JSON.
    """
    with requests.Session() as session:
        session.trust_env = False
        answer = session.get(url, timeout=ANSWER_S)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found
