"""A grid whose nodes are in this process. Messages are written to bytes and read again, as over a network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents


class LocalGrid(Grid):
    """Nodes answer when they are asked for their replies; those in `silent` never do, those in `away` are missed."""

    run: Any = None

    def __init__(self, apps: Iterable[ClientApp] = (), num_partitions: int = 0) -> None:
        self.nodes: dict[int, tuple[ClientApp, Context]] = {}
        self.silent: set[int] = set()
        self.away: set[int] = set()
        self.messages: dict[str, Message] = {}
        self.num_pushed = 0
        for partition, app in enumerate(apps):
            config = {"partition-id": partition} | ({"num-partitions": num_partitions} if num_partitions else {})
            self.join(app, config)

    def join(self, app: ClientApp, config: dict[str, Any]) -> int:
        node = len(self.nodes) + 101
        self.nodes[node] = app, Context(1, node, config, RecordDict(), {})
        return node

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        keys = []
        for message in messages:
            self.num_pushed += 1
            key = f"message {self.num_pushed}"
            message.metadata.__dict__["_message_id"] = key
            self.messages[key] = _carried(message)
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for key in message_ids:
            message = self.messages.get(key)
            if message is None or message.metadata.dst_node_id in self.silent:
                continue
            del self.messages[key]
            app, context = self.nodes[message.metadata.dst_node_id]
            if message.metadata.dst_node_id in self.away:
                lost = Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable")
                found.append(_carried(Message(lost, reply_to=message)))
            else:
                found.append(_carried(app(message, context)))
        return found

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def _carried(message: Message) -> Message:
    key = message.metadata.message_id
    contents = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    received = inflate_object_from_contents(message.object_id, contents)
    assert isinstance(received, Message)
    received.metadata.__dict__["_message_id"] = key
    return received
