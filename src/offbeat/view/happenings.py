"""Say in sentences what happens in a job: deaths, returns, faults, warnings, ends. Pure.

What is normal in every job, such as the first start of a worker or a step, is not said.
"""

from __future__ import annotations

from typing import Any, Final

from offbeat.journal.arrivals import Record
from offbeat.journal.epoch_reports import epoch_words
from offbeat.journal.verdicts import short
from offbeat.journal.worker_summary import NOT_COME

TEXT_MAX: Final = 400
"""Most characters of a sentence: reasons and errors are a script's."""
TOLD: Final = frozenset(
    {"job", "state_changed", "process", "fault", "warning", "exception", "checkpoint", "rule_changed", "stood_still", "epoch_ended", "end"}
)
"""The kinds of records that may be worth a sentence, or say what the job is."""
_ORDINALS: Final = {2: "second", 3: "third", 4: "fourth", 5: "fifth"}


def cut(text: Any, most: int = TEXT_MAX) -> str:
    """Return a text, cut where it is too long.

    >>> cut("a long name", 6)
    'a lon…'
    """
    words = str(text)
    return words if len(words) <= most else words[: most - 1] + "…"


def happening(record: Record) -> str | None:
    """Return what a record says; None: nothing that is worth a sentence.

    >>> happening({"kind": "state_changed", "t": 3.0, "worker": 1, "incarnation": 2, "state": "alive", "reason": "joined"})
    'Worker 1 is back as its second process.'
    """
    said = _said(record)
    return None if said is None else cut(said)


def _said(record: Record) -> str | None:
    worker = f"Worker {record['worker']}" if record.get("worker", -1) != -1 else "One worker"
    match record["kind"]:
        case "state_changed":
            return _changed(worker, record)
        case "process" if record["what"] not in ("started", "exited", "killed") and record["role"] != "worker":
            return f"The {record['role']} {record['number']} {_verb(record['what'])}{_detail(record['detail'])}."
        case "process" if record["what"] in ("hung", "lost"):
            return f"Worker {record['number']} {_verb(record['what'])}{_detail(record['detail'])}."
        case "fault":
            return f"{worker}: a fault was made on purpose, {record['what']}{_detail(record.get('detail'))}."
        case "warning":
            return f"Warning: {record['detail']}."
        case "exception":
            return f"The script of worker {record['worker']} raised {record['reason']}{_detail(record.get('place'))}."
        case "checkpoint":
            lacks = f"; it lacks the part of workers {', '.join(map(str, record['missing']))}" if record.get("missing") else ""
            return f"A checkpoint of version {record['version']:,} is complete, after {short(record['seconds'])}{lacks}."
        case "rule_changed":
            return f"From version {record['version']:,} on the rule is {record['rule']}: {record['reason']}."
        case "stood_still":
            return f"Everything stood still for {short(record['seconds'])}."
        case "epoch_ended":
            report = record.get("report") or {}
            used = (
                f": {report['folded']:,} of {report['indices']:,} samples were used" if "folded" in report and "indices" in report else ""
            )
            return f"Epoch {epoch_words(record['epoch'], record['pool'])} ended{used}."
        case "end":
            return f"The job {'ended' if record['ok'] else 'failed'}: {record['reason']}."
    return None


def _changed(worker: str, record: Record) -> str | None:
    state, reason = record["state"], record.get("reason", "")
    if state == "dead" and reason in NOT_COME:
        return f"{worker} is awaited: {reason}."
    if state == "dead":
        return f"{worker} died: {reason or 'no reason is known'}."
    if state == "alive" and record["incarnation"] > 1:
        number = record["incarnation"]
        return f"{worker} is back as its {_ORDINALS.get(number, f'{number}th')} process."
    return None


def _verb(what: str) -> str:
    return {"hung": "hangs, and is killed", "lost": "is lost with its machine", "follows": "follows"}.get(what, f"was {what}")


def _detail(detail: Any) -> str:
    return f" ({detail})" if detail else ""
