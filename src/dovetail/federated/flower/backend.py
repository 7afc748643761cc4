"""Flower backend: clients run on the nodes of a Flower federation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from flwr.app import Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from dovetail.errors import ConfigError, DataError, DovetailError
from dovetail.federated.backends.base import Backend, Done, Outcome, Work, Worker
from dovetail.federated.flower.records import from_records, to_records
from dovetail.federated.messages import Fault, Task, Update
from dovetail.federated.states import ClientState

# Seconds between two polls for replies: at first, and after a long time without a reply.
_SOON, _LATER = 0.1, 2.0
# Flower's error codes of a message without an answer in time.
_EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
_AWAY = (*_EXPIRED, ErrorCode.NODE_UNAVAILABLE)


@dataclass(frozen=True)
class Place:
    """The clients of a node.

    Attributes:
        partition: The node's `partition-id`, counted from 0.
        partitions: Its `num-partitions` n: the node does the work of every n-th client; 0 for one client only.

    Example:
        >>> [client_id for client_id in range(1, 8) if Place(1, 3).has(client_id)]
        [2, 5]
    """

    partition: int
    partitions: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Place:
        """Return the place in the configuration of a node.

        Raises:
            ConfigError: The configuration has none.
        """
        partition, partitions = config.get("partition-id"), config.get("num-partitions", 0)
        if type(partition) is not int or type(partitions) is not int or partition < 0 or partitions < 0:
            raise ConfigError(
                f"node-config: expected whole numbers such as 'partition-id=0 num-partitions=2', got {dict(config)}"
            )
        return cls(partition, partitions)

    def has(self, client_id: int) -> bool:
        """Return whether the node does the work of a client."""
        index = client_id - 1
        return (index % self.partitions if self.partitions else index) == self.partition


class FlowerBackend(Backend):
    """Sends tasks to the nodes of clients.

    A node reports its clients when it is connected. A lost node is a fault of its client, after one minute without
    Flower's heartbeat, or at `timeout`.

    Args:
        grid: The grid of Flower's ServerApp.
        num_nodes: The number of nodes that must be connected before the first round.
        timeout: Seconds for a client. None means as long as its node is connected.
        patience: Seconds until the nodes must be connected.
        states: `nodes` stores the states of clients at their nodes, which a server that resumes in another run of
            Flower cannot reach; `server` sends them with every task.
    """

    def __init__(
        self,
        grid: Grid,
        num_nodes: int = 1,
        timeout: float | None = None,
        *,
        patience: float = 300.0,
        states: Literal["nodes", "server"] = "nodes",
    ) -> None:
        super().__init__(num_nodes, timeout)
        if states not in ("nodes", "server"):
            raise ConfigError(f"states: expected 'nodes' or 'server', got {states!r}")
        self.grid, self.num_nodes, self.patience, self.states = grid, num_nodes, patience, states
        self._places: dict[int, Place] = {}
        self._pending_queries: dict[str, int] = {}
        self._queried_nodes: set[int] = set()
        self._node_errors: dict[int, str] = {}

    def start(self, worker: Worker) -> None:
        """Wait until enough nodes have reported their clients. The worker is not used, because nodes have their own."""
        deadline = time.monotonic() + self.patience
        wait = _Backoff()
        while len(self._online_nodes()) < self.num_nodes:
            self._query_nodes()
            if time.monotonic() > deadline:
                raise DovetailError(self._missing_nodes_message())
            wait()

    def run(self, work: Sequence[Work]) -> Iterator[Outcome]:
        self._query_nodes()
        online = self._online_nodes()
        # Tasks per node. The time limit of a task is multiplied by its position in the queue of its node.
        queue: Counter[int] = Counter()
        deadlines: dict[str, float] = {}
        waiting: dict[str, Work] = {}
        sent: list[tuple[Work, Message]] = []
        for task, state in work:
            # A restarted node is a new one; the last one is used.
            node = next((each for each in reversed(online) if online[each].has(task.client_id)), None)
            if node is None:
                yield _crashed(task, f"it has no node ({self._present_nodes_message()})")
                continue
            queue[node] += 1
            try:
                sent.append(((task, state), self._message(node, task, state, queue[node])))
            except DovetailError as error:
                yield _crashed(task, str(error))
        now = time.monotonic()
        # All messages are sent in one call, so that Flower transfers the weights once.
        for (each, message), key in zip(sent, self._push([message for _, message in sent]), strict=True):
            if key is None:
                yield _crashed(each[0], "its node left before the task was sent")
                continue
            waiting[key] = each
            # A node runs its tasks in sequence.
            deadlines[key] = now + (message.metadata.ttl if self.timeout is not None else float("inf"))
        wait = _Backoff()
        while waiting:
            for reply in self._pull(waiting):
                done = waiting.pop(reply.metadata.reply_to_message_id, None)
                if done is not None:
                    # Replies arrive in quick succession, so the pause is short again after each one.
                    wait = _Backoff()
                    yield self._outcome(*done, reply)
            now = time.monotonic()
            for key in [key for key in waiting if deadlines[key] <= now]:
                task, _ = waiting.pop(key)
                yield _timed_out(task, self.timeout)
            if waiting:
                wait()

    def _message(self, node: int, task: Task, state: ClientState, position: int) -> Message:
        content = {each.name: getattr(task, each.name) for each in fields(Task)}
        content |= {"state": state, "states": self.states}
        ttl = None if self.timeout is None else self.timeout * position
        # Flower has two kinds of tasks; the content has the real one.
        kind = "evaluate" if task.kind == "evaluate" else "train"
        return Message(to_records(content), node, kind, ttl=ttl, group_id=str(task.round))

    def _outcome(self, task: Task, state: ClientState, reply: Message) -> Outcome:
        if reply.has_error():
            return _fault(task, reply.error, self.timeout)
        try:
            content = from_records(reply.content)
            # The reply comes from another machine: a value of a wrong type is a fault of the client, not of the
            # server.
            update = _update(content["update"], task)
            kept = state if task.kind == "evaluate" else content["state"]
        except (DovetailError, KeyError, TypeError) as error:
            return _crashed(task, f"its answer cannot be read: {error}")
        return Done(update, kept)

    # ------------------------------------------------------------------ nodes

    def _query_nodes(self) -> None:
        """Query new nodes for their clients, and read the replies."""
        new = [node for node in self.grid.get_node_ids() if node not in self._queried_nodes]
        if new:
            questions = [Message(RecordDict(), node, "query", ttl=self.patience) for node in new]
            self._pending_queries |= {
                key: node for key, node in zip(self._push(questions), new, strict=True) if key is not None
            }
            self._queried_nodes |= set(new)
        for reply in self._pull(self._pending_queries) if self._pending_queries else ():
            node = self._pending_queries.pop(reply.metadata.reply_to_message_id)
            if reply.has_error() and reply.error.code in _AWAY:
                # If it connects again, it is queried again.
                self._queried_nodes.discard(node)
                continue
            try:
                if reply.has_error():
                    raise DataError(reply.error.reason or "it could not report its clients")
                self._places[node] = Place.of(from_records(reply.content))
            except DovetailError as error:
                self._node_errors[node] = str(error)

    def _online_nodes(self) -> dict[int, Place]:
        present = set(self.grid.get_node_ids())
        return {node: place for node, place in self._places.items() if node in present}

    def _missing_nodes_message(self) -> str:
        found = len(self._online_nodes())
        sentence = f"expected {self.num_nodes} nodes in {self.patience:g} seconds, found {found}"
        if self._pending_queries:
            sentence += f" and {len(self._pending_queries)} that did not report their clients"
        for reason in dict.fromkeys(self._node_errors.values()):
            sentence += f"; a node reported: {reason}"
        return sentence

    def _present_nodes_message(self) -> str:
        numbers = sorted(place.partition for place in self._online_nodes().values())
        return f"there are nodes with partition-id {', '.join(map(str, numbers))}" if numbers else "there are no nodes"

    def _push(self, messages: Sequence[Message]) -> list[str | None]:
        if not messages:
            return []
        keys = list(self.grid.push_messages(messages))
        # Flower returns no ids if it received too much at once.
        if len(keys) != len(messages):
            keys = [key for each in messages for key in self.grid.push_messages([each]) or [""]]
        return [key or None for key in keys]

    def _pull(self, keys: Iterable[str]) -> Iterable[Message]:
        return list(self.grid.pull_messages(list(keys)))


def receipt(round: int) -> ClientState:
    """Return what the server stores for a state at a node."""
    return {"round": round}


class _Backoff:
    """Waits a little longer each time."""

    def __init__(self) -> None:
        self._seconds = _SOON

    def __call__(self) -> None:
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.5, _LATER)


def _update(plain: Mapping[str, Any], task: Task) -> Update:
    """Return an update whose values have the declared types, because a node may send anything."""
    update = Update(**plain)
    if (update.client_id, update.round) != (task.client_id, task.round):
        raise DataError(f"it is of client {update.client_id!r} in round {update.round!r}")
    _check(update.delta, Tensor)
    _check({**update.metrics, "seconds": update.seconds, "num_updates": update.num_updates}, (int, float))
    return update


def _check(found: Mapping[str, Any], kinds: type | tuple[type, ...]) -> None:
    for name, value in found.items():
        if not isinstance(value, kinds):
            raise DataError(f"{name!r} is of type {type(value).__name__}")


def _fault(task: Task, error: Error, timeout: float | None) -> Fault:
    if error.code in _EXPIRED:
        return _timed_out(task, timeout)
    if error.code == ErrorCode.NODE_UNAVAILABLE:
        return _crashed(task, "its node was lost")
    return Fault(task.client_id, task.round, "crashed", error.reason or f"its node answered with error {error.code}")


def _crashed(task: Task, what: str) -> Fault:
    return Fault(task.client_id, task.round, "crashed", f"client {task.client_id}: {what}")


def _timed_out(task: Task, timeout: float | None) -> Fault:
    limit = "in time" if timeout is None else f"within {timeout:g} seconds"
    return Fault(task.client_id, task.round, "timed out", f"client {task.client_id} did not answer {limit}")
