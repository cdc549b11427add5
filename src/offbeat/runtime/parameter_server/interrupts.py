"""A worker that is told its computation is of no more use: it notes it, and may break off in the middle of a forward or backward pass.

Breaking off is cooperative. While the script is inside `Interrupts.watch`, hooks between the modules of the forward pass and after each
gradient of the backward pass look whether word has come, and leave by an exception that `watch` catches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from offbeat.core.gradient_contents import GradientContents
from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.runtime.worker.own_hooks import hook_forward


class Interrupted(Exception):
    """Raised to leave a forward or backward pass whose result is not needed any more. It never leaves `Interrupts.watch`."""


class Interrupts:
    """Breaks off the script's computation when it has become useless.

    Args:
        link: where word comes from.
        model: between whose modules to look.
        useless: whether what the worker computes is of no more use and need not be finished.
        contents: of the gradient; a batch whose computation is broken off before it has a gradient belongs to the step all the same.
    """

    def __init__(self, link: WorkerConnection, model: torch.nn.Module, useless: Callable[[], bool], contents: GradientContents) -> None:
        self._link, self._model, self._contents = link, model, contents
        self.now = useless
        """Whether to break off."""
        self._watching = False
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Leave the body early when the computation in it has become useless."""
        self._hook()
        self._watching = True
        before = self._contents.size
        try:
            yield  # word that has come already stops the body at the first module: a context cannot leave its body out
        except Interrupted:
            if self._contents.size == before:
                self._contents.backward()
        finally:
            self._watching = False

    def _look(self, *_: Any) -> None:
        if self._watching:
            self._link.glance()
            if self.now():
                raise Interrupted

    def _hook(self) -> None:
        if self._hooks:
            return
        self._hooks += [handle for module in self._model.modules() for handle in hook_forward(module, self._look)]
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._hooks += [parameter.register_post_accumulate_grad_hook(self._look) for parameter in parameters]

    def detach(self) -> None:
        """Take the hooks off the model: it outlives the job, and would keep the job's memory alive."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
