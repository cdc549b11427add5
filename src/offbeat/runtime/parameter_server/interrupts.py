"""A worker that is told its computation is of no more use: it notes it, and may break off in the middle of a forward or backward pass.

Breaking off is cooperative. While the script is inside `Interrupts.watch`, hooks between the modules of the forward pass and after each
gradient of the backward pass look whether word has come, and leave by an exception that `watch` catches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from offbeat.runtime.worker.connection import WorkerConnection
from offbeat.transport.base import Message
from offbeat.types import Version


class Interrupted(Exception):
    """Leaves a forward or backward pass whose result nobody wants any more. It never leaves `Interrupts.watch`."""


class Interrupts:
    """What one worker has been told about its present computation.

    Args:
        link: where word comes from.
        model: between whose modules to look.
    """

    def __init__(self, link: WorkerConnection, model: torch.nn.Module) -> None:
        self._link, self._model = link, model
        self._version: Version = 0
        self._newer: Version = 0
        """The newest version of which word has come."""
        self._watching = False
        self._hooks: list[RemovableHandle] = []
        self.overtaken = False
        """The present computation is of no more use."""
        self.at_once = False
        """And need not be finished."""
        self.entries = 0
        """How many batches have been watched since `watched` was last asked."""

    def heard(self, message: Message) -> None:
        """Word has come. It may be late: about a version that this worker has left behind by itself."""
        if message.header["version"] > self._version:
            self._newer = message.header["version"]
            self.overtake(at_once=message.header["at_once"])

    def overtake(self, *, at_once: bool) -> None:
        """The present computation is of no more use."""
        self.overtaken, self.at_once = True, at_once

    def released(self, version: Version) -> None:
        """A new computation begins, from this version. Each server says so by itself, and word may come in between."""
        self._version = version
        if self._newer <= version:
            self.overtaken = self.at_once = False

    def watched(self) -> int:
        """How many batches have been watched since this was last asked, broken off or not."""
        entries, self.entries = self.entries, 0
        return entries

    def now(self) -> bool:
        """Whether to break off."""
        return self.overtaken and self.at_once

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Leave the body early when the computation in it has become useless."""
        self._hook()
        self.entries += 1
        self._watching = True
        try:
            yield  # word that has come already stops the body at the first module: a context cannot leave its body out
        except Interrupted:
            pass
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
        self._hooks += [module.register_forward_pre_hook(self._look) for module in self._model.modules()]
        parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._hooks += [parameter.register_post_accumulate_grad_hook(self._look) for parameter in parameters]

    def detach(self) -> None:
        """Take the hooks off the model: it outlives the job, and would keep the job's memory alive."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
