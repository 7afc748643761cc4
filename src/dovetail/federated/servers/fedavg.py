"""A server: asks clients round after round, and makes one model of what they send."""

from __future__ import annotations

import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from torch import nn

from dovetail.errors import ConfigError, FederationError
from dovetail.federated.algorithms import Algorithm
from dovetail.federated.averaging import Average
from dovetail.federated.backends import Backend, Done, Worker
from dovetail.federated.clients.simple import Client, judged, load_weights
from dovetail.federated.clock import Arrival, Clock
from dovetail.federated.config import FederatedConfig
from dovetail.federated.messages import SERVER_RESPONSE, Fault, Task, Update, Weights
from dovetail.federated.postprocess import Gathering
from dovetail.federated.postprocess.base import EVERYONE
from dovetail.federated.records import ClientsEvaluation, RoundRecord, accuracy_of_clients, client_metrics
from dovetail.federated.seeds import mix
from dovetail.federated.selection import ClientSelection
from dovetail.federated.servers.refusals import (
    check_epochs,
    check_model,
    idle_settings,
)
from dovetail.federated.servers.saving import (
    restore_server,
    resume_server,
    roll_back,
    save_server,
    server_state,
    snapshot,
)
from dovetail.federated.servers.settings import read_settings
from dovetail.federated.servers.setup import build_datasource, build_trainer, start_worker
from dovetail.federated.states import ClientStates
from dovetail.federated.validation import admit, check_update
from dovetail.overrides import defines, reject_lost_overrides
from dovetail.trainers.base import Trainer
from dovetail.trainers.interruption import listening
from dovetail.trainers.randomness import rng_state, seed_everything, set_rng_state

__all__ = ["Server"]

# Over how many clients' samples an average client is found.
_AVERAGED = 100
_NOT_PREPARED = "the server knows no model and no data yet: call `run` or `prepare` first"
_Kind = Literal["train", "evaluate", "personalize"]


class Server:
    """Runs a federation: select, send, train, gather, aggregate, evaluate; round after round.

    Rounds that wait for all their clients, for some, or for one are the same rounds: an update that was not waited
    for arrives in a later one. A client that fails, or whose update cannot be used, is left out and named in the record
    of the round.

    Args:
        model: A module, or a class or function that makes one; None for the trainer's, or one that fits the data.
        datasource: The data of all clients and of the server's test; None for what the configuration names.
        algorithm: What the server makes of updates, and what clients do: a name, or an algorithm, of which a copy is
            used. None for what the settings name: FedAvg, unless they say otherwise.
        trainer: Tests the global model, and trains the clients of a client without a trainer; a copy of a trainer, or
            what a class or function makes.
        callbacks: Who hears what happens here.
        config: All settings at once.
        selection: Who is asked in a round, in place of the name in the settings.
        backend: Where clients run, in place of the name in the settings.
        aggregator: How updates become one, in place of the name in the settings.
        postprocessors: What becomes of an update on its way, in place of `outbound_processors` in the settings.
        settings: Settings by name, over those of `config`: `rounds`, `total_clients`, `per_round`, `seed`,
            `target_accuracy`, `checkpoint_path` and whatever else `FederatedConfig` has.

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
        self.records: list[RoundRecord] = []
        # The metrics of the clients after personalization. None means that they have not personalized yet.
        self.personalized: ClientsEvaluation | None = None
        self._given_model, self._given_trainer = model, trainer
        self._trainer: Trainer | None = None
        self._worker: Worker | None = None
        self._backend_is_started = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, _INSTEAD)

    # ------------------------------------------------------------------ plato's override points

    def choose_clients(self, clients_pool: Sequence[int], clients_count: int) -> Sequence[int]:
        """Return the clients of a round; override it, or give a `selection`.

        Args:
            clients_pool: The ids of the clients that are not at work.
            clients_count: How many are wanted.
        """
        return self.selection.select(self.current_round, clients_pool, clients_count)

    def customize_server_response(self, server_response: dict[str, Any], client_id: int) -> dict[str, Any]:
        """Override to add what one client gets besides the weights; its `process_server_response` receives it.

        Args:
            server_response: `id` and `current_round`; tensors and plain values may be added.
            client_id: The client.
        """
        return server_response

    def weights_received(self, weights_received: list[Weights]) -> Sequence[Weights]:
        """Override to look at the weights that clients have trained, or to change them, and return them."""
        return weights_received

    def weights_aggregated(self, updates: Sequence[Update]) -> None:
        """Override to act when the new global weights are there; `update.report` is the report of a client."""

    def clients_selected(self, selected_clients: Sequence[int]) -> None:
        """Override to act when the clients of a round are chosen."""

    def clients_processed(self) -> None:
        """Override to act after a round: `self.records[-1]` is its record."""

    def training_will_start(self) -> None:
        """Override to act before the first round of a run."""

    def server_will_close(self) -> None:
        """Override to act after the last round of a run, also after an error."""

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
        """Who does the work of those whom this server asks; there from `prepare` on."""
        if self._worker is None:
            raise ConfigError(_NOT_PREPARED)
        return self._worker

    def run(self, client: Client | None = None) -> list[RoundRecord]:
        """Run all rounds that are left, and return the records of all.

        With `checkpoint_path`, a checkpoint is written after every round, and a run goes on behind the newest: a server
        that was killed and is run again ends with the very same weights.

        Args:
            client: Does the work of all clients; None for the one of the last run, or one with the server's trainer.

        Raises:
            FederationError: All clients of a round failed. The round is not recorded, and the next run repeats it.
        """
        if idle := idle_settings(self.config, self.backend):
            told = "; ".join(f"{name}: {reason}" for name, reason in idle.items())
            warnings.warn(f"settings without effect: {told}", UserWarning, stacklevel=2)
        with self._undisturbed(), listening():
            if client is not None or self._worker is None:
                self.prepare(client or Client())
            try:
                with self._working():
                    self._tell("on_training_will_start")
                    while not self._is_over():
                        self._round()
                    if self.config.algorithm.personalization and self.personalized is None:
                        self.personalize()
            finally:
                load_weights(self.model, self.weights)
                self._tell("on_server_will_close")
        return self.records

    def prepare(self, client: Client) -> None:
        """Make what the first round needs, and go on from a checkpoint if there is one; `run` does so by itself."""
        client = copy.copy(client)
        if client._given_trainer is None:
            client._given_trainer = self._given_trainer
        if self._trainer is None:
            self._build_model(client)
            resume_server(self)
        self._worker = start_worker(self, client, self._initial_model)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of the global model on the server's test data; none without such data."""
        trainer = self.trainer
        data = self.datasource.central_test_data()
        if data is None:
            return {}
        load_weights(self.model, self.weights)
        return judged(trainer, data)

    def evaluate_clients(self, ids: Iterable[int] | None = None) -> ClientsEvaluation:
        """Let clients judge the global model, with what is their own in it, on their own test data.

        Args:
            ids: Who; None for all. Clients without test data are passed over.
        """
        return self._heard_of(ids, self._client_config(), "evaluate")

    def personalize(self, ids: Iterable[int] | None = None, epochs: int | None = None) -> ClientsEvaluation:
        """Let clients train for themselves, after all rounds, and judge what came of it on their own test data.

        The global model stays as it is. What an algorithm keeps with a client, such as its own layers, is kept.

        Args:
            ids: Who; None for all.
            epochs: How many epochs; None for those of `algorithm.personalization`, or else of a round.

        Raises:
            ConfigError: There is less than one epoch, or the server was neither run nor prepared.
        """
        epochs = self.config.algorithm.personalization.get("epochs") if epochs is None else epochs
        check_epochs(epochs)
        # To strategies this is a round after the last one.
        config = {**self._client_config(), "rounds": self.current_round}
        if epochs is not None:
            config["epochs"] = epochs
        self.current_round += 1
        try:
            found = self._heard_of(ids, config, "personalize")
        except BaseException:
            self.states.rollback()
            raise
        finally:
            self.current_round -= 1
        # What a later round that fails goes back to.
        self.states.commit()
        self.personalized = found
        self._tell("on_clients_personalized")
        return found

    def _heard_of(self, ids: Iterable[int] | None, config: Mapping[str, Any], kind: _Kind) -> ClientsEvaluation:
        """Ask clients for their metrics."""
        wanted = list(self.client_ids if ids is None else ids)
        weights = self._sent()
        size = max(self.config.clients.per_round, 1)
        answers: dict[int, Update] = {}
        faults: list[Fault] = []
        with self._undisturbed(), self._working():
            # A round's clients at a time, so that memory does not grow with the population.
            for first in range(0, len(wanted), size):
                tasks = [self._task(it, weights, config, kind) for it in wanted[first : first + size]]
                for outcome in self.backend.run([(task, self.states.get(task.client_id)) for task in tasks]):
                    if isinstance(outcome, Fault):
                        faults.append(outcome)
                        continue
                    answers[outcome.update.client_id] = outcome.update
                    if kind == "personalize":
                        self.states.put(outcome.update.client_id, outcome.state)
        if self.silos is not None:
            faults = self.silos.faults(faults, answers.values())
        if not answers:
            self._raise_if_all_failed(faults)
        found = [answers[client_id] for client_id in wanted if client_id in answers and answers[client_id].metrics]
        return ClientsEvaluation(
            {update.client_id: dict(update.metrics) for update in found},
            {update.client_id: update.num_samples for update in found},
            tuple(faults),
        )

    # ------------------------------------------------------------------ one round, in the order of things

    def _round(self) -> None:
        before = snapshot(self)
        done = len(self.records)
        self.current_round += 1
        try:
            self._run_round()
        except BaseException:
            if len(self.records) == done:
                # The round was not recorded, so it is rolled back; the next run repeats it.
                roll_back(self, before)
            raise

    def _run_round(self) -> None:
        started = time.perf_counter()
        tasks, faults = self._ask()
        arrivals = self.clock.gather(self.current_round, self.config.server)
        faults += [arrival.outcome for arrival in arrivals if isinstance(arrival.outcome, Fault)]
        reports = [arrival.outcome for arrival in arrivals if isinstance(arrival.outcome, Done)]
        gathering = self._gathering([task.client_id for task in tasks])
        updates, unusable = self._usable([report.update for report in reports], gathering)
        faults += unusable
        if self.silos is not None:
            faults = self.silos.faults(faults, [report.update for report in reports])
        if not updates and not self.clock.busy():
            self._raise_if_all_failed(faults)
        updates = self._after_hook(updates)
        left_out = {fault.client_id for fault in unusable}
        used = [report for report in reports if updates and report.update.client_id not in left_out]
        if len(used) < max(self.config.server.min_clients, 1):
            used = []
        if any(defines(callback, "on_weights_received") for callback in self.callbacks):
            self._tell("on_weights_received", _trained(updates))
        if used:
            self._aggregate(updates, gathering)
            for report in used:
                self.states.put(report.update.client_id, report.state)
            seconds = {arrival.client_id: arrival.seconds for arrival in arrivals}
            # What masks have added up is nobody's own.
            known = [update for update in updates if update.client_id != EVERYONE]
            self.selection.observe(self.current_round, known, seconds)
        self._tell("on_weights_aggregated", updates)
        metrics = self._metrics(updates)
        before = self.records[-1].elapsed_time if self.records else 0.0
        self.records.append(
            RoundRecord(
                self.current_round,
                self.clock.now if self.config.server.simulates_time else before + time.perf_counter() - started,
                tuple(task.client_id for task in tasks),
                tuple(report.update.client_id for report in used),
                tuple(faults),
                metrics,
                bytes_down=sum(task.num_bytes for task in tasks),
                bytes_up=sum(report.update.num_bytes for report in reports),
                staleness=max((update.staleness for update in updates), default=0),
                backend=self.backend.ran_on,
            )
        )
        try:
            self._tell("on_clients_processed")
        finally:
            # What is in the records has been, whatever becomes of those who hear of it.
            self.states.commit()
            save_server(self)

    def _ask(self) -> tuple[list[Task], list[Fault]]:
        """Send tasks to as many clients as are missing, and put their answers on the way."""
        number, busy = self.current_round, self.clock.busy()
        wanted = min(self._per_round, len(self.client_ids)) - len(busy)
        selected = self._chosen(wanted, busy) if wanted > 0 else []
        self._tell("on_clients_selected", selected)
        weights, config = self._sent(), self._client_config()
        if self.outbound.needs_cohort:
            config["cohort"] = list(selected)
        # All share weights and settings, so that whoever carries them need carry those only once.
        tasks = [self._task(client_id, weights, config) for client_id in selected]
        began_with = self.inbound.unpack(weights) if len(self.inbound) else weights
        answers, faults = self._answers(tasks)
        for place, task in enumerate(tasks):
            if task.client_id not in answers:
                continue
            done = answers[task.client_id]
            outcome: Done | Fault = Done(replace(done.update, sent=began_with), done.state)
            seconds = self._duration(task, done.update)
            limit = self.config.server.timeout
            if self.config.server.simulates_time and limit is not None and seconds > limit:
                reason = (
                    f"client {task.client_id} takes {seconds:g} simulated seconds, and the server waits for {limit:g}"
                )
                outcome, seconds = Fault(task.client_id, number, "timed out", reason), limit
            self.clock.expect(Arrival(self.clock.now + seconds, number * 2**32 + place, seconds, outcome))
        return tasks, faults

    def _chosen(self, count: int, busy: Collection[int]) -> list[int]:
        """Return the clients of a round, by `choose_clients` if it is overridden."""
        if not defines(self, "choose_clients"):
            return self.selection.select(self.current_round, self.client_ids, count, busy)
        pool = [client_id for client_id in self.client_ids if client_id not in busy]
        # An override may draw from Python's or numpy's generator; a run that is repeated draws the same numbers.
        seed_everything(mix(self.config.server.random_seed, "choose_clients", self.current_round))
        chosen = list(self.choose_clients(list(pool), min(count, len(pool))))
        if len(set(chosen)) < len(chosen) or not set(chosen) <= set(pool):
            raise ConfigError(
                f"{type(self).__name__}.choose_clients: expected different clients of the pool, got {chosen}"
            )
        return chosen

    def _after_hook(self, updates: Sequence[Update]) -> list[Update]:
        """Return the updates of a round with the weights that `weights_received` returns, if it is overridden."""
        if not defines(self, "weights_received") or not updates:
            return list(updates)
        returned = self.weights_received(_trained(updates))
        if returned is None or len(returned) != len(updates):
            raise ConfigError(
                f"{type(self).__name__}.weights_received: expected the weights of {len(updates)} clients, got "
                f"{'None' if returned is None else len(returned)}: return them"
            )
        return [
            update.with_delta({name: value - update.sent[name] for name, value in weights.items()})
            for update, weights in zip(updates, returned, strict=True)
        ]

    def _answers(self, tasks: Sequence[Task]) -> tuple[dict[int, Done], list[Fault]]:
        """Let the backend work, and sort out whose answers count."""
        done: list[Done] = []
        faults: list[Fault] = []
        for outcome in self.backend.run([(task, self.states.get(task.client_id)) for task in tasks]):
            if isinstance(outcome, Fault):
                faults.append(outcome)
            else:
                done.append(outcome)
        accepted, refused = admit(
            (outcome.update for outcome in done), [task.client_id for task in tasks], self.current_round
        )
        chosen = {id(update) for update in accepted}
        answers = {it.update.client_id: it for it in done if id(it.update) in chosen}
        faults += refused
        heard = answers.keys() | {fault.client_id for fault in faults}
        silent = [task.client_id for task in tasks if task.client_id not in heard]
        faults += [Fault(it, self.current_round, "timed out", f"client {it} has not answered") for it in silent]
        # A backend answers in any order, and records tell the same of every one.
        order = {task.client_id: place for place, task in enumerate(tasks)}
        return answers, sorted(faults, key=lambda fault: order.get(fault.client_id, len(order)))

    def _usable(self, updates: Sequence[Update], gathering: Gathering) -> tuple[list[Update], list[Fault]]:
        """Decode updates, and sort out those that can be added to the weights."""
        timed = [replace(update, staleness=self.current_round - update.round) for update in updates]
        decoded, faults = self.outbound.decode(timed, gathering)
        usable = []
        for update in decoded:
            fault = check_update(update, update.sent)
            if fault is None and update.num_samples:
                fault = self.algorithm.check(update)
            if fault is None:
                usable.append(update)
            else:
                faults.append(fault)
        return usable, faults

    def _raise_if_all_failed(self, faults: Sequence[Fault]) -> None:
        """Raise an error that shows the first fault, if there is one; called when no client has a usable answer."""
        if faults:
            num_failed = len({fault.client_id for fault in faults})
            raise FederationError(
                f"round {self.current_round}: no client has a usable answer, {num_failed} failed; "
                f"first failure: {faults[0].sentence}"
            )

    def _aggregate(self, updates: Sequence[Update], gathering: Gathering) -> None:
        # Updates of clients without samples say nothing.
        counted = [update for update in updates if update.num_samples]

        def average(some: Sequence[Update]) -> Weights:
            return self.outbound.aggregated(self.aggregator(some), some, gathering)

        if counted:
            self.weights = self.algorithm.aggregate(self.weights, counted, average)

    def _metrics(self, updates: Sequence[Update]) -> dict[str, float]:
        tested = self.evaluate() if self.config.server.do_test else {}
        return {**client_metrics(updates), **(tested or accuracy_of_clients(updates))}

    # ------------------------------------------------------------------ what is sent

    def _common(self) -> Weights:
        """The weights that do not stay with clients."""
        return {name: value for name, value in self.weights.items() if not self.algorithm.stays(name)}

    def _sent(self) -> Weights:
        """The weights that go to clients, as the inbound processors write them."""
        common = self._common()
        if not len(self.inbound):
            return common
        return self.inbound.pack(common, mix(self.config.server.random_seed, "inbound", self.current_round))

    def _task(self, client_id: int, weights: Weights, config: Mapping[str, Any], kind: _Kind = "train") -> Task:
        payload = self.algorithm.payload(client_id)
        if kind != "evaluate" and defines(self, "customize_server_response"):
            response = {"id": client_id, "current_round": self.current_round}
            payload = {**payload, SERVER_RESPONSE: self.customize_server_response(response, client_id)}
        return Task(
            self.current_round,
            client_id,
            weights,
            seed=mix(self.config.server.random_seed, self.current_round, client_id),
            kind=kind,
            payload=payload,
            config=config,
        )

    def _client_config(self) -> dict[str, Any]:
        """What the configuration says about training, by the names that strategies look for."""
        trainer = self.config.trainer
        names = ("epochs", "batch_size", "optimizer", "lr_scheduler", "loss_criterion")
        told = {name: value for name in names if (value := getattr(trainer, name)) is not None}
        parameters = {name: dict(value) for name, value in vars(self.config.parameters).items() if value}
        if parameters:
            told["parameters"] = parameters
        if self.config.algorithm.options:
            told["algorithm"] = dict(self.config.algorithm.options)
        if trainer.global_lr_scheduler:
            told |= {"global_lr_scheduler": True, "rounds": trainer.rounds}
        return told

    def _gathering(self, cohort: Sequence[int]) -> Gathering:
        return Gathering(
            self.current_round,
            cohort,
            self._common(),
            num_clients=len(self.client_ids),
            seed=mix(self.config.server.random_seed, "aggregation", self.current_round),
        )

    def _duration(self, task: Task, update: Update) -> float:
        """Simulated seconds from sending a task to the arrival of its answer."""
        if not self.config.server.simulates_time:
            return 0.0
        # An edge server knows how long its own rounds took.
        work = update.metrics.get("simulated_seconds")
        if work is None:
            epochs = task.config.get("epochs") or self.trainer.context.config.get("epochs", 1)
            work = self.speeds.work(task.client_id, epochs, update.num_samples / self._average_samples)
        return work + self.speeds.transfer(task.num_bytes, update.num_bytes)

    # ------------------------------------------------------------------ around the rounds

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Keep the backend at work; inside of another call of this, do nothing."""
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
    def _undisturbed(self) -> Iterator[None]:
        """Leave the caller's generators as they were."""
        randomness = rng_state()
        try:
            yield
        finally:
            set_rng_state(randomness)

    def _build_model(self, client: Client) -> None:
        """Build the initial model and the trainer that tests the global one."""
        if self.datasource is None:
            self.datasource = client.datasource if client.datasource is not None else build_datasource(self.config)
        seed_everything(mix(self.config.server.random_seed, "model"))
        trainer, model = build_trainer(self._given_model, self._given_trainer, client, self.datasource)
        if self.config.trainer.model_type is not None:
            check_model(self.config.trainer.model_type, model, self.datasource)
        self._trainer, self._initial_model = trainer, model
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @property
    def client_ids(self) -> Sequence[int]:
        """The ids that can be selected: those of the edge servers if there are any, else those of clients."""
        if self.silos is not None:
            return self.silos.ids
        if self.datasource is None:
            raise ConfigError(_NOT_PREPARED)
        return range(1, self.datasource.num_clients + 1) if self.members is None else self.members

    @property
    def _per_round(self) -> int:
        return self.config.clients.per_round if self.silos is None else len(self.silos.ids)

    @cached_property
    def _average_samples(self) -> float:
        some = self.client_ids[:_AVERAGED]
        return max(statistics.fmean(self.datasource.num_samples(client_id) for client_id in some), 1.0)

    def _is_over(self) -> bool:
        trainer = self.config.trainer
        metrics = self.records[-1].metrics if self.records else {}
        if trainer.target_accuracy is not None and metrics.get("accuracy", -math.inf) >= trainer.target_accuracy:
            return True
        if trainer.target_perplexity is not None and _perplexity(metrics) <= trainer.target_perplexity:
            return True
        return self.current_round >= trainer.rounds

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next round depends on."""
        return server_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`; the next round is the one after it.

        Raises:
            CheckpointError: The state belongs to another federation.
        """
        restore_server(self, state)

    def _tell(self, event: str, *about: Any) -> None:
        # The method of the server first, as in plato.
        if (own := _HOOKS.get(event)) is not None:
            getattr(self, own)(*about)
        for callback in self.callbacks:
            getattr(callback, event)(self, *about)


# Callbacks and the methods of the server that are called before them.
_HOOKS = {
    name: name.removeprefix("on_")
    for name in (
        "on_training_will_start",
        "on_clients_selected",
        "on_weights_aggregated",
        "on_clients_processed",
        "on_server_will_close",
    )
}

_AGGREGATE = "give the server an algorithm with aggregate(weights, updates, average), or an aggregator"
_CHECKPOINTS = "checkpoint_path=… writes a checkpoint after every round, and state_dict returns what it holds"
# What plato's servers define and nothing here calls.
_INSTEAD = {
    "aggregate_weights": _AGGREGATE,
    "aggregate_deltas": _AGGREGATE,
    "_process_reports": _AGGREGATE,
    "customize_server_payload": "give the server an algorithm with payload(client_id), or inbound_processors",
    "configure": "give the server its settings, model, trainer, algorithm and datasource as arguments",
    "init_trainer": "give the server its model, trainer and algorithm as arguments",
    "get_logged_items": "a record has metrics, and a callback on_clients_processed sees server.records[-1]",
    "get_accuracy_mean_std": "a record has clients_accuracy and clients_accuracy_std with do_test",
    "save_to_checkpoint": _CHECKPOINTS,
    "_resume_from_checkpoint": _CHECKPOINTS,
    "wrap_up": "target_accuracy ends a run, and clients_processed is called after every round",
    "periodic_task": "clients_processed is called after every round",
    "should_request_update": "a simulated client has no half-trained model to send",
    "process_client_info": "give the server an algorithm with check(update)",
    "_select_clients": "override choose_clients(clients_pool, clients_count), or give a selection",
    "add_callbacks": "give the server callbacks=[…], or extend server.callbacks",
}


def _trained(updates: Sequence[Update]) -> list[Weights]:
    """Return the weights that clients have trained, without those that stay with them."""
    return [{name: it.sent[name] + change for name, change in it.delta.items()} for it in updates]


def _perplexity(metrics: Mapping[str, float]) -> float:
    return metrics.get("perplexity", math.exp(min(metrics.get("loss", math.inf), 700.0)))
