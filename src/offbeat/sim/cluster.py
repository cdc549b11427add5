"""What is simulated: the machines and what befalls them, and the work they are given. Plain settings, checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from offbeat.core.policy import whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.faults import Freeze, Script, Stop, Vanish, script
from offbeat.sim.latency.registry import Constant, Law, law
from offbeat.types import Seconds


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers and servers, and how long everything takes. The same cluster and seed serve any rule.

    Laws and scripts may be given as spellings.

    >>> Cluster(workers=4, compute="shifted_exponential(shift=0.3, scale=0.7)").compute
    ShiftedExponential(shift=0.3, scale=0.7)
    """

    workers: int
    """At least 1; more may join by the script of faults."""
    servers: int = 1
    """At least 1. Each holds one shard."""
    compute: str | Law = field(default_factory=lambda: Constant(seconds=1.0))
    """Seconds of one iteration of one worker; drawn for (worker, number of the iteration)."""
    per_sample: str | Law = field(default_factory=lambda: Constant(seconds=0.0))
    """Seconds in addition for each sample of the batch."""
    delay: str | Law = field(default_factory=lambda: Constant(seconds=0.0))
    """Seconds that parameters take from a server to a worker; drawn for (server, worker, number of the message)."""
    push_delay: str | Law = field(default_factory=lambda: Constant(seconds=0.0))
    """Seconds that a push takes from a worker to a server."""
    update_s: Seconds = 0.0
    """What a fold costs the server that makes it, in seconds; it does nothing else meanwhile."""
    faults: str | Script = ""
    """See `faults.script`."""
    timeout_s: Seconds = 10.0
    """Silence after which a worker is dead. It matters only where somebody freezes or vanishes: other deaths are seen at once."""
    seed: int = 0
    """Of everything that is drawn. Equal seeds give equal runs, and different rules under one seed meet the same times."""

    def __post_init__(self) -> None:
        whole_number("cluster", "workers", self.workers, least=1)
        whole_number("cluster", "servers", self.servers, least=1)
        for name in ("compute", "per_sample", "delay", "push_delay"):
            object.__setattr__(self, name, law(getattr(self, name)))
        object.__setattr__(self, "faults", script(self.faults))
        for name, value, least in (("update_s", self.update_s, 0.0), ("timeout_s", self.timeout_s, 0.1)):
            if not least <= value < math.inf:
                raise ConfigurationError(f"cluster({name}={value!r}): a number of seconds of at least {least:g}")

    @property
    def script(self) -> Script:
        """The faults, read."""
        assert isinstance(self.faults, Script)
        return self.faults

    @property
    def total(self) -> int:
        """How many workers there are once everybody has joined."""
        return self.script.total(self.workers)

    @property
    def silence_s(self) -> Seconds | None:
        """The timeout, if any worker can fall silent at all."""
        return self.timeout_s if any(isinstance(fault, Freeze | Vanish) for fault in self.script.faults) else None

    def law(self, name: str) -> Law:
        """One of the laws, read."""
        found = getattr(self, name)
        assert isinstance(found, Law)
        return found

    def without_servers(self) -> Cluster:
        """The same for a rule that has none: one process coordinates, and nobody notices if it stands still for a while."""
        return replace(self, servers=1, faults=Script(tuple(fault for fault in self.script.faults if not isinstance(fault, Stop))))

    def check(self) -> None:
        """Whether all of this can be.

        Raises:
            ConfigurationError: a law serves fewer workers, or a fault names somebody who is not there.
        """
        self.script.check(self.workers, self.servers)
        for name in ("compute", "per_sample"):
            self.law(name).check(self.total)
        for name in ("delay", "push_delay"):
            self.law(name).check(self.total * self.servers)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is computed, and when it is enough. The first limit that is reached ends the run."""

    versions: int | None = None
    """Stop with this version."""
    time_s: Seconds | None = None
    """Stop at this time, in simulated seconds."""
    epochs: int | None = None
    """Stop when every worker has gone through so many epochs; needs ``samples``."""
    samples: int | None = None
    """The size of the data set, if the coordinator is to deal it out in leases; None: every worker has samples without end."""
    batch: int = 1
    """The samples of one iteration, where the rule's plan does not say otherwise."""

    def __post_init__(self) -> None:
        for name in ("versions", "epochs", "samples"):
            if getattr(self, name) is not None:
                whole_number("work", name, getattr(self, name), least=1)
        whole_number("work", "batch", self.batch, least=1)
        if self.time_s is not None and not 0.0 < self.time_s < math.inf:
            raise ConfigurationError(f"work(time_s={self.time_s!r}): a number of seconds greater than 0")
        if self.epochs is not None and self.samples is None:
            raise ConfigurationError(f"work(epochs={self.epochs}): epochs end where samples are dealt out; give samples too")
        if self.versions is None and self.time_s is None and self.epochs is None:
            raise ConfigurationError("work(): say when it is enough: versions, time_s, or epochs with samples")
