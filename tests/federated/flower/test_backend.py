"""Clients at the nodes of a Flower federation: messages, states, and what goes wrong."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail.trainers.context import TrainingContext

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flwr.app import Context, RecordDict

from dovetail.algorithms import SCAFFOLD, Algorithm, CompositeAlgorithm, Ditto, FedAdam
from dovetail.clients import simple
from dovetail.errors import ConfigError, DataError, DovetailError
from dovetail.federated.backends.contract import BackendContract
from dovetail.federated.backends.sequential import Sequential
from dovetail.federated.flower import FlowerBackend, client_app, server_app, worker_app
from dovetail.federated.flower.backend import Place
from dovetail.federated.flower.records import from_records, to_records
from dovetail.federated.messages import Fault, Task, Update
from dovetail.servers import fedavg
from dovetail.trainers.composable import ComposableTrainer

sys.path.insert(0, str(Path(__file__).parent))
from local_grid import LocalGrid


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are written by some task of some run."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Counting:
    """A worker that counts its rounds in its state, and fails on request."""

    def work(self, task: Task, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if task.payload.get("failing") == task.client_id:
            raise ValueError("the disk is full")
        rounds = state.get("rounds", 0) + 1
        return Update(task.client_id, task.round, 10, delta=task.weights, metrics={"rounds": rounds}), {
            "rounds": rounds
        }


class Forgetful(Counting):
    """A worker that keeps nothing."""

    def work(self, task: Task, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return super().work(task, state)[0], {}


def _app(worker: Any = None) -> Any:
    return worker_app(lambda context: worker or Counting())


def _tasks(round: int, *clients: str, **kwargs: Any) -> list[Task]:
    return [Task(round, client, {"w": torch.ones(2)}, **kwargs) for client in clients]


def _started(grid: Any, num_nodes: int = 2, **kwargs: Any) -> FlowerBackend:
    backend = FlowerBackend(grid, num_nodes, **{"patience": 30, **kwargs})
    backend.start(Counting())
    return backend


def _run(backend: Any, tasks: Any, states: Any = None) -> dict[int, Any]:
    found = list(backend.run([(task, (states or {}).get(task.client_id, {})) for task in tasks]))
    return {each.client_id if isinstance(each, Fault) else each.update.client_id: each for each in found}


def _rounds(outcomes: Any) -> dict[int, int]:
    return {client: each.update.metrics["rounds"] for client, each in outcomes.items()}


def _states(outcomes: Any) -> dict[int, Any]:
    return {client: each.state for client, each in outcomes.items()}


class _Everywhere(FlowerBackend):
    """A backend whose three nodes are made when the worker is known."""

    def __init__(self) -> None:
        super().__init__(LocalGrid(), num_nodes=3, states="server")

    def start(self, worker: Any) -> None:
        self.grid = LocalGrid([worker_app(lambda context: worker) for _ in range(3)], num_partitions=3)
        self._places, self._pending_queries, self._queried_nodes = {}, {}, set()
        super().start(worker)


class TestContract(BackendContract):
    def make(self) -> FlowerBackend:
        return _Everywhere()


class TestRecords:
    @pytest.mark.parametrize(
        "tensor",
        [
            torch.tensor([1.5, -0.0, torch.inf]),
            torch.tensor(3),
            torch.zeros(0, 4),
            torch.randn(3, 2).T,
            torch.tensor([0.1, 7.0], dtype=torch.bfloat16),
            torch.tensor([True, False]),
            torch.tensor([1 + 2j]),
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([2**40], dtype=torch.int64),
        ],
        ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}",
    )
    def test_tensors_survive_a_round_trip_through_messages(self, tensor: torch.Tensor) -> None:
        (found,) = from_records(to_records({"t": tensor})).values()
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)

    def test_plain_values_survive_a_round_trip_through_messages(self) -> None:
        content = {"n": 2**80, "f": 0.1, "b": b"\x00\xff", "none": None, "nested": {"t": (1, [2, "3"])}, "yes": True}
        assert from_records(to_records(content)) == content

    def test_an_unsupported_value_is_rejected_with_its_path(self) -> None:
        with pytest.raises(DovetailError, match=r"payload\.model: cannot store a .*Linear"):
            to_records({"payload": {"model": nn.Linear(1, 1)}})

    def test_a_message_of_another_application_is_rejected(self) -> None:
        with pytest.raises(DataError, match="was not written by Dovetail"):
            from_records(RecordDict())

    def test_a_tensor_with_too_few_bytes_is_rejected(self) -> None:
        records = to_records({"t": torch.ones(4)})
        (array,) = records.array_records["dovetail.tensors"].values()
        array.data = array.data[:-1]
        with pytest.raises(DataError, match=r"t: 15 bytes do not make a float32 of shape \(4,\)"):
            from_records(records)


class TestPlaces:
    def test_a_node_without_a_number_of_partitions_is_one_client(self) -> None:
        assert [client for client in range(1, 9) if Place(2).has(client)] == [3]

    def test_every_client_belongs_to_one_partition(self) -> None:
        homes = [[p for p in range(3) if Place(p, 3).has(client)] for client in range(1, 8)]
        assert homes == [[0], [1], [2], [0], [1], [2], [0]]

    def test_a_node_without_an_id_is_named_when_nodes_are_missing(self) -> None:
        grid = LocalGrid([_app()])
        grid.join(_app(), {"name": "x"})
        with pytest.raises(
            DovetailError, match=r"expected 2 nodes in 0.2 seconds, found 1; a node reported: .*partition-id"
        ):
            _started(grid, patience=0.2)

    def test_the_error_for_too_few_nodes_counts_them(self) -> None:
        with pytest.raises(DovetailError, match=r"expected 3 nodes in 0.2 seconds, found 2"):
            _started(LocalGrid([_app(), _app()]), 3, patience=0.2)

    def test_a_client_without_a_node_is_a_fault(self) -> None:
        found = _run(_started(LocalGrid([_app(), _app()])), _tasks(1, 1, 5))
        assert _rounds({1: found[1]}) == {1: 1}
        reason = "client 5: it has no node (there are nodes with partition-id 0, 1)"
        assert found[5] == Fault(5, 1, "crashed", reason)

    def test_a_node_that_joins_later_is_used_in_the_next_round(self) -> None:
        grid = LocalGrid([_app()])
        backend = _started(grid, 1)
        grid.join(_app(), {"partition-id": 1})
        _run(backend, _tasks(1, 1))
        assert _rounds(_run(backend, _tasks(2, 1, 2))) == {1: 1, 2: 1}

    def test_a_restarted_node_replaces_the_old_one(self) -> None:
        grid = LocalGrid([_app(), _app()])
        grid.silent = {101}
        backend = FlowerBackend(grid, 2, patience=30)
        grid.join(_app(), {"partition-id": 0})
        backend.start(Counting())
        assert _rounds(_run(backend, _tasks(1, 1, 2))) == {1: 1, 2: 1}

    def test_an_unreachable_node_is_asked_again(self) -> None:
        grid = LocalGrid([_app(), _app()])
        grid.away = {102}
        backend = FlowerBackend(grid, 1, patience=30)
        backend.start(Counting())
        grid.away = set()
        _run(backend, _tasks(1, 1))
        assert _rounds(_run(backend, _tasks(2, 1, 2))) == {1: 1, 2: 1}


class TestFaults:
    def test_a_lost_node_is_a_fault_of_its_client(self) -> None:
        grid = LocalGrid([_app(), _app()])
        backend = _started(grid)
        grid.away = {102}
        found = _run(backend, _tasks(1, 1, 2))
        assert found[2] == Fault(2, 1, "crashed", "client 2: its node was lost")
        assert _rounds({1: found[1]}) == {1: 1}

    def test_an_error_of_a_client_is_reported_as_its_fault(self) -> None:
        found = _run(_started(LocalGrid([_app(), _app()])), _tasks(3, 1, 2, payload={"failing": 2}))
        assert found[2] == Fault(2, 3, "crashed", "ValueError: the disk is full")
        assert _rounds({1: found[1]}) == {1: 1}

    def test_a_node_that_does_not_answer_is_left_out_at_the_timeout(self) -> None:
        grid = LocalGrid([_app(), _app()])
        backend = _started(grid, timeout=0.3)
        grid.silent = {102}
        found = _run(backend, _tasks(1, 1, 2))
        assert found[2] == Fault(2, 1, "timed out", "client 2 did not answer within 0.3 seconds")
        assert _rounds({1: found[1]}) == {1: 1}

    def test_an_answer_after_the_timeout_is_ignored(self) -> None:
        grid = LocalGrid([_app(), _app()])
        backend = _started(grid, timeout=0.3)
        grid.silent = {102}
        _run(backend, _tasks(1, 1, 2))
        grid.silent = set()
        found = _run(backend, _tasks(2, 1, 2))
        assert {client: each.update.round for client, each in found.items()} == {1: 2, 2: 2}

    def test_a_node_with_two_clients_has_twice_the_time_for_the_second(self) -> None:
        grid = LocalGrid([_app()], num_partitions=1)
        backend = _started(grid, 1, timeout=5)
        grid.silent = {101}
        messages = [backend._message(101, task, {}, place) for place, task in enumerate(_tasks(1, 1, 2), start=1)]
        assert [message.metadata.ttl for message in messages] == [5, 10]

    @pytest.mark.parametrize(
        ("change", "what"),
        [
            ({"client_id": 1}, "it is of client 1 in round 1"),
            ({"delta": {"w": 1.0}}, "'w' is of type float"),
            ({"metrics": {"loss": "low"}}, "'loss' is of type str"),
            ({"colour": "blue"}, "unexpected keyword argument 'colour'"),
        ],
    )
    def test_an_answer_that_is_not_an_update_is_a_fault(self, change: Any, what: Any) -> None:
        class Lying(Counting):
            def work(self, task: Task, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
                update, state = super().work(task, state)
                plain = {**update.to_plain(), **change}
                return type("Plain", (), {"to_plain": lambda self: plain})(), state

        found = _run(_started(LocalGrid([_app(), _app(Lying())])), _tasks(1, 1, 2))
        assert found[2].kind == "crashed"
        assert what in found[2].reason
        assert _rounds({1: found[1]}) == {1: 1}


class TestStates:
    def test_client_states_are_stored_at_the_node_and_their_round_at_the_server(self) -> None:
        grid = LocalGrid([_app(), _app()])
        backend = _started(grid)
        first = _run(backend, _tasks(1, 1, 2))
        second = _run(backend, _tasks(2, 1, 2), _states(first))
        assert _rounds(second) == {1: 2, 2: 2}
        assert _states(second) == {1: {"round": 2}, 2: {"round": 2}}

    def test_a_round_that_the_server_discarded_is_rolled_back_at_the_node(self) -> None:
        grid = LocalGrid([_app()])
        backend = _started(grid, 1)
        first = _run(backend, _tasks(1, 1))
        _run(backend, _tasks(2, 1), _states(first))
        again = _run(backend, _tasks(3, 1), _states(first))
        assert _rounds(again) == {1: 2}

    def test_a_node_keeps_at_most_two_states_per_client(self) -> None:
        grid = LocalGrid([_app()])
        backend = _started(grid, 1)
        states = {}
        for round in range(1, 6):
            states = _states(_run(backend, _tasks(round, 1), states))
        names = grid.nodes[101][1].state
        assert {name.partition(":")[0] for name in names} == {"client 1 round 4", "client 1 round 5"}

    def test_a_missing_client_state_is_a_fault(self) -> None:
        found = _run(_started(LocalGrid([_app()]), 1), _tasks(4, 1), {1: {"round": 3}})
        assert "client 1 round 3: its state is not at this node; states='server'" in found[1].reason

    def test_evaluating_a_model_changes_no_client_state(self) -> None:
        backend = _started(LocalGrid([_app()]), 1)
        states = _states(_run(backend, _tasks(1, 1)))
        judged = _run(backend, _tasks(1, 1, kind="evaluate"), states)
        assert _states(judged) == states
        assert _rounds(_run(backend, _tasks(2, 1), states)) == {1: 2}

    def test_a_client_without_state_leaves_no_file(self) -> None:
        grid = LocalGrid([_app(Forgetful())])
        assert _states(_run(_started(grid, 1), _tasks(1, 1))) == {1: {}}
        assert not grid.nodes[101][1].state

    def test_client_states_of_the_server_are_sent_to_the_node(self) -> None:
        backend = _started(LocalGrid([_app()]), 1, states="server")
        assert _states(_run(backend, _tasks(1, 1), {1: {"rounds": 6}})) == {1: {"rounds": 7}}

    def test_another_location_for_client_states_is_rejected(self) -> None:
        with pytest.raises(ConfigError, match="states: expected 'nodes' or 'server', got 'cloud'"):
            FlowerBackend(LocalGrid(), states="cloud")


class _Personal(Algorithm):
    """The last layer stays with clients."""

    def is_local(self, name: str) -> bool:
        return name.startswith("3.")


def _federation(backend: Any = None, algorithms: Any = (), **settings: Any) -> tuple[fedavg.Server, simple.Client]:
    settings = {"rounds": 3, "total_clients": 4, "per_round": 2, "seed": 5, **settings}

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.2), nn.Linear(8, 10))

    algorithm = CompositeAlgorithm([_Personal(), *algorithms])
    server = fedavg.Server(model=model, algorithm=algorithm, backend=backend, **settings)
    return server, simple.Client(trainer=ComposableTrainer(num_epochs=1, batch_size=64, learning_rate=0.1))


class TestApps:
    @pytest.mark.parametrize(
        ("num_nodes", "states", "processors"),
        [(4, "nodes", []), (2, "server", []), (2, "nodes", ["qsgd", "zstd"]), (4, "server", ["pairwise_masks"])],
        ids=lambda value: "-".join(value) if isinstance(value, list) else None,
    )
    def test_a_flower_federation_equals_one_without_flower(self, num_nodes: int, states: Any, processors: Any) -> None:
        plain, client = _federation(Sequential(), postprocessors=processors)
        plain.run(client)
        # Server and client are rebuilt on each side, as separate processes do.
        apps = [client_app(*_federation(postprocessors=processors)[::-1]) for _ in range(num_nodes)]
        server, client = _federation(postprocessors=processors)
        app = server_app(server, client, num_nodes=num_nodes, patience=30, states=states)
        app(LocalGrid(apps, num_partitions=num_nodes), Context(1, 0, {}, RecordDict(), {}))
        assert all(torch.equal(value, server.weights[name]) for name, value in plain.weights.items())
        assert [record.metrics for record in server.records] == [record.metrics for record in plain.records]

    @pytest.mark.parametrize("states", ["nodes", "server"])
    def test_client_state_of_algorithms_is_kept_alive_at_nodes(self, states: Any) -> None:
        def made(backend: Any = None) -> Any:
            own = [SCAFFOLD(), Ditto(personalization_epochs=1), FedAdam()]
            return _federation(backend, own, personalization={"epochs": 1}, rounds=4)

        plain, client = made(Sequential())
        plain.run(client)
        apps = [client_app(*made()[::-1]) for _ in range(2)]
        server, client = made()
        app = server_app(server, client, num_nodes=2, patience=30, states=states)
        app(LocalGrid(apps, num_partitions=2), Context(1, 0, {}, RecordDict(), {}))
        assert all(torch.equal(value, server.weights[name]) for name, value in plain.weights.items())
        assert server.personalized.metrics == plain.personalized.metrics

    def test_factories_build_server_and_client_from_the_context(self) -> None:
        grid = LocalGrid([client_app(lambda context: _federation()[1], lambda context: _federation()[0])], 1)
        made = []

        def server(context: TrainingContext) -> Any:
            made.append(_federation(rounds=context.run_config["rounds"])[0])
            return made[-1]

        app = server_app(server, lambda context: _federation()[1], num_nodes=1)
        app(grid, Context(1, 0, {}, RecordDict(), {"rounds": 2}))
        assert [record.round for record in made[0].records] == [1, 2]

    def test_a_node_writes_no_server_checkpoint(self, tmp_path: Path) -> None:
        server, client = _federation(checkpoint_path=str(tmp_path / "server"))
        backend = _started(LocalGrid([client_app(client, server)], 1), 1)
        weights = {name: value for name, value in _first_weights().items() if not name.startswith("3.")}
        found = list(backend.run([(Task(1, 1, weights), {})]))
        assert found[0].update.num_samples > 0
        assert not (tmp_path / "server").exists()

    def test_a_client_app_without_a_server_must_define_everything(self) -> None:
        backend = _started(LocalGrid([client_app(simple.Client(model=nn.Linear(2, 2)))]), 1)
        (found,) = backend.run([(Task(1, 1, {}), {})])
        assert "a client without a server brings its own datasource and algorithm" in found.reason

    def test_a_client_app_with_model_data_and_algorithm_needs_no_server(self) -> None:
        class Line:
            num_clients = 1

            def train_data(self, client_id: str) -> tuple[torch.Tensor, torch.Tensor]:
                return torch.ones(4, 1), torch.ones(4, 1)

            def num_samples(self, client_id: str) -> int:
                return 4

        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        trainer = ComposableTrainer(num_epochs=1, batch_size=4, learning_rate=0.1, criterion=nn.MSELoss())
        client = simple.Client(model=model, datasource=Line(), algorithm=Algorithm(), trainer=trainer)
        backend = _started(LocalGrid([client_app(client)]), 1)
        (found,) = backend.run([(Task(1, 1, dict(model.state_dict())), {})])
        assert found.update.num_samples == 4


def _first_weights() -> dict[str, torch.Tensor]:
    server, client = _federation()
    server.prepare(client)
    return server.weights


def test_the_flower_example_learns_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    tomli = pytest.importorskip("tomli")
    folder = Path(__file__).parents[3] / "examples" / "flower"
    monkeypatch.syspath_prepend(str(folder))
    with (folder / "pyproject.toml").open("rb") as file:
        described = tomli.load(file)["tool"]["flwr"]["app"]
    halves = {}
    for name, reference in described["components"].items():
        module, _, attribute = reference.partition(":")
        halves[name] = getattr(importlib.import_module(module), attribute)
    config = {**described["config"], "rounds": 1}
    grid = LocalGrid([halves["clientapp"]] * config["clients"])
    for _, context in grid.nodes.values():
        context.run_config.update(config)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        halves["serverapp"](grid, Context(1, 0, {}, RecordDict(), config))
    assert output.getvalue().startswith("round 1/1  2 clients  accuracy 0.")
