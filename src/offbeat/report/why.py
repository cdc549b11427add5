"""Tell backwards why something happened in a job: each event and effect in a journal has the number of its cause.

A worker waits until it is released; it is released because another worker pushed; that worker pushed late because it was itself released
late, or because it computed long. Going from cause to cause gives the chain that the moment depended on: a critical path.

A journal of a long run does not fit into memory. It is read twice: for the number of each record's cause, and for the records of the chain.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from offbeat.errors import ConfigurationError
from offbeat.journal.costs import QUEUED, spent
from offbeat.journal.records import Record
from offbeat.journal.verdicts import ADVICE
from offbeat.types import NO_CAUSE

DEPTH: Final = 12
"""How many causes are told."""
PHASES_TOLD: Final = 3
LEAST: Final = 0.1
"""A phase of a smaller share of a push's computing is not told."""
WHAT: Final = re.compile(r"push=(\d+)@(\d+)|wait=(\d+)@(\d+\.?\d*)|(\d+)")
SENTENCES: Final = {
    "pushed": "worker {worker} pushed{to} what it had computed from version {version} in {compute_s:.3f} s",
    "settle": "the push of worker {worker} with clock {clock} was {fate} at version {version}{why}",
    "release": "worker {worker} was released with version {version}{why}",
    "fold": "version {version} was folded from the pushes of worker {workers}{why}",
    "grant": "worker {worker} got samples {start} to {stop} of epoch {epoch}",
    "abandoned": "worker {worker} gave up what it had computed from version {version} for {compute_s:.3f} s",
    "interrupt": "worker {worker} was told that version {version} had overtaken it{why}",
    "fence": "worker {worker} was told to join again{why}",
    "publish": "shard {shard} published its block of version {version}{why}",
    "joined": "worker {worker} asked to take part",
    "lost": "worker {worker} was lost{why}",
    "left": "worker {worker} left: its script had ended",
    "no_more": "worker {worker} got no more samples of epoch {epoch}{why}",
    "epoch_ended": "epoch {epoch} ended",
    "state_changed": "worker {worker} was {state}{why}",
}
"""What a record of each kind says, from its fields; ``why``: its reason, ``to``: its shard, ``workers``: those of a fold's parts."""
ABSENT: Final = -1
"""In place of the cause of a record that is not there."""


def story(records: Iterable[Record], what: str, depth: int = DEPTH) -> Iterator[str]:
    """Tell what led to one record, from the last to the first, a line for each.

    Args:
        records: of a journal. They are iterated over twice; an iterator is kept in memory.
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
    records = list(records) if iter(records) is records else records
    causes, number = _causes(records, _Sought.of(what))
    chain: list[int] = []
    while number != NO_CAUSE and number < len(causes) and causes[number] != ABSENT and len(chain) <= depth:
        chain.append(number)
        # A cause is older than what it causes; anything else would be a journal that somebody has changed.
        number = causes[number] if causes[number] < number else NO_CAUSE
    wanted = frozenset(chain)
    found = {record["id"]: record for record in records if record.get("id") in wanted}
    for told, link in enumerate(chain[: depth + 1]):
        yield f"{found[link]['t']:10.3f} s  {'because ' if told else ''}{sentence(found[link])}"
    if number != NO_CAUSE and len(chain) > depth:
        yield f"... and so on; --why {number} tells the rest"


def sentence(record: Record) -> str:
    """Return what one record says, in words."""
    kind = record["kind"]
    words = {
        "why": f": {record['reason']}" if record.get("reason") else "",
        "to": f" to shard {record['shard']}" if record.get("shard") is not None else "",
        "workers": ", ".join(str(part["worker"]) for part in (record["parts"] if kind == "fold" else ())),
    }
    if kind not in SENTENCES:
        who = f"worker {record['worker']}: " if "worker" in record else ""
        return f"{who}{kind.replace('_', ' ')}{words['why']}"
    return SENTENCES[kind].format_map({**record, **words}) + (_longest(record) if kind == "pushed" else "")


def _longest(record: Record) -> str:
    """Return the longest phases of a push, as verdicts and the page divide it, in parentheses; empty if they were not measured."""
    if list(record.get("phases") or {"compute": 0.0}) == ["compute"]:
        return ""
    parts = {name: value for name, value in spent(record)[0].items() if value >= LEAST * record["compute_s"]}
    names = sorted(parts, key=lambda name: -parts[name])[:PHASES_TOLD]
    said = [f"{'without a core' if name == QUEUED else ADVICE[name].one} {parts[name]:.3f} s" for name in names if name in ADVICE]
    return f" ({', '.join(said)})" if said else ""


@dataclass(slots=True)
class _Sought:
    """The record that a story begins with, and what is known of it while a journal is read."""

    what: str
    kind: str = ""
    """"settle" or "release"; "": any record, by its number."""
    worker: int = -1
    clock: int | None = None
    since: float = 0.0
    number: int = NO_CAUSE
    """Its number; `NO_CAUSE`: not found yet."""
    last: Record | None = None
    """The newest record of this kind of this worker."""

    @classmethod
    def of(cls, what: str) -> _Sought:
        """Return what ``--why`` asks for. Raises `ConfigurationError` if that is not to be understood."""
        found = WHAT.fullmatch(what)
        if found is None:
            raise ConfigurationError(
                f"--why {what}: expected push=WORKER@CLOCK, wait=WORKER@SECONDS or the number of a record, for instance push=2@17; "
                "wait alone tells all waits in groups"
            )
        pusher, clock, waiter, since, number = found.groups()
        if pusher is not None:
            return cls(what, "settle", int(pusher), clock=int(clock))
        return cls(what, "release", int(waiter), since=float(since)) if waiter is not None else cls(what, number=int(number))

    def look(self, record: Record) -> None:
        """Compare the next record with what is sought."""
        if record["kind"] != self.kind or record["worker"] != self.worker:
            return
        self.last = record
        if self.number == NO_CAUSE and record["t"] >= self.since and self.clock in (None, record.get("clock")):
            self.number = record["id"]

    def missing(self) -> ConfigurationError:
        """Return the error that nothing of the kind is there."""
        if self.last is None:
            return ConfigurationError(f"--why {self.what}: the journal has no {self.kind} of worker {self.worker}")
        clock = f"the last push with a fate has clock {self.last['clock']}"
        known = clock if self.clock is not None else f"it was last released at {self.last['t']:.3f} s"
        return ConfigurationError(f"--why {self.what}: worker {self.worker} has no such {self.kind}; {known}")


def _causes(records: Iterable[Record], sought: _Sought) -> tuple[array[int], int]:
    """Return the number of each record's cause, by the record's number, and the number of the record that is sought."""
    causes, least = array("q", [ABSENT]), 0
    for record in records:
        number = record.get("id")
        if number is not None:
            causes.extend([ABSENT] * (number + 1 - len(causes)))
            causes[number] = record.get("cause", NO_CAUSE)
            least = least or number
            sought.look(record)
    if not least:
        raise ConfigurationError("the records of this journal have no numbers: an older offbeat has written it; run the job again")
    if sought.number == NO_CAUSE:
        raise sought.missing()
    if not sought.kind and (sought.number >= len(causes) or causes[sought.number] == ABSENT):
        raise ConfigurationError(f"--why {sought.what}: the journal's records have the numbers {least} to {len(causes) - 1}")
    return causes, sought.number
