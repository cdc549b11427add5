"""Find a program's imports at its start by reading it: none of its code is run.

The result has the installed packages that the program, or a module beside it, imports unconditionally and outside functions. Modules that
pip has not put where they are (those in the program's folder, in PYTHONPATH, in an editable installation) are the user's own: they are read
for their imports in turn, but never imported for the program, since their code may have effects that each worker needs for itself.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import site
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NamedTuple

from offbeat.launch.program import Program, module_spec

_CHANGING = frozenset({"setdefault", "update", "pop", "clear"})
"""Methods of a dict that change it."""
_SHADOWING = frozenset({"insert", "remove", "pop", "clear", "sort", "reverse"})
"""Methods of ``sys.path`` after which a name may mean another module; an appended folder is searched last, and changes nothing."""
FILES_MAX = 500
"""Most files that are read."""


class ScriptImports(NamedTuple):
    """A program's imports, and reasons against making them before the program runs."""

    modules: tuple[str, ...] = ()
    """Each ``module``, or ``module:name,name`` if the program takes these names from it, in the order of first imports."""
    sets: str | None = None
    """Where the program sets an environment variable, in words; None: it does not."""
    searches: str | None = None
    """Where the program changes the search for modules, in words; None: it does not."""


def imports_of(program: Program) -> ScriptImports:
    """Read a program, and the user's modules that it imports. A file that cannot be read or parsed counts as one without imports."""
    reader = _Reader(program)
    reader.read_program()
    found = tuple(module + (f":{','.join(names)}" if names else "") for module, names in reader.installed.items())
    return ScriptImports(found, reader.sets, reader.searches)


def changes_variables(tree: Sequence[ast.AST]) -> int | None:
    """Return the first line that changes an environment variable; None: none does."""
    lines = []
    for node in tree:
        match node:
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if _is(value, "environ"):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _CHANGING and _is(value, "environ"):
                lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(attr="putenv") | ast.Name(id="putenv")):
                lines.append(node.lineno)
    return min(lines, default=None)


def changes_search(tree: Sequence[ast.AST]) -> int | None:
    """Return the first line after which a name may mean another module (``sys.path``, ``sys.modules``, ``sys.meta_path``); None: none."""
    lines = []
    for node in tree:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="sys"), attr="path" | "meta_path"), attr=attr)):
                lines += [node.lineno] if attr in _SHADOWING else []
            case ast.Attribute(value=ast.Name(id="sys"), attr="path" | "modules" | "meta_path", ctx=ast.Store() | ast.Del()):
                lines.append(node.lineno)
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="sys"), attr="path" | "modules"), ctx=ast.Store() | ast.Del()):
                lines.append(node.lineno)
    return min(lines, default=None)


def _is(value: ast.expr, name: str) -> bool:
    """Return True if an expression is an attribute, or a variable, of this name."""
    return (isinstance(value, ast.Attribute) and value.attr == name) or (isinstance(value, ast.Name) and value.id == name)


class _Reader:
    """Read the files of a program, each once."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._folder = program.folder
        self._read: set[str] = set()
        self.installed: dict[str, dict[str, None]] = {}
        self.sets: str | None = None
        self.searches: str | None = None

    def read_program(self) -> None:
        """Read the program's own file, and for a module the packages above it, which Python imports first."""
        with contextlib.suppress(OSError, ValueError, ImportError):
            path = self._program.path
            if path is None:
                return
            package = ""
            if self._program.module:
                ends_in_main = Path(path).name == "__main__.py"
                package = self._program.name if ends_in_main else self._program.name.rpartition(".")[0]
                self._own(package)
            self._file(path, package, main=True)

    def _file(self, path: str, package: str, *, main: bool = False) -> None:
        """Read a file of the user. ``package``: the package to which its relative imports refer; ``main``: it is the program."""
        if path in self._read or len(self._read) >= FILES_MAX or not (main or path.endswith(".py")):
            return
        self._read.add(path)
        with contextlib.suppress(OSError, SyntaxError, ValueError, UnicodeError, RecursionError):
            with tokenize.open(path) as file:
                tree = ast.parse(file.read())
            # A module's functions usually run after the imports, so they are left out; the whole program counts.
            nodes = list(ast.walk(tree)) if main else [node for one in _at_once(tree.body) for node in _outside_functions(one)]
            name = self._program.name if main else Path(path).name
            if self.sets is None and (line := changes_variables(nodes)) is not None:
                self.sets = f"{name} sets a variable of its environment (line {line})"
            if self.searches is None and (line := changes_search(nodes)) is not None:
                self.searches = f"{name} changes where modules are searched (line {line})"
            for statement in _at_once(tree.body, main=main):
                match statement:
                    case ast.Import(names=aliases):
                        for alias in aliases:
                            self._import(alias.name, ())
                    case ast.ImportFrom(module=module, names=aliases, level=level):
                        with contextlib.suppress(ImportError):  # the name leads above the top package
                            absolute = importlib.util.resolve_name("." * level + (module or ""), package)
                            self._import(absolute, [alias.name for alias in aliases if alias.name != "*"])

    def _import(self, module: str, names: Sequence[str]) -> None:
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top == "offbeat":
            return  # the forkserver imports offbeat in any case
        own_package = self._program.module and top == self._program.name.partition(".")[0]
        spec = _spec(top, self._folder)
        if spec is None:
            return
        if is_installed(spec, self._folder) and not own_package:
            self.installed.setdefault(module, {}).update(dict.fromkeys(names))
            return
        self._own(module)
        for name in names:
            if module_spec(f"{module}.{name}", self._folder) is not None:
                self._own(f"{module}.{name}")

    def _own(self, module: str) -> None:
        """Read a module of the user, and the packages above it."""
        parts = module.split(".") if module else []
        for depth in range(len(parts)):
            name = ".".join(parts[: depth + 1])
            spec = module_spec(name, self._folder)
            if spec is not None and spec.origin is not None:
                is_package = spec.submodule_search_locations is not None
                self._file(spec.origin, name if is_package else name.rpartition(".")[0])


def is_installed(spec: ModuleSpec, own: str) -> bool:
    """Return True if a top module is where pip installs packages, or has installed some (``pip install --target``), outside ``own``."""
    places = [spec.origin] if spec.origin not in (None, "namespace") else list(spec.submodule_search_locations or ())
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages(), *site.getsitepackages()}
    if any(Path(place).resolve().is_relative_to(Path(folder).resolve()) for place in places if place for folder in folders):
        return True
    beside = [Path(place).resolve().parent for place in spec.submodule_search_locations or filter(None, places)]
    return any(folder != Path(own).resolve() and any(folder.glob("*.dist-info")) for folder in beside)


def _spec(top: str, folder: str) -> ModuleSpec | None:
    with contextlib.suppress(ValueError, ImportError, AttributeError):
        return module_spec(top, folder)
    return None


def _at_once(body: Sequence[ast.stmt], *, main: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements that always run when this code does; ``main``: also those under ``if __name__ == "__main__"``."""
    for statement in body:
        yield statement
        match statement:
            case ast.Try():
                yield from _at_once([*statement.body, *statement.orelse, *statement.finalbody], main=main)
            case ast.With():
                yield from _at_once(statement.body, main=main)
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"), ops=[ast.Eq()])) if main:
                yield from _at_once(statement.body, main=main)


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside_functions(child)
