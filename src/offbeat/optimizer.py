"""`DistributedOptimizer`, which wraps the optimizer of a user's script: its ``step`` pushes, waits to be admitted, and pulls."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Final, Literal, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from offbeat import session as sessions
from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError, warn
from offbeat.policies import rule
from offbeat.runtime.job.job_spec import check_reduction
from offbeat.runtime.job.settings import WorkerSettings, known_token
from offbeat.runtime.job.wire_choice import check_rule, wire_format
from offbeat.runtime.worker import other_launchers
from offbeat.runtime.worker.library_calls import own_mode
from offbeat.sampler import ElasticBatchSampler, elastic_batch_sampler
from offbeat.session import LocalSession, Place, Session
from offbeat.tensors.layout import Layout
from offbeat.tensors.optimizers import OptimizerSpec, spec_of
from offbeat.tensors.state import by_position
from offbeat.types import REDUCTIONS, Reduction, WireFormat
from offbeat.wrapping import KnownParameters, check_process_group, check_wrapped

_SIBLINGS: list[Any] = []
"""The sessions of this process, in the order in which its optimizers were made."""

_WRAPPED: WeakSet[DistributedOptimizer] = WeakSet()
"""The wrapped optimizers of this process."""
_WRAPPING: Final = threading.Lock()
_STEPPED: WeakKeyDictionary[torch.optim.Optimizer, list[tuple[DistributedOptimizer, int]]] = WeakKeyDictionary()
"""The optimizers that have made a step: for one that is not wrapped those that have its parameters, with their numbers of steps then."""

MAKES_STATE: Final = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")
"""Module and name of the function that makes the state of an optimizer without one, by a step."""


class _Elsewhere(defaultdict[torch.Tensor, Any]):
    """Stands for the state of an optimizer that other processes keep: not empty, and not here."""

    def __bool__(self) -> bool:
        return True

    def __missing__(self, parameter: torch.Tensor) -> NoReturn:
        raise ConfigurationError("the job keeps this optimizer's state, not this process: optimizer.state_dict() gathers it")


def _look_at(stepping: torch.optim.Optimizer, *_: Any) -> None:
    """Called before each step of any optimizer. Warn of one over a job's parameters that is not wrapped, as where a script changes to
    another for its second part: the workers part there, and nothing else says so, since the wrapped one steps no more. A class which
    holds the wrapped one, as SAM's, makes steps of it in its own."""
    if stepping not in _STEPPED:
        own = {id(parameter) for group in stepping.param_groups for parameter in group["params"]}
        with _WRAPPING:
            wrapped = [one for one in _WRAPPED if one is stepping or not own.isdisjoint(one._known.trained)]
        known = not wrapped or any(one is stepping or one._steps_with(stepping) for one in wrapped)
        _STEPPED[stepping] = [] if known else [(one, -1) for one in wrapped]
    seen = _STEPPED[stepping]
    if any(one._in_job and one._session.steps == steps for one, steps in seen):
        seen.clear()
        warn(
            f"the script calls step() of an optimizer that is not wrapped ({type(stepping).__name__}), over parameters of a "
            "DistributedOptimizer: each worker makes these steps by itself, with its own gradients. Wrap it too, after close() of the one "
            "before: 'Several optimizers' in docs/optimizers.md"
        )
    seen[:] = [(one, one._session.steps) for one, _ in seen]


@cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_look_at)


@contextmanager
def _job_is_told() -> Iterator[None]:
    """Report a `ConfigurationError` of the body to the launcher, which prints it once, besides the n tracebacks of the workers."""
    try:
        yield
    except ConfigurationError as error:
        from offbeat.runtime.job.last_words import from_outside  # a script without a launcher needs no sockets

        from_outside(error)
        raise


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a ``torch.optim`` optimizer: the servers run its update on the sum of the workers' gradients.

    ``step()`` pushes this worker's gradient, waits until the rule admits the worker, and loads the newest parameters into the model. Under
    ``offbeat run`` the wrapped optimizer's class steps on the servers, with the learning rates and other hyperparameters that its
    ``param_groups`` have here, so learning-rate schedulers and gradient clipping work as usual. Without a launcher it steps the wrapped
    optimizer.

    After wrapping, ``p.grad`` and ``p.data`` are views of memory that the job shares. All workers begin with the parameters of one: the
    lowest-numbered that is connected when the job begins. A parameter without a gradient counts as one with a gradient of zero.
    BatchNorm's statistics are each worker's own until an epoch's end, when they are averaged.

    Under rules without servers (``majority``, ``solo``, ``full`` ...) the wrapped optimizer, of any class, steps in this process, on a
    replica, with the sum of the gradients of a round divided by the number of living workers.

    Args:
        optimizer: SGD, Adam, AdamW and the other elementwise classes of ``torch.optim``; classes that need whole tensors, such as
            Adafactor, work too, on servers that keep tensors whole.
        model: the model whose parameters the optimizer has.
        sync: the rule, as an object (``offbeat.SSP(staleness=3)``) or as a string (``"ssp(staleness=3)"``); ``--sync`` on the command line
            replaces it.
        wire: how gradients and parameters travel between hosts: ``"float32"``, ``"bf16"`` in half of the bytes, or ``"int8"`` in a quarter
            of them; see docs/wire.md. Within a host nothing is encoded. ``--wire`` on the command line replaces it.
        reduction: what a gradient is of its samples' gradients, which the loss decides. Under ``"mean"`` a fold weighs gradients by their
            numbers of samples; under ``"sum"`` (losses with ``reduction="sum"``) it adds them up. See docs/optimizers.md.
        nonfinite: for a gradient with infinity or NaN: ``"reject"`` it, so that the fold does not contain it, or ``"stop"`` the job.

    Raises:
        ConfigurationError: the optimizer cannot run on a server, or has other parameters than the model, or no parameter is trainable, or
            the rule or the wire format does not exist, or the rule cannot use the format; or several processes of the script have been
            started in a way that cannot become a job.
        RefusedError: the job's other workers have a different model, optimizer or rule.

    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, sync="ssp(staleness=3)")
    >>> loss = model(torch.ones(2, 3)).square().mean()
    >>> loss.backward()
    >>> optimizer.step()
    >>> optimizer.version
    1
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        sync: str | Policy = "bsp",
        *,
        wire: WireFormat = "float32",
        nonfinite: Literal["reject", "stop"] = "reject",
        reduction: Reduction = "mean",
    ) -> None:
        if nonfinite not in ("reject", "stop"):
            raise ConfigurationError(f"nonfinite={nonfinite!r}: must be 'reject' or 'stop'")
        if isinstance(optimizer, DistributedOptimizer):
            raise ConfigurationError("this optimizer is a DistributedOptimizer already: wrap an optimizer of torch.optim")
        self._place = Place.of_process()
        with _job_is_told():
            policy = rule(sync)
            self._wire = wire_format(wire)
            check_wrapped(optimizer, model)
            # In a job the command line may choose another rule, for which the coordinator will check. Of a worker's processes only the
            # leader has the settings.
            in_job = self._place.rank > 0 or WorkerSettings.from_environment() is not None
            if reduction not in REDUCTIONS or not in_job:
                check_reduction(policy, reduction)
            layout = Layout.of(model, optimizer)
            self._known = KnownParameters(optimizer, model)
            spec, self._local_only = _spec_of(optimizer)
            if self._local_only is not None and not policy.local_optimizer and not in_job:
                raise ConfigurationError(self._local_only)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.wrapped = optimizer
        self._nonfinite, self._reduction = nonfinite, reduction
        self._began = False
        """Whether the script has made a step, or loaded a state."""
        with own_mode():
            self._session = self._open(layout, spec, model, policy)
        self._session.known_as(self)
        self._in_job = not isinstance(self._session, LocalSession)
        """Whether other workers train the same parameters, until `close`."""
        with _WRAPPING:
            _look_at_steps()
            for other in _WRAPPED:
                if self._known.share(other._known):
                    self._session.shares = other._session.shares = True
            _WRAPPED.add(self)
        if self._session.restarted or self._session.resumed:
            # The job has made steps: a scheduler's step that passes over an epoch is not too early.
            self._opt_called = self.wrapped._opt_called = True  # type: ignore[attr-defined]
        self._unguard()  # the optimizer may have been wrapped before, in a notebook for instance
        for one in (optimizer, *self._held().values()):
            one._offbeat_guard = one.register_step_pre_hook(self._refuse_own_step)  # type: ignore[attr-defined]

    def _open(self, layout: Layout, spec: OptimizerSpec, model: torch.nn.Module, policy: Policy) -> Session:
        """Return this process's session, whose kind follows from the environment."""
        if self._place.rank:
            from offbeat.runtime.group.follower import FollowerSession  # a script without a launcher needs no sockets

            following = FollowerSession(self._place, model, self.wrapped)
            sessions.made(following)
            return following
        settings = WorkerSettings.from_environment()
        if settings is None:
            other_launchers.hand_over(token=known_token())
            check_process_group(model, in_job=False)
            check_rule(policy, self._wire)
            local = LocalSession(self.wrapped)
            sessions.made(local)
            return local
        from offbeat.runtime.group.leader import Leading, shadow_of  # a script without a launcher needs no sockets
        from offbeat.runtime.joining import session_of
        from offbeat.runtime.worker.early_copies import EarlyCopies

        wrapped, shadow = self.wrapped, None
        with _job_is_told():
            if self._place.size == 1:
                check_process_group(model, in_job=True)
            else:
                shadow = shadow_of(self._place, model, wrapped)
                model, wrapped, layout = shadow.module, shadow.optimizer, shadow.layout
                spec, self._local_only = _spec_of(wrapped)
            session = session_of(
                settings,
                policy,
                layout,
                spec,
                model,
                wrapped,
                stop_on_nonfinite=self._nonfinite == "stop",
                local_only=self._local_only,
                siblings=_SIBLINGS,
                wire=self._wire,
                grouped=shadow is not None,
            )
        leading = Leading(self._place, shadow, session) if shadow is not None else None
        session.reduction = self._reduction
        early = EarlyCopies(model)
        session.follow_process()
        session.join(policy.spelling)
        if leading is None and not session.restarted and early.found(model):
            warn(
                "this worker's initial parameters differ from the job's, and a copy of the model from before the wrapping has them (an "
                "average of the weights, a target network): make the copy after offbeat.DistributedOptimizer, or seed all workers alike"
            )
        if leading is not None:
            leading.joined()
            session.group = leading
        sessions.made(session)
        return session

    def __getattr__(self, name: str) -> Any:
        """Return what the wrapped optimizer's class has beyond torch's, such as ``train`` and ``eval`` of schedule-free optimizers."""
        wrapped = self.__dict__.get("wrapped")
        if wrapped is not None and not name.startswith("_") and hasattr(wrapped, name):
            return getattr(wrapped, name)
        raise AttributeError(f"neither DistributedOptimizer nor {type(wrapped).__name__}, which it wraps, has an attribute {name!r}")

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The wrapped optimizer's state. Once a job has made a step whose optimizer is elsewhere, it is not empty, and has no entries."""
        wrapped = self.wrapped.state
        return wrapped if wrapped or not self._elsewhere or not self.version else _Elsewhere()

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        if "wrapped" in self.__dict__:  # the constructor of torch's class sets an empty one
            self.wrapped.state = state

    @property
    def _elsewhere(self) -> bool:
        """Whether another process makes the steps, or another optimizer of this one: the servers, or the leader of the worker."""
        return self._session.servers_step or self._place.size > 1

    @property
    def version(self) -> int:
        """The version of the model's parameters: the number of folds in them."""
        return self._session.version

    @property
    def worker(self) -> int:
        """The number of this process in the job, 0 without a launcher."""
        return self._session.worker

    @property
    def workers(self) -> int:
        """The number of workers with which the job was started."""
        return self._session.workers

    @property
    def reports(self) -> list[dict[str, Any]]:
        """One report per epoch whose end this worker has seen, of the newest thousand: the counts of all indices, with the fields of
        ``core/leases.py``."""
        return self._session.reports

    def batch_sampler(
        self,
        dataset: Sized,
        *,
        batch_size: int | str,
        shuffle: bool = True,
        seed: int | None = None,
        deal: Literal["pool", "even"] = "pool",
        drop_last: bool = False,
    ) -> ElasticBatchSampler:
        """Return a ``batch_sampler`` for a ``DataLoader`` that deals each index of an epoch to one worker.

        Args:
            dataset: anything with a length; the same on all workers.
            batch_size: samples in one worker's batch. ``"auto:64"``: 64 while all workers are equally fast; the job measures their seconds
                per sample, and gives fast workers larger batches and slow ones smaller, 64 for each living worker in all. ``"auto:64:96"``:
                at most 96 for one worker, whose memory may not have room for more.
            shuffle: a new order each epoch.
            seed: the seed of the orders; default: the job's.
            deal: ``"pool"``: workers take as many batches of an epoch as they can. ``"even"``: each worker has an equal share, so that the
                sampler's length is the number of its batches; what a dead worker leaves goes to its next process, or is unused.
            drop_last: leave out the last samples of an epoch if they do not fill a batch.

        Raises:
            ConfigurationError: the data set has no length, or fewer samples than the job has workers, or the batch size has no such form.
        """
        return elastic_batch_sampler(self._session, dataset, batch_size, shuffle=shuffle, seed=seed, deal=deal, drop_last=drop_last)

    def step(self, closure: Callable[[], Any] | None = None, *, samples: int | None = None) -> Any:
        """Push this worker's gradient, wait to be admitted, and pull the newest parameters.

        Args:
            closure: clears the gradients, computes the loss, calls ``backward`` and returns the loss. It is evaluated once, with gradients
                enabled, before the push. None: the gradients are computed already.
            samples: the number of samples of which the gradient is the mean, which is its weight in the fold. Known without this argument
                if the batches come from `batch_sampler`; without either, all contributions have the same weight.

        Returns:
            The closure's result; None without a closure.

        Raises:
            JobError: the servers have ended.
            JobEnded: this worker was restarted, its script takes no samples from the job, and the others' scripts have ended.

        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = 1.0 + 0.0 * model(torch.zeros(2, 3)).sum()
        ...     loss.backward()
        ...     return loss.item()
        >>> optimizer.step(closure)
        1.0
        """
        self._session.check_end()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            if loss is None and self._session.has_sampler and all(p.grad is None for group in self.param_groups for p in group["params"]):
                return None  # the script has left its batch out, as a framework does whose training step returns None
        elif self._makes_state():
            self.wrapped.step()
            return None
        self._begin()
        self._known.check()
        if not self._session.steps and self._place.size == 1 and not isinstance(self._session, LocalSession):
            check_process_group(self._known.model, in_job=True)
        self._known.check_shared(servers_step=self._session.servers_step)
        if isinstance(self._session, LocalSession) and (name := self._first_nonfinite()) is not None:
            if self._nonfinite == "stop":
                raise FloatingPointError(f"the gradient of {name} is not finite")
            warn(f"the gradient of {name} is not finite: this step is skipped")
            self._session.reject(f"gradient not finite in {name}")
        else:
            self._call_hooks("_optimizer_step_pre_hooks")
            with own_mode():
                self._session.step(samples)
            self._call_hooks("_optimizer_step_post_hooks")
        self.wrapped._opt_called = True  # type: ignore[attr-defined] # a scheduler made before the wrapping looks there for a first step
        return loss

    def _held(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers that the wrapped one holds and steps with, by the name of the attribute."""
        return {name: held for name, held in vars(self.wrapped).items() if isinstance(held, torch.optim.Optimizer)}

    def _steps_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its steps are this one's: it is the wrapped optimizer or held by it, or this one's step is under way."""
        return self._session.inside or optimizer is self.wrapped or optimizer in self._held().values()

    def _unguard(self) -> None:
        for one in (self.wrapped, *self._held().values()):
            if (guard := vars(one).get("_offbeat_guard")) is not None:
                guard.remove()

    def _refuse_own_step(self, stepping: torch.optim.Optimizer, *_: Any) -> None:
        """Called before each step of the wrapped optimizer: one that the script makes itself would change this process's model only."""
        if not self._session.inside and not self._makes_state():
            for name, held in self._held().items():
                if held is stepping:
                    raise ConfigurationError(
                        f"the script makes a step with what {type(self.wrapped).__name__} holds as {name}, and not with step() of the "
                        f"DistributedOptimizer, so that no other worker would get it: wrap that one, outer.{name} = "
                        f"offbeat.DistributedOptimizer(outer.{name}, model), where outer is the {type(self.wrapped).__name__}"
                    )
            raise ConfigurationError(
                "the script calls step() of the optimizer that is wrapped: call step() of the DistributedOptimizer in its place "
                "(optimizer = offbeat.DistributedOptimizer(optimizer, model), so that the name of the old one is gone)"
            )

    def _makes_state(self) -> bool:
        """Return True for a step, before the script's first, by which ``torch.distributed.checkpoint`` makes the optimizer's state.

        It is known by its caller, not by its zero gradients and its learning rate of zero: a first step of a warm-up may have both in one
        process of a worker, whose shards are empty for instance, and not in another.
        """
        if self._began or self.version:
            return False
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if (frame.f_globals.get("__name__"), frame.f_code.co_name) == MAKES_STATE:
                return True
        return False

    def _begin(self) -> None:
        if not self._began:
            self._began = True
            if self._elsewhere:
                self.wrapped.state.clear()

    def interruptible(self) -> AbstractContextManager[None]:
        """Return a context manager whose body ends early when the gradient computed in it is obsolete, under rules that interrupt.

        Put the forward and backward pass of one batch in the body. Under ``dbw(obsolete=push_and_interrupt)`` and similar rules, a worker
        with an outdated version stops between two modules of its model, or two gradients, and the `step` after the body loads the
        newest parameters instead of pushing. Under other rules, and without a launcher, the context manager does nothing.

        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        >>> with optimizer.interruptible():
        ...     model(torch.ones(2, 3)).square().mean().backward()
        >>> optimizer.step()
        """
        if self._place.size > 1:
            return nullcontext()  # the other processes would wait in a collective of the script for the one that has stopped
        return self._session.interruptible()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the wrapped optimizer does."""
        self.wrapped.zero_grad(set_to_none)
        self._session.cleared()

    def pull(self) -> None:
        """Load the newest parameters into the model without a push, for instance before an evaluation during an epoch."""
        self._session.pull()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, gathered from the servers, in the format of the wrapped optimizer's own ``state_dict``."""
        if self.wrapped.state and not self.version:
            return self.wrapped.state_dict()
        return self._session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume: send this state to the servers, with the present parameters of the model (load the model's state first).

        Every worker calls it with the same state. A worker that joins a running job, past version 0, gets the job's state instead.
        """
        self._session.load_state_dict(by_position(state_dict))
        self._begin()
        self.param_groups = self.wrapped.param_groups  # loading has replaced those of the wrapped optimizer; schedulers use these

    def _call_hooks(self, kind: str) -> None:
        """Call the hooks of the wrapped optimizer's step, which it does not make where servers do; one may clip the gradients."""
        for hook in list(vars(self.wrapped)[kind].values()) if self._session.servers_step else ():
            if hook != self._refuse_own_step:
                hook(self.wrapped, (), {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `ConfigurationError` once the servers have the parameters: add groups to the optimizer before wrapping it."""
        if "_session" in self.__dict__:
            raise ConfigurationError(
                "parameter groups cannot be added to a wrapped optimizer: add them before wrapping it, and after that freeze the "
                "parameters of a group that is to train later (requires_grad=False), until its training begins"
            )
        super().add_param_group(param_group)

    def _first_nonfinite(self) -> str | None:
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is not None and not bool(torch.isfinite(p.grad).all()):
                    return f"a tensor of shape {tuple(p.shape)} in parameter group {number}"
        return None

    def close(self) -> None:
        """Leave the job; the model keeps its parameters. Called automatically at the end of the script."""
        self._session.close()
        self._in_job = False
        self._unguard()


def _spec_of(optimizer: torch.optim.Optimizer) -> tuple[OptimizerSpec, str | None]:
    """Return the spec with which servers build the optimizer, and None; for an optimizer that only workers can run, a placeholder and the
    reason."""
    try:
        return spec_of(optimizer), None
    except ConfigurationError as error:
        if isinstance(optimizer, torch.optim.LBFGS | torch.optim.SparseAdam):  # need closures or sparse gradients: no process can run them
            raise
        groups = [{"params": group["params"]} for group in optimizer.param_groups]
        return spec_of(torch.optim.SGD(groups, lr=0.0)), str(error)
