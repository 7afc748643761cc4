"""All kinds of strategy combine: every pair of choices is trained, and compared with plain torch code."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, make_problem
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import TensorDataset

from dovetail import Batches, Epochs
from dovetail.callbacks import Callback
from dovetail.data import DataLoader
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    CompositeLossStrategy,
    CompositeUpdateStrategy,
    CosineAnnealingLRSchedulerStrategy,
    CrossEntropyLossStrategy,
    CustomBackwardStepStrategy,
    CustomCollateFnDataLoaderStrategy,
    DefaultDataLoaderStrategy,
    DefaultTrainingStepStrategy,
    DynamicBatchSizeDataLoaderStrategy,
    ExponentialLRSchedulerStrategy,
    GradientAccumulationStepStrategy,
    GradientClippingOptimizerStrategy,
    GradientClippingStepStrategy,
    L2RegularizationStrategy,
    MixedPrecisionStepStrategy,
    MultipleForwardPassStepStrategy,
    NoOpUpdateStrategy,
    NoSchedulerStrategy,
    ParameterGroupOptimizerStrategy,
    PrefetchDataLoaderStrategy,
    ReduceLROnPlateauSchedulerStrategy,
    RMSpropOptimizerStrategy,
    SGDOptimizerStrategy,
    ShuffleDataLoaderStrategy,
    StateTrackingUpdateStrategy,
    StepLRSchedulerStrategy,
    ValidateBeforeStepStrategy,
    WarmupSchedulerStrategy,
    compose_steps,
)

EPOCHS = 2
BATCH_SIZE = 8
SEED = 5
# Five batches of 8 and one of 6: the last one is short.
NUM_SAMPLES = 46

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Choice:
    """The arguments of the trainer, rebuilt for each, and their hand-written meaning."""

    strategy: Callable[[], Any]
    by_hand: Any


@dataclass(frozen=True)
class Step:
    """The hand-written meaning of a step strategy."""

    window: int = 1
    dtype: torch.dtype | None = None
    clip: float | None = None
    passes: int = 1


# ------------------------------------------------------------------ losses: a function of outputs, labels and the model


def squares(model: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()


LOSSES = {
    "cross_entropy": Choice(CrossEntropyLossStrategy, lambda outputs, y, model: functional.cross_entropy(outputs, y)),
    "smoothed": Choice(
        lambda: CrossEntropyLossStrategy(label_smoothing=0.1),
        lambda outputs, y, model: functional.cross_entropy(outputs, y, label_smoothing=0.1),
    ),
    "composite": Choice(
        lambda: CompositeLossStrategy([CrossEntropyLossStrategy(), (L2RegularizationStrategy(weight=0.5), 0.25)]),
        lambda outputs, y, model: functional.cross_entropy(outputs, y) + 0.25 * (0.5 * squares(model)),
    ),
    "callable": Choice(
        lambda: functional.multi_margin_loss, lambda outputs, y, model: functional.multi_margin_loss(outputs, y)
    ),
    "name": Choice(lambda: "CrossEntropyLoss", lambda outputs, y, model: nn.CrossEntropyLoss()(outputs, y)),
}

# ------------------------------------------------------------------ optimizers: how to make one, and its own clipping


def groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters()), "lr": 0.2}, {"params": list(model[3].parameters())}]


OPTIMIZERS = {
    "sgd": Choice(
        lambda: SGDOptimizerStrategy(lr=0.1, momentum=0.9),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None),
    ),
    "adam": Choice(
        lambda: AdamOptimizerStrategy(lr=0.01), (lambda model: torch.optim.Adam(model.parameters(), lr=0.01), None)
    ),
    "partial": Choice(
        lambda: partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1), None),
    ),
    "rmsprop": Choice(
        lambda: RMSpropOptimizerStrategy(lr=0.01),
        (lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01), None),
    ),
    "groups": Choice(
        lambda: ParameterGroupOptimizerStrategy(torch.optim.SGD, groups, default_lr=0.1),
        (lambda model: torch.optim.SGD(groups(model), lr=0.1), None),
    ),
    "clipped": Choice(
        lambda: GradientClippingOptimizerStrategy(SGDOptimizerStrategy(lr=0.1), max_norm=0.2),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 0.2),
    ),
}

# ------------------------------------------------------------------ steps


def differentiate(model: nn.Module, loss: Tensor, context: TrainingContext) -> None:
    context.backward(loss)


def accumulation() -> GradientAccumulationStepStrategy:
    return GradientAccumulationStepStrategy(accumulation_steps=2)


def clipping() -> GradientClippingStepStrategy:
    return GradientClippingStepStrategy(max_norm=0.1)


def mixed(precision: Any) -> MixedPrecisionStepStrategy:
    return MixedPrecisionStepStrategy(precision=precision)


STEPS = {
    "default": Choice(DefaultTrainingStepStrategy, Step()),
    "accumulation": Choice(lambda: GradientAccumulationStepStrategy(accumulation_steps=3), Step(window=3)),
    "bf16": Choice(lambda: mixed("bf16"), Step(dtype=torch.bfloat16)),
    "fp16": Choice(lambda: mixed("fp16"), Step(dtype=torch.float16)),
    "clipping": Choice(clipping, Step(clip=0.1)),
    "passes": Choice(lambda: MultipleForwardPassStepStrategy(2), Step(passes=2)),
    "validate": Choice(lambda: ValidateBeforeStepStrategy(raise_on_error=True), Step()),
    "own_backward": Choice(lambda: CustomBackwardStepStrategy(differentiate), Step()),
    "accumulation-clipping": Choice(lambda: [accumulation(), clipping()], Step(window=2, clip=0.1)),
    "fp16-accumulation-clipping": Choice(
        lambda: compose_steps(mixed("fp16"), accumulation(), clipping()),
        Step(window=2, dtype=torch.float16, clip=0.1),
    ),
    "clipping-bf16-passes": Choice(
        lambda: compose_steps(clipping(), mixed("bf16"), MultipleForwardPassStepStrategy(2)),
        Step(dtype=torch.bfloat16, clip=0.1, passes=2),
    ),
    "validate-accumulation-bf16": Choice(
        lambda: compose_steps(ValidateBeforeStepStrategy(), accumulation(), mixed("bf16")),
        Step(window=2, dtype=torch.bfloat16),
    ),
    "accumulation-fp16-own_backward": Choice(
        lambda: compose_steps(accumulation(), mixed("fp16"), CustomBackwardStepStrategy(differentiate)),
        Step(window=2, dtype=torch.float16),
    ),
}

# ------------------------------------------------------------------ schedules: a scheduler, and what its steps follow


class WarmupByHand:
    """A line from 0.01 to the rate in three updates, then half the rate every two."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.updates = optimizer, -1
        self.targets = [group["lr"] for group in optimizer.param_groups]
        self.step()

    def step(self) -> None:
        self.updates += 1
        for group, target in zip(self.optimizer.param_groups, self.targets, strict=True):
            warm = 0.01 + (target - 0.01) * (self.updates / 3)
            group["lr"] = warm if self.updates < 3 else target * 0.5 ** ((self.updates - 3) // 2)


SCHEDULES = {
    "none": Choice(NoSchedulerStrategy, (lambda optimizer: None, "epoch")),
    "step": Choice(
        lambda: StepLRSchedulerStrategy(step_size=1, gamma=0.5),
        (lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5), "epoch"),
    ),
    "cosine": Choice(
        lambda: CosineAnnealingLRSchedulerStrategy(T_max=7, interval="update"),
        (lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7), "update"),
    ),
    "plateau": Choice(
        lambda: ReduceLROnPlateauSchedulerStrategy(patience=0, factor=0.5, threshold=0.5),
        (lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5), "epoch"),
    ),
    "warm-up": Choice(
        lambda: WarmupSchedulerStrategy(
            3, 0.01, StepLRSchedulerStrategy(step_size=2, gamma=0.5, interval="update"), interval="update"
        ),
        (WarmupByHand, "update"),
    ),
    "batch": Choice(
        lambda: ExponentialLRSchedulerStrategy(gamma=0.9, interval="batch"),
        (lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9), "batch"),
    ),
    "partial": Choice(
        lambda: partial(lr_scheduler.StepLR, step_size=1),
        (lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=1), "epoch"),
    ),
}

# ------------------------------------------------------------------ updates: what follows every real update


def shrink(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)


def shrink_in_context(context: TrainingContext) -> None:
    assert context.model is not None
    shrink(context.model)


UPDATES = {
    "none": Choice(NoOpUpdateStrategy, lambda model: None),
    "tracking": Choice(StateTrackingUpdateStrategy, lambda model: None),
    "callable": Choice(lambda: shrink_in_context, shrink),
    "composite": Choice(lambda: [StateTrackingUpdateStrategy(), shrink_in_context], shrink),
    "nested": Choice(
        lambda: CompositeUpdateStrategy([CompositeUpdateStrategy([NoOpUpdateStrategy()])]), lambda model: None
    ),
}

# ------------------------------------------------------------------ loaders: the batches of an epoch


def in_order(x: Tensor, y: Tensor, epoch: int, size: int = BATCH_SIZE) -> list[Batch]:
    return list(zip(x.split(size), y.split(size), strict=True))  # type: ignore[no-untyped-call]


def shuffled(x: Tensor, y: Tensor, epoch: int) -> list[Batch]:
    loader = DataLoader(TensorDataset(x, y), BATCH_SIZE, True, seed=SEED)
    loader.set_epoch(epoch)
    return [(x, y) for x, y in loader]


def stacked(samples: Sequence[Batch]) -> Batch:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


LOADERS = {
    "default": Choice(DefaultDataLoaderStrategy, in_order),
    "drop_last": Choice(
        lambda: DefaultDataLoaderStrategy(drop_last=True), lambda x, y, epoch: in_order(x[:40], y[:40], epoch)
    ),
    "collate": Choice(lambda: CustomCollateFnDataLoaderStrategy(stacked), in_order),
    "prefetch": Choice(PrefetchDataLoaderStrategy, in_order),
    "shuffle": Choice(ShuffleDataLoaderStrategy, shuffled),
    "dynamic": Choice(
        lambda: DynamicBatchSizeDataLoaderStrategy(4, adjust_fn=lambda context: 4 * context.current_epoch),
        lambda x, y, epoch: in_order(x, y, epoch, size=4 * (epoch + 1)),
    ),
}

KINDS: dict[str, dict[str, Choice]] = {
    "loss": LOSSES,
    "optimizer": OPTIMIZERS,
    "training_step": STEPS,
    "lr_scheduler": SCHEDULES,
    "model_update": UPDATES,
    "data_loader": LOADERS,
}

Row = tuple[str, ...]
Pair = tuple[int, str, int, str]


def pairs_of(row: Row) -> set[Pair]:
    return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}


def all_pairs(kinds: Sequence[Sequence[str]], seed: int) -> Iterator[Row]:
    """Rows that together hold every pair of choices: of fifty random ones around a missing pair, the best."""
    generator = random.Random(seed)
    missing = {
        (i, one, j, other)
        for i, j in itertools.combinations(range(len(kinds)), 2)
        for one, other in itertools.product(kinds[i], kinds[j])
    }
    while missing:
        i, one, j, other = min(missing)
        candidates = []
        for _ in range(50):
            row = [generator.choice(choices) for choices in kinds]
            row[i], row[j] = one, other
            candidates.append(tuple(row))
        best = max(candidates, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        yield best


ROWS = list(all_pairs([list(choices) for choices in KINDS.values()], seed=0))


def chosen(row: Row) -> dict[str, Choice]:
    return {kind: KINDS[kind][name] for kind, name in zip(KINDS, row, strict=True)}


# ------------------------------------------------------------------ training, in two ways


class Saved(Callback):
    def __init__(self) -> None:
        self.paths: list[Path] = []

    def on_checkpoint(self, context: TrainingContext, path: Path) -> None:
        self.paths.append(path)


def data_of(problem: Problem) -> Batch:
    return problem.x[:NUM_SAMPLES], problem.y[:NUM_SAMPLES]


def make_trainer(row: Row, problem: Problem, **options: Any) -> ComposableTrainer:
    strategies = {f"{kind}_strategy": choice.strategy() for kind, choice in chosen(row).items()}
    return ComposableTrainer(
        problem.model(), device="cpu", batch_size=BATCH_SIZE, seed=SEED, verbose=False, **strategies, **options
    )


def by_strategies(row: Row, problem: Problem, resume: Path | None = None) -> ComposableTrainer:
    trainer = make_trainer(row, problem)
    data = data_of(problem)
    trainer.fit(data, data, max_length=Epochs(EPOCHS), resume=resume)
    return trainer


def by_hand(row: Row, problem: Problem) -> tuple[nn.Module, Optimizer]:
    """The loop that one would write for these choices, without the library."""
    choices = {kind: choice.by_hand for kind, choice in chosen(row).items()}
    criterion, step, after_update = choices["loss"], choices["training_step"], choices["model_update"]
    make_optimizer, clip_of_optimizer = choices["optimizer"]
    make_scheduler, interval = choices["lr_scheduler"]
    model = problem.model()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=step.dtype is torch.float16)
    x, y = data_of(problem)
    batches_owed = 0

    def autocast() -> Any:
        return nullcontext() if step.dtype is None else torch.autocast("cpu", step.dtype)

    for epoch in range(EPOCHS):
        model.train()
        batches = choices["data_loader"](x, y, epoch)
        for start in range(0, len(batches), step.window):
            window = batches[start : start + step.window]
            total = sum(len(labels) for _, labels in window)
            optimizer.zero_grad()
            for examples, labels in window:
                with autocast():
                    losses = [criterion(model(examples), labels, model) for _ in range(step.passes)]
                loss = sum(losses) / len(losses)
                scaler.scale(loss * (len(labels) / total)).backward()
            scaler.unscale_(optimizer)
            for norm in (clip_of_optimizer, step.clip):
                if norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), norm)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            batches_owed += len(window)
            if scaler.get_scale() < scale:
                continue
            if interval != "epoch":
                for _ in range(batches_owed if interval == "batch" else 1):
                    scheduler.step()
            batches_owed = 0
            after_update(model)
        if scheduler is not None and interval == "epoch":
            takes_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([validated(model, x, y, criterion, autocast)] if takes_metric else []))
    return model, optimizer


def validated(model: nn.Module, x: Tensor, y: Tensor, criterion: Any, autocast: Callable[[], Any]) -> float:
    model.eval()
    with torch.no_grad(), autocast():
        sums = [float(criterion(model(part), labels, model)) * len(labels) for part, labels in in_order(x, y, 0)]
    return sum(sums) / len(y)


def rates(optimizer: Optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def assert_close(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float, atol: float) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol)


# ------------------------------------------------------------------ tests


def test_the_rows_of_the_matrix_hold_every_pair() -> None:
    covered = set().union(*map(pairs_of, ROWS))
    names = [list(choices) for choices in KINDS.values()]
    sizes = [len(choices) for choices in names]
    assert len(covered) == sum(one * other for one, other in itertools.combinations(sizes, 2))


@pytest.mark.parametrize(("kind", "meanings"), list(zip(KINDS, (4, 6, 10, 7, 2, 4), strict=True)))
def test_different_choices_give_different_weights(problem: Problem, kind: str, meanings: int) -> None:
    first = [next(iter(choices)) for choices in KINDS.values()]
    found = set()
    for name in KINDS[kind]:
        model, optimizer = by_hand(
            tuple(name if it == kind else of for it, of in zip(KINDS, first, strict=True)), problem
        )
        found.add((tuple(nn.utils.parameters_to_vector(model.parameters()).tolist()), *rates(optimizer)))
    assert len(found) == meanings


@pytest.mark.parametrize("row", ROWS, ids="/".join)
def test_strategies_train_as_plain_torch(problem: Problem, row: Row) -> None:
    trainer = by_strategies(row, problem)
    model, optimizer = by_hand(row, problem)
    step = chosen(row)["training_step"].by_hand
    # A window is summed in another order here and there; low precision makes that visible earlier.
    exact = {"rtol": 0.0, "atol": 0.0} if step.window == 1 else {"rtol": 1e-4, "atol": 1e-6}
    tolerances = exact if step.window == 1 or step.dtype is None else {"rtol": 1e-2, "atol": 1e-3}
    assert_close(trainer.model.state_dict(), model.state_dict(), **tolerances)
    assert rates(trainer.context.optimizers[0]) == pytest.approx(rates(optimizer), rel=1e-12)


@pytest.mark.parametrize("row", ROWS, ids="/".join)
def test_strategies_resume_bit_for_bit(problem: Problem, row: Row, tmp_path: Path) -> None:
    saved = Saved()
    whole = make_trainer(row, problem, callbacks=[saved], checkpoint_dir=tmp_path, save_hist=False, save_every=0)
    data = data_of(problem)
    whole.fit(data, data, max_length=Epochs(EPOCHS), checkpoint_period=Batches(4))
    resumed = by_strategies(row, problem, resume=saved.paths[0])
    assert saved.paths[0] != saved.paths[-1]
    assert resumed.history.losses == whole.history.losses
    assert_close(resumed.model.state_dict(), whole.model.state_dict(), rtol=0.0, atol=0.0)


def test_every_single_choice_learns_the_problem() -> None:
    problem = make_problem()
    first = tuple(next(iter(choices)) for choices in KINDS.values())
    start = validated(problem.model(), *data_of(problem), LOSSES["cross_entropy"].by_hand, nullcontext)
    for place, choices in enumerate(KINDS.values()):
        for name in choices:
            model = by_strategies((*first[:place], name, *first[place + 1 :]), problem).model
            end = validated(model, *data_of(problem), LOSSES["cross_entropy"].by_hand, nullcontext)
            assert end < start, f"{name}: the loss went from {start:.3f} to {end:.3f}"
