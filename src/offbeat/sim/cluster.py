"""Settings of a simulation: the machines with their latency models and faults, and the amount of work. Checked before a run starts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Final

from offbeat.core.batch_sizes import BatchOrder, Deal
from offbeat.core.settings import whole_number
from offbeat.errors import ConfigurationError
from offbeat.sim.faults import Freeze, Script, Stop, Vanish, script
from offbeat.sim.latency.registry import Constant, Law, law
from offbeat.types import Seconds, WorkerId

UNITS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def quantity(option: str, value: str | float, unit: str, example: str) -> float:
    """Return a quantity such as ``10gbit`` or ``400MB``; a number is in bits, or bytes.

    >>> quantity("--link", "10gbit", "bit", ""), quantity("--model-size", "400MB", "b", "")
    (10000000000.0, 400000000.0)

    Raises:
        ConfigurationError: it is spelled otherwise, or not greater than 0.
    """
    number = 0.0
    if not isinstance(value, str):
        number = float(value)
    elif match := re.fullmatch(rf"(\d+(?:\.\d+)?)([kmgt]?){unit}", value.lower().replace(" ", ""), re.ASCII):
        number = float(match[1]) * UNITS[match[2]]
    if not 0.0 < number < math.inf:
        raise ConfigurationError(f"{option} {value}: cannot read it; write a number greater than 0 and a unit, for instance {example}")
    return number


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
    link: str | float | None = None
    """Bits that each host sends in a second at most, and receives, such as "10gbit"; None: messages do not share links."""
    model_size: str | float | None = None
    """Bytes of a push to all servers, and of the parameters of all, such as "400MB"; with ``link``."""
    hosts: int | None = None
    """On how many hosts workers and servers are, as agents place them (`host_of_worker`, `host_of_server`); None: each has its own."""
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
        self._check_links()
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

    def host_of_worker(self, worker: WorkerId) -> int:
        """Return the host of a worker: each has as many as the others, or one more, and workers that join later go round."""
        if self.hosts is None:
            return worker
        return worker * self.hosts // self.workers if worker < self.workers else worker % self.hosts

    def host_of_server(self, server: int) -> int:
        """Return the host of a server: hosts start them in turn."""
        return self.total + server if self.hosts is None else server % self.hosts

    def _check_links(self) -> None:
        if self.link is None:
            for option, value in (("--model-size", self.model_size), ("--hosts", self.hosts)):
                if value is not None:
                    raise ConfigurationError(f"{option} {value}: without a link messages take no time for their bytes; give --link too")
            return
        if self.model_size is None:
            raise ConfigurationError(f"--link {self.link}: how long a message takes depends on its size; give --model-size 400MB too")
        object.__setattr__(self, "link", quantity("--link", self.link, "bit", "10gbit"))
        object.__setattr__(self, "model_size", quantity("--model-size", self.model_size, "b", "400MB"))
        if self.hosts is not None:
            whole_number("cluster", "hosts", self.hosts, least=1)
            if self.hosts > self.workers:
                raise ConfigurationError(
                    f"--hosts {self.hosts}: each has a worker, and there are {self.workers}; use at most {self.workers}"
                )

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
