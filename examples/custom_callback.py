"""Custom callbacks that measure gradients, write metrics into the history, and stop training."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from dovetail.callbacks import Callback, LambdaCallback
from dovetail.data import digits
from dovetail.trainers import Trainer, TrainingContext


class GradientNorm(Callback):
    """Record the mean gradient norm of each epoch, and stop training when it is almost zero."""

    def __init__(self, stop_below: float) -> None:
        self.stop_below = stop_below
        self.norms: list[torch.Tensor] = []

    def on_gradients(self, context: TrainingContext, optimizer: Optimizer) -> None:
        parameters = optimizer.param_groups[0]["params"]
        self.norms.append(nn.utils.get_total_norm([parameter.grad for parameter in parameters]))

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        mean = torch.stack(self.norms).mean().item()
        self.norms.clear()
        context.history.update_metric("gradient_norm", mean)
        if mean < self.stop_below:
            context.stop(f"the gradient norm is {mean:.3f}")

    # A checkpoint contains this state, so that a resumed run gives exactly the same result.

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.norms = list(state["norms"])


def main() -> None:
    train, valid, test = digits()
    trainer = Trainer(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        callbacks=[
            GradientNorm(stop_below=0.1),
            # For one or two lines, a function is enough.
            LambdaCallback(on_train_start=lambda context: print(f"training on {context.device}")),
        ],
        num_epochs=50,
        seed=0,
    )
    history = trainer.fit(train, valid)

    norms = history.get_metric_values("gradient_norm")
    accuracy = trainer.evaluate(test)["accuracy"]
    print(f"result: gradient norm from {norms[0]:.2f} to {norms[-1]:.2f}, test accuracy {accuracy:.1%}")
    assert norms[-1] < 0.1 < norms[0]
    assert accuracy > 0.93


if __name__ == "__main__":
    main()
