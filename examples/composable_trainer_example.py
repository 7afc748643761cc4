"""Six trainers without a subclass: loss, optimizer, step, schedule and data loader are separate strategies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dovetail.data import digits
from dovetail.trainers import TrainingContext
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    CosineAnnealingLRSchedulerStrategy,
    CrossEntropyLossStrategy,
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    LossCriterionStrategy,
    MixedPrecisionStepStrategy,
    ShuffleDataLoaderStrategy,
    StateTrackingUpdateStrategy,
)

EPOCHS = 6


def network() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def composed(**strategies: Any) -> ComposableTrainer:
    return ComposableTrainer(model=network, num_epochs=EPOCHS, batch_size=32, seed=0, verbose=False, **strategies)


def with_defaults() -> ComposableTrainer:
    """Train with the defaults: cross entropy, SGD, a plain step, a constant learning rate."""
    return composed()


def with_loss_and_optimizer() -> ComposableTrainer:
    return composed(
        loss_strategy=CrossEntropyLossStrategy(label_smoothing=0.1),
        optimizer_strategy=AdamOptimizerStrategy(lr=3e-3, weight_decay=1e-4),
    )


def with_several_strategies() -> ComposableTrainer:
    """Accumulate four batches of 32, so that every update uses the gradient of 128 samples."""
    return composed(
        loss_strategy=CrossEntropyLossStrategy(),
        optimizer_strategy=AdamOptimizerStrategy(lr=1e-2),
        training_step_strategy=[GradientAccumulationStepStrategy(4), GradientClippingStepStrategy(max_norm=5.0)],
        lr_scheduler_strategy=CosineAnnealingLRSchedulerStrategy(T_max=EPOCHS),
        model_update_strategy=StateTrackingUpdateStrategy(),
        data_loader_strategy=ShuffleDataLoaderStrategy(),
    )


class WeightedLossWithL2(LossCriterionStrategy):
    """Cross entropy with class weights, plus an L2 penalty on the model's weights."""

    is_classification = True

    def __init__(self, class_weights: Tensor, l2: float) -> None:
        self.class_weights = class_weights
        self.l2 = l2

    def setup(self, context: TrainingContext) -> None:
        self.class_weights = self.class_weights.to(context.device)

    def compute_loss(self, outputs: Any, labels: Any, context: TrainingContext) -> Tensor:
        assert context.model is not None
        squares = torch.stack([parameter.square().sum() for parameter in context.model.parameters()])
        return nn.functional.cross_entropy(outputs, labels, self.class_weights) + self.l2 * squares.sum()


def with_own_strategy() -> ComposableTrainer:
    # Eights and nines are confused most often, so they get larger weights.
    weights = torch.tensor([1.0] * 8 + [2.0] * 2)
    return composed(loss_strategy=WeightedLossWithL2(weights, l2=1e-4), optimizer_strategy=AdamOptimizerStrategy(3e-3))


def with_mixed_precision() -> ComposableTrainer:
    """Train in the precision that is fastest on the device: bfloat16 or float16 on a GPU, float32 on a CPU."""
    return composed(
        optimizer_strategy=AdamOptimizerStrategy(lr=3e-3), training_step_strategy=MixedPrecisionStepStrategy()
    )


def with_bfloat16() -> ComposableTrainer:
    """Train in bfloat16 on any device."""
    return composed(
        optimizer_strategy=AdamOptimizerStrategy(lr=3e-3),
        training_step_strategy=MixedPrecisionStepStrategy(precision="bf16"),
    )


EXAMPLES = {
    "1. defaults": with_defaults,
    "2. custom loss and optimizer": with_loss_and_optimizer,
    "3. several strategies": with_several_strategies,
    "4. custom strategy": with_own_strategy,
    "5. mixed precision, automatic": with_mixed_precision,
    "5. mixed precision, bfloat16": with_bfloat16,
}


def main() -> None:
    train, test = digits(split=(0.8, 0.2))
    accuracies = []
    for name, make in EXAMPLES.items():
        # The constructor sets the strategies up, and the end of the block tears them down.
        with make() as trainer:
            losses = trainer.fit(train).get_metric_values("train_loss")
            accuracies.append(trainer.test(test))
        updates = trainer.context.progress.updates
        print(
            f"{name:30} loss {losses[0]:.3f} -> {losses[-1]:.3f}, accuracy {accuracies[-1]:.1%}, {updates} updates",
            flush=True,
        )
        assert losses[-1] < losses[0]
        assert accuracies[-1] > 0.6

    print(f"result: {len(accuracies)} trainers, no subclass, test accuracy up to {max(accuracies):.1%}")


if __name__ == "__main__":
    main()
