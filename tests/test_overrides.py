"""Methods of subclasses that were written for plato: each is called, or rejected with a sentence."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import Blobs, make_model, make_trainer

from dovetail.algorithms import Algorithm
from dovetail.clients import simple
from dovetail.errors import ConfigError, FederationError
from dovetail.federated import ServerCallback
from dovetail.federated.algorithms.fedavg import FedAvg
from dovetail.federated.messages import Task, Update
from dovetail.overrides import defines, reject_lost_overrides
from dovetail.servers import fedavg
from dovetail.trainers import Trainer, basic
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.decorators import TimedTrainer
from dovetail.trainers.strategies import TestingStrategy as Testing

SETTINGS: dict[str, Any] = {"rounds": 2, "per_round": 3, "seed": 2}


def _run(
    server: type[fedavg.Server] = fedavg.Server, client: type[simple.Client] = simple.Client, **settings: Any
) -> fedavg.Server:
    made = server(make_model, Blobs(), trainer=make_trainer(), **{**SETTINGS, **settings})
    made.run(client())
    return made


LOST = [
    (fedavg.Server, "aggregate_weights", "give the server an algorithm with aggregate"),
    (fedavg.Server, "aggregate_deltas", "give the server an algorithm with aggregate"),
    (fedavg.Server, "_process_reports", "give the server an algorithm with aggregate"),
    (fedavg.Server, "customize_server_payload", "an algorithm with payload"),
    (fedavg.Server, "configure", "as arguments"),
    (fedavg.Server, "init_trainer", "as arguments"),
    (fedavg.Server, "get_logged_items", "a record has metrics"),
    (fedavg.Server, "get_accuracy_mean_std", "clients_accuracy"),
    (fedavg.Server, "save_to_checkpoint", "checkpoint_path"),
    (fedavg.Server, "_resume_from_checkpoint", "checkpoint_path"),
    (fedavg.Server, "wrap_up", "target_accuracy"),
    (fedavg.Server, "periodic_task", "clients_processed"),
    (fedavg.Server, "should_request_update", "half-trained"),
    (fedavg.Server, "process_client_info", "check"),
    (fedavg.Server, "_select_clients", "choose_clients"),
    (fedavg.Server, "add_callbacks", "callbacks="),
    (simple.Client, "configure", "as arguments"),
    (simple.Client, "inbound_processed", "override work"),
    (simple.Client, "_train", "override work"),
    (simple.Client, "_load_payload", "override work"),
    (simple.Client, "_load_data", "datasource"),
    (simple.Client, "_allocate_data", "datasource"),
    (simple.Client, "_obtain_model_update", "half-trained"),
    (simple.Client, "start_client", "server.run"),
    (simple.Client, "add_callbacks", "callbacks="),
    (simple.Client, "begin", "override prepare"),
    (simple.Client, "effort", "override estimate_cost"),
    (FedAvg, "aggregate_weights", "override aggregate"),
    (Algorithm, "begin", "override prepare"),
    (Algorithm, "stays", "override is_local"),
    (Algorithm, "compute_weight_deltas", "override aggregate"),
    (Algorithm, "update_weights", "override aggregate"),
    (Algorithm, "extract_weights", "override is_local"),
    (Algorithm, "load_weights", "override equip"),
    (basic.Trainer, "lr_scheduler_step", "lr_scheduler_strategy"),
    (basic.Trainer, "train_process", "override fit"),
    (ComposableTrainer, "test_process", "testing_strategy"),
    (ComposableTrainer, "simulate_sleep_time", "speed_simulation"),
    (basic.Trainer, "_adjust_lr", "global_lr_scheduler"),
    (Trainer, "training_step", "override train_step"),
    (Trainer, "validation_step", "override test_step"),
    (Trainer, "configure_optimizers", "override get_optimizer"),
    (Trainer, "train_dataloader", "give fit the data"),
]


@pytest.mark.parametrize(("base", "name", "words"), LOST, ids=[f"{it[0].__name__}.{it[1]}" for it in LOST])
def test_a_method_that_is_never_called_is_rejected_with_an_alternative(base: type[Any], name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Mine\.{name}: it is never called here: .*{words}"):
        type("Mine", (base,), {name: lambda self: None})
    mixin = type("Mixin", (), {name: lambda self: None})
    with pytest.raises(ConfigError, match=rf"^Mine\.{name}: it is never called here: "):
        type("Mine", (mixin, base), {})


def test_a_library_class_may_define_such_a_method() -> None:
    ours = type("Ours", (), {"lost": lambda self: None, "__module__": "dovetail.compat"})
    reject_lost_overrides(type("Mine", (ours,), {"lost": lambda self: None}), {"lost": "…"})


def test_a_method_set_on_an_instance_counts_as_defined() -> None:
    client = simple.Client()
    assert not defines(client, "customize_report")
    client.customize_report = lambda report: report  # type: ignore[method-assign]
    assert defines(client, "customize_report")


def test_the_hooks_of_a_server_are_called_in_order() -> None:
    heard: list[Any] = []

    class Server(fedavg.Server):
        def training_will_start(self) -> None:
            heard.append("start")

        def clients_selected(self, selected_clients: Sequence[int]) -> None:
            heard.append(("selected", tuple(selected_clients)))

        def weights_received(self, weights_received: Any) -> Any:
            heard.append("received")
            return weights_received

        def weights_aggregated(self, updates: Sequence[Update]) -> None:
            heard.append(("aggregated", tuple(update.report.client_id for update in updates)))

        def clients_processed(self) -> None:
            heard.append(("processed", self.records[-1].reported))

        def server_will_close(self) -> None:
            heard.append("close")

    server = _run(Server, rounds=1)
    chosen = server.records[0].selected
    asked = [("selected", chosen), "received", ("aggregated", chosen), ("processed", chosen)]
    assert heard == ["start", *asked, "close"]


def test_choose_clients_selects_and_may_call_the_selection() -> None:
    class Server(fedavg.Server):
        def choose_clients(self, clients_pool: Sequence[int], clients_count: int) -> Sequence[int]:
            assert list(clients_pool) == [1, 2, 3, 4, 5, 6, 7, 8]
            if self.current_round == 1:
                return random.sample(list(clients_pool), clients_count)
            return super().choose_clients([2, 4, 6, 8], clients_count)

    first, second = _run(Server), _run(Server)
    chosen = [record.selected for record in first.records]
    assert chosen == [record.selected for record in second.records]
    assert set(chosen[1]) < {2, 4, 6, 8}
    assert len(chosen[0]) == 3


@pytest.mark.parametrize("chosen", [[1, 1], [99]])
def test_choose_clients_must_return_distinct_clients_of_the_pool(chosen: list[int]) -> None:
    class Server(fedavg.Server):
        def choose_clients(self, clients_pool: Sequence[int], clients_count: int) -> Sequence[int]:
            return chosen

    with pytest.raises(ConfigError, match=r"Server\.choose_clients: expected different clients of the pool"):
        _run(Server)


def test_weights_received_changes_the_aggregated_weights() -> None:
    class Server(fedavg.Server):
        def weights_received(self, weights_received: Any) -> Any:
            return [{name: torch.zeros_like(value) for name, value in each.items()} for each in weights_received]

    server = _run(Server, rounds=1)
    assert all(bool(value.abs().max() < 1e-6) for value in server.weights.values())


def test_weights_received_that_returns_none_is_an_error() -> None:
    class Server(fedavg.Server):
        def weights_received(self, weights_received: Any) -> Any:
            pass

    with pytest.raises(ConfigError, match=r"weights_received: expected the weights of 3 clients, got None: return"):
        _run(Server)


class Adaptive(fedavg.Server):
    """Sends every client a number, and keeps the numbers that the clients report."""

    def customize_server_response(self, server_response: dict[str, Any], client_id: int) -> dict[str, Any]:
        return {**server_response, "threshold": 10 * client_id + server_response["current_round"]}

    def weights_aggregated(self, updates: Sequence[Update]) -> None:
        self.heard = {update.client_id: update.report.threshold for update in updates}


class Threshold(simple.Client):
    """Reports the number that the server has sent."""

    threshold = 0

    def process_server_response(self, server_response: Mapping[str, Any]) -> None:
        assert server_response["id"] == self.client_id
        self.threshold = server_response["threshold"]

    def customize_report(self, report: SimpleNamespace) -> SimpleNamespace:
        assert report.num_samples > 0
        report.threshold = self.threshold
        report.num_samples = 1
        return report


@pytest.mark.parametrize("backend", ["sequential", pytest.param("process", marks=pytest.mark.slow)])
def test_a_response_reaches_its_client_and_a_report_the_server(backend: str) -> None:
    server: Any = _run(Adaptive, Threshold, backend=backend)
    asked = server.records[-1].reported
    assert server.heard == {client_id: 10 * client_id + 2 for client_id in asked}


def test_the_samples_of_a_report_are_the_weight_of_its_update() -> None:
    class Uniform(simple.Client):
        def customize_report(self, report: SimpleNamespace) -> SimpleNamespace:
            report.num_samples = 1
            return report

    uniform = _run(client=Uniform, rounds=1)
    expected = _run(rounds=1, postprocessors=[{"weighting": {"rule": "uniform"}}])
    torch.testing.assert_close(dict(uniform.weights), dict(expected.weights), rtol=0, atol=0)


def test_clients_with_overridden_methods_are_not_vectorized() -> None:
    class Counting(simple.Client):
        def work(self, task: Task, state: dict[str, Any]) -> Any:
            update, kept = super().work(task, state)
            return update, {**kept, "seen": task.round}

    with pytest.warns(UserWarning, match=r"Counting\.work is called for one client at a time"):
        counting = _run(fedavg.Server, Counting, backend="vectorized", rounds=1)
    with pytest.warns(UserWarning, match=r"Threshold\.process_server_response is called for one client at a time"):
        adaptive = _run(Adaptive, Threshold, backend="vectorized", rounds=1)
    assert counting.states.get(counting.records[0].reported[0])["seen"] == 1
    assert [it.records[0].backend for it in (counting, adaptive)] == ["sequential", "sequential"]


@pytest.mark.parametrize(("server", "client"), [(Adaptive, simple.Client), (fedavg.Server, Threshold)])
def test_edge_servers_forward_neither_responses_nor_reports(
    server: type[fedavg.Server], client: type[simple.Client]
) -> None:
    with pytest.raises(ConfigError, match="an edge server does not pass"):
        _run(server, client, cross_silo=True, total_silos=2, per_round=4)


def test_a_report_that_is_not_returned_is_an_error() -> None:
    class Forgetful(simple.Client):
        def customize_report(self, report: SimpleNamespace) -> Any:
            report.more = 1

    with pytest.raises(FederationError, match=r"customize_report: expected the report, got None: return it"):
        _run(client=Forgetful)


@pytest.mark.parametrize("name", ["train", "train_model", "obtain_model_update"])
@pytest.mark.parametrize("wrap", [lambda trainer: trainer, TimedTrainer])
def test_a_trainer_with_a_training_method_that_clients_skip_is_rejected(name: str, wrap: Any) -> None:
    trainer = type("Mine", (ComposableTrainer,), {name: lambda self, *args: None})(verbose=False)
    server = fedavg.Server(make_model, Blobs(), **SETTINGS)
    with pytest.raises(ConfigError, match=rf"Mine\.{name}: a client trains with fit, which does not call it"):
        server.run(simple.Client(trainer=wrap(trainer)))


def test_train_calls_the_train_model_of_a_subclass() -> None:
    called: list[Any] = []

    class Mine(basic.Trainer):
        def train_model(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> None:
            called.append((trainset, sampler))
            super().train_model({**config, "epochs": 2}, trainset, sampler)

    trainer = Mine(torch.nn.Linear(4, 3), verbose=False)
    data = Blobs().train_data(1)
    trainer.train(data, [0, 1, 2])
    assert called == [(data, [0, 1, 2])]
    assert len(trainer.run_history.get_metric_values("train_loss")) == 2


class Half(Testing):
    """A test with a known answer."""

    def test_model(self, model: Any, config: Any, testset: Any, sampler: Any, context: Any) -> float:
        return len(testset) / 1000


class Third(ComposableTrainer):
    """A trainer with its own test."""

    def test_model(self, config: Any, testset: Any, sampler: Any = None) -> float:
        return len(testset) / 500


@pytest.mark.parametrize(
    ("trainer", "accuracy"),
    [
        (ComposableTrainer(testing_strategy=Half(), verbose=False), 0.064),
        (Third(verbose=False), 0.128),
        (TimedTrainer(Third(verbose=False)), 0.128),
    ],
)
def test_the_test_method_of_a_trainer_returns_the_accuracy(trainer: Any, accuracy: float) -> None:
    server = fedavg.Server(make_model, Blobs(own_tests=True), trainer=trainer, **SETTINGS)
    (_, record) = server.run()
    assert record.metrics["accuracy"] == accuracy


def test_callbacks_receive_the_weights_trained_by_clients() -> None:
    seen: list[Any] = []

    class Watch(ServerCallback):
        def on_weights_received(self, server: Any, weights_received: Sequence[Any]) -> None:
            seen.extend(weights_received)

    server = _run(rounds=1, per_round=1, callbacks=[Watch])
    torch.testing.assert_close(dict(seen[0]), dict(server.weights))
