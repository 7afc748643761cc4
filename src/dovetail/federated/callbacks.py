"""Who watches a federation: plato's callbacks of servers and clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["ClientCallback", "ServerCallback"]


class ServerCallback:
    """Hears what happens at a server. Override what you want to hear.

    Example:
        >>> class Tell(ServerCallback):
        ...     def on_clients_selected(self, server, selected_clients, **kwargs):
        ...         print(f"round {server.current_round}: {selected_clients}")
    """

    def on_training_will_start(self, server: Any) -> None:
        """Before the first round of a run."""

    def on_clients_selected(self, server: Any, selected_clients: Sequence[int], **kwargs: Any) -> None:
        """After the clients of a round are chosen."""

    def on_weights_received(self, server: Any, weights_received: Sequence[Any]) -> None:
        """When a round's updates are there, with the weights that each client has trained."""

    def on_weights_aggregated(self, server: Any, updates: Sequence[Any]) -> None:
        """When the new global weights are there, with the updates that went into them."""

    def on_clients_processed(self, server: Any) -> None:
        """After a round: `server.records[-1]` tells what it brought."""

    def on_clients_personalized(self, server: Any) -> None:
        """When clients have trained for themselves: `server.personalized` tells how good each of them is."""

    def on_server_will_close(self, server: Any) -> None:
        """After the last round of a run; also after an error."""


class ClientCallback:
    """Hears what happens at a client, in the process where it works. Override what you want to hear."""

    def on_inbound_received(self, client: Any, inbound_processor: Any) -> None:
        """When a task has come, before its processors undo what they did to the weights."""

    def on_inbound_processed(self, client: Any, data: Any) -> None:
        """When the task is ready to be worked on."""

    def on_outbound_ready(self, client: Any, report: Any, outbound_processor: Any) -> None:
        """When the update is ready, before its processors change it."""
