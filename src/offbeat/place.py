"""`epochs`, `steps` and `barrier`: where a script is in its job. A restarted worker begins its script anew, and goes on by these."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from offbeat import session as sessions
from offbeat.core.settings import whole_number
from offbeat.errors import ConfigurationError, warn
from offbeat.sampler import Passes
from offbeat.session import Barrier, Session

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler


def barrier() -> Barrier:
    """Wait until every living worker has come here, and load the newest parameters.

    Call it before an evaluation that all workers take part in or decide by, and before the last save, where no elastic loader's end
    does the same. Meanwhile the rule does not wait for this worker; local steps are pushed before, and the contributions on their way are
    folded or dropped. A worker that dies, leaves or has ended its script counts as come. Call it equally often on every worker, between
    two steps; a restarted worker goes on with the number of the barrier that the others come to next.

    Returns:
        Its number, the version of the model that this worker has now, the workers that have come, and whether all have the same model.

    Raises:
        ConfigurationError: the optimizer does not exist yet.

    >>> import torch, offbeat
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> barrier()
    Barrier(number=0, version=0, workers=(0,), shared=True, past=False)
    """
    return _session("barrier()").barrier()


def steps(number: int, *, every: int = 1) -> Iterator[int]:
    """Count the iterations of a script that takes no samples from the job: 0 to ``number`` - 1, with an ``optimizer.step()`` in each.

    A restarted worker goes on after the last iteration in which it had made a step, or where the slowest of the others is by now, if that
    is further. Its learning-rate schedules are brought there, too: each ``torch.optim.lr_scheduler`` of the optimizer is advanced as if it
    had made its steps. The loop ends early where the job has ended before this worker's script.

    Args:
        number: of iterations of the whole training; at least 0. An iteration may have several steps of the optimizer, as those of
            reinforcement learning have for each rollout.
        every: after how many iterations the script makes one step of its schedulers.

    Raises:
        ConfigurationError: a number is out of its range, or the optimizer does not exist yet.

    >>> import torch, offbeat
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> for step in steps(3):
    ...     optimizer.zero_grad()
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     optimizer.step()
    >>> step, optimizer.version
    (2, 3)
    """
    whole_number("steps", "number", number, least=0)
    whole_number("steps", "every", every, least=1)
    return _steps(_session("steps()"), number, every)


def _steps(session: Session, number: int, every: int) -> Iterator[int]:
    session.keeps_place = True  # also where the count begins within a pass over a loader, after passes over epochs that are over
    return _count(session, number, every)


def _count(session: Session, number: int, every: int) -> Iterator[int]:
    at = session.made
    session.begin(at)
    if at:
        _bring_schedulers(session, at // every)
    while at < number:
        session.look()
        if session.over is not None:
            return
        session.begin(at)
        yield at
        at += 1


def epochs(number: int, loader: Any) -> Iterator[int]:
    """Count the epochs of a training: 0 to ``number`` - 1, one pass over ``loader`` in each iteration.

    A restarted worker begins with the first epoch that is not over: what the script does for the epochs before it (an evaluation, a save,
    a warm-up, a mean over the batches) is not done again. The schedulers of the optimizer are advanced as if each of those epochs had
    made one step of them. After `load` the first epoch is that of the file, after ``--resume`` that of the checkpoint. The loop ends early
    where the job has ended before this worker's script.

    Args:
        number: of epochs of the whole training; at least 0.
        loader: what `elastic` has returned, or a ``DataLoader`` over `DistributedOptimizer.batch_sampler`.

    Raises:
        ConfigurationError: the number is negative, the job does not deal out the loader's batches, or the optimizer does not exist yet.

    >>> import torch, offbeat
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = offbeat.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    >>> loader = offbeat.elastic(torch.ones(4, 1), batch_size=2)
    >>> for epoch in epochs(3, loader):
    ...     for batch in loader:
    ...         optimizer.zero_grad()
    ...         model(batch).sum().backward()
    ...         optimizer.step()
    >>> epoch, optimizer.version
    (2, 6)
    """
    whole_number("epochs", "number", number, least=0)
    source = getattr(loader, "batch_sampler", loader)
    if not isinstance(source, Passes):
        raise ConfigurationError(
            f"offbeat.epochs({number}, {type(loader).__name__}): the job does not deal out its batches, and so does not know which epochs "
            "are over: pass the loader that offbeat.elastic returns, or a DataLoader with batch_sampler=optimizer.batch_sampler(...)"
        )
    return _epochs(source.session, number, source)


def _epochs(session: Session, number: int, source: Passes) -> Iterator[int]:
    at = source.next_epoch
    if session.restarted:
        session.keeps_place = session.counts = True
        while at < number and session.over is None and source.is_over():
            at += 1
        if session.over is None:
            _bring_schedulers(session, at)
    elif session.resumed and (place := session.place(source.pool)) is not None:
        # The schedulers are those of the checkpoint from the first batch on. To look at that one would restore random generators too early.
        # A part is that of the next batch: where all samples of an epoch are used, also what the script does after it has been done.
        at = max(at, place["epoch"] + (place["rest"] == []))
        source.set_epoch(at)
    for epoch in range(at, number):
        if session.over is not None:
            return
        yield epoch


def _session(call: str) -> Session:
    if sessions.current is None:
        raise ConfigurationError(f"offbeat.{call} concerns the job, in which this process is not yet: make the DistributedOptimizer first")
    return sessions.current


def _bring_schedulers(session: Session, to: int) -> None:
    """Advance the schedulers of the session's optimizer to this number of their steps."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    for scheduler in _outermost(session.schedulers()):
        missing = to - getattr(scheduler, "last_epoch", to)
        if isinstance(scheduler, ReduceLROnPlateau):
            warn(
                "a ReduceLROnPlateau of a restarted worker begins anew, since its steps depend on measurements: save it with "
                "offbeat.save(scheduler=...), and load it"
            )
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the optimizer's steps, which an earlier process has made
            for _ in range(missing):
                scheduler.step()


def _outermost(schedulers: list[LRScheduler]) -> list[LRScheduler]:
    """Return the schedulers that no other one steps, as SequentialLR and ChainedScheduler do."""
    inner = {id(one) for scheduler in schedulers for one in getattr(scheduler, "_schedulers", ())}
    return [scheduler for scheduler in schedulers if id(scheduler) not in inner]
