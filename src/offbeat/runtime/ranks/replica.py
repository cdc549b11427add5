"""A rank's own copy of what is trained: it hands out gradients, makes the step of each round's result, and can be given to another rank.

Gradients are written where they are sent from, if all parameters are of one kind that can be summed there; otherwise they are made wider on
the way. The parameters are in this process's own memory, which nobody else touches.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from offbeat.errors import ConfigurationError
from offbeat.runtime.job.loading import checksum
from offbeat.runtime.job.packing import Packer, unpack
from offbeat.runtime.ranks.hyperparameters import SCHEDULED, PiggybackedHyperparameters
from offbeat.tensors.flat import FlatModel
from offbeat.tensors.layout import DTYPES, Layout, elements, view
from offbeat.tensors.optimizers import supported
from offbeat.transport.base import Buffer
from offbeat.transport.shm import PrivateBlock
from offbeat.types import WorkerId


class Replica:
    """One rank's model and optimizer.

    Args:
        layout, model, optimizer: what is trained.
        rank, ranks: this one's number, and how many there may be.
    """

    def __init__(self, layout: Layout, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: WorkerId, ranks: int) -> None:
        self._layout, self._optimizer = layout, optimizer
        kinds = {DTYPES[spec.dtype] for spec in layout.tensors}
        self.dtype = torch.float64 if torch.float64 in kinds else torch.float32
        self._in_place = kinds == {self.dtype}
        self.riders = PiggybackedHyperparameters(optimizer, rank, ranks)
        self._body = layout.nbytes // self.dtype.itemsize if self._in_place else sum(spec.numel for spec in layout.tensors)
        self.numel = self._body + self.riders.numel
        """Elements of what is sent for each gradient, in `dtype`."""
        self._model = model
        parameters = dict(model.named_parameters())
        self._parameters = [parameters[spec.name] for spec in layout.tensors]
        self._pull = PrivateBlock.allocate(layout.nbytes, f"parameters of rank {rank}")
        self._push = None if self._in_place else PrivateBlock.allocate(layout.nbytes, f"gradients of rank {rank}")
        copies = not self._in_place or _writes_gradients(optimizer)
        self._copy = PrivateBlock.allocate(layout.nbytes, f"results for rank {rank}") if copies else None
        """Where results are copied for the optimizer to see; None: it sees them where they are."""
        self._copied = self._views(self._copy.view) if self._copy is not None else []
        self._seen: dict[int, list[torch.Tensor]] = {}
        """The parameters' gradients in results, by address: there are few places for these."""
        self._flat: FlatModel | None = None
        self._send = torch.empty(0, dtype=self.dtype)

    @property
    def flat(self) -> FlatModel:
        """The model in flat memory; from the first `aim` on."""
        assert self._flat is not None, "nobody has said where gradients go"
        return self._flat

    # Gradients.

    def aim(self, send: torch.Tensor) -> None:
        """The next gradient goes to this memory, shape (`numel`,)."""
        self._send = send
        push = send[: self._body].view(torch.uint8) if self._push is None else self._push.view
        if self._flat is None:
            self._flat = FlatModel(self._layout, self._model, push, self._pull.view)
            self._flat.attach()
        else:
            self._flat.redirect(push)

    def collect(self) -> str | None:
        """See to it that the gradient is where it is sent from. Returns the first tensor in which it is not finite; None: it is."""
        nonfinite = self.flat.collect()
        if self._push is not None and nonfinite is None:
            self._gather(self._push, self._send)
        return nonfinite

    def sign(self, steps: int) -> None:
        """Add this rank's settings to its gradient, which is that of its step number ``steps``."""
        self.riders.write(self._send[self._body :], steps)

    # Results.

    def fits(self, result: torch.Tensor) -> bool:
        """Return whether the optimizer can make a step with this result: its round is not void, and the parameters' types can hold it."""
        if not math.isfinite(float(result[0])):
            return False
        if self._in_place:
            return True
        pieces = result[: self._body].split([spec.numel for spec in self._layout.tensors])
        narrow = [(piece, DTYPES[spec.dtype]) for piece, spec in zip(pieces, self._layout.tensors, strict=True) if piece.numel()]
        return all(float(piece.abs().amax()) <= torch.finfo(dtype).max for piece, dtype in narrow if dtype != self.dtype)

    def step(self, result: torch.Tensor) -> None:
        """Make the optimizer's step with the result of a round. What is in ``p.grad`` stays there."""
        self.riders.read(result[self._body :])
        own = [parameter.grad for parameter in self._parameters]
        for parameter, grad in zip(self._parameters, self._grads(result), strict=True):
            parameter.grad = grad if grad.device == parameter.device else grad.to(parameter.device)
        try:
            with self.riders.leading():
                self._optimizer.step()
        finally:
            for parameter, grad_of_its_own in zip(self._parameters, own, strict=True):
                parameter.grad = grad_of_its_own

    def step_alone(self) -> None:
        """Make the optimizer's step with this rank's own gradient, and its own settings."""
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
            self._scatter(result, self._copy)
        return self._copied

    def _gather(self, block: PrivateBlock, vector: torch.Tensor) -> None:
        """All elements of a memory with the job's layout, one after the other, without the gaps between tensors."""
        at = 0
        for spec in self._layout.tensors:
            vector[at : at + spec.numel].copy_(elements(block.view, spec.offset, spec.numel, DTYPES[spec.dtype]))
            at += spec.numel

    def _scatter(self, vector: torch.Tensor, block: PrivateBlock) -> None:
        at = 0
        for spec in self._layout.tensors:
            elements(block.view, spec.offset, spec.numel, DTYPES[spec.dtype]).copy_(vector[at : at + spec.numel])
            at += spec.numel

    def _views(self, memory: memoryview | torch.Tensor) -> list[torch.Tensor]:
        return [view(memory, spec) for spec in self._layout.tensors]

    # The whole of it.

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return sum(spec.numel for spec in self._layout.tensors)

    def writes(self) -> tuple[int, ...]:
        """Another answer than before if anybody has written into the parameters since."""
        return tuple(parameter._version for parameter in self._parameters)

    def checksum(self) -> int:
        """A checksum of parameters and optimizer state."""
        return checksum(self._parameters, self._optimizer.state_dict())

    @property
    def shares(self) -> int:
        """How many vectors of `size` elements it takes to bring replicas together: the parameters, and each average of the optimizer."""
        return 1 + len(self._averages())

    def read_share(self, number: int, vector: torch.Tensor) -> None:
        """Write one of the `shares` into this, the parameters first, shape (`size`,)."""
        for place, value in zip(self._cut(vector), self._share(number), strict=True):
            place.copy_(value)

    def write_share(self, number: int, vector: torch.Tensor) -> None:
        """Take one of the `shares` over from this."""
        with torch.no_grad():
            for value, place in zip(self._share(number), self._cut(vector), strict=True):
                value.copy_(place)

    def _share(self, number: int) -> list[torch.Tensor]:
        if number == 0:
            return [parameter.detach() for parameter in self._parameters]
        key = self._averages()[number - 1]
        return [self._optimizer.state[parameter][key] for parameter in self._parameters]

    def _averages(self) -> list[str]:
        """Momenta, Adam's moments and the like: what the optimizer keeps for each element of every parameter."""
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        return sorted(
            key
            for key in states[0]
            if all(
                isinstance(v := state.get(key), torch.Tensor) and v.shape == p.shape
                for state, p in zip(states, self._parameters, strict=True)
            )
            and states[0][key].is_floating_point()
        )

    def _cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        pieces = vector[: self.size].split([spec.numel for spec in self._layout.tensors])
        return [piece.view(spec.shape) for piece, spec in zip(pieces, self._layout.tensors, strict=True)]

    def give(self) -> tuple[Any, list[Buffer]]:
        """Everything that another rank needs to go on from here, as plain data and bytes.

        Raises:
            ConfigurationError: the optimizer's state has something in it that is neither tensor nor number.
        """
        packer = Packer()
        self._store()
        state = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        groups = [{key: group[key] for key in self._lasting(group)} for group in self._optimizer.param_groups]
        plain = packer.pack(
            {
                "parameters": torch.frombuffer(self._pull.view, dtype=torch.uint8),
                "state": [dict(entry) for entry in state],
                "groups": groups,
                "settings": self.riders.known,
            },
            "the optimizer's state",
        )
        return plain, list(packer.payload)

    def take(self, plain: Any, payload: memoryview) -> None:
        """Become what another rank gave.

        Raises:
            ConfigurationError: it has another number of parameters.
        """
        given = unpack(plain, payload)
        if len(given["parameters"]) != self._layout.nbytes or len(given["state"]) != len(self._parameters):
            raise ConfigurationError(
                f"another rank's replica has {len(given['parameters'])} bytes of parameters, this one {self._layout.nbytes}: "
                "every worker runs the same script"
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

    def _lasting(self, group: dict[str, Any]) -> list[str]:
        """What an optimizer of its own kind may have noted in a group while it stepped. What schedulers set is each script's own."""
        known = self._optimizer.defaults
        return [key for key, value in group.items() if key in known and key not in SCHEDULED and _is_plain(value)]

    def _store(self) -> None:
        """See to it that the flat memory holds the parameters."""
        if self._flat is not None:
            self._flat.store()
            return
        with torch.no_grad():
            for parameter, place in zip(self._parameters, self._views(self._pull.view), strict=True):
                place.copy_(parameter)

    def _load(self) -> None:
        """See to it that the parameters are what the flat memory holds."""
        if self._flat is not None:
            self._flat.pulled()
            return
        with torch.no_grad():
            for parameter, place in zip(self._parameters, self._views(self._pull.view), strict=True):
                parameter.copy_(place)

    def detach(self) -> None:
        """Give the model memory of its own again."""
        self._send = torch.empty(0, dtype=self.dtype)
        self._copied = []
        self._seen.clear()
        if self._flat is not None:
            self._flat.detach()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | torch.Tensor)


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    """Counters stay on the CPU, as torch keeps them; the rest goes where its parameter is."""
    return value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() > 0 else value


def _writes_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer may write into ``p.grad``: foreign ones may, and torch's own where they treat tensors as a list.

    Results are everybody's. With ``foreach`` and Nesterov's momentum torch's SGD adds the momentum to the gradients in place.
    """
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None) or kind.__name__ not in supported():
        return True
    tensors = (isinstance(value, torch.Tensor) for group in optimizer.param_groups for key, value in group.items() if key != "params")
    return any(group.get("foreach") or group.get("differentiable") for group in optimizer.param_groups) or any(tensors)
