"""Write a journal as one HTML page with its data inside, which asks nothing of the network: ``offbeat report run.jsonl --html run.html``.

Who calls whom::

    journal.file.Records   a journal's records, once
          |
          v
    gather.py   the summary, curves, and through report.turns what each worker does at each moment
      |    \\
      |     steps.py   pushes in columns, excerpts of a long job's     levels.py   shares of time of every worker, whatever the length
      v         |                                                        |
    content.py  |  words; bars.py, accounts.py: bars and tables            |
      |         v                                                        v
      |       data.py   the columns, packed (pack.py) for the page's scripts
      v         |
    page.html   <-   style.css, data.js, timeline.js, lanes.js, story.js, charts.js

The page's scripts run only if their digest is the one that the page's policy names: nothing that a journal contains can run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from offbeat.report.page.bars import lanes
from offbeat.report.page.content import Source, context
from offbeat.report.page.data import packed
from offbeat.report.page.gather import Gathered

HERE: Final = Path(__file__).parent
SCRIPTS: Final = ("data.js", "lanes.js", "timeline.js", "story.js", "charts.js")
NBYTES: Final = 10_000_000
"""The most bytes of a page; of a job whose page would be larger, fewer pushes are kept singly."""


def render(gathered: Gathered, source: Source, simulated: Sequence[dict[str, Any]] = ()) -> str:
    """Return the page of a job.

    Args:
        gathered: the job, after its last record and `Gathered.end`.
        source: the journal's file.
        simulated: rows of the table of other rules, the measured job first: ``name``, ``rate`` (samples/s), ``ratio`` to the measured job,
            ``dropped``, ``staleness``, ``waiting``, all texts but ``ratio``; ``measured``: True for the first.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    summary = gathered.tally.summary()
    said, shown = context(gathered, summary, source, simulated), lanes(gathered, summary)
    style = (HERE / "style.css").read_text(encoding="utf-8")
    template = environment.get_template("page.html")
    while True:
        head, data = packed(gathered, summary, source.name, shown)
        page = template.render(**said, style=style, script=script, digest=digest, head=head, data=data)
        # Lone surrogates come from file names that are not UTF-8.
        page = page.encode("utf-8", "replace").decode("utf-8")
        if len(page) <= NBYTES * 0.98 or len(gathered.steps) < 1000:
            return page
        gathered.steps.thin()
