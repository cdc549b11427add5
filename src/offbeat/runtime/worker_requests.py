"""Do what a worker's message asks for, once the job has accepted the worker.

Messages that say something about the past become events. Requests, for instance for samples, wait until all earlier events are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from offbeat.core.batch_sizes import Deal
from offbeat.core.events import Abandoned, BarrierWanted, EpochWanted, Heard, LeaseWanted, Left, PullWanted, Resumed, Skipped, Stands
from offbeat.core.leases import checked_ranges
from offbeat.errors import JobError, ProtocolError
from offbeat.journal.records import metrics_record, warning_record
from offbeat.runtime.coordination.group_watch import GroupWatch
from offbeat.runtime.coordination.peers import Peer
from offbeat.runtime.coordination.save_points import Checkpoints
from offbeat.runtime.coordination.schedule_watch import ScheduleWatch
from offbeat.runtime.driver import Driver
from offbeat.runtime.job.first_steps import ALIKE, FirstStepsWatch, Warned
from offbeat.runtime.job.loading import Loaded
from offbeat.runtime.job.packing import pack
from offbeat.transport.base import Connection, Message
from offbeat.types import Seconds, WorkerId, WorkerState

ALWAYS: Final = ("heard", "left", "abort", "metrics")
"""Kinds of messages that a process may send before it is welcomed."""

AFTER_ALL_EVENTS: Final = ("samples", "epoch", "barrier", "place")
"""Kinds of messages whose answer depends on events that ranks report late."""

METRICS_MAX: Final = 10_000
"""Most different names of metrics in a job, of which the newest value of each is kept; others are left out."""

INCARNATION_FIELD: Final = {
    "push": "push",
    "abandoned": "work",
    "samples": "want",
    "epoch": "want",
    "heard": "",
    "stands": "",
    "skipped": "",
    "barrier": "",
    "outside": "",
    "pull": "",
    "place": "",
    "left": "",
}
"""By kind of message, the header field that holds the sender's incarnation; "": the header itself."""


class WorkerRequests:
    """Handle the messages of the workers of one optimizer.

    Args:
        driver: of the optimizer's coordinator.
        left: handles a worker's announcement that it leaves.
    """

    def __init__(self, driver: Driver, left: Callable[[Left, Seconds], object]) -> None:
        self._driver, self._left = driver, left
        self._deferred: deque[tuple[Connection, Message]] = deque()
        """Messages of `AFTER_ALL_EVENTS` that wait."""
        self._metric_names: set[str] = set()
        self._metrics_full = False
        """True once a name was left out."""
        self._loaded = Loaded()
        self._checkpoints = Checkpoints()
        self._first_steps = FirstStepsWatch(driver.settings.workers)
        self._schedules = ScheduleWatch()
        self._groups = GroupWatch()

    def handle(self, peer: Peer, kind: str, message: Message, now: Seconds) -> None:
        """Handle a message, or defer it until all events before it are known.

        Raises:
            ProtocolError: the worker has not been welcomed yet, or names an incarnation that it cannot have been given yet. An earlier
                one is allowed: the worker may not know of its death.
        """
        if not peer.welcomed and kind not in ALWAYS:
            raise ProtocolError(f"worker {peer.worker} sent {kind!r} before the job accepted it (expected to wait for 'welcome')")
        if (part := INCARNATION_FIELD.get(kind)) is not None:
            seen = (message.header[part] if part else message.header)["incarnation"]
            if seen > peer.incarnation:
                raise ProtocolError(f"worker {peer.worker} sent {kind!r} with incarnation = {seen} (expected at most {peer.incarnation})")
        if kind in AFTER_ALL_EVENTS and self._driver.has_backlog:
            self._deferred.append((peer.connection, message))
        else:
            _HANDLERS[kind](self, peer, message, now)

    def answer_deferred(self, now: Seconds) -> None:
        """Handle the deferred messages before which nothing is unknown any more; those of closed connections are dropped."""
        while (found := next(filter(self._may_answer, self._deferred), None)) is not None:
            self._deferred.remove(found)
            connection, message = found
            if (peer := self._driver.peers.at(connection)) is not None:
                _HANDLERS[message.header["kind"]](self, peer, message, now)
                self._driver.live_plane.follow(now)

    def check_push(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """Check the fields of a push against this job and its present state. Raises `ProtocolError`."""
        leases = header["push"].get("leases", ())
        if len(set(leases)) < len(leases):
            raise ProtocolError(f"worker {worker} sent 'push' with a lease named twice in push.leases (expected each lease once)")
        self._driver.live_plane.check_push(worker, header)

    def _may_answer(self, deferred: tuple[Connection, Message]) -> bool:
        """True if everything that happened before a deferred request is known, or its sender is gone."""
        return not self._driver.has_backlog or self._driver.peers.at(deferred[0]) is None

    # Taking part.

    def _ready(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._driver.notifier.send_buffers(peer.worker)  # before the parameters, since those let the worker go on
        self._send_part(peer)
        self._driver.live_plane.ready(peer.worker, message.header, now)

    def _heard(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Handle a heartbeat. For a process that does not take part yet, only the bytes received count."""
        if message.header["incarnation"]:
            self._driver.feed(Heard(peer.worker, message.header["incarnation"]), now)
        self._driver.standings.progress(peer, message.header["stuck_s"])
        if message.header.get("told", False):
            self._driver.standings.report(peer.worker, "told")

    def _stands(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._driver.feed(Stands(peer.worker, message.header["incarnation"], message.header["still"]), now)

    def _skipped(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._driver.feed(Skipped(peer.worker, message.header["incarnation"], tuple(message.header["leases"])), now)

    def _outside(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._driver.ranks.outside(peer.worker, message.header["incarnation"], message.header["reason"], now)

    def _leave(self, peer: Peer, message: Message, now: Seconds) -> None:
        peer.exits, peer.over = message.header.get("exits", False), message.header.get("over", False)
        peer.early = message.header.get("early", False)
        self._left(Left(peer.worker, message.header["incarnation"], message.header["noticed"], peer.exits), now)

    def _abort(self, peer: Peer, message: Message, now: Seconds) -> None:
        raise JobError(f"worker {peer.worker} stopped the job: {message.header['reason']}")

    # Work.

    def _push(self, peer: Peer, message: Message, now: Seconds) -> None:
        self.check_push(peer.worker, message.header)
        message.header["push"]["compute_s"] = peer.computed(message.header["push"]["compute_s"])
        loaded = message.header.get("loaded")
        if loaded is not None:
            self._loaded.note(peer.worker, loaded)
        if (before := message.header.get("before")) is not None:
            self._driver.feed(Resumed(peer.worker, peer.incarnation, before), now)
        self._checkpoints.pushed(peer.worker, peer.incarnation, message.header["push"]["version"])
        warnings: list[Warned] = []
        if "first" in message.header or loaded is not None:
            alike = {what: message.header.get(what) for what in ALIKE}
            warnings += self._first_steps.note(peer.worker, message.header.get("first", ()), alike)
        if self._driver.servers_step:
            batches = self._driver.core.epochs.most_of_a_pool(message.header["push"].get("leases", ()))
            warnings += self._groups.note(peer.worker, message.header, batches)
            warnings += self._schedules.note(peer.worker, message.header, self._driver.peers.gone)
        for warned in warnings:
            self._driver.journal.write(warning_record(now, warned.about, warned.workers, warned.step, warned.detail))
        self._driver.live_plane.push(peer.worker, message, now)

    def _abandoned(self, peer: Peer, message: Message, now: Seconds) -> None:
        work = message.header["work"]
        leases = tuple(work.get("leases", ()))
        assert self._driver.served is self._driver.plane
        compute_s = peer.computed(work["compute_s"])
        self._driver.feed(Abandoned(peer.worker, work["incarnation"], work["version"], compute_s, leases), now)

    def _pull(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._driver.served.pull(PullWanted(peer.worker, message.header["incarnation"]), now)

    def _barrier(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Have a worker wait at a barrier."""
        self._may_ask(peer, "barrier", message.header["incarnation"])
        self._driver.feed(BarrierWanted(peer.worker, message.header["incarnation"], message.header["number"]), now)

    def _may_ask(self, peer: Peer, kind: str, incarnation: int) -> None:
        member = self._driver.core.membership[peer.worker]
        current = member.state is WorkerState.ALIVE and incarnation == member.incarnation
        if current and not self._driver.live_plane.may_request(peer.worker):
            raise ProtocolError(f"worker {peer.worker} sent {kind!r} before the job let it go on (expected to wait for 'parameters')")

    def _wants(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Handle a request for samples or for the end of an epoch."""
        want, kind = message.header["want"], message.header["kind"]
        self._may_ask(peer, kind, want["incarnation"])
        try:
            rest = checked_ranges(want["rest"], want["size"]) if "rest" in want else None
        except ValueError as error:
            raise ProtocolError(f"worker {peer.worker} sent {kind!r}: {error}") from None
        fields = want["incarnation"], want["pool"], want["epoch"], want["size"]
        if kind == "samples":
            deal = Deal(want.get("unit", 0), tuple(want.get("sizes", ())), want.get("granularity", 0), want.get("most", 0))
            self._driver.feed(LeaseWanted(peer.worker, *fields, want["batch"], rest, deal), now)
        else:
            self._driver.feed(EpochWanted(peer.worker, *fields, tuple(want.get("kept", ()))), now)

    # Checkpoints, buffers and metrics.

    def _place(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Tell a worker that writes a checkpoint the samplers' places.

        If the worker pulls, no event may come between the pull and the reply, so that parameters, optimizer state and places are of one
        version.
        """
        serial = peer.serial
        if message.header["pull"]:
            self._driver.served.exact(peer.worker)
            self._driver.feed(PullWanted(peer.worker, message.header["incarnation"]), now)
        released = peer.serial > serial
        if released:
            self._driver.served.state(peer.worker)
        places = list(self._driver.core.epochs.places().items())
        peer.connection.send({"kind": "place", "released": released, "version": self._driver.core.version, "places": places})

    def _parts(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Send the worker that writes a checkpoint the parts that other workers have handed in."""
        job, version = self._driver.core, message.header["version"]
        alive = {worker: job.membership[worker].incarnation for worker in job.membership.in_state(WorkerState.ALIVE)}
        computing = {
            worker: (incarnation, job.start.first(worker))
            for worker, incarnation in alive.items()
            if worker != peer.worker and not job.waiting.idle.intersection((worker,))
        }
        assert self._driver.spec is not None
        awaited = self._checkpoints.awaited(computing, version) if self._driver.spec.policy.in_step else []
        collects = not awaited or message.header["last"]
        parts, payload = self._checkpoints.parts(peer.worker, version, message.header["nth"]) if collects else ([], [])
        peer.connection.send({"kind": "parts", "awaited": awaited, "parts": parts}, payload=payload)

    def _checkpoint_part(self, peer: Peer, message: Message, now: Seconds) -> None:
        if self._driver.checkpoints is not None:
            self._driver.checkpoints.on_part(self._driver.number, peer.worker, message)
        elif not self._driver.settings.checkpoints:  # workers of a resumed job hand in their part also where it makes no checkpoints
            raise ProtocolError(f"worker {peer.worker} sent 'checkpoint_part', and this job makes no checkpoints")

    def _send_part(self, peer: Peer) -> None:
        """Send a worker the part with which it resumes, as long as the job is at the version of the checkpoint."""
        driver = self._driver
        if driver.resumed is None or driver.version != driver.resumed.version(driver.number):
            return
        part = driver.resumed.part_of(peer.worker, driver.number)
        if part is not None:
            plain, payload = pack(part, "a worker's part of the checkpoint")
            peer.connection.send({"kind": "resume_part", "part": plain}, payload=payload)

    def _take_buffers(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._driver.notifier.buffers.put(peer.worker, message.header["layout"], message.header["changed"], message.payload)

    def _metrics(self, peer: Peer, message: Message, now: Seconds) -> None:
        version = self._driver.coordinator.version if self._driver.coordinator is not None else 0
        values, known = message.header["values"], self._metric_names
        new = [name for name in values if name not in known]
        known.update(new[: METRICS_MAX - len(known)])
        if left_out := [name for name in new if name not in known]:
            values = {name: value for name, value in values.items() if name in known}
            if not self._metrics_full:
                self._metrics_full = True
                detail = f"scripts have logged more than {METRICS_MAX:,} different names: {left_out[0]!r} and later ones are left out"
                self._driver.journal.write(warning_record(now, "names_of_metrics", [peer.worker], 0, detail))
        if values:
            self._driver.journal.write(metrics_record(now, peer.worker, version, values))


_HANDLERS: Final[Mapping[str, Callable[[WorkerRequests, Peer, Message, Seconds], object]]] = {
    "ready": WorkerRequests._ready,
    "push": WorkerRequests._push,
    "place": WorkerRequests._place,
    "part": lambda one, peer, message, now: one._checkpoints.hand_in(peer.worker, message),
    "parts": WorkerRequests._parts,
    "checkpoint_part": WorkerRequests._checkpoint_part,
    "got": lambda one, peer, message, now: one._driver.served.shard.got(peer.connection),
    "abandoned": WorkerRequests._abandoned,
    "initial": lambda one, peer, message, now: one._driver.live_plane.initial(peer.worker, message, now),
    "buffers": WorkerRequests._take_buffers,
    "metrics": WorkerRequests._metrics,
    "heard": WorkerRequests._heard,
    "stands": WorkerRequests._stands,
    "skipped": WorkerRequests._skipped,
    "met": lambda one, peer, message, now: one._driver.ranks.met(peer.worker),
    "outside": WorkerRequests._outside,
    "voided": lambda one, peer, message, now: one._driver.ranks.voided(message.header["number"], now),
    "leaving": lambda one, peer, message, now: one._driver.ranks.joiners.on_leaving(peer.worker, exits=message.header.get("exits", False)),
    "donation": lambda one, peer, message, now: one._driver.ranks.joiners.on_donation(peer.worker, message),
    "pull": WorkerRequests._pull,
    "samples": WorkerRequests._wants,
    "epoch": WorkerRequests._wants,
    "barrier": WorkerRequests._barrier,
    "left": WorkerRequests._leave,
    "abort": WorkerRequests._abort,
    "state": lambda one, peer, message, now: one._driver.served.shard.answer_state(peer.connection, message),
}
