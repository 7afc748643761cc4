"""Flower apps: a `ServerApp` from a server, and a `ClientApp` from a client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeVar

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from dovetail.errors import ConfigError
from dovetail.federated.backends.base import Worker
from dovetail.federated.flower.backend import FlowerBackend, Place, receipt
from dovetail.federated.flower.records import from_records, to_records
from dovetail.federated.messages import Task
from dovetail.federated.states import ClientState
from dovetail.trainers.modules import as_module

if TYPE_CHECKING:
    from dovetail.federated.clients.simple import Client
    from dovetail.federated.servers.fedavg import Server


T = TypeVar("T")


def server_app(
    server: Server | Callable[[Context], Server],
    client: Client | Callable[[Context], Client] | None = None,
    *,
    num_nodes: int | None = None,
    patience: float = 300.0,
    states: Literal["nodes", "server"] = "nodes",
) -> ServerApp:
    """Return a ServerApp that runs a server, whose clients are at the nodes of the federation.

    Args:
        server: The server, or a function of Flower's context that builds it.
        client: The client, if the server takes its model or data from it; it does no work here.
        num_nodes: The number of nodes that must be connected before the first round. None means one per client of a
            round.
        patience: See `FlowerBackend`, as for `states`.
        states: `nodes` or `server`, which stores the states of clients.

    Example:
        >>> from dovetail.federated.clients import simple
        >>> from dovetail.federated.servers import fedavg
        >>> app = server_app(fedavg.Server(rounds=3, total_clients=2, per_round=2), simple.Client())
        >>> type(app).__name__
        'ServerApp'
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        running = _build_or_return(server, context)
        config = running.config
        nodes = num_nodes or min(config.clients.per_round, config.clients.total_clients)
        # Only the place of the clients changes; the limit that the server was configured with stays.
        timeout = running.backend.timeout
        running.backend = FlowerBackend(grid, nodes, timeout, patience=patience, states=states)
        running.run(None if client is None else _build_or_return(client, context))

    return app


def client_app(
    client: Client | Callable[[Context], Client], server: Server | Callable[[Context], Server] | None = None
) -> ClientApp:
    """Return a ClientApp that does the work of the clients of a node.

    A node with `partition-id` i is client i + 1. With `num-partitions` n it is also the clients i + 1 + n, i + 1 + 2n
    and so on.

    Args:
        client: The client, or a function of Flower's context that builds it.
        server: The server of the same federation. It does not run here, but has the model, the algorithm and the
            postprocessors. None is for a client with its own model, datasource and algorithm.

    Example:
        >>> from dovetail.federated.clients import simple
        >>> from dovetail.federated.servers import fedavg
        >>> app = client_app(simple.Client(), fedavg.Server(rounds=3, total_clients=2, per_round=2))
        >>> type(app).__name__
        'ClientApp'
    """

    def build_worker(context: Context) -> Worker:
        mine = copy.copy(_build_or_return(client, context))
        if server is None:
            return _prepare_without_server(mine)
        described = copy.copy(_build_or_return(server, context))
        # The files of the server are not on this node.
        described.config = described.config.with_settings(checkpoint_path=None, states_path=None)
        described.prepare(mine)
        return described.worker

    return worker_app(build_worker)


def worker_app(make: Callable[[Context], Worker]) -> ClientApp:
    """Return a ClientApp around any worker.

    Args:
        make: Builds the worker when the first task is received.

    Example:
        >>> from dovetail.federated.clients import simple
        >>> type(worker_app(lambda context: simple.Client())).__name__
        'ClientApp'
    """
    app = ClientApp()
    node = _Node(make)
    app.train()(node.work)
    app.evaluate()(node.work)
    app.query()(node.report_partition)
    return app


class _Node:
    """Answers the three kinds of messages."""

    def __init__(self, make: Callable[[Context], Worker]) -> None:
        self._make = make
        self._workers: dict[int, Worker] = {}

    def report_partition(self, message: Message, context: Context) -> Message:
        """Reply with the partition of this node."""
        return _reply_or_error(message, lambda: self._partition_reply(message, context))

    def work(self, message: Message, context: Context) -> Message:
        return _reply_or_error(message, lambda: self._work_reply(message, context))

    def _partition_reply(self, message: Message, context: Context) -> Message:
        place = Place.of(context.node_config)
        content = {"partition-id": place.partition, "num-partitions": place.partitions}
        return Message(to_records(content), reply_to=message)

    def _work_reply(self, message: Message, context: Context) -> Message:
        content = from_records(message.content)
        given, stores_here = content.pop("state"), content.pop("states") == "nodes"
        task = Task(**content)
        place = Place.of(context.node_config)
        if not place.has(task.client_id):
            raise ConfigError(f"client {task.client_id} does not live at the node of {place}")
        # A process may serve several runs. Only the worker of the newest one is kept.
        if context.run_id not in self._workers:
            self._workers = {context.run_id: self._make(context)}
        states = _NodeStates(context, task.client_id)
        state = states.get(given) if stores_here else given
        update, new = self._workers[context.run_id].work(task, state)
        if stores_here and task.kind != "evaluate":
            new = states.put(given, task.round, new)
        answer = {"update": update.to_plain(), "state": {} if task.kind == "evaluate" else new}
        return Message(to_records(answer), reply_to=message)


class _NodeStates:
    """The states of a client at its node: the one of the last used update, and the one after it.

    The server stores the round of the state. If it does not use an update, it continues with the round before.
    """

    def __init__(self, context: Context, client_id: int) -> None:
        self._records = context.state
        self._prefix = f"client {client_id} round "

    def get(self, given: ClientState) -> ClientState:
        if not given:
            return {}
        under = self._record_prefix(given["round"])
        if not any(name.startswith(under) for name in self._records):
            raise ConfigError(
                f"{self._prefix}{given['round']}: its state is not at this node; states='server' takes states along"
            )
        return from_records(self._records, under=under)

    def put(self, given: ClientState, round: int, state: ClientState) -> ClientState:
        # The old state stays until the next task, because the server may reject this update and send the old round
        # again.
        needed = self._record_prefix(given["round"]) if given else None
        for name in list(self._records):
            if name.startswith(self._prefix) and not (needed and name.startswith(needed)):
                del self._records[name]
        if not state:
            return {}
        self._records.update(to_records(state, under=self._record_prefix(round)))
        return receipt(round)

    def _record_prefix(self, round: int) -> str:
        return f"{self._prefix}{round}: "


def _reply_or_error(message: Message, answer: Callable[[], Message]) -> Message:
    """Return the answer; an error of the client becomes an error message."""
    try:
        return answer()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def _prepare_without_server(client: Client) -> Worker:
    model, datasource, algorithm = as_module(client.model), client.datasource, client.algorithm
    if model is None or datasource is None or algorithm is None:
        given = {"model": model, "datasource": datasource, "algorithm": algorithm}
        missing = [name for name, value in given.items() if value is None]
        raise ConfigError(
            f"client_app: a client without a server brings its own {' and '.join(missing)}, or give the server"
        )
    client.prepare(model, datasource, algorithm)
    return client


def _build_or_return(given: T | Callable[[Context], T], context: Context) -> T:
    return given(context) if callable(given) else given
