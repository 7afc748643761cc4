"""plato's client: calls the methods that a subclass written for plato overrides, in plato's order."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import nn

from dovetail.compat.plato.algorithms.fedavg import Algorithm
from dovetail.compat.plato.coroutines import completed
from dovetail.compat.plato.processors.base import Pipeline
from dovetail.compat.plato.samplers.base import Sampler
from dovetail.errors import ConfigError
from dovetail.federated import algorithms
from dovetail.federated.backends import Done
from dovetail.federated.callbacks import ClientCallback, as_callback
from dovetail.federated.clients import simple
from dovetail.federated.clients.simple import server_response
from dovetail.federated.clients.weights import copy_nested, fits
from dovetail.federated.messages import CLIENT_PAYLOAD, SERVER_PAYLOAD, Task, Update, Weights
from dovetail.federated.postprocess import Chain
from dovetail.federated.states import ClientState
from dovetail.overrides import defines

__all__ = ["Client"]

_OF_CLIENT = ("configure", "inbound_processed", "_start_training", "_load_payload", "_train")


class Client(simple.Client):
    """A client whose subclasses are written as for plato.

    Besides what `dovetail.clients.simple.Client` calls, it calls `configure` and `inbound_processed`, the methods of an
    algorithm that is derived from `dovetail.compat.plato.algorithms.fedavg.Algorithm`, and the processors that
    `inbound_received`, `outbound_ready` or a callback put into a pipeline. `inbound_processed` may be a coroutine.

    Args:
        model: A module, or a class or function that builds one.
        datasource: The data: ours, or a data source of plato, which `dovetail.compat.plato.servers` cut over clients.
        algorithm: A class derived from plato's algorithm, or one of ours.
        trainer: A trainer, or a class or function that builds one.
        callbacks: Callbacks of the client.
        trainer_callbacks: Callbacks for the trainer.

    Example:
        >>> from dovetail.compat.plato.servers import fedavg
        >>> class Doubled(Client):
        ...     async def inbound_processed(self, processed_inbound_payload):
        ...         report, weights = await super().inbound_processed(processed_inbound_payload)
        ...         return report, {name: 2 * value for name, value in weights.items()}
        >>> len(fedavg.Server(rounds=1, total_clients=4, per_round=2).run(Doubled()))
        1
    """

    _called_for_one = (*simple.Client._called_for_one, *_OF_CLIENT)

    def __init__(
        self,
        model: Any = None,
        datasource: Any = None,
        algorithm: Any = None,
        trainer: Any = None,
        callbacks: Any = None,
        trainer_callbacks: Any = None,
    ) -> None:
        super().__init__(model, datasource, algorithm, trainer, callbacks, trainer_callbacks=trainer_callbacks)
        self.inbound_processor, self.outbound_processor = Pipeline(), Pipeline()
        self._task: Task | None = None
        self._tests: tuple[Task, dict[str, float]] | None = None
        # The report and the payload of the task that was trained last.
        self._answered: tuple[SimpleNamespace, Any] | None = None

    # ------------------------------------------------------------------ methods to override, as in plato

    def configure(self) -> None:
        """Override to act before a client trains, when its trainer and algorithm exist."""

    async def inbound_processed(self, processed_inbound_payload: Any) -> tuple[SimpleNamespace, Any]:
        """Train with the payload of the server, and return the report and the payload to send; override to change both.

        Args:
            processed_inbound_payload: The weights, or what the server's `customize_server_payload` returned.
        """
        return await self._start_training(processed_inbound_payload)

    async def _start_training(self, inbound_payload: Any) -> tuple[SimpleNamespace, Any]:
        self._load_payload(inbound_payload)
        return await self._train()

    def _load_payload(self, server_payload: Any) -> None:
        # The model has the weights of the task already.
        if server_payload is not self._current.weights or defines(self.algorithm, "load_weights"):
            self._algorithm.load_weights(server_payload)

    async def _train(self) -> tuple[SimpleNamespace, Any]:
        task, started = self._current, time.perf_counter()
        super()._train_model(task)
        update = Update(
            task.client_id,
            task.round,
            self.datasource.num_samples(task.client_id),
            metrics=self._test_metrics(task),
            seconds=time.perf_counter() - started,
        )
        report = self.customize_report(update.report)
        if not isinstance(report, SimpleNamespace):
            raise ConfigError(f"{type(self).__name__}.customize_report: expected the report, got {report!r}: return it")
        return report, self._algorithm.extract_weights()

    def add_callbacks(self, callbacks: Iterable[Any]) -> None:
        """Add callbacks, as instances or classes."""
        self.callbacks += [as_callback(it, ClientCallback) for it in callbacks]

    # ------------------------------------------------------------------ attributes of plato's client

    @property
    def trainset(self) -> Any:
        """The training data of the client that trains."""
        return self.datasource.train_data(self.client_id)

    @property
    def testset(self) -> Any:
        """The test data of the client that trains; None if it has none."""
        return self.datasource.test_data(self.client_id)

    @property
    def sampler(self) -> Sampler:
        """All samples of `trainset`, which has the samples of this client only."""
        return Sampler(range(self.datasource.num_samples(self.client_id)))

    # ------------------------------------------------------------------ the steps of a task

    def prepare(
        self,
        model: nn.Module,
        datasource: Any,
        algorithm: algorithms.Algorithm,
        tests_every: int = 0,
        *,
        inbound: Chain | None = None,
        outbound: Chain | None = None,
    ) -> None:
        given: Any = self.algorithm
        is_platos = isinstance(given, type) and issubclass(given, Algorithm)
        # A class of plato's algorithm has no strategies, so the server's algorithm provides them.
        if is_platos:
            self.algorithm = None
        super().prepare(model, datasource, algorithm, tests_every, inbound=inbound, outbound=outbound)
        # The strategies of our algorithm are in the trainer now.
        self.algorithm = (given if is_platos else Algorithm)(trainer=self.trainer)
        # `_customize_update` below must always be called, because it turns the payload into an update.
        self._customizes = True

    def fleet_obstacle(self, work: Sequence[tuple[Task, ClientState]]) -> str | None:
        for name in ("extract_weights", "load_weights"):
            if defines(self.algorithm, name):
                return f"{type(self.algorithm).__name__}.{name} is called for one client at a time"
        return super().fleet_obstacle(work)

    def work_as_fleet(self, work: Sequence[tuple[Task, ClientState]]) -> list[Done]:
        self._answered = None
        return super().work_as_fleet(work)

    def _receive(self, task: Task) -> Task:
        if task.kind != "evaluate":
            self.process_server_response(server_response(task))
        # Hooks and callbacks are called later, in `_train_model`, as plato calls them with its processors.
        return replace(task, weights=self.inbound.unpack(task.weights)) if len(self.inbound) else task

    def _train_model(self, task: Task) -> None:
        self._task = task
        self._algorithm.set_client_id(task.client_id)
        self.configure()
        self.inbound_processor, self.outbound_processor = Pipeline(), Pipeline()
        self.inbound_received(self.inbound_processor)  # type: ignore[arg-type]
        for callback in self.callbacks:
            callback.on_inbound_received(self, self.inbound_processor)
        payload = self.inbound_processor.process(task.payload.get(SERVER_PAYLOAD, task.weights))
        # This trains: `inbound_processed` calls `_start_training`, unless a subclass overrides it.
        answer = completed(self.inbound_processed(payload))
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ConfigError(
                f"{type(self).__name__}.inbound_processed: expected the report and the payload, got {answer!r}: "
                "return both"
            )
        report, outbound = answer
        for callback in self.callbacks:
            callback.on_inbound_processed(self, payload)
        self.outbound_ready(report, self.outbound_processor)  # type: ignore[arg-type]
        for callback in self.callbacks:
            callback.on_outbound_ready(self, report, self.outbound_processor)
        # Kept until `_customize_update`, because the client first computes its own update from the trained model.
        self._answered = report, self.outbound_processor.process(outbound)

    def _notify_update_ready(self, update: Update) -> None:
        """Do nothing: the hooks were called with the report, while the payload could be changed."""

    def _customize_update(self, update: Update) -> Update:
        if self._answered is None:
            return update
        (report, outbound), self._answered = self._answered, None
        update = update.with_report(report)
        weights = self._current.weights
        # The payload is not only weights: it is sent as it is, and the server's hooks must understand it.
        if not fits(outbound, weights):
            return replace(update, payload={**update.payload, CLIENT_PAYLOAD: copy_nested(outbound)})
        # The usual case: the update already has this difference, exactly and without another copy.
        if _is_state_of(self.trainer.model, outbound):
            return update
        return update.with_delta({name: outbound[name].cpu() - value for name, value in weights.items()})

    def _test_metrics(self, task: Task) -> dict[str, float]:
        # The report and the update both need the result of one test.
        if self._tests is None or self._tests[0] is not task:
            self._tests = task, super()._test_metrics(task)
        return self._tests[1]

    @property
    def _current(self) -> Task:
        assert self._task is not None, "a task comes before training"
        return self._task

    @property
    def _algorithm(self) -> Algorithm:
        assert isinstance(self.algorithm, Algorithm), "a server calls prepare before the first task"
        return self.algorithm


def _is_state_of(model: nn.Module, outbound: Weights) -> bool:
    """Return whether a payload is the memory of the model itself."""
    state = model.state_dict()
    return outbound.keys() == state.keys() and all(
        # Compared by address, because comparing values would take as long as a copy.
        value.data_ptr() == outbound[name].data_ptr() and value.dtype == outbound[name].dtype
        for name, value in state.items()
    )
