"""Flower strategies as the aggregation of a server."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.federated.algorithms.base import Algorithm
from dovetail.federated.averaging import Average, moved, weighted_mean
from dovetail.federated.messages import Update, Weights

if TYPE_CHECKING:
    from flwr.app import ArrayRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy

__all__ = ["FlowerStrategy"]

# The attribute that a strategy sets in every round.
_CURRENT = "current_arrays"


class FlowerStrategy(Algorithm):
    """Aggregates with a strategy of `flwr.serverapp.strategy`: FedAdam, FedYogi, FedMedian, Krum and others.

    The strategy receives the trained weights of every client, with their samples. The server selects the clients, so
    fractions and minimums of the strategy have no effect, nor has the configuration that it would send to clients
    (FedProx). Whole numbers, such as counters of batches, are averaged.

    Args:
        strategy: The strategy, which is copied. Its state is saved with the server.

    Example:
        >>> from flwr.serverapp.strategy import FedMedian
        >>> updates = [Update(k, 1, 10, delta={"w": torch.tensor([v])}) for k, v in [(1, 1.0), (2, 2.0), (3, 90.0)]]
        >>> FlowerStrategy(FedMedian()).aggregate({"w": torch.tensor([1.0])}, updates, weighted_mean)
        {'w': tensor([3.])}
    """

    def __init__(self, strategy: Strategy) -> None:
        require("flwr", "flower")
        from flwr.serverapp.strategy import FedAvg, Strategy

        if not isinstance(strategy, Strategy):
            raise ConfigError(f"strategy: expected one of flwr.serverapp.strategy, got {strategy!r}")
        self.strategy = copy.deepcopy(strategy)
        self._round = 0
        inner = self.strategy
        while not isinstance(inner, FedAvg) and isinstance(wrapped := vars(inner).get("strategy"), Strategy):
            inner = wrapped
        if isinstance(inner, FedAvg):
            # Our server has selected the clients, so the strategy must not sample from them again.
            inner.fraction_train, inner.min_train_nodes, inner.min_available_nodes = 1.0, 0, 0
        self._inner = inner
        self._given = {name: copy.deepcopy(value) for name, value in self._variables().items()}

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        """Return the weights that the strategy computes.

        Raises:
            ConfigError: The server's aggregator or a postprocessor changes the mean, which the strategy computes.
        """
        from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

        mean = average(updates)
        if any(not torch.equal(value, mean[name]) for name, value in weighted_mean(updates).items()):
            raise ConfigError(
                f"{type(self.strategy).__name__} makes the mean itself: leave out server.aggregator and the "
                "postprocessors that change the mean"
            )
        self._round += 1
        real = {name: value for name, value in weights.items() if name in mean and value.is_floating_point()}
        if _CURRENT in vars(self._inner):
            # FedAvgM keeps these weights from round to round. After a rollback or a resume, ours differ from these.
            setattr(self._inner, _CURRENT, None)
        with _inside_flower():
            # Strategies store the current weights in `configure_train`.
            sent = self.strategy.configure_train(self._round, _arrays(real), ConfigRecord(), _nodes(len(updates)))
            replies = []
            for message, update in zip(list(sent), updates, strict=True):
                trained = moved(real, {name: update.delta[name] for name in real})
                counted = MetricRecord({"num-examples": update.num_samples})
                replies.append(Message(RecordDict({"arrays": _arrays(trained), "metrics": counted}), reply_to=message))
            # The replies answer the messages of `configure_train`, so Flower's checks of the reply accept them.
            arrays, _ = self.strategy.aggregate_train(self._round, replies)
        if arrays is None:
            raise ConfigError(
                f"{type(self.strategy).__name__} returned no weights for {len(updates)} updates; check its minimum "
                "numbers of clients"
            )
        made = {name: torch.from_numpy(array.numpy()).to(weights[name]) for name, array in arrays.items()}
        return {**moved(weights, {name: value for name, value in mean.items() if name not in real}), **made}

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes of the strategy that have changed, such as moments."""
        changed = {name: value for name, value in self._variables().items() if not _same(value, self._given[name])}
        return {"round": self._round, "strategy": changed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._round = int(state["round"])
        vars(self.strategy).update(copy.deepcopy({**self._given, **state["strategy"]}))

    def _variables(self) -> dict[str, Any]:
        found = vars(self.strategy).items()
        return {name: value for name, value in found if name != _CURRENT and _is_plain(value)}

    def __repr__(self) -> str:
        return f"FlowerStrategy({type(self.strategy).__name__})"


@contextmanager
def _inside_flower() -> Iterator[None]:
    """Allow messages outside of a run of Flower, and silence its log."""
    from flwr.supercore.task_identity import TaskIdentity

    names, logger = ("_run_id", "_node_id", "_task_id"), logging.getLogger("flwr")
    before, level = {name: getattr(TaskIdentity, name) for name in names}, logger.level
    for name, value in before.items():
        setattr(TaskIdentity, name, 1 if value is None else value)
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def _arrays(weights: Weights) -> ArrayRecord:
    from flwr.app import Array, ArrayRecord

    # Numpy has no bfloat16.
    wide = {name: value.float() if value.dtype is torch.bfloat16 else value for name, value in weights.items()}
    return ArrayRecord({name: Array(value.detach().cpu().numpy()) for name, value in wide.items()})


def _nodes(number: int) -> Grid:
    """Return a grid that only has the number of clients."""
    from flwr.serverapp import Grid

    class _Nodes(Grid):
        def get_node_ids(self) -> Iterable[int]:
            return range(1, number + 1)

        def _nothing(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("nothing is sent")

        set_run = create_message = push_messages = pull_messages = send_and_receive = _nothing
        run = property(_nothing)

    return _Nodes()


def _is_plain(value: Any) -> bool:
    import numpy as np

    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, np.ndarray, np.generic))


def _same(first: Any, second: Any) -> bool:
    return first is second or (isinstance(first, (bool, int, float, str)) and bool(first == second))
