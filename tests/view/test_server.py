"""The page's server: only who knows the secret is answered, and who reads slowly or not at all harms nobody."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.view.page_records import pushed, release, steps, unpacked, view_of

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'offbeat[view]'")
pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'offbeat[view]'")

from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.view.content import context
from offbeat.view.job_view import JobView
from offbeat.view.listening import listen
from offbeat.view.page import document, sections
from offbeat.view.server import CHANGES, CONNECTIONS, LAST_S, READERS, TICK_S, PageServer

SECRET = "a-secret-of-the-test"
DEADLINE_S = 30.0


@contextmanager
def page(view: JobView | None = None, journal: Path | None = None) -> Iterator[PageServer]:
    server = PageServer(view or view_of(*steps(4, 20, slow=2)), listen("127.0.0.1", 0), SECRET, journal)
    server.start()
    try:
        yield server
    finally:
        server.close()


def port_of(server: PageServer) -> int:
    return int(server.address.split(":")[2].split("/")[0])


def get(server: PageServer, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=DEADLINE_S)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


class Reader:
    """Reads the stream of events."""

    def __init__(self, server: PageServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port_of(server)), timeout=DEADLINE_S)
        self.socket.sendall(f"GET /{SECRET}/events HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        self.file = self.socket.makefile("rb")
        self.status = int(self.file.readline().split()[1])

    def message(self) -> dict[str, Any]:
        while line := self.file.readline():
            if line.startswith(b"data: "):
                found: dict[str, Any] = json.loads(line[6:])
                return found
        raise EOFError

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.mark.parametrize(
    "path", ["/", "/wrong/", "/wrong/events", "/main.js", "/events", f"/{SECRET[:-1]}/", f"/{SECRET}x/", "//", "/%00/", "/é"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_without_the_secret_everything_is_forbidden(path: str, method: str) -> None:
    with page() as server:
        status, headers, body = get(server, path.encode().decode("latin-1").replace("Ã©", "%C3%A9"), method)
    assert (status, body) == (403, b"Forbidden\n")
    assert "server" not in headers and headers["content-security-policy"].startswith("default-src 'none'")


def test_the_page_and_its_files() -> None:
    with page() as server:
        status, headers, body = get(server, f"/{SECRET}/")
        assert status == 200 and headers["content-type"].startswith("text/html")
        assert "script-src 'self'" in headers["content-security-policy"] and "unsafe" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
        for name in re.findall(r'(?:src|href)="([^"]+)"', body.decode()):
            assert get(server, f"/{SECRET}/{name}")[0] == 200, name
        assert get(server, f"/{SECRET}")[1]["location"] == f"/{SECRET}/"
        for path in (
            "nosuch.js",
            "../server.py",
            "%2e%2e/server.py",
            "uplot/LICENSE",
            "levels?name=nosuch",
            "sections.html",
        ):
            assert get(server, f"/{SECRET}/{path}")[0] == 404, path
        assert get(server, f"/{SECRET}/", "POST")[0] == 405
        assert json.loads(get(server, f"/{SECRET}/levels?name=version")[2])["mean"] == [20.0]


def test_the_files_ask_no_other_host_and_make_no_markup_of_texts() -> None:
    for file in (files("offbeat.view") / "assets").iterdir():
        if not file.is_file():
            continue
        text = file.read_text()
        assert not re.search(r"(?:src|href|url|import|fetch|from)\s*[=(]?\s*[\"'](?:https?:)?//", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), file.name
    for text in (document(), *sections(context(view_of(*steps(4, 20, slow=2)), None)).values()):
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)", text), "the policy forbids what is inline"


def test_a_stream_begins_with_everything_and_goes_on_with_changes() -> None:
    with page() as server, closing(Reader(server)) as reader:
        first = reader.message()
        assert first["whole"] and first["slow"] == [2] and first["lanes"] == [0, 1, 2, 3] and len(unpacked(first["packed"])["number"]) == 80
        with server.hub.lock:
            server.hub.view.record(pushed(0, 99.0, 20, own=0.1))
        second = reader.message()
        while "packed" not in second:
            second = reader.message()
        assert "whole" not in second and second["t"] == 99.0 and unpacked(second["packed"])["worker"].tolist() == [0]
        with closing(Reader(server)) as again:
            assert again.message()["whole"], "a reload"


@pytest.mark.slow
def test_there_are_at_most_ten_messages_a_second() -> None:
    with page() as server, closing(Reader(server)) as reader:
        reader.message()
        over = time.monotonic() + 1.5

        def work() -> None:
            at = 0
            while time.monotonic() < over:
                with server.hub.lock:
                    server.hub.view.record(release(0, 100.0 + at))
                at += 1

        thread = threading.Thread(target=work)
        thread.start()
        came = 0
        while time.monotonic() < over:
            reader.message()
            came += 1
        thread.join()
    assert 1 <= came <= 1.5 / TICK_S + 2


def test_a_reader_that_never_reads_holds_up_nobody_and_nothing_is_kept_for_it() -> None:
    with page() as server:
        stuck = [Reader(server) for _ in range(3)]
        with closing(Reader(server)) as reader:
            reader.message()
            hub = server.hub
            for at in range(CHANGES + 5):
                with hub.lock:
                    for one in range(400):
                        hub.view.record(pushed(one % 4, 50.0 + at, 20, own=0.5))
                if at % 4 == 0:
                    reader.message()
            assert len(hub._changes) <= CHANGES
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < LAST_S + 5.0
        for unread in stuck:
            unread.close()


def test_the_end_reaches_readers_before_the_server_ends() -> None:
    with page() as server:
        readers = [Reader(server) for _ in range(10)]
        for reader in readers:
            reader.message()
        hub = server.hub
        with hub.lock:
            hub.view.record({"kind": "end", "t": 120.0, "ok": True, "reason": "every worker has finished"})
        server.close()
        for reader in readers:
            message = reader.message()
            while not message["over"]:
                message = reader.message()
            reader.close()


def test_a_thousand_readers_are_too_many_and_the_page_still_answers() -> None:
    with page() as server:
        readers = [Reader(server) for _ in range(READERS)]
        assert {reader.status for reader in readers} == {200}
        with closing(Reader(server)) as one_more:
            assert one_more.status == 503
        for reader in readers:
            reader.close()
        connections = []
        for _ in range(CONNECTIONS + 72):
            try:
                connections.append(socket.create_connection(("127.0.0.1", port_of(server)), timeout=1.0))
            except OSError:
                break
        for connection in connections:
            connection.close()
        deadline = time.monotonic() + DEADLINE_S
        while (status := get(server, f"/{SECRET}/")[0]) != 200:
            assert status == 503 and time.monotonic() < deadline


@pytest.mark.parametrize(
    "sent",
    [b"\x00" * 5000, b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n"],
)
def test_what_is_no_request_harms_nobody(sent: bytes) -> None:
    with page() as server:
        with socket.create_connection(("127.0.0.1", port_of(server)), timeout=DEADLINE_S) as connection:
            connection.sendall(sent)
        assert get(server, f"/{SECRET}/")[0] == 200


def advised(server: PageServer) -> list[dict[str, Any]]:
    """Ask for an advice, and wait for it."""
    assert get(server, f"/{SECRET}/advice", "POST")[0] == 202
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with server.hub.lock:
            if server.hub.view.advisable == "yes":
                assert "samples/s" in server.hub.view.whole()["html"]["advice"] or "No advice" in server.hub.view.whole()["html"]["advice"]
                return server.hub.view.advice
        threading.Event().wait(0.05)
    raise AssertionError("no advice has come")


@pytest.mark.slow
def test_a_reader_asks_what_other_rules_would_have_made_of_the_run_so_far(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    simulate("bsp", Cluster(workers=4, faults="slow worker=1 at=0 for=1000 factor=3"), Work(versions=24), journal=journal)
    journal.write_bytes(journal.read_bytes()[:-200])  # as a job writes it that runs
    with page(journal=journal) as server:
        rows = advised(server)
        assert rows[0]["measured"] and rows[0]["name"] == "bsp" and rows[0]["notes"]
        assert max(row["ratio"] for row in rows[1:]) > 1.5
        journal.write_text("")
        assert "No advice" in advised(server)[0]["notes"][0]


def test_without_a_journal_there_is_nothing_to_ask() -> None:
    with page() as server:
        assert get(server, f"/{SECRET}/advice", "POST")[0] == 404
        assert server.hub.view.whole()["advisable"] is None
