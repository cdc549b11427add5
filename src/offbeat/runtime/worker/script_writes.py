"""Notice that a script writes to the parameters itself, between two calls of the library, and warn it.

A job's parameters are changed by the optimizer. What a script writes to them (clipped weights, averaged weights for an evaluation, the best
parameters so far) reaches the other workers late, at once, or not at all, depending on the rule and on where they are.
"""

from __future__ import annotations

from offbeat.errors import warn
from offbeat.tensors.flat import FlatModel
from offbeat.types import Incarnation

CLOSER = 3
"""How many calls are looked at closely once a parameter has been written to and seems to have its value again."""


class ScriptWrites:
    """Compare the parameters at the end of each call of the library with those at the beginning of the next one; warn once.

    A sample of the values is compared. If a parameter was written to, and the sample has not changed, all values are compared in the next
    calls: a script that puts back what it has changed (SAM, averaged weights for an evaluation) is not warned.

    Args:
        exact: values count as put back only if no bit differs.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._found: tuple[str, Incarnation, int] | None = None
        """The parameter that has been written to, and the worker's incarnation and number of steps when this was seen."""
        self._closely = 0
        """In how many further calls all values are compared."""
        self._put_back = 0
        """How often a parameter was written to, and all values were the same when they were compared."""
        self._over = False

    def look(self, flat: FlatModel, incarnation: Incarnation, steps: int) -> None:
        """Look whether there were writes since `remember`. ``steps``: how many steps the worker has made."""
        if self._over or self._found is not None:
            return
        touched = flat.touched()
        if (name := flat.changed(exact=self._exact)) is not None:
            self._found = name, incarnation, steps
        elif not self._closely:
            self._closely = CLOSER if touched else 0
        else:
            self._closely -= 1
            self._put_back += touched is not None
            self._over = self._put_back == CLOSER

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
        if self._over:
            return
        flat.remember(values=not may_change, whole=self._closely > 0)
        if self._found is None:
            return
        name, then, first = self._found
        if then != incarnation:
            self._found = None
        elif steps > first:
            self._over = True
            warn(
                f"the script has written to {name} other than by optimizer.step(), and the optimizer alone changes the job's "
                f"parameters: {consequence}. For what to do instead see 'Parameters that the script changes' in docs/optimizers.md"
            )
