"""Say who costs a job its time, why, since when, and what to do: the verdicts of the summary, the terminal, the page and the report.

`verdicts` is a pure function of `Costs`. A verdict costs at least 5 % of the job's time, or else nothing is said; deaths are told whatever
they cost. A worker that waits for others is never named: costs are of arrivals, which come before any wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median_low
from typing import Any, Final, Literal, NamedTuple

from offbeat.core.phases import COMPUTING, Phase
from offbeat.journal.costs import LINK, QUEUED, Causes, Costs, Death, WorkerCosts
from offbeat.types import Seconds

LEAST: Final = 0.05
"""The least share of the job's time about which anything is said."""
LEAST_BESIDE_SERVERS: Final = 0.1
"""The same for a worker that has no core, or is released late, where the workers of its host leave no core for the job's own servers and
supervisor: these made one of two workers on two cores 6 to 8 % late, in steps of 3 ms. It does not apply to a worker that queues for more
of its own time than these make it queue (`EVERYWHERE`), nor where the workers of the host together do (`CROWDED`)."""
CROWDED: Final = 0.27
"""The mean share of their own time for which the workers of a host queue, from which others than the job's own servers have its cores. In
undisturbed jobs in steps of 3 to 7 ms it was 0.09 to 0.22, and 0.29 to 0.36 with a busy neighbour on one of the two cores."""
FEW_FOLDS: Final = 5
SURE_FOLDS: Final = 20
DEATHS_TOLD: Final = 5
SAME: Final = 0.4
"""Workers of one verdict cost at least this part of what the costliest of them costs."""
SECOND: Final = 0.5
"""A worker's second cause has a verdict of its own if it costs at least this part of the first; else the first has both costs."""
BUSY: Final = 0.5
"""A phase whose processor time is below this part of its wall time waits for something."""
LATE_READING: Final = 1 / 3
"""A link is no cause if this part of what it is longer than with others is time without a core. The other processes of the job that share
the core are late for the same reason, which the worker's own readings do not tell; over a slow link they tell nothing at all."""
RECLAIMED: Final = 0.02
READ_BACK: Final = 30.0
"""Pages a step. A worker that reads so many from the disk, while tasks wait for memory for a share `RECLAIMED` of what it is late, is short
of memory: the kernel counts only a part of such a wait as one for memory. A file that is read for the first time stalls nobody."""
EVERYWHERE: Final = {"data": 0.4, "gc": 0.1, "evaluation": 0.1, "save": 0.1, QUEUED: 1 / 3}
"""By phase: the share of every worker's own time from which a verdict names the phase, though no worker is late by it. In steps of 3 to
7 ms the job's own servers and supervisor keep two workers on two cores waiting for 12 to 24 % of it; one busy neighbour for 41 to 48 %."""


class Advice(NamedTuple):
    """What a cause is called, and what helps."""

    one: str
    """What it is of one worker, after "its"."""
    several: str
    remedy: str


ADVICE: Final = {
    "data": Advice(
        "DataLoader",
        "DataLoaders",
        "give the DataLoader more processes (num_workers), and look at what one sample costs: decoding, disk, network",
    ),
    "forward": Advice(
        "forward pass", "forward passes", "look at the model and the length of its inputs on this worker, or give it smaller batches"
    ),
    "backward": Advice("backward pass", "backward passes", "look at the length of its inputs, or give it smaller batches"),
    "own": Advice("own code between the steps", "own code between the steps", "look at what the script does there on this worker"),
    "evaluation": Advice(
        "evaluation, or other passes without gradients",
        "evaluations, or other passes without gradients",
        "if it is an evaluation, make it less often, or a slice of it on every worker (docs/evaluating.md)",
    ),
    "gc": Advice(
        "garbage collection",
        "garbage collection",
        "call gc.freeze() once the model and the data are made, or gc.disable() and collect between epochs",
    ),
    "update": Advice(
        "optimizer's step", "optimizers' steps", "look at the optimizer on this worker: a fused one, or fewer cores for others"
    ),
    "save": Advice(
        "saving", "saving", "save less often, or let the job make checkpoints (--checkpoint), which takes a copy and writes it later"
    ),
    "push": Advice("push", "pushes", "encode what is sent (--wire bf16), or look at the link (offbeat doctor)"),
    "pull": Advice("pull", "pulls", "encode what is sent (--wire bf16), or look at the link (offbeat doctor)"),
    "compute": Advice("computing", "computing", "give it smaller batches, or choose a rule that does not wait for it"),
    LINK: Advice(
        "link: messages are long on their way",
        "links: messages are long on their way",
        "encode what is sent (--wire bf16), or look at the link (offbeat doctor)",
    ),
    QUEUED: Advice(
        "core, which other processes use",
        "cores, which other processes use",
        "end what else runs there, or give the worker cores of its own",
    ),
    "memory": Advice("memory, which is short", "memory, which is short", "give the worker more memory, or smaller batches"),
    "throttled": Advice(
        "share of the cores, which it has used up",
        "shares of the cores, which they have used up",
        "raise the limit of its container (cpu.max)",
    ),
    "gpu": Advice(
        "GPU, whose clock is lowered because of heat or power",
        "GPUs, whose clocks are lowered because of heat or power",
        "look at its cooling and power limit (nvidia-smi -q -d PERFORMANCE), or give it smaller batches",
    ),
    "stolen": Advice(
        "virtual machine, from which the hypervisor takes time",
        "virtual machines, from which the hypervisor takes time",
        "move it to another machine",
    ),
}
ON_ONE_HOST: Final = "no network is between these processes: look at what else uses the cores and the memory of this machine (offbeat top)"
"""The remedy for a slow exchange where all workers share a host, on which ``--wire`` changes nothing."""
OUTSIDE: Final = {"memory": "memory_stalled_s", "throttled": "throttled_s", "stolen": "stolen_s"}
"""Causes outside of a process, and the reading that tells of them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One finding. Times and costs are in seconds of the journal's clock."""

    kind: Literal["slow", "everywhere", "oversubscribed", "death"]
    workers: tuple[int, ...]
    cause: str
    """A phase of `core.phases.Phase`, or ``queued``, ``link``, ``memory``, ``throttled``, ``stolen``, ``cores``, ``death``."""
    since_s: Seconds | None
    """None: from the beginning."""
    cost_s: Seconds
    share: float
    """Of the job's time since the first release."""
    what: str
    """The finding, a sentence."""
    evidence: str
    """What was measured, a sentence."""
    remedy: str
    """What helps; empty: nothing has to be done."""
    worth: float
    """At most this share of the job's time is saved by it."""
    confidence: Literal["high", "medium", "low"]
    details: dict[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return the verdict as JSON can carry it."""
        return {**asdict(self), "workers": list(self.workers)}


def verdicts(costs: Costs) -> list[Verdict]:
    """Return what is worth saying about a job, the costliest first, deaths last.

    >>> verdicts(Costs())
    []
    """
    return [*sorted(_slow(costs), key=lambda verdict: -verdict.cost_s), *_deaths(costs)]


def _slow(costs: Costs) -> list[Verdict]:
    if costs.folds < FEW_FOLDS or costs.seconds <= 0.0:
        return []
    found = _by_cause(costs)
    if (crowded := _oversubscribed(costs)) is not None:
        return [crowded, *(one for one in found if one.cause != QUEUED and one.share >= max(3 * LEAST, crowded.share))]
    everywhere = _everywhere(costs)
    said = {(one.workers, one.cause): one.share for one in everywhere}
    return [*(one for one in found if one.share > said.get((one.workers, one.cause), 0.0)), *everywhere]


def _by_cause(costs: Costs) -> list[Verdict]:
    """Return a verdict for each cause, with the workers that it makes slow."""
    groups: dict[str, dict[int, Seconds]] = {}
    late = _LateReading(costs)
    for number, causes in costs.by_worker().items():
        for cause, cost_s in _main(_renamed(costs.workers[number], late.left_out(number, causes))).items():
            groups.setdefault(cause, {})[number] = cost_s
    said = []
    for cause, by_worker in groups.items():
        most = max(by_worker.values())
        by_worker = {number: cost_s for number, cost_s in by_worker.items() if cost_s >= SAME * most}
        least = LEAST_BESIDE_SERVERS if cause in (QUEUED, LINK) and _beside_servers(costs, by_worker) else LEAST
        if sum(by_worker.values()) >= least * costs.seconds:
            said.append(_verdict(costs, cause, by_worker))
    return said


def _main(causes: Causes) -> Causes:
    """Give a worker's whole cost to its main cause, and to others that are nearly as large: a slow phase makes others a little slower."""
    if not causes:
        return {}
    most = max(causes.values())
    kept = {cause: cost_s for cause, cost_s in causes.items() if cost_s >= SECOND * most}
    factor = sum(causes.values()) / sum(kept.values()) if kept and most > 0.0 else 0.0
    return {cause: cost_s * factor for cause, cost_s in kept.items()}


class _LateReading:
    """Tells a slow link from a worker without a core, which reads its releases late."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        measured = [worker for worker in costs.workers.values() if worker.steps]
        self._least_late = min((worker.woken_late_s / worker.steps for worker in measured), default=0.0)
        self._least_link = min((worker.totals.get(LINK, 0.0) / worker.steps for worker in measured), default=0.0)

    def left_out(self, number: int, causes: Causes) -> Causes:
        """Return the causes of a worker's cost without a link that is none."""
        if LINK not in causes:
            return causes
        worker = self._costs.workers[number]
        late = worker.woken_late_s / worker.steps - self._least_late
        link = worker.totals.get(LINK, 0.0) / worker.steps - self._least_link
        if not _queues(self._costs, number) and late < LATE_READING * link:
            return causes
        return {**{name: value for name, value in causes.items() if name != LINK}, QUEUED: causes.get(QUEUED, 0.0) + causes[LINK]}


def _beside_servers(costs: Costs, numbers: Iterable[int]) -> bool:
    """Return whether the job's own servers may be why these workers have no core: they queue little, and their hosts have no other."""
    shared = _sharing(costs)
    return all(
        not _queues(costs, number) and any(number in group and len(group) >= cores for group, cores in shared.values())
        for number in numbers
    )


def _queues(costs: Costs, number: int) -> bool:
    """Return whether a worker waits for a core for longer than the job's own servers make it wait.

    It does if its own share of time says so, or the mean over the workers of its host, and its share is no less than that mean.
    """

    def share(one: int) -> float:
        worker = costs.workers[one]
        return worker.totals.get(QUEUED, 0.0) / worker.own_s if worker.own_s > 0.0 else 0.0

    if share(number) < CROWDED or share(number) >= EVERYWHERE[QUEUED]:
        return share(number) >= EVERYWHERE[QUEUED]
    together = next((group for group, _ in _sharing(costs).values() if number in group), [number])
    return share(number) >= fmean(map(share, together)) >= CROWDED


def _sharing(costs: Costs) -> dict[str, tuple[list[int], float]]:
    """Return the measured workers of each host, and the number of cores that they share."""
    found: dict[str, tuple[list[int], float]] = {}
    for number, worker in costs.workers.items():
        if worker.steps and worker.cores:
            group, cores = found.get(worker.host, ([], 0.0))
            group.append(number)
            found[worker.host] = group, max(cores, worker.cores)
    return found


def _renamed(worker: WorkerCosts, causes: Causes) -> Causes:
    """Say what is behind phases that are long without using the processor, where the system tells: short memory, a limit, a hypervisor."""
    computed = {cause: cost_s for cause, cost_s in causes.items() if cause in ("forward", "backward", "compute")}
    if computed and worker.gpu_throttled >= BUSY * worker.gpu_looks > 0:
        return {**{name: value for name, value in causes.items() if name not in computed}, "gpu": sum(computed.values())}
    idle = {cause: cost_s for cause, cost_s in causes.items() if cause in IDLE and _busy(worker, cause) < 1.0 - BUSY / 2}
    whole = sum(idle.values())
    for cause, reading in OUTSIDE.items():
        outside_s = worker.host_readings.get(reading, 0.0)
        if whole > 0.0 and (outside_s >= BUSY * whole or (cause == "memory" and outside_s >= RECLAIMED * whole and _reads_back(worker))):
            return {**{name: value for name, value in causes.items() if name not in idle}, cause: whole}
    return causes


def _reads_back(worker: WorkerCosts) -> bool:
    """Return whether the worker waits for pages of its memory from the disk all the time."""
    return worker.host_readings.get("major_faults", 0.0) >= READ_BACK * worker.steps


IDLE: Final = frozenset({Phase.DATA.label, Phase.PUSH.label, Phase.PULL.label, QUEUED, *(phase.label for phase in COMPUTING)})


def _busy(worker: WorkerCosts, cause: str) -> float:
    """Return the share of a phase in which the process used a processor."""
    wall = worker.totals.get(cause, 0.0)
    return min(1.0, worker.used.get(cause, 0.0) / wall) if wall > 0.0 else 0.0


def _verdict(costs: Costs, cause: str, by_worker: dict[int, Seconds]) -> Verdict:
    workers = sorted(by_worker, key=lambda number: -by_worker[number])
    first, cost_s = costs.workers[workers[0]], sum(by_worker.values())
    share, advice, many = cost_s / costs.seconds, ADVICE[cause], len(workers) > 1
    if costs.together:
        what = f"{named(workers, capital=True)} cost{'' if many else 's'} this job {percent(share)} of its time"
    else:
        what = f"{named(workers, capital=True)} {'are' if many else 'is'} slow, which costs this job {percent(share)} of what it could do"
    remedy = ON_ONE_HOST if cause in (LINK, Phase.PUSH.label, Phase.PULL.label) and len(_sharing(costs)) == 1 else advice.remedy
    why = _why(costs, workers, cause)
    confidence: Literal["high", "medium", "low"] = "high" if costs.folds >= SURE_FOLDS else "medium"
    if cause == Phase.COMPUTE.label or (cause in ("forward", "backward") and _busy(first, cause) < BUSY):
        confidence = "medium"
    if first.slowed and cause in (Phase.OWN.label, Phase.COMPUTE.label):
        remedy = "leave out what slows it on purpose"  # the script has no code there that could be looked at
    if batches := _larger_batches(costs, workers[0]):
        remedy = f"give it smaller batches (--batch {workers[0]}=...): {batches}"
    return Verdict(
        "slow",
        tuple(sorted(workers)),
        cause,
        _since(costs, workers),
        round(cost_s, 6),
        round(share, 6),
        f"{what}: {'their' if many else 'its'} {advice.several if many else advice.one}",
        why,
        remedy,
        round(share, 6),
        confidence,
        {str(number): round(by_worker[number] / costs.seconds, 6) for number in workers},
    )


def _why(costs: Costs, workers: Sequence[int], cause: str) -> str:
    """Return what was measured, in a sentence."""
    worker = costs.workers[workers[0]]
    said = []
    named_ones = frozenset(workers)
    others = [other for number, other in costs.workers.items() if number not in named_ones and other.steps > 1]
    if worker.totals.get(cause, 0.0) > 0.0:
        text = f"{short(worker.totals[cause] / worker.steps)} a step"
        if others:
            text += f", {short(median_low(other.totals.get(cause, 0.0) / other.steps for other in others))} on the others"
        said.append(text)
        if cause in ("forward", "backward", "own", "data") and _busy(worker, cause) > 0.0:
            said.append(f"{percent(_busy(worker, cause))} of it on a processor")
    process, pushes = max(worker.processes.items(), key=lambda item: item[1], default=(0, 0))
    if 2 * pushes > sum(worker.processes.values()):
        said.append(f"its process {process} is the slowest in {pushes:,} of {sum(worker.processes.values()):,} steps")
    if cause == "memory":
        said.append(f"{worker.host_readings.get('major_faults', 0.0) / worker.steps:,.0f} pages read from the disk a step")
    if costs.together:
        late = sum(costs.workers[number].late for number in workers)
        said.append(f"{late:,} of {costs.folds:,} folds waited for {'it' if len(workers) == 1 else 'them'} last")
    if worker.slowed:
        said.append(f"it is slowed on purpose ({worker.slowed})")
    return "; ".join(said)


def _larger_batches(costs: Costs, number: int) -> str:
    batches = {one: worker.samples / worker.steps for one, worker in costs.workers.items() if worker.steps and worker.samples}
    if number not in batches or len(batches) < 2:
        return ""
    usual = median_low(batches.values())
    return f"they have {batches[number]:.0f} samples, and {usual:.0f} on the others" if batches[number] > 1.5 * usual else ""


def _since(costs: Costs, workers: Iterable[int]) -> Seconds | None:
    """Return when these workers began to cost anything; None: at the beginning, or it is not known."""
    series = [costs.workers[number].series for number in workers]
    began = min((at for one in series if (at := one.since(LEAST)) is not None), default=None)
    return None if began is None or costs.began is None or began <= costs.began + 2 * series[0].width else began


def _oversubscribed(costs: Costs) -> Verdict | None:
    """Return the verdict on a host that has fewer cores than workers, if all of them queue for a core."""
    for host, (numbers, cores) in _sharing(costs).items():
        shares = [_queued(costs.workers[number]) for number in numbers]
        if len(numbers) > cores and (share := median_low(shares)) >= LEAST:
            where, most = f" on {host}" if host else "", max(1, int(cores))
            return Verdict(
                "oversubscribed",
                tuple(sorted(numbers)),
                "cores",
                None,
                round(share * costs.seconds, 6),
                round(share, 6),
                f"Oversubscribed: {len(numbers)} workers{where} share {cores:g} core{'s' * (cores != 1)}",
                f"they are ready to run and have no core for {percent(share)} of their time",
                f"start at most {most} worker{'s' * (most != 1)} here",
                round(share, 6),
                "high",
            )
    return None


def _queued(worker: WorkerCosts) -> float:
    whole = worker.own_s + worker.waited_s
    return worker.totals.get(QUEUED, 0.0) / whole if whole > 0.0 else 0.0


def _everywhere(costs: Costs) -> list[Verdict]:
    """Return what takes long on every worker, so that none of them is late by it."""
    workers = {number: worker for number, worker in costs.workers.items() if worker.steps > 1 and worker.own_s > 0.0}
    said = []
    for cause, least in EVERYWHERE.items():
        shares = [worker.totals.get(cause, 0.0) / worker.own_s for worker in workers.values()]
        if not shares or min(shares) < least:
            continue
        share = min(worker.totals.get(cause, 0.0) / (worker.own_s + worker.waited_s) for worker in workers.values())
        if share < LEAST:
            continue
        if cause == QUEUED and (parents := _with_busy_children(costs)):
            said.append(_beside_children(costs, parents, share))
            continue
        advice, a_step = ADVICE[cause], min(worker.totals[cause] / worker.steps for worker in workers.values())
        said.append(
            Verdict(
                "everywhere",
                tuple(sorted(workers)),
                cause,
                None,
                round(share * costs.seconds, 6),
                round(share, 6),
                f"{'Every' if len(workers) > 1 else 'The'} worker {_spends(cause, percent(share))}",
                f"at least {short(a_step)} a step on {'each of them' if len(workers) > 1 else 'it'}",
                advice.remedy,
                round(share, 6),
                "high" if costs.folds >= SURE_FOLDS else "medium",
            )
        )
    return said


def _with_busy_children(costs: Costs) -> list[int]:
    """Return the workers whose own processes, such as those of a DataLoader, use the cores for which all workers wait."""
    children_s = {number: worker.host_readings.get("children_s", 0.0) for number, worker in costs.workers.items()}
    if sum(children_s.values()) < BUSY * sum(worker.totals.get(QUEUED, 0.0) for worker in costs.workers.values()):
        return []
    return sorted(number for number, seconds in children_s.items() if seconds >= SAME * max(children_s.values()))


def _beside_children(costs: Costs, parents: list[int], share: float) -> Verdict:
    used_s, many = sum(costs.workers[number].host_readings["children_s"] for number in parents), len(parents) > 1
    return Verdict(
        "everywhere",
        tuple(parents),
        Phase.DATA.label,
        None,
        round(share * costs.seconds, 6),
        round(share, 6),
        f"Every worker waits {percent(share)} of its time for a core, which processes of the DataLoader{'s' * many} of {named(parents)} "
        "use",
        f"the processes that {'these workers have' if many else 'this worker has'} started used {used_s / costs.seconds:.1f} cores",
        "look at what one sample costs, give the DataLoader fewer processes (num_workers), or start fewer workers on this machine",
        round(share, 6),
        "medium",
    )


def _spends(cause: str, part: str) -> str:
    """Return that a worker spends a part of its time on a phase, as the end of a sentence. It waits for a core, and does nothing on it."""
    if cause == QUEUED:
        return f"waits {part} of its time for a core, which other processes use"
    return f"spends {part} of its time on its {ADVICE[cause].one}"


def _deaths(costs: Costs) -> list[Verdict]:
    """Tell each death in full; of more than `DEATHS_TOLD`, the costliest."""
    told = [_death(costs, number, death) for number, worker in costs.workers.items() for death in worker.deaths]
    told.sort(key=lambda verdict: -verdict.cost_s)
    return sorted(told[:DEATHS_TOLD], key=lambda verdict: verdict.since_s or 0.0)


def _death(costs: Costs, number: int, death: Death) -> Verdict:
    away_s, cost_s = death.away_s(costs.now), death.cost_s(costs.now)
    share = cost_s / costs.seconds if costs.seconds > 0.0 else 0.0
    came = "did not come back" if death.back is None else f"was back after {short(away_s)}"
    stalled = f"the others waited {short(death.stalled_s)} until the job knew" if death.stalled_s >= 1e-3 else "nobody waited for it"
    given = f"; {death.samples:,} samples that it held were dealt out again" if death.samples else ""
    remedy = "see its last output (--log-dir); --max-restarts says how often it is started again"
    if death.lost:
        remedy = "the agent or command that ran it is gone; the same command, there or elsewhere, brings it back (Ray does so by itself)"
    return Verdict(
        "death",
        (number,),
        "death",
        round(death.t, 6),
        round(cost_s, 6),
        round(share, 6),
        f"Worker {number} died at {death.t:.1f} s and {came}: {percent(share)} of the job's time",
        f"{stalled}{given}" + (f"; {death.reason}" if death.reason else ""),
        "" if death.back is not None else remedy,
        round(share, 6),
        "high",
        {"away_s": round(away_s, 6), "stalled_s": round(death.stalled_s, 6), "samples": float(death.samples)},
    )


def named(workers: Sequence[int], *, capital: bool = False) -> str:
    """Return workers in words, the first of many.

    >>> named([2]), named([3, 1, 2]), named(range(12))
    ('worker 2', 'workers 1, 2 and 3', 'workers 0, 1, 2, 3, 4 and 7 more')
    """
    numbers = sorted(workers)
    shown = [str(number) for number in numbers] if len(numbers) <= 6 else [*map(str, numbers[:5]), f"{len(numbers) - 5} more"]
    words = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{'W' if capital else 'w'}orker{'s' * (len(numbers) > 1)} {words}"


def percent(share: float) -> str:
    """Return a share in per cent.

    >>> percent(0.364), percent(0.004)
    ('36 %', 'less than 1 %')
    """
    return f"{share:.0%}".replace("%", " %") if share >= 0.005 else "less than 1 %"


def short(seconds: Seconds) -> str:
    """Return seconds as a person would say them.

    >>> short(0.0364), short(2.5), short(0.00004)
    ('36.4 ms', '2.5 s', '0.04 ms')
    """
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{seconds * 1e3:.{1 if seconds >= 1e-4 else 2}f} ms"
