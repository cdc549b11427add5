"""Set out the page of a job: one template, one style and one set of scripts, for a page that a server fills and for a file with its data.

Who calls whom::

    journal records                     a running job's records and figures (dashboard.py)
          |                                          |
          v                                          v
    of_journal.py  ------------------------->   job_view.py   through journal.turns what each worker does at each moment
                                              |      |     \\
                                              |   steps.py   shares.py   pushes in columns, and shares of time of every worker
                                              v              |
                  content.py, bars.py, accounts.py        columns.py     words, bars and tables; the columns, packed
                                              |              |
                                              v              v
    templates/sections.html, page.html   ->  page.py  <-  assets/*.js, page.css
                                              |    \\
                                          server.py  `render`: offbeat report run.jsonl --html run.html

In a file, the page's scripts run only if their digest is the one that the page's policy names; from a server, only files of its own
address. Whatever a journal contains is text: the template escapes it, and scripts set texts.
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from offbeat.view.content import Source

if TYPE_CHECKING:
    from jinja2 import Environment

    from offbeat.view.job_view import JobView

HERE: Final = Path(__file__).parent
SCRIPTS: Final = ("uplot/uPlot.iife.min.js", "data.js", "lanes.js", "timeline.js", "heat.js", "story.js", "curves.js", "main.js")
STYLES: Final = ("uplot/uPlot.min.css", "page.css")
SECTIONS: Final = (
    *("head", "verdict", "notes", "whole", "steps", "remedies", "histogram", "advice", "workers", "events", "metrics", "staleness"),
    *("deaths", "samples", "origin"),
)
"""The parts of the page that the template sets out, each of which is sent again when it changes."""
NBYTES: Final = 10_000_000
"""The most bytes of a file; of a job whose page would be larger, fewer pushes are kept singly."""


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def sections(content: dict[str, Any]) -> dict[str, str]:
    """Return each of `SECTIONS` as markup; one without content is empty.

    Args:
        content: see `content.context`.
    """
    module: Any = _environment().get_template("sections.html").make_module({"d": content, "file": content.get("source") is not None})
    return {name: str(getattr(module, name)()).strip() for name in SECTIONS}


def document(**about: Any) -> str:
    """Return the page as a whole: without arguments the one that a server fills, whose files have addresses of their own."""
    empty = {"title": "offbeat", "html": dict.fromkeys(SECTIONS, ""), "digest": "", "script": "", "style": "", "head": "", "data": ""}
    about = {**empty, "scripts": SCRIPTS, "styles": STYLES, "sections": SECTIONS, **about}
    return _environment().get_template("page.html").render(**about)


def render(view: JobView, source: Source) -> str:
    """Return the page of a journal as one file, which asks nothing of the network.

    Args:
        view: what it shows, after the last record, `JobView.status` and `JobView.end`.
        source: the journal's file.
    """
    script, style = ("".join(_read(name) for name in names) for names in (SCRIPTS, STYLES))
    script = f"/*\n{_read('uplot/LICENSE')}*/\n{script}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    while True:
        message = view.whole(source)
        text = message["packed"].pop("text")
        html = message.pop("html")
        message |= {"name": source.name, "curves": {name: levels.plain() for name, levels in view.levels.items()}}
        head = json.dumps(finite_only(message), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        page = document(title=f"offbeat report: {view.source}", html=html, digest=digest, script=script, style=style, head=head, data=text)
        # Lone surrogates come from file names that are not UTF-8.
        page = page.encode("utf-8", "replace").decode("utf-8")
        if len(page) <= NBYTES * 0.98 or len(view.steps) < 1000:
            return page
        view.steps.thin()


def _read(name: str) -> str:
    return (HERE / "assets" / name).read_text(encoding="utf-8") + "\n"


def finite_only(value: Any) -> Any:
    """Return a message without what JSON cannot carry: figures of a journal that was edited."""
    if isinstance(value, dict):
        return {key: finite_only(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite_only(one) for one in value]
    return None if isinstance(value, float) and value - value != 0.0 else value
