"""What is worth a sentence: what a rule has chosen, who is slow and why, who died. Made of summaries; it counts nothing itself."""

from __future__ import annotations

from statistics import median_low
from typing import Any, Final

from offbeat.report.figures import Summary, chooses, is_awaited, local, per_fold, per_step, seconds, share, short, spread, waiting_share

SLOW: Final = 1.5
"""A worker is called slow when it computes for longer per step than this many times the median worker."""
SHARDS_LISTED: Final = 8


def remarks(summary: Summary) -> str:
    """Return remarks on a job, one sentence each; empty if there are none."""
    said = [*_choices(summary), *(_slow_sentence(summary, number) for number in slow_workers(summary))]
    for worker in summary["per_worker"]:
        if worker["deaths"]:
            times = "" if worker["deaths"] == 1 else f" {worker['deaths']} times"
            after = f", the last reason is: {worker['reason']}" if worker["state"] == "dead" else " and came back"
            after = " and came back" if worker["state"] in ("alive", "finished") else after
            said.append(f"Worker {worker['worker']} died{times}{after}.")
    if awaited := [str(worker["worker"]) for worker in summary["per_worker"] if is_awaited(worker)]:
        said.append(f"Worker{'s' * (len(awaited) > 1)} {', '.join(awaited)} took no part: no machine came that would start one.")
    said += _exceptions(summary)
    said += [f"Warning: {warning['detail']}." for warning in summary.get("warnings", ())]
    said += [_optimizer_sentence(one) for one in summary["optimizers"] or ()]
    if summary.get("journal_failure") is not None:
        said.append(f"The journal is not complete: {summary['journal_failure']}.")
    if summary["ok"] is False:
        said.append(f"The job failed: {summary['reason']}.")
    return "\n".join(said)


def _exceptions(summary: Summary) -> list[str]:
    """Return a sentence for each exception that has ended a script, equal ones in one."""
    alike: dict[str, list[int]] = {}
    for one in summary.get("exceptions", ()):
        alike.setdefault(one["reason"] + (f" ({one['place']})" if one["place"] else ""), []).append(one["worker"])
    return [
        f"The script of worker{'s' * (len(set(workers)) > 1)} {', '.join(map(str, sorted(set(workers))))} raised"
        f"{'' if len(workers) == 1 else f', {len(workers)} times in all'}: {text}."
        for text, workers in alike.items()
    ]


def _optimizer_sentence(one: dict[str, Any]) -> str:
    """Return the remark on a further optimizer of the job; the rows of the table are about the first."""
    fates = ", ".join(f"{count:,} {fate}" for fate, count in one["fates"].items() if count)
    staleness = f", staleness {one['staleness_mean']:.1f}, max {one['staleness_max']}" if one["staleness_max"] else ""
    return (
        f"Optimizer {one['optimizer']}, {short(one['sync'])}: version {one['version']:,} of {one['pushes']:,} pushes ({fates}){staleness}."
    )


def slow_workers(summary: Summary) -> list[int]:
    """The workers that compute for longer per step than `SLOW` times the median. (Of two workers the faster is the median.)"""
    times = {worker["worker"]: worker["compute_s"] / worker["steps"] for worker in summary["per_worker"] if worker["steps"]}
    if len(times) < 2:
        return []
    bound = SLOW * median_low(times.values())
    return [number for number, time_s in times.items() if time_s > bound]


def _choices(summary: Summary) -> list[str]:
    """Return remarks on what differs from fold to fold, and from shard to shard."""
    said = []
    parts, scale = per_fold(summary), spread(summary["scale"], digits=2)
    if parts is not None:
        said.append(f"k {parts}." if chooses(summary) else f"Contributions per fold: {parts}.")
    if scale is not None:
        said.append(f"Learning rate times {scale}.")
    shards = summary["shards"] or []
    if len(shards) > 1:
        behind = min(shards, key=lambda shard: (shard["version"], shard["shard"]))
        stalest = max(shards, key=lambda shard: (shard["staleness_mean"], -shard["shard"]))
        if len(shards) <= SHARDS_LISTED:
            listed = [f"{one['version']:,} ({one['staleness_mean']:.1f}, max {one['staleness_max']})" for one in shards]
            said.append(f"Versions of the shards, and the staleness of the blocks folded there: {'; '.join(listed)}.")
        else:
            said.append(
                f"Of {len(shards)} shards, {behind['shard']} has the least version, {behind['version']:,}, "
                f"and {stalest['shard']} folds the stalest blocks: {stalest['staleness_mean']:.1f}, max {stalest['staleness_max']}."
            )
    return said


def _slow_sentence(summary: Summary, number: int) -> str:
    workers = {worker["worker"]: worker for worker in summary["per_worker"] if worker["pushes"]}
    time_s, median_s = per_step(workers[number]) or 0.0, median_low(per_step(worker) or 0.0 for worker in workers.values())
    ratio = f"{time_s / median_s:.1f} times the median" if median_s > 0 else "the median worker next to nothing"
    unit = "step" if local(summary) else "push"
    text = f"Worker {number} is slow: it computes {seconds(time_s)} per {unit}, {ratio} ({seconds(median_s)})"
    others = waiting_share([worker for other, worker in workers.items() if other != number])
    if others is not None and others >= 0.05:
        text += f", while the others are waiting for {share(others)} of theirs"
    return f"{text}; {_cause(summary, workers, number)}."


def _cause(summary: Summary, workers: dict[int, Any], number: int) -> str:
    slowed = [
        fault["detail"] or "a fault of kind slow" for fault in summary["faults"] if fault["what"] == "slow" and fault["worker"] == number
    ]
    if slowed:
        return f"it was slowed on purpose ({slowed[-1]})"
    batches = {other: worker["samples_per_step"] for other, worker in workers.items()}
    median = median_low(batches.values())
    if batches[number] > SLOW * median > 0:
        return f"its batches are larger ({batches[number]:.0f} samples, the median is {median:.0f})"
    return "the time goes into its own computing, before any wait for the rule or the others"
