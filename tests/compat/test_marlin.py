"""PyMarlin's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from problem import Problem

from dovetail import trainers
from dovetail.compat import marlin
from dovetail.compat.marlin import (
    AbstractTrainerBackendDecorator,
    AbstractTrainerDecorator,
    DDPTrainer,
    DDPTrainerBackend,
    SingleProcess,
    SingleProcessAMP,
    SingleProcessAmp,
    build_trainer_backend,
)
from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers import AMPTrainer, Trainer
from dovetail.trainers.capabilities.core import capabilities_of
from dovetail.units import Epochs


def train(trainer: Trainer) -> float:
    """A function for every trainer and every layer: `make check` fails if a type checker rejects a call below."""
    trainer.options.num_epochs = 1
    return trainer.train()


class Counting(AbstractTrainerDecorator):
    """A decorator as the seed describes one."""

    steps: int

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.steps = 0

    def after_step(self, output: Mapping[str, Any]) -> None:
        self.steps += 1
        super().after_step(output)


@pytest.mark.parametrize("name", sorted({*marlin.__all__} & {*trainers.__all__}))
def test_a_name_in_both_modules_is_the_same_object(name: str) -> None:
    assert getattr(marlin, name) is getattr(trainers, name)


def test_one_annotation_fits_every_trainer_and_layer(problem: Problem, tmp_path: Path) -> None:
    options: Any = {"train_dataset": problem.batches, "checkpoint_dir": tmp_path, "verbose": False}

    def inner() -> SingleProcess:
        return SingleProcess(problem.model(), "cpu", **options)

    assert train(inner()) > 0
    assert train(SingleProcessAMP(problem.model(), "cpu", **options)) > 0
    assert train(DDPTrainer(trainer=inner())) > 0
    assert train(AMPTrainer(inner(), precision="bf16")) > 0
    assert train(DDPTrainer(trainer=AMPTrainer(inner(), precision="bf16"))) > 0
    assert train(DDPTrainer.from_single_process(problem.model(), "cpu", **options)) > 0
    assert train(Counting(inner())) > 0
    assert train(build_trainer_backend("ddp-amp", problem.model(), "cpu", **options)) > 0
    # The trainer inside of a layer has the type, too.
    assert train(Counting(Counting(inner())).trainer) > 0
    assert train(DDPTrainer(trainer=inner()).unwrap()) > 0


def test_every_trainer_and_layer_is_an_instance_of_the_protocol(problem: Problem) -> None:
    inner = SingleProcess(problem.model(), "cpu", verbose=False)
    amp = SingleProcessAmp(problem.model(), "cpu", verbose=False)
    made = [
        inner, amp, DDPTrainer(trainer=inner), DDPTrainer(trainer=amp), AMPTrainer(inner), Counting(inner),
        DDPTrainer.from_single_process(problem.model(), "cpu", amp=True), build_trainer_backend("sp", problem.model()),
    ]  # fmt: skip
    assert all(isinstance(trainer, Trainer) for trainer in made)
    assert marlin.Trainer is Trainer


def test_a_type_checker_rejects_an_object_that_is_not_a_trainer() -> None:
    # mypy fails here, too, if it accepts the argument: then the comment has no use.
    with pytest.raises(AttributeError):
        train("sp")  # type: ignore[arg-type]  # a user's mistake
    with pytest.raises(UnknownNameError, match="unknown trainer 'spp'"):
        wrong: int = build_trainer_backend("spp")  # type: ignore[assignment]  # a user's mistake
        del wrong


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        ("sp", []),
        ("sp-amp", ["mixed precision"]),
        ("ddp", ["data parallel"]),
        ("ddp-amp", ["mixed precision", "data parallel"]),
    ],
)
def test_the_factory_builds_the_named_backend(problem: Problem, backend: str, kinds: list[str]) -> None:
    trainer = build_trainer_backend(backend, problem.model(), "cpu", verbose=False)
    assert [kind.kind for kind in capabilities_of(trainer)] == kinds
    assert len(trainer.fit(problem.batches, max_length=Epochs(1)).losses) == len(problem.batches)


def test_a_backend_decorates_another(problem: Problem) -> None:
    inner = SingleProcessAmp(problem.model(), "cpu", verbose=False)
    outer = DDPTrainerBackend(trainer=inner)
    assert isinstance(outer, AbstractTrainerBackendDecorator)
    assert outer.unwrap() is outer.trainer is inner


def test_a_user_decorator_sees_every_step(problem: Problem) -> None:
    counting = Counting(DDPTrainer(trainer=SingleProcess(problem.model(), "cpu", verbose=False)))
    counting.fit(problem.batches, max_length=Epochs(2))
    assert counting.steps == 24


@pytest.mark.parametrize(("name", "verb"), [("train_dl", "train_epoch"), ("validate_dl", "val_epoch")])
def test_an_override_of_a_backend_method_suggests_the_verb(name: str, verb: str) -> None:
    with pytest.raises(ConfigError, match=rf"Mine.{name}: it is never called here: override {verb}"):
        type("Mine", (AbstractTrainerBackendDecorator,), {name: lambda self, loader: None, "__module__": "mine"})
