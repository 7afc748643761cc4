"""Add-on that writes the newest state and the best weights to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dovetail import checkpoint as store
from dovetail.errors import CheckpointError, UnknownNameError
from dovetail.trainers.addons.best_weights import BestWeights
from dovetail.trainers.addons.core import AddOnBase

_SUFFIXES = {"ckpt": ".ckpt", "safetensors": ".safetensors", "safetensor": ".safetensors"}


class StateManagerAddon(AddOnBase, BestWeights):
    """Writes a whole checkpoint after every epoch, and the weights alone whenever they are the best so far.

    The best weights have the smallest loss at the end of an epoch: the validation loss, or the training loss without
    validation.

    Args:
        save_path: The folder.
        save_format: The format of the best weights, `model.<format>`: `"ckpt"` or `"safetensors"`.

    Example:
        >>> import tempfile, torch
        >>> from dovetail.trainers import Trainer
        >>> x, y = torch.randn(8, 2), torch.tensor([0, 1] * 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = Trainer.add_on(StateManagerAddon)(
        ...         torch.nn.Linear(2, 2), num_epochs=1, save_path=folder, save_format="safetensors", verbose=False
        ...     )
        ...     _ = trainer.fit((x, y))
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['ck_epoch_1_iter_1', 'ck_history.jsonl', 'ck_run.jsonl', 'model.safetensors']
    """

    def __init__(
        self,
        *args: Any,
        save_path: str | Path,
        save_format: Literal["ckpt", "safetensors", "safetensor"] = "ckpt",
        **kwargs: Any,
    ) -> None:
        if save_format not in _SUFFIXES:
            raise UnknownNameError("save_format", save_format, _SUFFIXES)
        self.save_path = Path(save_path)
        self.save_format = save_format
        # Periodic checkpoints of the trainer itself, of which only the newest is kept.
        kwargs.setdefault("checkpoint_dir", self.save_path)
        kwargs.setdefault("keep_last", 1)
        super().__init__(*args, **kwargs)
        self._follow_best()

    def check_better(self, cur_epoch: int, cur_loss: float) -> bool:
        """Also write the weights if they are the best so far."""
        is_better = super().check_better(cur_epoch, cur_loss)
        if is_better:
            self.save_model(self.save_path / f"model{_SUFFIXES[self.save_format]}")
        return is_better

    def save_state(self) -> Path:
        """Write a whole checkpoint now, and return its path."""
        return self.save_checkpoint(self.save_path / "state")

    def load_state(self) -> Path:
        """Load the newest intact checkpoint of the folder, and return its path."""
        newest = store.latest(self.save_path)
        if newest is None:
            raise CheckpointError(f"load_state: {self.save_path} holds no checkpoint")
        self.load_checkpoint(newest)
        return newest
