"""Serve the page of one job over HTTP: its files, and a stream of events. Needs the extra ``view`` (starlette and uvicorn).

All addresses begin with a secret; a request without it gets status 403. A reader that reads slowly, or not at all, is sent the whole
state once it reads again: nothing is kept for it. The page asks no other host for anything, and the browser is told to forbid it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from offbeat.types import Seconds
from offbeat.view.job_view import JobView
from offbeat.view.page import document, finite_only

log = logging.getLogger(__name__)

TICK_S: Final[Seconds] = 0.25
"""Least time between two messages to a browser, in seconds."""
QUIET_S: Final[Seconds] = 1.0
"""Time between two messages while nothing changes but the time, in seconds."""
ALIVE_S: Final[Seconds] = 10.0
"""Time between two signs of life once the job has ended, in seconds."""
CHANGES: Final = 32
"""How many of the newest messages are kept for readers that are a little late."""
READERS: Final = 32
"""Most streams at a time;"""
CONNECTIONS: Final = 128
"""and most connections: further ones get status 503."""
ADVISE: Final = ("-m", "offbeat.commands.advise")
"""The command whose output is an advice for the journal that follows."""
LAST_S: Final[Seconds] = 2.0
"""Longest wait for readers to get the end of the job, in seconds."""
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Hub:
    """Makes the messages of one job, once for all readers.

    Args:
        view: what is shown. Other threads may use it while they hold `lock`.
        journal: of the job, from which a reader may ask for an advice; None: there is none.
    """

    def __init__(self, view: JobView, journal: Path | None = None) -> None:
        self.view, self.journal = view, journal
        view.advisable = None if journal is None else "yes"
        self.lock = threading.Lock()
        self.readers = 0
        self._number = 0
        """Of the newest message."""
        self._changes: deque[bytes] = deque(maxlen=CHANGES)
        self._whole: tuple[int, bytes, Seconds] = (-1, b"", 0.0)
        self._at: Seconds = 0.0
        self._moved: tuple[Seconds, Seconds] = (-1.0, 0.0)
        """The job's newest time, and when it was seen first."""
        self._came = asyncio.Event()
        self.closed = False

    async def run(self) -> None:
        """Make messages while there are readers, until the end of the job."""
        while not self.closed:
            await asyncio.sleep(TICK_S if self.readers else QUIET_S / 2)
            now = time.monotonic()
            self._look(now)
            if self.readers and (self.view.dirty or (not self.view.over and now - self._at >= QUIET_S)):
                try:
                    self.tick()
                except Exception:  # of a record that nobody has thought of: what comes later is shown all the same
                    log.exception("a message of the page could not be made")

    def tick(self) -> None:
        """Make the next message."""
        self._look(now := time.monotonic())
        self._at = now
        with self.lock:
            change = self.view.change()
        self._number += 1
        self._changes.append(self._event(change))
        self._came.set()
        self._came = asyncio.Event()

    def whole(self) -> tuple[int, bytes]:
        """Return the message with everything, and its number: of a moment ago at most, however many readers come."""
        number, _, made_at = self._whole
        if number < 0 or time.monotonic() - made_at >= TICK_S or self._number - number > len(self._changes):
            self.tick()
            with self.lock:
                whole = self.view.whole()
            self._whole = self._number, self._event(whole), time.monotonic()
        return self._whole[:2]

    def ask(self) -> bool:
        """Have the job so far simulated under other rules, by a process that gives way to all others; return False without a journal."""
        with self.lock:
            if self.journal is None or self.view.advisable == "asked":
                return self.journal is not None
            self.view.ask()
        threading.Thread(target=self._advise, args=(self.journal,), name="advice", daemon=True).start()
        return True

    def _advise(self, journal: Path) -> None:
        done = subprocess.run([sys.executable, *ADVISE, str(journal)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
        try:
            rows = json.loads(done.stdout)
        except ValueError:
            why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"its process has ended with status {done.returncode}"
            rows = [{"name": "", "measured": True, "best": False, "notes": [f"No advice: {why}."]}]
        with self.lock:
            self.view.advise(rows)

    async def stream(self) -> AsyncIterator[bytes]:
        """Return the messages for one reader."""
        number = -1
        self.readers += 1
        try:
            yield b"retry: 1000\n\n"
            while True:
                if number < 0 or self._number - number > len(self._changes):
                    number, message = self.whole()
                    yield message
                elif self._number > number:
                    newest = list(self._changes)[number - self._number :]
                    number = self._number
                    yield b"".join(newest)
                else:
                    if self.closed:
                        return
                    came = self._came
                    try:
                        await asyncio.wait_for(came.wait(), ALIVE_S)
                    except TimeoutError:
                        yield b": alive\n\n"
        finally:
            self.readers -= 1

    def _look(self, now: Seconds) -> None:
        if self.view.t != self._moved[0]:
            self._moved = self.view.t, now

    def _event(self, message: dict[str, Any]) -> bytes:
        age_s = round(time.monotonic() - self._moved[1], 2)
        message = {"number": self._number, "age": age_s, **message}
        try:
            text = json.dumps(message, separators=(",", ":"), allow_nan=False)
        except ValueError:  # figures of a journal that was edited
            text = json.dumps(finite_only(message), separators=(",", ":"))
        return f"data: {text}\n\n".encode()

    async def close(self) -> None:
        """Tell the readers the end, and wait for those that read, at most `LAST_S` seconds."""
        self.tick()
        self.closed = True
        deadline = time.monotonic() + LAST_S
        while self.readers and time.monotonic() < deadline:
            self._came.set()
            await asyncio.sleep(TICK_S / 2)


def with_secret(app: ASGIApp, secret: str) -> ASGIApp:
    """Return the application for those requests alone whose path begins with the secret; others get 403, whatever they ask for."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        given, _, rest = scope["path"].removeprefix("/").partition("/")
        if not secrets.compare_digest(given.encode("utf-8", "replace"), secret.encode()):
            await Response("Forbidden\n", 403, HEADERS, "text/plain")(scope, receive, send)
        elif not scope["path"].startswith(f"/{secret}/"):  # addresses on the page are relative
            await Response("", 307, {**HEADERS, "Location": f"/{secret}/"})(scope, receive, send)
        else:
            await app({**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode()}, receive, send)

    return guarded


def application(hub: Hub, secret: str) -> ASGIApp:
    """Return the application.

    Args:
        hub: of the job.
        secret: with which addresses begin.
    """
    assets = _assets()

    def asset(request: Request) -> Response:
        name = request.path_params.get("name") or "index.html"
        if name not in assets:
            return Response("Not found\n", 404, HEADERS, "text/plain")
        content, kind = assets[name]
        return Response(content, headers={**HEADERS, "Content-Type": f"{kind}; charset=utf-8"})

    async def events(_: Request) -> Response:
        if hub.readers >= READERS:
            text = f"{READERS} readers look at this page already\n"
            return Response(text, 503, {**HEADERS, "Retry-After": "5"}, "text/plain")
        return StreamingResponse(hub.stream(), headers=HEADERS, media_type="text/event-stream")

    async def levels(request: Request) -> Response:
        with hub.lock:
            found = hub.view.levels.get(request.query_params.get("name", ""))
            plain = None if found is None else found.plain()
        return JSONResponse(plain, 200 if plain else 404, HEADERS)

    def advice(_: Request) -> Response:
        return Response(status_code=202 if hub.ask() else 404, headers=HEADERS)

    routes = [
        Route("/events", events),
        Route("/levels", levels),
        Route("/advice", advice, methods=["POST"]),
        Route("/", asset),
        Route("/{name:path}", asset),
    ]
    return with_secret(Starlette(routes=routes), secret)


def _assets() -> dict[str, tuple[bytes, str]]:
    """Return the page and its files by name, each with its type."""
    folder = files("offbeat.view") / "assets"
    found = {
        file.name: (file.read_bytes(), kind)
        for place in (folder, folder / "uplot")
        for file in place.iterdir()
        if file.is_file() and (kind := _TYPES.get(file.name.rpartition(".")[2])) is not None
    }
    return {**found, "index.html": (document().encode(), "text/html")}


class PageServer:
    """Serves a page from a thread of its own.

    Args:
        view: what is shown.
        listener: a socket that is bound.
        secret: with which addresses begin.
        journal: see `Hub`.
    """

    def __init__(self, view: JobView, listener: socket.socket, secret: str, journal: Path | None = None) -> None:
        self.hub = Hub(view, journal)
        self._listener, self._secret = listener, secret
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)

    @property
    def address(self) -> str:
        """The page's address, with the secret."""
        host, port = self._listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/{self._secret}/"

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Tell the readers the end, and end. A reader that does not read is not waited for. May be called twice."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._end(), loop)
            self._thread.join(LAST_S + 1.0)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        config = uvicorn.Config(
            application(self.hub, self._secret),
            log_config=None,
            access_log=False,
            lifespan="off",
            loop="asyncio",
            http="h11",
            ws="none",
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        making = asyncio.create_task(self.hub.run())
        await self._server.serve(sockets=[self._listener])
        making.cancel()

    async def _end(self) -> None:
        await self.hub.close()
        self._server.should_exit = True
