"""TensorBoard writer that needs no trial context."""

from __future__ import annotations

import warnings

from dovetail.core import DistributedContext
from dovetail.info import get_cluster_info
from dovetail.pytorch.context import PyTorchTrialContext, checkpoint_root


class TorchWriter:
    """Writes to the trial's folder that an experiment or a launcher sets, or else to `checkpoints/trial_0`.

    Deprecated in Determined. Prefer `context.get_tensorboard_writer()`, which also uses `init(checkpoint_dir=…)`.

    Attributes:
        writer: The torch `SummaryWriter`.
    """

    def __init__(self) -> None:
        info = get_cluster_info()
        config = info.config if info is not None else {}
        # Only for the rules of folders: this context trains nothing and wraps nothing.
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
        """Write all buffered values to the file."""
        self.writer.flush()

    def reset(self) -> None:
        """Close the file; later values are written to a new file."""
        self.writer.close()
