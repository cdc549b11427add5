"""Law 1 and the arrows: what each part of the package may import, read from its source, and what importing the pure core loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import offbeat

ROOT = Path(__file__).parents[1] / "src" / "offbeat"

PURE = ("types", "errors", "spelling", "protocol", "policies")
BOOKS = ("report/tally.py", "report/worker_tally.py", "report/audit.py", "report/pushes.py")
IMPURE_STANDARD = {"time", "random", "threading", "socket", "logging", "asyncio", "multiprocessing", "subprocess", "os"}
PURE_THIRD_PARTY = {"numpy", "scipy"}
HEAVY = ("torch", "zmq", "ray")

CORE = {"types", "errors"}
RULES = {*CORE, "spelling", "protocol", "policies"}
DATA_PLANE = {*CORE, "tensors", "transport"}
# The server keeps a tally while the job runs, though reports are made of journals and look down at the runtime. Pure, standard library
# only: the tally, its audit and their parts (`BOOKS`) are arithmetic over records, and know neither who writes them nor who looks. A test
# below holds them to it.
SHELLS = {*RULES, *DATA_PLANE, "collective", "session", "runtime", "report.tally"}
FACE = {*SHELLS, "optimizer", "data", "orders", "loaders", "checkpoint"}
TOOLS = {*FACE, "launch", "sim", "report"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "spelling": CORE,
    "protocol": CORE,
    "policies": RULES,
    "tensors": {*CORE, "protocol"},
    "transport": DATA_PLANE,
    "collective": {*RULES, *DATA_PLANE},
    "session": RULES,
    "runtime": SHELLS,
    "optimizer": FACE,
    "data": {*RULES, "session", "orders"},
    "loaders": FACE,
    "checkpoint": FACE,
    "orders": RULES,
    "launch": TOOLS,
    "sim": {*RULES, "tensors", "session", "runtime", "report"},
    "report": {*RULES, "runtime"},
    "cli": TOOLS,
    "__init__": TOOLS,
}
"""Arrows point down: each part of the package, and the parts that it may import besides itself."""


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to.

    >>> part_of(ROOT / "protocol" / "ledger.py"), part_of(ROOT / "types.py")
    ('protocol', 'types')
    """
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, wherever in the file: inside functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full, they are easier to find and to check"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def within(name: str, parts: set[str]) -> bool:
    """Whether an import of ``offbeat...`` stays within these parts. Any part may read the version.

    >>> within("offbeat.protocol.events.Pushed", {"protocol"}), within("offbeat.report.table.job_table", {"report.tally"})
    (True, False)
    """
    return name == "offbeat.__version__" or any(f"{name}.".startswith(f"offbeat.{part}.") for part in parts)


@pytest.mark.parametrize("path", BOOKS)
def test_the_tally_that_the_server_keeps_knows_nothing_but_records(path: str) -> None:
    allowed = (set(sys.stdlib_module_names) - IMPURE_STANDARD) | {"offbeat"}
    books = {book.removesuffix(".py").replace("/", ".") for book in BOOKS}
    outside = [
        f"line {line}: {name}"
        for line, name in imports(ROOT / path)
        if name.split(".")[0] not in allowed or (name.startswith("offbeat.") and not within(name, books))
    ]
    assert not outside, f"{path} is used below report/ because it is pure and has the standard library only; it imports {outside}"


@pytest.mark.parametrize("path", [p for p in sources() if part_of(p) in PURE], ids=lambda p: str(p.relative_to(ROOT)))
def test_the_pure_core_imports_nothing_impure(path: Path) -> None:
    allowed = (set(sys.stdlib_module_names) - IMPURE_STANDARD) | PURE_THIRD_PARTY | {"offbeat"}
    outside = [f"line {line}: {name}" for line, name in imports(path) if name.split(".")[0] not in allowed]
    assert not outside, f"law 1: {path.relative_to(ROOT)} is pure, and now, seeds and input are its arguments; it imports {outside}"


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_arrows_point_down(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT which parts it may import"
    reached = [(line, name) for line, name in imports(path) if name.split(".")[0] == "offbeat"]
    upward = [f"line {line}: {name}" for line, name in reached if not within(name, MAY_IMPORT[part] | {part})]
    assert not upward, f"{path.relative_to(ROOT)} may import {sorted(MAY_IMPORT[part])}; it imports {upward}"


def loaded_after(*statements: str) -> set[str]:
    """Which of the heavy modules a fresh interpreter has loaded after these statements."""
    code = "\n".join(["import sys", *statements, f"print(*[m for m in {HEAVY!r} if m in sys.modules])"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_pure_core_loads_neither_torch_nor_zmq_nor_ray() -> None:
    modules = [".".join(["offbeat", *p.relative_to(ROOT).with_suffix("").parts]) for p in sources() if part_of(p) in PURE]
    assert any(m.startswith("offbeat.policies.") for m in modules)
    assert loaded_after(*(f"import {m.removesuffix('.__init__')}" for m in modules)) == set()


def test_the_rules_are_public_names_and_do_not_load_torch() -> None:
    assert loaded_after("import offbeat", "offbeat.SSP(staleness=3)", "offbeat.rule('bsp')", "offbeat.ConfigurationError") == set()


def test_the_check_would_notice() -> None:
    assert loaded_after("import torch") == {"torch"}


@pytest.mark.parametrize("name", offbeat.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(offbeat, name) is not None
    assert name in dir(offbeat)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nosuchname"):
        _ = offbeat.nosuchname


def test_all_and_the_table_of_homes_agree() -> None:
    assert {*offbeat._HOME, "__version__"} == set(offbeat.__all__)
