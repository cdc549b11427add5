"""A worker's questions about samples: it takes them, batch by batch, and waits for the end of an epoch that it has left early.

What it then holds is the session's, to push or to drop (``session.py``); who gets which samples is decided in ``core/leases.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.session import LeasedRange
from offbeat.types import Epoch


class WorkerSamples:
    """The epochs that one worker takes part in, one at a time for each of its samplers.

    Args:
        link: whose coordinator is asked.
        admitted: waits for the newest parameters, which an epoch's end brings, joining again if the worker is fenced.
        drop: forgets what the worker holds of one sampler's samples.
        reports: gets the report of each epoch whose end this worker sees.
    """

    def __init__(
        self, link: WorkerConnection, *, admitted: Callable[[], None], drop: Callable[[int], None], reports: list[dict[str, Any]]
    ) -> None:
        self._link, self._admitted, self._drop, self._reports = link, admitted, drop, reports
        self._asked: tuple[str, dict[str, Any]] | None = None
        """The question that is not answered yet."""
        self._open: dict[int, tuple[Epoch, int | None]] = {}
        """The epoch, and its number of samples, whose end this worker has not seen; by pool."""

    def open(self, pool: int) -> bool:
        """Whether this worker has taken part in an epoch whose end it has not seen."""
        return pool in self._open

    @property
    def any_open(self) -> bool:
        """Whether there is such an epoch, of whichever sampler."""
        return bool(self._open)

    def over(self, pool: int) -> None:
        """The epoch under way has nothing for this worker, which holds none of its samples: there is no end to wait for."""
        self._open.pop(pool, None)

    def leaves(self, pool: int, epoch: Epoch) -> bool:
        """Whether taking samples of this epoch means leaving another that is open."""
        return pool in self._open and self._open[pool][0] != epoch

    def take(
        self, pool: int, epoch: Epoch, size: int | None, batch: Callable[[], int], rest: Sequence[Sequence[int]] | None = None
    ) -> LeasedRange | None:
        """The next samples of an epoch; None once it is over for this worker. Another epoch of this pool is finished first.

        ``batch`` says how many, when it comes to that: the end of an epoch may bring another batch size. ``rest`` is what a checkpoint says
        is left of the epoch; None: all.
        """
        if self.leaves(pool, epoch):
            self._finish(pool)
        self._open[pool] = (epoch, size)
        left = {} if rest is None else {"rest": rest}
        answer = self._ask("samples", {"pool": pool, "epoch": epoch, "size": size, "batch": batch(), **left})
        match answer["kind"]:
            case "grant":
                parts = tuple((start, stop) for start, stop in answer["parts"])
                return LeasedRange(pool, answer["lease"], answer["start"], answer["stop"], parts)
            case "epoch_ended" if answer["epoch"] < epoch:
                return self.take(pool, epoch, size, batch, rest)
            case "epoch_ended" | "no_more" if answer["report"] is not None:
                self._open.pop(pool, None)
        return None

    def finish(self) -> bool:
        """Wait for the end of every epoch that this worker has left early; whether there was one."""
        pools = list(self._open)
        for pool in pools:
            self._finish(pool)
        return bool(pools)

    def _finish(self, pool: int) -> None:
        """Wait for the end of an epoch of which this worker takes no more samples."""
        epoch, size = self._open.pop(pool)
        self._drop(pool)
        self._ask("epoch", {"pool": pool, "epoch": epoch, "size": size})

    def _ask(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Ask the coordinator. An epoch's end brings the newest parameters; a fence means joining, then asking again."""
        while True:
            if self._asked not in (None, (kind, fields)):  # Ctrl-C has ended the wait for an answer, which comes first
                self._link.answer("grant", "no_more", "epoch_ended")
                self._asked = None
            if self._asked is None:
                self._link.coordinator.send({"kind": kind, "want": {"incarnation": self._link.incarnation, **fields}})
                self._asked = kind, fields
            message = self._link.answer("grant", "no_more", "epoch_ended")
            self._asked = None
            if message is None:
                self._admitted()
                continue
            answer = message.header
            if answer.get("report") is not None:
                self._reports.append({"epoch": answer["epoch"], **answer["report"]})
            if answer["kind"] == "epoch_ended" or answer.get("refreshed"):
                self._admitted()
            return answer
