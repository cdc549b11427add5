"""The text that is made from the rules' classes: names for type checkers, README's comparison. `python -m tests.generate` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from offbeat.policies import RULES

ROOT = Path(__file__).parents[1]


def names() -> str:
    """Return the imports by which type checkers know the rules in `offbeat.policies`."""
    kinds = sorted(RULES.values(), key=lambda kind: (kind.__module__, _isort(kind.__name__)))
    return "".join(f"    from {kind.__module__} import {kind.__name__} as {kind.__name__}\n" for kind in kinds)


def _isort(name: str) -> tuple[bool, str]:
    """Return the place of a name among imports, as ruff sorts them: constants, which are all capitals, first."""
    return not name.isupper(), name


def rows() -> str:
    """Return the lines of README's comparison, one for each rule that has a row: those that are there in their order, then the others."""
    rows = [row for kind in RULES.values() if (row := vars(kind)["about"].row) is not None]
    now = (ROOT / "README.md").read_text(encoding="utf-8").partition(HEAD)[2]
    rows.sort(key=lambda row: now.find(f"| {row.rule} | {row.fold[:9]}") % (len(now) + 1))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


HEAD = "| rule | fold (what becomes the next version) | admit (who may go on) | made for |\n|---|---|---|---|\n"
PLACES = {
    ROOT / "src" / "offbeat" / "policies" / "__init__.py": (r"(?<=    # rules: begin\n).*?(?=    # rules: end\n)", names),
    ROOT / "README.md": (rf"(?<={re.escape(HEAD)})(\|[^\n]*\|\n)*", rows),
}
"""By the file: where the text stands, and what makes it."""


def generated(path: Path) -> str:
    """Return the file's text with the generated part as the rules have it.

    Raises:
        ValueError: the place where the text belongs is not there.
    """
    pattern, make = PLACES[path]
    text, found = re.subn(pattern, lambda _: make(), path.read_text(encoding="utf-8"), count=1, flags=re.DOTALL)
    if not found:
        raise ValueError(f"{path} has no place for what is generated from the rules: expected {pattern!r}")
    return text


if __name__ == "__main__":
    for path in PLACES:
        path.write_text(generated(path), encoding="utf-8")
