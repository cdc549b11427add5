"""Tell backwards why something happened in a job: each event and effect in a journal has the number of its cause.

A worker waits until it is released; it is released because another worker pushed; that worker pushed late because it was itself released
late, or because it computed long. Going from cause to cause gives the chain that the moment depended on: a critical path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from offbeat.errors import ConfigurationError
from offbeat.journal.records import Record
from offbeat.types import RecordId

DEPTH: Final = 12
"""How many causes are told."""
WHAT: Final = re.compile(r"push=(\d+)@(\d+)|wait=(\d+)@(\d+\.?\d*)|(\d+)")


def story(records: Iterable[Record], what: str, depth: int = DEPTH) -> Iterator[str]:
    """Tell what led to one record, from the last to the first, a line for each.

    Args:
        records: of a journal.
        what: ``push=2@17``: what became of worker 2's push with clock 17. ``wait=2@12.5``: what ended worker 2's wait at 12.5 s, or the
            next after it. A number: the record with this ``id``.
        depth: the most causes to tell.

    Raises:
        ConfigurationError: there is no such push, wait or record, or the journal's records have no numbers.

    >>> records = [
    ...     {"kind": "release", "t": 1.0, "id": 1, "worker": 0, "version": 4, "reason": "every worker has pushed"},
    ...     {"kind": "pushed", "t": 3.5, "id": 2, "cause": 1, "worker": 0, "version": 4, "compute_s": 2.5},
    ...     {"kind": "release", "t": 3.5, "id": 3, "cause": 2, "worker": 1, "version": 5, "reason": "every worker has pushed"},
    ... ]
    >>> print(*story(records, "wait=1@2.0"), sep="\\n")
         3.500 s  worker 1 was released with version 5: every worker has pushed
         3.500 s  because worker 0 pushed what it had computed from version 4 in 2.500 s
         1.000 s  because worker 0 was released with version 4: every worker has pushed
    """
    numbered = {record["id"]: record for record in records if "id" in record}
    if not numbered:
        raise ConfigurationError("the records of this journal have no numbers: an older offbeat has written it; run the job again")
    number: RecordId | None = _find(numbered, what)
    for told in range(depth + 1):
        if number is None or number not in numbered:
            return
        record = numbered[number]
        yield f"{record['t']:10.3f} s  {'because ' if told else ''}{sentence(record)}"
        cause = record.get("cause")
        # A cause is older than what it causes; anything else would be a journal that somebody has changed.
        number = cause if cause is not None and cause < number else None
    if number is not None:
        yield f"... and so on; --why {number} tells the rest"


def sentence(record: Record) -> str:
    """Return what one record says, in words."""
    kind, reason = record["kind"], f": {record['reason']}" if record.get("reason") else ""
    worker, version = f"worker {record.get('worker')}", record.get("version")
    match kind:
        case "pushed":
            shard = f" to shard {record['shard']}" if record.get("shard") is not None else ""
            return f"{worker} pushed{shard} what it had computed from version {version} in {record['compute_s']:.3f} s"
        case "settle":
            return f"the push of {worker} with clock {record['clock']} was {record['fate']} at version {version}{reason}"
        case "release":
            return f"{worker} was released with version {version}{reason}"
        case "fold":
            parts = ", ".join(str(part["worker"]) for part in record["parts"])
            return f"version {version} was folded from the pushes of worker {parts}{reason}"
        case "grant":
            return f"{worker} got samples {record['start']} to {record['stop']} of epoch {record['epoch']}"
        case "abandoned":
            return f"{worker} gave up what it had computed from version {version} for {record['compute_s']:.3f} s"
        case "interrupt":
            return f"{worker} was told that version {version} had overtaken it{reason}"
        case "fence":
            return f"{worker} was told to join again{reason}"
        case "publish":
            return f"shard {record['shard']} published its block of version {version}{reason}"
        case "joined":
            return f"{worker} asked to take part"
        case "lost":
            return f"{worker} was lost{reason}"
        case "left":
            return f"{worker} left: its script had ended"
        case "no_more":
            return f"{worker} got no more samples of epoch {record['epoch']}{reason}"
        case "epoch_ended":
            return f"epoch {record['epoch']} ended"
        case "state_changed":
            return f"{worker} was {record['state']}{reason}"
        case _:
            return f"{worker}: {kind.replace('_', ' ')}{reason}" if "worker" in record else f"{kind.replace('_', ' ')}{reason}"


def _find(numbered: dict[RecordId, Record], what: str) -> RecordId:
    found = WHAT.fullmatch(what)
    if found is None:
        raise ConfigurationError(
            f"--why {what}: expected push=WORKER@CLOCK, wait=WORKER@SECONDS or the number of a record, for instance push=2@17"
        )
    pusher, clock, waiter, since, number = found.groups()
    if pusher is not None:
        return _first(numbered, "settle", int(pusher), what, clock=int(clock))
    if waiter is not None:
        return _first(numbered, "release", int(waiter), what, since=float(since))
    if int(number) not in numbered:
        raise ConfigurationError(f"--why {number}: the journal's records have the numbers {min(numbered)} to {max(numbered)}")
    return RecordId(int(number))


def _first(
    numbered: dict[RecordId, Record], kind: str, worker: int, what: str, *, clock: int | None = None, since: float = 0.0
) -> RecordId:
    its = [record for record in numbered.values() if record["kind"] == kind and record["worker"] == worker]
    for record in its:
        if record["t"] >= since and (clock is None or record["clock"] == clock):
            return RecordId(int(record["id"]))
    if not its:
        raise ConfigurationError(f"--why {what}: the journal has no {kind} of worker {worker}")
    last = its[-1]
    known = f"the last push with a fate has clock {last['clock']}" if clock is not None else f"it was last released at {last['t']:.3f} s"
    raise ConfigurationError(f"--why {what}: worker {worker} has no such {kind}; {known}")
