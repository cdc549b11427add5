"""Hold a rank's own copy of model and optimizer state: collect gradients, apply the results of rounds, and copy it to another rank.

If all parameters have one dtype that can be summed, gradients are written directly into the send buffer; otherwise they are converted to a
wider dtype on the way. The parameters are in memory of this process, or of the processes of one worker.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from offbeat.core.phases import UNMEASURED, Phase, PhaseClock
from offbeat.errors import ConfigurationError
from offbeat.runtime.job.loading import checksum
from offbeat.runtime.job.packing import pack, unpack
from offbeat.runtime.ranks.hyperparameters import SCHEDULED, PiggybackedHyperparameters
from offbeat.tensors.absent import candidates, is_absent, sign_at, words_of
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import DTYPES, Layout, Memory, elements, view
from offbeat.tensors.optimizers import supported, weighted_decay
from offbeat.transport.base import Buffer, SharedMemory
from offbeat.transport.shm import MemoryBlock, PrivateBlock
from offbeat.types import WorkerId


class Replica:
    """Hold one rank's model and optimizer.

    Args:
        layout, model, optimizer: what is trained.
        rank, ranks: this rank, and the greatest number of ranks.
        grouped: whether the rank consists of several processes, which all map this one's memory: then that is not the send buffer, which
            changes from step to step.
    """

    def __init__(
        self,
        layout: Layout,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        rank: WorkerId,
        ranks: int,
        *,
        grouped: bool = False,
    ) -> None:
        self._layout, self._optimizer = layout, optimizer
        kinds = {DTYPES[spec.dtype] for spec in layout.tensors}
        self.dtype = torch.float64 if torch.float64 in kinds else torch.float32
        self._in_place = kinds == {self.dtype}
        self.riders = PiggybackedHyperparameters(optimizer, rank, ranks)
        self.phases: PhaseClock = UNMEASURED
        """Is told of the optimizer's steps."""
        self.sums = False
        """Whether a step is with the sum of the gradients of a round, and not with their sum divided by the number of ranks."""
        self._body = layout.nbytes // self.dtype.itemsize if self._in_place else sum(spec.numel for spec in layout.tensors)
        numels = [0, *(spec.numel for spec in layout.tensors)]
        packed = itertools.accumulate(numels[:-1])
        self._starts = [spec.offset // self.dtype.itemsize for spec in layout.tensors] if self._in_place else list(packed)
        """Of each tensor in a result, in elements."""
        self._signs = np.array([sign_at(start * self.dtype.itemsize, self.dtype.itemsize) for start in self._starts])
        """Of each tensor's first element: see `absent.sign_at`."""
        self.numel = self._body + self.riders.numel
        """Elements that are sent for each gradient, hyperparameters included, of type `dtype`."""
        self._model = model
        parameters = dict(model.named_parameters())
        self._parameters = [parameters[spec.name] for spec in layout.tensors]
        kind = MemoryBlock if grouped else PrivateBlock
        self._pull: SharedMemory = kind.allocate(layout.nbytes, f"parameters of rank {rank}")
        apart = grouped or not self._in_place
        self._push: SharedMemory | None = kind.allocate(layout.nbytes, f"gradients of rank {rank}") if apart else None
        """Memory for gradients, which are copied to the send buffer; None: they are written there."""
        copies = not self._in_place or _writes_gradients(optimizer)
        self._copy = PrivateBlock.allocate(layout.nbytes, f"results for rank {rank}") if copies else None
        """Memory into which results are copied for the optimizer; None: the optimizer reads results in place."""
        self._copied = self._views(self._copy.view) if self._copy is not None else []
        self._seen: dict[int, list[torch.Tensor]] = {}
        """By address of a result: the views that serve as the parameters' gradients. Results are at few addresses."""
        self._flat: FlatModel | None = None
        self._send = torch.empty(0, dtype=self.dtype, device="cpu")
        if grouped:  # the other processes write to it before this one has joined
            self._attach(self.memory[0].view)

    @property
    def flat(self) -> FlatModel:
        """Return the model in flat memory. It exists from the first `aim` on, and from the beginning in a rank of several processes."""
        assert self._flat is not None, "aim() has not been called: the send buffer is not known"
        return self._flat

    @property
    def memory(self) -> tuple[SharedMemory, SharedMemory]:
        """Return the blocks for gradients and for parameters, in a rank of several processes."""
        assert self._push is not None, "gradients are written to the send buffer"
        return self._push, self._pull

    def _attach(self, push: Memory) -> None:
        self._flat = FlatModel(self._layout, self._model, push, self._pull.view)
        self._flat.attach()

    # Gradients.

    def aim(self, send: torch.Tensor) -> None:
        """Make the model write its next gradient into ``send``, shape (`numel`,)."""
        self._send = send
        push = send[: self._body].view(torch.uint8) if self._push is None else self._push.view
        if self._flat is None:
            self._attach(push)
        else:
            self._flat.redirect(push)

    def collect(self) -> str | None:
        """Bring the gradient into the send buffer. Returns the name of the first tensor that is not finite, or None."""
        nonfinite = self.flat.collect()
        if self._push is not None and nonfinite is None:
            if self._in_place:
                self._send[: self._body].copy_(elements(self._push.view, 0, self._body, self.dtype))
            else:
                _copy(self._views(self._push.view), self._cut(self._send))
        return nonfinite

    def sign(self, steps: int) -> None:
        """Write this rank's hyperparameters behind its gradient, which is that of its step number ``steps``."""
        self.riders.write(self._send[self._body :], steps)

    # Results.

    def fits(self, result: torch.Tensor) -> bool:
        """Return True if the optimizer can apply this result: its round is not void, and the parameters' dtypes can hold it."""
        if not math.isfinite(float(result[0])):
            return False
        if self._in_place:
            return True
        pieces = zip(self._cut(result), self._layout.tensors, strict=True)
        narrow = [(piece, DTYPES[spec.dtype]) for piece, spec in pieces if piece.numel()]
        return all(float(piece.abs().amax()) <= torch.finfo(dtype).max for piece, dtype in narrow if dtype != self.dtype)

    def step(self, result: torch.Tensor) -> None:
        """Apply the result of a round with the optimizer, where a rank had a gradient. ``p.grad`` keeps its contents."""
        riders = result[self._body :]
        self.riders.read(riders)
        own = [parameter.grad for parameter in self._parameters]
        ranks = self.riders.divisor(riders) if self.sums else 1
        for parameter, grad in zip(self._parameters, self._grads(result), strict=True):
            if ranks > 1:
                grad = grad * ranks  # the result is read by other ranks, too
            parameter.grad = grad if grad.device == parameter.device else grad.to(parameter.device)
        for i in candidates(words_of(result), self._signs):
            if is_absent(result[self._starts[i] : self._starts[i] + self._layout.tensors[i].numel]):
                self._parameters[i].grad = None
        try:
            decayed = weighted_decay(self._optimizer, self.riders.weight(riders))
            with self.riders.leading(), decayed, self.phases.within(Phase.UPDATE):
                self._optimizer.step()
        finally:
            for parameter, grad_of_its_own in zip(self._parameters, own, strict=True):
                parameter.grad = grad_of_its_own

    def step_alone(self) -> None:
        """Apply this rank's own gradient with its own hyperparameters."""
        with self.phases.within(Phase.UPDATE):
            self._optimizer.step()

    def _grads(self, result: torch.Tensor) -> list[torch.Tensor]:
        if self._copy is None:
            address = result.data_ptr()
            if address not in self._seen:
                self._seen[address] = self._views(result[: self._body].view(torch.uint8))
            return self._seen[address]
        if self._in_place:
            elements(self._copy.view, 0, self._body, self.dtype).copy_(result[: self._body])
        else:
            _copy(self._cut(result), self._copied)
        return self._copied

    def _views(self, memory: memoryview | torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a block that has the job's layout."""
        return [view(memory, spec) for spec in self._layout.tensors]

    # Parameters and optimizer state.

    @property
    def size(self) -> int:
        """Return the number of parameters."""
        return sum(spec.numel for spec in self._layout.tensors)

    def checksum(self) -> int:
        """Return a checksum of parameters and optimizer state."""
        return checksum(self._parameters, self._optimizer.state_dict())

    @property
    def shares(self) -> int:
        """Return how many vectors of `size` elements are averaged to bring replicas together: the parameters, and each average that the
        optimizer keeps."""
        return 1 + len(self._averages())

    def read_share(self, number: int, vector: torch.Tensor) -> None:
        """Copy one of the `shares` into ``vector``, shape (`size`,); number 0 is the parameters."""
        _copy(self._share(number), self._cut(vector))

    def write_share(self, number: int, vector: torch.Tensor) -> None:
        """Set one of the `shares` from ``vector``."""
        _copy(self._cut(vector), self._share(number))

    def _share(self, number: int) -> list[torch.Tensor]:
        if number == 0:
            return [parameter.detach() for parameter in self._parameters]
        key = self._averages()[number - 1]
        state = self._optimizer.state
        return [state[parameter][key] if state.get(parameter) else torch.zeros_like(parameter) for parameter in self._parameters]

    def _averages(self) -> list[str]:
        """Return the names of the optimizer's state that has one element per parameter: momenta, Adam's moments."""
        # Parameters that have had no gradient from the beginning on have no state yet.
        states = [(state, parameter) for parameter in self._parameters if (state := self._optimizer.state.get(parameter))]
        return sorted(
            key
            for key, value in (states[0][0] if states else {}).items()
            if all(isinstance(one := state.get(key), torch.Tensor) and one.shape == p.shape for state, p in states)
            and value.is_floating_point()
        )

    def _cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a vector that has all elements one after the other, without the gaps of the layout."""
        pieces = vector[: self.size].split([spec.numel for spec in self._layout.tensors])
        return [piece.view(spec.shape) for piece, spec in zip(pieces, self._layout.tensors, strict=True)]

    def give(self) -> tuple[Any, list[Buffer]]:
        """Return everything that another rank needs to go on from here, as plain data and bytes.

        Raises:
            ConfigurationError: the optimizer's state contains something that is neither a tensor nor a number.
        """
        self._store()
        state = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        groups = [{key: group[key] for key in self.lasting(group)} for group in self._optimizer.param_groups]
        plain, payload = pack(
            {
                "parameters": torch.frombuffer(self._pull.view, dtype=torch.uint8),
                "state": [dict(entry) for entry in state],
                "groups": groups,
                "settings": self.riders.known,
            },
            "the optimizer's state",
        )
        return plain, list(payload)

    def take(self, plain: Any, payload: memoryview) -> None:
        """Set parameters, optimizer state and known hyperparameters from what `give` returned on another rank.

        Raises:
            ConfigurationError: the other rank has another number of parameters.
        """
        given = unpack(plain, payload)
        if len(given["parameters"]) != self._layout.nbytes or len(given["state"]) != len(self._parameters):
            raise ConfigurationError(
                f"another rank's replica has {len(given['parameters'])} bytes of parameters, this one {self._layout.nbytes}: "
                "run the same script in every worker"
            )
        torch.frombuffer(self._pull.view, dtype=torch.uint8).copy_(given["parameters"])
        self._load()
        state = self._optimizer.state
        state.clear()
        for parameter, entry in zip(self._parameters, given["state"], strict=True):
            if entry:
                state[parameter] = {key: _placed(value, parameter) for key, value in entry.items()}
        for group, lasting in zip(self._optimizer.param_groups, given["groups"], strict=True):
            group.update(lasting)
        self.riders.known = given["settings"]

    def lasting(self, group: dict[str, Any]) -> list[str]:
        """Return which settings of a parameter group the optimizer itself may have changed; schedulers' settings are not copied."""
        known = self._optimizer.defaults
        return [key for key, value in group.items() if key in known and key not in SCHEDULED and _is_plain(value)]

    def _store(self) -> None:
        """Copy the parameters into the flat memory, if they are not there."""
        if self._flat is not None:
            self._flat.store()
            return
        _copy(self._parameters, self._views(self._pull.view))

    def _load(self) -> None:
        """Copy the flat memory into the parameters, if they are not there."""
        if self._flat is not None:
            self._flat.pulled()
            return
        _copy(self._views(self._pull.view), self._parameters)

    def detach(self) -> None:
        """Give the model memory of its own again."""
        self._send = torch.empty(0, dtype=self.dtype, device="cpu")
        self._copied = []
        self._seen.clear()
        if self._flat is not None:
            self._flat.detach()


@torch.no_grad()
def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    """Move a state tensor to its parameter's device; scalars, such as step counters, stay on the CPU as in torch."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value


def _writes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer may write into ``p.grad``: classes that are not torch's, and torch's own in ``foreach`` mode.

    A result is read by all ranks. With ``foreach`` and Nesterov's momentum, torch's SGD adds the momentum to the gradients in place.
    """
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None) or kind.__name__ not in supported():
        return True
    tensors = (isinstance(value, torch.Tensor) for group in optimizer.param_groups for key, value in group.items() if key != "params")
    return any(group.get("foreach") or group.get("differentiable") for group in optimizer.param_groups) or any(tensors)
