"""How good a model is: at the server, and for each client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import Blobs, Everything, make_model, make_trainer
from torch import Tensor

from dovetail.clients.simple import Client
from dovetail.errors import ConfigError
from dovetail.federated import ServerCallback
from dovetail.servers.fedavg import Server


def _server(data: Blobs, **options: Any) -> Server:
    return Server(make_model, data, trainer=make_trainer(), **{"rounds": 3, "per_round": 8, **options})


def _accuracy(model: torch.nn.Module, data: tuple[Tensor, Tensor]) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(data[0]).argmax(dim=1) == data[1]).double().mean())


def test_the_server_tests_the_new_weights() -> None:
    server = _server(Blobs())
    records = server.run(Client(trainer=make_trainer()))
    data = Blobs().central_test_data()
    assert data is not None
    assert records[-1].metrics["accuracy"] == pytest.approx(_accuracy(server.model, data))


def test_without_test_data_the_server_does_not_test() -> None:
    (record, *_) = _server(Blobs(central=False)).run(Client(trainer=make_trainer()))
    assert set(record.metrics) == {"train_loss"}


@pytest.mark.parametrize("data", [None, Blobs()], ids=["no data", "data"])
@pytest.mark.parametrize("asked", ["model", "trainer", "worker", "evaluate", "evaluate_clients", "personalize"])
def test_evaluating_a_server_before_it_ran_raises_an_error(asked: str, data: Blobs | None) -> None:
    with pytest.raises(ConfigError, match="call `run` or `prepare` first"):
        getattr(Server(datasource=data), asked)()


def test_every_client_evaluates_the_global_model_on_its_data() -> None:
    data = Blobs(own_tests=True)
    server = _server(data)
    server.run(Client(trainer=make_trainer()))
    found = server.evaluate_clients()
    expected = {}
    for client_id in range(1, 9):
        own = data.test_data(client_id)
        assert own is not None
        expected[client_id] = _accuracy(server.model, own)
    assert {client_id: each["accuracy"] for client_id, each in found.metrics.items()} == pytest.approx(expected)
    spread = found.spread("accuracy")
    assert spread.worst == pytest.approx(min(expected.values()))
    assert spread.mean == pytest.approx(sum(expected.values()) / 8)


def test_evaluating_some_clients_does_not_change_later_rounds() -> None:
    seen: list[int] = []

    class Look(ServerCallback):
        def on_clients_processed(self, server: Any) -> None:
            seen.extend(server.evaluate_clients([3, 5]).metrics)

    data = Blobs(own_tests=True)
    watched, plain = _server(data, callbacks=[Look]), _server(data)
    for server in (watched, plain):
        server.run(Client(trainer=make_trainer()))
    assert seen == [3, 5] * 3
    torch.testing.assert_close(dict(watched.weights), dict(plain.weights), rtol=0, atol=0)


def test_clients_evaluate_the_model_with_their_local_layers() -> None:
    data = Blobs(own_tests=True)
    server = _server(data, algorithm=Everything)
    server.run(Client(trainer=make_trainer()))
    found = server.evaluate_clients([4])
    own = data.test_data(4)
    assert own is not None
    server.model.load_state_dict({**server.weights, **server.states.get(4)["model"]})
    assert found.metrics[4]["accuracy"] == pytest.approx(_accuracy(server.model, own))


def test_clients_without_test_data_are_skipped() -> None:
    server = _server(Blobs())
    server.run(Client(trainer=make_trainer()))
    assert server.evaluate_clients().metrics == {}


def test_a_client_that_fails_to_evaluate_is_named() -> None:
    class Broken(Blobs):
        def test_data(self, client_id: int) -> tuple[Tensor, Tensor] | None:
            if client_id == 2:
                raise OSError("no such file")
            return super().test_data(client_id)

    server = _server(Broken(own_tests=True))
    server.run(Client(trainer=make_trainer()))
    found = server.evaluate_clients()
    assert set(found.metrics) == {1, 3, 4, 5, 6, 7, 8}
    assert [(fault.client_id, fault.reason) for fault in found.faults] == [(2, "OSError: no such file")]


def test_client_tests_after_training_give_the_round_a_spread() -> None:
    data = Blobs(central=False, own_tests=True)
    config = Server().config
    clients = replace(config.clients, do_test=True, test_interval=2, per_round=8)
    server = Server(make_model, data, trainer=make_trainer(), config=replace(config, clients=clients), rounds=2)
    first, second = server.run(Client(trainer=make_trainer()))
    assert set(first.metrics) == {"train_loss"}
    assert 0 <= second.metrics["clients_accuracy_worst"] <= second.metrics["clients_accuracy"] <= 1
    # Without test data the server averages the results of its clients by samples.
    assert 0 <= second.metrics["accuracy"] <= 1
