"""Do what a worker's message asks for, once the job has accepted the worker.

Messages that say something about the past become events. Requests, for instance for samples, wait until all earlier events are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from offbeat.core.batch_sizes import Deal
from offbeat.core.derived import Derived
from offbeat.core.events import Abandoned, BarrierWanted, EpochWanted, Heard, LeaseWanted, Left, PullWanted, Resumed, Skipped, Stands
from offbeat.core.leases import checked_ranges
from offbeat.errors import JobError, ProtocolError
from offbeat.journal.records import metrics_record, warning_record
from offbeat.runtime.coordination.group_watch import GroupWatch
from offbeat.runtime.coordination.peers import Peer
from offbeat.runtime.coordination.save_points import Checkpoints
from offbeat.runtime.coordination.schedule_watch import ScheduleWatch
from offbeat.runtime.job.first_steps import FirstStepsWatch, Warned
from offbeat.runtime.job.loading import Loaded
from offbeat.runtime.job.packing import Packer
from offbeat.runtime.live_job import LiveJob
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


class WorkerRequests(Derived):
    """Handle the messages of the workers of one optimizer.

    Args:
        job: the optimizer's.
        left: handles a worker's announcement that it leaves.
    """

    DERIVED = ("_handlers",)

    def __init__(self, job: LiveJob, left: Callable[[Left, Seconds], object]) -> None:
        self._job, self._left = job, left
        self._deferred: deque[tuple[Connection, Message]] = deque()
        """Messages of `AFTER_ALL_EVENTS` that wait."""
        self._metric_names: set[str] = set()
        self._metrics_full = False
        """True once a name was left out."""
        self._loaded = Loaded()
        self._checkpoints = Checkpoints()
        self._first_steps = FirstStepsWatch(job.settings.workers)
        self._schedules = ScheduleWatch()
        self._groups = GroupWatch()
        self._derive()

    def _derive(self) -> None:
        job = self._job
        self._handlers: dict[str, Callable[[Peer, Message, Seconds], object]] = {
            "ready": self._ready,
            "push": self._push,
            "place": self._place,
            "part": lambda peer, message, now: self._checkpoints.hand_in(peer.worker, message),
            "parts": self._parts,
            "checkpoint_part": self._checkpoint_part,
            "got": lambda peer, message, now: job.served.shard.got(peer.connection),
            "abandoned": self._abandoned,
            "initial": lambda peer, message, now: job.backend.initial(peer.worker, message, now),
            "buffers": self._take_buffers,
            "metrics": self._metrics,
            "heard": self._heard,
            "stands": self._stands,
            "skipped": self._skipped,
            "met": lambda peer, message, now: job.ranks.met(peer.worker),
            "outside": self._outside,
            "voided": lambda peer, message, now: job.ranks.voided(message.header["number"], now),
            "leaving": lambda peer, message, now: job.ranks.joiners.on_leaving(peer.worker),
            "donation": lambda peer, message, now: job.ranks.joiners.on_donation(peer.worker, message),
            "pull": self._pull,
            "samples": self._wants,
            "epoch": self._wants,
            "barrier": self._barrier,
            "left": self._leave,
            "abort": self._abort,
            "state": lambda peer, message, now: job.served.shard.answer_state(peer.connection, message),
        }

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
        side = self._job.side
        if kind in AFTER_ALL_EVENTS and side is not None and side.has_backlog:
            self._deferred.append((peer.connection, message))
        else:
            self._handlers[kind](peer, message, now)

    def answer_deferred(self, now: Seconds) -> None:
        """Handle the deferred messages before which nothing is unknown any more; those of closed connections are dropped."""
        while (found := next(filter(self._may_answer, self._deferred), None)) is not None:
            self._deferred.remove(found)
            connection, message = found
            if (peer := self._job.peers.at(connection)) is not None:
                self._handlers[message.header["kind"]](peer, message, now)
                self._job.backend.follow(now)

    def check_push(self, worker: WorkerId, header: Mapping[str, Any]) -> None:
        """Check the fields of a push against this job and its present state. Raises `ProtocolError`."""
        leases = header["push"].get("leases", ())
        if len(set(leases)) < len(leases):
            raise ProtocolError(f"worker {worker} sent 'push' with a lease named twice in push.leases (expected each lease once)")
        self._job.backend.check_push(worker, header)

    def _may_answer(self, deferred: tuple[Connection, Message]) -> bool:
        """True if everything that happened before a deferred request is known, or its sender is gone."""
        job, peer = self._job, self._job.peers.at(deferred[0])
        return job.side is None or peer is None or not job.side.has_backlog

    # Taking part.

    def _ready(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._job.notifier.send_buffers(peer.worker)  # before the parameters, since those let the worker go on
        self._send_part(peer)
        self._job.backend.ready(peer.worker, message.header, now)

    def _heard(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Handle a heartbeat. For a process that does not take part yet, only the bytes received count."""
        if message.header["incarnation"]:
            self._job.feed(Heard(peer.worker, message.header["incarnation"]), now)
        self._job.standings.progress(peer, message.header["stuck_s"])
        if message.header.get("told", False):
            self._job.standings.told(peer.worker)

    def _stands(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._job.feed(Stands(peer.worker, message.header["incarnation"], message.header["still"]), now)

    def _skipped(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._job.feed(Skipped(peer.worker, message.header["incarnation"], tuple(message.header["leases"])), now)

    def _outside(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._job.ranks.outside(peer.worker, message.header["incarnation"], message.header["reason"], now)

    def _leave(self, peer: Peer, message: Message, now: Seconds) -> None:
        peer.exits, peer.over = message.header.get("exits", False), message.header.get("over", False)
        self._left(Left(peer.worker, message.header["incarnation"], message.header["noticed"]), now)

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
            self._job.feed(Resumed(peer.worker, peer.incarnation, before), now)
        self._checkpoints.pushed(peer.worker, peer.incarnation, message.header["push"]["version"])
        warnings: list[Warned] = []
        if "first" in message.header or "frozen" in message.header:
            warnings += self._first_steps.note(peer.worker, message.header.get("first", ()), message.header.get("frozen"))
        if self._job.servers_step:
            warnings += self._groups.note(peer.worker, message.header)
            warnings += self._schedules.note(peer.worker, message.header, self._job.peers.gone)
        for warned in warnings:
            self._job.journal.write(warning_record(now, warned.about, warned.workers, warned.step, warned.detail))
        self._job.backend.push(peer.worker, message, now)

    def _abandoned(self, peer: Peer, message: Message, now: Seconds) -> None:
        work = message.header["work"]
        leases = tuple(work.get("leases", ()))
        assert self._job.served is self._job.side
        compute_s = peer.computed(work["compute_s"])
        self._job.feed(Abandoned(peer.worker, work["incarnation"], work["version"], compute_s, leases), now)

    def _pull(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._job.served.pull(PullWanted(peer.worker, message.header["incarnation"]), now)

    def _barrier(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Have a worker wait at a barrier."""
        self._may_ask(peer, "barrier", message.header["incarnation"])
        self._job.feed(BarrierWanted(peer.worker, message.header["incarnation"], message.header["number"]), now)

    def _may_ask(self, peer: Peer, kind: str, incarnation: int) -> None:
        member = self._job.core.membership[peer.worker]
        current = member.state is WorkerState.ALIVE and incarnation == member.incarnation
        if current and not self._job.backend.may_request(peer.worker):
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
            self._job.feed(LeaseWanted(peer.worker, *fields, want["batch"], rest, deal), now)
        else:
            self._job.feed(EpochWanted(peer.worker, *fields, tuple(want.get("kept", ()))), now)

    # Checkpoints, buffers and metrics.

    def _place(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Tell a worker that writes a checkpoint the samplers' places.

        If the worker pulls, no event may come between the pull and the reply, so that parameters, optimizer state and places are of one
        version.
        """
        serial = peer.serial
        if message.header["pull"]:
            self._job.served.exact(peer.worker)
            self._job.feed(PullWanted(peer.worker, message.header["incarnation"]), now)
        released = peer.serial > serial
        if released:
            self._job.served.state(peer.worker)
        places = list(self._job.core.epochs.places().items())
        peer.connection.send({"kind": "place", "released": released, "version": self._job.core.version, "places": places})

    def _parts(self, peer: Peer, message: Message, now: Seconds) -> None:
        """Send the worker that writes a checkpoint the parts that other workers have handed in."""
        job, version = self._job.core, message.header["version"]
        alive = {worker: job.membership[worker].incarnation for worker in job.membership.in_state(WorkerState.ALIVE)}
        computing = {
            worker: (incarnation, job.start.first(worker))
            for worker, incarnation in alive.items()
            if worker != peer.worker and not job.waiting.idle.intersection((worker,))
        }
        assert self._job.spec is not None
        awaited = self._checkpoints.awaited(computing, version) if self._job.spec.policy.in_step else []
        collects = not awaited or message.header["last"]
        parts, payload = self._checkpoints.parts(peer.worker, version, message.header["nth"]) if collects else ([], [])
        peer.connection.send({"kind": "parts", "awaited": awaited, "parts": parts}, payload=payload)

    def _checkpoint_part(self, peer: Peer, message: Message, now: Seconds) -> None:
        if self._job.checkpoints is not None:
            self._job.checkpoints.on_part(self._job.number, peer.worker, message)
        elif not self._job.settings.checkpoints:  # workers of a resumed job hand in their part also where it makes no checkpoints
            raise ProtocolError(f"worker {peer.worker} sent 'checkpoint_part', and this job makes no checkpoints")

    def _send_part(self, peer: Peer) -> None:
        """Send a worker the part with which it resumes, as long as the job is at the version of the checkpoint."""
        job = self._job
        if job.resumed is None or job.version != job.resumed.version(job.number):
            return
        part = job.resumed.part_of(peer.worker, job.number)
        if part is not None:
            packer = Packer()
            plain = packer.pack(part, "a worker's part of the checkpoint")
            peer.connection.send({"kind": "resume_part", "part": plain}, payload=packer.payload)

    def _take_buffers(self, peer: Peer, message: Message, now: Seconds) -> None:
        self._job.notifier.buffers.put(peer.worker, message.header["layout"], message.payload)

    def _metrics(self, peer: Peer, message: Message, now: Seconds) -> None:
        version = self._job.coordinator.version if self._job.coordinator is not None else 0
        values, known = message.header["values"], self._metric_names
        new = [name for name in values if name not in known]
        known.update(new[: METRICS_MAX - len(known)])
        if left_out := [name for name in new if name not in known]:
            values = {name: value for name, value in values.items() if name in known}
            if not self._metrics_full:
                self._metrics_full = True
                detail = f"scripts have logged more than {METRICS_MAX:,} different names: {left_out[0]!r} and later ones are left out"
                self._job.journal.write(warning_record(now, "names_of_metrics", [peer.worker], 0, detail))
        if values:
            self._job.journal.write(metrics_record(now, peer.worker, version, values))
