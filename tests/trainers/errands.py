"""Classes that a training process can import, for the tests of `dovetail.trainers.processes`."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor

from dovetail.callbacks import Callback
from dovetail.runtime.relay import arithmetic
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import LossCriterionStrategy, ModelUpdateStrategy


class Drift(ModelUpdateStrategy):
    """Sends how far the weights have moved, and keeps no state: only the process that trained can say it."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []

    def on_train_start(self, context: Any) -> None:
        self._before = [it.detach().clone() for it in context.model.parameters()]
        context.state["computes"] = [torch.get_num_threads(), *arithmetic().values()]

    def get_update_payload(self, context: Any) -> dict[str, Any]:
        return {"drift": [it.detach() - old for it, old in zip(context.model.parameters(), self._before, strict=True)]}


class LifeCycle(ModelUpdateStrategy):
    """Writes down which process tears it down."""

    def __init__(self, path: str) -> None:
        self.path = path

    def teardown(self, context: Any) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


class SpeakingTrainer(ComposableTrainer):
    """Has a custom hook, which plato's users write as a method."""

    def train_epoch_end(self, config: Any) -> None:
        self.context.history.update_metric("spoken", float(self.context.progress.epoch))


class FailsAtBatch(LossCriterionStrategy):
    """A loss that is refused at a certain batch."""

    def __init__(self, batch: int, error: Exception) -> None:
        self.batch, self.error = batch, error

    def compute_loss(self, outputs: Any, labels: Any, context: Any) -> Tensor:
        if context.progress.batches == self.batch:
            raise self.error
        return torch.nn.functional.cross_entropy(outputs, labels)


class KillsItself(Callback):
    """Dies in the middle of its training."""

    def on_step_end(self, context: Any, output: Any) -> None:
        if context.progress.batches == 2:
            os.kill(os.getpid(), signal.SIGKILL)


class RecordsProcess(Callback):
    """Records the id of the process that trains."""

    def on_train_start(self, context: Any) -> None:
        context.state["pid"] = os.getpid()


class PressesControlC(Callback):
    """Interrupts the waiting process, and continues training; records how it ended."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_step_end(self, context: Any, output: Any) -> None:
        if context.progress.batches == 1:
            os.kill(os.getppid(), signal.SIGINT)

    def on_exception(self, context: Any, error: BaseException) -> None:
        with open(self.path, "w") as file:
            file.write(repr(error))
