"""The contract of algorithms: FedAvg keeps it, and every test of it bites somewhere."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from dovetail.algorithms import Algorithm, FedAvg
from dovetail.errors import FederationError
from dovetail.federated.averaging import Average
from dovetail.federated.messages import Update, Weights
from dovetail.testing import AlgorithmContract
from dovetail.trainers.context import TrainingContext
from dovetail.trainers.strategies import ModelUpdateStrategy, Strategy
from dovetail.trainers.strategies.anchored import model_parameters
from dovetail.trainers.strategies.bundle import Strategies


class TestFedAvg(AlgorithmContract):
    vectorizes = True

    def make(self) -> FedAvg:
        return FedAvg()


class Updating(Algorithm):
    """Clients get an update strategy."""

    strategy: type[ModelUpdateStrategy] = ModelUpdateStrategy

    def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
        return {"model_update": self.strategy()}


def updating(kind: type[ModelUpdateStrategy]) -> Callable[[], Algorithm]:
    return type(f"{kind.__name__}Algorithm", (Updating,), {"strategy": kind})


class Diverging(Algorithm):
    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        return {name: value * torch.nan for name, value in weights.items()}


class Counting(Algorithm):
    """Every round that there ever was adds to what is moved."""

    rounds = itertools.count(1)

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        number = next(self.rounds)
        return {name: value + number for name, value in super().aggregate(weights, updates, average).items()}


def settled() -> Algorithm:
    """Clients of it train otherwise in another process than the server's."""

    # Local classes travel with what a worker is sent: it need not find this file.
    class Homesick(ModelUpdateStrategy):
        def __init__(self, home: int) -> None:
            self.home = home

        def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
            if os.getpid() != self.home:
                for value in model_parameters(context).values():
                    value.grad *= 2  # type: ignore[operator]  # there is one

    class Settled(Algorithm):
        home = os.getpid()

        def equip(self, strategies: Strategies) -> Mapping[str, Strategy]:
            return {"model_update": Homesick(self.home)}

    return Settled()


class OneNormForAll(ModelUpdateStrategy):
    """Says that it serves fleets, and takes the norm over all of them."""

    vectorizes = True

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        for value in model_parameters(context).values():
            assert value.grad is not None
            value.grad /= value.grad.norm()


class Forgetful(Algorithm):
    """Momentum that no checkpoint holds."""

    def __init__(self) -> None:
        self.momentum: dict[str, Tensor] = {}

    def aggregate(self, weights: Weights, updates: Sequence[Update], average: Average) -> dict[str, Tensor]:
        after = super().aggregate(weights, updates, average)
        self.momentum = {name: after[name] - value + self.momentum.get(name, 0) for name, value in weights.items()}
        return {name: value + self.momentum[name] for name, value in weights.items()}


class Presuming(ModelUpdateStrategy):
    """Assumes that every client was selected before."""

    def on_train_end(self, context: TrainingContext) -> None:
        context.client.state["own"] = {name: value.detach() for name, value in model_parameters(context).items()}

    def personal_weights(self, context: TrainingContext) -> Mapping[str, Tensor]:
        own: Mapping[str, Tensor] = context.client.state["own"]
        return own


class Tired(ModelUpdateStrategy):
    """Does not train after the last round."""

    def on_train_start(self, context: TrainingContext) -> None:
        if context.current_round > context.config.get("rounds", 100):
            raise RuntimeError("enough")


class Greedy(ModelUpdateStrategy):
    """Changes what the server sent, in place."""

    def on_train_start(self, context: TrainingContext) -> None:
        for value in context.client.payload.values():
            value.add_(1.0)


class Sending(Updating):
    strategy = Greedy

    def __init__(self) -> None:
        self.held = torch.zeros(3)

    def payload(self, client_id: int) -> Mapping[str, Any]:
        return {"held": self.held}


class Unsaved(ModelUpdateStrategy):
    """Counts steps, and saves no count."""

    def __init__(self) -> None:
        self.steps = 0

    def on_gradients(self, optimizer: Optimizer, context: TrainingContext) -> None:
        self.steps += 1
        for value in model_parameters(context).values():
            value.grad *= self.steps  # type: ignore[operator]  # there is one


BROKEN: list[tuple[Callable[[], Any], str]] = [
    (object, "test_is_an_algorithm"),
    (Diverging, "test_a_federation_ends_with_finite_weights_that_have_moved"),
    (Counting, "test_the_same_seed_gives_the_same_bits"),
    (settled, "test_processes_end_where_one_does"),
    (updating(OneNormForAll), "test_a_fleet_ends_where_clients_alone_do"),
    (FedAvg, "test_a_fleet_ends_where_clients_alone_do"),
    (Forgetful, "test_a_server_that_is_killed_goes_on_with_the_same_bits"),
    (updating(Presuming), "test_clients_can_be_judged_before_they_were_asked"),
    (updating(Tired), "test_clients_can_train_for_themselves_after_the_last_round"),
    (Sending, "test_what_it_sends_is_never_changed"),
    (updating(Unsaved), "test_its_strategies_train_in_a_trainer_of_their_own"),
]

# The tests of `BROKEN` in which the broken algorithm makes all clients of a round fail.
ALL_FAIL = (
    "test_a_federation_ends_with_finite_weights_that_have_moved",
    "test_clients_can_train_for_themselves_after_the_last_round",
)


@pytest.mark.parametrize(("broken", "test"), BROKEN, ids=[f"{it[0].__name__}-{it[1]}" for it in BROKEN])
def test_the_contract_finds_a_broken_algorithm(broken: Callable[[], Any], test: str) -> None:
    # FedAvg can train as a fleet, and a contract that says otherwise is wrong, too.
    reported = {"make": lambda self: broken(), "vectorizes": broken is not FedAvg}
    # The federation itself ends with an error if all clients fail.
    error = FederationError if test in ALL_FAIL else AssertionError
    with pytest.raises(error):
        getattr(type("Broken", (AlgorithmContract,), reported)(), test)()


def test_every_contract_test_fails_for_some_broken_algorithm() -> None:
    tests = {name for name in dir(AlgorithmContract) if name.startswith("test_")}
    assert tests == {test for _, test in BROKEN}
