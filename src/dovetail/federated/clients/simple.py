"""Client of a federation: trains on its data and sends an update."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dovetail.callbacks import Callback, NonFiniteLoss, ProgressDisplay
from dovetail.data import as_loader
from dovetail.errors import ConfigError
from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.backends import Done
from dovetail.federated.callbacks import ClientCallback, as_callback
from dovetail.federated.clients.local_training import continue_schedule, summarize_training
from dovetail.federated.clients.weights import copy_nested, difference, load_weights
from dovetail.federated.fleet import FleetTrainer, Member, fleet_obstacle
from dovetail.federated.messages import SERVER_RESPONSE, Task, Update, Weights
from dovetail.federated.personalization import personal_weights
from dovetail.federated.postprocess import Chain
from dovetail.federated.states import ClientState
from dovetail.overrides import defines, is_ours, reject_lost_overrides
from dovetail.runtime.seeds import derive_seed
from dovetail.trainers.base import Trainer
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.modules import as_module
from dovetail.trainers.preserve_state import layers, with_parts
from dovetail.trainers.randomness import seed_everything
from dovetail.trainers.reuse import configure, equip, reset
from dovetail.trainers.single_process import SingleProcessTrainer
from dovetail.trainers.strategies import DefaultLRSchedulerStrategy, DefaultTestingStrategy
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.trainers.testing import accuracy_on

__all__ = ["Client", "as_trainer"]

# The keys of a client's own layers, and of the state of its postprocessors, in its state.
_OWN, _POSTPROCESSORS = "model", "postprocessors"
# Methods of plato's trainers that train a model and that a client does not call.
_NEVER_CALLED = ("train", "train_model", "obtain_model_update")
_WORK = "override work(task, state), which returns the update and the client's new state"
_PLATO = "; or derive from dovetail.compat.plato.clients.simple.Client, which calls it"
# Methods of plato's clients that are never called here, each with its replacement.
_INSTEAD = {
    "configure": "give the client its model, trainer, algorithm and datasource as arguments" + _PLATO,
    "inbound_processed": _WORK + _PLATO,
    "_train": _WORK + _PLATO,
    "_load_payload": _WORK + _PLATO,
    **dict.fromkeys(("_load_data", "_allocate_data"), "give the client a datasource"),
    "_obtain_model_update": "a simulated client has no half-trained model to send",
    "start_client": "a server runs its clients: server.run(client)",
    "add_callbacks": "give the client callbacks=[…]",
    # Earlier names of methods of this class.
    "begin": "override prepare",
    "effort": "override estimate_cost(task)",
    "why_alone": "override fleet_obstacle(work)",
}


class Client:
    """Does the work of any client of a federation, one at a time.

    It is a template: a federation of a thousand clients needs one. A single client has its data, by its id, and its
    state, which is received with every task and returned with every answer. A task leaves nothing else behind.

    Args:
        model: A module, or a class or function that builds one. None means the trainer's, or one that fits the data.
        datasource: The data of all clients. None means the server's.
        algorithm: The algorithm. None means the server's.
        trainer: A trainer, which is copied, or a class or function that builds one. None means the server's, or a
            plain one if the server has none.
        callbacks: Callbacks of the client.
        trainer_callbacks: Callbacks for the trainer.

    Example:
        >>> from dovetail.federated.servers import fedavg
        >>> client = Client(trainer=ComposableTrainer(num_epochs=1, batch_size=16, learning_rate=0.1))
        >>> records = fedavg.Server(rounds=2, total_clients=4, per_round=2).run(client)
        >>> [record.round for record in records]
        [1, 2]
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        datasource: Any = None,
        algorithm: Algorithm | None = None,
        trainer: Trainer | Callable[..., Trainer] | None = None,
        callbacks: Iterable[Any] | None = None,
        *,
        trainer_callbacks: Iterable[Any] | None = None,
    ) -> None:
        self.model = model
        self.datasource = datasource
        self.algorithm = algorithm
        self.callbacks = [as_callback(it, ClientCallback) for it in callbacks or ()]
        self.client_id = 0
        self.current_round = 0
        self._given_trainer = trainer
        self._trainer_callbacks = list(trainer_callbacks or ())
        self._trainer: SingleProcessTrainer | None = None
        self._initial: dict[str, Tensor] = {}
        self._initial_states: Mapping[str, Any] = {}
        # True if strategies store something in the state of a client.
        self._stores_state = False
        self.tests_every = 0
        self.inbound, self.outbound = Chain(), Chain()
        self._started = 0.0
        self._customizes = False
        # The settings of training that the trainer does not read, because it has its own optimizer, schedule or loss.
        self.unread_settings: tuple[str, ...] = ()

    # The methods that are called for one client at a time, and so keep clients from training together.
    _called_for_one: ClassVar[tuple[str, ...]] = (
        "work",
        "process_server_response",
        "customize_report",
        "inbound_received",
        "outbound_ready",
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, _INSTEAD)

    def process_server_response(self, server_response: dict[str, Any]) -> None:
        """Override to use what the server's `customize_server_response` sent; called before the client trains.

        Args:
            server_response: `id` and `current_round`, with what the server has added for this client.
        """

    def customize_report(self, report: SimpleNamespace) -> SimpleNamespace:
        """Override to add to a client's report, and return it; the server has it as `update.report`.

        Args:
            report: `client_id`, `num_samples`, `accuracy` and `training_time`; tensors and plain values may be added.
        """
        return report

    def inbound_received(self, inbound_processor: Chain) -> None:
        """Override to act when a task is received, before callbacks are called."""

    def outbound_ready(self, report: Any, outbound_processor: Chain) -> None:
        """Override to act when an update is ready, before callbacks are called and its processors change it."""

    @property
    def trainer(self) -> SingleProcessTrainer:
        """The trainer that works for every client in turn."""
        assert self._trainer is not None, "a server calls prepare before the first task"
        return self._trainer

    def prepare(
        self,
        model: nn.Module,
        datasource: Any,
        algorithm: Algorithm,
        tests_every: int = 0,
        *,
        inbound: Chain | None = None,
        outbound: Chain | None = None,
    ) -> None:
        """Prepare for the tasks of a federation; the server calls it once, before the first task.

        Args:
            model: The server's model; it is copied, unless the client was given a model.
            datasource: The data, unless the client was given data.
            algorithm: The algorithm, unless the client was given one.
            tests_every: Test the trained model on the client's own data in every n-th round; 0 for never.
            inbound: The postprocessors of the weights, which are decoded here.
            outbound: The postprocessors of the update, which is encoded here.
        """
        self.datasource = self.datasource if self.datasource is not None else datasource
        self.algorithm = self.algorithm or algorithm
        self.tests_every = tests_every
        self.inbound, self.outbound = inbound or Chain(), outbound or Chain()
        own = copy.deepcopy(as_module(self.model) or model)
        self._trainer = trainer = as_trainer(self._given_trainer, own)
        self._customizes = defines(self, "customize_report")
        self.unread_settings = _find_unread_settings(trainer.strategies)
        for layer in layers(trainer):
            for name in _NEVER_CALLED:
                if defines(layer, name):
                    raise ConfigError(
                        f"{type(layer).__name__}.{name}: a client trains with fit, which does not call it: override "
                        "train_step, perform_forward_and_backward_passes, a hook such as train_run_start, or fit itself"
                    )
        self.algorithm.prepare(model, self.datasource.num_clients)
        equip(trainer, **self.algorithm.equip(trainer.strategies))
        # A trainer with a seed starts every run with it, so that all clients would draw the same numbers.
        trainer.options = replace(trainer.options, seed=None).bound_to(trainer)
        context = trainer.context
        context.callbacks.add(*copy.deepcopy(self._trainer_callbacks))
        # The state of strategies and callbacks is reset before every client.
        self._initial_states = {
            "shared": dict(context.state),
            "strategies": copy.deepcopy(trainer.strategies.state_dict()),
            # Including those whose state is still empty.
            "callbacks": [
                (it, copy.deepcopy(it.state_dict()))
                for it in context.callbacks
                if type(it).state_dict is not Callback.state_dict
            ],
        }
        self._stores_state = bool(trainer.strategies.overriding("on_prepare"))
        # The layers that stay with a client start as copies of the server's.
        self._initial = {
            name: value.detach().clone() for name, value in model.state_dict().items() if self.algorithm.is_local(name)
        }
        context.client.local_names = frozenset(self._initial)

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        """Return the answer to a task, and the client's new state; the given state is not changed.

        Args:
            task: The task: to train, to evaluate or to personalize the model.
            state: The state of the client; empty before its first task.
        """
        self._started = started = time.perf_counter()
        self.client_id, self.current_round = task.client_id, task.round
        task = self._receive(task)
        before = self._reset_for(task, state)
        if task.kind == "evaluate":
            return self._evaluation_update(task), state
        num_samples = self.datasource.num_samples(task.client_id)
        if task.kind == "personalize":
            return self._personalize(task, state, num_samples)
        if num_samples == 0:
            # A client without samples returns a zero update; this is not a fault.
            nothing = {name: torch.zeros_like(value) for name, value in task.weights.items()}
            return self.outbound.encode(Update(task.client_id, task.round, 0, delta=nothing), task, dict(state)), state
        context = self.trainer.context
        self._train_model(task)
        assert context.model is not None
        after = {name: value.detach() for name, value in context.model.state_dict().items()}
        num_updates, loss = summarize_training(context)
        update, kept = self._make_update(task, state, before, after, num_samples, num_updates, loss)
        return replace(update, seconds=time.perf_counter() - started), kept

    def estimate_cost(self, task: Task) -> float | None:
        """Return the cost estimate of a task: samples times epochs. None means that sizes are not known."""
        if not self.datasource.knows_sizes:
            return None
        epochs = task.config.get("epochs", self.trainer.context.config["epochs"])
        return float(self.datasource.num_samples(task.client_id) * epochs)

    def fleet_obstacle(self, work: Sequence[tuple[Task, ClientState]]) -> str | None:
        """Return why clients cannot train as one fleet; None if they can, and an empty string if a task trains none."""
        if any(task.kind != "train" for task, _ in work):
            return ""
        if self.callbacks:
            return f"{type(self.callbacks[0]).__name__} is called for one client at a time"
        for name in self._called_for_one:
            if defines(self, name):
                return f"{type(self).__name__}.{name} is called for one client at a time"
        for task, _ in work:
            if self.datasource.num_samples(task.client_id) == 0:
                return f"client {task.client_id} has no samples"
        configs = [task.config for task, _ in work]
        if any(config != configs[0] for config in configs):
            return "the clients have different settings"
        reset(core := self.trainer)
        configure(core, configs[0])
        reason = fleet_obstacle(core)
        if reason is None and self._stores_state and any(True for _ in core.model.buffers()):
            reason = "the model has buffers, which a fleet shares, but each client stores its own model"
        return reason

    def work_as_fleet(self, work: Sequence[tuple[Task, ClientState]]) -> list[Done]:
        """Return the result of `work` for each of several clients, which train as one fleet."""
        started = time.perf_counter()
        work = [(replace(task, weights=self.inbound.unpack(task.weights)), state) for task, state in work]
        members = [self._member(task, state) for task, state in work]
        trainer = copy.deepcopy(self.trainer)
        callbacks = trainer.context.callbacks
        # Otherwise one client whose loss is not finite would stop the training of all.
        callbacks.remove(*[it for it in callbacks if isinstance(it, NonFiniteLoss)])
        fleet = FleetTrainer(trainer, members)
        fleet.train_together()
        seconds = (time.perf_counter() - started) / len(work)
        done = []
        for position, ((task, state), member) in enumerate(zip(work, members, strict=True)):
            self._reset_for(task, state)
            after = fleet.state_of(position)
            context = self.trainer.context
            assert context.model is not None
            load_weights(context.model, after)
            context.client.state = fleet.client_state_of(position)
            num_samples = self.datasource.num_samples(task.client_id)
            num_updates, loss = fleet.num_updates[position], fleet.losses[position]
            sent = fleet.payload_of(position)
            update, kept = self._make_update(task, state, member.state, after, num_samples, num_updates, loss, sent)
            done.append(Done(replace(update, seconds=seconds), kept))
        return done

    # ------------------------------------------------------------------ steps that `compat.plato` overrides

    def _receive(self, task: Task) -> Task:
        """Call the hooks for a received task, and return it with its weights decoded."""
        if task.kind != "evaluate":
            self.process_server_response(server_response(task))
        self.inbound_received(self.inbound)
        for callback in self.callbacks:
            callback.on_inbound_received(self, self.inbound)
        if len(self.inbound):
            task = replace(task, weights=self.inbound.unpack(task.weights))
        for callback in self.callbacks:
            callback.on_inbound_processed(self, task)
        return task

    def _train_model(self, task: Task) -> None:
        """Train the model, which has the weights of the task, on the data of the client."""
        self.trainer.fit(self.datasource.train_data(task.client_id))

    def _notify_update_ready(self, update: Update) -> None:
        """Call the hooks of an update that is ready."""
        self.outbound_ready(update, self.outbound)
        for callback in self.callbacks:
            callback.on_outbound_ready(self, update, self.outbound)

    # ------------------------------------------------------------------ private

    def _member(self, task: Task, state: ClientState) -> Member:
        """Return a client as a member of a fleet, with a complete state."""
        before, core = self._reset_for(task, state), self.trainer
        core.strategies.prepare(core.context)
        data = self.datasource.train_data(task.client_id)
        return Member(before, data, derive_seed(task.seed, "order"), core.context.client.state, task.payload)

    def _make_update(
        self,
        task: Task,
        state: ClientState,
        before: Weights,
        after: Weights,
        num_samples: int,
        num_updates: int,
        loss: float,
        sent: Mapping[str, Any] | None = None,
    ) -> tuple[Update, ClientState]:
        """Return the update and the new state of a client after training."""
        sent = _payload(self.trainer) if sent is None else sent
        update = Update(
            task.client_id,
            task.round,
            num_samples=num_samples,
            num_updates=num_updates,
            delta=difference({name: after[name] for name in task.weights}, before),
            payload=copy_nested(sent),
            metrics={"loss": loss, **self._test_metrics(task)},
            seconds=time.perf_counter() - self._started,
        )
        if self._customizes:
            update = self._customize_update(update)
        kept = self._state_after(state, after)
        self._notify_update_ready(update)
        return self.outbound.encode(update, task, kept), kept

    def _customize_update(self, update: Update) -> Update:
        report = self.customize_report(update.report)
        if not isinstance(report, SimpleNamespace):
            raise ConfigError(f"{type(self).__name__}.customize_report: expected the report, got {report!r}: return it")
        return update.with_report(report)

    def _state_after(self, state: ClientState, after: Weights) -> ClientState:
        """Return the state of a client after training."""
        kept: ClientState = copy_nested(self.trainer.context.client.state)
        if self._initial:
            kept[_OWN] = copy_nested({name: after[name] for name in self._initial})
        if _POSTPROCESSORS in state:
            kept[_POSTPROCESSORS] = state[_POSTPROCESSORS]
        return kept

    def _reset_for(self, task: Task, state: ClientState) -> dict[str, Tensor]:
        """Reset the trainer for one client and return the initial weights."""
        core = self.trainer
        context = core.context
        assert context.model is not None
        received = {**task.weights, **self._initial, **state.get(_OWN, {})}
        before = {name: value.to(context.device) for name, value in received.items()}
        load_weights(context.model, before)
        client = context.client
        client.id, client.round = task.client_id, task.round
        context.run.is_one_of_many = True
        own = {name: value for name, value in state.items() if name not in (_OWN, _POSTPROCESSORS)}
        # Copied, because strategies may change it in place, and the server keeps it if the update is not used.
        client.state = copy_nested(own, context.device)
        client.payload = task.payload
        reset(core)
        core._data.forget_loaders()
        configure(core, task.config)
        if context.config.get("global_lr_scheduler"):
            continue_schedule(context)
        context.state.clear()
        context.state.update(self._initial_states["shared"], order_seed=derive_seed(task.seed, "order"))
        if self._initial_states["strategies"]:
            core.strategies.load_state_dict(copy.deepcopy(self._initial_states["strategies"]))
        for callback, first in self._initial_states["callbacks"]:
            if first or callback.state_dict():
                callback.load_state_dict(copy.deepcopy(first))
        seed_everything(task.seed)
        return before

    def _evaluation_update(self, task: Task) -> Update:
        core = self.trainer
        core.strategies.prepare(core.context)
        num_samples = self.datasource.num_samples(task.client_id)
        return Update(task.client_id, task.round, num_samples, metrics=self._own_metrics(task.client_id))

    def _personalize(self, task: Task, state: ClientState, num_samples: int) -> tuple[Update, ClientState]:
        """Train for the client alone, and evaluate the weights that it would use."""
        context = self.trainer.context
        if num_samples:
            self._train_model(task)
        assert context.model is not None
        kept = self._state_after(state, context.model.state_dict()) if num_samples else state
        metrics = self._own_metrics(task.client_id)
        return Update(task.client_id, task.round, num_samples, metrics=metrics), kept

    def _test_metrics(self, task: Task) -> dict[str, float]:
        if not self.tests_every or task.round % self.tests_every:
            return {}
        return {f"test_{name}": value for name, value in self._own_metrics(task.client_id).items()}

    def _own_metrics(self, client_id: int) -> dict[str, float]:
        """Return the metrics of the weights that the client would use itself, on its own test data."""
        data = self.datasource.test_data(client_id)
        if data is None:
            return {}
        core = self.trainer
        context = core.context
        assert context.model is not None
        own = personal_weights(core.strategies.model_update, context)
        if own is None:
            return metrics_of_trainer(core, data)
        sent = copy_nested(context.model.state_dict(), context.device)
        load_weights(context.model, own)
        try:
            return metrics_of_trainer(core, data)
        finally:
            load_weights(context.model, sent)


def server_response(task: Task) -> dict[str, Any]:
    """Return the response of the server for a task, with the additions of its `customize_server_response`."""
    return {"id": task.client_id, "current_round": task.round, **task.payload.get(SERVER_RESPONSE, {})}


def as_trainer(trainer: Any, model: nn.Module | None = None) -> SingleProcessTrainer:
    """Return a copy of a trainer, or a new one.

    Args:
        trainer: A trainer, or a class or function that builds one. None means a plain one.
        model: The model to train. With None, a new trainer keeps its model and a copy has none.

    Raises:
        ConfigError: It is none of these.
    """
    if trainer is None:
        # The default schedule reads the settings; a trainer has none otherwise.
        return ComposableTrainer(model=model, lr_scheduler_strategy=DefaultLRSchedulerStrategy(), verbose=False)
    if isinstance(trainer, SingleProcessTrainer):
        # The copy receives another model, so the model of the trainer is not copied.
        mine, given = trainer.context, trainer.context.model
        mine.model = None
        try:
            made = copy.deepcopy(trainer)
        finally:
            mine.model = given
    else:
        made = trainer() if callable(trainer) else trainer
    if not isinstance(made, SingleProcessTrainer):
        raise ConfigError(f"trainer: expected a trainer, or a class or function that makes one, got {trainer!r}")
    if model is not None:
        made.model = model
    # A federation shows its own progress.
    callbacks = made.context.callbacks
    callbacks.remove(*[it for it in callbacks if isinstance(it, ProgressDisplay)])
    return made


def metrics_of_trainer(trainer: Any, data: Any) -> dict[str, float]:
    """Return the metrics of a trainer's model on test data; a testing strategy or test method sets `accuracy`."""
    metrics = dict(trainer.evaluate(data))
    has_strategy = type(trainer.strategies.testing) not in (type(None), DefaultTestingStrategy)
    own: Any = next((it for it in layers(trainer) if defines(it, "test") or defines(it, "test_model")), None)
    if has_strategy or own is not None:
        # Plato's test methods build a loader themselves.
        testset = getattr(as_loader(data, batch_size=1), "dataset", data)
        test: Any = partial(accuracy_on, trainer)
        if own is not None:
            test = own.test if defines(own, "test") else partial(own.test_model, {})
        metrics["accuracy"] = float(test(testset, None))
    return metrics


def _payload(trainer: SingleProcessTrainer) -> dict[str, Any]:
    return trainer.strategies.model_update.get_update_payload(trainer.context)


def _find_unread_settings(strategies: Strategies) -> tuple[str, ...]:
    """Return the settings of optimizer, schedule and loss that these strategies do not read."""
    found = []
    for name, strategy, own in (
        ("optimizer", strategies.optimizer, "optimizer_fn"),
        ("lr_scheduler", strategies.lr_scheduler, "scheduler_fn"),
        ("loss_criterion", strategies.loss, "loss_fn"),
    ):
        parts = list(with_parts([strategy]))
        # A strategy from outside of this library may read any setting.
        reads = any((own in vars(part) and vars(part)[own] is None) or not is_ours(type(part)) for part in parts)
        if not reads:
            found.append(name)
    return tuple(found)
