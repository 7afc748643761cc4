"""Base class of PyTorch trials: a model, its optimizers and its data in one class."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dovetail.data import batch_length
from dovetail.errors import ConfigError, misspelled_methods
from dovetail.pytorch.reducer import Reducer

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.pytorch.callback import PyTorchCallback
    from dovetail.pytorch.context import PyTorchTrialContext
    from dovetail.pytorch.data import TorchData


class PyTorchTrial(ABC):
    """Base class of trials: a model, its optimizers, its data and the computation for a batch.

    The constructor wraps models and optimizers with the context. `train_batch` computes a loss and calls
    `context.backward(loss)` and `context.step_optimizer(optimizer)`. All other methods are optional.

    Args:
        context: Contains the hyperparameters, wraps models and optimizers, and makes gradient steps.

    Example:
        >>> import torch, dovetail
        >>> from dovetail import pytorch
        >>> class Line(pytorch.PyTorchTrial):
        ...     def __init__(self, context):
        ...         self.context = context
        ...         self.model = context.wrap_model(torch.nn.Linear(1, 1))
        ...         lr = context.get_hparam("lr")
        ...         self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=lr))
        ...     def train_batch(self, batch, epoch_idx, batch_idx):
        ...         x, y = batch
        ...         loss = torch.nn.functional.mse_loss(self.model(x), y)
        ...         self.context.backward(loss)
        ...         self.context.step_optimizer(self.optimizer)
        ...         return {"loss": loss}
        ...     def evaluate_batch(self, batch):
        ...         x, y = batch
        ...         return {"loss": torch.nn.functional.mse_loss(self.model(x), y)}
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> data = pytorch.DataLoader(torch.utils.data.TensorDataset(x, 2 * x + 1), batch_size=8)
        >>> context = pytorch.init(hparams={"lr": 0.2}, verbose=False, checkpoint_dir=None)
        >>> trial = context.build_trial(Line)
        >>> context.fit(trial, data, data, max_length=dovetail.Epochs(50))["loss"] < 1e-3
        True
    """

    made_with: PyTorchTrialContext

    def __new__(cls, context: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Store the context, so that the trainer finds the models and optimizers that the trial wraps."""
        # In `__new__`, because constructors of Determined's trials do not call `super().__init__`.
        trial = super().__new__(cls)
        trial.made_with = context
        return trial

    @abstractmethod
    def __init__(self, context: PyTorchTrialContext) -> None: ...

    @abstractmethod
    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Tensor | Mapping[str, Any]:
        """Train on one batch and return its loss, or metrics by name.

        If a step calls neither `context.backward` nor `context.step_optimizer`, the loop does both. The step must then
        return a loss.

        Args:
            batch: The batch, already on the device.
            epoch_idx: The index of the current epoch, from 0.
            batch_idx: Number of batches trained before this one.
        """

    def build_training_data_loader(self) -> Iterable[Any]:
        """Return the training batches; not called if the caller passes training data."""
        raise NotImplementedError

    def build_validation_data_loader(self) -> Iterable[Any]:
        """Return the validation batches; not called if the caller passes validation data."""
        raise NotImplementedError

    def evaluate_batch(self, batch: TorchData) -> Mapping[str, Any]:
        """Return the metrics of one validation batch. It may take the index of the batch as a second argument."""
        raise NotImplementedError

    def evaluate_full_dataset(self, data_loader: Iterable[Any]) -> Mapping[str, Any]:
        """Return the metrics of all validation data, instead of `evaluate_batch`; called in one process only."""
        raise NotImplementedError

    def evaluation_reducer(self) -> Reducer | Mapping[str, Reducer]:
        """Return the rule that reduces metrics of batches, for all or by name. The default is a mean over samples."""
        return Reducer.AVG

    def predict_batch(self, batch: TorchData) -> Any:
        """Return the predictions for one batch. Without it, `context.predict` uses `evaluate_batch`."""
        raise NotImplementedError

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return callbacks by name."""
        return {}

    def get_batch_length(self, batch: TorchData) -> int:
        """Return the number of samples in a batch; override it for batches of another structure."""
        return batch_length(batch)


def defines(trial: PyTorchTrial, *methods: str) -> bool:
    """Return whether a trial has its own version of any of these methods."""
    return any(getattr(type(trial), method) is not getattr(PyTorchTrial, method) for method in methods)


def check_methods(trial: PyTorchTrial) -> None:
    """Raise if a trial has two ways to validate, and warn of methods that are never called."""
    kind = type(trial)
    if defines(trial, "evaluate_batch") and defines(trial, "evaluate_full_dataset"):
        raise ConfigError(f"{kind.__name__} has both evaluate_batch and evaluate_full_dataset: expected one of them")
    for name, nearest in misspelled_methods(kind, PyTorchTrial):
        warnings.warn(f"{kind.__name__}.{name} is never called: did you mean {nearest}?", UserWarning, stacklevel=2)
    # The reducer combines metrics of batches, which this trial does not have.
    if defines(trial, "evaluate_full_dataset") and defines(trial, "evaluation_reducer"):
        warnings.warn(
            f"{kind.__name__}.evaluation_reducer is never called, because evaluate_full_dataset returns final metrics",
            UserWarning,
            stacklevel=2,
        )


def takes_index(trial: PyTorchTrial) -> bool:
    """Return whether `evaluate_batch` takes the index of the batch as a second argument."""
    parameters = inspect.signature(trial.evaluate_batch).parameters.values()
    positional = [it for it in parameters if it.kind in (it.POSITIONAL_ONLY, it.POSITIONAL_OR_KEYWORD)]
    # `*args` counts as well: a decorator often has this signature.
    return len(positional) > 1 or any(it.kind is it.VAR_POSITIONAL for it in parameters)
