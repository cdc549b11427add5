"""``--metrics``: serve a job's figures to Prometheus, by its own client and a collector of our own. A follower, see `view.follow`.

Counters come from the job's snapshots, so no record that is missing makes them wrong; histograms come from the records. A scrape reads
what is there: it costs this process time, and no other. ``docs/tools.md`` lists the names.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from offbeat import __version__
from offbeat.errors import ConfigurationError
from offbeat.journal.arrivals import Record
from offbeat.journal.worker_summary import NOT_COME
from offbeat.types import Seconds
from offbeat.view.curves import LABELLED, LABELLED_MAX
from offbeat.view.follow import Sink, follow
from offbeat.view.listening import EXTRA, host_and_port

KINDS: Final = ("fold", "process", "pushed", "settle", "state_changed")
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)
REJOIN_SECONDS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)
VERSIONS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
WORDS_S: Final[Seconds] = 5.0
"""Seconds in which the supervisor says how a process ended whose connection has closed."""
CAUSES: Final = {
    "not heard of": "silent",
    "was killed": "killed",
    "killed by": "killed",
    "script failed": "script",
    "exited with status": "script",
    "machine": "machine",
    "connection": "connection",
}
"""Words in the reason of a death, and the cause that they stand for; the first that fits. Other reasons are ``other``."""

Labelled: TypeAlias = tuple[list[str], float]
"""The values of a figure's labels, and its own."""


class Collector(Sink):
    """Takes what is known of a job, and gives it to ``prometheus_client`` at each scrape. A sink, and a collector of that package.

    Nothing lasts beyond the process: one that comes after it begins to count anew, which Prometheus takes as the restart that it is.
    """

    def __init__(self) -> None:
        os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)  # of the user's own processes: the package would add this one's files to it
        from prometheus_client import Histogram, core, disable_created_metrics

        disable_created_metrics()
        self._core = core
        self._lock = threading.Lock()
        """Scrapes come in threads of the server."""
        self._snapshot: Mapping[str, Any] | None = None
        self._histograms = self._step, self._round, self._rejoin, self._staleness = [
            Histogram(f"offbeat_{name}", about, buckets=bounds, registry=None)
            for name, about, bounds in (
                ("step_seconds", "Time in which a worker computed a gradient, per local step.", SECONDS),
                ("round_seconds", "Time between two folds.", SECONDS),
                ("rejoin_seconds", "Time from a worker's death until it took part again.", REJOIN_SECONDS),
                ("staleness_versions", "Versions between what a gradient was computed from and the version it went into.", VERSIONS),
            )
        ]
        self._unfolded: Counter[str] = Counter()
        """Samples by each fate but folded."""
        self._deaths: Counter[str] = Counter()
        self._died: dict[int, float] = {}
        self._unexplained: dict[int, float] = {}
        """When workers died whose connection has closed, and of whose process nothing is known yet."""
        self._folded_at: float | None = None
        self._missed = 0
        self._costs: dict[int, float] = {}
        """What workers have cost at most so far: a counter never falls, while what all workers cost is taken off each."""
        self._labelled: frozenset[int] = frozenset()

    # As a sink.

    def record(self, record: Record) -> None:
        if record.get("optimizer"):
            return
        with self._lock:
            match record["kind"]:
                case "pushed" if record.get("alone") or not record.get("shard"):
                    self._step.observe(record["compute_s"] / max(1, record.get("steps", 1)))
                case "fold":
                    if self._folded_at is not None and "shard" not in record:
                        self._round.observe(record["t"] - self._folded_at)
                    self._folded_at = record["t"]
                    for part in record["parts"]:
                        self._staleness.observe(part["staleness"])
                case "settle" if record["fate"] != "folded" and "shard" not in record:
                    self._unfolded[record["fate"]] += record["samples"]
                case "process" if record["role"] == "worker" and record["number"] in self._unexplained:
                    self._explain(record["number"], cause_of(record["detail"]))
                case "state_changed":
                    self._changed(record)

    def _explain(self, worker: int, cause: str) -> None:
        del self._unexplained[worker]
        self._deaths["connection" if cause == "other" else cause] += 1

    def _changed(self, record: Record) -> None:
        worker = record["worker"]
        if record["state"] == "dead" and worker not in self._died and record["reason"] not in NOT_COME:
            self._died[worker] = record["t"]
            if (cause := cause_of(record["reason"])) == "connection":
                self._unexplained[worker] = record["t"]
            else:
                self._deaths[cause] += 1
        elif record["state"] == "alive" and worker in self._died:
            if worker in self._unexplained:
                self._explain(worker, "connection")
            self._rejoin.observe(record["t"] - self._died.pop(worker))

    def status(self, snapshot: Mapping[str, Any]) -> None:
        with self._lock:
            self._snapshot = snapshot
            for worker in [worker for worker, t in self._unexplained.items() if snapshot["elapsed_s"] > t + WORDS_S]:
                self._explain(worker, "connection")
            if len(snapshot["per_worker"]) <= LABELLED_MAX:
                self._labelled = frozenset(worker["worker"] for worker in snapshot["per_worker"])
            elif not self._labelled and all(worker["pushes"] for worker in snapshot["per_worker"] if worker["state"] == "alive"):
                costly = sorted(
                    snapshot["per_worker"], key=lambda worker: (-worker["cost_s"], -worker["compute_s"] / max(1, worker["pushes"]))
                )
                self._labelled = frozenset(worker["worker"] for worker in costly[:LABELLED])

    def missed(self, records: int) -> None:
        self._missed += records

    # As a collector.

    def collect(self) -> Iterator[Any]:
        """Return the families of metrics as they are now."""
        with self._lock:
            families = [family for histogram in self._histograms for family in histogram.collect()]
            families += [*self._counters(), *([] if self._snapshot is None else self._figures(self._snapshot))]
        yield from families

    def _counters(self) -> Iterator[Any]:
        causes = sorted({*CAUSES.values(), "other"})
        yield self._counter("deaths", "Deaths of workers by cause.", ["cause"], (([cause], self._deaths[cause]) for cause in causes))
        missed = "Records that this endpoint lacks; histograms lack what was in them."
        yield self._counter("records_missed", missed, [], [([], self._missed)])

    def _figures(self, snapshot: Mapping[str, Any]) -> Iterator[Any]:
        info = self._core.InfoMetricFamily("offbeat", "What the job is.")
        said = {"rule": snapshot["sync"], "script": snapshot["script"], "servers": snapshot["servers"], "version": __version__}
        info.add_metric([], {key: "" if value is None else str(value) for key, value in said.items()})
        yield info
        samples = {"folded": snapshot["samples"], **self._unfolded}
        yield self._counter(
            "samples", "Samples of contributions by their fate.", ["fate"], (([fate], count) for fate, count in samples.items())
        )
        about = "Contributions of a worker by fate; by shard in rules of shard scope."
        yield self._counter("gradients", about, ["worker", "fate"], self._by_worker(snapshot, "fates"))
        yield from self._where_time_goes(snapshot)
        workers = self._core.GaugeMetricFamily("offbeat_workers", "Workers by their state.", labels=["state"])
        states = Counter(worker["state"] for worker in snapshot["per_worker"])
        for state in ("expected", "alive", "dead", "recovered", "finished"):
            workers.add_metric([state], states[state])
        yield workers
        yield self._core.GaugeMetricFamily("offbeat_version", "The newest version of the parameters.", value=snapshot["version"])
        if snapshot["loss"] is not None:
            about = "The mean over workers of the loss that each has reported last."
            yield self._core.GaugeMetricFamily("offbeat_loss", about, value=float(snapshot["loss"]))

    def _where_time_goes(self, snapshot: Mapping[str, Any]) -> Iterator[Any]:
        about = "Seconds of a worker by phase, the first push of each process left out."
        yield self._counter("worker_seconds", about, ["worker", "phase"], self._by_worker(snapshot, "phases"))
        costs = {worker["worker"]: worker["cost_s"] for worker in snapshot["per_worker"] if worker["worker"] in self._labelled}
        self._costs |= {number: max(self._costs.get(number, 0.0), cost) for number, cost in costs.items()}
        about = "Seconds for which folds have waited for a worker."
        yield self._counter("worker_cost_seconds", about, ["worker"], (([str(number)], self._costs[number]) for number in costs))

    def _by_worker(self, snapshot: Mapping[str, Any], key: str) -> Iterator[Labelled]:
        """Return what a figure of the labelled workers is divided into, each part with the worker's number and its own name."""
        for worker in snapshot["per_worker"]:
            if worker["worker"] in self._labelled:
                yield from (([str(worker["worker"]), name], value) for name, value in worker[key].items())

    def _counter(self, name: str, about: str, labels: Sequence[str], values: Iterable[Labelled]) -> Any:
        """Return a counter with its values, each of which comes after its labels."""
        family = self._core.CounterMetricFamily(f"offbeat_{name}", about, labels=labels)
        for labelled, value in values:
            family.add_metric(labelled, value)
        return family


def cause_of(reason: str) -> str:
    """Return what a worker died of, as one of few words.

    >>> cause_of("its process was killed by SIGKILL"), cause_of("not heard of for 10.2 s"), cause_of("?")
    ('killed', 'silent', 'other')
    """
    return next((cause for words, cause in CAUSES.items() if words in reason), "other")


def command_of(text: str) -> tuple[str, ...]:
    """Return the command of the follower for a value of ``--metrics``. Raises as `host_and_port` does."""
    host, port = host_and_port(text, "--metrics")
    return ("-m", "offbeat.view.metrics", host, str(port))


def serve(collector: Collector, host: str, port: int) -> int:
    """Serve in threads of this process. Returns the port.

    Raises:
        ConfigurationError: the port is taken, or the address is not of this machine.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(collector)  # type: ignore[arg-type, unused-ignore]
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(f"port {port} of {host} is in use: choose another one, or 0 for any free port") from error
        raise ConfigurationError(f"cannot listen at {host}, port {port}: {error.strerror}") from error
    return int(server.server_port)


def main(host: str, port: str) -> int:
    """Follow a job. Returns the exit status."""

    def make(note: Callable[[str], None]) -> Collector:
        try:
            collector = Collector()
        except ImportError as error:
            raise ConfigurationError(f"prometheus-client is not installed: {EXTRA}") from error
        note(f"http://{f'[{host}]' if ':' in host else host}:{serve(collector, host, int(port))}/metrics")
        return collector

    return follow(make)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
