"""Every kind of message that the processes of a job send each other, with its fields. A message that does not fit costs its sender the
connection.

What a message may say at this moment, given what has happened before, is checked where that is known: incarnations and versions in
``runtime/coordinator.py``, memory and gradients in ``runtime/parameter_server/shard.py`` and ``runtime/parameter_server/per_shard.py``.
Long data that comes with every push, the settings of an optimizer and the layout of buffers, is checked by its receiver where it differs
from what was said before. Messages between ranks of different hosts are in ``runtime/allreduce/multi_host/messages.py``.
"""

from __future__ import annotations

from typing import Final

from offbeat.transport.schema import (
    Kind,
    Kinds,
    any_number,
    anything,
    fields,
    flag,
    many,
    mapping,
    maybe,
    number,
    one_of,
    plain,
    row,
    text,
    whole,
)

WORKERS_MAX: Final = 1 << 20
"""What counts as the number of a worker at all; which there are is known to the job."""
SAMPLES_MAX: Final = 1 << 40
SECONDS_MAX: Final = 1e9
POOLS_MAX: Final = 1 << 10
"""Samplers of one script."""

_worker = whole(0, WORKERS_MAX)
_server = whole(0, 1 << 16)
_seconds = number(0.0, SECONDS_MAX)
_leases = many(whole(), 1 << 16)
_words = text(1 << 14)
"""A reason."""
_rule = text(1 << 14)
_optimizer: Final = {"number_of_optimizer": whole(0, 63)}
"""In a job with several optimizers, which it is about; 0, the first, where it is left out."""
_address = row(text(300), row(text(300), whole(1, 65535)), text(100))
_addresses = many(many(row(whole(-1, WORKERS_MAX), _address), WORKERS_MAX), 2)
"""For each table of rounds, numbers of processes and where they listen."""
_replica = plain(40)
_report = maybe(plain())
_ranges = many(row(whole(0, SAMPLES_MAX), whole(0, SAMPLES_MAX)), 1 << 20)
"""Of positions in an epoch."""

_PUSHED: Final = fields(
    {"incarnation": whole(), "version": whole(), "samples": whole(0, SAMPLES_MAX), "compute_s": _seconds},
    {
        "leases": _leases,
        "nonfinite": maybe(text(1000)),
        "loss": maybe(any_number),
        "steps": whole(0, SAMPLES_MAX),
        "held": many(whole(), 1 << 16),
    },
)
_ABANDONED: Final = fields({"incarnation": whole(), "version": whole(), "compute_s": _seconds}, {"leases": _leases})
_EPOCH: Final = {"incarnation": whole(), "pool": whole(0, POOLS_MAX), "epoch": whole(0, SAMPLES_MAX), "size": maybe(whole(0, SAMPLES_MAX))}
_PUSH: Final = {"number": whole(), "steps": whole(), "push": _PUSHED}
_NEWS: Final = {"loaded": whole(0, 1 << 33), "first": many(row(whole(0, 100), maybe(whole(0, (1 << 64) - 1)), flag), 100)}
"""What goes with the first pushes of a worker."""
_VECTOR: Final = fields({"dtype": text(20), "numel": whole(0, 1 << 50), "size": whole(0, 1 << 50)})
_STATE: Final = Kind(fields({"do": one_of("get", "offer")}, {"pieces": anything}), payload=True)

FROM_WORKER: Final = Kinds(
    {
        "hello": Kind(
            fields(
                {"worker": _worker, "pid": whole(), "sync": _rule, "local_only": maybe(_words), "layout": anything, "optimizer": anything},
                {"vector": maybe(_VECTOR), **_optimizer},
            ),
            memory=2,
        ),
        "ready": Kind(fields({}, {"addresses": many(_address, 2)})),
        "heard": Kind(fields({"incarnation": whole(), "stuck_s": _seconds})),
        "stands": Kind(fields({"incarnation": whole(), "still": flag})),
        "initial": Kind(
            fields({"number": whole(), "provided": flag}, {"replica": _replica, "from": whole()}),
            payload=True,
        ),
        "push": Kind(fields(_PUSH, {"hyper": anything, **_NEWS}), payload=True),
        "got": Kind(),
        "abandoned": Kind(fields({"work": _ABANDONED})),
        "buffers": Kind(fields({"layout": anything}), payload=True),
        "metrics": Kind(fields({"values": mapping(any_number)})),
        "met": Kind(),
        "outside": Kind(fields({"incarnation": whole(), "reason": _words})),
        "voided": Kind(fields({"number": whole()})),
        "leaving": Kind(),
        "donation": Kind(
            fields(
                {"to": maybe(_worker), "number": whole(), "failed": maybe(_words)},
                {"replica": _replica, "from": whole()},
            ),
            payload=True,
        ),
        "pull": Kind(fields({"incarnation": whole()})),
        "samples": Kind(fields({"want": fields({**_EPOCH, "batch": whole(1, SAMPLES_MAX)}, {"rest": _ranges})})),
        "epoch": Kind(fields({"want": fields(_EPOCH)})),
        "left": Kind(fields({"incarnation": whole(), "noticed": flag})),
        "abort": Kind(fields({"reason": _words})),
        "state": _STATE,
        "place": Kind(fields({"incarnation": whole(), "pull": flag})),
        "part": Kind(fields({"steps": whole(), "part": plain(40)}), payload=True),
        "parts": Kind(fields({"steps": whole()})),
    }
)
"""To server 0, from a worker."""

FAILING: Final = Kinds({"failing": Kind(fields({"worker": _worker, "reason": _words, "pushed": flag}))})
"""To server 0, from a worker or from a process that does not become one."""

TO_SHARD: Final = Kinds(
    {
        "attach": Kind(fields({"worker": _worker, "in_place": flag}, _optimizer), memory=2),
        "push": Kind(fields({"worker": _worker, "number": whole()}, {"steps": whole(), "push": _PUSHED, "hyper": anything}), payload=True),
        "got": Kind(),
        "initial": Kind(fields({"worker": _worker, "number": whole(), "provided": flag})),
        "state": _STATE,
    }
)
"""To every server but 0, from a worker."""

CALL: Final = Kinds({"shard": Kind(fields({"number": _server}))})
"""To server 0: another server calls."""

_NORMS: Final = row(many(any_number), any_number, maybe(any_number))
FROM_SHARD: Final = Kinds(
    {
        "arrived": Kind(
            fields(
                {"worker": _worker, "number": whole(), "shard": _server},
                {"steps": whole(), "push": _PUSHED, "hyper": anything, **_optimizer},
            )
        ),
        "initialised": Kind(fields({"worker": _worker, "number": whole(), "shard": _server}, _optimizer)),
        "measured": Kind(fields({"version": whole(), "norms": _NORMS, "shard": _server}, _optimizer)),
    }
)
"""To server 0, from another server that has called."""

_SETTINGS: Final = {"workers": whole(1, WORKERS_MAX), "servers": whole(1, 1 << 16), "slow": many(anything), "kill": many(anything)}

FROM_SERVER_0: Final = Kinds(
    {
        "setup": Kind(
            fields({"layout": anything, "optimizer": anything, "sync": _rule, "servers": whole(1, 1 << 16)}, _optimizer), memory=1
        ),
        "orders": Kind(fields({"orders": many(mapping(anything, 100))}, _optimizer)),
    }
)
"""To every other server, from server 0."""

FROM_SUPERVISOR: Final = Kinds(
    {
        "job": Kind(fields({"settings": fields({**_SETTINGS, "late": many(anything)}), "servers": text(1 << 20)})),
        "finish": Kind(fields({"ok": flag, "reason": _words})),
        "process": Kind(fields({"fields": fields({"role": text(), "number": whole(), "what": text(), "detail": _words})})),
        "lost": Kind(fields({"worker": _worker, "reason": _words})),
        "ended": Kind(fields({"worker": _worker})),
        "noted": Kind(),
    }
)
"""To a server, from the process that has started it."""

TO_SUPERVISOR: Final = Kinds(
    {
        "listening": Kind(fields({"number": _server, "address": _address})),
        "loading": Kind(),
        "journal_failed": Kind(fields({"reason": _words})),
        "alive": Kind(),
        "standing": Kind(fields({"worker": _worker, "pid": whole(), "standing": text(100)}, {"reason": _words, "seconds": _seconds})),
        "status": Kind(fields({"snapshot": plain()})),
        "summary": Kind(fields({"summary": plain()})),
        "failed": Kind(fields({"reason": _words, "mistake": flag})),
        **FAILING.kinds,
        "kill": Kind(fields({"worker": _worker})),
    }
)
"""From a server."""

_PLAN: Final = many(anything, 16)
TO_WORKER: Final = Kinds(
    {
        "welcome": Kind(fields({"in_place": flag, "sync": _rule}), memory=2),
        "attached": Kind(),
        "joined": Kind(fields({"incarnation": whole()})),
        "provide": Kind(),
        "parameters": Kind(
            fields(
                {"serial": whole(), "incarnation": whole(), "version": whole(), "chief": maybe(_worker), "begins": flag, "plan": _PLAN},
                {
                    "shard": _server,
                    "block": whole(),
                    "enters": flag,
                    "replica": _replica,
                    "from": whole(),
                    "members": many(_worker, WORKERS_MAX),
                    "addresses": _addresses,
                },
            ),
            payload=True,
        ),
        "block": Kind(fields({"shard": _server, "block": whole(), "chief": maybe(_worker)}), payload=True),
        "buffers": Kind(fields({"layout": anything}), payload=True),
        "interrupt": Kind(fields({"version": whole(), "at_once": flag})),
        "donate": Kind(fields({"to": maybe(_worker), "number": whole(), "ticket": many(whole(), 2)})),
        "absent": Kind(),
        "meet": Kind(fields({"addresses": _addresses})),
        "fence": Kind(fields({"incarnation": whole()})),
        "grant": Kind(
            fields(
                {"lease": whole(), "epoch": whole(), "start": whole(), "stop": whole(), "parts": many(row(whole(), whole()))},
                {"refreshed": flag},
            )
        ),
        "no_more": Kind(fields({"epoch": whole(), "refreshed": flag, "report": _report})),
        "epoch_ended": Kind(fields({"epoch": whole(), "report": _report})),
        "farewell": Kind(),
        "chief": Kind(fields({"chief": maybe(_worker)})),
        "noted": Kind(),
        "refused": Kind(fields({"reason": _words})),
        "state": Kind(fields({"pieces": anything}), payload=True),
        "place": Kind(fields({"released": flag, "version": whole(), "places": many(row(whole(), plain()))})),
        "parts": Kind(
            fields({"awaited": many(_worker, WORKERS_MAX), "parts": many(row(_worker, plain(40), whole()), WORKERS_MAX)}), payload=True
        ),
    }
)
"""From a server, to a worker."""
