"""Algorithms combine with each other, and with every strategy of the client's trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import Blobs, federation

from dovetail import algorithms as ours
from dovetail.algorithms import (
    APFL,
    MOON,
    SCAFFOLD,
    Algorithm,
    CompositeAlgorithm,
    Ditto,
    FedAdam,
    FedAdp,
    FedALA,
    FedAvg,
    FedAvgM,
    FedBABU,
    FedDyn,
    FedMos,
    FedNova,
    FedPer,
    FedProx,
    FedRep,
    FedSAM,
    FedYogi,
    LGFedAvg,
    PerFedAvg,
    PFedGraph,
)
from dovetail.errors import CheckpointError, ConfigError
from dovetail.federated.callbacks import ServerCallback
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import (
    AdamOptimizerStrategy,
    GradientAccumulationStepStrategy,
    GradientClippingStepStrategy,
    MixedPrecisionStepStrategy,
    SGDOptimizerStrategy,
    ShuffleDataLoaderStrategy,
    compose_steps,
)

# Algorithms that change the client and do not require a special model.
CLIENTS: list[Callable[[], Algorithm]] = [
    partial(FedProx, mu=0.3),
    SCAFFOLD,
    partial(SCAFFOLD, option=1),
    partial(FedDyn, alpha=0.1),
    partial(FedMos, a=0.5, mu=0.1),
    FedSAM,
    FedPer,
    FedRep,
    FedBABU,
    LGFedAvg,
    partial(Ditto, personalization_epochs=1),
    APFL,
    PerFedAvg,
    FedALA,
    PFedGraph,
]


def name_of(make: Any) -> str:
    return repr(make()) if callable(make) else repr(make)


def close(one: Any, other: Any, atol: float = 1e-10) -> None:
    torch.testing.assert_close(dict(one.weights), dict(other.weights), rtol=0, atol=atol)


@pytest.mark.parametrize("make", CLIENTS, ids=name_of)
def test_a_server_step_of_rate_one_changes_no_algorithm(make: Callable[[], Algorithm]) -> None:
    stepping = CompositeAlgorithm([make(), FedAvgM(server_learning_rate=1.0, momentum=0.0)])
    close(federation(stepping), federation(make()))


@pytest.mark.parametrize("make", CLIENTS, ids=name_of)
def test_server_momentum_works_with_every_client_algorithm(make: Callable[[], Algorithm]) -> None:
    server = federation(CompositeAlgorithm([make(), FedAvgM(momentum=0.5)]))
    assert not any(record.faults for record in server.records)
    plain = federation(make())
    assert any((value != plain.weights[name]).any() for name, value in server.weights.items())


@pytest.mark.parametrize("make", CLIENTS, ids=name_of)
def test_fedavg_in_a_composite_changes_nothing(make: Callable[[], Algorithm]) -> None:
    beside, alone = federation(CompositeAlgorithm([FedAvg(), make()])), federation(make())
    assert all(torch.equal(value, alone.weights[name]) for name, value in beside.weights.items())


def _made(batch_size: int, step: Any = None, optimizer: Any = None) -> ComposableTrainer:
    return ComposableTrainer(
        optimizer_strategy=optimizer or SGDOptimizerStrategy(lr=0.1, momentum=0.5),
        data_loader_strategy=ShuffleDataLoaderStrategy(),
        training_step_strategy=step,
        num_epochs=2,
        batch_size=batch_size,
        verbose=False,
    )


# SAM uses every small batch, and Per-FedAvg halves it.
@pytest.mark.parametrize("make", [it for it in CLIENTS if it not in (FedSAM, PerFedAvg)], ids=name_of)
def test_accumulated_batches_equal_one_large_batch(make: Callable[[], Algorithm]) -> None:
    data = Blobs(sizes=(24, 8, 40, 16))
    small = _made(4, GradientAccumulationStepStrategy(2))
    close(federation(make(), trainer=small, data=data), federation(make(), trainer=_made(8), data=data))


@pytest.mark.parametrize("make", CLIENTS, ids=name_of)
def test_every_algorithm_trains_with_adam_clipping_accumulation_and_amp(make: Callable[[], Algorithm]) -> None:
    step = compose_steps(
        GradientAccumulationStepStrategy(2),
        GradientClippingStepStrategy(max_norm=0.5),
        MixedPrecisionStepStrategy(enabled=True, precision="bf16"),
    )
    optimizer = None if make().__class__ is FedMos else AdamOptimizerStrategy(lr=0.01)
    server = federation(make(), trainer=_made(4, step, optimizer))
    assert not any(record.faults for record in server.records), server.records[-1].faults
    assert all(value.isfinite().all() for value in server.weights.values())


PAIRS: list[list[Algorithm]] = [
    [FedProx(mu=0.3), SCAFFOLD()],
    [FedProx(mu=0.3), Ditto(personalization_epochs=1)],
    [SCAFFOLD(), Ditto(personalization_epochs=1)],
    [FedDyn(alpha=0.1), FedPer()],
    [FedProx(mu=0.3), APFL()],
    [SCAFFOLD(), APFL()],
    [FedProx(mu=0.3), FedRep(), FedAdam()],
    [SCAFFOLD(), FedNova()],
]


@pytest.mark.parametrize("pair", PAIRS, ids=repr)
def test_a_pair_of_algorithms_trains_alike_as_a_fleet_and_alone(pair: list[Algorithm]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fleet = federation(CompositeAlgorithm(pair), backend="vectorized")
    close(fleet, federation(CompositeAlgorithm(pair)))


@pytest.mark.parametrize("base", [FedProx(mu=0.3), SCAFFOLD(), FedDyn(alpha=0.1)], ids=repr)
@pytest.mark.parametrize("own", [Ditto(personalization_epochs=2), APFL()], ids=repr)
def test_a_local_model_does_not_change_the_sent_model(base: Algorithm, own: Algorithm) -> None:
    with_own, without = federation(CompositeAlgorithm([base, own])), federation(base)
    close(with_own, without, atol=1e-12)
    for client_id in range(1, 5):
        theirs = without.states.get(client_id)
        ours_now = {name: with_own.states.get(client_id)[name] for name in theirs}
        torch.testing.assert_close(ours_now, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("base", [SCAFFOLD(), FedDyn(alpha=0.1), FedProx(mu=0.3)], ids=repr)
def test_local_layers_are_neither_sent_nor_corrected(base: Algorithm) -> None:
    seen: list[Any] = []

    class See(ServerCallback):
        def on_weights_aggregated(self, server: Any, updates: Any) -> None:
            seen.extend(updates)

    server = federation(CompositeAlgorithm([FedPer(), base]), callbacks=[See()])
    for update in seen:
        names = [*update.delta, *(name for sent in update.payload.values() for name in sent)]
        assert names
        assert not any(name.startswith("head") for name in names)
    kept = [name for name in server.states.get(1) if name in ("scaffold", "feddyn")]
    assert not any(entry.startswith("head") for name in kept for entry in server.states.get(1)[name])


def test_loss_terms_of_two_algorithms_add_up() -> None:
    twice = federation(CompositeAlgorithm([FedProx(mu=0.1), FedProx(mu=0.2)]))
    close(twice, federation(FedProx(mu=0.1 + 0.2)), atol=1e-12)


REFUSED: list[tuple[list[Algorithm], str]] = [
    ([FedPer(), FedRep()], "FedPer and FedRep both decide which layers stay with clients"),
    ([Ditto(), APFL()], "Ditto and APFL both decide the client's own model"),
    ([SCAFFOLD(), FedDyn()], "SCAFFOLD and FedDyn both decide the drift of clients"),
    ([FedAdam(), FedYogi()], "FedAdam and FedYogi both decide how the server steps"),
    ([FedNova(), FedAdp()], "FedNova and FedAdp both decide how much each update counts"),
    ([FedSAM(), PerFedAvg()], "FedSAM and PerFedAvg both decide how a batch is computed"),
    ([MOON(), FedMos()], "MOON and FedMos both decide how a batch is computed"),
    ([SCAFFOLD(), FedALA()], "SCAFFOLD and FedALA both decide where a client's steps start"),
    ([], "at least one"),
]


@pytest.mark.parametrize(("pair", "said"), REFUSED, ids=[it[1] for it in REFUSED])
def test_incompatible_algorithms_are_rejected_with_a_reason(pair: list[Algorithm], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CompositeAlgorithm(pair)


def test_a_nested_composite_decides_what_its_parts_decide() -> None:
    inner = CompositeAlgorithm([FedProx(), FedAdam()])
    with pytest.raises(ConfigError, match="both decide how the server steps"):
        CompositeAlgorithm([inner, FedYogi()])
    close(
        federation(CompositeAlgorithm([inner, FedPer()])), federation(CompositeAlgorithm([*inner.algorithms, FedPer()]))
    )


def test_every_algorithm_can_be_named_in_a_file_and_is_exported() -> None:
    exported = {
        it for name in ours.__all__ if isinstance(it := getattr(ours, name), type) and issubclass(it, Algorithm)
    }
    named = {ours.algorithms.get(name) for name in ours.algorithms.names()}
    assert named <= exported
    assert exported - named == {Algorithm, CompositeAlgorithm}


def test_a_checkpoint_of_other_algorithms_is_rejected(tmp_path: Path) -> None:
    federation(CompositeAlgorithm([FedProx(), FedAdam()]), checkpoint_path=str(tmp_path), rounds=1)
    with pytest.raises(CheckpointError, match=r"written with algorithm FedProx \+ FedAdam, not SCAFFOLD \+ FedAdam"):
        federation(CompositeAlgorithm([SCAFFOLD(), FedAdam()]), checkpoint_path=str(tmp_path), rounds=2)
