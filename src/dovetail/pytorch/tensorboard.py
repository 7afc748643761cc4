"""A writer for TensorBoard that needs no context of a trial."""

from __future__ import annotations

import warnings

from dovetail.core import DistributedContext
from dovetail.info import get_cluster_info
from dovetail.pytorch.context import PyTorchTrialContext, checkpoint_root


class TorchWriter:
    """Writes into the folder of the trial, which an experiment or a launcher names, else into `checkpoints/trial_0`.

    Determined deprecates it. `context.get_tensorboard_writer()` also follows `init(checkpoint_dir=…)`.

    Attributes:
        writer: The `SummaryWriter` of torch.
    """

    def __init__(self) -> None:
        info = get_cluster_info()
        config = info.config if info is not None else {}
        context = PyTorchTrialContext(
            hparams={},
            config=config,
            distributed=DistributedContext.from_environment(),
            info=info,
            checkpoint_root=checkpoint_root("auto", info, config),
        )
        self.writer = context.get_tensorboard_writer()
        warnings.warn(
            f"TorchWriter is deprecated, and writes into {context.get_tensorboard_path()}: in a trial use "
            "context.get_tensorboard_writer(), in a script SummaryWriter(core_context.train.get_tensorboard_path())",
            FutureWarning,
            stacklevel=2,
        )

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Write one number."""
        self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Wait until everything is in the file."""
        self.writer.flush()

    def reset(self) -> None:
        """Close the file; what is written later goes into a new one."""
        self.writer.close()
