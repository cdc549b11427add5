"""Detect that a script writes to the parameters itself, between two calls of the library, and warn.

Only the optimizer changes a job's parameters. What a script writes to them (clipped weights, averaged weights for an evaluation, the best
parameters so far) reaches the other workers late, at once, or never, depending on the rule and on where the workers are.
"""

from __future__ import annotations

from offbeat.errors import warn
from offbeat.tensors.flat import FlatModel
from offbeat.types import Incarnation

CLOSER = 3
"""Calls that compare all values after a write that left the sample unchanged; also the number of restored writes that ends the watch."""


class ScriptWrites:
    """Compare the parameters at the end of each call of the library with those at the beginning of the next one; warn once.

    A sample of the values is compared. If a parameter was written to and the sample is unchanged, `CLOSER` more calls compare all values:
    a script that restores what it has changed (SAM, averaged weights for an evaluation) gets no warning.

    Args:
        exact: True: values count as restored only if no bit differs.
    """

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._found: tuple[str, Incarnation, int] | None = None
        """The parameter found changed, with the worker's incarnation and number of steps at that time."""
        self._closely = 0
        """Further calls that compare all values."""
        self._put_back = 0
        """Times that all values were compared after a write, and were equal."""
        self._over = False

    def look(self, flat: FlatModel, incarnation: Incarnation, steps: int) -> None:
        """Check for writes since `remember`. ``steps``: the worker's number of steps."""
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
        """Remember the present parameters, and warn once a step was made since a write was found.

        There is no warning if that step finds that the worker had been declared dead: the job may have written to the memory of its earlier
        incarnation.

        Args:
            flat: the model whose parameters are compared.
            incarnation, steps: the worker's incarnation, and its number of steps.
            consequence: what becomes of such a write, for the warning.
            may_change: True if other processes may change the parameters until the next call: then no values are compared.
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
