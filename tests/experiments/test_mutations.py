"""A rule that is broken on purpose breaks a claim of the experiment that shows its mechanism: else the experiment shows nothing."""

from __future__ import annotations

import importlib
import random
import subprocess
from pathlib import Path

import pytest
from experiments.__main__ import Options, claims_of
from experiments.claims import MECHANISM, Verdict, judge
from tests.experiments.mutations import Mutation, every
from tests.tiers import NIGHT, marked

from offbeat.policies import RULES

MUTATIONS = every()
DRAWN = 3


def head() -> str:
    """Return the commit, or nothing outside of a checkout: processes of one test run draw the same mutations, other commits draw others."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, check=False, capture_output=True, text=True)
    return done.stdout.strip()


CHOSEN = MUTATIONS if NIGHT else random.Random(head()).sample(MUTATIONS, min(DRAWN, len(MUTATIONS)))


def judged(experiment: str) -> list[Verdict]:
    """Run the mechanism of an experiment in this process and judge its claims."""
    module = importlib.import_module(f"experiments.{experiment}")
    rows = module.VARIANTS[MECHANISM](quick=True, out=Path())
    return judge(claims_of(module, Options(quick=True, variant=MECHANISM)), rows)


# dbw_fig1 shows how DBW estimates, which tests/policies/test_dbw.py tests; dbw_fig3 what follows from it, as dbw_fig2 does. bias and
# learning_rates have tables of all rules, and take longest.
LONG = ["bias", "dbw_fig1", "dbw_fig2", "learning_rates"]


@pytest.mark.parametrize("experiment", marked(sorted({mutation.experiment for mutation in MUTATIONS}), night=LONG))
def test_the_rules_as_they_are_show_the_mechanism(experiment: str) -> None:
    assert [str(verdict) for verdict in judged(experiment) if not verdict.holds] == []


@pytest.mark.parametrize("mutation", CHOSEN, ids=[mutation.name for mutation in CHOSEN])
def test_a_broken_rule_breaks_a_claim(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.apply(monkeypatch)
    broken = [str(verdict) for verdict in judged(mutation.experiment) if not verdict.holds]
    print(*broken, sep="\n")
    assert broken, f"{mutation.experiment} passes with {mutation.name}"


def test_every_rule_has_a_mutation() -> None:
    assert set(RULES) - {mutation.rule for mutation in MUTATIONS} == set()
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
