"""The plain synchronous allreduce of ``torch.distributed``: what the rule ``allreduce`` is live, to compare with what people use.

A process group of its own, beside whatever group the script may have made for itself. Its members find each other through a
`torch.distributed.TCPStore`, which one process serves. Neither that store nor gloo and NCCL know of a token: whoever reaches the port
can take part. So the store and gloo's connections stay on the loopback interface unless an address says otherwise.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed

from offbeat.errors import ConfigurationError, JobError
from offbeat.types import Seconds, WorkerId

dist: Any = torch.distributed
"""It does not say which of its names are public, and stores and groups are among those that it leaves out."""

Meeting: TypeAlias = tuple[str, int]
"""Network name or number, and port."""

TIMEOUT_S = 300.0
"""How long a rank waits for the others: a slow one may be that late."""


class MeetingPoint:
    """Serves the store at which the ranks of one job meet; to be kept until all of them have met.

    >>> with MeetingPoint() as point:
    ...     point.address[0]
    '127.0.0.1'
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        # A listening socket of ours, since the store by itself would listen on every interface.
        self._socket = socket.create_server((host, 0))
        self.address: Meeting = (host, self._socket.getsockname()[1])
        self._store: Any = dist.TCPStore(*self.address, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach())

    def close(self) -> None:
        """Serve no more."""
        self._store = None

    def __enter__(self) -> MeetingPoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TorchAllreduce:
    """One rank's part.

    Args:
        rank: its number, from 0.
        ranks: how many there are; all must come.
        meeting: where they meet.
        round_: of the meeting; ranks that meet anew need another number than before.
        device: of the gradients; NCCL on GPUs, gloo elsewhere.
        host: the interface that gloo's connections use.
        timeout_s: how long to wait for the others, at the start and in each call.

    Raises:
        JobError: some of them have not come in time.
        ConfigurationError: this torch cannot do that.
    """

    def __init__(
        self,
        rank: WorkerId,
        ranks: int,
        meeting: Meeting,
        *,
        round_: int = 0,
        device: torch.device | str = "cpu",
        host: str = "127.0.0.1",
        timeout_s: Seconds = TIMEOUT_S,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        try:
            store = dist.PrefixStore(f"offbeat {round_}", dist.TCPStore(*meeting, is_master=False, timeout=timeout))
            self._group = (
                _nccl(store, rank, ranks, timeout) if torch.device(device).type == "cuda" else _gloo(store, rank, ranks, timeout, host)
            )
        except RuntimeError as error:
            raise JobError(f"rank {rank} did not meet the {ranks - 1} others at {meeting} within {timeout_s:g} s: {error}") from error

    def mean(self, gradient: torch.Tensor) -> None:
        """Replace a gradient, any shape, by the mean over all ranks; returns when that is done.

        It is divided before it is summed, as in DistributedDataParallel: a sum overflows where its mean does not.

        Raises:
            JobError: another rank is gone, or has not come in time.
        """
        try:
            self._group.allreduce([gradient.div_(self.ranks)]).wait()
        except RuntimeError as error:
            raise JobError(
                f"the plain allreduce of rank {self.rank} with {self.ranks - 1} others failed within {self._timeout_s:g} s: {error}. "
                "It does not outlive the end of a rank; sync=full does the same and goes on with those that are left"
            ) from error

    def close(self) -> None:
        """This rank calls no more."""
        del self._group


def _gloo(store: Any, rank: WorkerId, ranks: int, timeout: timedelta, host: str) -> Any:
    kind = getattr(dist, "ProcessGroupGloo", None)
    if kind is None:
        raise ConfigurationError("sync=allreduce: this torch has been built without gloo; use sync=full, which does the same")
    options = kind._Options()
    options._timeout = timeout
    options._devices = [kind.create_device(hostname=host)]
    return kind(store, rank, ranks, options)


def _nccl(store: Any, rank: WorkerId, ranks: int, timeout: timedelta) -> Any:
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        raise ConfigurationError("sync=allreduce: this torch has been built without NCCL; keep the gradients on the CPU, or use sync=full")
    options = kind.Options()
    options._timeout = timeout
    return kind(store, rank, ranks, options)
