"""Evaluation by clients: each measures a model on its own test data and returns the metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dovetail.federated.messages import Fault, Update
from dovetail.federated.records import ClientsEvaluation
from dovetail.federated.servers.round import raise_if_all_failed
from dovetail.federated.servers.tasks import TaskKind, make_task, packed_weights

if TYPE_CHECKING:
    from dovetail.federated.servers.fedavg import Server


def collect_metrics(
    server: Server, ids: Iterable[int] | None, config: Mapping[str, Any], kind: TaskKind
) -> ClientsEvaluation:
    """Return the metrics of clients; if they personalize, their new states are stored.

    The backend of the server must be started. None for `ids` means all clients. `evaluate` measures the global model,
    and `personalize` trains it first, for the client alone.

    Raises:
        FederationError: All clients failed.
    """
    wanted = list(server.client_ids if ids is None else ids)
    weights = packed_weights(server)
    size = max(server.config.clients.per_round, 1)
    answers: dict[int, Update] = {}
    faults: list[Fault] = []
    # As many clients at a time as in a round, so that memory does not grow with the population.
    for first in range(0, len(wanted), size):
        tasks = [make_task(server, it, weights, config, kind) for it in wanted[first : first + size]]
        for outcome in server.backend.run([(task, server.states.get(task.client_id)) for task in tasks]):
            if isinstance(outcome, Fault):
                faults.append(outcome)
                continue
            answers[outcome.update.client_id] = outcome.update
            if kind == "personalize":
                server.states.put(outcome.update.client_id, outcome.state)
    if server.silos is not None:
        faults = server.silos.faults(faults, answers.values())
    # If at least one client answered, faults are part of the result.
    if not answers:
        raise_if_all_failed(server.current_round, faults)
    # A client without test data returns no metrics.
    measured = [answers[it] for it in wanted if it in answers and answers[it].metrics]
    return ClientsEvaluation(
        {update.client_id: dict(update.metrics) for update in measured},
        {update.client_id: update.num_samples for update in measured},
        tuple(faults),
    )
