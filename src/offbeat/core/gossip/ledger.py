"""Record the gradients of a job whose ranks mix parameters: the fate of each, the ranks that wait, and the ranks that continue.

This ledger has the same methods as `core.server.ledger`, which serves the server family. A gradient is folded into its own rank's replica
at its own step, and into no other; the neighbours receive it with the parameters. The job's *version* counts the folds of all ranks, as if
each gradient were a step of one model: with P ranks, one step of each rank makes P versions. A gradient's *staleness* is the number of
steps that other ranks have made, each on its own replica, since its rank continued; the gradient itself need not be stale. A worker's
*clock* counts its own steps.

`core.gossip.push_sum` decides for which ranks a rank waits, and what it mixes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from offbeat.core.base_ledger import BaseLedger, Standing
from offbeat.core.effects import Adopt, Effect, Fold, Mix, Pair, Part, Share, Source, WrittenOff
from offbeat.core.events import Abandoned, Pushed
from offbeat.core.gossip.push_sum import Gossip, GossipMessage, GossipRule, Mixture
from offbeat.core.policy import Contribution
from offbeat.types import Fate, Incarnation, Seconds, Version, WorkerId


class GossipLedger(BaseLedger):
    """Keep the contributions, clocks and versions of one job. Each method that changes the ledger returns effects, in order.

    Args:
        policy: the rule.
        seed: seed of the rule's draws.
    """

    def __init__(self, policy: GossipRule, seed: int = 0) -> None:
        self.exchange = policy.exchange
        self.gossip = Gossip(policy, seed)
        self._standings: dict[WorkerId, Standing] = {}
        self._pending: dict[WorkerId, Contribution] = {}
        """Contributions not folded yet, of ranks that mix before their step and wait for the mix."""
        self._waiting: dict[WorkerId, None] = {}
        self._awaited: dict[WorkerId, dict[WorkerId, None]] = {}
        """For each rank, the ranks that wait for it."""
        self._effects: list[Effect] = []
        self.version: Version = 0

    @property
    def active(self) -> Collection[WorkerId]:
        return self.gossip.active

    @property
    def unsettled(self) -> Collection[WorkerId]:
        """Workers with contributions that have no fate yet."""
        return self._pending.keys()

    # Who takes part.

    def enter(self, worker: WorkerId, incarnation: Incarnation, now: Seconds, *, more: bool = False) -> list[Effect]:
        """Add a worker: it begins with a copy of a living rank's model, and the step count of the slowest."""
        if worker in self._standings and worker in self.gossip.present:
            self._take_out(worker, "its worker has come back and begins anew")
        source = next((rank for rank in (*self.gossip.active, *self.gossip.present) if rank != worker), None) if self.version else None
        steps = self.gossip.enter(worker)
        self._standings[worker] = Standing(incarnation, steps)
        reason = "begins with the initial parameters" if source is None else f"begins with the model of worker {source}"
        self._effects.append(Adopt(worker, incarnation, steps, source, reason))
        self._share_kept(worker)
        self._release(worker, "takes part from now on")
        return self._look_again()

    def leave(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Remove a worker that is dead or has finished. No rank waits for it, and its replica is lost."""
        self._take_out(worker, "its replica is gone with it")
        return self._look_again()

    def pause(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Pause an admitted worker without samples: until `resume` no rank waits for it or mixes its parameters. It mixes the messages on
        their way to it at once."""
        self.gossip.pause(worker)
        mixture = self.gossip.pending(worker)
        if mixture.messages:
            self._mix(worker, self.gossip.took(worker, mixture))
        return self._look_again()

    def resume(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Let a paused worker work again; its number of steps is raised to that of the slowest."""
        if self.gossip.resume(worker):
            self._standings[worker].clock = self.gossip.steps(worker)
            self._share_kept(worker)
        return self._look_again()

    def refresh(self, worker: WorkerId, now: Seconds, reason: str) -> list[Effect]:
        """Release a worker that asks for the newest parameters without a push: they are its own."""
        self._release(worker, reason)
        return self._flush()

    # Contributions.

    def push(self, event: Pushed, now: Seconds, refusal: str | None = None) -> list[Effect]:
        """Take the gradient of an active worker, or reject it if ``refusal`` names a reason. Its step counts in both cases."""
        worker, standing = event.worker, self._standings[event.worker]
        assert worker not in self._waiting, f"worker {worker} pushed without having been admitted"
        standing.clock += 1
        c = self._contribution(event, standing.clock, now)
        if refusal is not None:
            self._fate(c, Fate.REJECTED, refusal)
        if self.exchange == "average":
            if refusal is None:
                self._pending[worker] = c
        elif self.exchange == "push":
            if refusal is None:
                self._fold(c, f"step {standing.clock} of its own rank")
            self._share(worker)
        else:
            self._average_pair(worker, None if refusal is not None else c)
        self._waiting[worker] = None
        return self._look([worker, *self._awaited.pop(worker, ())])

    def abandon(self, event: Abandoned, now: Seconds) -> list[Effect]:
        """Release a worker that has given up its computation; no rule of this family asks for it."""
        self._release(event.worker, "has given up its computation")
        return self._flush()

    def close(self, now: Seconds, reason: str) -> list[Effect]:
        """End the job: drop all contributions without a fate."""
        for c in list(self._pending.values()):
            self._fate(self._pending.pop(c.worker), Fate.DROPPED, reason)
        return self._flush()

    # Mixing, releases and fates.

    def _look_again(self) -> list[Effect]:
        """Recompute the neighbours after a member has joined or left: each waiting rank may now wait for other ranks."""
        self._awaited.clear()
        return self._look(list(self._waiting))

    def _look(self, workers: Collection[WorkerId]) -> list[Effect]:
        """Release the ranks that wait for no other rank any more, then the ranks that waited for these, and so on."""
        asked = dict.fromkeys(workers)
        while asked:
            worker = next(iter(asked))
            del asked[worker]
            if worker not in self._waiting:
                continue
            behind = self.gossip.behind(worker)
            if behind:
                self._awaited.setdefault(behind[0], {})[worker] = None
                continue
            del self._waiting[worker]
            self._go_on(worker)
            if self.exchange == "average":  # its step is made now
                asked.update(self._awaited.pop(worker, {}))
        return self._flush()

    def _go_on(self, worker: WorkerId) -> None:
        if self.exchange == "pair":
            self._release(worker, "waits for nobody")
            return
        mixture = self.gossip.mix(worker)
        count = len(mixture.messages)
        if count or mixture.own != 1.0:
            self._mix(worker, mixture)
        if self.exchange == "average":
            c = self._pending.pop(worker, None)
            if c is not None:
                self._fold(c, f"step {c.clock} of its own rank, with the parameters of {count} neighbours")
            self._share(worker)
        self._release(worker, f"has what {count} neighbours have sent")

    def _mix(self, worker: WorkerId, mixture: Mixture) -> None:
        standing, sources = self._standings[worker], sources_of(mixture.messages)
        self._effects.append(Mix(worker, standing.incarnation, standing.clock, mixture.own, sources, mixture.mass))

    def _average_pair(self, worker: WorkerId, c: Contribution | None) -> None:
        partner = self.gossip.partner(worker)
        standing = self._standings[worker]
        if partner is not None:
            self._effects.append(Pair(worker, standing.incarnation, standing.clock, partner))
        if c is not None:
            self._fold(c, f"step {standing.clock} of its own rank")
        self.gossip.step(worker)

    def _share(self, worker: WorkerId) -> None:
        standing = self._standings[worker]
        to, weight = self.gossip.step(worker)
        if to or self.exchange == "average":
            self._effects.append(Share(worker, standing.incarnation, standing.clock, to, weight))

    def _share_kept(self, worker: WorkerId) -> None:
        """Publish a rank's parameters under *average*: neighbours may ask for them before its next step."""
        if self.exchange == "average":
            standing = self._standings[worker]
            self._effects.append(Share(worker, standing.incarnation, standing.clock, (), 0.0))

    def _fold(self, c: Contribution, reason: str) -> None:
        before, self.version = self.version, self.version + 1
        part = Part(c.worker, c.incarnation, c.clock, 1.0, before - c.version)
        self._effects.append(Fold(self.version, (part,), reason))
        self._fate(c, Fate.FOLDED, reason)

    def _take_out(self, worker: WorkerId, reason: str) -> None:
        pending = self._pending.pop(worker, None)
        if pending is not None:
            self._fate(pending, Fate.DROPPED, reason)
        self._waiting.pop(worker, None)
        loss = self.gossip.leave(worker)
        if loss is not None and self.exchange == "push":
            standing = self._standings[worker]
            self._effects.append(WrittenOff(worker, standing.incarnation, loss.mass, sources_of(loss.messages), reason))


class FollowedGossipLedger(GossipLedger):
    """Keep the ledger of a live job, whose ranks decide by themselves for which ranks to wait and what to mix.

    Each reported step is folded at once, and no rank is held here. Which ranks mix is known to the ranks only, and is not journaled.
    """

    def enter(self, worker: WorkerId, incarnation: Incarnation, now: Seconds, *, more: bool = False) -> list[Effect]:
        """Add a worker, with the steps of the slowest worker, or with its own if it has made more."""
        self.gossip.leave(worker)
        self._standings[worker] = Standing(incarnation, self.gossip.enter(worker))
        self._release(worker, "takes part from now on")
        return self._flush()

    def leave(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Remove a worker that is dead or has finished; its replica is lost."""
        self.gossip.leave(worker)
        return []

    def pause(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Pause a worker that has no samples to work on."""
        self.gossip.pause(worker)
        return []

    def resume(self, worker: WorkerId, now: Seconds) -> list[Effect]:
        """Let a paused worker work again; its number of steps is raised to that of the slowest."""
        if self.gossip.resume(worker):
            self._standings[worker].clock = self.gossip.steps(worker)
        return []

    def push(self, event: Pushed, now: Seconds, refusal: str | None = None) -> list[Effect]:
        """Count a worker's step; its gradient is not used if ``refusal`` says why."""
        worker, standing = event.worker, self._standings[event.worker]
        self.gossip.stepped(worker)
        standing.clock += 1
        c = self._contribution(event, standing.clock, now)
        if refusal is None:
            self._fold(c, f"step {standing.clock} of its own rank")
        else:
            self._fate(c, Fate.REJECTED, refusal)
        self._release(worker, "goes on when it has mixed")
        return self._flush()


def sources_of(messages: Iterable[GossipMessage]) -> tuple[Source, ...]:
    """Return what effects say of these messages."""
    return tuple(Source(message.sender, message.steps, message.weight) for message in messages)
