"""The strategy for Lightning's ``Trainer``, without its base class, which is that of ``lightning`` or of ``pytorch_lightning``.

Each worker of the job is a ``Trainer`` on one device: Lightning's collectives (reduce, barrier, broadcast) stay those of one process. The
job's rule acts inside the optimizer's step, and the job deals the training batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from offbeat import session as sessions
from offbeat.core.policy import Policy
from offbeat.errors import ConfigurationError
from offbeat.integrations.loops import DealtBatches, LoopOptimizer

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base
else:
    Base = object


class JobStrategy(Base):
    """What `OffbeatStrategy` adds to Lightning's strategy for one device.

    Args:
        sync: the rule, as for `offbeat.DistributedOptimizer`.
        nonfinite: what happens with a gradient that is not finite, as for `offbeat.DistributedOptimizer`.
        device: of this worker; None: a GPU chosen by the worker's number, or the CPU if PyTorch sees none or the trainer has
            ``accelerator="cpu"``.
        others: the arguments of ``SingleDeviceStrategy``: ``accelerator``, ``checkpoint_io``, ``precision_plugin``.
    """

    strategy_name = "offbeat"
    optimizers: list[torch.optim.Optimizer]

    def __init__(
        self,
        sync: str | Policy = "bsp",
        *,
        nonfinite: Literal["reject", "stop"] = "reject",
        device: torch.device | str | None = None,
        **others: Any,
    ) -> None:
        super().__init__(device=_device_of(sessions.rank()) if device is None else device, **others)
        self._chosen = device is None
        self._sync, self._nonfinite = sync, nonfinite
        self._ours: list[LoopOptimizer] = []
        """The optimizers whose job this process has not left."""
        self._dealt: list[DealtBatches] = []
        self._trained = False
        self._failed = False
        self.global_rank = sessions.rank()

    @property
    def root_device(self) -> torch.device:
        """This worker's device. The trainer sets its accelerator after this strategy was made."""
        of_cpu = any(kind.__name__ == "CPUAccelerator" for kind in type(self.accelerator).__mro__)
        return torch.device("cpu") if self._chosen and of_cpu else self._root_device

    # The job.

    def setup_environment(self) -> None:
        super().setup_environment()
        self._follow_chief()

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the module's optimizers and wrap them: this worker joins the job.

        Raises:
            ConfigurationError: this process has trained in the job before, or `offbeat.DistributedOptimizer` refuses an optimizer.
        """
        if self._trained and sessions.world_size() > 1:
            raise ConfigurationError("Trainer.fit() was called a second time in a job: this worker has left it; start another job instead")
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        self._trained = True
        self._ours = [LoopOptimizer(optimizer, module, self._sync, nonfinite=self._nonfinite) for optimizer in self.optimizers]
        self.optimizers = list(self._ours)
        self._dealt = []
        self._follow_chief()

    def process_dataloader(self, dataloader: object) -> object:
        """Let the job deal out the batches of a training loader; other loaders stay as they are."""
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or not trainer.training or not self._ours:
            return dataloader
        dealt = DealtBatches(dataloader, self._ours[0], ahead=True)
        dealt.passes.set_epoch(trainer.fit_loop.epoch_progress.current.processed)  # a checkpoint of an epoch's end has no place in the data
        self._dealt.append(dealt)
        return dealt

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True

    def teardown(self) -> None:
        """Leave the job, unless an exception ends the training, which is this worker's death."""
        ours, self._ours = self._ours, []
        for optimizer in reversed([] if self._failed else ours):
            optimizer.leave()
        super().teardown()

    # The chief, which may change while the job runs.

    @property
    def is_global_zero(self) -> bool:
        return sessions.chief()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._follow_chief()

    def _follow_chief(self) -> None:
        """Let Lightning print and log on the chief only."""
        rank_zero_only.rank = 0 if sessions.chief() else max(1, self.global_rank)

    # The end of an epoch.

    def on_validation_start(self) -> None:
        self._finish()

    def on_train_end(self) -> None:
        self._finish()

    def _finish(self) -> None:
        """Wait for the other workers if this worker has used its last batch of the epoch."""
        for dealt in self._dealt if self._ours else ():
            dealt.finish()

    # Checkpoints. Every worker's trainer collects the parts, in the order of these methods; the chief's writes the file.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._finish()
        for optimizer in self._ours:
            if self.is_global_zero:
                optimizer.hold()
            else:
                optimizer.save_elsewhere()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        for optimizer in self._ours:
            optimizer.release()


def _device_of(worker: int) -> torch.device:
    """Return the device of a worker: the machine's GPUs are given out in turn."""
    return torch.device("cuda", worker % torch.cuda.device_count()) if torch.cuda.is_available() else torch.device("cpu")
