"""Choose the memory that a worker shares with its servers: of the host, or of the GPU where its model is (``--plane``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbeat.errors import ConfigurationError, warn
from offbeat.runtime.worker.connection import Pair
from offbeat.tensors import gpu
from offbeat.transport.base import Connection
from offbeat.transport.device_memory import DeviceBlock
from offbeat.transport.shm import MemoryBlock, PrivateBlock
from offbeat.types import PlaneChoice

KINDS = "gradients", "parameters"


def allocate(
    plane: PlaneChoice, nbytes: int, name: str, trained: Sequence[torch.Tensor], servers: Sequence[Connection], *, grouped: bool
) -> list[Pair]:
    """Return memory for gradients and for parameters, and a second pair that is used where a server cannot use the first.

    Args:
        plane: what the user has chosen. Under ``auto`` a warning says why the GPU's memory is not used, if the model is on one.
        nbytes: of the model.
        name: of the worker, in error messages.
        trained: the parameters.
        servers: the connections to them.
        grouped: True if several processes of the worker map the memory.

    Raises:
        ConfigurationError: it must be on a GPU and cannot, or there is not enough memory.
    """
    near = grouped or any(server.shares_memory for server in servers)
    if plane == "host" or (plane == "auto" and gpu.on_cpu(trained)):
        return [_on_host(MemoryBlock if near else PrivateBlock, nbytes, name)]
    try:
        home = _home(trained, servers, grouped=grouped)
        push, pull = (DeviceBlock.allocate_on(home, nbytes, f"{what} of {name}") for what in KINDS)
    except ConfigurationError as error:
        if plane == "device":
            raise ConfigurationError(f"--plane device: {error}") from None
        warn(f"gradients are exchanged in the host's memory: {error}")
        return [_on_host(MemoryBlock if near else PrivateBlock, nbytes, name)]
    if plane == "device":
        return [(push, pull)]
    first, second = (MemoryBlock.allocate(nbytes, f"{what} of {name}", sparse=True) for what in KINDS)
    return [(push, pull), (first, second)]


def _on_host(kind: type[MemoryBlock | PrivateBlock], nbytes: int, name: str) -> Pair:
    push, pull = (kind.allocate(nbytes, f"{what} of {name}") for what in KINDS)
    return push, pull


def _home(trained: Sequence[torch.Tensor], servers: Sequence[Connection], *, grouped: bool) -> str:
    """Return the UUID of the GPU where the model is. Raises `ConfigurationError` if it is not on one alone, or servers cannot use that."""
    home = gpu.home_of(trained)
    if home is None:
        places = ", ".join(sorted({str(parameter.device) for parameter in trained}))
        raise ConfigurationError(
            f"the model's trainable parameters are on {places}; move them to one GPU before the optimizer is wrapped, or use --plane host"
        )
    far = next((server.peer for server in servers if not server.shares_memory), None)
    if grouped or far is not None:
        why = "a worker of several processes has its gradients on the host" if grouped else f"{far} does not share memory with this worker"
        raise ConfigurationError(f"{why}; use --plane host")
    return home
