"""What is worth a sentence: what a rule has chosen, the verdicts, who died. Made of summaries; it counts nothing itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from offbeat.journal.verdicts import DEATHS_TOLD, named, percent
from offbeat.report.figures import Summary, chooses, is_awaited, per_fold, short, spread

MARKED: Final = 3
"""Up to this number of culprits have a colour, however few rows a table has."""
SHARDS_LISTED: Final = 8
RULES_LISTED: Final = 6
"""Changes of the rule that are named, the last ones."""


def remarks(summary: Summary) -> str:
    """Return remarks on a job, one sentence each; empty if there are none."""
    said = [*map(verdict_sentence, summary["verdicts"]), *_choices(summary)]
    told = sum(one["kind"] == "death" for one in summary["verdicts"])
    untold = sum(worker["deaths"] for worker in summary["per_worker"]) - told
    if untold and told >= DEATHS_TOLD:  # else it is a death with which a job has failed, and the reason says why
        said.append(
            f"There were {untold:,} more deaths, which have cost less." if untold > 1 else "There was one more death, which has cost less."
        )
    if awaited := [worker["worker"] for worker in summary["per_worker"] if is_awaited(worker)]:
        said.append(f"{named(awaited, capital=True)} took no part: awaited to the end.")
    said += [*exceptions(summary), *_left_out(summary)]
    said += [f"Warning: {warning['detail']}." for warning in summary.get("warnings", ())]
    said += rule_changes(summary)
    said += [_optimizer_sentence(one) for one in summary["optimizers"] or ()]
    if summary.get("journal_failure") is not None:
        said.append(f"The journal is not complete: {summary['journal_failure']}.")
    if summary["ok"] is False:
        said.append(f"The job failed: {summary['reason']}.")
    return "\n".join(said)


def _left_out(summary: Summary) -> list[str]:
    """Return a sentence on the samples of the epochs that have ended which no step has used."""
    reports = [*summary["epochs"], *filter(None, [summary["earlier_epochs"]])]
    indices, *counts = (sum(report.get(name, 0) for report in reports) for name in ("indices", "skipped", "unused"))
    if not sum(counts):
        return []
    parts = " and ".join(f"{count:,} {name}" for count, name in zip(counts, ("skipped", "unused"), strict=True) if count)
    return [f"No step used {sum(counts):,} of the {indices:,} samples of the epochs that have ended: {parts} (docs/samples.md)."]


def exceptions(summary: Summary) -> list[str]:
    """Return a sentence for each exception that has ended a script, equal ones in one."""
    alike: dict[str, list[int]] = {}
    for one in summary.get("exceptions", ()):
        alike.setdefault(one["reason"] + (f" ({one['place']})" if one["place"] else ""), []).append(one["worker"])
    return [
        f"The script of {named(sorted(set(workers)))} raised{'' if len(workers) == 1 else f', {len(workers)} times in all'}: {text}."
        for text, workers in alike.items()
    ]


def rule_changes(summary: Summary) -> list[str]:
    """Return a sentence on the changes of the rule, with the last one's reason."""
    if not (changes := summary.get("rule_changes", ())):
        return []
    way = " -> ".join(f"{change['rule']} at version {change['version']:,}" for change in changes[-RULES_LISTED:])
    return [f"The rule changed {len(changes):,} time{'s' * (len(changes) > 1)}: {way}. The last: {changes[-1]['reason']}."]


def _optimizer_sentence(one: dict[str, Any]) -> str:
    """Return the remark on a further optimizer of the job; the rows of the table are about the first."""
    fates = ", ".join(f"{count:,} {fate}" for fate, count in one["fates"].items() if count)
    staleness = f", staleness {one['staleness_mean']:.1f}, max {one['staleness_max']}" if one["staleness_max"] else ""
    pushes = f"{one['pushes']:,} pushes" + (f" ({fates})" if fates else "")
    return f"Optimizer {one['optimizer']}, {short(one['sync'])}: version {one['version']:,}, {pushes}{staleness}."


def culprits(summary: Summary) -> list[int]:
    """Return the workers that cost the job time, according to the verdicts, the costliest first."""
    slow = [verdict for verdict in summary["verdicts"] if verdict["kind"] == "slow"]
    return list(dict.fromkeys(number for verdict in slow for number in verdict["workers"]))


def marked(summary: Summary, shown: Iterable[int]) -> list[int]:
    """Return the culprits that have a colour in a table of these workers: none if they are most rows, since none would stand out."""
    rows = set(shown)
    slow = [number for number in culprits(summary) if number in rows]
    return slow if len(slow) <= max(MARKED, len(rows) // 2) else []


def verdict_sentence(verdict: dict[str, Any]) -> str:
    """Return a verdict as it is printed: the finding, what was measured, what helps, and what that is worth."""
    since = "" if verdict["since_s"] is None or verdict["kind"] == "death" else f" since {verdict['since_s']:,.0f} s"
    evidence = f" ({verdict['evidence']})" if verdict["evidence"] else ""
    text = f"{verdict['what']}{since}{evidence}."
    if not verdict["remedy"]:
        return text
    worth = f" Worth up to {percent(verdict['worth'])}." if verdict["worth"] >= 0.05 else ""
    return f"{text} Remedy: {verdict['remedy']}.{worth}"


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
