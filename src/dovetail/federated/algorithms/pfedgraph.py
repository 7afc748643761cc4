"""pFedGraph: each client receives a mean of models, weighted by their similarity to its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from dovetail.errors import expect
from dovetail.federated.algorithms.base import StrategyAlgorithm
from dovetail.federated.algorithms.layers import as_patterns, matching
from dovetail.federated.algorithms.own_phase import load_in_place
from dovetail.federated.algorithms.parameters import ParameterAware
from dovetail.federated.algorithms.penalty import PenalizedLossStrategy
from dovetail.federated.averaging import Average, moved
from dovetail.federated.messages import Update, WeightedSum, Weights
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies.base import ModelUpdateStrategy
from dovetail.trainers.strategies.nesting import Described

_KEY = "pfedgraph"


@dataclass(eq=False, repr=False)
class PFedGraphUpdateStrategy(Described, ModelUpdateStrategy):
    """Starts a client with the personal model that the server computed for it, in place of the global model.

    The model is loaded before other strategies capture the start of the run, and the client is evaluated with it. The
    client still sends the difference to the global model.

    Example:
        >>> PFedGraphUpdateStrategy()
        PFedGraphUpdateStrategy()
    """

    def on_prepare(self, context: TrainingContext) -> None:
        """Take the client's own model, unless the run has started before."""
        # A resumed run has trained this model already.
        if context.progress.batches == 0:
            load_in_place(context, context.client.payload.get(_KEY, {}))


@dataclass(eq=False, repr=False)
class PFedGraphLossStrategy(PenalizedLossStrategy):
    """The loss of the task less λ cos(w, w_ref), where both are one vector of all parameters.

    w_ref is the model at the start of the run: in a federation, the personal model that the client received. `lam` is
    λ, at least 0.

    Example:
        >>> PFedGraphLossStrategy(lam=0.1)
        PFedGraphLossStrategy(lam=0.1)
    """

    lam: float = 0.01

    def __post_init__(self) -> None:
        expect(self.lam >= 0, "lam", "a number that is at least 0", self.lam)
        super().__post_init__()

    def penalty(self, weights: Weights, anchor: Weights) -> Tensor:
        return -self.lam * cosine_similarity(_vector(weights), _vector(anchor), dim=0)


@dataclass(eq=False, repr=False)
class PFedGraph(StrategyAlgorithm, ParameterAware):
    """Client i receives Σ_j a_ij w_j, over all clients that have reported (Ye et al., 2023).

    With u_j = w_j − w_init and d_ij = −cos(u_i, u_j), row i of the graph minimises
    Σ_j a_ij d_ij + α Σ_j (a_ij − n_j/n)², where all a_ij are at least 0 and add up to 1: it is the point of the
    simplex next to n_j/n − d_ij / (2 α). The global model is the mean, by samples, of the personal models of a
    round's clients. A client that has not reported receives the global model.

    Args:
        lam: λ of the clients' loss, from which λ cos(w, w_ref) is subtracted.
        alpha: α; the larger, the nearer every row is to the shares of samples.
        layers: Patterns of the parameters by which clients are compared, such as `"fc"`; None for all.

    Example:
        >>> PFedGraph(layers="head")
        PFedGraph(layers='head')
    """

    lam: float = 0.01
    alpha: float = 0.8
    layers: str | Sequence[str] | None = None

    # The initial weights, and by client the difference of its last model to them, its samples and its row.
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
        """The weights of all models, by id, in the personal model of every client."""
        return {client_id: dict(row) for client_id, row in self._rows.items()}

    def prepare(self, model: nn.Module, num_clients: int) -> None:
        super().prepare(model, num_clients)
        matching([name for name, _ in model.named_parameters()], as_patterns(self.layers))
        if not self._initial:
            self._initial = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def payload(self, client_id: int) -> Mapping[str, Any]:
        return {_KEY: self._made_for(client_id)} if client_id in self._rows else {}

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        """Return the mean of the personal models of the round's clients."""
        initial = self._initial or dict(weights)
        for update in updates:
            trained = moved(update.sent or weights, update.delta)
            self._changes[update.client_id] = {name: trained[name] - initial[name] for name in update.delta}
            self._samples[update.client_id] = update.num_samples
        self._initial = initial
        self._rows = self._collaborations()
        return moved(weights, average([update.with_delta(self._away(weights, update)) for update in updates]))

    def state_dict(self) -> dict[str, Any]:
        """Return the models and samples of clients, from which the graph is recomputed."""
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
        # n_j/n − d_ij / (2 α) with d_ij = −cos(u_i, u_j), one row per client i.
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
        """Return Σ_j a_ij w_j, which is w_init plus the same sum of the differences to it."""
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
    # The amount to subtract from every coordinate: the one for which as many coordinates stay positive as it used.
    return (point - excess[int((ordered > excess).sum()) - 1]).clamp(min=0)


def _vector(weights: Weights) -> Tensor:
    return torch.cat([value.flatten() for value in weights.values()])
