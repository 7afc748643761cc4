"""Hooks of a server: how callbacks and the methods that a subclass overrides are called."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.federated.messages import Update, Weights
from dovetail.overrides import defines
from dovetail.runtime.seeds import derive_seed
from dovetail.trainers.randomness import seed_everything

if TYPE_CHECKING:
    from dovetail.federated.servers.fedavg import Server


# Events of callbacks for which the server has a method of the same name without "on_".
_WITH_METHOD = {
    "on_training_will_start",
    "on_clients_selected",
    "on_weights_aggregated",
    "on_clients_processed",
    "on_server_will_close",
}

_AGGREGATE = "give the server an algorithm with aggregate(weights, updates, average), or an aggregator"
_CHECKPOINTS = "checkpoint_path=… writes a checkpoint after every round, and state_dict returns what it holds"
_PLATO = "; or derive from dovetail.compat.plato.servers.fedavg.Server, which calls it"
# Methods that plato's servers define and that nothing here calls, each with its replacement.
REPLACEMENTS = {
    "aggregate_weights": _AGGREGATE + _PLATO,
    "aggregate_deltas": _AGGREGATE + _PLATO,
    "_process_reports": _AGGREGATE,
    "customize_server_payload": "give the server an algorithm with payload(client_id), or inbound_processors" + _PLATO,
    "configure": "give the server its settings, model, trainer, algorithm and datasource as arguments" + _PLATO,
    "init_trainer": "give the server its model, trainer and algorithm as arguments" + _PLATO,
    "get_logged_items": "a record has metrics, and a callback on_clients_processed sees server.records[-1]" + _PLATO,
    "get_accuracy_mean_std": "a record has clients_accuracy and clients_accuracy_std with do_test",
    "save_to_checkpoint": _CHECKPOINTS + _PLATO,
    "_resume_from_checkpoint": _CHECKPOINTS,
    "wrap_up": "target_accuracy ends a run, and clients_processed is called after every round" + _PLATO,
    "periodic_task": "clients_processed is called after every round",
    "should_request_update": "a simulated client has no half-trained model to send",
    "process_client_info": "give the server an algorithm with check(update)",
    "_select_clients": "override choose_clients(clients_pool, clients_count), or give a selection",
    "add_callbacks": "give the server callbacks=[…], or extend server.callbacks",
}


def notify(server: Server, event: str, *arguments: Any) -> None:
    """Call the server's own method for an event first, as plato does, and then its callbacks."""
    if event in _WITH_METHOD:
        getattr(server, event.removeprefix("on_"))(*arguments)
    for callback in server.callbacks:
        getattr(callback, event)(server, *arguments)


def call_choose_clients(server: Server, count: int, busy: Collection[int]) -> list[int]:
    """Return the clients of a round, from `choose_clients` if a subclass overrides it, else from the selection.

    Clients that still work for an earlier round are `busy` and are not selected.

    Raises:
        ConfigError: The override returned a client twice, or one that cannot be selected.
    """
    if not defines(server, "choose_clients"):
        # The selection receives the range itself: a list of a million ids is built only for an override.
        return server.selection.select(server.current_round, server.pool, count, busy)
    pool = [client_id for client_id in server.pool if client_id not in busy]
    # An override may draw from the generators of Python or numpy. A repeated run must draw the same numbers.
    seed_everything(derive_seed(server.config.server.random_seed, "choose_clients", server.current_round))
    chosen = list(server.choose_clients(list(pool), min(count, len(pool))))
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(pool):
        raise ConfigError(
            f"{type(server).__name__}.choose_clients: expected different clients of the pool, got {chosen}"
        )
    return chosen


def call_weights_received(server: Server, updates: list[Update]) -> list[Update]:
    """Return the updates, with the weights that `weights_received` returns if a subclass overrides it.

    Raises:
        ConfigError: The override did not return the weights of every client.
    """
    if not updates or not defines(server, "weights_received"):
        return updates
    returned = server.weights_received(trained_weights(updates))
    if returned is None or len(returned) != len(updates):
        raise ConfigError(
            f"{type(server).__name__}.weights_received: expected the weights of {len(updates)} clients, got "
            f"{'None' if returned is None else len(returned)}: return them"
        )
    return [
        # plato's hook receives whole weights; differences are what the aggregation needs.
        update.with_delta({name: value - update.sent[name] for name, value in weights.items()})
        for update, weights in zip(updates, returned, strict=True)
    ]


def trained_weights(updates: Sequence[Update]) -> list[Weights]:
    """Return the weights that clients have trained, without those that a client does not send."""
    return [{name: it.sent[name] + change for name, change in it.delta.items()} for it in updates]
