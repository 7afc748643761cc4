"""Runs in several processes: results and errors."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from problem import Problem

from dovetail import Batches, Epochs, Trainer
from dovetail.compat import zae_engine
from dovetail.errors import ConfigError
from dovetail.runtime.relay import arithmetic, set_arithmetic, share_of_threads
from dovetail.trainers import DDPTrainer
from dovetail.trainers.addons import MultiGPUAddon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forking")]


def make_trainer(problem: Problem, kind: Any = Trainer, batch_size: int = 8, device: Any = "cpu", **more: Any) -> Any:
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "verbose": False, "seed": 1, **more}
    return kind(problem.model(dtype=torch.float64), device, batch_size=batch_size, **settings)


@pytest.fixture
def data(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    return problem.x.double(), problem.y


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for value, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_launch_returns_weights_history_metrics_and_rate_without_a_warning(
    problem: Problem, data: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    def make(batch_size: int) -> tuple[Any, Any]:
        model = problem.model(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        pieces: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "verbose": False, "seed": 1}
        return Trainer(model, "cpu", batch_size=batch_size, **pieces), optimizer

    (alone, _), (here, optimizer) = make(16), make(8)
    launched = DDPTrainer(here, num_processes=2)
    model, history = launched.model, launched.history
    for length in (1, 2):
        for trainer in (alone, launched):
            trainer.fit(data, data, max_length=Epochs(length))
        # The second run continues with the momentum of the first.
        same(launched.model, alone.model)
    assert launched.model is model
    assert launched.history is history
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert launched.context.progress == alone.context.progress
    for name in ("train_loss", "valid_loss", "valid_accuracy"):
        assert history.get_metric_values(name) == pytest.approx(alone.history.get_metric_values(name), abs=1e-12)
    assert launched.evaluate(data) == pytest.approx(alone.evaluate(data), abs=1e-12)
    assert torch.equal(launched.predict(data[0]), launched.unwrap().predict(data[0]))
    assert "Warning" not in capfd.readouterr().err


class Prediction(NamedTuple):
    mean: torch.Tensor
    size: torch.Tensor


@dataclass
class Output(OrderedDict[str, torch.Tensor]):
    """As the outputs of transformers, whose fields are items, too."""

    mean: torch.Tensor

    def __post_init__(self) -> None:
        self["mean"] = self.mean


class Named(torch.nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.inner, self.kind = torch.nn.Linear(4, 2).double(), kind

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = self.inner(inputs)
        return Prediction(outputs, inputs[:, 0]) if self.kind is Prediction else self.kind(mean=outputs)


@pytest.mark.parametrize("kind", [Prediction, Output])
def test_launched_predictions_have_the_class_of_the_outputs(kind: Any) -> None:
    inputs = torch.randn(6, 4, dtype=torch.float64)
    launched = DDPTrainer(Trainer(Named(kind), "cpu", batch_size=2, verbose=False), num_processes=2)
    predicted = launched.predict(inputs)
    assert type(predicted) is kind
    assert torch.equal(predicted.mean, launched.unwrap().predict(inputs).mean)


def test_launch_works_with_other_spellings_and_the_add_on(problem: Problem, data: Any) -> None:
    alone = make_trainer(problem, zae_engine.Trainer, batch_size=16)
    alone.run(1, data)
    add_on = make_trainer(problem, zae_engine.Trainer.add_on(MultiGPUAddon), device=["cpu", "cpu"])
    add_on.run(1, data)
    same(add_on.model, alone.model)


def test_launched_workers_use_the_settings_of_the_caller_and_their_cores(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tells(trainer: Any, batch: Any) -> Any:
        trainer.context.state["found"] = [*arithmetic().values(), torch.get_num_threads()]
        return {"loss": trainer.model(batch[0]).sum()}

    # The settings of torch in a new process; a fork does not start with them.
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    trainer = DDPTrainer(make_trainer(problem, train_step=tells), num_processes=2)
    before = arithmetic()
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    try:
        trainer.fit((problem.x.double(), problem.y), max_length=Batches(1))
        expected = [*arithmetic().values(), share_of_threads(2)]
    finally:
        set_arithmetic(before, torch.get_num_threads())
    assert trainer.context.state["found"] == expected == ["float64", True, True, "high", share_of_threads(2)]


def test_an_error_in_a_launched_worker_keeps_its_traceback(problem: Problem, data: Any) -> None:
    def fails_in_the_second(trainer: Any, batch: Any) -> Any:
        if trainer.context.process.share.rank == 1:
            raise LookupError("a worker has lost its way")
        return {"loss": trainer.model(batch[0]).sum()}

    trainer = DDPTrainer(make_trainer(problem, train_step=fails_in_the_second), num_processes=2)
    with pytest.raises(LookupError, match="a worker has lost its way") as caught:
        trainer.fit(data, max_length=Epochs(1))
    notes = "\n".join(caught.value.__notes__)
    assert "fails_in_the_second" in notes
    assert "while training: epoch 1, batch 1" in notes


def test_launch_rejects_objects_that_cannot_be_sent(problem: Problem, data: Any) -> None:
    trainer = DDPTrainer(make_trainer(problem), num_processes=2)
    trainer.unwrap().lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        trainer.fit(data)
