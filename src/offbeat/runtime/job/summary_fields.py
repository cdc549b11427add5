"""Describe the summary of a job (`journal.summary.Tally.summary`) as it comes from server 0 to the process that shows it to the user.

The supervisor computes with these fields while it watches over all processes of the job: a missing one must not end it.
"""

from __future__ import annotations

from typing import Any, Final

from offbeat.transport.schema import Check, Unfit, fields, flag, many, mapping, maybe, number, shown, text, whole

_NOT_FINITE: Final = ("nan", "inf", "-inf")
_WORKERS_MAX: Final = 1 << 20
_words = text(1 << 14)
_any_whole = whole(-(1 << 62))
"""Corrections of a count may come before the count."""
_amount = number()


def _figure(value: Any) -> None:
    """Accept a number as the journal has it: NaN and infinity are texts there."""
    if type(value) not in (int, float) and value not in _NOT_FINITE:
        raise Unfit(f"a number, or one of {', '.join(_NOT_FINITE)}", shown(value))


_spread: Final = maybe(fields(dict.fromkeys(("least", "most", "mean"), _figure)))
_fates: Final = fields(dict.fromkeys(("folded", "carried", "dropped", "rejected"), _any_whole))
_rule: Final = maybe(text(1 << 14))
_staleness: Final[dict[str, Check]] = {"staleness_mean": _amount, "staleness_max": _any_whole}
_WORKER: Final = fields(
    {
        "worker": whole(0, _WORKERS_MAX),
        "state": text(100),
        "reason": _words,
        "doing": text(100),
        **dict.fromkeys(("incarnations", "deaths", "pushes", "steps", "samples", "clock", "abandoned", "interrupts"), _any_whole),
        **dict.fromkeys(("samples_per_step", "compute_s", "abandoned_s", "busy_s", "wait_s", "idle_s", "cost_s"), _amount),
        **dict.fromkeys(("phases", "processor", "host"), mapping(_amount, 100)),
        "batch": maybe(whole()),
        "lead_mean": maybe(_amount),
        "lead_max": maybe(_any_whole),
        "fates": _fates,
        "loss": maybe(_figure),
        **_staleness,
    }
)
_EPOCH: Final = fields({"pool": whole(), "epoch": whole()}, {"batches": mapping(whole(), _WORKERS_MAX)})
_OPTIMIZER: Final = fields(
    {"optimizer": whole(), "sync": _rule, "version": whole(), "pushes": _any_whole, "fates": _fates, **_staleness},
)
_FAULT: Final = fields({"t": _amount, "worker": whole(-1, _WORKERS_MAX), "what": text(), "detail": maybe(_words)})
_WARNING: Final = fields({"t": _amount, "about": text(), "workers": many(whole(0, _WORKERS_MAX)), "step": whole(), "detail": _words})
_VERDICT: Final = fields(
    {
        **dict.fromkeys(("kind", "cause", "confidence"), text(100)),
        **dict.fromkeys(("what", "evidence", "remedy"), _words),
        "workers": many(whole(0, _WORKERS_MAX)),
        "since_s": maybe(_amount),
        **dict.fromkeys(("cost_s", "share", "worth"), _amount),
        "details": mapping(_amount, _WORKERS_MAX),
    }
)

SUMMARY: Final = fields(
    {
        "sync": _rule,
        "workers": maybe(whole()),
        "servers": maybe(whole()),
        "seed": maybe(_any_whole),
        "started": maybe(text()),
        "script": maybe(_words),
        **dict.fromkeys(("elapsed_s", "wall_s", "samples_per_s"), _amount),
        **dict.fromkeys(("version", "samples", "pushes", "steps", "abandoned", "interrupts", "blocks"), _any_whole),
        "fates": _fates,
        **_staleness,
        "lead_max": maybe(_any_whole),
        "parts": _spread,
        "scale": _spread,
        "shards": maybe(many(fields({"shard": whole(), "version": whole(), **_staleness}))),
        "per_worker": many(_WORKER, _WORKERS_MAX),
        "metrics": mapping(_figure, 1 << 20),
        "epochs": many(_EPOCH),
        "earlier_epochs": maybe(mapping(_any_whole, 100)),
        "faults": many(_FAULT),
        "warnings": many(_WARNING),
        "exceptions": many(fields({"t": _amount, "worker": whole(0, _WORKERS_MAX), "reason": _words, "place": maybe(_words)})),
        "verdicts": many(_VERDICT, _WORKERS_MAX),
        "loss": maybe(_figure),
        "optimizers": maybe(many(_OPTIMIZER, 1 << 10)),
        "journal_failure": maybe(_words),
        "ok": maybe(flag),
        "reason": maybe(_words),
    }
)
"""Fields that it does not name, such as those of an epoch's report, are passed on unread."""
