"""What follows from the figures of a summary (`journal.summary.Tally.summary`), and how they are written, in tables and in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final, TypeAlias

from offbeat.errors import ConfigurationError
from offbeat.journal.worker_summary import NOT_COME
from offbeat.policies import rule
from offbeat.types import Seconds

Summary: TypeAlias = dict[str, Any]

SPELLED_OUT: Final = 40
"""Up to this many characters a rule is shown as it is spelled."""
TOLD_TO_LEAVE: Final = "it was told to leave"
CLOSED: Final = "its script has closed the optimizer"
"""What the coordinator says of a worker that has left by Ctrl-C or SIGTERM, before the end of its script."""
STEADY: Final = 0.9
"""Where folds have at least this part of the most contributions on average, only the ends of epochs and deaths make them differ."""


def short(sync: str | None) -> str:
    """A rule's spelling; of a long one only the first setting, and what is not at its default.

    >>> short("elastic(R=15, mode=bulk, grace=3.0, history=1)"), short("ssp(staleness=3)"), short(None)
    ('elastic(R=15, mode=bulk)', 'ssp(staleness=3)', '?')
    """
    if sync is None or len(sync) <= SPELLED_OUT:
        return sync or "?"
    try:
        found = rule(sync)
    except ConfigurationError:
        return sync
    named = [(f.name, getattr(found, f.name), f.default) for f in fields(found)]  # type: ignore[arg-type]
    kept = [(name, value) for place, (name, value, default) in enumerate(named) if place == 0 or value != default]
    return f"{found.called()}({', '.join(f'{name}={value if isinstance(value, str) else repr(value)}' for name, value in kept)})"


def local(summary: Summary) -> bool:
    """True if workers make local steps between their pushes."""
    return any(worker["steps"] > worker["pushes"] for worker in summary["per_worker"])


def per_step(worker: dict[str, Any]) -> float | None:
    """Seconds of computing per step, which is a push where gradients are exchanged; None before the first push."""
    return worker["compute_s"] / worker["steps"] if worker["steps"] else None


def waiting_share(workers: Sequence[dict[str, Any]]) -> float | None:
    """wait / (busy + wait), over all these workers; None where there is no time to share out. The one meaning of waiting in all output.

    A worker is busy from each release to its push, whatever the script does meanwhile, and waits from the push to the next release.
    """
    wait_s = sum(worker["wait_s"] for worker in workers)
    all_s = wait_s + sum(worker["busy_s"] for worker in workers)
    return wait_s / all_s if all_s > 0 else None


def judged_s(summary: Summary) -> Seconds:
    """The time that costs of workers are a share of, from the first release until now, as far as verdicts tell; else `wall_s`.

    >>> judged_s({"verdicts": [{"cost_s": 3.0, "share": 0.25}], "wall_s": 11.5}), judged_s({"verdicts": [], "wall_s": 11.5})
    (12.0, 11.5)
    """
    return next((one["cost_s"] / one["share"] for one in summary["verdicts"] if one["share"] > 0.0), float(summary["wall_s"]))


def training_words(summary: Summary) -> str:
    """How long the training took: `wall_s`, from the first release to the last fold. The job's clock begins before, at its start."""
    simulated = " simulated" if summary["started"] == "simulated" else ""
    return f"{summary['wall_s']:,.1f}{simulated} s of training"


def versions_per_s(summary: Summary) -> float:
    """Folds per second, from the first release to the last fold; in rules of shard scope those of the shard that has made least."""
    return summary["version"] / summary["wall_s"] if summary["wall_s"] > 0 else 0.0


def rate_words(summary: Summary, rate: float) -> str:
    """Samples per second; ``rate`` is meaningless where steps do not say how many samples they are of.

    >>> rate_words({"samples": 0, "version": 3, "fates": {"folded": 6}}, 0.0)
    'samples not known'
    """
    if not summary["samples"] and summary["fates"]["folded"]:
        return "samples not known"
    return f"{rate:,.0f} samples/s"


def accuracy(summary: Summary) -> tuple[str, float] | None:
    """The metric that tells how good the model is: a test accuracy before a validation accuracy before any other."""
    names = [name for name in summary["metrics"] if "acc" in name.lower()]
    if not names:
        return None
    best = min(names, key=lambda name: (0 if "test" in name.lower() else 1 if "val" in name.lower() else 2, name))
    return best, float(summary["metrics"][best])


def batches_by_epoch(summary: Summary) -> dict[int, list[int | None]]:
    """For each worker the batch size that it had at the end of each epoch; empty lists where the rule leaves that to the script."""
    epochs = [epoch["batches"] for epoch in summary["epochs"] if epoch["pool"] == 0 and "batches" in epoch]
    return {worker["worker"]: [epoch.get(str(worker["worker"])) for epoch in epochs] for worker in summary["per_worker"]}


def state_words(worker: dict[str, Any]) -> str:
    """A worker's state in a few words, its returns included."""
    returns = worker["incarnations"] - 1
    state = "stopped" if worker["state"] == "finished" and worker["reason"] == TOLD_TO_LEAVE else str(worker["state"])
    state = "awaited" if is_awaited(worker) else state
    return f"{state}, back {returns}x" if returns > 0 else state


def is_awaited(worker: dict[str, Any]) -> bool:
    """Return True if the worker has not come, and may come at any time."""
    return bool(worker["state"] == "dead" and worker["reason"] in NOT_COME)


def seconds(value: float | None) -> str:
    """A duration with a unit that fits it."""
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1.0 else f"{value:.2f} s"


def share(value: float | None) -> str:
    """A part of a whole as a percentage."""
    return "-" if value is None else f"{100 * value:.0f}%"


def spread(found: dict[str, Any] | None, *, digits: int = 0) -> str | None:
    """Range and mean; None if there is nothing to say, because all are the same.

    >>> spread({"least": 4, "most": 16, "mean": 9.2})
    '4..16, mean 9.2'
    """
    if found is None or found["least"] == found["most"]:
        return None
    least, most, mean = (float(found[name]) for name in ("least", "most", "mean"))
    return f"{least:.{digits}f}..{most:.{digits}f}, mean {mean:.{digits + 1}f}"


def chooses(summary: Summary) -> bool:
    """Return True if the rule chooses for each version how many contributions make it: its k."""
    return (summary["sync"] or "").split("(")[0] in ("dbw", "b_dbw")


def per_fold(summary: Summary) -> str | None:
    """Range and mean of the number of contributions in a fold; None where it does not change by the rule's will."""
    parts = summary["parts"]
    if parts is None or (parts["mean"] >= STEADY * parts["most"] and not chooses(summary)):
        return None
    return spread(parts)


def version_words(summary: Summary) -> str:
    """Return the model's version; where shards differ, the least and the greatest.

    >>> version_words({"version": 1200, "shards": None}), version_words({"version": 8, "shards": [{"version": 8}, {"version": 11}]})
    ('version 1,200', 'versions 8..11')
    """
    newest = max((shard["version"] for shard in summary["shards"] or ()), default=summary["version"])
    return f"version {newest:,}" if newest == summary["version"] else f"versions {summary['version']:,}..{newest:,}"
