"""A worker of a job with servers: the real session, in the thread of the job."""

from __future__ import annotations

from math import isinf
from typing import Any

import torch
from tests.sim.stepped_process import SteppedProcess, Wait

from offbeat.core.events import Pushed
from offbeat.runtime.parameter_server.worker_side import WorkerSession
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec
from offbeat.types import Seconds


class SteppedWorkerSession(WorkerSession):
    """The real session, which says what it pushes, and with what it goes on."""

    def __init__(self, worker: SteppedWorker, *arguments: Any, **options: Any) -> None:
        self._stepped = worker
        super().__init__(*arguments, **options)

    def _push(self, push: Pushed) -> None:
        self._stepped.offer(gradient=self._exchange.averaging is None)
        super()._push(push)
        if self._exchange.blocks is not None:
            self._stepped.let_arrive()

    def _begin(self) -> None:
        blocks = self._exchange.blocks
        if blocks is None:
            super()._begin()
            self._stepped.note()
            return
        # Where workers make steps of their own, a block that has not come again has these in it.
        shards = range(len(self.link.servers)) if self._exchange.averaging is None else blocks.news
        kept, own = [blocks.kept(shard) for shard in range(len(self.link.servers))], self._stepped.vector().chunk(len(self.link.servers))
        super()._begin()
        now = self._stepped.vector().chunk(len(self.link.servers))
        for shard in shards:
            block = (now[shard] - kept[shard] * own[shard]) / (1.0 - kept[shard])
            self._stepped.job.seen.setdefault((shard, blocks.used[shard]), []).append(block)


class SteppedWorker(SteppedProcess):
    """One process of a worker. Arguments as for `SteppedProcess`."""

    session: SteppedWorkerSession

    def _make_session(self, layout: Layout, spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> SteppedWorkerSession:
        settings = self.job.worker_settings(self.number)
        return SteppedWorkerSession(self, settings, layout, spec, self.model, optimizer, wire=self.job.script.wire, hub=self.hub)

    def await_message(self, timeout_s: Seconds | None) -> None:
        if timeout_s is not None:
            self._ring_at(self.job.now + timeout_s)
        super().await_message(timeout_s)
        self._alarm = 0

    def let_arrive(self) -> None:
        """Wait until the pushes that are under way have arrived, or anything has come."""
        self.job.network.later(self.turn)
        self.pause(Wait.MESSAGE)
        self.read()

    def note(self) -> None:
        """It goes on with these parameters.

        Once it has been frozen, what it reads may be newer than what it was told: the others have gone on, in the same memory.
        """
        if not (self.job.network.shares_memory and any(isinf(factor) for _, _, factor in self.windows)):
            self.job.seen.setdefault((None, self.session.version), []).append(self.vector())

    def let_go(self) -> None:
        """Close the files of its memory after the job. No collection of garbage does: hooks of the model refer to tensors in it."""
        super().let_go()
        if not hasattr(self, "session"):
            return  # an error has ended the job before
        session = self.session
        session._detach()
        common = session._unshared or session._exchange._common
        for block in (*session.memory, *([] if common is None else [common])):
            block.close()
