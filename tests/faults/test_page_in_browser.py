"""The page in a real browser: it draws, updates, is reloaded, shows the end, and asks no other host. Skipped where no browser is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.faults.job import DEADLINE_S
from tests.tiers import marked
from tests.view.page_records import died, joined, logged, pushed, release, steps, view_of
from tests.view.test_server import page

from offbeat.journal.records import Record, end_record
from offbeat.journal.summary import Tally
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate
from offbeat.view.job_view import JobView
from offbeat.view.server import PageServer

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(1)>"


class Shown:
    """A page with what happens in it."""

    def __init__(self, server: PageServer, tab: Any) -> None:
        self.server, self.tab = server, tab
        address = server.address
        tab.set_default_timeout(1000.0 * DEADLINE_S)
        sync_api.expect.set_options(timeout=1000.0 * DEADLINE_S)
        self.complaints: list[str] = []
        self.elsewhere: list[str] = []
        tab.on("console", lambda message: self.complaints.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("dialog", lambda dialog: self.complaints.append(f"dialog {dialog.message}"))
        tab.on("request", lambda request: None if request.url.startswith(address) else self.elsewhere.append(request.url))
        tab.goto(address)

    def text(self, selector: str, holds: str) -> None:
        sync_api.expect(self.tab.locator(selector)).to_contain_text(holds)

    def ink(self, selector: str) -> int:
        """How many colours a canvas has."""
        colours: int = self.tab.locator(selector).evaluate(
            "canvas => { const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
            "const seen = new Set();"
            "for (let at = 0; at < data.length; at += 4) seen.add(data.slice(at, at + 3).join());"
            "return seen.size; }"
        )
        return colours


@contextmanager
def browser(view: JobView, journal: Path | None = None, **options: Any) -> Iterator[Shown]:
    with page(view, journal) as server, sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        shown = Shown(server, chromium.new_context(viewport={"width": 1280, "height": 1000}, **options).new_page())
        yield shown
        assert shown.elsewhere == [], "no request to any other address"
        assert [one for one in shown.complaints if "net::ERR_" not in one] == [], "but that a server which is gone does not answer"
        chromium.close()


def take(shown: Shown, tally: Tally, *records: Record) -> None:
    hub = shown.server.hub
    assert hub is not None
    with hub.lock:
        for record in records:
            hub.view.record(record)
            tally.add(record)
        hub.view.status(tally.summary(brief=True))


@pytest.mark.parametrize("scheme", marked(["light", "dark"], night=["light"]))
def test_four_workers_live_reloaded_and_ended(scheme: str) -> None:
    records = [*steps(4, 60, slow=2), logged(18.0, 60, **{SCRIPT: 3.5})]
    tally = Tally.of(records)
    with browser(view_of(*records), color_scheme=scheme) as shown:
        shown.text("h1", "Worker 2 costs this job 6")
        shown.text("#life", "live")
        shown.text("#workers tbody tr:first-child", "worker 2")
        shown.text("#metrics", SCRIPT)
        assert shown.ink("#lanes") > 5
        background = shown.tab.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(251, 251, 250)") == (scheme == "light")
        shown.tab.locator("#all").click()
        shown.text("#span", "single steps")
        shown.tab.locator("#find").fill("2@30")
        shown.tab.keyboard.press("Enter")
        shown.text("#story", "Push of worker 2, clock 30: folded")
        shown.tab.locator("#now").click()
        shown.text("#span", "the last 15 s")
        take(shown, tally, died(1, 19.5, SCRIPT), joined(1, 20.5, 2), release(1, 20.6, 60), pushed(1, 21.0, 60, own=0.4))
        shown.text("#events", f"Worker 1 died: {SCRIPT}.")
        shown.tab.reload()
        shown.text("#events", "Worker 1 is back as its second process.")
        shown.tab.keyboard.press("t")
        assert shown.tab.evaluate("() => document.documentElement.dataset.theme") == ("dark" if scheme == "light" else "light")
        shown.tab.locator(".kpi").nth(1).focus()
        shown.tab.keyboard.press("Enter")
        sync_api.expect(shown.tab.locator("#curve canvas")).to_be_visible()
        shown.tab.keyboard.press("Escape")
        sync_api.expect(shown.tab.locator("#curve")).to_be_hidden()
        take(shown, tally, end_record(22.0, False, f"worker 1 failed: {SCRIPT}"))
        shown.text("#life", "failed")
        shown.server.close()
        shown.text("#notes", f"The job failed: worker 1 failed: {SCRIPT}.")
        shown.text("#life", "failed")


def test_a_thousand_workers_are_a_map_that_keys_and_pointer_read() -> None:
    with browser(view_of(*steps(1000, 8, slow=417))) as shown:
        shown.text("h1", "Worker 417 costs this job")
        sync_api.expect(shown.tab.locator("#heat")).to_be_visible()
        assert shown.ink("#heat") > 3
        sync_api.expect(shown.tab.locator("#histogram .far")).to_have_count(1)
        assert shown.tab.locator("#workers tbody tr").count() == 50
        shown.tab.locator("#heat").focus()
        shown.tab.keyboard.press("PageDown")
        shown.tab.keyboard.press("ArrowDown")
        shown.text("#heat-said", "worker 443, longest step")
        shown.tab.keyboard.press("Enter")
        shown.text("#story", "Push of worker 443")
        shown.tab.locator("#workers button", has_text="worker 3").first.click()
        assert shown.tab.locator("tr.chosen").count() == 1
        shown.tab.set_viewport_size({"width": 600, "height": 900})
        assert shown.tab.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), "a narrow window needs no scrolling"


def test_a_button_asks_for_an_advice_about_the_run_so_far(tmp_path: Path) -> None:
    journal = tmp_path / "run.jsonl"
    simulate("bsp", Cluster(workers=4, faults="slow worker=1 at=0 for=1000 factor=3"), Work(versions=60), journal=journal)
    with browser(view_of(*steps(4, 30)), journal) as shown:
        shown.text("#advice-ask", "simulate the run so far")
        sync_api.expect(shown.tab.locator("#advice")).to_be_hidden()
        shown.tab.locator("#advice-ask").click()
        shown.text("#advice tbody tr:first-child", "bsp, measured")
        shown.text("#advice-ask", "simulate again")
        if folder := os.environ.get("OFFBEAT_SHOTS"):
            shown.tab.screenshot(path=f"{folder}/advice.png", full_page=True)


def test_a_page_whose_server_is_gone_says_so() -> None:
    with browser(view_of(*steps(4, 30))) as shown:
        shown.text("#life", "live")
        shown.server.close()
        shown.text("#life", "no answer")
