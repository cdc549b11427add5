"""`OffbeatTrainer`: Hugging Face's ``Trainer`` in a job. Each worker is a ``Trainer`` of one process; the job deals the training batches.

``Trainer`` plans its steps from the length of its data loader. A worker's share of an epoch is not known beforehand, so the loader's length
here is that of the whole epoch: a worker's pass ends earlier. Limits and learning-rate schedules therefore follow the worker's place in the
job's data and not the number of its steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import ceil
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import IterableDataset

from offbeat import session as sessions
from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.integrations.loops import DealtBatches, LoopOptimizer, MissingExtraError
from offbeat.optimizer import DistributedOptimizer
from offbeat.runtime.job.settings import known_token
from offbeat.runtime.worker import other_launchers

try:
    import accelerate  # noqa: F401 - Trainer asks for it only when it is made
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError:
    raise MissingExtraError("transformers, or accelerate,", "transformers") from None

if "OFFBEAT_WORKER" in os.environ:
    # accelerate takes torchrun's variables as an order to begin a process group, which a restarted worker would wait for in vain.
    for _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(_name, None)
elif os.environ.get("WORLD_SIZE", "1") != "1":
    # Plain torchrun: the agent must be there before TrainingArguments are made, since these begin a process group.
    other_launchers.hand_over(token=known_token())

PLACE = "offbeat.json"
"""The file in a checkpoint's folder with the place in the data."""


class OffbeatTrainer(Trainer):
    """A ``transformers.Trainer`` in a job of offbeat: under ``offbeat run``, or alone without a launcher.

    Gradient clipping, accumulation, schedulers, evaluation and ``resume_from_checkpoint`` work as in one process. Every worker evaluates;
    only the chief prints and saves, and ``from_pretrained`` loads what it has saved. Schedules that are set in epochs (no ``max_steps``)
    follow the job's data; ``max_steps`` is the number of each worker's own steps.

    Args:
        arguments, keywords: those of ``Trainer``.
        sync: the rule, as an object (``offbeat.SSP(staleness=3)``) or as a string; ``--sync`` on the command line replaces it.
        nonfinite: for a gradient with infinity or NaN: ``"reject"`` it or ``"stop"`` the job.

    Raises:
        ConfigurationError: the arguments ask for several processes, or GPUs, for one model.

    >>> import torch, transformers
    >>> model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=9, n_positions=8))
    >>> arguments = transformers.TrainingArguments("/tmp/offbeat-doctest", report_to=[], max_steps=2, disable_tqdm=True)
    >>> data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    >>> OffbeatTrainer(model, arguments, train_dataset=data, sync="ssp(staleness=3)").train().global_step
    {...}
    2
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *arguments: Any,
        sync: str | Policy = "bsp",
        nonfinite: Literal["reject", "stop"] = "reject",
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._sync, self._nonfinite = sync, nonfinite
        self._dealt: DealtBatches | None = None
        self._inside: str | None = None
        """The checkpoint from which the next pass goes on in the middle of an epoch."""
        self._refuse()
        self.add_callback(_Job(self))

    def _refuse(self) -> None:
        """Raise `ConfigurationError` for what assumes that several processes, or GPUs, train one model."""
        args = self.args
        refused = {
            f"world_size={args.world_size}: TrainingArguments has begun a process group of its own, from torchrun's variables; import "
            "offbeat.integrations.transformers before it is made": args.world_size > 1 or torch.distributed.is_initialized(),
            f"n_gpu={args.n_gpu}: Trainer would use DataParallel; give each worker one GPU, by CUDA_VISIBLE_DEVICES": args.n_gpu > 1,
            "deepspeed=...: it has an optimizer and a process group of its own; leave it out": self.is_deepspeed_enabled,
            "fsdp=...: it divides the model among processes of one group; leave it out": self.is_fsdp_enabled,
            "parallelism_config=...: it divides the model among processes of one group; leave it out": (
                getattr(self.accelerator, "parallelism_config", None) is not None
            ),
            "auto_find_batch_size=True: it begins the training again, which a job cannot; set per_device_train_batch_size": (
                args.auto_find_batch_size
            ),
            "optimizers=(DistributedOptimizer, ...): pass the optimizer of torch.optim, and OffbeatTrainer(sync=...)": isinstance(
                self.optimizer, DistributedOptimizer
            ),
        }
        for reason, applies in refused.items():
            if applies:
                raise ConfigurationError(f"OffbeatTrainer, {reason}")

    def hyperparameter_search(self, *arguments: Any, **keywords: Any) -> Any:
        """Raise `ConfigurationError`: a job trains one model."""
        raise ConfigurationError("OffbeatTrainer.hyperparameter_search(): a job trains one model; start one job for each trial")

    # The job.

    @property
    def _ours(self) -> LoopOptimizer | None:
        """The optimizer of this worker, once the worker has joined the job."""
        inner = getattr(self.optimizer, "optimizer", None)
        return inner if isinstance(inner, LoopOptimizer) else None

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer and wrap it: this worker joins the job."""
        if self._ours is None:
            plain = super().create_optimizer(model)
            ours = LoopOptimizer(plain, self.model, self._sync, nonfinite=self._nonfinite)
            ours.takes_means()  # Trainer divides by the batches that a group has, or by the tokens in them
            # Placing the state on a device would load it into the job, which other workers may have begun already.
            self.optimizer = self.accelerator.prepare(ours, device_placement=[False])
        return self.optimizer

    def get_train_dataloader(self) -> Any:
        """Return the loader of the batches that the job deals to this worker."""
        if self.train_dataset is None or isinstance(self.train_dataset, IterableDataset):
            raise ConfigurationError(
                f"OffbeatTrainer(train_dataset={type(self.train_dataset).__name__}): needs a data set with a length, to deal it out"
            )
        self.create_optimizer()
        assert self._ours is not None
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        self._dealt = _Loader(super().get_train_dataloader(), self._ours, seed=seed)
        return self._dealt

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Return Trainer's plan: with ``max_steps``, for as many epochs as all workers' steps may need."""
        epochs, updates, *others = super().set_initial_training_values(args, dataloader)
        if args.max_steps > 0:
            epochs = -(-args.max_steps * sessions.world_size() // updates)
        return epochs, updates, *others

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the scheduler, for this worker's share of the steps; without ``max_steps`` it follows the worker's place in the data."""
        if self.lr_scheduler is not None or self.args.max_steps > 0 or self._dealt is None:
            return super().create_scheduler(num_training_steps, optimizer)
        share = -(-num_training_steps // sessions.world_size())
        scheduler = super().create_scheduler(share, optimizer)
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            dealt, limit = self._dealt, self._batches_max
            self.lr_scheduler = _Schedule(scheduler, lambda: dealt.position * share // limit)
            assert self._ours is not None
            self._ours.keeps_place()
        return self.lr_scheduler

    def _step_over_rest(self) -> None:
        """Make the last step of a pass, over fewer batches than usual: Trainer itself knows of one only at the whole epoch's end."""
        self.accelerator.gradient_state._set_sync_gradients(True)
        if self.args.max_grad_norm > 0:
            self._clip_grad_norm(self.model)
        self.optimizer.step()
        if not isinstance(self.lr_scheduler, ReduceLROnPlateau):
            self.lr_scheduler.step()
        self.model.zero_grad()
        self.state.global_step += 1

    @property
    def _batches_max(self) -> int:
        """The number of batches that the job deals out in all epochs, where ``max_steps`` does not limit them."""
        assert self._dealt is not None
        epochs: float = self.args.num_train_epochs
        return ceil(epochs * self._dealt.batches_max)

    # The chief.

    def is_world_process_zero(self) -> bool:
        return sessions.chief()

    def is_local_process_zero(self) -> bool:
        return sessions.chief()

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Log as Trainer does, and in the job's journal: the loss of every worker, other numbers of the chief."""
        super().log(logs, *arguments, **keywords)
        numbers = {name: float(value) for name, value in logs.items() if type(value) in (int, float)}
        sessions.log(**{name: value for name, value in numbers.items() if name == "loss" or sessions.chief()})

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        """Evaluate; at the end of an epoch with the newest parameters, after the other workers' last steps of the epoch."""
        self._finish()
        metrics: dict[str, float] = super().evaluate(*arguments, **keywords)
        return metrics

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model on the chief; do nothing on other workers."""
        if sessions.chief():
            super().save_model(output_dir, _internal_call)

    def _finish(self) -> None:
        if self._dealt is not None:
            self._dealt.finish()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._finish()
        ours = self._ours
        assert ours is not None and self._dealt is not None
        if not sessions.chief():
            ours.save_elsewhere()
            return
        ours.hold()
        try:
            super()._save_checkpoint(model, trial)
            folder = os.path.join(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            with open(os.path.join(folder, PLACE), "w", encoding="utf-8") as file:
                json.dump(self._dealt.state_dict(), file)
        finally:
            ours.release()

    def _load_best_model(self) -> None:
        if not sessions.chief():
            return  # it knows of no best checkpoint but the one before its resumption
        ours = self._ours
        if ours is not None:
            ours.leave()  # the model is loaded into memory that other workers would read
            self._dealt = None
        super()._load_best_model()

    def _init_training_state(self, max_steps: int, updates: int, epochs: int, checkpoint: str | None, trial: Any) -> tuple[int, int]:
        """Return the epoch with which to begin, and no batches to skip: the job knows which samples are left."""
        first, _ = super()._init_training_state(max_steps, updates, epochs, checkpoint, trial)
        place = os.path.join(checkpoint, PLACE) if checkpoint is not None else ""
        if self._dealt is not None and os.path.exists(place):
            with open(place, encoding="utf-8") as file:
                state = json.load(file)
            first = state["epoch"]
            if state["rest"] == []:  # saved after the last step of an epoch: a pass over nothing would draw random numbers
                first, state = first + 1, {**state, "epoch": first + 1, "rest": None}
            self._dealt.load_state_dict(state)
            self._inside = checkpoint if state["rest"] is not None else None
        elif self._dealt is not None:
            self._dealt.passes.set_epoch(first)
        return first, 0

    def get_batch_samples(self, *arguments: Any, **keywords: Any) -> Any:
        """Take the batches of a step. A pass that begins in the middle of an epoch has drawn a random number too many: take that back."""
        taken = super().get_batch_samples(*arguments, **keywords)
        if self._inside is not None:
            self._load_rng_state(self._inside)
            self._inside = None
        return taken


class _Loader(DealtBatches):
    """Batches for ``Trainer``, which asks for a length."""

    def __len__(self) -> int:
        return self.batches_max


class _Schedule:
    """A learning-rate scheduler that follows the place in the job's data.

    Args:
        scheduler: it counts steps.
        steps: returns the number of steps that it has to have counted.
    """

    def __init__(self, scheduler: LRScheduler, steps: Callable[[], int]) -> None:
        self._scheduler, self._steps = scheduler, steps

    def step(self) -> None:
        while self._scheduler.last_epoch < self._steps():
            self._scheduler.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _Job(TrainerCallback):
    """Corrects what ``Trainer`` concludes from the number of this worker's steps.

    Args:
        trainer: its trainer.
    """

    def __init__(self, trainer: OffbeatTrainer) -> None:
        self._trainer = trainer
        self._steps = 0
        """Steps before the present epoch."""
        self._accumulated = False
        """Whether there were backward passes after the last step."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._steps = state.global_step

    def on_substep_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._accumulated = True

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._accumulated = False
        dealt = self._trainer._dealt
        if dealt is None:
            return
        state.epoch = dealt.position / dealt.batches_max
        state.is_world_process_zero = state.is_local_process_zero = sessions.chief()
        if args.max_steps <= 0 and dealt.position >= self._trainer._batches_max:
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if self._accumulated:
            self._trainer._step_over_rest()
            self.on_step_end(args, state, control)
        if state.global_step == self._steps:  # of a restarted worker that came after the epoch: not the end of the training
            control.should_training_stop = control.should_evaluate = control.should_save = control.should_log = False
