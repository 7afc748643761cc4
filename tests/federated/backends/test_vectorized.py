"""A round as one model with a leading dimension."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from dovetail.algorithms import FedRep
from dovetail.clients import simple
from dovetail.data.models import cnn, logistic, mlp
from dovetail.federated.config import ClientsConfig
from dovetail.federated.data.sources import GeneratedData
from dovetail.federated.selection import RoundRobinSelection
from dovetail.federated.servers.display import RoundDisplay
from dovetail.federated.servers.results import WriteResults, rows_of
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import LinearLRSchedulerStrategy, SGDOptimizerStrategy, ShuffleDataLoaderStrategy

SHAPES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "logistic": (lambda: logistic(6, 3), (6,)),
    "mlp": (lambda: mlp(6, 3, hidden=(8,)), (6,)),
    "cnn": (lambda: cnn(1, 8, 3), (1, 8, 8)),
}


def population(shape: tuple[int, ...], dtype: torch.dtype) -> GeneratedData:
    """Twelve clients of unequal size."""

    def make(client_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(client_id)
        size = 3 + 5 * client_id % 29
        x = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
        return x.to(dtype), (x.flatten(1).sum(dim=1) * 3 % 3).long()

    return GeneratedData(12, make, make_test=lambda client_id: make(client_id + 100))


def trained(backend: str, kind: str, dtype: torch.dtype, rounds: int, **settings: Any) -> fedavg.Server:
    make, shape = SHAPES[kind]
    trainer = ComposableTrainer(
        optimizer_strategy=SGDOptimizerStrategy(lr=0.05, momentum=0.9),
        data_loader_strategy=ShuffleDataLoaderStrategy(),
        num_epochs=2,
        batch_size=8,
        verbose=False,
    )
    server = fedavg.Server(
        model=lambda: make().to(dtype),
        datasource=population(shape, dtype),
        trainer=trainer,
        backend=backend,
        rounds=rounds,
        **{"clients": ClientsConfig(total_clients=12, per_round=5), **settings},
    )
    server.run(simple.Client(trainer=trainer))
    return server


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", SHAPES)
def test_ten_vectorized_rounds_equal_serial_ones(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        together, one_by_one = (trained(backend, kind, dtype, 10) for backend in ("vectorized", "sequential"))
    for name, value in together.weights.items():
        torch.testing.assert_close(value, one_by_one.weights[name], rtol=0, atol=tolerance)
    for found, expected in zip(together.records, one_by_one.records, strict=True):
        assert found.reported == expected.reported
        assert found.metrics == pytest.approx(expected.metrics, abs=1e-5)


def test_fleets_may_be_smaller_than_rounds() -> None:
    whole, parts = (trained("vectorized", "mlp", torch.float64, 2, num_workers=size) for size in (None, 2))
    for name, value in whole.weights.items():
        torch.testing.assert_close(value, parts.weights[name], rtol=0, atol=1e-12)


def test_clients_that_cannot_be_vectorized_are_named_once_and_run_serially(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "dropout", (lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), (6,)))
    sentence = "clients train one after the other: Dropout draws random numbers"
    with pytest.warns(UserWarning, match=sentence) as caught:
        together = trained("vectorized", "dropout", torch.float32, 3)
    assert len(caught) == 1
    one_by_one = trained("sequential", "dropout", torch.float32, 3)
    for name, value in together.weights.items():
        assert torch.equal(value, one_by_one.weights[name])


def test_clients_test_their_local_models() -> None:
    clients = ClientsConfig(total_clients=12, per_round=5, do_test=True)
    together, one_by_one = (
        trained(backend, "mlp", torch.float64, 1, clients=clients) for backend in ("vectorized", "sequential")
    )
    assert together.records[0].metrics["clients_accuracy"] == one_by_one.records[0].metrics["clients_accuracy"]


class Odd(nn.Module):
    """Decides by the values of its inputs, which cannot be mapped over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x if float(x.sum()) > 0 else -x)


def test_a_module_that_cannot_be_vectorized_trains_serially(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "odd", (Odd, (6,)))
    with pytest.warns(UserWarning, match=r"one after the other: training them at once failed \(RuntimeError: "):
        together = trained("vectorized", "odd", torch.float32, 1)
    assert torch.equal(
        together.weights["linear.weight"], trained("sequential", "odd", torch.float32, 1).weights["linear.weight"]
    )


def test_each_client_continues_its_schedule_in_a_second_phase() -> None:
    def weights(backend: str) -> Any:
        trainer = ComposableTrainer(
            lr_scheduler_strategy=LinearLRSchedulerStrategy(total_iters=20, interval="update"),
            num_epochs=2,
            batch_size=4,
            verbose=False,
        )
        data = population((6,), torch.float64)
        server = fedavg.Server(
            lambda: SHAPES["mlp"][0]().double(), data, FedRep(), trainer=trainer, backend=backend, rounds=1, per_round=5
        )
        server.run(simple.Client(trainer=trainer))
        return dict(server.weights)

    with pytest.warns(UserWarning, match="clients train one after the other: .*a schedule continues in a second phase"):
        together = weights("vectorized")
    torch.testing.assert_close(together, weights("sequential"), rtol=0, atol=0)


def test_a_crashed_client_is_named_and_the_others_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    crashing = trained("sequential", "mlp", torch.float64, 1).records[0].reported[2]
    given = GeneratedData.train_data

    def broken(self: GeneratedData, client_id: int) -> Any:
        if client_id == crashing:
            raise OSError("the disk is gone")
        return given(self, client_id)

    monkeypatch.setattr(GeneratedData, "train_data", broken)
    with pytest.warns(UserWarning, match="the disk is gone"):
        together = trained("vectorized", "mlp", torch.float64, 1)
    one_by_one = trained("sequential", "mlp", torch.float64, 1)
    assert together.records[0].faults == one_by_one.records[0].faults
    assert [fault.client_id for fault in together.records[0].faults] == [crashing]
    for name, value in together.weights.items():
        assert torch.equal(value, one_by_one.weights[name])


class Batches(GeneratedData):
    """Clients whose data are lists of batches, which cannot be trained at once."""

    def train_data(self, client_id: int) -> Any:
        inputs, labels = super().train_data(client_id)
        return list(zip(inputs.split(4), labels.split(4), strict=True))

    def num_samples(self, client_id: int) -> int:
        return len(super().train_data(client_id)[1])


def test_records_results_and_summary_name_the_backend_used(tmp_path: Path) -> None:
    made = population((6,), torch.float32)
    text = io.StringIO()
    server = fedavg.Server(
        lambda: logistic(6, 3),
        Batches(12, made.train_data),
        trainer=ComposableTrainer(verbose=False),
        callbacks=[RoundDisplay(Console(file=text, width=200)), WriteResults(tmp_path, ["round"])],
        backend="vectorized",
        rounds=2,
        total_clients=12,
        per_round=3,
    )
    with pytest.warns(UserWarning, match="clients train one after the other"):
        records = server.run()
    assert [record.backend for record in records] == ["sequential", "sequential"]
    assert (tmp_path / "rounds.csv").read_text() == "round,backend\n1,sequential\n2,sequential\n"
    lines = text.getvalue().splitlines()
    assert [line.endswith("on sequential, not vectorized") for line in lines] == [True, True, False]
    assert lines[-1] == "backend: sequential in 2 of 2 rounds, although vectorized was requested"


def test_a_fleet_is_recorded_as_vectorized() -> None:
    server = trained("vectorized", "logistic", torch.float32, rounds=1)
    assert [record.backend for record in server.records] == ["vectorized"]
    assert rows_of(server.records, ["backend"]) == [{"backend": "vectorized"}]


def test_a_round_with_vectorized_and_serial_clients_records_both() -> None:
    class Partly(GeneratedData):
        def train_data(self, client_id: int) -> Any:
            inputs, labels = super().train_data(client_id)
            return [(inputs, labels)] if client_id < 7 else (inputs, labels)

        def num_samples(self, client_id: int) -> int:
            return len(super().train_data(client_id)[1])

    server = fedavg.Server(
        lambda: logistic(6, 3),
        Partly(12, population((6,), torch.float32).train_data),
        trainer=ComposableTrainer(verbose=False),
        backend="vectorized",
        selection=RoundRobinSelection(),
        num_workers=6,
        rounds=1,
        total_clients=12,
        per_round=12,
    )
    with pytest.warns(UserWarning, match="clients train one after the other"):
        (record,) = server.run()
    assert record.backend == "sequential and vectorized"
    assert len(record.reported) == 12
