"""The text that is made from the rules' classes, and from what experiments claim: names for type checkers, lists and tables in documents.
`python -m tests.generate` writes it."""

from __future__ import annotations

import re
from functools import singledispatch
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from offbeat.core.allreduce.policy import RoundRule
from offbeat.core.gossip.push_sum import GossipRule
from offbeat.core.policy import Policy, ServerRule
from offbeat.policies import RULES, rule

ROOT = Path(__file__).parents[1]


def sections() -> dict[str, str]:
    """Return the page of ``docs/`` that has the section of each rule, by the rule's word, in the order of pages and sections."""
    pages = ("rules-servers.md", "dbw.md", "rules-averaging.md", "rules-without-servers.md", "rules.md")
    texts = {page: (ROOT / "docs" / page).read_text(encoding="utf-8") for page in pages}
    return {word: page for page, text in texts.items() for word in re.findall(r"^## (\w+)$", text, re.MULTILINE) if word in RULES}


def words() -> list[str]:
    """Return the rules' words in the order of their sections; those without a section come last."""
    order = [*sections()]
    return sorted(RULES, key=lambda word: order.index(word) if word in order else len(order))


def names() -> str:
    """Return the imports by which type checkers know the rules in `offbeat.policies`."""
    kinds = sorted(RULES.values(), key=lambda kind: (kind.__module__, _isort(kind.__name__)))
    return "".join(f"    from {kind.__module__} import {kind.__name__} as {kind.__name__}\n" for kind in kinds)


def _isort(name: str) -> tuple[bool, str]:
    """Return the place of a name among imports, as ruff sorts them: constants, which are all capitals, first."""
    return not name.isupper(), name


def rows() -> str:
    """Return the lines of the comparison, one for each rule that has a row: those that are there in their order, then the others."""
    rows = [row for kind in RULES.values() if (row := vars(kind)["about"].row) is not None]
    now = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").partition(HEAD)[2]
    rows.sort(key=lambda row: now.find(f"| {row.rule} | {row.fold[:9]}") % (len(now) + 1))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def links() -> str:
    """Return the list of the rules' sections, those with servers first."""
    served = [word for word in words() if issubclass(RULES[word], ServerRule)]
    others = [word for word in words() if word not in served]
    pages = {word: page.replace("rules.md", "") for word, page in sections().items()}
    return "".join(
        fill(
            f"* {before}" + ", ".join(f"[{word}]({pages.get(word, '')}#{word})" for word in some),
            140,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        + "\n"
        for before, some in (("", served), ("without servers: ", others))
    )


class Kept(NamedTuple):
    """What a resumed job has of the one that wrote a checkpoint: a line of the table in docs/saving.md."""

    state: str
    """Of parameters and optimizer state."""
    indices: str
    """Of the epoch's samples."""
    exact: str
    """Whether it goes on like an uninterrupted job, bit for bit."""


@singledispatch
def kept(policy: Policy) -> Kept:
    """Return what a checkpoint keeps under a rule; it follows from the rule's family and from what the rule says of itself."""
    raise TypeError(f"{type(policy).__name__} must extend ServerRule, RoundRule or GossipRule")


@kept.register
def _under_a_server_rule(policy: ServerRule) -> Kept:
    if policy.averaging is not None:
        return Kept(
            "the main process's model and its optimizer's state, for all, with its local steps; `outer_momentum` begins anew",
            "with splits the epoch begins anew, otherwise exact",
            "no",
        )
    if policy.scope == "shard":
        return Kept("each shard's newest; shards may be of different versions, as always under this rule", "exact", "no")
    if policy.in_step:
        return Kept("one copy, exact", "exact", "yes; see below")
    why = "no: which gradient comes when is a matter of timing, and those that were computed and not folded are lost"
    return Kept("one copy, exact", "exact", why)


@kept.register
def _under_a_round_rule(policy: RoundRule) -> Kept:
    if policy.in_step:
        return Kept("all replicas are equal, exact", "exact", "yes, with two workers and gradients of equal weight; see below")
    return Kept(
        "the main process's replica, with all rounds that server 0 knew of; carried gradients are lost",
        "what is carried is dealt out again; a round that closes while the file is written may be",
        "no",
    )


@kept.register
def _under_a_gossip_rule(policy: GossipRule) -> Kept:
    return Kept("the main process's replica and its optimizer's state, for all: the others' differences are lost", "exact", "no")


def checkpoints() -> str:
    """Return the lines of the table of what checkpoints keep; rules of which the same is kept share one."""
    lines: dict[Kept, list[str]] = {}
    for word in words():
        for spelling in RULES[word].about.examples:
            found = kept(rule(spelling))
            first = found == kept(rule(RULES[word].about.examples[0]))
            names = lines.setdefault(found, [])
            if not first or f"`{word}`" not in names:
                names.append(f"`{word}`" if first else f"`{spelling}`")
    return "".join(f"| {', '.join(names)} | {' | '.join(line)} |\n" for line, names in lines.items())


def biases() -> str:
    """Return the lines of the table of shares, which the experiment ``bias`` is held to."""
    from experiments.bias.cases import rows  # imports torch

    return rows()


HEAD = "| rule | fold (what becomes the next version) | admit (which workers may continue) | made for |\n|---|---|---|---|\n"
KEPT_HEAD = "| rule | parameters, optimizer state | the epoch's indices | bit for bit like the uninterrupted job |\n|---|---|---|---|\n"
BIAS_HEAD = "| rule | slowest worker | what only it has | long batches |\n|---|--:|---|--:|\n"
LINES = r"(\|[^\n]*\|\n)*"
PLACES = {
    ROOT / "src" / "offbeat" / "policies" / "__init__.py": ((r"(?<=    # rules: begin\n).*?(?=    # rules: end\n)", names),),
    ROOT / "docs" / "rules.md": ((r"(?<=have-in-common\)\n).*?(?=\* \[Obsolete work)", links),),
    ROOT / "docs" / "bias.md": ((rf"(?<={re.escape(BIAS_HEAD)}){LINES}", biases),),
    ROOT / "docs" / "saving.md": ((rf"(?<={re.escape(KEPT_HEAD)}){LINES}", checkpoints),),
    ROOT / "docs" / "choosing.md": ((rf"(?<={re.escape(HEAD)}){LINES}", rows),),
}
"""By the file: where each text stands, and what makes it."""


def generated(path: Path) -> str:
    """Return the file's text with the generated parts as the rules have them.

    Raises:
        ValueError: a place where such a text belongs is not there.
    """
    text = path.read_text(encoding="utf-8")
    for pattern, make in PLACES[path]:
        text, found = re.subn(pattern, lambda _, make=make: make(), text, count=1, flags=re.DOTALL)  # type: ignore[misc]
        if not found:
            raise ValueError(f"{path} has no place for what is generated from the rules: expected {pattern!r}")
    return text


if __name__ == "__main__":
    for path in PLACES:
        path.write_text(generated(path), encoding="utf-8")
