"""Describe every kind of message between the processes of a job, with its fields. A message that breaks a rule costs its sender the
connection.

What a message may say at the moment, given what has happened before, is checked where that is known: incarnations and versions in
``runtime/worker_requests.py``, memory and gradients in ``runtime/parameter_server/shard.py`` and ``runtime/parameter_server/per_shard.py``.
Long data that comes with every push, such as an optimizer's settings and the layout of buffers, is checked by its receiver when it changes.
Messages between ranks of several hosts are in ``runtime/allreduce/multi_host/messages.py``.
"""

from __future__ import annotations

from typing import Any, Final

from offbeat.errors import ProtocolError
from offbeat.runtime.job.summary_fields import SUMMARY
from offbeat.transport.schema import (
    Check,
    Kinds,
    MessageSchema,
    Unfit,
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
    variant,
    whole,
)
from offbeat.types import REDUCTIONS, WIRE_FORMATS, WorkerState

WORKERS_MAX: Final = 1 << 20
"""Greatest number of a worker in any message; the job checks which workers exist."""
SAMPLES_MAX: Final = 1 << 40
SECONDS_MAX: Final = 1e9
POOLS_MAX: Final = 1 << 10
"""Most samplers of one script."""
BUFFERS_MAX: Final = 1 << 17
"""Most buffers of one model."""
METRICS_MAX: Final = 1000
"""Most values of a message of a script that logs more."""

_worker = whole(0, WORKERS_MAX)
_server = whole(0, 1 << 16)
_seconds = number(0.0, SECONDS_MAX)
_times = mapping(_seconds, 32)
"""Of phases, by name."""
_leases = many(whole(), 1 << 16)
_words = text(1 << 14)
"""A reason, in words."""
_path = text(1 << 14)
_rule = text(1 << 14)
_optimizer: Final = {"number_of_optimizer": whole(0, 63)}
"""In a job with several optimizers: the number of the optimizer that the message is about; left out for the first, 0."""
_wire: Final = {"wire": one_of(*WIRE_FORMATS)}
_gpu: Final = {"gpu": text(64)}
"""How gradients and parameters travel on this connection, unless its ends share memory; left out for float32."""
_address = row(text(300), row(text(300), whole(1, 65535)), text(100))
_addresses = many(many(row(whole(-1, WORKERS_MAX), _address), WORKERS_MAX), 2)
"""For each kind of rounds: numbers of processes and where they listen."""
_replica = plain(40)
_report = maybe(plain())
_places = many(whole(0, BUFFERS_MAX - 1), BUFFERS_MAX, least=1)
"""Numbers of a model's buffers."""
_ranges = many(row(whole(0, SAMPLES_MAX), whole(0, SAMPLES_MAX)), 1 << 20)
"""Ranges of positions in an epoch."""

_PUSHED: Final = fields(
    {"incarnation": whole(), "version": whole(), "samples": whole(0, SAMPLES_MAX), "compute_s": _seconds},
    {
        "leases": _leases,
        "nonfinite": maybe(text(1000)),
        "loss": maybe(any_number),
        "steps": whole(0, SAMPLES_MAX),
        "held": many(whole(), 1 << 16),
        "shard": _server,
        "alone": flag,
        "sums": flag,
        "place": whole(0, SAMPLES_MAX),
        "phases": _times,
        "processor": _times,
        "host": mapping(number(-SECONDS_MAX, SECONDS_MAX), 32),
        "process": whole(0, WORKERS_MAX),
    },
)
_ABANDONED: Final = fields({"incarnation": whole(), "version": whole(), "compute_s": _seconds}, {"leases": _leases})
_DEAL: Final = {
    "unit": whole(0, SAMPLES_MAX),
    "sizes": many(whole(1, SAMPLES_MAX), WORKERS_MAX),
    "granularity": whole(0, SAMPLES_MAX),
    "most": whole(0, SAMPLES_MAX),
}
"""Of `Deal`; fields with their default values are left out."""
_EPOCH: Final = {"incarnation": whole(), "pool": whole(0, POOLS_MAX), "epoch": whole(0, SAMPLES_MAX), "size": maybe(whole(0, SAMPLES_MAX))}
_PUSH: Final = {"number": whole(), "steps": whole(), "push": _PUSHED}
_NEWS: Final = {
    "loaded": whole(0, 1 << 33),
    "before": whole(0, SAMPLES_MAX),
    "first": many(row(whole(0, 100), maybe(whole(0, (1 << 64) - 1)), flag), 100),
    "given": flag,
    "frozen": whole(0, 1 << 33),
    "chosen": whole(0, 1 << 33),
}
"""Fields that come only with a worker's first pushes; ``given``: with those whose number of samples the script has passed to step()."""
_VECTOR: Final = fields({"dtype": text(20), "numel": whole(0, 1 << 50), "size": whole(0, 1 << 50)})
_STATE: Final = MessageSchema(fields({"do": one_of("get", "offer")}, {"pieces": anything}), payload=True)

FROM_WORKER: Final = Kinds(
    {
        "hello": MessageSchema(
            fields(
                {"worker": _worker, "pid": whole(), "sync": _rule, "local_only": maybe(_words), "layout": anything, "optimizer": anything},
                {"vector": maybe(_VECTOR), "reduction": one_of(*REDUCTIONS), **_wire, **_gpu, **_optimizer},
            ),
            memory=4,
        ),
        "ready": MessageSchema(fields({}, {"addresses": many(_address, 2)})),
        "heard": MessageSchema(fields({"incarnation": whole(), "stuck_s": _seconds}, {"told": flag})),
        "stands": MessageSchema(fields({"incarnation": whole(), "still": flag})),
        "initial": MessageSchema(
            fields({"number": whole(), "provided": flag}, {"replica": _replica, "from": whole()}),
            payload=True,
        ),
        "push": MessageSchema(fields(_PUSH, {"hyper": anything, **_NEWS}), payload=True),
        "got": MessageSchema(),
        "abandoned": MessageSchema(fields({"work": _ABANDONED})),
        "buffers": MessageSchema(fields({"layout": anything, "changed": _places}), payload=True),
        "metrics": MessageSchema(fields({"values": mapping(any_number, METRICS_MAX)})),
        "met": MessageSchema(),
        "outside": MessageSchema(fields({"incarnation": whole(), "reason": _words})),
        "voided": MessageSchema(fields({"number": whole()})),
        "leaving": MessageSchema(fields({}, {"exits": flag})),
        "donation": MessageSchema(
            fields(
                {"to": maybe(_worker), "number": whole(), "failed": maybe(_words)},
                {"replica": _replica, "from": whole()},
            ),
            payload=True,
        ),
        "pull": MessageSchema(fields({"incarnation": whole()})),
        "samples": MessageSchema(fields({"want": fields({**_EPOCH, "batch": whole(1, SAMPLES_MAX)}, {"rest": _ranges, **_DEAL})})),
        "epoch": MessageSchema(fields({"want": fields(_EPOCH, {"kept": _leases})})),
        "skipped": MessageSchema(fields({"incarnation": whole(), "leases": _leases})),
        "barrier": MessageSchema(fields({"incarnation": whole(), "number": maybe(whole())})),
        "left": MessageSchema(fields({"incarnation": whole(), "noticed": flag}, {"exits": flag, "over": flag, "early": flag})),
        "abort": MessageSchema(fields({"reason": _words})),
        "state": _STATE,
        "place": MessageSchema(fields({"incarnation": whole(), "pull": flag})),
        "part": MessageSchema(fields({"version": whole(), "nth": whole(), "part": plain(40)}), payload=True),
        "checkpoint_part": MessageSchema(fields({"version": whole(), "final": flag, "part": plain(40)}, {"leaves": flag}), payload=True),
        "parts": MessageSchema(fields({"version": whole(), "nth": whole(), "last": flag})),
    }
)
"""From a worker to server 0."""

ROUNDS: Final = Kinds({"rounds": MessageSchema(fields({"worker": _worker, "index": whole(0, 1)}, _optimizer))})
"""From a rank of several hosts to server 0, as the first message of a connection to the sequencer of one kind of rounds: 0 for gradients, 1
for parameters. Those that follow are in ``runtime/allreduce/multi_host/messages.py``."""

FAILURE: Final = {
    "worker": _worker,
    "reason": _words,
    "pushed": flag,
    "type": text(),
    "place": maybe(text(1000)),
    "final": flag,
    "over": flag,
}
FAILING: Final = Kinds({"failing": MessageSchema(fields(FAILURE))})
"""From a worker, or from a process that does not become one, to server 0."""

TO_SHARD: Final = Kinds(
    {
        "attach": MessageSchema(fields({"worker": _worker, "in_place": flag}, {**_wire, **_optimizer}), memory=2),
        "push": MessageSchema(
            fields({"worker": _worker, "number": whole()}, {"steps": whole(), "push": _PUSHED, "hyper": anything}), payload=True
        ),
        "got": MessageSchema(),
        "initial": MessageSchema(fields({"worker": _worker, "number": whole(), "provided": flag})),
        "state": _STATE,
    }
)
"""From a worker to every server but 0."""

CALL: Final = Kinds({"shard": MessageSchema(fields({"number": _server}))})
"""From another server to server 0, as its first message."""

_NORMS: Final = row(many(any_number), any_number, maybe(any_number))
FROM_SHARD: Final = Kinds(
    {
        "arrived": MessageSchema(
            fields(
                {"worker": _worker, "number": whole(), "shard": _server},
                {"steps": whole(), "push": _PUSHED, "hyper": anything, **_optimizer},
            )
        ),
        "initialised": MessageSchema(fields({"worker": _worker, "number": whole(), "shard": _server}, _optimizer)),
        "measured": MessageSchema(fields({"version": whole(), "norms": _NORMS, "shard": _server}, _optimizer)),
        "saved": MessageSchema(fields({"version": whole(), "failed": maybe(_words), "cut_off": flag, "shard": _server}, _optimizer)),
    }
)
"""From another server to server 0, after its first message."""

_PLAN: Final = many(plain(), 16)
_factor = number(-1e38, 1e38)
"""Torch refuses larger ones for float32."""


def _parts(*each: Check) -> Check:
    """Accept the parts of a fold: a worker each, the number of its push in rules of shard scope, and a weight."""
    return many(row(_worker, *each, _factor), WORKERS_MAX)


_FOLD: Final = {"version": whole(), "hyper": plain(), "scale": _factor}
_RELEASE: Final = {"serial": whole(), "incarnation": whole(), "version": whole(), "chief": maybe(_worker), "begins": flag, "plan": _PLAN}
_of_worker = fields({"worker": _worker})
_orders_of_all: Final = {
    "enter": _of_worker,
    "forget": _of_worker,
    "initialise": _of_worker,
    "state": _of_worker,
    "gather": fields({"worker": _worker, "weight": _factor}),
    "save": fields({"version": whole()}),
    "release": fields({"worker": _worker, "exact": flag, "anew": flag, **_RELEASE}),
}
JOB_ORDERS: Final = many(
    variant("do", {**_orders_of_all, "fold": fields({**_FOLD, "parts": _parts(), "sums": _parts()})}),
)
"""Orders under a rule of job scope."""
SHARD_ORDERS: Final = many(
    variant(
        "do",
        {
            **_orders_of_all,
            "fold": fields({**_FOLD, "parts": _parts(whole())}),
            "discard": fields({"worker": _worker, "number": whole()}),
            "publish": fields({"workers": many(_worker, WORKERS_MAX), "chief": maybe(_worker)}),
        },
    )
)
"""Orders under a rule of shard scope."""

FROM_SERVER_0: Final = Kinds(
    {
        "setup": MessageSchema(
            fields({"layout": anything, "optimizer": anything, "sync": _rule, "servers": whole(1, 1 << 16)}, {**_gpu, **_optimizer}),
            memory=1,
        ),
        "orders": MessageSchema(fields({"orders": many(mapping(anything, 100))}, _optimizer)),
    }
)
"""From server 0 to every other server. `check_orders` checks each order."""


def check_orders(orders: Any, *, of_shard: bool) -> None:
    """Check the orders of server 0.

    Args:
        orders: of a message that `FROM_SERVER_0` accepts.
        of_shard: True under a rule of shard scope.

    Raises:
        ProtocolError: an order is of no known kind, or a field does not fit.
    """
    try:
        (SHARD_ORDERS if of_shard else JOB_ORDERS)(orders)
    except Unfit as unfit:
        at = ".".join(("orders", *unfit.path))
        raise ProtocolError(f"server 0 sent 'orders' with {at} = {unfit.seen} (expected {unfit.expected})") from None


_TRACE: Final = fields({"path": _path, "job": text(1 << 14), "column": whole(), "scale": number(0.0)})
_SETTINGS: Final = {
    "workers": whole(1, WORKERS_MAX),
    "servers": whole(1, 1 << 16),
    "slow": many(
        fields({"worker": whole(-1, WORKERS_MAX), "seconds": _seconds}, {"start": whole(), "stop": maybe(whole()), "trace": maybe(_TRACE)})
    ),
    "kill": many(fields({"worker": _worker, "version": whole()})),
    "late": many(fields({"server": whole(-1, 1 << 16), "seconds": _seconds}, {"share": number(0.0, 1.0)})),
}
_CHECKPOINT: Final = fields(
    {"folder": _path, "every_s": maybe(_seconds), "every_versions": maybe(whole(1)), "keep": whole(1)},
)
_MORE_SETTINGS: Final = {
    "least": whole(0, WORKERS_MAX),
    "checkpoint": maybe(_CHECKPOINT),
    "resume": maybe(_path),
    "sync": maybe(_rule),
    "wire": maybe(one_of(*WIRE_FORMATS)),
    "seed": whole(-(1 << 63), (1 << 64) - 1),
    "timeout_s": number(0.0),
    "progress_timeout_s": number(0.0),
    "phases": flag,
    "torchrun_env": flag,
    "script": text(1 << 14),
    "journal": maybe(text(1 << 14)),
    "replicas": whole(0, 1),
    "batch": maybe(text(1 << 20)),
}
_JOB: Final = {"settings": fields(_SETTINGS, _MORE_SETTINGS), "servers": text(1 << 20)}
_key: Final = text(100)
_where: Final = text(1000)
"""The address of a process, in JSON."""

FROM_SUPERVISOR: Final = Kinds(
    {
        "job": MessageSchema(fields(_JOB, {"outlives": flag, "elsewhere": flag, "key": _key, "away_s": number(low=0.0)})),
        "stand_by": MessageSchema(fields({**_JOB, "key": _key, "address": _where, "runs": flag})),
        "lead": MessageSchema(fields({"term": whole(), "servers": text(1 << 20)}, {"away_s": number(low=0.0)})),
        "alone": MessageSchema(),
        "fenced": MessageSchema(fields({"term": whole()})),
        "moved": MessageSchema(fields({"servers": text(1 << 20)})),
        "kept": MessageSchema(fields({"name": text(300)}), memory=1),
        "finish": MessageSchema(fields({"ok": flag, "reason": _words})),
        "process": MessageSchema(fields({"fields": fields({"role": text(), "number": whole(), "what": text(), "detail": _words})})),
        "lost": MessageSchema(fields({"worker": _worker, "reason": _words}, {"dead": flag, "pid": whole()})),
        "ended": MessageSchema(fields({"worker": _worker}, {"pid": whole()})),
        "checkpoint": MessageSchema(fields({"within_s": _seconds}, {"last": flag})),
        "noted": MessageSchema(),
        "records_taken": MessageSchema(),
    }
)
"""From the process that has started a server to that server."""

_STANDING: Final = {"worker": _worker, "pid": whole()}
_STANDINGS: Final[dict[str, dict[str, Check]]] = {
    **{state.value: {"reason": _words} for state in WorkerState},
    "hello": {},
    "too late": {},
    "stuck": {"seconds": _seconds},
    "told": {},
}
"""What a server may report of a worker, and what comes with it."""
_MORE_STANDINGS: Final[dict[str, dict[str, Check]]] = {WorkerState.FINISHED.value: {"exits": flag, "over": flag, "early": flag}}

TO_SUPERVISOR: Final = Kinds(
    {
        "listening": MessageSchema(fields({"number": _server, "address": _address}, {"role": one_of("leader", "standby")})),
        "followed": MessageSchema(fields({"address": _where})),
        "standby_gone": MessageSchema(fields({"reason": _words, "address": _where})),
        "loading": MessageSchema(),
        "journal_failed": MessageSchema(fields({"reason": _words})),
        "alive": MessageSchema(),
        "standing": MessageSchema(
            variant(
                "standing", {state: fields({**_STANDING, **more}, _MORE_STANDINGS.get(state, {})) for state, more in _STANDINGS.items()}
            ),
        ),
        "status": MessageSchema(fields({"snapshot": SUMMARY})),
        "records": MessageSchema(fields({"first": whole(), "count": whole()}), payload=True),
        "summary": MessageSchema(fields({"summary": SUMMARY})),
        "failed": MessageSchema(fields({"reason": _words, "mistake": flag})),
        "failing": MessageSchema(fields({**FAILURE, "before": maybe(_worker)})),
        "noticed": MessageSchema(fields({"signal": text(20)})),
        "checkpoint": MessageSchema(
            fields({"version": whole(), "failed": maybe(_words), "missing": many(_worker, WORKERS_MAX)}, {"last": flag})
        ),
        "keep": MessageSchema(fields({"name": text(300)}), memory=1),
        "drop": MessageSchema(fields({"name": text(300)})),
        "mortal": MessageSchema(fields({"reason": _words, "lack": flag})),
        "kill": MessageSchema(fields({"worker": _worker})),
    }
)
"""From a server to the process that has started it."""

TO_WORKER: Final = Kinds(
    {
        "welcome": MessageSchema(
            fields({"in_place": flag, "sync": _rule}, {"backend": text(40), "checkpoints": flag, "unusable": _words}), memory=2
        ),
        "attached": MessageSchema(),
        "joined": MessageSchema(fields({"incarnation": whole()})),
        "provide": MessageSchema(),
        "parameters": MessageSchema(
            fields(
                {"serial": whole(), "incarnation": whole(), "version": whole(), "chief": maybe(_worker), "begins": flag, "plan": _PLAN},
                {
                    "exact": flag,
                    "half": whole(0, 1),
                    "shard": _server,
                    "block": whole(),
                    "enters": flag,
                    "replica": _replica,
                    "from": whole(),
                    "addresses": _addresses,
                },
            ),
            payload=True,
        ),
        "block": MessageSchema(fields({"shard": _server, "block": whole(), "chief": maybe(_worker)}), payload=True),
        "buffers": MessageSchema(fields({"layout": anything}), payload=True),
        "interrupt": MessageSchema(fields({"version": whole(), "at_once": flag})),
        "donate": MessageSchema(fields({"to": maybe(_worker), "number": whole(), "ticket": many(whole(), 2)})),
        "meet": MessageSchema(fields({"addresses": _addresses})),
        "fence": MessageSchema(fields({"incarnation": whole()})),
        "unused": MessageSchema(fields({"incarnation": whole()}, {"number": whole()})),
        "grant": MessageSchema(
            fields(
                {"lease": whole(), "epoch": whole(), "start": whole(), "stop": whole(), "parts": many(row(whole(), whole()))},
                {"refreshed": flag},
            )
        ),
        "no_more": MessageSchema(fields({"epoch": whole(), "refreshed": flag, "report": _report, "over": flag})),
        "barrier_passed": MessageSchema(
            fields({"number": whole(), "version": whole(), "workers": many(_worker, WORKERS_MAX), "past": flag})
        ),
        "goes_on": MessageSchema(fields({"steps": whole(), "restarted": flag})),
        "job_over": MessageSchema(fields({"reason": _words})),
        "epoch_ended": MessageSchema(fields({"epoch": whole(), "report": _report})),
        "farewell": MessageSchema(),
        "chief": MessageSchema(fields({"chief": maybe(_worker)})),
        "noted": MessageSchema(fields({}, {"before": maybe(_worker)})),
        "refused": MessageSchema(fields({"reason": _words})),
        "state": MessageSchema(fields({"pieces": anything}), payload=True),
        "checkpoint": MessageSchema(
            fields({"version": whole(), "random": flag, "rest": flag, "frozen": flag, "others": many(row(whole(), flag, flag))})
        ),
        "resume_part": MessageSchema(fields({"part": plain(40)}), payload=True),
        "place": MessageSchema(fields({"released": flag, "version": whole(), "places": many(row(whole(), plain()))})),
        "parts": MessageSchema(
            fields({"awaited": many(_worker, WORKERS_MAX), "parts": many(row(_worker, plain(40), whole()), WORKERS_MAX)}), payload=True
        ),
    }
)
"""From a server to a worker."""
