"""Update strategies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from problem import Problem

from dovetail import Epochs
from dovetail.errors import ConfigError
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import (
    CompositeUpdateStrategy,
    GradientAccumulationStepStrategy,
    ModelUpdateStrategy,
    NoOpUpdateStrategy,
    StateTrackingUpdateStrategy,
)


class Sends(ModelUpdateStrategy):
    """Records its calls in a shared list, and sends a payload."""

    def __init__(self, name: str, heard: list[str], payload: dict[str, Any]) -> None:
        self.name, self.heard, self.payload = name, heard, payload

    def before_step(self, context: TrainingContext) -> None:
        self.heard.append(f"{self.name} before")

    def after_step(self, context: TrainingContext) -> None:
        self.heard.append(f"{self.name} after")

    def on_train_start(self, context: TrainingContext) -> None:
        self.heard.append(f"{self.name} start")

    def get_update_payload(self, context: TrainingContext) -> dict[str, Any]:
        return self.payload

    def __repr__(self) -> str:
        return f"Sends({self.name})"


def test_the_update_strategy_none_sends_nothing(context: TrainingContext) -> None:
    assert NoOpUpdateStrategy().get_update_payload(context) == {}


def test_tracking_counts_updates_not_batches(problem: Problem, train: Callable[..., ComposableTrainer]) -> None:
    strategy = StateTrackingUpdateStrategy()
    train(
        problem.model(),
        problem.batches[:10],
        epochs=2,
        training_step_strategy=GradientAccumulationStepStrategy(4),
        model_update_strategy=strategy,
    )
    assert (strategy.total_steps, strategy.epoch_steps, strategy.round_number) == (6, 3, 1)


def test_update_tracking_uses_the_round_of_the_federation(context: TrainingContext) -> None:
    strategy = StateTrackingUpdateStrategy()
    context.current_round = 7
    strategy.on_train_start(context)
    assert strategy.get_update_payload(context)["round_number"] == 7


def test_update_tracking_counts_the_runs_of_a_trainer_without_a_federation(context: TrainingContext) -> None:
    strategy = StateTrackingUpdateStrategy()
    for context.run.id in ("a", "b"):
        strategy.on_train_start(context)
    assert strategy.round_number == 2


def test_update_tracking_continues_after_a_checkpoint_in_the_same_round(problem: Problem, tmp_path: Path) -> None:
    def trainer() -> ComposableTrainer:
        return ComposableTrainer(problem.model(), verbose=False, model_update_strategy=StateTrackingUpdateStrategy())

    first, second = trainer(), trainer()
    first.fit(problem.batches, max_length=Epochs(1))
    first.save_checkpoint(tmp_path / "half")
    second.load_checkpoint(tmp_path / "half")
    second.fit(problem.batches, max_length=Epochs(2))
    payload = second.strategies.model_update.get_update_payload(second.context)
    assert payload == {"total_steps": 24, "epoch_steps": 12, "round_number": 1}


def test_a_composite_update_calls_its_parts_in_order_and_joins_their_payloads(context: TrainingContext) -> None:
    heard: list[str] = []
    composite = CompositeUpdateStrategy([Sends("a", heard, {"x": 1}), Sends("b", heard, {"y": 2})])
    composite.on_train_start(context)
    composite.before_step(context)
    composite.after_step(context)
    assert heard == ["a start", "b start", "a before", "b before", "a after", "b after"]
    assert composite.get_update_payload(context) == {"x": 1, "y": 2}


def test_a_composite_update_rejects_two_payloads_under_one_key(context: TrainingContext) -> None:
    # P-PL-17: the original keeps the later one without a word.
    composite = CompositeUpdateStrategy([Sends("a", [], {"x": 1}), Sends("b", [], {"x": 2})])
    with pytest.raises(ConfigError, match=r"both Sends\(a\) and Sends\(b\) send 'x'"):
        composite.get_update_payload(context)


def test_a_composite_update_saves_the_state_of_its_parts(context: TrainingContext) -> None:
    one, other = StateTrackingUpdateStrategy(), StateTrackingUpdateStrategy()
    one.after_step(context)
    CompositeUpdateStrategy([NoOpUpdateStrategy(), other]).load_state_dict(
        CompositeUpdateStrategy([NoOpUpdateStrategy(), one]).state_dict()
    )
    assert other.total_steps == 1
