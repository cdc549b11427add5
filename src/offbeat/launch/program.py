"""Find the user's program before a job starts, a script (``train.py``) or a module (``-m pkg.train``), and run it in a fork.

A worker runs ``python train.py`` or ``python -m pkg.train``. A fork of the forkserver runs no command, so `Program.run` does what Python
does: ``sys.path``, ``sys.argv`` and the names in ``__main__`` are the same.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

from offbeat.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Program:
    """A program that the workers of a job run.

    >>> Program("train.py", ("--epochs", "3")).command
    ['train.py', '--epochs', '3']
    >>> Program("pkg.train", ("--epochs", "3"), module=True).command
    ['-m', 'pkg.train', '--epochs', '3']
    """

    name: str
    """The script's path, or the module's name."""
    arguments: tuple[str, ...] = ()
    """The program's own arguments."""
    module: bool = False
    """True if `name` is a module's name, as after ``python -m``."""
    home: str | None = None
    """The folder in which Python first searches modules; None: it follows from the name."""

    @classmethod
    def of(cls, command: Sequence[str]) -> Program:
        """Return the program that has this `command`."""
        if command[0] == "-m":
            return cls(command[1], tuple(command[2:]), module=True)
        return cls(command[0], tuple(command[1:]))

    @property
    def command(self) -> list[str]:
        """The interpreter's arguments."""
        return [*(["-m"] if self.module else []), self.name, *self.arguments]

    @property
    def folder(self) -> str:
        """The folder in which Python first searches the program's imports: the script's, or for a module the current folder."""
        if self.home is not None:
            return self.home
        return str(Path.cwd() if self.module else Path(self.name).resolve().parent)

    @property
    def path(self) -> str | None:
        """The file that is run, found without importing anything; None: there is none."""
        if not self.module:
            return self.name
        spec = module_spec(self.name, self.folder)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = module_spec(f"{self.name}.__main__", self.folder)
        return None if spec is None else spec.origin

    def check(self) -> None:
        """Check that the program exists, without running any of its code.

        Raises:
            ConfigurationError: there is no such script or module.
        """
        if not self.module:
            if not Path(self.name).is_file():
                also = "; for a module write -m before its name" if module_spec(self.name, str(Path.cwd())) is not None else ""
                raise ConfigurationError(f"there is no script {self.name!r} here ({Path.cwd()}){also}")
            return
        spec = module_spec(self.name, self.folder)
        if spec is None:
            as_file = self.name.endswith(".py") or "/" in self.name
            help_ = "after -m comes a module's name, such as pkg.train; for a script's path leave -m out" if as_file else "check its name"
            raise ConfigurationError(f"-m {self.name}: there is no module {self.name!r} in {self.folder} or on sys.path; {help_}")
        if spec.submodule_search_locations is not None and module_spec(f"{self.name}.__main__", self.folder) is None:
            raise ConfigurationError(f"-m {self.name}: this is a package without a module __main__; name one of its modules")

    def run(self) -> None:
        """Run the program in this process, as its ``__main__``. ``sys.path[0]`` must be `folder`.

        Raises:
            ImportError: the module cannot be imported.
        """
        main = types.ModuleType("__main__")
        names = vars(main)
        if sys.version_info < (3, 14):  # newer versions compute them on access, unless this name exists
            names["__annotations__"] = {}
        names["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = main  # stays, since exit handlers and pickle use it
        if self.module:
            sys.argv = ["-m", *self.arguments]  # as in Python while it imports the packages above the module
            spec, code = _module_code(self.name)
            sys.argv[0] = spec.origin or self.name
            names.update(__spec__=spec, __loader__=spec.loader, __package__=spec.parent, __file__=spec.origin, __cached__=spec.cached)
        else:
            sys.argv = [self.name, *self.arguments]
            path = _absolute(self.name)
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec", dont_inherit=True)
            names.update(__spec__=None, __loader__=SourceFileLoader("__main__", path), __package__=None, __file__=path, __cached__=None)
        exec(code, names)


def _absolute(name: str) -> str:
    try:
        return str(Path(name).absolute())
    except FileNotFoundError as error:  # the current folder is gone; Python's own message names no file
        folder = os.environ.get("PWD", "the current folder")
        raise FileNotFoundError(error.errno, f"{name} cannot be run: the folder in which the job was started is gone", folder) from None


def module_spec(name: str, folder: str) -> ModuleSpec | None:
    """Return the spec that an import of this module would find, searching ``folder`` first; None: it would fail. Nothing is imported.

    The spec's name is the last part of the module's name. Packages that change their ``__path__`` on import are not followed.
    """
    top, *below = name.split(".")
    if not all(part.isidentifier() for part in (top, *below)):
        return None
    found = PathFinder.find_spec(top, [folder]) or importlib.util.find_spec(top)
    for part in below:
        if found is None or found.submodule_search_locations is None:
            return None
        # The part alone: for a dotted name, a folder without __init__.py would look for its parent among the imported modules.
        found = PathFinder.find_spec(part, found.submodule_search_locations)
    return found


def _module_code(name: str) -> tuple[ModuleSpec, types.CodeType]:
    spec = importlib.util.find_spec(name)  # imports the packages above it
    if spec is not None and spec.submodule_search_locations is not None:
        return _module_code(f"{name}.__main__")
    code = spec.loader.get_code(name) if spec is not None and isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if spec is None or code is None:
        raise ImportError(f"no code for module {name!r}", name=name)
    return spec, code
