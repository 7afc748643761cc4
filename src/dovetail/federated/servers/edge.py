"""Edge servers: each aggregates the updates of its clients and sends one update to the server above."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from dovetail.errors import ConfigError
from dovetail.federated.algorithms import Algorithm
from dovetail.federated.clients.simple import Client
from dovetail.federated.config import AlgorithmConfig, FederatedConfig, ResultsConfig
from dovetail.federated.messages import Fault, Task, Update
from dovetail.federated.selection import ClientSelection
from dovetail.federated.states import ClientState
from dovetail.runtime.seeds import derive_seed

if TYPE_CHECKING:
    from dovetail.federated.servers.fedavg import Server

__all__ = ["Edge", "Silos"]

# The parts of its state that an edge server keeps from task to task.
_KEPT = ("algorithm", "selection", "postprocessors", "clients")
# The key of an update's payload under which an edge server sends the faults of its clients.
_FAULTS = "faults"


@dataclass(frozen=True)
class Silos:
    """The division of clients among edge servers: evenly, and in the order of their ids.

    Attributes:
        config: The configuration of the whole federation; `per_round` is divided evenly too.
        algorithm: The algorithm that each edge server runs with its clients.
        selection: Selects the clients of an edge server.
    """

    config: FederatedConfig
    algorithm: Algorithm
    selection: ClientSelection

    def __post_init__(self) -> None:
        total = self.config.algorithm.total_silos
        if self.config.clients.per_round < total:
            raise ConfigError(
                f"per_round: expected at least one for each of {total} silos, got {self.config.clients.per_round}"
            )
        if not self.config.server.synchronous:
            raise ConfigError("cross_silo: a server of edge servers waits for all of them: give synchronous=True")

    @property
    def ids(self) -> range:
        """The ids of the edge servers, from 1."""
        return range(1, self.config.algorithm.total_silos + 1)

    def edge(self, client: Client, model: nn.Module, datasource: Any) -> Edge:
        """Return the object that does the work of all edge servers."""
        if datasource.num_clients < len(self.ids):
            raise ConfigError(
                f"total_silos: expected at most one per client, {datasource.num_clients}, got {len(self.ids)}"
            )
        return Edge(self, client, model, datasource)

    def faults(self, own: Iterable[Fault], updates: Iterable[Update]) -> list[Fault]:
        """Return the faults of edge servers, and of their clients, which are in the updates of the edge servers.

        Each reason names the kind of the client, because the ids of edge servers and clients overlap.
        """
        found = list(own)
        # Faults of clients are kept apart from `found`, because only faults of edge servers get the suffix below.
        client_faults: list[Fault] = []
        for update in updates:
            try:
                client_faults += [_client_fault(plain, update.client_id) for plain in update.payload.get(_FAULTS, ())]
            except (LookupError, TypeError, ValueError):
                # The payload comes from another process or machine, so a wrong form is a fault of its sender, not an
                # error.
                reason = "its list of faults cannot be read"
                found.append(Fault(update.client_id, update.round, "wrong shape", reason))
        return [
            replace(fault, reason=f"{fault.reason} (edge server {fault.client_id})") for fault in found
        ] + client_faults


class Edge:
    """Does the work of all edge servers: each task runs some rounds with the clients of one silo.

    The server above stores the state of an edge server between two tasks: the states of its clients, of its
    algorithm, of its selection and of its postprocessors.

    Example:
        >>> from dovetail.federated.servers import fedavg
        >>> server = fedavg.Server(
        ...     total_clients=6, per_round=6, rounds=2, cross_silo=True, total_silos=3, local_rounds=2
        ... )
        >>> [sorted(record.reported) for record in server.run()]
        [[1, 2, 3], [1, 2, 3]]
    """

    def __init__(self, silos: Silos, client: Client, model: nn.Module, datasource: Any) -> None:
        self._silos, self._client, self._model, self._datasource = silos, client, model, datasource

    def work(self, task: Task, state: ClientState) -> tuple[Update, ClientState]:
        """Return the update of an edge server, and its new state.

        Args:
            task: The task from the server above; `task.client_id` is the number of the silo.
            state: The state of the edge server after its last task.
        """
        server = self._server(task)
        present = server.state_dict()
        # An evaluation belongs to the rounds that are complete; any other task starts new rounds.
        rounds = task.round if task.kind == "evaluate" else task.round - 1
        done = rounds * self._silos.config.algorithm.local_rounds
        # The records are left empty: the server below counts on from `done`, and reports only the rounds of this
        # task.
        server.load_state_dict(
            {**present, **state, "round": done, "weights": {**present["weights"], **task.weights}, "records": []}
        )
        if task.kind != "train":
            epochs = task.config.get("epochs")
            found = server.evaluate_clients() if task.kind == "evaluate" else server.personalize(epochs=epochs)
            names = sorted({name for each in found.metrics.values() for name in each})
            metrics = {name: found.mean(name) for name in names}
            num_samples = sum(found.num_samples.values())
            answer = Update(
                task.client_id, task.round, num_samples, payload=_fault_payload(found.faults), metrics=metrics
            )
            if task.kind == "evaluate":
                return answer, state
            after = server.state_dict()
            return answer, {name: after[name] for name in _KEPT}
        # Train: `rounds` of the configuration in `_server` is such that exactly `local_rounds` rounds are left.
        records = server.run()
        after = server.state_dict()
        last = records[-1]
        # The server above reads these as metrics of a client: a loss while training, an accuracy after it.
        names_above = {"train_loss": "loss", "accuracy": "test_accuracy"}
        metrics = {above: last.metrics[name] for name, above in names_above.items() if name in last.metrics}
        if self._silos.config.server.simulate_wall_time:
            metrics["simulated_seconds"] = server.clock.now
        update = Update(
            task.client_id,
            task.round,
            num_samples=sum(self._datasource.num_samples(client_id) for client_id in last.reported),
            delta={name: after["weights"][name] - value for name, value in task.weights.items()},
            payload=_fault_payload([fault for record in records for fault in record.faults]),
            metrics=metrics,
        )
        return update, {name: after[name] for name in _KEPT}

    def _server(self, task: Task) -> Server:
        from dovetail.federated.servers.fedavg import Server

        config, silo = self._silos.config, task.client_id
        # All edge servers share one `Silos`; without copies, the state of one silo would be seen by the next.
        selection = copy.deepcopy(self._silos.selection)
        if silo > 1:
            # Otherwise all edge servers would select the same positions of their lists of clients.
            selection.seed = derive_seed(selection.seed, "silo", silo)
        server = Server(
            self._model,
            self._datasource,
            copy.deepcopy(self._silos.algorithm),
            callbacks=(),
            selection=selection,
            config=config.with_settings(
                # The backend of the server above runs edge servers in parallel, and its `min_clients` counts these.
                server=replace(config.server, do_test=False, backend="sequential", min_clients=1),
                per_round=len(_part(range(config.clients.per_round), silo, len(self._silos.ids))),
                outbound_processors=copy.deepcopy(config.clients.outbound_processors),
                checkpoint_path=None,
                states_path=None,
                target_accuracy=None,
                target_perplexity=None,
                # Only the server above can stop an edge server that takes too long.
                timeout=config.server.timeout if config.server.simulate_wall_time else None,
                rounds=task.round * config.algorithm.local_rounds,
                results=ResultsConfig(),
                # Clients personalize once, when the server above sends that task.
                algorithm=AlgorithmConfig(config.algorithm.type, options=config.algorithm.options),
            ),
        )
        server.members = _part(range(1, self._datasource.num_clients + 1), silo, len(self._silos.ids))
        server.prepare(self._client)
        return server


def _fault_payload(faults: Sequence[Fault]) -> dict[str, Any]:
    """Return the payload with the faults of clients; empty if there are none."""
    return {_FAULTS: [asdict(fault) for fault in faults]} if faults else {}


def _client_fault(plain: Mapping[str, Any], silo: int) -> Fault:
    reason = f"{plain['reason']} (a client of edge server {silo})"
    return Fault(int(plain["client_id"]), int(plain["round"]), plain["kind"], reason)


def _part(items: range, number: int, total: int) -> range:
    """Return one of `total` parts whose sizes differ by at most one; the first parts are the larger ones."""
    size, more = divmod(len(items), total)
    first = (number - 1) * size + min(number - 1, more)
    return items[first : first + size + (number <= more)]
