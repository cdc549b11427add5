"""Begin as bsp, watch the workers' turns, and change to another rule at a fold once that is predicted to be better for long enough."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from offbeat.core.about import About, Row
from offbeat.core.policy import Admit, Decision, Hold, Plan, ServerRule, View
from offbeat.core.settings import number, one_of, whole_number
from offbeat.policies.asp import ASP
from offbeat.policies.backup import Backup
from offbeat.policies.elastic import ElasticBSP
from offbeat.policies.rennala import Rennala
from offbeat.policies.replayed import SINGLE, Outlook, Turns, first_fresh, nobody_waits, one_by_one, part_of_rate
from offbeat.policies.ssp import DSSP, SSP
from offbeat.types import Seconds, Version, WorkerId

Allow: TypeAlias = Literal["exact", "biased", "stale", "any"]
Kind: TypeAlias = Literal["exact", "biased", "stale", "unbounded"]

KINDS: Final[dict[Allow, tuple[Kind, ...]]] = {
    "exact": ("exact",),
    "biased": ("exact", "biased"),
    "stale": ("exact", "stale"),
    "any": ("exact", "biased", "stale", "unbounded"),
}
"""By the setting: the kinds that may be chosen, the gentlest first."""
FAIR: Final = 0.5
"""The least part of a fair share of the gradients that every worker keeps under an *exact* rule."""
SHARES: Final = 8
"""Over how many windows shares are averaged, about: what makes each worker slow in turn, for a window or two, is fair to all."""
LEAST_TURNS: Final = 4
"""Turns of each worker before the first prediction."""
BETWEEN: Final = 2
"""Turns of each worker between two predictions, on average."""
BEFORE: Final = 8
"""Turns of a worker that are compared with its last four: by chance these are all longer, or all shorter, twice in 495 times."""
LONG_STAY: Final = 8
"""After so many times ``patience`` predictions under one rule, earlier returns are forgotten."""
MOST_RETURNS: Final = 3
BARRIER: Final = Backup(b=0)
BOUNDED: Final[tuple[ServerRule, ...]] = (SSP(staleness=3), DSSP(), ElasticBSP())
"""The rules that hold workers, with their sources' settings, by the lead that they allow."""


class Choice(NamedTuple):
    """A rule that may be chosen, and what it is predicted to make."""

    rule: ServerRule
    kind: Kind
    outlook: Outlook
    batch: int
    """Gradients of a fold."""
    kept: float | None = None
    """The least part of its fair share that a worker keeps, on average of the predictions; None: it is not judged by that."""

    @property
    def name(self) -> str:
        return spelled(self.rule)

    @property
    def single(self) -> bool:
        """Whether each gradient is folded by itself, at a 2n-th of the rate."""
        return self.kind in ("stale", "unbounded")


def spelled(rule: ServerRule) -> str:
    """Return the spelling of a rule without its defaults; `Backup` without spare workers is a barrier."""
    return "bsp" if rule == BARRIER else rule._spelled(rule.always_spelled or ())


@dataclass(frozen=True, kw_only=True)
class Auto(ServerRule):
    """Begin as `BSP`; change rule or setting at a fold once another has been predicted to be better ``patience`` times in succession.

    After every two turns of each worker the turns of the last ``window`` of the fastest are replayed under each candidate; see
    `replayed`. Where four turns of a worker were all longer, or all shorter, by ``gain`` than eight or more before, the window begins with
    them. A candidate's progress is ``sqrt(gradients/s * steps/s)``. The candidates, the gentlest first:

    - *exact*: ``backup(b)``, b = 0, 1, 2, 4 ... n / 2, as long as each worker keeps at least half of its share, in the predictions of
      about the last eight windows;
    - *biased*: the same without that condition, and ``rennala(batch=n)``: nothing is stale, and a slow worker may weigh nothing;
    - *stale*: ``ssp(staleness=3)``, ``dssp`` and ``elastic``;
    - ``asp`` (with ``allow=any`` only).

    The best of a kind is chosen if it makes ``gain`` times as much as the best of the gentler ones. A rule is left for one at least as
    gentle once it makes less than ``(1 + gain) / 2`` times as much. From a stale rule to a fresh one a gradient of each worker is lost,
    which counts against the change. A prediction of ``gain`` squared counts twice. A change back to the rule before takes twice the
    patience, a next one four times, at most eight.

    The script's rate is the one for bsp. A fold of k of n gradients has sqrt(k / n) of it where that is less than three quarters
    (``lr_rule=sqrt``); where each gradient is a step, it is divided by 2n, see docs/learning-rates.md. A step with a part of the rate
    counts as that part in the prediction. Batches below n / 2 are no candidates. Nor are rules
    that exchange parameters or decide per shard, which a job cannot take up in its midst, and ``dbw``, which needs norms that servers
    measure at each fold.

    Source: none; the kinds and the gain are those of ``offbeat advise``.

    >>> Auto().spelling, Auto(allow="biased").spelling
    ('auto', 'auto(allow=biased)')

    Raises:
        ConfigurationError: ``allow`` is none of the four words, or a number is out of its range.
    """

    about = About(
        examples=("auto", "auto(allow=biased)", "auto(allow=any, gain=1.0, patience=1, window=4)"),
        draws=lambda workers: [{"allow": get_args(Allow), "gain": (1.0, 1.0, 1.1), "patience": (1, 1, 2), "window": (4, 8)}],
        row=Row(
            "`auto`",
            "as `bsp` at first, then as the rule that it has changed to",
            "likewise",
            "slowness that is unknown before the job, or that changes; the rule announces each change with its figures",
        ),
    )

    always_spelled = ()

    allow: Allow = "exact"
    """Which kinds of rules may be chosen: ``exact``; ``biased`` and exact; ``stale`` and exact; or ``any``."""
    gain: float = 1.1
    """How many times the progress of a gentler rule is worth a change; at least 1."""
    patience: int = 3
    """How many predictions in succession must agree before a change, of which those of ``gain`` squared count twice; at least 1."""
    window: int = 32
    """Over how many turns of the fastest worker is looked back; at least 4."""

    def __post_init__(self) -> None:
        one_of("auto", "allow", self.allow, get_args(Allow))
        number("auto", "gain", self.gain, least=1.0)
        whole_number("auto", "patience", self.patience, least=1)
        whole_number("auto", "window", self.window, least=LEAST_TURNS)

    def start(self) -> ServerRule:
        return _Run(self)


class _Run(ServerRule):
    """One run: the rule of the moment, which answers, and the turns by which it is judged."""

    def __init__(self, rule: Auto) -> None:
        self._rule = rule
        self._now: ServerRule = BARRIER
        """The rule of the moment."""
        self._runs: ServerRule = BARRIER
        """Its state since the change to it, which answers."""
        self._single = False
        """Whether it folds each gradient by itself."""
        self._version: Version | None = None
        self._begun: dict[WorkerId, Seconds] = {}
        """When each worker was released last."""
        self._turns: dict[WorkerId, deque[tuple[Seconds, Seconds]]] = {}
        """When each turn ended, and how long it lasted."""
        self._changed_at: Seconds = 0.0
        """When a worker's times have changed last."""
        self._seen = 0
        """Turns since the last prediction."""
        self._agreed: tuple[str, int] = ("", 0)
        """The rule that the last predictions have wanted, and how many in succession; those of a great gain count twice."""
        self._left: ServerRule | None = None
        """The rule before the present one."""
        self._returns = 0
        """How often a change has led back to the rule before; forgotten after a long stay."""
        self._stay = 0
        """Predictions since the last change."""
        self._shares: dict[int, dict[WorkerId, tuple[float, float]]] = {}
        """By the spare workers of a backup: the sum of each worker's predicted shares, and of their weights; older ones weigh less."""

    def fold(self, view: View) -> Decision | None:
        if view.version != self._version:
            at_fold, self._version = self._version is not None, view.version
            if at_fold and self._seen >= BETWEEN * len(view.active) and not view.gathered and (changed := self._judge(view)):
                return changed
        decision = self._runs.fold(view)
        if decision is None or not decision.fold:
            return decision
        if self._single:
            return decision._replace(scale=decision.scale * SINGLE / max(1, len(view.active)))
        return decision

    def admit(self, view: View, worker: WorkerId) -> Admit | Hold:
        return self._runs.admit(view, worker)

    def plan(self, view: View, worker: WorkerId) -> Plan:
        begun, pushed = self._begun.get(worker), view.pushed_at(worker)
        if begun is not None and pushed is not None and pushed > begun:
            own = self._turns.setdefault(worker, deque(maxlen=self._rule.window))
            own.append((pushed, pushed - begun))
            self._seen += 1
            self._changed_at = max(self._changed_at, self._changed(own))
        self._begun[worker] = view.now
        return self._runs.plan(view, worker)

    def wake_at(self, view: View) -> Seconds | None:
        return self._runs.wake_at(view)

    def _judge(self, view: View) -> Decision | None:
        """Predict; return the change of the rule if it is due."""
        self._seen, self._stay = 0, self._stay + 1
        for worker in [worker for worker in self._begun if worker not in view.active]:
            del self._begun[worker]
            self._turns.pop(worker, None)
            for shares in self._shares.values():
                shares.pop(worker, None)
        workers = sorted(view.active)
        if len(workers) < 2 or any(len(self._turns.get(worker, ())) < LEAST_TURNS for worker in workers):
            return None
        begun = max(self._changed_at, *(self._turns[worker][0][0] - self._turns[worker][0][1] for worker in workers))
        choices = list(_choices(self._recent(workers, begun), partial(self._kept, workers), self._rule, self._now))
        own = next((one for one in choices if one.rule == self._now), None)
        best = chosen(choices, self._rule, own)
        if best is None or best.rule == self._now:
            self._agreed = ("", 0)
            return None
        great = own is None or best.outlook.progress >= self._rule.gain**2 * own.outlook.progress
        self._agreed = (best.name, 1 + great + (self._agreed[1] if self._agreed[0] == best.name else 0))
        if self._stay > LONG_STAY * self._rule.patience:
            self._returns = 0
        returns = self._returns + (best.rule == self._left)
        if self._agreed[1] < self._rule.patience << min(returns, MOST_RETURNS):
            return None
        self._agreed, self._left, self._now, self._returns, self._stay = ("", 0), self._now, best.rule, returns, 0
        self._runs, self._single = best.rule.start(), best.single
        return Decision((), _reason(best, own, spelled(self._left), workers, view.now - begun), becomes=best.name)

    def _kept(self, workers: Sequence[WorkerId], b: int, folded: Sequence[int]) -> float:
        """Add a prediction of ``backup(b)``, and return the least part of its fair share that a worker keeps on average."""
        own, fair, older = self._shares.setdefault(b, {}), sum(folded) / len(folded), 1.0 - BETWEEN / (SHARES * self._rule.window)
        for worker, count in zip(workers, folded, strict=True):
            share, weight = own.get(worker, (0.0, 0.0))
            own[worker] = share * older + count / fair, weight * older + 1.0
        return min(share / weight for share, weight in own.values())

    def _changed(self, own: Sequence[tuple[Seconds, Seconds]]) -> Seconds:
        """Return when a worker's times have changed: its last four turns are all longer, or all shorter, than eight or more before."""
        last, before = list(own)[-LEAST_TURNS:], [took for ended, took in list(own)[:-LEAST_TURNS] if ended > self._changed_at]
        took, gain = [took for _, took in last], self._rule.gain
        if len(before) >= BEFORE and (min(took) >= gain * max(before) or gain * max(took) <= min(before)):
            return last[0][0] - last[0][1]
        return 0.0

    def _recent(self, workers: Sequence[WorkerId], since: Seconds) -> Turns:
        """Return the turns since then, and the last ones of a worker that has made fewer than four."""
        found = []
        for worker in workers:
            turns = list(self._turns[worker])
            recent = [took for ended, took in turns if ended > since]
            found.append(recent if len(recent) >= LEAST_TURNS else [took for _, took in turns[-LEAST_TURNS:]])
        return found


def _choices(turns: Turns, kept: Callable[[int, Sequence[int]], float], rule: Auto, now: ServerRule) -> Iterator[Choice]:
    """Yield the candidates that make any progress, the gentlest first.

    Rules that hold workers are replayed only where one under which nobody waits would gain enough. One of them is left for a rule of
    another kind only, so that no more than one is replayed while it is the present one.

    Args:
        turns: those since the times have changed.
        kept: takes b and the folded gradients of each worker, and returns the least part of its share that a worker keeps on average.
        rule: the configuration.
        now: the present rule.
    """
    n, pushes, allowed = len(turns), sum(map(len, turns)), KINDS[rule.allow]
    most = 0.0
    for b in (0, *(1 << i for i in range(n.bit_length()) if 1 << i <= n // 2)):
        if (outlook := first_fresh(turns, n - b, pushes)) is not None:
            least = kept(b, outlook.folded) if b else 1.0
            kind: Kind = "exact" if least >= FAIR else "biased"
            most = max(most, outlook.progress) if kind in allowed else most
            yield Choice(Backup(b=b, lr_rule="sqrt" if part_of_rate(n - b, n) < 1.0 else "constant"), kind, outlook, n - b, least)
    if (outlook := first_fresh(turns, n, pushes, ahead=True)) is not None:
        yield Choice(Rennala(batch=n), "biased", outlook, n)
    free = nobody_waits(turns)
    bounded = (now,) if now in BOUNDED else BOUNDED if free.progress >= rule.gain * most else ()
    for one in bounded if "stale" in allowed else ():
        if (outlook := one_by_one(one, turns, pushes)) is not None:
            yield Choice(one, "stale", outlook, 1)
    yield Choice(ASP(), "unbounded", free, 1)


def chosen(choices: Sequence[Choice], rule: Auto, own: Choice | None) -> Choice | None:
    """Return the candidate to which to change, or the present rule, ``own``; None: there is no candidate.

    Args:
        choices: the candidates, the gentlest first; of one kind as well.
        rule: the configuration.
        own: the present rule; None: it is no candidate any more.
    """
    allowed = [one for one in choices if one.kind in KINDS[rule.allow]]
    best = next(iter(allowed), None)
    if best is None:
        return None
    for kind in KINDS[rule.allow]:
        leader = max((one for one in allowed if one.kind == kind), key=lambda one: one.outlook.progress, default=best)
        if leader.outlook.progress >= rule.gain * best.outlook.progress:
            best = leader
    if own is None or own not in allowed:
        return best
    gentler = choices.index(best) < choices.index(own)
    lost = 1.0 - 1.0 / rule.window if own.single and not best.single else 1.0
    margin = (1.0 + rule.gain) / 2.0
    if gentler:
        return own if own.outlook.progress >= margin * best.outlook.progress * lost else best
    return best if best.outlook.progress * lost >= rule.gain * own.outlook.progress else own


def _reason(best: Choice, own: Choice | None, before: str, workers: Sequence[WorkerId], span: Seconds) -> str:
    """Return why the rule changes, in figures."""
    outlook, n = best.outlook, len(workers)
    if best.single:
        rate = f"the learning rate is divided by {n / SINGLE:g}"
    else:
        part = part_of_rate(best.batch, n)
        rate = f"the learning rate is {f'multiplied by {part:.2f}' if part < 1.0 else 'that of the script'}"
    said = [f"predicted from {span:.3g} s of turns: {outlook.gradients:.3g} gradients/s in {outlook.steps:.3g} steps/s"]
    if own is not None:
        times = outlook.progress / own.outlook.progress
        said[0] += f", {before} {own.outlook.gradients:.3g} in {own.outlook.steps:.3g}; {times:.2f} times the progress"
        was = own.batch
        said.append(
            f"a version has {best.batch} of {n} gradients in place of {was}" if was != best.batch else f"versions of {was} gradients"
        )
    else:
        said.append(f"a version has {best.batch} of {n} gradients")
    said.append(rate)
    if outlook.least < FAIR:
        said.append(f"worker {workers[outlook.folded.index(min(outlook.folded))]} weighs {outlook.least:.2f} of its share")
        said[-1] += f", {best.kept:.2f} on average" if best.kept is not None else ""
    return "; ".join(said)
