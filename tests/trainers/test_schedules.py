from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    SequentialLR,
    StepLR,
)

from dovetail.errors import ConfigError
from dovetail.trainers import schedules
from dovetail.trainers.schedules import (
    CosineAnnealingScheduler,
    DecayToEpoch,
    DecayWhenAcc,
    DecayWhenEpoch,
    EpochSet,
    ExponentialDecay,
    InvTriangular,
    LinearDecay,
    LogDecay,
    MtmScheduler,
    Schedule,
    ScheduleLR,
    SchedulerChain,
    StepScheduler,
    Triangular,
    Triangular2,
    Triangular2Exp,
    TriangularDecayWhenAcc,
    TriangularExp,
    TriangularMtm,
    WarmRestart,
    WarmUpScheduler,
)

CYCLE = {"lr_min": 0.1, "lr_max": 1.0, "stepsize": 10}
ALL = [
    StepScheduler(lr_decay=0.5, lr_decay_every=3),
    LinearDecay(num_iters=12),
    LogDecay(num_iter=12),
    ExponentialDecay(k=0.1),
    WarmRestart(stepsize=4),
    Triangular(stepsize=4),
    InvTriangular(stepsize=4),
    TriangularExp(stepsize=4, k=0.01),
    Triangular2(stepsize=4),
    Triangular2Exp(stepsize=4, k=0.01),
    EpochSet({0: 0.1, 3: 0.5, 9: 0.1}),
    DecayWhenEpoch(num_epochs=2),
    DecayToEpoch(decay_length=12),
    DecayWhenAcc(),
    TriangularDecayWhenAcc(stepsize=4),
    TriangularMtm(stepsize=4),
]


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(2))


def train(optimizer: Optimizer, scheduler: LRScheduler, num_updates: int) -> list[float]:
    """Return the learning rate of each of so many real updates."""
    rates = []
    for _ in range(num_updates):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones_like(weight)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


# Known answers


@pytest.mark.parametrize(("count", "lr"), [(0, 0.1), (5, 0.55), (10, 1.0), (15, 0.55), (20, 0.1), (25, 0.55)])
def test_triangular_rises_and_falls(count: int, lr: float) -> None:
    assert Triangular(**CYCLE).get_lr(count) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("count", "lr"), [(0, 1.0), (5, 0.55), (10, 0.1), (15, 0.55), (20, 1.0)])
def test_inv_triangular_is_mirrored_and_stops_at_lr_min(count: int, lr: float) -> None:
    assert InvTriangular(**CYCLE).get_lr(count) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(
    ("count", "lr"), [(0, 0.1), (10, 1.0), (20, 0.1), (30, 0.55), (40, 0.1), (50, 0.325), (55, 0.2125)]
)
def test_triangular2_halves_the_amplitude_in_every_cycle(count: int, lr: float) -> None:
    assert Triangular2(**CYCLE).get_lr(count) == pytest.approx(lr, rel=1e-12)


def test_triangular2_is_finite_after_very_many_cycles() -> None:
    assert Triangular2(**CYCLE).get_lr(10**9 + 10) == 0.1


@pytest.mark.parametrize("count", [0, 7, 10, 33])
def test_exp_variants_multiply_by_an_exponential(count: int) -> None:
    factor = math.exp(-0.01 * count)
    assert TriangularExp(**CYCLE, k=0.01).get_lr(count) == Triangular(**CYCLE).get_lr(count) * factor
    assert Triangular2Exp(**CYCLE, k=0.01).get_lr(count) == Triangular2(**CYCLE).get_lr(count) * factor


@pytest.mark.parametrize(("count", "lr"), [(0, 1.0), (9, 1.0), (10, 0.1), (19, 0.1), (20, 0.05), (99, 0.05)])
def test_step_decays_every_n_updates_down_to_its_floor(count: int, lr: float) -> None:
    schedule = StepScheduler(lr_min=0.05, lr_decay=0.1, lr_decay_every=10)
    assert schedule.get_lr(count) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("count", "lr"), [(0, 1.0), (25, 0.775), (50, 0.55), (100, 0.1), (200, 0.1)])
def test_linear_decay_falls_linearly_to_its_end(count: int, lr: float) -> None:
    assert LinearDecay(lr_min=0.1, num_iters=100).get_lr(count) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("count", "lr"), [(0, 1.0), (25, 0.1), (50, 0.01), (80, 0.01)])
def test_log_decay_falls_geometrically_to_its_end(count: int, lr: float) -> None:
    assert LogDecay(lr_min=0.01, num_iter=50).get_lr(count) == pytest.approx(lr, rel=1e-12)


def test_exponential_decay_has_a_floor() -> None:
    schedule = ExponentialDecay(lr_min=0.2, lr_max=2.0, k=0.5)
    assert schedule.get_lr(0) == 2.0
    assert schedule.get_lr(2) == 2.0 * math.exp(-1.0)
    assert schedule.get_lr(100) == 0.2


def test_warm_restart_falls_along_a_cosine_and_restarts() -> None:
    schedule = WarmRestart(**CYCLE)
    assert schedule.get_lr(0) == 1.0
    assert schedule.get_lr(10) == pytest.approx(0.55)
    assert schedule.get_lr(19) < 0.11
    assert [schedule.get_lr(20), schedule.get_lr(40)] == [1.0, 1.0]


def test_warm_restart_can_count_its_cycle_in_epochs() -> None:
    schedule = WarmRestart(lr_min=0.1, stepsize=2, step_per_epoch=5)
    assert [schedule.get_lr(count) for count in range(50)] == [
        WarmRestart(**CYCLE).get_lr(count) for count in range(50)
    ]


def test_epoch_set_sets_values() -> None:
    schedule = EpochSet({5: 0.01, 0: 0.1}, lr_value=True)
    assert [schedule.get_lr(epoch) for epoch in (0, 4, 5, 100)] == [0.1, 0.1, 0.01, 0.01]


def test_epoch_set_multiplies_values() -> None:
    schedule = EpochSet({0: 1.0, 8: 0.25, 5: 0.5})
    assert [schedule.get_lr(epoch) for epoch in (0, 4, 5, 7, 8, 100)] == [1.0, 1.0, 0.5, 0.5, 0.125, 0.125]


@pytest.mark.parametrize(("epoch", "lr"), [(0, 1.0), (7, 1.0), (8, 0.9), (16, 0.81), (10_000, 1e-4)])
def test_decay_when_epoch_decays_every_n_epochs(epoch: int, lr: float) -> None:
    assert DecayWhenEpoch().get_lr(epoch) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("epoch", "lr"), [(0, 3e-4), (10, 3e-4), (30, 1.5e-4), (50, 0.0), (99, 0.0)])
def test_decay_to_epoch_waits_and_then_falls_linearly(epoch: int, lr: float) -> None:
    assert DecayToEpoch(non_decay_time=10).get_lr(epoch) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("count", "momentum"), [(0, 0.9), (5, 0.7), (10, 0.5), (15, 0.7), (20, 0.9)])
def test_momentum_is_low_where_the_learning_rate_is_high(count: int, momentum: float) -> None:
    assert TriangularMtm(mtm_min=0.5, stepsize=10).get_lr(count) == pytest.approx(momentum, rel=1e-12)


# Accuracy


def test_accuracy_decays_only_when_it_falls_below_the_tolerance() -> None:
    schedule = DecayWhenAcc(initial_lr=1.0, lr_decay=0.5, acc_thresh=0.1)
    accuracies = [0.5, 1.0, 0.91, 0.89, 0.95, 0.8]
    assert [schedule.get_lr(accuracy) for accuracy in accuracies] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_accuracy_decay_has_a_floor() -> None:
    schedule = DecayWhenAcc(initial_lr=1.0, lr_min=0.3, lr_decay=0.5)
    assert [schedule.get_lr(accuracy) for accuracy in (1.0, 0.1, 0.1, 0.1)] == [1.0, 0.5, 0.3, 0.3]


def test_the_floor_does_not_raise_a_small_initial_rate() -> None:
    assert DecayWhenAcc(initial_lr=1e-6).get_lr(0.5) == 1e-6


def test_an_accuracy_of_nan_changes_nothing() -> None:
    schedule = DecayWhenAcc(initial_lr=1.0, lr_decay=0.5)
    assert [schedule.get_lr(accuracy) for accuracy in (0.8, math.nan, 0.8, 0.1)] == [1.0, 1.0, 1.0, 0.5]


def test_triangular_decay_is_triangular_until_accuracy_falls() -> None:
    schedule = TriangularDecayWhenAcc(**CYCLE, lr_decay=0.5)
    assert [schedule.get_lr(count, 0.9) for count in range(40)] == [
        Triangular(**CYCLE).get_lr(count) for count in range(40)
    ]
    assert schedule.get_lr(10, 0.5) == 0.5
    assert schedule.get_lr(20) == 0.1


# All schedules


@pytest.mark.parametrize(
    "schedule",
    [
        StepScheduler(lr_decay=0.5, lr_decay_every=3),
        LinearDecay(num_iters=30),
        LogDecay(num_iter=30),
        ExponentialDecay(k=0.1),
        DecayWhenEpoch(),
        DecayToEpoch(),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_decay_schedule_never_rises(schedule: Schedule) -> None:
    values = [schedule.get_lr(count) for count in range(60)]
    assert all(before >= after for before, after in pairwise(values))
    assert values[0] > values[-1]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
def test_a_schedule_waits_for_its_start(schedule: Schedule) -> None:
    later = dataclasses.replace(schedule, start_iter=7)
    assert [later.value(count) for count in range(5)] == [schedule.value(0)] * 5
    assert [later.value(count + 7) for count in range(30)] == [schedule.value(count) for count in range(30)]


def test_the_unit_decides_what_the_argument_counts() -> None:
    units = {type(schedule).__name__: schedule.unit for schedule in ALL}
    assert {name for name, unit in units.items() if unit == "accuracy"} == {"DecayWhenAcc"}
    assert {name for name, unit in units.items() if unit == "epoch"} == {
        "EpochSet",
        "DecayWhenEpoch",
        "DecayToEpoch",
    }


def test_the_long_names_are_the_same_classes() -> None:
    for schedule in ALL:
        name = type(schedule).__name__.removesuffix("Scheduler") + "Scheduler"
        assert getattr(schedules, name) is type(schedule)
        assert name in schedules.__all__


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Triangular(stepsize=0), "Triangular: stepsize: expected a number above 0, got 0"),
        (lambda: LinearDecay(num_iters=-1), "LinearDecay: num_iters: expected a number above 0, got -1"),
        (lambda: Triangular(lr_min=1.0, lr_max=0.1), "expected 0 <= lr_min <= lr_max, got 1.0 and 0.1"),
        (
            lambda: LogDecay(lr_min=0.0),
            "LogDecay: lr_min: expected a number above 0, got 0.0: repeated division never reaches 0",
        ),
        (lambda: EpochSet({5: 0.1}), r"expected epochs, with 0 among them, as keys, got \{5: 0.1\}"),
        (lambda: EpochSet({0: 1.0, "5": 0.1}), "expected epochs, with 0 among them"),  # type: ignore[dict-item]
        (lambda: TriangularMtm(mtm_max=1.5), "expected 0 <= mtm_min <= mtm_max < 1, got 0.001 and 1.5"),
        (lambda: Triangular().observe(0.5), "Triangular does not depend on accuracy, but was given 0.5"),
        (lambda: Triangular().load_state_dict({"best_acc": 1.0}), "Triangular has no state"),
    ],
)
def test_a_schedule_rejects_invalid_arguments_by_name(make: Callable[[], object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_the_base_of_momentum_schedules_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        MtmScheduler()  # type: ignore[abstract]


def test_a_schedule_can_be_plotted(tmp_path: Path) -> None:
    Triangular(stepsize=100_000).plot(tmp_path / "new" / "lr.png", num=400_000)
    assert (tmp_path / "new" / "lr.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_a_schedule_has_at_least_one_update(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num: expected a whole number that is at least 1, got 0"):
        Triangular().plot(tmp_path / "lr.png", num=0)


def test_an_accuracy_schedule_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="accuracies are not known before training"):
        DecayWhenAcc().plot(tmp_path / "lr.png", num=10)


# ScheduleLR

TWINS: dict[str, tuple[Schedule, float, Callable[[Optimizer], LRScheduler]]] = {
    "triangular": (
        Triangular(**CYCLE),
        0.1,
        lambda optimizer: CyclicLR(optimizer, 0.1, 1.0, step_size_up=10, cycle_momentum=False),
    ),
    "triangular2": (
        Triangular2(**CYCLE),
        0.1,
        lambda optimizer: CyclicLR(optimizer, 0.1, 1.0, step_size_up=10, mode="triangular2", cycle_momentum=False),
    ),
    "step": (
        StepScheduler(lr_min=0.0, lr_decay=0.5, lr_decay_every=7),
        1.0,
        lambda optimizer: StepLR(optimizer, step_size=7, gamma=0.5),
    ),
    "linear": (
        LinearDecay(lr_min=0.1, num_iters=20),
        1.0,
        lambda optimizer: LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=20),
    ),
    "warm restarts": (
        WarmRestart(**CYCLE),
        1.0,
        lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=20, eta_min=0.1),
    ),
    "epoch set": (
        EpochSet({0: 1.0, 5: 0.5, 8: 0.5}),
        1.0,
        lambda optimizer: MultiStepLR(optimizer, [5, 8], gamma=0.5),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_schedule_trains_as_its_torch_equivalent(name: str) -> None:
    schedule, lr, make_twin = TWINS[name]
    ours, theirs = SGD([parameter()], lr=123.0), SGD([parameter()], lr=lr)
    our_rates = train(ours, schedule.bind(ours), 50)
    their_rates = train(theirs, make_twin(theirs), 50)
    assert our_rates == pytest.approx(their_rates, rel=1e-9)
    our_weight, their_weight = ours.param_groups[0]["params"][0], theirs.param_groups[0]["params"][0]
    torch.testing.assert_close(our_weight, their_weight)


def test_momentum_moves_as_the_momentum_of_cyclic_lr() -> None:
    ours, theirs = SGD([parameter()], lr=0.1, momentum=0.9), SGD([parameter()], lr=0.1, momentum=0.9)
    our_scheduler = TriangularMtm(mtm_min=0.5, mtm_max=0.9, stepsize=10).bind(ours)
    their_scheduler = CyclicLR(theirs, 0.1, 1.0, step_size_up=10, base_momentum=0.5, max_momentum=0.9)
    for _ in range(45):
        assert ours.param_groups[0]["momentum"] == pytest.approx(theirs.param_groups[0]["momentum"])
        train(ours, our_scheduler, 1)
        train(theirs, their_scheduler, 1)
    assert ours.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
def test_a_bound_schedule_sets_its_first_value_at_once(schedule: Schedule) -> None:
    optimizer = SGD([parameter()], lr=5.0, momentum=0.5)
    scheduler = schedule.bind(optimizer)
    assert isinstance(scheduler, LRScheduler)
    assert optimizer.param_groups[0][schedule.key] == schedule.value(0)
    assert scheduler.get_last_lr() == [schedule.value(0)]


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
def test_a_resumed_scheduler_continues_exactly(schedule: Schedule) -> None:
    def run(scheduler: ScheduleLR, first: int, last: int) -> list[Any]:
        values = []
        for count in range(first, last):
            scheduler.step()
            if scheduler.needs_accuracy:
                scheduler.observe(0.9 if count % 3 else 0.1 * count)
            values.append(scheduler.get_last_lr())
        return values

    straight = schedule.bind(SGD([parameter()], lr=5.0, momentum=0.5))
    expected = run(straight, 0, 20)

    interrupted = schedule.bind(SGD([parameter()], lr=5.0, momentum=0.5))
    run(interrupted, 0, 11)
    state = json.loads(json.dumps(interrupted.state_dict(), allow_nan=False))

    optimizer = SGD([parameter()], lr=5.0, momentum=0.5)
    resumed = schedule.bind(optimizer)
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == interrupted.get_last_lr()
    assert [optimizer.param_groups[0][schedule.key]] == interrupted.get_last_lr()
    assert run(resumed, 11, 20) == expected[11:]
    assert resumed.state_dict() == straight.state_dict()


def test_the_state_of_a_scheduler_loads_without_pickle() -> None:
    scheduler = TriangularDecayWhenAcc().bind(SGD([parameter()], lr=1.0))
    scheduler.step(torch.tensor(0.5))
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == scheduler.state_dict()


@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
def test_the_interval_of_a_schedule_follows_from_its_unit(schedule: Schedule) -> None:
    scheduler = schedule.bind(SGD([parameter()], lr=1.0))
    assert scheduler.interval == ("update" if schedule.unit == "update" else "epoch")


def test_schedules_declare_whether_they_need_accuracy() -> None:
    bound = [schedule.bind(SGD([parameter()], lr=1.0)) for schedule in ALL]
    assert [type(scheduler.schedule) for scheduler in bound if scheduler.takes_metric] == [DecayWhenAcc]
    assert [type(scheduler.schedule) for scheduler in bound if scheduler.needs_accuracy] == [
        DecayWhenAcc,
        TriangularDecayWhenAcc,
    ]


def test_stepping_with_an_accuracy_decays() -> None:
    optimizer = SGD([parameter()], lr=5.0)
    scheduler = DecayWhenAcc(initial_lr=1.0, lr_decay=0.5).bind(optimizer)
    for accuracy in (0.5, torch.tensor(0.9), 0.3):
        scheduler.step(accuracy)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_observing_an_accuracy_does_not_advance_the_schedule() -> None:
    optimizer = SGD([parameter()], lr=5.0)
    scheduler = TriangularDecayWhenAcc(**CYCLE, lr_decay=0.5).bind(optimizer)
    for _ in range(10):
        scheduler.step()
    scheduler.observe(0.9)
    assert optimizer.param_groups[0]["lr"] == 1.0
    scheduler.observe(0.1)
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch) == (0.5, 10)


def test_an_accuracy_for_a_schedule_without_accuracy_is_rejected() -> None:
    scheduler = Triangular(**CYCLE).bind(SGD([parameter()], lr=1.0))
    with pytest.raises(ConfigError, match="Triangular does not depend on accuracy"):
        scheduler.step(0.5)
    assert scheduler.last_epoch == 0


def test_one_schedule_for_two_optimizers_has_two_states() -> None:
    schedule = DecayWhenAcc(initial_lr=1.0, lr_decay=0.5)
    first = schedule.bind(SGD([parameter()], lr=5.0))
    second = schedule.bind(SGD([parameter()], lr=5.0))
    first.step(0.9)
    first.step(0.1)
    assert (first.get_last_lr(), second.get_last_lr()) == ([0.5], [1.0])
    assert schedule.num_decays == 0


def test_every_parameter_group_gets_the_value_times_its_scale() -> None:
    optimizer = SGD([{"params": [parameter()], "lr": 7.0}, {"params": [parameter()], "lr_scale": 0.1}], lr=5.0)
    scheduler = LinearDecay(lr_min=0.0, num_iters=10).bind(optimizer)
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.9, 0.09])
    assert [group["lr"] for group in optimizer.param_groups] == scheduler.get_last_lr()


def test_a_learning_rate_in_a_tensor_is_changed_in_place() -> None:
    rate = torch.tensor(5.0)
    optimizer = AdamW([parameter()], lr=rate, foreach=False)
    scheduler = LinearDecay(lr_min=0.0, num_iters=4).bind(optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.75


def test_momentum_of_adam_is_the_first_beta() -> None:
    optimizer = AdamW([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1, betas=(0.8, 0.95))
    scheduler = TriangularMtm(mtm_min=0.5, mtm_max=0.75, stepsize=2).bind(optimizer)
    betas = []
    for _ in range(4):
        betas.append([group["betas"] for group in optimizer.param_groups])
        train(optimizer, scheduler, 1)
    assert betas == [[(beta, 0.95)] * 2 for beta in (0.75, 0.625, 0.5, 0.625)]


def test_the_first_beta_affects_the_weights() -> None:
    def weight_after(schedule: Schedule | None) -> torch.Tensor:
        weight = parameter()
        optimizer = AdamW([weight], lr=0.1, betas=(0.9, 0.99))
        scheduler = schedule.bind(optimizer) if schedule else None
        for gradient in (1.0, -2.0, 3.0, -4.0):
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
            if scheduler:
                scheduler.step()
        return weight.detach()

    constant = TriangularMtm(mtm_min=0.9, mtm_max=0.9)
    moving = TriangularMtm(mtm_min=0.1, mtm_max=0.9, stepsize=2)
    assert torch.equal(weight_after(constant), weight_after(None))
    assert not torch.allclose(weight_after(moving), weight_after(None))


def test_an_optimizer_without_momentum_is_rejected() -> None:
    with pytest.raises(ConfigError, match="momentum: expected an optimizer with 'momentum' or 'betas'"):
        TriangularMtm().bind(Adagrad([parameter()], lr=0.1))


def test_learning_rate_and_momentum_schedules_can_share_an_optimizer() -> None:
    optimizer = SGD([parameter()], lr=5.0, momentum=0.5)
    rate, momentum = Triangular(**CYCLE).bind(optimizer), TriangularMtm(stepsize=10).bind(optimizer)
    train(optimizer, rate, 3)
    for _ in range(3):
        momentum.step()
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (
        Triangular(**CYCLE).get_lr(3),
        TriangularMtm(stepsize=10).get_lr(3),
    )


def test_stepping_before_the_first_update_does_not_warn() -> None:
    # A first update that a gradient scaler skips is normal; warnings are errors here.
    optimizer = SGD([parameter()], lr=5.0, momentum=0.5)
    for schedule in (Triangular(), TriangularMtm()):
        scheduler = schedule.bind(optimizer)
        scheduler.step()
        assert scheduler.last_epoch == 1


# Chains


def test_a_chain_warms_up_and_anneals() -> None:
    ours, theirs = SGD([parameter()], lr=0.5), SGD([parameter()], lr=0.5)
    chain = SchedulerChain(WarmUpScheduler(ours, 5, eta_min=0.05), CosineAnnealingScheduler(ours, 10, eta_min=0.1))
    twin = SequentialLR(
        theirs,
        [
            LinearLR(theirs, start_factor=0.1, total_iters=5),
            CosineAnnealingLR(theirs, T_max=10, eta_min=0.1),
        ],
        milestones=[5],
    )
    assert chain.total_iters == 15
    assert train(ours, chain, 16) == pytest.approx(train(theirs, twin, 16), rel=1e-9)


def test_a_finished_scheduler_holds_its_last_value() -> None:
    optimizer = SGD([parameter()], lr=0.5)
    rates = train(optimizer, CosineAnnealingScheduler(optimizer, 4, eta_min=0.1), 8)
    assert rates[0] == 0.5
    assert rates[4:] == [0.1] * 4


def test_every_parameter_group_keeps_its_base_rate() -> None:
    optimizer = SGD([{"params": [parameter()], "lr": 1.0}, {"params": [parameter()], "lr": 0.5}])
    scheduler = WarmUpScheduler(optimizer, 4)
    train(optimizer, scheduler, 2)
    assert scheduler.get_last_lr() == [0.5, 0.25]


def test_chains_can_be_nested() -> None:
    def parts(optimizer: Optimizer) -> tuple[WarmUpScheduler, CosineAnnealingScheduler, WarmUpScheduler]:
        return (
            WarmUpScheduler(optimizer, 3),
            CosineAnnealingScheduler(optimizer, 4),
            WarmUpScheduler(optimizer, 2),
        )

    flat, nested = SGD([parameter()], lr=1.0), SGD([parameter()], lr=1.0)
    flat_chain = SchedulerChain(*parts(flat))
    first, second, third = parts(nested)
    nested_chain = SchedulerChain(SchedulerChain(first, second), third)
    assert train(flat, flat_chain, 12) == train(nested, nested_chain, 12)


def test_a_resumed_chain_continues_exactly() -> None:
    def build(lr: float) -> tuple[SGD, SchedulerChain]:
        optimizer = SGD([parameter()], lr=lr)
        return optimizer, SchedulerChain(WarmUpScheduler(optimizer, 4), CosineAnnealingScheduler(optimizer, 8))

    straight, straight_chain = build(0.3)
    expected = train(straight, straight_chain, 12)

    optimizer, chain = build(0.3)
    train(optimizer, chain, 6)
    state = json.loads(json.dumps(chain.state_dict(), allow_nan=False))

    resumed, resumed_chain = build(99.0)
    resumed.load_state_dict(optimizer.state_dict())
    resumed_chain.load_state_dict(state)
    assert train(resumed, resumed_chain, 6) == expected[6:]


def test_all_parts_of_a_chain_must_share_one_optimizer() -> None:
    with pytest.raises(ConfigError, match="expected schedulers of one optimizer"):
        SchedulerChain(WarmUpScheduler(SGD([parameter()], lr=1.0), 2), WarmUpScheduler(SGD([parameter()], lr=1.0), 2))


def test_an_empty_chain_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected at least one scheduler"):
        SchedulerChain()


def test_a_chained_scheduler_must_have_a_length() -> None:
    with pytest.raises(ConfigError, match="WarmUpScheduler: total_iters: expected a number above 0, got 0"):
        WarmUpScheduler(SGD([parameter()], lr=1.0), 0)
