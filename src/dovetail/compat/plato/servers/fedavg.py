"""plato's server: calls the methods that a subclass written for plato overrides, in plato's order."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

from dovetail.compat.plato.algorithms.fedavg import Algorithm
from dovetail.compat.plato.coroutines import completed
from dovetail.compat.plato.datasources.base import partitioned
from dovetail.errors import ConfigError
from dovetail.federated import algorithms
from dovetail.federated.averaging import Average, weighted_mean
from dovetail.federated.callbacks import ServerCallback, as_callback
from dovetail.federated.clients.simple import Client
from dovetail.federated.clients.weights import copy_nested, fits, load_weights
from dovetail.federated.messages import CLIENT_PAYLOAD, SERVER_PAYLOAD, Update, Weights
from dovetail.federated.records import RoundRecord
from dovetail.federated.servers import fedavg
from dovetail.federated.servers.checks import check_algorithm
from dovetail.federated.servers.hooks import trained_weights
from dovetail.federated.servers.tasks import TaskKind, shared_weights
from dovetail.overrides import defines
from dovetail.runtime.seeds import derive_seed
from dovetail.trainers.randomness import seed_everything

__all__ = ["Server"]

_OF_SERVER = ("aggregate_weights", "aggregate_deltas")
_OF_ALGORITHM = ("extract_weights", "load_weights", "compute_weight_deltas", "update_weights")


class Server(fedavg.Server):
    """A server whose subclasses are written as for plato.

    Besides what `dovetail.servers.fedavg.Server` calls, it calls `configure`, `init_trainer`, `aggregate_weights`,
    `aggregate_deltas`, `customize_server_payload` and `get_logged_items`, and the methods of an algorithm that is
    derived from `dovetail.compat.plato.algorithms.fedavg.Algorithm`. Methods that plato awaits may be coroutines.

    Attributes of a subclass are not in checkpoints: a subclass that has some extends `state_dict` and
    `load_state_dict`.

    Args:
        model: A module, or a class or function that builds one.
        datasource: The data: ours, or a data source of plato (a class or an instance), which is cut over the clients.
        algorithm: A class derived from plato's algorithm, or what `dovetail.servers.fedavg.Server` takes.
        trainer: A trainer, or a class or function that builds one.
        callbacks: Callbacks of the server.
        settings: Settings, as `dovetail.servers.fedavg.Server` takes them.

    Example:
        >>> class Halved(Server):
        ...     async def aggregate_deltas(self, updates, deltas_received):
        ...         mean = await super().aggregate_deltas(updates, deltas_received)
        ...         return {name: value / 2 for name, value in mean.items()}
        >>> len(Halved(rounds=1, total_clients=4, per_round=2).run())
        1
    """

    def __init__(
        self,
        model: Any = None,
        datasource: Any = None,
        algorithm: Any = None,
        trainer: Any = None,
        callbacks: Any = None,
        **settings: Any,
    ) -> None:
        is_platos = isinstance(algorithm, type) and issubclass(algorithm, Algorithm)
        # Data and plato's algorithm come later: the first needs the settings, the second a trainer.
        super().__init__(model, None, None if is_platos else algorithm, trainer, callbacks, **settings)
        self.custom_algorithm = algorithm if is_platos else None
        self.datasource = partitioned(datasource, self.config)
        self.total_samples = 0
        self.updates: list[SimpleNamespace] = []
        self._received: dict[int, Any] = {}
        self._average: Average | None = None
        if defines(self, "get_logged_items"):
            # First, so that the callback that writes results finds the items in the record.
            self.callbacks.insert(0, _LoggedItems())
        if self.silos is not None:
            for name in (*_OF_SERVER, "weights_received", "customize_server_payload"):
                if defines(self, name):
                    raise ConfigError(
                        f"{type(self).__name__}.{name}: edge servers do not call it: leave cross_silo out"
                    )

    # ------------------------------------------------------------------ methods to override, as in plato

    def configure(self) -> None:
        """Override to act before the first round, when model, trainer and data exist."""
        self.init_trainer()

    def init_trainer(self) -> None:
        """Override to act when the trainer exists; this method builds the algorithm."""
        # Another algorithm of ours, such as SCAFFOLD, stays and aggregates itself.
        if self.custom_algorithm is not None or type(self.algorithm) is algorithms.FedAvg:
            self.algorithm = (self.custom_algorithm or Algorithm)(trainer=self.trainer)

    def customize_server_payload(self, payload: Any) -> Any:
        """Override to send a client (`self.selected_client_id`) something else than the weights, or more."""
        return payload

    async def aggregate_weights(self, updates: Any, baseline_weights: Any, weights_received: Any) -> Any:
        """Override to return the new weights; then `aggregate_deltas` is not called."""

    async def aggregate_deltas(self, updates: Any, deltas_received: Any) -> Any:
        """Return the mean of the differences, each counted by the samples of its client; override for another one."""
        assert self._average is not None, "called while updates are aggregated"
        counted = [
            Update(update.client_id, self.current_round, update.report.num_samples, delta=delta)
            for update, delta in zip(updates, deltas_received, strict=True)
        ]
        return self._average(counted)

    def get_logged_items(self) -> dict[str, Any]:
        """Return the columns of the round in the results; override to add some, which its record then has."""
        record = self.records[-1]
        reports = [update.report for update in self.updates]
        return {
            "round": record.round,
            "accuracy": self.accuracy,
            "accuracy_std": record.metrics.get("clients_accuracy_std", 0.0),
            "elapsed_time": record.elapsed_time,
            "processing_time": max((report.processing_time for report in reports), default=0.0),
            "comm_time": max((report.comm_time for report in reports), default=0.0),
            "round_time": max((report.training_time for report in reports), default=0.0),
            "comm_overhead": self.comm_overhead,
        }

    async def wrap_up(self) -> None:
        """Override to act at the end of every round, after callbacks; targets end a run by themselves."""
        self.save_to_checkpoint()

    def save_to_checkpoint(self) -> None:
        """Override to write more than the checkpoint, which `checkpoint_path` writes after every round."""

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Add callbacks, as instances or classes."""
        self.callbacks += [as_callback(it, ServerCallback) for it in callbacks]

    # ------------------------------------------------------------------ attributes of plato's server

    algorithm: Any

    @property
    def trainer(self) -> Any:
        return super().trainer

    @property
    def total_clients(self) -> int:
        """The number of clients."""
        return self.config.clients.total_clients

    @property
    def clients_per_round(self) -> int:
        """The number of clients that are selected in a round."""
        return self.config.clients.per_round

    @property
    def clients_pool(self) -> list[int]:
        """The ids of all clients that can be selected."""
        return list(self.client_ids)

    @property
    def accuracy(self) -> float:
        """The accuracy in the newest record; 0 without one."""
        return self.records[-1].metrics.get("accuracy", 0.0) if self.records else 0.0

    @property
    def comm_overhead(self) -> float:
        """The megabytes that were sent so far, both ways."""
        return sum(record.bytes_down + record.bytes_up for record in self.records) / 2**20

    @property
    def testset(self) -> Any:
        """The test data of the server."""
        return self.datasource.central_test_data()

    @property
    def prng_state(self) -> Any:
        """The state of Python's generator, which is seeded before clients are chosen: a resumed run draws the same."""
        return random.getstate()

    @prng_state.setter
    def prng_state(self, state: Any) -> None:
        random.setstate(state)

    # ------------------------------------------------------------------ the steps of a round

    def run(self, client: Client | None = None) -> list[RoundRecord]:
        is_heard = defines(self, "wrap_up") or defines(self, "save_to_checkpoint")
        if is_heard and not any(isinstance(it, _WrapUp) for it in self.callbacks):
            # Here and not in the constructor, so that it is called after callbacks that were added since.
            self.callbacks.append(_WrapUp())
        return super().run(client)

    def prepare(self, client: Client) -> None:
        client = copy.copy(client)
        client.datasource = partitioned(client.datasource, self.config)
        super().prepare(client)

    def _build_model(self, client: Client) -> None:
        super()._build_model(client)
        self.configure()
        if self.custom_algorithm is not None and not isinstance(self.algorithm, Algorithm):
            # Its `configure` has not called the one of this class.
            Server.init_trainer(self)
        own = self._overridden()
        if own and isinstance(self.algorithm, Algorithm):
            # An override may use single updates, so masks and noise that protect only the mean are rejected.
            self.algorithm.needs_each_update = True
            check_algorithm(self.algorithm, self.outbound)
        elif own and type(self.algorithm).aggregate is not algorithms.Algorithm.aggregate:
            raise ConfigError(f"{own[0]}: {self.algorithm.title} aggregates, too: leave one of them out")

    def _overridden(self) -> list[str]:
        """Return the methods of this server and its algorithm that are not ours and take part in the aggregation."""
        own = [f"{type(self).__name__}.{name}" for name in _OF_SERVER if defines(self, name)]
        if isinstance(self.algorithm, Algorithm):
            kind = type(self.algorithm).__name__
            own += [f"{kind}.{name}" for name in _OF_ALGORITHM if defines(self.algorithm, name)]
        return own

    def _payload_for(self, client_id: int, kind: TaskKind) -> Mapping[str, Any]:
        payload = super()._payload_for(client_id, kind)
        algorithm = self._algorithm()
        if kind == "evaluate" or not (
            defines(self, "customize_server_payload") or defines(algorithm, "extract_weights")
        ):
            return payload
        self.selected_client_id = client_id
        self._seed_hooks("payload", client_id)
        load_weights(self.model, self.weights)
        whole = self.customize_server_payload(algorithm.extract_weights())
        return {**payload, SERVER_PAYLOAD: copy_nested(whole)}

    def _receive(self, updates: list[Update]) -> list[Update]:
        self._seed_hooks("aggregation")
        payloads: Any = [
            update.payload.get(CLIENT_PAYLOAD, weights)
            for update, weights in zip(updates, trained_weights(updates), strict=True)
        ]
        self.updates = [
            SimpleNamespace(client_id=it.client_id, report=it.report, payload=payload, staleness=it.staleness)
            for it, payload in zip(updates, payloads, strict=True)
        ]
        # Overrides of plato's aggregation read these two attributes.
        self.total_samples = sum(update.num_samples for update in updates)
        if updates and defines(self, "weights_received"):
            payloads = self.weights_received(payloads)
            if payloads is None or len(payloads) != len(updates):
                raise ConfigError(
                    f"{type(self).__name__}.weights_received: expected the weights of {len(updates)} clients, got "
                    f"{'None' if payloads is None else len(payloads)}: return them"
                )
        # By client, because updates without samples are left out before the aggregation.
        self._received = {it.client_id: payload for it, payload in zip(updates, payloads, strict=True)}
        is_changed = defines(self, "weights_received")
        return [
            update.with_delta({name: payload[name] - value for name, value in update.sent.items()})
            if (is_changed or CLIENT_PAYLOAD in update.payload) and fits(payload, update.sent)
            else update
            for update, payload in zip(updates, payloads, strict=True)
        ]

    def _aggregate(self, updates: Sequence[Update], average: Average) -> Weights:
        own = self._overridden()
        if not defines(self, "aggregate_weights") and not defines(self._algorithm(), "compute_weight_deltas"):
            self._check_received(updates)
        # Without overrides, the aggregation is ours, with the same bits as in `dovetail.servers.fedavg`.
        if not own:
            return super()._aggregate(updates, average)
        # Counts the calls of the average: an override that computes its own mean would skip a robust aggregator.
        calls: list[int] = []

        def called(updates: Sequence[Update]) -> Weights:
            calls.append(len(updates))
            return average(updates)

        algorithm, self._average = self._algorithm(), called
        load_weights(self.model, self.weights)
        baseline = algorithm.extract_weights()
        ids = {update.client_id for update in updates}
        reported = [update for update in self.updates if update.client_id in ids]
        received = [self._received[update.client_id] for update in updates]
        if defines(self, "aggregate_weights"):
            name, new = "aggregate_weights", completed(self.aggregate_weights(reported, baseline, received))
        else:
            deltas = self._differences(algorithm, updates, baseline, received)
            name, mean = "aggregate_deltas", completed(self.aggregate_deltas(reported, deltas))
            new = None if mean is None else algorithm.update_weights(mean)
        if new is None:
            raise ConfigError(f"{type(self).__name__}.{name}: expected weights by name, got None: return them")
        if self.aggregator is not weighted_mean and not calls:
            raise ConfigError(f"{own[0]}: it does not call the aggregator {self.aggregator!r}: leave that out")
        # Through the algorithm, which may return other names than the model has; then the weights are read from the
        # model.
        algorithm.load_weights(new)
        state = self.model.state_dict()
        return {name: state[name].detach().to(value.device, copy=True) for name, value in self.weights.items()}

    def _differences(self, algorithm: Algorithm, updates: Sequence[Update], baseline: Any, received: list[Any]) -> Any:
        """Return the differences of the received weights from the current ones, without rounding if possible."""
        is_plain = not any(defines(algorithm, name) for name in ("compute_weight_deltas", "extract_weights"))
        current = shared_weights(self)
        # trained − sent = (sent + delta) − sent is not equal to the delta bit for bit, so the delta itself is used.
        if is_plain and all(update.sent.get(name) is current[name] for update in updates for name in current):
            return [dict(update.delta) for update in updates]
        return completed(algorithm.compute_weight_deltas(baseline, received))

    def _check_received(self, updates: Sequence[Update]) -> None:
        for update in updates:
            payload = self._received[update.client_id]
            if not isinstance(payload, Mapping):
                raise ConfigError(
                    f"client {update.client_id} has sent {type(payload).__name__}, and not only weights: override "
                    f"{type(self).__name__}.weights_received, which returns the weights"
                )

    def _reported(self, updates: Sequence[Update]) -> Sequence[Any]:
        return self.updates

    def _seed_hooks(self, *what: Any) -> None:
        """Seed the generators that an override may draw from: a resumed run, and any backend, draws the same."""
        seed_everything(derive_seed(self.config.server.random_seed, "plato", self.current_round, *what))

    def _algorithm(self) -> Algorithm:
        return self.algorithm if isinstance(self.algorithm, Algorithm) else Algorithm(self.trainer)


class _LoggedItems(ServerCallback):
    """Puts the items of a subclass's `get_logged_items` into the record of the round."""

    def on_clients_processed(self, server: Any) -> None:
        # A record has these as fields already; only the rest are metrics.
        own = {each.name for each in fields(RoundRecord)}
        items = {name: value for name, value in server.get_logged_items().items() if name not in own}
        record = server.records[-1]
        server.records[-1] = replace(record, metrics={**record.metrics, **items})


class _WrapUp(ServerCallback):
    """Calls the `wrap_up` of a subclass."""

    def on_clients_processed(self, server: Any) -> None:
        completed(server.wrap_up())
