"""A headless Chromium, driven over its DevTools protocol: opens a page, asks it questions, and notes what it complains of."""

import asyncio
import base64
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome"]
START_S = 60
# Nothing but the pages themselves: no sandbox, since tests may run as root; no calls home.
FLAGS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
    "--disable-sync", "--hide-scrollbars", "--remote-debugging-port=0", "about:blank",
]  # fmt: skip


def find_chromium() -> str:
    """Return the path of the browser.

    Raises:
        RuntimeError: there is none.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise RuntimeError(
            "no Chromium here; on Debian: apt-get install --no-install-recommends chromium"
        )
    return found


class Page:
    """One tab: what it is asked, and everything that it complained of since it was opened."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse):
        self.loop, self.socket = loop, socket
        self.sent = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable")

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command of the protocol and return its result."""
        return self.loop.run_until_complete(self._command(method, params))

    async def _command(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self.sent += 1
        await self.socket.send_json({"id": self.sent, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self.socket.receive_json(), START_S)
            if message.get("id") == self.sent:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def open(
        self, file: Path, *, width: int = 1280, height: int = 900, scheme: str = "light"
    ) -> None:
        """Open a file at a window's size and in a colour scheme, and wait until it is loaded and drawn."""
        self.events.clear()
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.command(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self.command("Page.navigate", url=file.resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        self.ask(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        )

    def wait_for(self, event: str) -> None:
        """Wait until the event has come."""
        deadline = time.monotonic() + START_S
        while all(each["method"] != event for each in self.events):
            self.ask("1")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{event} has not come")

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; the page's own policy does not bind it."""
        done = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"])
        return done["result"].get("value")

    def complaints(self) -> list[str]:
        """Return what the console said and which exceptions were thrown."""
        kinds = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [str(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Return the addresses of everything that was asked for."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def failures(self) -> list[str]:
        """Return the requests that failed or were refused."""
        return [
            str(event["params"])
            for event in self.events
            if event["method"] == "Network.loadingFailed"
        ]

    def picture(self, file: Path) -> None:
        """Save a picture of the whole page."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def open_browser() -> Iterator[Page]:
    """Start the browser with a profile of its own and yield its one tab; nothing of it is left afterwards."""
    profile = Path(tempfile.mkdtemp(prefix="rebuild-browser-"))
    with open(profile / "log", "wb") as log:
        process = subprocess.Popen(
            [find_chromium(), f"--user-data-dir={profile}", *FLAGS],
            env=os.environ | {"HOME": str(profile)},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    loop = asyncio.new_event_loop()
    try:
        port = wait_for_port(profile / "DevToolsActivePort", process)
        yield from _connected(loop, port)
    finally:
        loop.close()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def wait_for_port(file: Path, process: "subprocess.Popen[bytes]") -> int:
    """Return the port that the browser listens on, once it has written it down."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        if file.exists() and "\n" in file.read_text():
            return int(file.read_text().split()[0])
        time.sleep(0.05)
    raise RuntimeError(f"the browser did not start: {(file.parent / 'log').read_text()[-2000:]}")


def _connected(loop: asyncio.AbstractEventLoop, port: int) -> Iterator[Page]:
    async def connect() -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
            tabs = [tab for tab in await reply.json() if tab["type"] == "page"]
        return session, await session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0)

    session, socket = loop.run_until_complete(connect())
    try:
        yield Page(loop, socket)
    finally:
        loop.run_until_complete(socket.close())
        loop.run_until_complete(session.close())
