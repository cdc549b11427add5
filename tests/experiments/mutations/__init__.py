"""Rules that are broken on purpose, each with the experiment whose mechanism it breaks: data for `test_mutations`.

Each module of this package has a tuple ``MUTATIONS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest


@dataclass(frozen=True)
class Mutation:
    """One way to break a rule."""

    rule: str
    """Its name on the command line."""
    broken: str
    """What is broken, in words."""
    experiment: str
    """The experiment that must notice it."""
    apply: Callable[[pytest.MonkeyPatch], None]

    @property
    def name(self) -> str:
        return f"{self.rule}: {self.broken}"


def replaced(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Replace an attribute of a module or class."""
    return lambda patch: patch.setattr(owner, name, value)


def every() -> list[Mutation]:
    """Return the mutations of all modules."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return [mutation for module in modules for mutation in module.MUTATIONS]
