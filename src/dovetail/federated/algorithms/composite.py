"""Composite algorithm: several federated algorithms combined into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from dovetail.errors import CheckpointError, ConfigError
from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.averaging import Average
from dovetail.federated.messages import Fault, Update, Weights
from dovetail.trainers.strategies.base import Strategy
from dovetail.trainers.strategies.bundle import Strategies
from dovetail.trainers.strategies.nesting import Described


@dataclass(eq=False, repr=False)
class CompositeAlgorithm(Described, Algorithm):
    """Several algorithms combined; each wraps the ones before it.

    Clients use the strategies of all. At the server, each algorithm receives the change that the one before it
    computed: `CompositeAlgorithm([SCAFFOLD(), FedAdam()])` lets Adam step with SCAFFOLD's change.

    Args:
        algorithms: At least one algorithm, in this order.

    Raises:
        ConfigError: Two of them decide the same topic.

    Example:
        >>> from dovetail.federated.algorithms import FedProx, SCAFFOLD
        >>> CompositeAlgorithm([FedProx(mu=0.1), SCAFFOLD()])
        CompositeAlgorithm(algorithms=[FedProx(mu=0.1), SCAFFOLD()])
    """

    algorithms: Sequence[Algorithm]

    def __post_init__(self) -> None:
        if not self.algorithms:
            raise ConfigError("algorithms: expected at least one, got none")
        known: dict[str, Algorithm] = {}
        for algorithm in self.algorithms:
            for matter in algorithm.decides:
                if matter in known:
                    raise ConfigError(
                        f"algorithms: {known[matter].title} and {algorithm.title} both decide {matter}; use one of them"
                    )
                known[matter] = algorithm
        self.decides = tuple(known)
        self.needs_each_update = any(it.needs_each_update for it in self.algorithms)

    @property
    def title(self) -> str:
        return " + ".join(algorithm.title for algorithm in self.algorithms)

    def prepare(self, model: nn.Module, num_clients: int) -> None:
        super().prepare(model, num_clients)
        for algorithm in self.algorithms:
            algorithm.prepare(model, num_clients)

    def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
        """Return the strategies of all; each wraps those before it."""
        made: dict[str, Any] = {}
        for algorithm in self.algorithms:
            made |= algorithm.equip(replace(strategies, **made))
        return made

    def is_local(self, name: str) -> bool:
        return any(algorithm.is_local(name) for algorithm in self.algorithms)

    def payload(self, client_id: int) -> Mapping[str, Any]:
        sent: dict[str, Any] = {}
        for algorithm in self.algorithms:
            added = algorithm.payload(client_id)
            if twice := sorted(sent.keys() & added.keys()):
                raise ConfigError(f"algorithms: two of {self!r} send {twice[0]!r}; leave one of them out")
            sent |= added
        return sent

    def check(self, update: Update) -> Fault | None:
        return next((fault for algorithm in self.algorithms if (fault := algorithm.check(update))), None)

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        """Return the weights of the last algorithm; each one steps with the change of the one before it."""
        # Skip algorithms without an aggregation: (w + change) − w does not equal the change bit for bit.
        speaking = [it for it in self.algorithms if type(it).aggregate is not Algorithm.aggregate]
        for algorithm in speaking[:-1]:
            average = _change_by(algorithm, weights, average)
        last = speaking[-1] if speaking else Algorithm()
        return last.aggregate(weights, updates, average)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [algorithm.state_dict() for algorithm in self.algorithms]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["parts"]) != len(self.algorithms):
            raise CheckpointError(
                f"{self!r} has {len(self.algorithms)} algorithms, but the checkpoint has {len(state['parts'])}"
            )
        for algorithm, part in zip(self.algorithms, state["parts"], strict=True):
            algorithm.load_state_dict(part)


def _change_by(algorithm: Algorithm, weights: Weights, average: Average) -> Average:
    def change(updates: Sequence[Update]) -> Weights:
        after = algorithm.aggregate(weights, updates, average)
        return {name: after[name] - value for name, value in weights.items()}

    return change
