"""Callbacks of servers and clients, as in plato."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from dovetail.errors import ConfigError

T = TypeVar("T")


def as_callback(candidate: Any, kind: type[T]) -> T:
    """Return a callback that is given as an instance or as a class.

    Raises:
        ConfigError: It is of another kind.
    """
    made = candidate() if isinstance(candidate, type) else candidate
    if not isinstance(made, kind):
        raise ConfigError(f"callbacks: expected a {kind.__name__} (class or instance), got {candidate!r}")
    return made


class ServerCallback:
    """Base of callbacks of a server. Every method does nothing; override those that you need.

    Example:
        >>> class Printing(ServerCallback):
        ...     def on_clients_selected(self, server, selected_clients, **kwargs):
        ...         print(f"round {server.current_round}: {selected_clients}")
    """

    def on_training_will_start(self, server: Any) -> None:
        """Called before the first round of a run."""

    def on_clients_selected(self, server: Any, selected_clients: Sequence[int], **kwargs: Any) -> None:
        """Called after the clients of a round are selected."""

    def on_weights_received(self, server: Any, weights_received: Sequence[Any]) -> None:
        """Called after the updates of a round are received, with the weights that each client has trained."""

    def on_weights_aggregated(self, server: Any, updates: Sequence[Any]) -> None:
        """Called after the global weights are updated, with the updates that were used."""

    def on_clients_processed(self, server: Any) -> None:
        """Called after a round: `server.records[-1]` is its record."""

    def on_clients_personalized(self, server: Any) -> None:
        """Called after the personalization round: `server.personalized` has the metrics of each client."""

    def on_server_will_close(self, server: Any) -> None:
        """Called after the last round of a run; also after an error."""


class ClientCallback:
    """Base of callbacks of a client, which run in its process. Every method does nothing; override those you need."""

    def on_inbound_received(self, client: Any, inbound_processor: Any) -> None:
        """Called after a task is received, before the postprocessors decode its weights."""

    def on_inbound_processed(self, client: Any, data: Any) -> None:
        """Called after the weights of a task are decoded."""

    def on_outbound_ready(self, client: Any, report: Any, outbound_processor: Any) -> None:
        """Called after training, before the postprocessors encode the update."""
