"""What slow workers and long batches weigh in the model under every rule, simulated for all and live for six."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from experiments.bias import live
from experiments.bias.cases import CASES, Case
from experiments.bias.weights import of_long_batches, of_the_slowest
from experiments.claims import MECHANISM, Claim, mechanism
from experiments.result import COLOURS, Row, label, new_figure, save

PAPER = "Weight of the slowest worker and of long batches under every rule; fair is 0.25 (no paper has these figures)"
SEED: Final = 0
QUICK_S, FULL_S = 400.0, 2000.0
"""Simulated seconds of a run; a fast worker makes a batch in a second."""
LIVE: Final = ("bsp", "asp", "backup(b=1)", "majority", "elastic(mode=local)", "rennala(batch={n})")
QUICK_LIVE: Final = "elastic(mode=local)"
QUICK_BATCHES: Final = 200
SHOWN: Final = (
    "asp(discount=inverse)",
    "elastic(mode=local)",
    "elastic(mode=local, weighting=workers)",
    "ringmaster(threshold=8)",
    "rennala(batch={n})",
    "diloco(steps=10)",
    "decoupled(steps=10, quorum={most})",
)
"""The cases of the mechanism: rules whose weights no other experiment shows."""
APART: Final = 0.02
"""Between live and simulated."""


def _claims() -> list[Claim]:
    made: list[Claim] = []
    for case in CASES:
        both = [
            Claim(row=row, at_least=share - case.tolerance, at_most=share + case.tolerance, why=case.why)
            for row, share in ((_slowest(case), case.slowest), (_long(case), case.long))
        ]
        made += mechanism(*both) if case.spec in SHOWN else both
    return made


def _slowest(case: Case) -> str:
    return f"{case.name}: slowest worker"


def _long(case: Case) -> str:
    return f"{case.name}: long batches"


def _apart(row: str) -> str:
    return f"{row}, live less simulated"


BY_SPEC: Final = {case.spec: case for case in CASES}
CLAIMS: Final = (
    *_claims(),
    Claim(row=_apart(_slowest(BY_SPEC[QUICK_LIVE])), at_least=-APART, at_most=APART, why="one rule, live and simulated", mode="quick"),
    *(
        Claim(row=_apart(row(BY_SPEC[spec])), at_least=-APART, at_most=APART, why="one rule, live and simulated", mode="full")
        for spec in LIVE
        for row in (_slowest, _long)
    ),
)


def simulated(case: Case, time_s: float) -> list[Row]:
    """Return both shares of a rule."""
    slowest = of_the_slowest(case.sync(4), time_s, servers=4 if case.servers else 1)
    long = of_long_batches(case.sync(8), time_s, servers=8 if case.servers else 1)
    return [Row(_slowest(case), None, slowest, "", "fair: 0.25"), Row(_long(case), None, long, "", "fair: 0.25")]


def alone(quick: bool, out: Path) -> list[Row]:
    """Return the shares of the rules whose weights no other experiment shows."""
    return [row for spec in SHOWN for row in simulated(BY_SPEC[spec], QUICK_S)]


def run(quick: bool, out: Path) -> list[Row]:
    """Measure all rules in the simulator and some live; draw both shares."""
    rows = [row for case in CASES for row in simulated(case, QUICK_S if quick else FULL_S)]
    found = {row.name: float(row.measured) for row in rows}
    _draw(found, out)
    for spec in (QUICK_LIVE,) if quick else LIVE:
        case = BY_SPEC[spec]
        for of, row in (("slowest", _slowest(case)), ("long", _long(case)))[: 1 if quick else 2]:
            share = live.shares(case.sync(live.WORKERS[of]), of, QUICK_BATCHES if quick else 0)[-1]
            note = f"live {share:.3f}, simulated {found[row]:.3f}"
            rows.append(Row(_apart(row), None, share - found[row], "", note))
    return rows


def _draw(found: dict[str, float], out: Path) -> None:
    figure = new_figure(7.0, 8.0)
    axes = figure.add_subplot()
    places = range(len(CASES))
    for offset, colour, named, words in ((-0.2, COLOURS[0], _slowest, "slowest of four"), (0.2, COLOURS[1], _long, "long batches")):
        axes.barh([place + offset for place in places], [found[named(case)] for case in CASES], 0.4, color=colour, label=words)
    axes.set_yticks(places, [case.name for case in CASES], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(0.25, color="black", linewidth=0.8)
    label(axes, x="share in the model; the line is fair", y="")
    save(figure, out / "bias.png")


VARIANTS: Final = {MECHANISM: alone}
