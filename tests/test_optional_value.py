"""``--dashboard [PORT]``: its value may be left out, and what follows is the script then."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from offbeat.commands.optional_value import WithDashboard

app = typer.Typer()


@app.command(cls=WithDashboard, context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def show(
    context: typer.Context,
    script: str,
    module: Annotated[bool, typer.Option("--module", "-m")] = False,
    workers: int = 2,
    dashboard: str | None = None,
) -> None:
    print(script, context.args, module, workers, repr(dashboard))


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("train.py", "train.py [] False 2 None"),
        ("--dashboard train.py", "train.py [] False 2 ''"),
        ("--dashboard 8000 train.py", "train.py [] False 2 '8000'"),
        ("--dashboard=8000 train.py", "train.py [] False 2 '8000'"),
        ("--dashboard 0.0.0.0:80 train.py", "train.py [] False 2 '0.0.0.0:80'"),
        ("--dashboard [::1]:80 train.py", "train.py [] False 2 '[::1]:80'"),
        ("--dashboard --workers 3 train.py", "train.py [] False 3 ''"),
        ("--workers 3 -m --dashboard train --lr 1", "train ['--lr', '1'] True 3 ''"),
        ("train.py --dashboard x", "train.py ['--dashboard', 'x'] False 2 None"),
        ("--workers=3 --dashboard -- 7860", "7860 [] False 3 ''"),
    ],
)
def test_a_value_that_looks_like_one_is_the_value(line: str, shown: str) -> None:
    result = CliRunner().invoke(app, line.split())
    assert result.output.strip() == shown
