"""Run the synchronous allreduce of ``torch.distributed``, which the rule ``allreduce`` uses as a baseline to compare with.

It uses its own process group, beside any group that the script makes. The members find each other through a `torch.distributed.TCPStore`,
which one process serves. Neither the store nor gloo and NCCL check a token: any process that reaches the port can take part. So the store
and gloo's connections stay on the loopback interface unless an address says otherwise.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed

from offbeat.errors import ConfigurationError, JobError
from offbeat.transport.addresses import family_of, loopback
from offbeat.types import Seconds

dist: Any = torch.distributed
"""`torch.distributed`; it does not declare all names public that are used here."""

Meeting: TypeAlias = tuple[str, int]
"""Host name or address, and port."""

TIMEOUT_S = 300.0
"""Seconds that a rank waits for the others; a slow rank may be this late."""


class MeetingPoint:
    """Serve the store at which the ranks of one job meet. Keep it until all of them have met.

    >>> with MeetingPoint() as point:
    ...     point.address[0]
    '127.0.0.1'
    """

    def __init__(self, host: str | None = None) -> None:
        # The store itself would listen on every interface, so it gets a socket that is already bound.
        host = host or loopback()
        self._socket = socket.create_server((host, 0), family=family_of(host))
        self.address: Meeting = (host, self._socket.getsockname()[1])
        # In torch 2.6 the other implementation of the store, with libuv, takes no such socket.
        self._store: Any = dist.TCPStore(
            *self.address, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach(), use_libuv=False
        )

    def close(self) -> None:
        """Stop serving the store."""
        self._store = None

    def __enter__(self) -> MeetingPoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TorchAllreduce:
    """Take part in the process group as one rank.

    Args:
        rank: its position among the ranks of the group, from 0.
        ranks: the number of ranks; all must come.
        meeting: where they meet.
        round_: number of the meeting; ranks that meet again need a new number.
        device: of the gradients; NCCL on GPUs, gloo elsewhere.
        host: the interface that gloo's connections use.
        timeout_s: how long to wait for the others, at the start and in each call.

    Raises:
        JobError: a rank has not come in time.
        ConfigurationError: this torch was built without gloo or NCCL.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        meeting: Meeting,
        *,
        round_: int = 0,
        device: torch.device | str = "cpu",
        host: str | None = None,
        timeout_s: Seconds = TIMEOUT_S,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        try:
            store = dist.PrefixStore(f"offbeat {round_}", dist.TCPStore(*meeting, is_master=False, timeout=timeout))
            self._group = (
                _nccl(store, rank, ranks, timeout)
                if torch.device(device).type == "cuda"
                else _gloo(store, rank, ranks, timeout, host or loopback())
            )
        except RuntimeError as error:
            raise JobError(f"rank {rank} did not meet the {ranks - 1} others at {meeting} within {timeout_s:g} s: {error}") from error

    def mean(self, gradient: torch.Tensor) -> None:
        """Replace a gradient of any shape by the mean over all ranks. Returns when that is done.

        It is divided before it is summed, as in DistributedDataParallel: the sum could overflow where the mean does not.

        Raises:
            JobError: another rank is gone, or has not called in time.
        """
        try:
            self._group.allreduce([gradient.div_(self.ranks)]).wait()
        except RuntimeError as error:
            raise JobError(
                f"the allreduce of rank {self.rank} with {self.ranks - 1} others failed within {self._timeout_s:g} s: {error}. "
                "It needs every rank; sync=full computes the same and goes on with the ranks that are left"
            ) from error

    def close(self) -> None:
        """Close the process group."""
        del self._group


def _gloo(store: Any, rank: int, ranks: int, timeout: timedelta, host: str) -> Any:
    kind = getattr(dist, "ProcessGroupGloo", None)
    if kind is None:
        raise ConfigurationError("sync=allreduce: this torch has been built without gloo; use sync=full, which does the same")
    options = kind._Options()
    options._timeout = timeout
    options._devices = [kind.create_device(hostname=host)]
    return kind(store, rank, ranks, options)


def _nccl(store: Any, rank: int, ranks: int, timeout: timedelta) -> Any:
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise ConfigurationError("sync=allreduce: this torch has been built without NCCL; keep the gradients on the CPU, or use sync=full")
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, ranks, options)
