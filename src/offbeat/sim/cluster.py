"""Settings of a simulation: the machines with their latency models and faults, and the amount of work. Checked before a run starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from offbeat.core.batch_sizes import BatchOrder, Deal
from offbeat.core.policy import whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.faults import Freeze, Script, Stop, Vanish, script
from offbeat.sim.latency.registry import Constant, Law, law
from offbeat.types import Seconds, WorkerId


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Workers and servers, and how long computations and messages take. One cluster and seed serve any rule.

    Latency models and fault scripts may be given as text.

    >>> Cluster(workers=4, compute="shifted_exponential(shift=0.3, scale=0.7)").compute
    ShiftedExponential(shift=0.3, scale=0.7)
    """

    workers: int
    """At least 1; the script of faults may add more."""
    servers: int = 1
    """At least 1. Each holds one shard."""
    compute: str | Law = field(default_factory=lambda: Constant(seconds=1.0))
    """Seconds of one iteration of one worker; drawn by (worker, number of the iteration)."""
    per_sample: str | Law = field(default_factory=lambda: Constant(seconds=0.0))
    """Additional seconds for each sample of the batch."""
    delay: str | Law = field(default_factory=lambda: Constant(seconds=0.0))
    """Seconds that parameters take from a server to a worker; drawn by (server, worker, number of the message)."""
    push_delay: str | Law = field(default_factory=lambda: Constant(seconds=0.0))
    """Seconds that a push takes from a worker to a server."""
    update_s: Seconds = 0.0
    """Seconds for which a fold occupies its server; the server handles no message meanwhile."""
    faults: str | Script = ""
    """A script, its text, or the path of its file; the syntax is in ``faults.py``."""
    timeout_s: Seconds = 10.0
    """Silence after which a worker counts as dead. It matters only for frozen and vanished workers: other deaths close the connection."""
    seed: int = 0
    """Seed of all random draws. Equal seeds give equal runs; different rules under one seed meet the same times."""

    def __post_init__(self) -> None:
        whole_number("cluster", "workers", self.workers, least=1)
        whole_number("cluster", "servers", self.servers, least=1)
        for name in ("compute", "per_sample", "delay", "push_delay"):
            object.__setattr__(self, name, law(getattr(self, name)))
        object.__setattr__(self, "faults", script(self.faults))
        for name, value, least in (("update_s", self.update_s, 0.0), ("timeout_s", self.timeout_s, 0.1)):
            if not least <= value < math.inf:
                raise ConfigurationError(f"cluster({name}={value!r}): {name} must be a finite number of seconds of at least {least:g}")

    @property
    def script(self) -> Script:
        """The parsed faults."""
        assert isinstance(self.faults, Script)
        return self.faults

    @property
    def total(self) -> int:
        """The number of workers after all joins."""
        return self.script.total(self.workers)

    @property
    def silence_s(self) -> Seconds | None:
        """`timeout_s` if the faults can make a worker silent, else None: then no heartbeats need to be simulated."""
        return self.timeout_s if any(isinstance(fault, Freeze | Vanish) for fault in self.script.faults) else None

    def law(self, name: str) -> Law:
        """Return the parsed latency model of a field: "compute", "per_sample", "delay" or "push_delay"."""
        found = getattr(self, name)
        assert isinstance(found, Law)
        return found

    def without_servers(self) -> Cluster:
        """Return this cluster for a rule without servers: one process coordinates, and faults that stop a server have no effect."""
        return replace(self, servers=1, faults=Script(tuple(fault for fault in self.script.faults if not isinstance(fault, Stop))))

    def check(self) -> None:
        """Check the latency models and the faults against the numbers of workers and servers.

        Raises:
            ConfigurationError: a latency model serves fewer workers, or a fault names a worker or server that does not exist.
        """
        self.script.check(self.workers, self.servers)
        for name in ("compute", "per_sample"):
            self.law(name).check(self.total)
        for name in ("delay", "push_delay"):
            self.law(name).check(self.total * self.servers)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The amount of work. The first limit that is reached ends the run; at least one must be given."""

    versions: int | None = None
    """Stop at this version."""
    time_s: Seconds | None = None
    """Stop at this time, in simulated seconds."""
    epochs: int | None = None
    """Stop when every worker has completed this number of epochs; needs ``samples``."""
    samples: int | None = None
    """The size of the data set, which the coordinator deals out in leases; None: every worker has endless samples."""
    batch: int = 1
    """The samples of one iteration, where the rule's plan does not say otherwise."""
    sizes: BatchOrder = field(default_factory=BatchOrder)
    """Which workers have other batches, or that these follow the measured speeds, as ``--batch`` of a live job says."""

    def __post_init__(self) -> None:
        for name in ("versions", "epochs", "samples"):
            if getattr(self, name) is not None:
                whole_number("work", name, getattr(self, name), least=1)
        whole_number("work", "batch", self.batch, least=1)
        if self.time_s is not None and not 0.0 < self.time_s < math.inf:
            raise ConfigurationError(f"work(time_s={self.time_s!r}): time_s must be a finite number of seconds greater than 0")
        if self.epochs is not None and self.samples is None:
            raise ConfigurationError(f"work(epochs={self.epochs}): an epoch needs the size of the data set; give samples too")
        if self.versions is None and self.time_s is None and self.epochs is None:
            raise ConfigurationError("work(): no limit ends the run; give versions, time_s, or epochs with samples")
        if self.sizes.auto is not None and self.samples is None:
            raise ConfigurationError("--batch auto: sizes change with the samples that the job deals out; give --samples too")

    def batch_of(self, worker: WorkerId) -> int:
        """Return the samples of one iteration of this worker: the base size, if sizes follow the speeds."""
        return self.sizes.size(worker, self.batch)

    @property
    def deal(self) -> Deal:
        """Return how the job deals the samples out."""
        auto = self.sizes.auto
        return Deal() if auto is None else Deal(granularity=1, most=auto.most or 0)
