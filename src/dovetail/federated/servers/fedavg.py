"""Federated server: runs rounds of selected clients and aggregates their updates into one model."""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import nn

from dovetail.errors import ConfigError
from dovetail.federated.algorithms import Algorithm
from dovetail.federated.averaging import Average
from dovetail.federated.backends import Backend, Worker
from dovetail.federated.clients.simple import Client, metrics_of_trainer
from dovetail.federated.clients.weights import load_weights
from dovetail.federated.clock import Clock
from dovetail.federated.config import FederatedConfig
from dovetail.federated.messages import Update, Weights
from dovetail.federated.records import ClientsEvaluation, RoundRecord
from dovetail.federated.selection import ClientSelection
from dovetail.federated.servers.checks import check_epochs, check_model, idle_settings
from dovetail.federated.servers.evaluation import collect_metrics
from dovetail.federated.servers.hooks import REPLACEMENTS, call_weights_received, notify
from dovetail.federated.servers.round import is_finished, run_round
from dovetail.federated.servers.saving import restore_server, resume_server, server_state
from dovetail.federated.servers.settings import read_settings
from dovetail.federated.servers.setup import build_datasource, build_trainer, start_worker
from dovetail.federated.servers.tasks import TaskKind, training_config
from dovetail.federated.states import ClientStates
from dovetail.overrides import defines, reject_lost_overrides
from dovetail.runtime.seeds import derive_seed
from dovetail.runtime.signals import install_handlers_once
from dovetail.trainers.base import Trainer
from dovetail.trainers.randomness import rng_state, seed_everything, set_rng_state

__all__ = ["Server"]

# The number of clients whose samples are averaged for `mean_samples`.
_NUM_SAMPLED_CLIENTS = 100
_NOT_PREPARED = "the server has no model and no data yet: call `run` or `prepare` first"


class Server:
    """Runs a federation round by round: select, send, train, collect, aggregate, evaluate, record.

    `round.py` has the steps of a round. A round may wait for all its clients or only for some: an update that is not
    waited for arrives in a later round. A client that fails, or whose update is invalid, is left out of the aggregation
    and named in the record of the round.

    Args:
        model: A module, or a class or function that builds one. None means the trainer's model, or else a model that
            fits the data.
        datasource: The data of all clients and of the server's test. None means the data that the configuration names.
        algorithm: The federated algorithm: a name, or an algorithm, which is copied. None means the algorithm of the
            configuration, by default FedAvg.
        trainer: Tests the global model, and trains the clients if the client has no trainer. A trainer is copied; a
            class or function builds one.
        callbacks: Callbacks of the server, in call order.
        config: All settings at once.
        selection: Selects the clients of a round, instead of the selection that the configuration names.
        backend: Runs the clients, instead of the backend that the configuration names.
        aggregator: Turns the updates of a round into one, instead of the aggregator that the configuration names.
        postprocessors: Change updates on the way to the server, instead of `outbound_processors` of the configuration.
        settings: Settings by name, which replace values of `config`: `rounds`, `total_clients`, `per_round`, `seed`,
            `target_accuracy`, `checkpoint_path` and all others of `FederatedConfig`.

    Example:
        >>> from dovetail.federated.clients import simple
        >>> server = Server(rounds=2, total_clients=4, per_round=2)
        >>> [record.reported for record in server.run(simple.Client())]
        [(1, 3), (2, 4)]
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        datasource: Any = None,
        algorithm: Algorithm | Callable[[], Algorithm] | str | None = None,
        trainer: Trainer | Callable[..., Trainer] | None = None,
        callbacks: Iterable[Any] | None = None,
        *,
        config: FederatedConfig | None = None,
        selection: ClientSelection | None = None,
        backend: Backend | str | None = None,
        aggregator: Average | str | None = None,
        postprocessors: Iterable[Any] | None = None,
        **settings: Any,
    ) -> None:
        # The settings, checked once, and the objects that they name. Attributes after these are the state of a run.
        given = read_settings(
            config,
            settings,
            algorithm=algorithm,
            callbacks=callbacks,
            selection=selection,
            backend=backend,
            aggregator=aggregator,
            postprocessors=postprocessors,
        )
        self.config, self.callbacks = given.config, given.callbacks
        self.algorithm, self.selection = given.algorithm, given.selection
        self.backend, self.aggregator = given.backend, given.aggregator
        self.inbound, self.outbound = given.inbound, given.outbound
        self.speeds, self.silos = given.speeds, given.silos
        if self.silos is not None and defines(self, "customize_server_response"):
            raise ConfigError(
                f"{type(self).__name__}.customize_server_response: an edge server does not pass it on to its "
                "clients: leave cross_silo out"
            )
        self.datasource = datasource
        # The ids of the clients that can be selected. None means all clients of the data.
        self.members: Sequence[int] | None = None
        self.clock = Clock()
        self.states = ClientStates()
        self.weights: Weights = {}
        self.current_round = 0
        self.selected_clients: list[int] = []
        self.records: list[RoundRecord] = []
        # The metrics of the clients after personalization. None means that they have not personalized yet.
        self.personalized: ClientsEvaluation | None = None
        self._given_model, self._given_trainer = model, trainer
        self._trainer: Trainer | None = None
        self._worker: Worker | None = None
        # True between start and close of the backend, so that `personalize` inside of `run` uses the same workers.
        self._backend_is_started = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, REPLACEMENTS)

    # ------------------------------------------------------------------ methods to override, as in plato

    def choose_clients(self, clients_pool: Sequence[int], clients_count: int) -> Sequence[int]:
        """Return the clients of a round; override it, or give a `selection`.

        Args:
            clients_pool: The ids of the clients that can be selected and are not busy.
            clients_count: The number of clients to return.
        """
        return self.selection.select(self.current_round, clients_pool, clients_count)

    def customize_server_response(self, server_response: dict[str, Any], client_id: int) -> dict[str, Any]:
        """Override to send one client more than the weights; its `process_server_response` receives it.

        Args:
            server_response: `id` and `current_round`; tensors and plain values may be added.
            client_id: The client.
        """
        return server_response

    def weights_received(self, weights_received: list[Weights]) -> Sequence[Weights]:
        """Override to read or change the weights that clients have trained, and return them."""
        return weights_received

    def weights_aggregated(self, updates: Sequence[Update]) -> None:
        """Override to act when the global weights are updated; `update.report` is the report of a client."""

    def clients_selected(self, selected_clients: Sequence[int]) -> None:
        """Override to act when the clients of a round are selected."""

    def clients_processed(self) -> None:
        """Override to act after a round: `self.records[-1]` is its record."""

    def training_will_start(self) -> None:
        """Override to act before the first round of a run."""

    def server_will_close(self) -> None:
        """Override to act after the last round of a run, also after an error."""

    # ------------------------------------------------------------------ what is available after `prepare`

    @property
    def trainer(self) -> Trainer:
        """The trainer that tests the global model; its model has the newest weights."""
        if self._trainer is None:
            raise ConfigError(_NOT_PREPARED)
        return self._trainer

    @property
    def model(self) -> nn.Module:
        """The global model, with the newest weights."""
        model = self.trainer.context.model
        assert model is not None
        return model

    @property
    def worker(self) -> Worker:
        """The object that does the work of all clients, or of all edge servers."""
        if self._worker is None:
            raise ConfigError(_NOT_PREPARED)
        return self._worker

    @property
    def client_ids(self) -> Sequence[int]:
        """The ids that can be selected: edge servers if there are any, else clients."""
        if self.silos is not None:
            return self.silos.ids
        if self.datasource is None:
            raise ConfigError(_NOT_PREPARED)
        return range(1, self.datasource.num_clients + 1) if self.members is None else self.members

    @property
    def pool(self) -> Sequence[int]:
        """The ids that can be selected in a round: all, or the first ones if only a share of clients takes part."""
        ratio = self.config.algorithm.personalization.get("participating_client_ratio", 1.0)
        return self.client_ids[: max(1, int(len(self.client_ids) * ratio))]

    @cached_property
    def mean_samples(self) -> float:
        """The mean number of samples of the first 100 clients, at least 1; simulated speeds depend on it."""
        some = self.client_ids[:_NUM_SAMPLED_CLIENTS]
        return max(statistics.fmean(self.datasource.num_samples(client_id) for client_id in some), 1.0)

    # ------------------------------------------------------------------ running

    def run(self, client: Client | None = None) -> list[RoundRecord]:
        """Run all rounds that are left, and return the records of all rounds.

        With `checkpoint_path`, a checkpoint is written after every round, and a run resumes from the newest one: a
        server that was killed and is run again ends with the same weights, bit for bit.

        Args:
            client: Does the work of all clients. None means the client of the last run, or else a plain client with the
                server's trainer.

        Raises:
            FederationError: All clients of a round failed. The round is not recorded, and the next run repeats it.
        """
        if idle := idle_settings(self.config, self.backend):
            reasons = "; ".join(f"{name}: {reason}" for name, reason in idle.items())
            warnings.warn(f"settings without effect: {reasons}", UserWarning, stacklevel=2)
        # Signal handlers are installed once for all clients: once per client would take longer than a small batch.
        with _preserved_rng(), install_handlers_once():
            if client is not None or self._worker is None:
                self.prepare(client or Client())
            try:
                with self._started_backend():
                    notify(self, "on_training_will_start")
                    while not is_finished(self):
                        run_round(self)
                    if self.config.algorithm.personalization and self.personalized is None:
                        self.personalize()
            finally:
                # After an error, or without a test in the last round, the model still has the weights of an earlier
                # round.
                load_weights(self.model, self.weights)
                notify(self, "on_server_will_close")
        return self.records

    def prepare(self, client: Client) -> None:
        """Build what the first round needs, and resume from the newest checkpoint; `run` calls it if needed."""
        # The user's client stays unchanged, and can be given to another server.
        client = copy.copy(client)
        if client._given_trainer is None:
            client._given_trainer = self._given_trainer
        # Only the first call resumes: with another client, a prepared server continues from its own rounds.
        if self._trainer is None:
            self._build_model(client)
            resume_server(self)
        self._worker = start_worker(self, client, self._initial_model)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the global model on the server's test data; empty without such data."""
        trainer = self.trainer
        data = self.datasource.central_test_data()
        if data is None:
            return {}
        load_weights(self.model, self.weights)
        return metrics_of_trainer(trainer, data)

    def evaluate_clients(self, ids: Iterable[int] | None = None) -> ClientsEvaluation:
        """Let clients test the global model, with their own layers if they have some, on their own test data.

        Args:
            ids: The clients. None means all. Clients without test data are skipped.
        """
        with _preserved_rng(), self._started_backend():
            return collect_metrics(self, ids, training_config(self.config), "evaluate")

    def personalize(self, ids: Iterable[int] | None = None, epochs: int | None = None) -> ClientsEvaluation:
        """Let each client train the model for itself, after all rounds, and test it on its own test data.

        The global model does not change. The state of each client, such as its own layers, is stored.

        Args:
            ids: The clients. None means all.
            epochs: The number of epochs. None means the number in `algorithm.personalization`, or else in a round.

        Raises:
            ConfigError: There is less than one epoch, or the server was neither run nor prepared.
        """
        epochs = self.config.algorithm.personalization.get("epochs") if epochs is None else epochs
        check_epochs(epochs)
        # `personalizes` compares this number with the round of the task, so that strategies train for the client alone.
        config = {**training_config(self.config), "rounds": self.current_round}
        if epochs is not None:
            config["epochs"] = epochs
        # For strategies, this is the round after the last one.
        self.current_round += 1
        try:
            with _preserved_rng(), self._started_backend():
                found = collect_metrics(self, ids, config, "personalize")
        except BaseException:
            # Otherwise only some clients would have a personalized state, and a repeated call would train those
            # twice.
            self.states.rollback()
            raise
        finally:
            self.current_round -= 1
        # Otherwise a later round that fails would roll back these states too.
        self.states.commit()
        self.personalized = found
        notify(self, "on_clients_personalized")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next round depends on."""
        return server_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; the next round is the one after it.

        Raises:
            CheckpointError: The state belongs to another federation.
        """
        restore_server(self, state)

    # ------------------------------------------------------------------ steps that `compat.plato` overrides

    def _payload_for(self, client_id: int, kind: TaskKind) -> Mapping[str, Any]:
        """Return what a client receives besides the weights."""
        return self.algorithm.payload(client_id)

    def _receive(self, updates: list[Update]) -> list[Update]:
        """Return the updates as the methods that a subclass overrides change them."""
        return call_weights_received(self, updates)

    def _aggregate(self, updates: Sequence[Update], average: Average) -> Weights:
        """Return the new global weights; `average` turns the differences of some updates into one."""
        return self.algorithm.aggregate(self.weights, updates, average)

    def _reported(self, updates: Sequence[Update]) -> Sequence[Any]:
        """Return the updates in the form in which `weights_aggregated` receives them."""
        return updates

    # ------------------------------------------------------------------ private

    def _build_model(self, client: Client) -> None:
        """Build the initial model, and the trainer that tests the global model."""
        if self.datasource is None:
            self.datasource = client.datasource if client.datasource is not None else build_datasource(self.config)
        # The initial weights depend on the seed of the federation alone, not on what the caller drew before.
        seed_everything(derive_seed(self.config.server.random_seed, "model"))
        trainer, model = build_trainer(self._given_model, self._given_trainer, client, self.datasource)
        if self.config.trainer.model_type is not None:
            check_model(self.config.trainer.model_type, model, self.datasource)
        self._trainer, self._initial_model = trainer, model
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @contextmanager
    def _started_backend(self) -> Iterator[None]:
        """Start the backend and close it afterwards; do nothing if it is already started."""
        if self._backend_is_started:
            yield
            return
        self.backend.start(self.worker)
        self._backend_is_started = True
        try:
            yield
        finally:
            self._backend_is_started = False
            self.backend.close()


@contextmanager
def _preserved_rng() -> Iterator[None]:
    """Restore the caller's random number generators afterwards."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
