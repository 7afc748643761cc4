"""Runs in phases that train different weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.errors import ConfigError
from dovetail.federated.algorithms import OwnPhaseStrategy
from dovetail.trainers import CompiledTrainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import Phase, TrainingContext
from dovetail.trainers.strategies import (
    CompositeUpdateStrategy,
    ModelUpdateStrategy,
    SGDOptimizerStrategy,
    StateTrackingUpdateStrategy,
    StepLRSchedulerStrategy,
)
from dovetail.units import Batches, Epochs

DATA = (torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3)


class Parts(ModelUpdateStrategy):
    """So many epochs of each part, whatever was asked for."""

    def __init__(self, *phases: Phase) -> None:
        self.parts, self.heard = phases, []

    def phases(self, epochs: int, context: TrainingContext) -> Sequence[Phase]:
        return (*self.parts, Phase(epochs, "rest"))

    def on_phase_start(self, phase: Phase, context: TrainingContext) -> None:
        self.heard.append((context.progress.epoch, phase.name, context.run.is_detached))


def trained(strategy: Any, **options: Any) -> ComposableTrainer:
    torch.manual_seed(0)
    options = {"optimizer_strategy": SGDOptimizerStrategy(lr=0.1, momentum=0.9), "num_epochs": 2, **options}
    model = nn.Linear(4, 3)
    return ComposableTrainer(model, model_update_strategy=strategy, batch_size=4, verbose=False, **options)


def test_phases_run_in_order_and_the_run_is_the_sum_of_their_lengths() -> None:
    parts = Parts(Phase(3, "first"), Phase(1, "own", is_detached=True))
    trainer = trained(parts)
    trainer.fit(DATA)
    assert parts.heard == [(0, "first", False), (3, "own", True), (4, "rest", False)]
    assert trainer.context.progress.epoch == 6


def test_a_phase_of_zero_epochs_is_skipped() -> None:
    parts = Parts(Phase(0, "never"))
    trained(parts).fit(DATA, max_length=Epochs(3))
    assert parts.heard == [(0, "rest", False)]


def test_a_run_with_phases_must_have_a_length_in_epochs() -> None:
    with pytest.raises(ConfigError, match="phases of epochs; give a number of epochs, not"):
        trained(Parts(Phase(1))).fit(DATA, max_length=Batches(7))


def test_two_strategies_with_phases_are_rejected() -> None:
    both = CompositeUpdateStrategy([Parts(Phase(1)), Parts(Phase(2))])
    with pytest.raises(ConfigError, match="both divide a run into phases; use one of them"):
        trained(both).fit(DATA)


def test_a_composite_update_calls_the_phases_of_its_part() -> None:
    parts = Parts(Phase(1, "first"))
    trained(CompositeUpdateStrategy([StateTrackingUpdateStrategy(), parts])).fit(DATA)
    assert [name for _, name, _ in parts.heard] == ["first", "rest"]


@dataclass(eq=False)
class Elsewhere(OwnPhaseStrategy):
    """Two epochs from zero weights."""

    ended_with: dict[str, Tensor] = field(default_factory=dict)

    def own_epochs(self, context: TrainingContext) -> int:
        return 2

    def own_start(self, context: TrainingContext) -> dict[str, Tensor]:
        return {name: torch.zeros_like(value) for name, value in self.anchor["start"].items()}

    def own_end(self, context: TrainingContext) -> None:
        assert context.model is not None
        self.ended_with = {name: value.clone() for name, value in context.model.state_dict().items()}


def test_the_sent_model_is_unchanged_by_a_local_phase() -> None:
    schedule = {"lr_scheduler_strategy": StepLRSchedulerStrategy(step_size=1, gamma=0.5)}
    plain, with_own = trained(None, **schedule), trained(Elsewhere(), **schedule)
    plain.fit(DATA)
    with_own.fit(DATA)
    assert all(
        torch.equal(value, plain.model.state_dict()[name]) for name, value in with_own.model.state_dict().items()
    )


def test_a_local_phase_has_a_separate_optimizer_and_schedule() -> None:
    schedule = {"lr_scheduler_strategy": StepLRSchedulerStrategy(step_size=1, gamma=0.5)}
    strategy = Elsewhere()
    trained(strategy, **schedule).fit(DATA)
    alone = trained(None, **schedule)
    with torch.no_grad():
        for value in alone.model.parameters():
            value.zero_()
    alone.fit(DATA)
    assert all(torch.equal(value, alone.model.state_dict()[name]) for name, value in strategy.ended_with.items())


def test_a_run_in_phases_is_not_compiled_as_one_step() -> None:
    trainer = CompiledTrainer(trained(Elsewhere()), mode="step")
    with pytest.warns(UserWarning, match="the run has phases, which train different parameters"):
        trainer.fit(DATA)


def test_the_phase_is_computed_from_the_epoch() -> None:
    run = TrainingContext().run
    run.phases = (Phase(2, "a"), Phase(1, "b"))
    found = [(run.phase_at(epoch).name, run.starts_phase(epoch)) for epoch in range(4)]
    assert found == [("a", True), ("a", False), ("b", True), ("b", False)]


def test_detached_state_is_restored_after_the_block() -> None:
    context = TrainingContext()
    with context.run.detached():
        assert context.run.is_detached
    assert not context.run.is_detached
