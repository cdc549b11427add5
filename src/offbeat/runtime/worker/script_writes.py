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
        self._found: tuple[str, Incarnation] | None = None
        """The parameter that has been written to, and the worker's incarnation then."""
        self._warned = False

    def look(self, flat: FlatModel, incarnation: Incarnation) -> None:
        """Look whether there were writes since `remember`."""
        if not self._warned and (name := flat.written()) is not None:
            self._found = name, incarnation

    def remember(self, flat: FlatModel, incarnation: Incarnation, consequence: str) -> None:
        """Remember the parameters as they are, and give the warning.

        There is no warning if the worker had been declared dead: the job may have written to memory of its earlier incarnation.
        """
        if self._warned:
            return
        flat.remember()
        found, self._found = self._found, None
        if found is not None and found[1] == incarnation:
            self._warned = True
            warnings.warn(
                f"the script has written to {found[0]} other than by optimizer.step(), and the optimizer alone changes the job's "
                f"parameters: {consequence}. For what to do instead see 'Parameters that the script changes' in docs/training.md",
                stacklevel=5,
            )
