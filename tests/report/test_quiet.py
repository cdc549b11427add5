"""``--quiet``: the scripts' lines, warnings, and one line at the end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.journal.records import round_of_two

from offbeat.journal.summary import Tally
from offbeat.report.quiet import QuietProgress


def test_what_stays_and_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    display = QuietProgress(Console(file=out, width=80))
    snapshot = Tally.of(round_of_two()).summary()
    display.update(snapshot, 1.0)
    display.note("worker 1 died")
    display.bar("50 %")
    assert out.getvalue() == ""
    display.lines(["[worker 0] of the script"], error=False)
    display.lines(["[worker 0] an error of it"], error=True)
    warned = {**snapshot, "warnings": [{"detail": "the gradients are equal"}]}
    display.update(warned, 2.0)
    display.update(warned, 3.0)
    display.close()
    display.finish({**snapshot, "warnings": [*warned["warnings"], {"detail": "the last one"}]})
    assert (
        capsys.readouterr().err == "[worker 0] an error of it\noffbeat: warning: the gradients are equal\noffbeat: warning: the last one\n"
    )
    script, last = out.getvalue().splitlines()
    assert script == "[worker 0] of the script" and "version" in last
