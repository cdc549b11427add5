"""Notice that a script writes to the parameters itself, between two calls of the library, and warn it.

A job's parameters are changed by the optimizer. What a script writes to them (clipped weights, averaged weights for an evaluation, the best
parameters so far) reaches the other workers late, at once, or not at all, depending on the rule and on where they are.
"""

from __future__ import annotations

import warnings

from offbeat.tensors.flat import FlatModel
from offbeat.types import Incarnation


class ScriptWrites:
    """Compare the parameters at the end of each call of the library with those at the beginning of the next one; warn once."""

    def __init__(self) -> None:
        self._found: tuple[str, Incarnation, int] | None = None
        """The parameter that has been written to, and the worker's incarnation and number of steps when this was seen."""
        self._warned = False

    def look(self, flat: FlatModel, incarnation: Incarnation, steps: int) -> None:
        """Look whether there were writes since `remember`. ``steps``: how many steps the worker has made."""
        if not self._warned and self._found is None and (name := flat.written()) is not None:
            self._found = name, incarnation, steps

    def remember(self, flat: FlatModel, incarnation: Incarnation, steps: int, consequence: str, *, may_change: bool) -> None:
        """Remember the parameters as they are, and give the warning once a step was made since the write.

        There is no warning if that step finds out that the worker had been declared dead: the job may have written to memory of its earlier
        incarnation.

        Args:
            flat: the parameters.
            incarnation, steps: the worker's incarnation, and its number of steps.
            consequence: what becomes of such a write.
            may_change: True if others may change the parameters until the next call: then no values are compared.
        """
        if self._warned:
            return
        flat.remember(values=not may_change)
        if self._found is None:
            return
        name, then, first = self._found
        if then != incarnation:
            self._found = None
        elif steps > first:
            self._warned = True
            warnings.warn(
                f"the script has written to {name} other than by optimizer.step(), and the optimizer alone changes the job's "
                f"parameters: {consequence}. For what to do instead see 'Parameters that the script changes' in docs/training.md",
                stacklevel=5,
            )
