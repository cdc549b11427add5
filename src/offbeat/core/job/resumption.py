"""Go on with the ledger of a job whose processes are all gone, with its rule's state, from a checkpoint of the coordinator."""

from __future__ import annotations

from offbeat.core.events import Folded
from offbeat.core.job.coordinator import Coordinator
from offbeat.core.job.ledgers import AnyLedger
from offbeat.core.policy import ServerRule
from offbeat.types import Seconds


def kept_from(job: Coordinator, now: Seconds) -> AnyLedger:
    """Return the ledger of a coordinator after the loss of all its workers.

    Versions, clocks and the rule's state are as they were.

    Contributions without a fate are gone with the servers' memory, so no later fold has them; their samples are a matter of the epochs
    (`core.leases.Leases.progress`). What a rule waits to hear of its last fold will not come.

    Args:
        job: the coordinator, as it was read from a checkpoint; it is not used any more.
        now: the time at which its state was taken.

    >>> from offbeat.core.events import Initialised, Joined, Pushed
    >>> from offbeat.policies import rule
    >>> job = Coordinator(rule("asp"), workers=1)
    >>> for event in (Joined(0), Initialised(0), Pushed(0, 1, version=0, samples=8, compute_s=0.5)):
    ...     _ = job.on(event, now=1.0)
    >>> ledger = kept_from(job, now=1.0)
    >>> ledger.version, ledger.clock(0), len(ledger.active)
    (1, 1, 0)
    """
    ledger = job.ledger
    ledger.close(now, "its job was lost")
    for worker in list(job.membership):
        if worker in ledger.active:
            ledger.leave(worker, now)
    if isinstance(job.rule, ServerRule) and job.rule.measures != "nothing":
        ledger.folded(Folded(ledger.version, (), 0.0, 0.0), now)
    return ledger
