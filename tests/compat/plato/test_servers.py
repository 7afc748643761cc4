"""Servers and clients that are written as for plato: every method that plato calls is called here."""

from __future__ import annotations

import asyncio
import csv
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import Blobs, make_model, make_trainer
from torch.utils.data import TensorDataset

from dovetail.algorithms import FedAdam, FedAtt, FedPer, FedProx
from dovetail.callbacks import Callback
from dovetail.compat.plato.algorithms import fedavg as algorithm
from dovetail.compat.plato.callbacks.client import ClientCallback
from dovetail.compat.plato.callbacks.server import ServerCallback
from dovetail.compat.plato.clients import base as clients_base
from dovetail.compat.plato.clients import fedavg_personalized as personalized_client
from dovetail.compat.plato.clients import simple
from dovetail.compat.plato.datasources import base as datasources
from dovetail.compat.plato.processors import base as processors
from dovetail.compat.plato.samplers import all_inclusive
from dovetail.compat.plato.samplers import base as samplers
from dovetail.compat.plato.servers import base as servers_base
from dovetail.compat.plato.servers import fedavg
from dovetail.compat.plato.servers import fedavg_personalized as personalized_server
from dovetail.errors import ConfigError, FederationError
from dovetail.federated.servers.reading import read_federated
from dovetail.servers import fedavg as ours

Weights = Mapping[str, torch.Tensor]
SETTINGS: dict[str, Any] = {"rounds": 2, "per_round": 3, "seed": 2}


def run(server: type[ours.Server] = fedavg.Server, client: Any = None, **settings: Any) -> Any:
    made = server(make_model, Blobs(), trainer=make_trainer(), **{**SETTINGS, **settings})
    made.run(simple.Client() if client is None else client)
    return made


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Mean(fedavg.Server):
    """The mean by samples, as plato's own server has it."""

    async def aggregate_deltas(self, updates: Any, deltas_received: Any) -> Any:
        self.total_samples = sum(update.report.num_samples for update in updates)
        sums = {name: self.trainer.zeros(delta.shape) for name, delta in deltas_received[0].items()}
        for update, deltas in zip(updates, deltas_received, strict=True):
            for name, delta in deltas.items():
                sums[name].add_(delta, alpha=update.report.num_samples)
            await asyncio.sleep(0)
        return {name: value / self.total_samples for name, value in sums.items()}


class Attentive(fedavg.Server):
    """FedAtt without noise: every layer attends to the clients that are farthest away."""

    async def aggregate_weights(self, updates: Any, baseline_weights: Any, weights_received: Any) -> Any:
        deltas = self.algorithm.compute_weight_deltas(baseline_weights, weights_received)
        steps = {}
        for name in baseline_weights:
            norms = torch.stack([torch.linalg.norm(delta[name]) for delta in deltas])
            attention = torch.softmax(norms, dim=0)
            steps[name] = 1.2 * sum(share * delta[name] for share, delta in zip(attention, deltas, strict=True))
        return self.algorithm.update_weights(steps)


def test_a_plato_server_without_overrides_equals_our_server() -> None:
    assert same(run().weights, run(ours.Server).weights)


def test_aggregate_deltas_with_the_plain_mean_equals_fedavg_bit_for_bit() -> None:
    assert same(run(Mean).weights, run(ours.Server).weights)


def test_the_inherited_aggregate_deltas_equals_fedavg_bit_for_bit() -> None:
    class Inherits(fedavg.Server):
        async def aggregate_deltas(self, updates: Any, deltas_received: Any) -> Any:
            return await super().aggregate_deltas(updates, deltas_received)

    assert same(run(Inherits).weights, run(ours.Server).weights)
    robust = run(Inherits, aggregator="median")
    assert same(robust.weights, run(ours.Server, aggregator="median").weights)


def test_attention_in_aggregate_weights_equals_our_fedatt() -> None:
    # On digits, whose model has no buffers: our FedAtt attends to parameters only.
    settings: dict[str, Any] = {"rounds": 2, "total_clients": 6, "per_round": 3}
    expected, attentive = ours.Server(algorithm=FedAtt(magnitude=0.0), **settings), Attentive(**settings)
    expected.run()
    attentive.run(simple.Client())
    torch.testing.assert_close(dict(attentive.weights), dict(expected.weights), rtol=1e-5, atol=1e-6)


def test_a_synchronous_aggregation_method_is_called_too() -> None:
    class Frozen(fedavg.Server):
        def aggregate_weights(self, updates: Any, baseline_weights: Any, weights_received: Any) -> Any:
            return baseline_weights

    server = run(Frozen)
    assert same(server.weights, server._initial_model.state_dict())


def test_a_coroutine_completes_inside_a_running_event_loop() -> None:
    async def notebook() -> Any:
        return run(Mean, rounds=1)

    assert same(asyncio.run(notebook()).weights, run(ours.Server, rounds=1).weights)


def test_a_resumed_server_draws_the_same_noise(tmp_path: Path) -> None:
    class Noisy(fedavg.Server):
        async def aggregate_weights(self, updates: Any, baseline_weights: Any, weights_received: Any) -> Any:
            return {name: value + torch.randn(value.shape) for name, value in weights_received[0].items()}

    settings: dict[str, Any] = {"total_clients": 4, "per_round": 2}
    whole = Noisy(rounds=2, **settings)
    whole.run(simple.Client())
    for rounds in (1, 2):
        resumed = Noisy(rounds=rounds, checkpoint_path=str(tmp_path), **settings)
        resumed.run(simple.Client())
    assert same(whole.weights, resumed.weights)


def test_stale_differences_are_relative_to_the_current_weights() -> None:
    received: list[Any] = []

    class Server(fedavg.Server):
        async def aggregate_deltas(self, updates: Any, deltas_received: Any) -> Any:
            current = {name: value.clone() for name, value in self.weights.items()}
            for update, delta in zip(updates, deltas_received, strict=True):
                expected = {name: value - current[name] for name, value in update.payload.items()}
                torch.testing.assert_close(dict(delta), expected, rtol=0, atol=1e-6)
                received.append(update.staleness)
            return await super().aggregate_deltas(updates, deltas_received)

    distribution = {"distribution": "pareto", "alpha": 1}
    asynchronous = {"synchronous": False, "minimum_clients_aggregated": 1, "staleness_bound": 5}
    run(Server, rounds=6, speed_simulation=True, simulation_distribution=distribution, **asynchronous)
    assert max(received) > 0


def test_an_aggregation_that_returns_none_is_an_error() -> None:
    class Forgetful(fedavg.Server):
        async def aggregate_deltas(self, updates: Any, deltas_received: Any) -> Any:
            pass

    with pytest.raises(ConfigError, match=r"^Forgetful\.aggregate_deltas: expected weights by name, got None: return"):
        run(Forgetful)


def test_two_overridden_aggregations_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^Mean\.aggregate_deltas: FedAdam aggregates, too: leave one of them out"):
        run(Mean, algorithm=FedAdam())
    with pytest.raises(ConfigError, match=r"^Mean\.aggregate_deltas: it does not call the aggregator .*Median"):
        run(Mean, aggregator="median")
    with pytest.raises(ConfigError, match=r"^Mean\.aggregate_deltas: edge servers do not call it: leave cross_silo"):
        run(Mean, cross_silo=True, total_silos=2, per_round=4)
    with pytest.raises(ConfigError, match="masks show the server only their sum"):
        run(Mean, postprocessors=["pairwise_masks"])


def test_an_algorithm_of_ours_equips_the_clients_of_a_plato_server() -> None:
    expected = run(ours.Server, algorithm=FedProx(1.0))
    assert same(run(Mean, algorithm=FedProx(1.0)).weights, expected.weights)
    assert not same(expected.weights, run(ours.Server).weights)


def test_weights_received_works_with_an_aggregator_of_ours() -> None:
    class Server(fedavg.Server):
        def weights_received(self, weights_received: Any) -> Any:
            return weights_received

    expected = run(ours.Server, algorithm=FedAdam())
    torch.testing.assert_close(
        dict(run(Server, algorithm=FedAdam()).weights), dict(expected.weights), rtol=1e-3, atol=1e-4
    )


def test_weights_received_and_weights_aggregated_get_the_updates_of_plato() -> None:
    heard: list[Any] = []

    class Server(fedavg.Server):
        def weights_received(self, weights_received: Any) -> Any:
            heard.append(("received", len(weights_received)))
            return [{name: torch.zeros_like(value) for name, value in each.items()} for each in weights_received]

        def weights_aggregated(self, updates: Any) -> None:
            heard.append([(it.client_id, it.report.num_samples, it.staleness, sorted(it.payload)) for it in updates])

    server = run(Server, rounds=1)
    names = sorted(server.weights)
    data = Blobs()
    chosen = server.selected_clients
    assert heard == [("received", 3), [(it, data.num_samples(it), 0, names) for it in chosen]]
    assert all(bool(value.abs().max() < 1e-6) for value in server.weights.values())


def test_configure_sees_trainer_algorithm_and_numbers_of_clients() -> None:
    class Server(fedavg.Server):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.utilities: dict[int, int] = {}

        def configure(self) -> None:
            super().configure()
            assert self.algorithm.model is self.trainer.model
            self.utilities = dict.fromkeys(range(1, self.total_clients + 1), 0)

        def choose_clients(self, clients_pool: Sequence[int], clients_count: int) -> Sequence[int]:
            import random

            random.setstate(self.prng_state)
            chosen = random.sample(list(clients_pool), clients_count)
            self.prng_state = random.getstate()
            for client_id in chosen:
                self.utilities[client_id] += 1
            return chosen

    server = run(Server, total_clients=8)
    assert sum(server.utilities.values()) == 6
    assert [it.selected for it in server.records] == [it.selected for it in run(Server, total_clients=8).records]
    assert (server.clients_per_round, server.clients_pool, len(server.testset)) == (3, list(range(1, 9)), 2)


def test_logged_items_are_in_the_records_and_the_table(tmp_path: Path) -> None:
    class Server(fedavg.Server):
        def clients_processed(self) -> None:
            self.double = 2 * self.accuracy

        def get_logged_items(self) -> dict[str, Any]:
            items = super().get_logged_items()
            items["double_accuracy"] = self.double
            return items

    server = run(Server, types=("round", "comm_overhead", "double_accuracy"), result_path=str(tmp_path))
    with (tmp_path / "rounds.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["double_accuracy"]) for row in rows] == [2 * it.metrics["accuracy"] for it in server.records]
    assert float(rows[1]["comm_overhead"]) == server.comm_overhead > 0


class Listening(fedavg.Server):
    """Keeps the order in which its methods are called."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.heard: list[str] = []

    def configure(self) -> None:
        self.heard.append("configure")
        super().configure()

    def init_trainer(self) -> None:
        super().init_trainer()
        self.heard.append(f"init {type(self.algorithm).__name__}")

    def training_will_start(self) -> None:
        self.heard.append("start")

    def choose_clients(self, clients_pool: Sequence[int], clients_count: int) -> Sequence[int]:
        self.heard.append("choose")
        return super().choose_clients(clients_pool, clients_count)

    def customize_server_response(self, server_response: dict[str, Any], client_id: int) -> dict[str, Any]:
        self.heard.append("response")
        return {**server_response, "secret": 10 * client_id}

    def customize_server_payload(self, payload: Any) -> Any:
        self.heard.append("payload")
        return payload

    def clients_selected(self, selected_clients: Sequence[int]) -> None:
        self.heard.append("selected")

    def weights_received(self, weights_received: Any) -> Any:
        self.heard.append("received")
        return weights_received

    async def aggregate_deltas(self, updates: Any, deltas_received: Any) -> Any:
        self.heard.append(f"aggregate {updates[0].report.secret == 10 * updates[0].client_id}")
        return await super().aggregate_deltas(updates, deltas_received)

    def weights_aggregated(self, updates: Any) -> None:
        self.heard.append("aggregated")

    def clients_processed(self) -> None:
        self.heard.append("processed")

    async def wrap_up(self) -> None:
        self.heard.append("wrap up")
        await super().wrap_up()

    def save_to_checkpoint(self) -> None:
        self.heard.append("save")

    def server_will_close(self) -> None:
        self.heard.append("close")


class Telling(simple.Client):
    """Reports the values received from the server."""

    def process_server_response(self, server_response: dict[str, Any]) -> None:
        self.secret = server_response["secret"]

    def customize_report(self, report: SimpleNamespace) -> SimpleNamespace:
        assert self.testset is None
        report.secret = self.secret
        return report


def test_the_hooks_of_a_plato_server_are_called_in_the_order_of_a_round() -> None:
    server = run(Listening, Telling(), rounds=1, per_round=1)
    before = ["configure", "init Algorithm", "start", "choose", "selected", "response", "payload"]
    after = ["received", "aggregate True", "aggregated", "processed", "wrap up", "save", "close"]
    assert server.heard == [*before, *after]


def test_trainer_callbacks_are_the_sixth_argument_of_a_client() -> None:
    epochs: list[int] = []

    class Counting(Callback):
        def on_epoch_end(self, context: Any, metrics: Any) -> None:
            epochs.append(context.client_id)

    server = run(client=simple.Client(None, None, None, None, None, [Counting()]), rounds=1)
    assert sorted(set(epochs)) == sorted(server.selected_clients)


class Shifting(fedavg.Server):
    """Sends a number beside the weights, and collects what the clients send beside theirs."""

    def customize_server_payload(self, payload: Any) -> Any:
        return [payload, float(10 * self.selected_client_id + self.current_round)]

    def weights_received(self, weights_received: Any) -> Any:
        self.extras = {it.client_id: each[1] for it, each in zip(self.updates, weights_received, strict=True)}
        return [each[0] for each in weights_received]


class Answering(simple.Client):
    """Takes the payload apart, and sends what it got back beside the weights."""

    async def inbound_processed(self, processed_inbound_payload: Any) -> tuple[SimpleNamespace, Any]:
        weights, extra = processed_inbound_payload
        report, trained = await super().inbound_processed(weights)
        return report, [trained, {"extra": torch.tensor(extra)}]


@pytest.mark.parametrize("backend", ["sequential", pytest.param("process", marks=pytest.mark.slow)])
def test_payloads_of_both_directions_arrive(backend: str) -> None:
    server = run(Shifting, Answering(), backend=backend)
    expected = {it: {"extra": torch.tensor(10.0 * it + 2)} for it in server.records[-1].reported}
    assert server.extras == expected
    torch.testing.assert_close(dict(server.weights), dict(run(ours.Server).weights), rtol=0, atol=1e-6)


def test_a_payload_that_no_method_unpacks_is_an_error() -> None:
    class Server(fedavg.Server):
        def customize_server_payload(self, payload: Any) -> Any:
            return [payload, 1.0]

    with pytest.raises(ConfigError, match=r"client \d has sent list, and not only weights: override Server\.weights_r"):
        run(Server, Answering())


def test_a_client_may_send_other_weights_than_it_trained() -> None:
    class Halved(simple.Client):
        async def inbound_processed(self, processed_inbound_payload: Any) -> tuple[SimpleNamespace, Any]:
            report, weights = await super().inbound_processed(processed_inbound_payload)
            report.seen = sorted(processed_inbound_payload)
            return report, {name: torch.zeros_like(value) for name, value in weights.items()}

    server = run(client=Halved(), rounds=1)
    assert all(bool(value.abs().max() < 1e-6) for value in server.weights.values())
    assert server.updates[0].report.seen == sorted(server.weights)


def test_an_answer_without_a_payload_is_an_error() -> None:
    class Forgetful(simple.Client):
        async def inbound_processed(self, processed_inbound_payload: Any) -> Any:
            await super().inbound_processed(processed_inbound_payload)

    with pytest.raises(FederationError, match="inbound_processed: expected the report and the payload, got None"):
        run(client=Forgetful())


def test_a_client_is_configured_before_it_trains_and_reports_afterwards() -> None:
    heard: list[str] = []

    class Client(simple.Client):
        def process_server_response(self, server_response: dict[str, Any]) -> None:
            heard.append(f"response {server_response['current_round']}")

        def configure(self) -> None:
            super().configure()
            heard.append("configure")
            assert (self.sampler.num_samples(), len(self.trainset[0])) == (len(self.trainset[0]),) * 2

        def inbound_received(self, inbound_processor: Any) -> None:
            heard.append(f"inbound {len(inbound_processor.processors)}")

        def customize_report(self, report: SimpleNamespace) -> SimpleNamespace:
            heard.append("report")
            report.loss = self.trainer.context.history.get_latest_metric("train_loss")
            return report

        def outbound_ready(self, report: Any, outbound_processor: Any) -> None:
            heard.append(f"outbound {report.loss > 0}")

    server = run(client=Client(), rounds=1, per_round=1)
    assert heard == ["response 1", "configure", "inbound 0", "report", "outbound True"]
    assert server.updates[0].report.loss > 0


def test_processors_added_by_a_callback_change_the_payload() -> None:
    class Doubling(processors.Processor):
        def process(self, data: Any) -> Any:
            assert self.trainer is not None
            return {name: 2 * value for name, value in data.items()}

    class Adds(ClientCallback):
        def on_outbound_ready(self, client: Any, report: Any, outbound_processor: Any) -> None:
            outbound_processor.processors.insert(0, Doubling(trainer=client.trainer))

    class Kept(ServerCallback):
        def on_weights_received(self, server: Any, weights_received: Any) -> None:
            server.seen = weights_received

    client = simple.Client()
    client.add_callbacks([Adds])
    once = run(rounds=1, callbacks=[Kept])
    twice = fedavg.Server(make_model, Blobs(), trainer=make_trainer(), **{**SETTINGS, "rounds": 1})
    twice.add_callbacks([Kept])
    twice.run(client)
    for one, two in zip(once.seen, vars(twice)["seen"], strict=True):
        torch.testing.assert_close({name: 2 * value for name, value in one.items()}, dict(two), rtol=0, atol=1e-6)


def test_the_methods_of_a_plato_algorithm_are_called_on_both_sides() -> None:
    called: list[str] = []

    class Mine(algorithm.Algorithm):
        def __init__(self, trainer: Any = None) -> None:
            super().__init__(trainer)
            self.last = list(self.model.state_dict())[-1]

        def extract_weights(self, model: Any = None) -> Any:
            called.append(f"extract {self.client_id > 0}")
            return {name: value for name, value in super().extract_weights(model).items() if name != self.last}

        def load_weights(self, weights: Any) -> None:
            called.append(f"load {self.client_id > 0}")
            super().load_weights({**self.model.state_dict(), **weights})

        def compute_weight_deltas(self, baseline_weights: Any, weights_received: Any) -> Any:
            called.append("deltas")
            return super().compute_weight_deltas(baseline_weights, weights_received)

        def update_weights(self, deltas: Any) -> Any:
            called.append("update")
            return super().update_weights(deltas)

    server = fedavg.Server(make_model, Blobs(), Mine, make_trainer(), rounds=1, per_round=1, seed=2)
    server.run(simple.Client(algorithm=Mine))
    of_client = ["extract False", "load True", "extract True"]
    assert called == [*of_client, "extract False", "deltas", "update", "extract False", "load False"]
    first = server._initial_model.state_dict()
    *others, last = first
    assert torch.equal(server.weights[last], first[last])
    assert not any(torch.equal(server.weights[name], first[name]) for name in others)


def test_clients_with_overridden_methods_are_not_vectorized() -> None:
    plain = fedavg.Server(backend="vectorized", rounds=1, total_clients=4, per_round=2)
    plain.run(simple.Client())
    assert plain.records[0].backend == "vectorized"
    with pytest.warns(UserWarning, match=r"Answering\.inbound_processed is called for one client at a time"):
        run(Shifting, Answering(), backend="vectorized", rounds=1)


class Source(datasources.DataSource):
    """Two hundred points whose label is the sign of their sum."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        y = (x.sum(dim=1) > 0).long()
        self.trainset, self.testset = TensorDataset(x[:160], y[:160]), TensorDataset(x[160:], y[160:])


def test_a_data_source_is_partitioned_by_the_settings() -> None:
    server = fedavg.Server(
        lambda: torch.nn.Linear(4, 2), Source, total_clients=4, per_round=4, rounds=1, sampler="sample_quantity_noniid"
    )
    server.run(simple.Client(datasource=Source))
    sizes = [server.datasource.num_samples(client_id) for client_id in range(1, 5)]
    assert sum(sizes) == Source().num_train_examples() == 160
    assert len(set(sizes)) > 1
    assert {update.client_id: update.report.num_samples for update in server.updates} == dict(enumerate(sizes, 1))
    assert Source().num_test_examples() == 40
    assert all_inclusive.Sampler(Source(), testing=True).num_samples() == 40
    assert sorted(samplers.Sampler([3, 1]).get()) == [1, 3]


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("iid", {"partition_size": 20}),
        ("dirichlet", {"partition_size": 20, "concentration": 0.5}),
        ("mixed", {"non_iid_clients": [1], "concentration": 0.5}),
        ("orthogonal", {}),
        ("distribution_noniid", {"label_concentration": 0.5}),
        ("label_quantity_noniid", {"per_client_classes_size": 1}),
        (
            "mixed_label_quantity_noniid",
            {"anchor_classes": [0], "keep_anchor_classes_size": 1, "consistent_clients_size": 1},
        ),
        ("sample_quantity_noniid", {"client_quantity_concentration": 1.0}),
    ],
)
def test_samplers_use_the_partitions_of_the_same_names(module: str, options: dict[str, Any]) -> None:
    kind = importlib.import_module(f"dovetail.compat.plato.samplers.{module}").Sampler
    made = [kind(Source(), client_id, num_clients=2, **options) for client_id in (1, 2)]
    first, second = (set(it.get()) for it in made)
    assert not first & second
    assert [it.num_samples() for it in made] == [len(first), len(second)]
    with pytest.raises(ConfigError, match="give num_clients: there are no global settings to read"):
        kind(Source(), 1)


def test_a_personalized_server_ends_with_a_personalization_round() -> None:
    trained: list[tuple[int, int]] = []

    class Client(personalized_client.Client):
        async def inbound_processed(self, processed_inbound_payload: Any) -> tuple[SimpleNamespace, Any]:
            trained.append((self.current_round, self.client_id))
            return await super().inbound_processed(processed_inbound_payload)

    server = personalized_server.Server(rounds=1, total_clients=4, per_round=2, testset_sampler="iid")
    server.run(Client())
    assert server.personalized is not None
    assert sorted(server.personalized.metrics) == [1, 2, 3, 4]
    assert trained == [*((1, it) for it in server.records[0].selected), *((2, it) for it in (1, 2, 3, 4))]


def test_layers_named_in_a_file_remain_at_the_clients() -> None:
    layers = {"type": "fedavg_personalized", "local_layer_names": ["3"]}
    config = read_federated(
        {"clients": {"total_clients": 4, "per_round": 2}, "trainer": {"rounds": 2}, "algorithm": layers}
    )
    server = personalized_server.Server(config=config)
    server.run(personalized_client.Client())
    expected = ours.Server(algorithm=FedPer(local_layer_names=["3"]), rounds=2, total_clients=4, per_round=2)
    expected.run()
    assert same(server.weights, expected.weights)
    assert torch.equal(server.weights["3.weight"], server._initial_model.state_dict()["3.weight"])


def test_base_modules_export_the_plato_base_classes() -> None:
    assert servers_base.Server is fedavg.Server
    assert clients_base.Client is simple.Client
