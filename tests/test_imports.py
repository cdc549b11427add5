"""Law 1 and the arrows: what each part of the package may import, read from its source, and what importing the pure core loads."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from tests.faults.job import QUICK

import offbeat

ROOT = Path(__file__).parents[1] / "src" / "offbeat"

CORE = ("core", "core.server", "core.allreduce", "core.gossip", "core.job")
PURE = ("types", "errors", "spec", *CORE, "policies")
BOOKS = (
    "journal/summary.py",
    "journal/epoch_reports.py",
    "journal/worker_summary.py",
    "journal/turns.py",
    "journal/audit.py",
    "journal/arrivals.py",
    "journal/series.py",
    "journal/costs.py",
    "journal/elsewhere.py",
    "journal/verdicts.py",
)
IMPURE_STANDARD = {"time", "random", "threading", "socket", "logging", "asyncio", "multiprocessing", "subprocess", "os"}
PURE_THIRD_PARTY = {"numpy", "scipy"}
HEAVY = ("torch", "zmq", "ray")
FRAMEWORKS = ("lightning", "pytorch_lightning", "transformers", "accelerate")

BASE = {"types", "errors"}
FAMILIES = {"core", "core.server", "core.allreduce", "core.gossip"}
RULES = {*BASE, "spec", *CORE, "policies"}
DATA_PLANE = {*BASE, "tensors", "transport"}
ONE_HOST, MULTI_HOST = "runtime.allreduce.one_host", "runtime.allreduce.multi_host"
SHARED = "runtime.shared_memory"
SESSION = {"gradient_watch", "session"}
TOOLS = {*RULES, *DATA_PLANE, *SESSION, "journal", "runtime.job", "runtime.coordination", "runtime.worker", "runtime.recovery"}
RANKS = {*TOOLS, "runtime.ranks"}
SERVED = {*TOOLS, "runtime.parameter_server"}
LIVE = {
    *RANKS,
    *SERVED,
    SHARED,
    ONE_HOST,
    MULTI_HOST,
    "runtime.allreduce",
    "runtime.gossip",
    "runtime.group",
    "runtime",
}
FACE = {*LIVE, "gradient_watch", "deliveries", "orders", "sampler", "wrapping", "optimizer"}
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "files": BASE,
    "guarded": BASE,
    "logs": BASE,
    "spec": BASE,
    "orders": BASE,
    "cuda_memory": BASE,
    "transport": {*BASE, "cuda_memory"},
    "core": BASE,
    "core.server": {*BASE, "core"},
    "core.allreduce": {*BASE, "core"},
    "core.gossip": {*BASE, "core"},
    "core.job": {*BASE, *FAMILIES},
    "policies": {*BASE, "spec", *FAMILIES},
    "journal": {"files", *BASE, "core"},
    "gradient_watch": {*BASE, "core"},
    "session": {*BASE, "core", "gradient_watch"},
    "traces": {*BASE, "core", "journal"},
    "deliveries": BASE,
    "sampler": {*BASE, "core", "gradient_watch", "deliveries", "session", "orders"},
    "place": {*BASE, "core", "sampler", "session"},
    "tensors": {*BASE, "cuda_memory", "core", "core.allreduce", "gradient_watch"},
    "runtime.job": {"files", *RULES, *DATA_PLANE},
    "runtime.coordination": {"files", *RULES, *DATA_PLANE, "journal", "traces", "runtime.job", "runtime.recovery"},
    "runtime.worker": {*RULES, *DATA_PLANE, "session", "runtime.job"},
    "runtime.recovery": {*BASE, "core", "transport"},
    "runtime.parameter_server": TOOLS,
    "runtime.group": {*BASE, "core", "gradient_watch", "session", "tensors", "transport", "runtime.job", "runtime.worker"},
    "runtime.ranks": TOOLS,
    SHARED: {*BASE, "core", "transport"},
    ONE_HOST: {*RULES, *DATA_PLANE, SHARED},
    MULTI_HOST: {*RULES, *DATA_PLANE, SHARED, ONE_HOST, "runtime.worker"},
    "runtime.allreduce": {*RANKS, ONE_HOST, MULTI_HOST},
    "runtime.gossip": {*RANKS, SHARED, MULTI_HOST, "runtime.allreduce"},
    "runtime": LIVE,
    "sim.latency": {*BASE, "spec", "core", "traces"},
    "sim.training": {*RULES, "tensors", "sim.latency"},
    "sim": {"files", *RULES, "journal", "session", "report", "sim.latency", "sim.training"},
    "report": {*RULES, "guarded", "journal"},
    "launch": {"files", "guarded", *DATA_PLANE, "core", "session", "journal", "traces", "runtime.job", "runtime.worker"},
    "advise": {*RULES, "journal", "report", "sim", "sim.latency"},
    "chaos": {"files", *RULES, "journal"},
    "view": {*RULES, "files", "journal", "report"},
    "doctor": {*BASE, "guarded", "transport", "runtime.job", "launch"},
    "top": {*BASE, "guarded", "core", "transport", "journal", "report", "launch"},
    "wrapping": BASE,
    "optimizer": FACE,
    "loaders": FACE,
    "checkpoint": {*FACE, "files"},
    "options": {"files", *RULES, "journal", "launch", "runtime.job", "view"},
    "commands": {
        *RULES,
        "files",
        "guarded",
        "options",
        "journal",
        "launch",
        "report",
        "sim",
        "sim.latency",
        "sim.training",
        "advise",
        "chaos",
        "doctor",
        "view",
        "top",
    },
    "cli": {"files", "guarded", "logs", *RULES, "options", "journal", "report", "launch", "runtime.job", "commands"},
    "__main__": {"cli"},
    "agent": {"cli"},
    "integrations": {*FACE, "loaders", "checkpoint", "place", "guarded", "launch"},
    "__init__": {*FACE, "loaders", "checkpoint", "place", "logs"},
}
"""Arrows point down: each room of the package, a folder or a file beside the folders, and the rooms that it may import besides itself."""


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def room_of(path: Path) -> str:
    """The room that a file is in.

    >>> room_of(ROOT / "core" / "server" / "ledger.py"), room_of(ROOT / "types.py")
    ('core.server', 'types')
    """
    *folders, name = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(folders) or name


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, wherever in the file: inside functions and for type checking too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full, they are easier to find and to check"
            assert node.module is not None
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def imported_room(name: str) -> str:
    """The room that an import of ``offbeat...`` is about.

    >>> imported_room("offbeat.core.events.Pushed"), imported_room("offbeat.policies.rule"), imported_room("offbeat.SSP")
    ('core', 'policies', '__init__')
    """
    parts = name.split(".")[1:]
    while parts and not (ROOT.joinpath(*parts).is_dir() or ROOT.joinpath(*parts).with_suffix(".py").is_file()):
        parts.pop()
    path = ROOT.joinpath(*parts)
    return room_of(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


@cache
def rooms_imported(path: Path) -> list[tuple[int, str]]:
    """Line and room of everything of this package that a file imports. Any room may read the version."""
    names = [(line, name) for line, name in imports(path) if name.split(".")[0] == "offbeat" and name != "offbeat.__version__"]
    return [(line, imported_room(name)) for line, name in names]


def test_the_tally_that_the_server_keeps_knows_nothing_but_records() -> None:
    allowed = (set(sys.stdlib_module_names) - IMPURE_STANDARD) | {"offbeat"}
    books = {f"offbeat.{book.removesuffix('.py').replace('/', '.')}." for book in BOOKS}
    books |= {"offbeat.core.phases.", "offbeat.types."}  # words
    books.add("offbeat.core.leases.unaccounted")  # a sum over a report
    outside = [
        f"{path}:{line}: {name}"
        for path in BOOKS
        for line, name in imports(ROOT / path)
        if name.split(".")[0] not in allowed or (name.startswith("offbeat.") and not name.startswith(tuple(books)))
    ]
    assert not outside, f"the books are arithmetic over records, with the standard library only: {outside}"


def test_faults_are_drawn_and_judged_without_the_machine() -> None:
    """Time and the machine are arguments; the schedule's random numbers come from its seed."""
    shell = {f"offbeat.chaos.{other}" for other in ("machine", "procfs", "run", "command")}
    impure = [
        f"{path}.py:{line}: {name}"
        for path in ("schedule", "injector", "history", "judgement")
        for line, name in imports(ROOT / "chaos" / f"{path}.py")
        if name in shell or name.split(".")[0] in IMPURE_STANDARD - {"random"}
    ]
    assert impure == []


def test_the_pure_core_imports_nothing_impure() -> None:
    allowed = (set(sys.stdlib_module_names) - IMPURE_STANDARD) | PURE_THIRD_PARTY | {"offbeat"}
    pure = [path for path in sources() if room_of(path) in PURE]
    outside = [f"{path}:{line}: {name}" for path in pure for line, name in imports(path) if name.split(".")[0] not in allowed]
    assert pure and not outside, f"law 1: the core is pure, and now, seeds and input are its arguments: {outside}"


def test_arrows_point_down() -> None:
    unknown = {room_of(path) for path in sources()} - MAY_IMPORT.keys()
    assert not unknown, f"{sorted(unknown)} are new: say in MAY_IMPORT which rooms they may import"
    upward = [
        f"{path}:{line}: {name}, and {room} may import {sorted(MAY_IMPORT[room])}"
        for path in sources()
        for room in (room_of(path),)
        for line, name in rooms_imported(path)
        if name not in MAY_IMPORT[room] | {room}
    ]
    assert not upward, "\n".join(upward)


RUNS_CODE = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
READS_FILES_OF_TORCH = {"checkpoint.py", "runtime/coordination/checkpoint_content.py"}
"""With ``weights_only=True``, which makes tensors, numbers, texts and containers of them."""
WRITES_FOR_ITS_USER = {
    "checkpoint.py",
    "chaos/command.py",
    "report/chrome.py",
    "report/tables_csv.py",
    "sim/command.py",
    "integrations/transformers.py",
}
"""Files that a command or a call of the script is asked for by name: with the mode that the user's umask gives any file."""
WRITES = {*WRITES_FOR_ITS_USER, "files.py", "launch/private_folder.py", "launch/forkserver.py", "chaos/run.py"}
"""Beside those: files in folders of their own that no other user can enter, and in /proc."""


def calls(path: Path, *names: str) -> list[ast.Call]:
    """The calls of functions and methods of these names."""
    found = [node for node in nodes(path) if isinstance(node, ast.Call)]
    return [node for node in found if (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in names]


def test_nothing_is_unpickled() -> None:
    """Law 7: by no import, and by no reader of PyTorch but the one that makes tensors."""
    for path in sources():
        file = str(path.relative_to(ROOT))
        imported = [name for _, name in imports(path) if name.split(".")[0] in RUNS_CODE]
        assert not imported, f"{file} imports {imported}"
        loads = [ast.unparse(call) for call in calls(path, "load") if ast.unparse(call.func) == "torch.load"]
        assert not loads or file in READS_FILES_OF_TORCH, f"{file} has {loads}"
        assert all("weights_only=True" in text for text in loads), f"{file} has {loads}"


def test_what_a_job_writes_is_opened_in_one_place() -> None:
    """`offbeat.files`: for its user alone."""
    for path in sources():
        file = str(path.relative_to(ROOT))
        opened = [text for text in map(ast.unparse, calls(path, "open")) if text.startswith("open(") or ".open(" in text]
        writes = [text for text in opened if any(f"'{mode}" in text for mode in ("w", "x", "a")) and "private" not in text]
        writes += [ast.unparse(call) for call in calls(path, "write_text", "write_bytes") if isinstance(call.func, ast.Attribute)]
        assert not writes or file in WRITES, f"{file}: give {writes} the opener offbeat.files.private"


def test_rooms_stand_on_floors() -> None:
    """No room imports one that imports it, over however many others: a room's floor is above those of all that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sources():
        room = room_of(path)
        graph.setdefault(room, set()).update({name for _, name in rooms_imported(path)} - {room})
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)
    assert graph.keys() == MAY_IMPORT.keys()


def test_no_class_is_more_than_two_below_its_base() -> None:
    bases: dict[str, list[str]] = {}
    for path in sources():
        module = ".".join(["offbeat", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
        classes = [node for node in nodes(path) if isinstance(node, ast.ClassDef)]
        known = {name.rpartition(".")[2]: name for _, name in imports(path)} | {one.name: f"{module}.{one.name}" for one in classes}
        for one in classes:
            bases[known[one.name]] = [known.get(ast.unparse(base).partition("[")[0], "") for base in one.bases]

    def below(name: str) -> int:
        return max((1 + below(base) for base in bases[name] if base in bases), default=0)

    assert len(bases) > 500 and max(map(below, bases)) == 2, [name for name in bases if below(name) > 2]


def loaded_after(*statements: str, among: tuple[str, ...] = HEAVY) -> set[str]:
    """Which of these modules a fresh interpreter has loaded after these statements."""
    code = "\n".join(["import sys", *statements, f"print(*[m for m in {among!r} if m in sys.modules])"])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **QUICK}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_pure_core_loads_neither_torch_nor_zmq_nor_ray() -> None:
    modules = [".".join(["offbeat", *p.relative_to(ROOT).with_suffix("").parts]) for p in sources() if room_of(p) in PURE]
    assert any(m.startswith("offbeat.policies.") for m in modules)
    assert loaded_after(*(f"import {m.removesuffix('.__init__')}" for m in modules)) == set()


def test_the_rules_are_public_names_and_do_not_load_torch() -> None:
    assert loaded_after("import offbeat", "offbeat.SSP(staleness=3)", "offbeat.rule('bsp')", "offbeat.ConfigurationError") == set()


def test_no_training_library_is_loaded_where_no_integration_is_imported() -> None:
    assert loaded_after("import offbeat", "offbeat.DistributedOptimizer", "offbeat.elastic", "offbeat.save", among=FRAMEWORKS) == set()


def test_the_command_line_loads_no_ray() -> None:
    assert loaded_after("import offbeat.cli", among=("ray",)) == set()


def test_a_missing_library_is_named_with_its_extra() -> None:
    code = """
import importlib, sys
needed = {"lightning": "lightning", "pytorch_lightning": "pytorch_lightning", "transformers": "accelerate", "ray": "ray"}
for module, missing in needed.items():
    sys.modules[missing] = None  # as if it were not installed
    try:
        importlib.import_module(f"offbeat.integrations.{module}")
    except ImportError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **QUICK}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == [
        "lightning is not installed: pip install 'offbeat[lightning]'",
        "pytorch_lightning is not installed: pip install 'offbeat[lightning]'",
        "transformers, or accelerate, is not installed: pip install 'offbeat[transformers]'",
        "ray[train] is not installed: pip install 'offbeat[ray-train]'",
    ], done.stderr


def test_the_check_would_notice() -> None:
    assert loaded_after("sys.modules['torch'] = sys") == {"torch"}


def test_every_public_name_resolves() -> None:
    for name in offbeat.__all__:
        assert getattr(offbeat, name) is not None and name in dir(offbeat), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nosuchname"):
        _ = offbeat.nosuchname


def test_all_and_the_table_of_homes_agree() -> None:
    assert {*offbeat._HOME, "__version__"} < set(offbeat.__all__)
    assert {"BSP", "SSP", "Majority"} <= {*offbeat.__all__, *dir(offbeat)}
