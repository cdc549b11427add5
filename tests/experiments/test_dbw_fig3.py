"""dbw_fig3's comparisons at one learning rate, with the races themselves left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from experiments.dbw_fig3 import rates
from experiments.result import Row


@pytest.mark.parametrize(("compare", "rules"), [(rates.equal_rates, 9), (rates.stability, 12)])
def test_every_rule_has_a_row_and_its_place_in_the_picture(
    compare: Callable[..., list[Row]], rules: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rates, "side_by_side", lambda run, races: races)
    monkeypatch.setattr(rates, "time_to_target", lambda race, result: math.inf if race.sync == rates.static(16) else 20.0 + race.seed)
    settings = 1 if compare is rates.equal_rates else 2
    measured = {row.name: row.measured for row in compare(True, tmp_path, seeds=2)}
    assert len(measured) == rules + 2 * settings
    assert [name for name, value in measured.items() if value == "not reached by 2 of 2 seeds"] == [
        name for name in measured if name.endswith("static k=16")
    ]
    assert (tmp_path / "dbw_fig3.png").read_bytes().startswith(b"\x89PNG")
