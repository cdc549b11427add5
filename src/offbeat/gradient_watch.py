"""Tell `core.gradient_contents` what it cannot see: backward passes, gradients that were thrown away, batches that are dropped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from offbeat.core.gradient_contents import GradientContents

if TYPE_CHECKING:
    import torch

LOOKED_AT: Final = 8
"""Tensors of a batch whose life is followed."""


class GradientWatch:
    """Watch the gradients of a model.

    Args:
        contents: is told of backward passes, and of gradients that the script has thrown away.
    """

    def __init__(self, contents: GradientContents) -> None:
        self.contents = contents
        self._witness: tuple[torch.Tensor, weakref.ref[torch.Tensor]] | None = None
        """A parameter that the last noted pass has reached, and its gradient then."""
        self._again: torch.Tensor | None = None
        """That parameter, if its next gradient is of a further pass over batches that have come already."""
        self._noted = -1
        """Autograd's number of the last noted pass: a thread that fetches batches may deliver one in the middle of a pass."""

    def follow(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch these parameters, whose gradients stay where autograd puts them."""
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.accumulated)

    def accumulated(self, parameter: torch.Tensor) -> None:
        """Note a backward pass with its first gradient, that of this parameter, if it is one that has to be noted."""
        if not self.contents.pending and parameter is not self._again:
            return
        import torch  # the command needs this module, and starts without torch

        if (number := torch._C._current_graph_task_id()) == self._noted:
            return
        self.look()
        self._witness, self._noted = None, number
        self.contents.backward()
        self._again = parameter if self.contents.waiting else None
        self.remember(parameter)

    def look(self) -> None:
        """Look whether the script has thrown the gradient away: by ``zero_grad()`` of the model, or ``p.grad = None``."""
        if self._witness is not None:
            witness, before = self._witness
            if witness.grad is None or witness.grad is not before():
                self._witness = None
                self.contents.clear()

    @property
    def written(self) -> bool:
        """Whether the script has put a gradient there after it had thrown one away, as methods for several losses do."""
        grad = None if self.contents.size or self._witness is None else self._witness[0].grad
        return grad is not None and bool(grad.any())

    def remember(self, parameter: torch.Tensor) -> None:
        """Remember the parameter's gradient, which later passes add to in place, unless a graph contains it (``create_graph``)."""
        if (grad := parameter.grad) is not None and not grad.requires_grad:
            self._witness = parameter, weakref.ref(grad)

    def moved(self, parameter: torch.Tensor) -> None:
        """Note that the library, and not the script, has put another tensor in this gradient's place, with the same values."""
        if self._witness is not None and self._witness[0] is parameter:
            self.remember(parameter)


def life_of(batch: Any) -> Callable[[], bool] | None:
    """Return a function that tells whether anything holds a part of the batch: a name, a view, a graph. None: it cannot be known.

    >>> import torch
    >>> batch = [torch.ones(2), torch.ones(2)]
    >>> alive, part = life_of(batch), batch[0][:1]
    >>> del batch
    >>> alive()
    True
    >>> del part
    >>> alive()
    False
    """
    references = list(islice(_references(batch), LOOKED_AT))
    if not references:
        return None
    return lambda: any(reference() is not None for reference in references)


def _references(part: Any) -> Iterator[weakref.ref[Any]]:
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, list | tuple):
        for each in part:
            yield from _references(each)
        return
    try:
        reference = weakref.ref(part)
    except TypeError:  # numbers and strings
        return
    yield reference
