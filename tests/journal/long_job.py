"""A simulated job of many versions, and what its coordinator, its tally and its table of causes hold at the end."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from tests.support.retained_objects import sizes

from offbeat.core.effects import Effect
from offbeat.core.events import Event
from offbeat.core.policy import ServerRule
from offbeat.journal.causes import Causes
from offbeat.journal.file import Journal
from offbeat.journal.records import job_record
from offbeat.journal.summary import Tally
from offbeat.policies import rule
from offbeat.sim.cluster import Cluster, Work
from offbeat.sim.simulation import Simulation
from offbeat.sim.training.noise import content as noise_of
from offbeat.sim.training.workload import Workload
from offbeat.types import NO_CAUSE, RecordId, Seconds

EVENTS = get_args(Event)


class Followed(Journal):
    """A journal without a file that also tells a table of causes what it is told, as the live coordinator does."""

    def __init__(self, tally: Tally) -> None:
        super().__init__(None, now=lambda: 0.0, listeners=(tally.add,))
        self.causes = Causes()

    def log(self, item: Event | Effect, t: Seconds, cause: RecordId = NO_CAUSE, optimizer: int = 0) -> RecordId:
        if isinstance(item, EVENTS):
            return super().log(item, t, self.causes.of(item))
        number = super().log(item, t, cause)
        self.causes.told(item, number)
        return number


def held(
    sync: str, versions: int, *, workers: int = 3, faults: str = "", samples: int | None = None, time_s: float | None = None
) -> Counter[str]:
    """Return the sizes of all containers after a job of this length (see `sizes`)."""
    policy = rule(sync)
    if policy.split_overlap is not None and samples is None:
        samples = 60
    cluster = Cluster(workers=workers, servers=2, compute="shifted_exponential(shift=0.3, scale=0.7)", faults=faults, seed=1)
    cluster = cluster if isinstance(policy, ServerRule) else cluster.without_servers()
    content = noise_of("noise(variance=4)") if isinstance(policy, ServerRule) and policy.measures != "nothing" else Workload()
    content.start(policy, cluster.total, cluster.servers, cluster.seed)
    tally = Tally()
    journal = Followed(tally)
    simulation = Simulation(policy, cluster, Work(versions=versions, time_s=time_s, samples=samples, batch=4), content, journal)
    journal.write(job_record(sync=policy.spelling, workers=workers, servers=cluster.servers, seed=1, started="simulated", script=""))
    simulation.run()
    assert tally.problems() == []
    found: Counter[str] = Counter()
    for root in (simulation.coordinator, tally, journal.causes):
        found += sizes(root)
    return found
