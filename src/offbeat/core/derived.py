"""Leave attributes that follow from the others out of what is written of an object, and make them again when the object is read."""

from __future__ import annotations

from typing import Any, ClassVar


class Derived:
    """Base of classes with attributes that are no data: bound methods, lambdas, views of other attributes.

    A subclass names these attributes in ``DERIVED`` and makes them in ``_derive``, which its ``__init__`` calls as well.

    >>> class Doubles(Derived):
    ...     DERIVED = ("of",)
    ...     def __init__(self, numbers):
    ...         self.numbers = numbers
    ...         self._derive()
    ...     def _derive(self):
    ...         self.of = lambda index: 2 * self.numbers[index]
    >>> doubles = Doubles([3, 4])
    >>> doubles.__getstate__()
    {'numbers': [3, 4]}
    """

    DERIVED: ClassVar[tuple[str, ...]]

    def _derive(self) -> None:
        """Make the attributes that ``DERIVED`` names."""
        raise NotImplementedError(f"{type(self).__name__} must define _derive()")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in self.DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._derive()
