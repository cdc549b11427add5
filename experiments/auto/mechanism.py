"""How the rule changes, on simulated times alone: to what, how soon, and when not."""

from __future__ import annotations

from typing import Any, Final

from experiments.claims import Claim, mechanism
from experiments.result import Row
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.run import simulate

WORKERS: Final = 4
STEADY: Final = "lognormal(mean=1, sd=0.1, low=0.5)"
SLOW: Final = f"per_worker(law='{STEADY}', factors=(4, 1, 1, 1))"
WHILE: Final = f"windows(law='{STEADY}', worker=0, begin=100, end=300, factor=4)"
TIME_S: Final = 600.0
CLAIMS: Final = mechanism(
    Claim(row="nobody slow: changes", at_most=0, why="nothing gains a tenth"),
    Claim(row="one slow: rule", says="backup(b=1)", why="it is the one to leave out"),
    Claim(
        row="one slow: versions before the change",
        at_least=6,
        at_most=8,
        why="two predictions of a great gain, two turns apart, the first after four",
    ),
    Claim(row="one slow, exact: changes", at_most=0, why="the slow worker would weigh nothing"),
    Claim(row="slow for 200 s: rules", says="backup(b=1), bsp", why="it goes back when the slowness is over"),
)


def rows() -> list[Row]:
    """Return what is claimed."""
    slow, whole = changes("auto(allow=biased)", SLOW), changes("auto(allow=biased)", WHILE)
    return [
        Row("nobody slow: changes", None, len(changes("auto(allow=biased)", STEADY)), ""),
        Row("one slow: rule", None, slow[0]["rule"] if slow else "bsp", ""),
        Row("one slow: versions before the change", None, slow[0]["version"] if slow else "never", ""),
        Row("one slow, exact: changes", None, len(changes("auto", SLOW)), ""),
        Row("slow for 200 s: rules", None, ", ".join(change["rule"] for change in whole), ""),
    ]


def changes(sync: str, compute: str) -> list[dict[str, Any]]:
    """Return the changes of the rule in a run."""
    summary = simulate(sync, Cluster(workers=WORKERS, compute=compute), Work(time_s=TIME_S)).summary
    return list(summary["rule_changes"])
