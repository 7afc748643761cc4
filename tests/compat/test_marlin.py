"""PyMarlin's names."""

from __future__ import annotations

from typing import Any

import pytest
from problem import Problem

from dovetail import trainers
from dovetail.compat import marlin
from dovetail.trainers.capabilities.core import capabilities_of
from dovetail.units import Epochs


@pytest.mark.parametrize("name", sorted({*marlin.__all__} & {*trainers.__all__}))
def test_a_name_of_both_is_the_same(name: str) -> None:
    assert getattr(marlin, name) is getattr(trainers, name)


@pytest.mark.parametrize(
    ("backend", "kinds"),
    [("sp", []), ("sp-amp", ["mixed precision"]), ("ddp-amp", ["mixed precision", "data parallel"])],
)
def test_the_factory_builds_what_its_name_says(problem: Problem, backend: str, kinds: list[str]) -> None:
    trainer: Any = marlin.build_trainer_backend(backend, problem.model(), "cpu", verbose=False)
    assert [kind.kind for kind in capabilities_of(trainer)] == kinds
    assert len(trainer.fit(problem.batches, max_length=Epochs(1)).losses) == len(problem.batches)


def test_a_backend_decorates_another(problem: Problem) -> None:
    inner = marlin.SingleProcessAmp(problem.model(), "cpu", verbose=False)
    outer = marlin.DDPTrainerBackend(trainer=inner)
    assert isinstance(outer, marlin.AbstractTrainerBackendDecorator)
    assert outer.unwrap() is inner
