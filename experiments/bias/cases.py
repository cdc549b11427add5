"""The rules with typical settings, and what slow workers and long batches weigh under each: the claims, and the table of docs/bias.md."""

from __future__ import annotations

from typing import Final, NamedTuple

ALL_WAIT: Final = "all wait for the slowest worker: 1/4"
PUSHES: Final = "each batch counts alike, and the slowest worker makes 1 of 11"


class Case(NamedTuple):
    """A rule, and the shares that it gives: 0.25 is fair."""

    spec: str
    """With ``{n}`` for the number of workers and ``{most}`` for three quarters of them."""
    slowest: float
    """Of the slowest of four workers, each with data of its own, with speeds 1, 1, 1/2, 1/4."""
    long: float
    """Of the quarter of the batches that take three times as long, of eight workers with a common pool."""
    why: str
    """What the shares follow from."""
    tolerance: float = 0.01
    """Of both; runs of 400 and 2,000 seconds differ by less."""

    def sync(self, workers: int) -> str:
        """Return the rule for a number of workers."""
        return self.spec.format(n=workers, most=3 * workers // 4)

    @property
    def name(self) -> str:
        """The rule with its settings in words."""
        return self.spec.format(n="n", most="3n/4")

    @property
    def servers(self) -> bool:
        """Whether the parameters are divided among as many servers as there are workers."""
        return self.spec.startswith("psp")


CASES: Final = (
    Case("bsp", 0.25, 0.25, ALL_WAIT),
    Case("auto", 0.25, 0.095, "it waits for a worker that is always slow; half of the workers are waited for where any may be slow"),
    Case("asp", 0.09, 0.25, PUSHES),
    Case("asp(discount=inverse)", 0.025, 0.107, "slow batches are stale, and stale ones are discounted"),
    Case("ssp(staleness=3)", 0.248, 0.25, "at the bound all go at the pace of the slowest worker"),
    Case("dssp", 0.246, 0.25, "at the bound all go at the pace of the slowest worker, after a start without waiting", 0.02),
    Case("backup(b=1)", 0.0, 0.161, "the slowest worker is always late and dropped; a long batch often"),
    Case("backup(b=2)", 0.0, 0.088, "the slow workers are always late and dropped; a long batch mostly"),
    Case("dbw", 0.25, 0.002, "gradients that share nothing let it wait for all; gradients that agree let it wait for one"),
    Case("b_dbw", 0.001, 0.04, "few are waited for, those of the fastest", 0.03),
    Case("psp(c={most}, b=0.75)", 0.0, 0.088, "the last quarter of the workers is dropped"),
    Case("psp(c={n}, b=0.75)", 0.25, 0.25, ALL_WAIT),
    Case("elastic", 0.092, 0.25, PUSHES),
    Case("elastic(mode=bulk)", 0.092, 0.25, PUSHES),
    Case("elastic(mode=local)", 0.091, 0.25, PUSHES),
    Case("elastic(mode=local, weighting=workers)", 0.25, 0.234, "each worker counts alike, and one with long batches makes fewer steps"),
    Case("ensemble", 0.25, 0.25, ALL_WAIT),
    Case("adacomm", 0.25, 0.25, ALL_WAIT),
    Case("diloco(steps=10)", 0.25, 0.25, ALL_WAIT),
    Case("decoupled(steps=10, quorum={most})", 0.076, 0.25, "the slowest worker makes 1 push of 11, some from an older version", 0.02),
    Case("ringmaster(threshold={n})", 0.0, 0.033, "slow batches are too stale and dropped"),
    Case("ringmaster(threshold=8)", 0.003, 0.033, "slow batches are too stale and dropped"),
    Case("rennala(batch={n})", 0.0, 0.053, "slow batches miss their version and are dropped"),
    Case("majority", 0.14, 0.25, "the slowest worker is waited for where it is drawn"),
    Case("solo", 0.09, 0.25, PUSHES),
    Case("solo(delivery=latest)", 0.085, 0.253, "as solo, less what a late rank never applies"),
    Case("first_of(m=2)", 0.1, 0.25, "the slowest worker is waited for where it is drawn twice"),
    Case("all_of(m=2)", 0.179, 0.25, "the slowest worker is waited for where it is drawn once"),
    Case("quorum(q={most})", 0.139, 0.25, "all wait for the third, of speed 1/2; the slowest worker makes half as many batches"),
    Case("full", 0.25, 0.25, ALL_WAIT),
    Case("dpsgd", 0.25, 0.25, ALL_WAIT),
    Case("sgp", 0.249, 0.25, ALL_WAIT),
    Case("adpsgd", 0.09, 0.25, PUSHES),
)
"""Every rule of the library, those whose setting decides several times."""


def in_words(case: Case) -> str:
    """Return what the share of the slowest worker means for data that differ between workers."""
    if case.slowest > 0.22:
        return "counts like the others'"
    if case.slowest > 0.12:
        return "counts less, not as little as its speed"
    return "counts by its speed" if case.slowest > 0.06 else "hardly counts, or is lost"


def rows() -> str:
    """Return the lines of the table in docs/bias.md."""
    return "".join(f"| `{case.name}` | {case.slowest:.2f} | {in_words(case)} | {case.long:.2f} |\n" for case in CASES)
