"""Edge servers between clients and server."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import Blobs, Everything, make_trainer
from rich.console import Console
from torch import Tensor, nn

from dovetail.clients.simple import Client
from dovetail.errors import ConfigError
from dovetail.federated.backends import Worker
from dovetail.federated.messages import Fault, Task, Update
from dovetail.federated.servers.display import RoundDisplay
from dovetail.federated.servers.edge import _part
from dovetail.federated.states import ClientState
from dovetail.servers.fedavg import Server


class Doubles(Blobs):
    def train_data(self, client_id: int) -> tuple[Tensor, Tensor]:
        x, y = super().train_data(client_id)
        return x.double(), y

    def central_test_data(self) -> None:
        return None

    def test_data(self, client_id: int) -> tuple[Tensor, Tensor] | None:
        x, y = super().train_data(client_id)
        return x.double(), y


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


def _run(client: Client | None = None, **options: Any) -> Server:
    server = Server(_model, Doubles(), trainer=make_trainer(), **{"rounds": 3, "per_round": 8, "seed": 4, **options})
    server.run(client or Client(trainer=make_trainer()))
    return server


def test_one_silo_with_all_clients_equals_plain_averaging() -> None:
    plain = _run(per_round=5)
    silo = _run(per_round=5, cross_silo=True, total_silos=1, local_rounds=1)
    torch.testing.assert_close(dict(silo.weights), dict(plain.weights), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("silos", [2, 3, 8])
def test_sums_of_updates_do_not_depend_on_the_division_into_silos(silos: int) -> None:
    plain, divided = _run(), _run(cross_silo=True, total_silos=silos)
    # The remainder of a mean of integers depends on the grouping.
    for name, value in plain.weights.items():
        if value.is_floating_point():
            torch.testing.assert_close(divided.weights[name], value, rtol=1e-11, atol=1e-12)
    assert [sorted(record.reported) for record in divided.records] == [list(range(1, silos + 1))] * 3


def test_an_edge_server_runs_its_rounds_before_it_reports() -> None:
    one = _run(cross_silo=True, total_silos=1, local_rounds=3, rounds=2)
    torch.testing.assert_close(dict(one.weights), dict(_run(rounds=6).weights), rtol=1e-11, atol=1e-12)


def test_clients_of_a_silo_keep_their_state() -> None:
    server = _run(cross_silo=True, total_silos=2, local_rounds=2, rounds=2, algorithm=_Everything)
    kept = [server.states.get(silo)["clients"]["states"] for silo in (1, 2)]
    assert [sorted(map(int, states)) for states in kept] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert {states["remembering"]["rounds"] for silo in kept for states in silo.values()} == {4}
    assert {server.states.get(silo)["algorithm"]["state"]["rounds"] for silo in (1, 2)} == {4}


class _Everything(Everything):
    def __init__(self) -> None:
        super().__init__()
        self.momentum = self.momentum.double()

    def is_local(self, name: str) -> bool:
        return name.startswith("3.")


class Failing(Client):
    """Of its clients, the second one cannot work."""

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        if task.client_id == 2:
            raise ValueError("no")
        return super().work(task, state)


def test_a_failed_client_is_left_out_by_its_edge_server_and_reported() -> None:
    server = _run(Failing(trainer=make_trainer()), cross_silo=True, total_silos=2)
    assert [sorted(record.reported) for record in server.records] == [[1, 2]] * 3
    reason = "ValueError: no (a client of edge server 1)"
    assert [record.faults for record in server.records] == [
        (Fault(2, number, "crashed", reason),) for number in (1, 2, 3)
    ]
    assert server.evaluate_clients().faults == (Fault(2, 3, "crashed", reason),)
    assert server.personalize(epochs=1).faults == (Fault(2, 4, "crashed", reason),)


def test_the_log_line_counts_edge_servers_and_names_their_clients() -> None:
    text = io.StringIO()
    display = RoundDisplay(Console(file=text, width=200))
    _run(Failing(trainer=make_trainer()), cross_silo=True, total_silos=2, rounds=1, callbacks=[display])
    assert text.getvalue().startswith("round 1/1  2 edge servers  ")
    assert text.getvalue().endswith("  client 2 crashed: ValueError: no (a client of edge server 1)\n")


def test_a_failed_edge_server_is_not_counted_as_a_client() -> None:
    server = Server(_model, Doubles(), rounds=1, per_round=8, cross_silo=True, total_silos=2)
    server.prepare(Client(trainer=make_trainer()))
    server._worker = _FailingEdge(server.worker)
    (record,) = server.run()
    assert record.reported == (2,)
    assert record.faults == (Fault(1, 1, "crashed", "ValueError: no network (edge server 1)"),)


def test_client_reports_of_an_edge_server_are_validated() -> None:
    server = Server(_model, Doubles(), rounds=1, per_round=8, cross_silo=True, total_silos=2)
    server.prepare(Client(trainer=make_trainer()))
    server._worker = _LyingEdge(server.worker)
    (record,) = server.run()
    reason = "its list of faults cannot be read (edge server 1)"
    assert record.faults == (Fault(1, 1, "wrong shape", reason),)


class _FailingEdge:
    def __init__(self, edge: Worker) -> None:
        self.edge = edge

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        if task.client_id == 1:
            raise ValueError("no network")
        return self.edge.work(task, state)


class _LyingEdge(_FailingEdge):
    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        update, kept = self.edge.work(task, state)
        return replace(update, payload={"faults": [{"who": 1}]} if task.client_id == 1 else {}), kept


def test_edge_servers_evaluate_their_clients() -> None:
    server = _run(cross_silo=True, total_silos=2)
    plain = _run()
    found, expected = server.evaluate_clients(), plain.evaluate_clients()
    assert found.mean("accuracy") == pytest.approx(expected.mean("accuracy"), abs=0.02)
    assert found.num_samples == {
        1: sum(map(Blobs().num_samples, range(1, 5))),
        2: sum(map(Blobs().num_samples, range(5, 9))),
    }


def test_simulated_time_is_the_time_of_the_slowest_silo() -> None:
    options = {"simulate_wall_time": True, "comm_simulation": False, "rounds": 1, "cross_silo": True, "total_silos": 2}
    once, twice = _run(**options), _run(**options, local_rounds=2)
    assert twice.records[0].elapsed_time == pytest.approx(2 * once.records[0].elapsed_time)


@pytest.mark.parametrize("total", [1, 2, 3, 7])
def test_silos_have_even_sizes_and_include_every_client(total: int) -> None:
    parts = [_part(range(1, 24), number, total) for number in range(1, total + 1)]
    assert [client_id for part in parts for client_id in part] == list(range(1, 24))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_silos_without_clients_are_rejected() -> None:
    with pytest.raises(ConfigError, match="per_round: expected at least one for each of 3 silos, got 2"):
        _run(per_round=2, cross_silo=True, total_silos=3)
    with pytest.raises(ConfigError, match="total_silos: expected at most one per client, 8, got 9"):
        _run(per_round=9, cross_silo=True, total_silos=9)
    with pytest.raises(ConfigError, match="min_clients: expected at most total_silos, 2, got 3"):
        _run(cross_silo=True, total_silos=2, min_clients=3)
    with pytest.raises(ConfigError, match="give synchronous=True"):
        _run(cross_silo=True, synchronous=False)
