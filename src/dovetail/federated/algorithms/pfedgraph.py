"""pFedGraph: every client gets a mean of its own, over those whose models have moved as its own has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from dovetail.errors import expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.layers import as_patterns, matching
from dovetail.federated.algorithms.own_phase import put_into
from dovetail.federated.algorithms.parameters import ParameterAware
from dovetail.federated.algorithms.penalty import PenalizedLossStrategy
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Update, WeightedSum, Weights
from dovetail.trainers.strategies.base import ModelUpdateStrategy
from dovetail.trainers.strategies.nesting import Described

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

__all__ = ["PFedGraph", "PFedGraphLossStrategy", "PFedGraphUpdateStrategy", "onto_simplex"]

_KEY = "pfedgraph"


@dataclass(eq=False, repr=False)
class PFedGraphUpdateStrategy(Described, ModelUpdateStrategy):
    """Lets a client begin with the model that the server has made for it alone, in place of the one of all.

    It is there before anybody looks at what the run begins with, and it is what the client is judged by. What a client
    sends is still the difference to the model of all.

    Example:
        >>> PFedGraphUpdateStrategy()
        PFedGraphUpdateStrategy()
    """

    def on_client_start(self, context: TrainingContext) -> None:
        """Take the client's own model, unless the run has begun before."""
        if context.progress.batches == 0:
            put_into(context, context.client.payload.get(_KEY, {}))


@dataclass(eq=False, repr=False)
class PFedGraphLossStrategy(PenalizedLossStrategy):
    """The loss of the task less λ cos(w, w_ref), where both are one vector of all parameters.

    w_ref is what the run began with: in a federation, the model that was made for the client.

    Args:
        lam: λ, at least 0.

    Example:
        >>> PFedGraphLossStrategy(lam=0.1)
        PFedGraphLossStrategy(lam=0.1)
    """

    lam: float = 0.01

    def __post_init__(self) -> None:
        expect(self.lam >= 0, "lam", "a number that is at least 0", self.lam)
        super().__post_init__()

    def penalty(self, weights: Weights, kept: Weights) -> Tensor:
        return -self.lam * cosine_similarity(_vector(weights), _vector(kept), dim=0)


@dataclass(eq=False, repr=False)
class PFedGraph(StrategyAlgorithm, ParameterAware):
    """Client i gets Σ_j a_ij w_j, over all clients that the server has heard of (Ye et al., 2023).

    With u_j = w_j − w_init and d_ij = −cos(u_i, u_j), row i of the graph minimises
    Σ_j a_ij d_ij + α Σ_j (a_ij − n_j/n)², where all a_ij are at least 0 and add up to 1: it is the point of the
    simplex next to n_j/n − d_ij / (2 α). The model of all is the mean, by samples, of those that are made for
    the clients of a round. Whoever was never heard of gets that one.

    Args:
        lam: λ of the clients' loss, which lacks λ cos(w, w_ref).
        alpha: α; the larger, the nearer is every row to the shares of samples.
        layers: Patterns of the parameters by which clients are compared, such as `"fc"`; None for all.

    Example:
        >>> PFedGraph(layers="head")
        PFedGraph(layers='head')
    """

    lam: float = 0.01
    alpha: float = 0.8
    layers: str | Sequence[str] | None = None

    # What training began with, how far every client's last model is from it, and how many samples it has.
    _initial: dict[str, Tensor] = field(default_factory=dict, init=False)
    _changes: dict[int, Weights] = field(default_factory=dict, init=False)
    _samples: dict[int, int] = field(default_factory=dict, init=False)
    _rows: dict[int, dict[int, float]] = field(default_factory=dict, init=False)

    decides = ("the client's own model",)
    needs_each_update = True
    client_strategies: ClassVar = {"loss": PFedGraphLossStrategy, "model_update": PFedGraphUpdateStrategy}

    def __post_init__(self) -> None:
        super().__post_init__()
        expect(self.alpha > 0, "alpha", "a number above 0", self.alpha)

    @property
    def graph(self) -> dict[int, dict[int, float]]:
        """How much the models of others, by id, count for every client."""
        return {client_id: dict(row) for client_id, row in self._rows.items()}

    def begin(self, model: nn.Module, num_clients: int) -> None:
        super().begin(model, num_clients)
        matching([name for name, _ in model.named_parameters()], as_patterns(self.layers))
        if not self._initial:
            self._initial = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def payload(self, client_id: int) -> Mapping[str, Any]:
        return {_KEY: self._made_for(client_id)} if client_id in self._rows else {}

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        """Return the mean of the models that are made for the clients of the round."""
        initial = self._initial or dict(weights)
        for update in updates:
            trained = moved(update.sent or weights, update.delta)
            self._changes[update.client_id] = {name: trained[name] - initial[name] for name in update.delta}
            self._samples[update.client_id] = update.num_samples
        self._initial = initial
        self._rows = self._collaborations()
        return moved(weights, average([update.with_delta(self._away(weights, update)) for update in updates]))

    def state_dict(self) -> dict[str, Any]:
        """Return what is known of clients; the graph follows from it."""
        clients = {
            str(client_id): {"change": dict(change), "num_samples": self._samples[client_id]}
            for client_id, change in self._changes.items()
        }
        return {"initial": dict(self._initial), "clients": clients}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._initial = dict(state["initial"])
        self._changes = {int(name): dict(known["change"]) for name, known in state["clients"].items()}
        self._samples = {int(name): int(known["num_samples"]) for name, known in state["clients"].items()}
        self._rows = self._collaborations()

    def _collaborations(self) -> dict[int, dict[int, float]]:
        """Return the graph of all known clients."""
        if not self._changes:
            return {}
        ids = sorted(self._changes)
        every = torch.stack([self._compared(self._changes[it]) for it in ids])
        unit = every / every.norm(dim=1, keepdim=True).clamp(min=1e-12)
        samples = torch.tensor([self._samples[it] for it in ids], dtype=torch.float64)
        wanted = samples / samples.sum() + unit @ unit.T / (2 * self.alpha)
        return {
            it: dict(zip(ids, onto_simplex(row).tolist(), strict=True)) for it, row in zip(ids, wanted, strict=True)
        }

    def _compared(self, change: Weights) -> Tensor:
        own = self.parameters_of(change)
        patterns = as_patterns(self.layers)
        chosen = matching(own, patterns) if patterns else own.keys()
        return _vector({name: value for name, value in own.items() if name in chosen}).double()

    def _made_for(self, client_id: int) -> dict[str, Tensor]:
        """Return Σ_j a_ij w_j, which is w_init and the same sum of what clients are away from it."""
        row = self._rows[client_id]
        terms = [Update(it, 0, 1, delta=self._changes[it]).weighted(share) for it, share in row.items() if share]
        mean = reduce(add, terms, WeightedSum(0.0, {})).mean()
        known = {name: self._initial[name] for name in mean}
        return moved(known, mean)

    def _away(self, weights: Weights, update: Update) -> dict[str, Tensor]:
        own = self._made_for(update.client_id)
        return {name: own[name] - weights[name] for name in update.delta}


def onto_simplex(point: Tensor) -> Tensor:
    """Return the nearest point whose coordinates are at least 0 and add up to 1.

    Example:
        >>> onto_simplex(torch.tensor([0.9, 0.5, -1.0]))
        tensor([0.7000, 0.3000, 0.0000])
    """
    ordered = point.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(point) + 1, device=point.device)
    # What is taken from every coordinate, where as many stay above it as it is made of.
    return (point - excess[int((ordered > excess).sum()) - 1]).clamp(min=0)


def _vector(weights: Weights) -> Tensor:
    return torch.cat([value.flatten() for value in weights.values()])
