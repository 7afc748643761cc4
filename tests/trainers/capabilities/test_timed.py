from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

from dovetail import Epochs, Trainer
from dovetail.callbacks import LambdaCallback
from dovetail.trainers.capabilities.timed import Timed
from dovetail.trainers.decorators import TrainerDecorator

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(5)), torch.zeros(40, dtype=torch.long)


class TimedLayer(Timed, TrainerDecorator):
    """The capability as a decorator of objects."""


def decorated(*args: Any, **options: Any) -> TimedLayer:
    return TimedLayer(Trainer(*args, **options))


def make(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"train_dataset": (X, Y), "batch_size": 8, "seed": 1, "verbose": False, **options}
    return kind(nn.Linear(6, 3), "cpu", **settings)


MOUNTS = pytest.mark.parametrize("kind", [Trainer.add_on(Timed), decorated], ids=["add-on", "decorator"])


@MOUNTS
def test_every_call_of_a_verb_is_timed(kind: Any) -> None:
    trainer = make(kind, val_dataset=(X, Y), accumulation_steps=2)
    trainer.fit(max_length=Epochs(2))
    assert {name: spent.calls for name, spent in trainer.verb_times.items()} == {
        "setup": 1,
        # Five batches to train and five to validate, twice.
        "data": 20,
        "to_device": 20,
        "train_step": 10,
        "test_step": 10,
        "backward": 10,
        "clip_gradients": 6,
        "optimizer_step": 6,
        # Once per update, and once per epoch.
        "scheduler_step": 8,
        "after_step": 10,
        "rest": 1,
    }


@MOUNTS
def test_timing_does_not_change_the_weights(kind: Any) -> None:
    plain, timed = make(Trainer), make(kind)
    for trainer in (plain, timed):
        trainer.fit(max_length=Epochs(2))
    assert torch.equal(plain.model.weight, timed.model.weight)


@MOUNTS
def test_nested_calls_are_timed_once(kind: Any) -> None:
    def train_step(trainer: Any, batch: Any) -> Mapping[str, Any]:
        loss = nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])
        # Inside of train_step, and all but all of its time.
        for _ in range(300):
            trainer.context.backward(loss, retain_graph=True)
        trainer.context.step()
        return {"loss": loss}

    trainer = make(kind, train_step=train_step)
    trainer.fit(max_length=Epochs(2))
    assert trainer.verb_times["backward"].calls == 3000
    assert trainer.verb_times["backward"].seconds > trainer.verb_times["train_step"].seconds > 0


def test_the_times_of_the_verbs_sum_to_at_most_the_run() -> None:
    trainer = make(Trainer.add_on(Timed))
    start_time = perf_counter()
    trainer.fit(max_length=Epochs(3))
    elapsed = perf_counter() - start_time
    # Anything that is counted twice makes the rest negative.
    assert all(spent.seconds >= 0 for spent in trainer.verb_times.values())
    assert 0 < sum(spent.seconds for spent in trainer.verb_times.values()) <= elapsed


def test_the_times_are_reset_at_every_run() -> None:
    trainer = make(Trainer.add_on(Timed))
    assert trainer.verb_times == {}
    trainer.fit(max_length=Epochs(1))
    trainer.evaluate((X, Y))
    assert set(trainer.verb_times) == {"setup", "data", "to_device", "test_step", "rest"}


def test_times_are_available_during_a_run() -> None:
    seen: list[float] = []

    def on_epoch_end(context: Any, metrics: Mapping[str, float]) -> None:
        seen.append(context.run.trainer.verb_times["rest"].seconds)

    make(Trainer.add_on(Timed), callbacks=[LambdaCallback(on_epoch_end=on_epoch_end)]).fit(max_length=Epochs(1))
    assert seen[0] > 0


@MOUNTS
def test_explain_shows_times_after_a_run(kind: Any) -> None:
    trainer = make(kind)
    assert "time of the last run" not in trainer.explain()
    trainer.fit(max_length=Epochs(1))
    lines = trainer.explain().splitlines()
    start = next(number for number, line in enumerate(lines) if "time of the last run" in line)
    shown = [line.lstrip("│├└─ ").split(":")[0] for line in lines[start + 1 : start + 1 + len(trainer.verb_times)]]
    assert shown == list(trainer.verb_times)


def test_explain_and_dry_run_are_not_timed() -> None:
    trainer = make(Trainer.add_on(Timed), val_dataset=(X, Y))
    trainer.fit(max_length=Epochs(1))
    before = trainer.verb_times
    trainer.explain()
    trainer.fit(max_length=Epochs(2), dry_run=True)
    assert trainer.verb_times == before


def test_explain_without_the_timed_layer_shows_no_times() -> None:
    trainer = make(Trainer)
    trainer.fit(max_length=Epochs(1))
    assert "time of the last run" not in trainer.explain()
