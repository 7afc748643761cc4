"""Trainer decorators: forwarding, the layer on which a run starts, and rejected combinations."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from problem import Problem, assert_same_weights
from torch import nn

from dovetail import Batches, Epochs, Trainer
from dovetail.callbacks import Callback
from dovetail.compat import plato, zae_engine
from dovetail.errors import ConfigError
from dovetail.trainers import (
    AbstractTrainerDecorator,
    ActivationCheckpointTrainer,
    AMPTrainer,
    AutoBatchTrainer,
    CompiledTrainer,
    DDPTrainer,
    FSDPTrainer,
    SingleProcess,
    SingleProcessAMP,
    SingleProcessAmp,
    TimedTrainer,
    TrainerDecorator,
    base,
    build_trainer,
)
from dovetail.trainers.addons import MultiGPUAddon, PrecisionMixerAddon, StateManagerAddon
from dovetail.trainers.capabilities import Capability, DataParallel, MixedPrecision
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.reuse import equip, reset
from dovetail.trainers.strategies import (
    CrossEntropyLossStrategy,
    MixedPrecisionStepStrategy,
    MultipleForwardPassStepStrategy,
)


class Counting(TrainerDecorator):
    """Counts the verbs that it sees."""

    def __init__(self, trainer: base.Trainer, name: str = "outer") -> None:
        self.name = name
        self.seen: list[str] = []
        super().__init__(trainer)

    def setup(self) -> None:
        self.seen.append("setup")
        super().setup()

    def train_step(self, batch: Any) -> Mapping[str, Any]:
        self.seen.append("train_step")
        return super().train_step(batch)

    def test_step(self, batch: Any) -> Mapping[str, Any]:
        self.seen.append("test_step")
        return super().test_step(batch)


def make_trainer(problem: Problem, kind: Callable[..., Any] = Trainer, **settings: Any) -> Any:
    settings = {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "verbose": False, "seed": 1, **settings}
    return kind(problem.model(), "cpu", **settings)


# ------------------------------------------------------------------ passing on


def test_a_plain_decorator_changes_nothing(problem: Problem) -> None:
    plain, decorated = make_trainer(problem), TrainerDecorator(TrainerDecorator(make_trainer(problem)))
    for trainer in (plain, decorated):
        trainer.fit(problem.batches, problem.batches, max_length=Epochs(2))
    assert_same_weights(plain.model, decorated.model)
    assert plain.history == decorated.history
    assert decorated.evaluate(problem.batches) == plain.evaluate(problem.batches)


def test_every_verb_is_forwarded() -> None:
    missing = base.Trainer.__abstractmethods__ - vars(TrainerDecorator).keys()
    assert not missing
    assert AbstractTrainerDecorator is TrainerDecorator


def test_attributes_are_read_from_and_written_to_the_decorated_trainer(problem: Problem) -> None:
    inner = make_trainer(problem)
    outer = Counting(TrainerDecorator(inner))
    outer.options.num_epochs = 4
    inner.mine = None
    outer.mine = "kept inside"
    assert (inner.options.num_epochs, inner.mine, outer.mine) == (4, "kept inside", "kept inside")
    outer.name = "own"
    assert outer.name == "own"
    assert "name" not in vars(inner)
    assert "mine" in dir(outer)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = outer.no_such_thing


class Declaring(TrainerDecorator):
    """Sets what it declares after `super().__init__`."""

    steps: int
    limit = 3
    _hidden: list[int]

    def __init__(self, trainer: base.Trainer) -> None:
        super().__init__(trainer)
        self.steps = 1
        self.limit += 1
        self._hidden = []

    @property
    def half(self) -> int:
        return self.limit // 2

    @half.setter
    def half(self, value: int) -> None:
        self.limit = 2 * value


def test_declared_attributes_belong_to_the_layer_in_any_order(problem: Problem) -> None:
    inner = make_trainer(problem)
    layer = Declaring(inner)
    outer = Counting(TrainerDecorator(layer))
    outer.steps = 2
    layer.half = 5
    assert (layer.steps, layer.limit, layer._hidden) == (2, 10, [])
    assert not {"steps", "limit", "half", "_hidden"} & vars(inner).keys()
    twin = pickle.loads(pickle.dumps(outer))
    twin.steps = 7
    assert (vars(twin.trainer.trainer)["steps"], layer.steps) == (7, 2)


def test_an_undeclared_attribute_is_an_error_that_shows_the_declaration(problem: Problem) -> None:
    class Forgetful(TrainerDecorator):
        def __init__(self, trainer: base.Trainer) -> None:
            super().__init__(trainer)
            self.steps = 0

    with pytest.raises(AttributeError, match="declare it in the class body: `steps: int`"):
        Forgetful(make_trainer(problem))
    with pytest.raises(AttributeError, match="AMPTrainer does not declare 'num_epoch', and Trainer has no such"):
        AMPTrainer(make_trainer(problem)).num_epoch = 3


def test_attributes_declared_by_the_trainer_are_set_through_layers(problem: Problem) -> None:
    class Declared(Trainer):
        note: str

    inner = make_trainer(problem, Declared)
    AMPTrainer(DDPTrainer(inner)).note = "kept inside"
    assert inner.note == "kept inside"


def test_capabilities_declare_every_attribute_they_set(problem: Problem) -> None:
    kinds = (AMPTrainer, AutoBatchTrainer, CompiledTrainer, DDPTrainer, FSDPTrainer, TimedTrainer)
    for kind in (*kinds, ActivationCheckpointTrainer):
        layer = kind(make_trainer(problem))
        declared = {
            name for cls in kind.__mro__ if cls not in TrainerDecorator.__mro__ for name in get_annotations(cls)
        }
        assert vars(layer).keys() - {"context", "trainer"} <= declared
        assert not declared & vars(layer.core).keys()


def test_unwrap_returns_the_innermost_trainer(problem: Problem) -> None:
    inner = make_trainer(problem)
    assert AMPTrainer(DDPTrainer(inner)).unwrap() is inner
    assert TrainerDecorator(inner).unwrap() is inner


class Named(zae_engine.Trainer, plato.Trainer):
    """Has the names of two libraries."""


@pytest.mark.parametrize(
    "start",
    [
        lambda trainer, data: trainer.fit(data, max_length=Epochs(1)),
        lambda trainer, data: trainer.run(1, data),
        lambda trainer, data: trainer.train_model({"epochs": 1}, data),
    ],
    ids=["fit", "run", "train_model"],
)
def test_every_method_that_starts_a_run_starts_it_on_the_called_layer(problem: Problem, start: Any) -> None:
    outer = Counting(TrainerDecorator(Counting(make_trainer(problem, Named), "inner")))
    start(outer, problem.batches)
    assert outer.seen.count("train_step") == 12
    assert outer.trainer.seen == outer.seen


class Own(zae_engine.Trainer, plato.Trainer):
    """Overrides entry methods, and adds one."""

    def train_model(self, config: Mapping[str, Any], trainset: Any, sampler: Any = None) -> None:
        self.was_called = True
        super().train_model(config, trainset, sampler)

    def run(self, n_epoch: int, loader: Any, valid_loader: Any = None) -> Any:
        self.num_runs = getattr(self, "num_runs", 0) + 1
        return super().run(n_epoch, loader, valid_loader)

    def pretrain(self, data: Any) -> None:
        self.run(1, data)


@pytest.mark.parametrize(
    ("start", "name", "value"),
    [
        (lambda trainer, data: trainer.train(data), "was_called", True),
        (lambda trainer, data: trainer.train_model({"epochs": 1}, data), "was_called", True),
        (lambda trainer, data: trainer.run(1, data), "num_runs", 1),
        (lambda trainer, data: trainer.pretrain(data), "num_runs", 1),
    ],
    ids=["train", "train_model", "run", "pretrain"],
)
def test_methods_of_a_user_trainer_start_runs_on_the_called_layer(
    problem: Problem, start: Any, name: str, value: Any
) -> None:
    inner = make_trainer(problem, Own, num_epochs=1)
    outer = Counting(TrainerDecorator(inner))
    start(outer, problem.batches)
    assert outer.seen.count("train_step") == 12
    assert vars(inner)[name] == value == getattr(outer, name)
    assert name not in vars(outer)


def test_a_decorator_overrides_an_entry_method_with_super(problem: Problem) -> None:
    class Twice(TrainerDecorator):
        def run(self, n_epoch: int, loader: Any, valid_loader: Any = None) -> Any:
            return super().run(2 * n_epoch, loader, valid_loader)

        def check(self, data: Any) -> dict[str, float]:
            return self.evaluate(data)

    outer = Counting(Twice(make_trainer(problem, Own)))
    outer.run(1, problem.batches)
    assert outer.seen.count("train_step") == 24
    outer.check(problem.batches)
    assert outer.seen.count("test_step") == 12


def test_strategies_equipped_through_a_layer_remain_set_up(problem: Problem) -> None:
    outer = Counting(make_trainer(problem))
    equip(outer, loss=CrossEntropyLossStrategy(label_smoothing=0.1))
    outer.fit(problem.batches, max_length=Epochs(1))
    assert outer.strategies.is_set_up
    assert outer.history is outer.core.history


def test_a_layer_equips_a_step_strategy_unless_train_step_is_overridden(problem: Problem) -> None:
    class OwnStep(Trainer):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            return {"loss": self.model(batch[0]).mean()}

    strategy = MultipleForwardPassStepStrategy(2)
    equip(Counting(make_trainer(problem)), training_step=strategy)
    with pytest.raises(ConfigError, match="decides this; give one or the other"):
        equip(Counting(make_trainer(problem, OwnStep)), training_step=strategy)


def test_a_precision_strategy_works_with_an_overridden_step(problem: Problem) -> None:
    class OwnStep(Trainer):
        def train_step(self, batch: Any) -> Mapping[str, Any]:
            inputs, targets = batch
            return {"loss": nn.functional.cross_entropy(self.model(inputs), targets)}

    strategy = MixedPrecisionStepStrategy(precision="bf16")
    one = OwnStep(problem.model(), "cpu", training_step_strategy=strategy, verbose=False)
    other = AMPTrainer(OwnStep(problem.model(), "cpu", verbose=False), precision="bf16")
    full = OwnStep(problem.model(), "cpu", verbose=False)
    for trainer in (one, other, full):
        trainer.fit(problem.batches, max_length=Epochs(2))
    assert_same_weights(one.model, other.core.model)
    assert one.history.losses != full.history.losses


def test_customized_by_names_the_classes_of_all_layers(problem: Problem) -> None:
    trainer = Counting(AMPTrainer(make_trainer(problem, Own)))
    assert trainer._customized_by("setup") == (Counting, MixedPrecision)
    assert trainer._customized_by("train_model") == (Own,)
    assert trainer._customized_by("backward") == trainer.core._customized_by("train_step") == ()
    extended = make_trainer(problem, Trainer.add_on(MixedPrecision))
    assert extended._customized_by("setup") == (MixedPrecision,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Trainer, ComposableTrainer])
def test_a_training_process_trains_with_the_layers(kind: type[Trainer], problem: Problem) -> None:
    weights = []
    for settings in ({}, {"max_concurrency": 1}):
        inner = kind(problem.model(), device="cpu", num_epochs=3, seed=1, verbose=False, **settings)
        with AMPTrainer(inner, precision="bf16") as trainer:
            trainer.train((problem.x, problem.y))
        weights.append(inner.model[0].weight)
    plain = kind(problem.model(), device="cpu", num_epochs=3, seed=1, verbose=False)
    plain.train((problem.x, problem.y))
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], plain.model[0].weight)


def test_a_layer_does_not_rebind_a_method_of_another_trainer(problem: Problem) -> None:
    teacher = make_trainer(problem)
    student = make_trainer(problem)
    student.ask = teacher.predict
    assert Counting(student).ask.__self__ is teacher


def test_attributes_that_refer_to_self_can_be_pickled_with_the_layer(problem: Problem) -> None:
    outer = Counting(make_trainer(problem, Remembering))
    outer.remember()
    twin = pickle.loads(pickle.dumps(outer))
    twin.itself.fit(problem.batches, max_length=Epochs(1))
    assert twin.seen.count("train_step") == 12
    assert (outer.seen, twin.context.progress.epoch) == ([], 1)


class Remembering(Trainer):
    def remember(self) -> None:
        self.itself = self


def test_every_layer_is_a_trainer(problem: Problem) -> None:
    inner = make_trainer(problem, Own)
    for kind in (TrainerDecorator, AMPTrainer, CompiledTrainer, DDPTrainer, FSDPTrainer, Counting):
        layer = kind(trainer=inner)
        assert isinstance(layer, Trainer)
        assert not isinstance(layer, Own)
        assert layer.core is inner is inner.core
        # All that the class has is there, and is the inner trainer's.
        layer.options.momentum = 0.5
        assert (inner.options.momentum, layer.current_epoch, layer.weight_buffer) == (0.5, 1, None)


def test_the_decorated_trainer_used_directly_is_unchanged(problem: Problem) -> None:
    inner = make_trainer(problem)
    outer = Counting(inner)
    inner.fit(problem.batches, max_length=Epochs(1))
    assert outer.seen == []


def test_an_evaluation_inside_a_run_passes_through_all_layers(problem: Problem) -> None:
    class Curious(Trainer):
        def after_step(self, output: Mapping[str, Any]) -> None:
            super().after_step(output)
            self.evaluate(problem.batches[:1])

    outer = Counting(make_trainer(problem, Curious))
    outer.fit(problem.batches[:2], max_length=Epochs(1))
    assert outer.seen == ["setup", "train_step", "test_step", "train_step", "test_step"]


def test_decorated_and_extended_trainers_can_be_pickled_and_copied(problem: Problem, tmp_path: Path) -> None:
    extended = Trainer.add_on(StateManagerAddon, PrecisionMixerAddon)
    made = [
        AMPTrainer(DDPTrainer(make_trainer(problem)), precision="bf16"),
        make_trainer(problem, extended, save_path=tmp_path, precision="bf16", checkpoint_dir=tmp_path, save_every=0),
    ]
    for trainer in made:
        for twin in (pickle.loads(pickle.dumps(trainer)), copy.deepcopy(trainer)):
            assert type(twin) is type(trainer)
            twin.fit(problem.batches, max_length=Epochs(1), checkpoint_period=Epochs(0))
    assert Trainer.add_on(StateManagerAddon, PrecisionMixerAddon) is extended


def test_an_unknown_keyword_suggests_the_nearest(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="unknown keyword 'precison': did you mean 'precision'"):
        AMPTrainer(make_trainer(problem), precison="bf16")
    with pytest.raises(ConfigError, match="expected a trainer to decorate, got Linear"):
        DDPTrainer(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


# ------------------------------------------------------------------ combining


def test_the_same_capability_twice_is_rejected(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="the trainer has mixed precision already"):
        AMPTrainer(DDPTrainer(AMPTrainer(make_trainer(problem))))
    with pytest.raises(
        ConfigError, match="DDPTrainer and FSDPTrainer cannot be combined: the trainer has data parallel"
    ):
        DDPTrainer(FSDPTrainer(make_trainer(problem)))
    with pytest.raises(ConfigError, match="DDPTrainer and MultiGPUAddon cannot be combined"):
        DDPTrainer(make_trainer(problem, Trainer.add_on(MultiGPUAddon)))


def test_a_conflict_of_layers_is_rejected_with_its_reason_in_either_order(problem: Problem) -> None:
    class Picky(Capability):
        kind = "pickiness"
        conflicts: ClassVar[Mapping[str, str]] = {"mixed precision": "it wants every bit"}

    class PickyTrainer(Picky, TrainerDecorator):
        pass

    for combine in (
        lambda: PickyTrainer(AMPTrainer(make_trainer(problem))),
        lambda: AMPTrainer(PickyTrainer(make_trainer(problem))),
        lambda: make_trainer(problem, Trainer.add_on(Picky, MixedPrecision)),
    ):
        with pytest.raises(ConfigError, match="cannot be combined: it wants every bit"):
            combine()


def test_a_precision_strategy_with_a_precision_layer_is_rejected(problem: Problem) -> None:
    strategy = MixedPrecisionStepStrategy(precision="bf16")
    trainer = AMPTrainer(ComposableTrainer(problem.model(), training_step_strategy=strategy, verbose=False))
    with pytest.raises(ConfigError, match="mixed precision twice"):
        trainer.fit(problem.batches)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_decorator_add_on_and_strategy_give_the_same_bits(problem: Problem, precision: str) -> None:
    def composed(model: Any, device: str, **settings: Any) -> ComposableTrainer:
        step = MixedPrecisionStepStrategy(precision=precision)  # type: ignore[arg-type]
        optimizer = settings.pop("optimizer")
        return ComposableTrainer(
            model, optimizer_strategy=optimizer, training_step_strategy=step, device=device, **settings
        )

    kinds: dict[str, Callable[..., Any]] = {
        "decorator": lambda *args, **kwargs: AMPTrainer(Trainer(*args, **kwargs), precision=precision),
        "outer": lambda *args, **kwargs: AMPTrainer(DDPTrainer(Trainer(*args, **kwargs)), precision=precision),
        "inner": lambda *args, **kwargs: DDPTrainer(AMPTrainer(Trainer(*args, **kwargs), precision=precision)),
        "add-on": partial(Trainer.add_on(PrecisionMixerAddon), precision=precision),
        "capability": partial(Trainer.add_on(MixedPrecision), precision=precision),
        "class": partial(SingleProcessAMP, precision=precision),
        "strategy": composed,
    }
    trainers = {
        name: make_trainer(problem, kind, gradient_clip=0.3, accumulation_steps=2) for name, kind in kinds.items()
    }
    for trainer in trainers.values():
        trainer.fit(problem.batches, max_length=Epochs(2))
    plain = make_trainer(problem, gradient_clip=0.3, accumulation_steps=2)
    plain.fit(problem.batches, max_length=Epochs(2))
    first = trainers["decorator"].model
    assert not torch.equal(first[0].weight, plain.model[0].weight)
    for trainer in trainers.values():
        assert_same_weights(trainer.model, first)


def test_data_parallel_in_one_process_equals_the_plain_trainer(problem: Problem) -> None:
    trainers = [
        make_trainer(problem),
        DDPTrainer(make_trainer(problem)),
        make_trainer(problem, Trainer.add_on(DataParallel)),
        make_trainer(problem, Trainer.add_on(MultiGPUAddon)),
    ]
    for trainer in trainers:
        trainer.fit(problem.batches, max_length=Epochs(2))
        assert_same_weights(trainer.model, trainers[0].model)


def test_a_float16_run_is_resumed_with_its_scale(problem: Problem, tmp_path: Any) -> None:
    def make() -> AMPTrainer:
        return AMPTrainer(make_trainer(problem), precision="fp16", init_scale=2.0**40)

    whole, first, second = make(), make(), make()
    whole.fit(problem.batches, max_length=Epochs(4))
    first.fit(problem.batches, max_length=Epochs(2))
    second.load_checkpoint(first.save_checkpoint(tmp_path / "half"))
    second.fit(problem.batches, max_length=Epochs(4))
    # The scale was too large at first, and steps that overflowed are no updates.
    assert whole.context.progress.updates < whole.context.progress.batches
    assert second.context.progress == whole.context.progress
    assert_same_weights(second.model, whole.model)


class LookAtScale(Callback):
    """Records the scale of every step, and fails once in the given step."""

    def __init__(self, fails_at: int = -1) -> None:
        self.scales: list[float] = []
        self.fails_at = fails_at

    def on_gradients(self, context: Any, optimizer: Any) -> None:
        self.scales.append(context.precision.scaler.get_scale())
        if context.progress.batches == self.fails_at:
            self.fails_at = -1
            raise ZeroDivisionError


def test_a_new_float16_run_starts_with_the_initial_scale(problem: Problem) -> None:
    look = LookAtScale()
    trainer = AMPTrainer(make_trainer(problem, callbacks=[look]), precision="fp16", init_scale=2.0**40)
    for _ in range(2):
        reset(trainer)
        trainer.fit(problem.batches, max_length=Batches(3))
    assert look.scales == [2.0**40, 2.0**39, 2.0**38] * 2


def test_a_float16_run_continues_after_an_error_within_a_step(problem: Problem) -> None:
    look = LookAtScale(fails_at=2)
    trainer = AMPTrainer(make_trainer(problem, callbacks=[look]), precision="fp16", init_scale=2.0**40)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(problem.batches, max_length=Batches(4))
    trainer.fit(problem.batches, max_length=Batches(4))
    assert look.scales == [2.0**40, 2.0**39, 2.0**38, 2.0**38, 2.0**37]


def test_a_manual_step_with_an_overflow_at_the_end_of_a_window_is_skipped_once(problem: Problem) -> None:
    def train_step(trainer: Any, batch: Any) -> dict[str, Any]:
        loss = torch.nn.functional.cross_entropy(trainer.model(batch[0]), batch[1])
        trainer.context.backward(loss)
        trainer.context.step()
        return {"loss": loss.detach()}

    look = LookAtScale()
    plain = make_trainer(problem, accumulation_steps=2, train_step=train_step, callbacks=[look])
    trainer = AMPTrainer(plain, precision="fp16", init_scale=2.0**40)
    trainer.fit(problem.batches, max_length=Batches(4))
    assert look.scales == [2.0**40, 2.0**39]
    assert trainer.context.progress.updates == 0


# ------------------------------------------------------------------ making


def test_class_methods_and_factory_build_the_layers(problem: Problem) -> None:
    model = problem.model()
    assert type(DDPTrainer.from_single_process(model).trainer) is SingleProcess
    assert type(DDPTrainer.from_single_process(model, amp=True, precision="bf16").trainer) is SingleProcessAMP
    assert type(DDPTrainer.from_single_process_amp(model).trainer) is SingleProcessAMP
    assert SingleProcessAmp is SingleProcessAMP
    built = build_trainer("ddp-amp", model, num_processes=3, precision="fp16", num_epochs=2, criterion="NLLLoss")
    assert isinstance(built, AMPTrainer)
    assert isinstance(built.trainer, DDPTrainer)
    assert (built.trainer.num_processes, built.unwrap().options.num_epochs) == (3, 2)
    assert type(build_trainer("sp", model)) is SingleProcess
    compiled = build_trainer("ddp+compile", model)
    assert isinstance(compiled, DDPTrainer)
    assert isinstance(compiled.trainer, CompiledTrainer)
    assert isinstance(build_trainer("sp+compile", model, mode="test"), CompiledTrainer)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown trainer 'ddpamp': did you mean 'ddp-amp'"):
        build_trainer("ddpamp")


def test_a_list_of_devices_sets_the_number_of_processes(problem: Problem) -> None:
    trainer = Trainer.add_on(MultiGPUAddon)(problem.model(), ["cpu", "cpu"], init_method="tcp://localhost:12355")
    assert trainer.num_processes == 2


@pytest.mark.parametrize(("name", "value"), [("num_processes", 0), ("max_restarts", -1), ("num_processes", "two")])
def test_invalid_numbers_are_rejected(problem: Problem, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: expected a whole number"):
        DDPTrainer(make_trainer(problem), **{name: value})


def test_explain_shows_the_layers(problem: Problem) -> None:
    text = AMPTrainer(DDPTrainer(make_trainer(problem))).explain()
    shown = [line.strip("│├└─ ") for line in text.splitlines()[2:6]]
    assert shown == ["AMPTrainer", "DDPTrainer (decorated)", "Trainer (decorated)", "SingleProcessTrainer (decorated)"]


def test_a_dry_run_through_layers_restores_everything(problem: Problem) -> None:
    trainer = AMPTrainer(DDPTrainer(make_trainer(problem)), precision="bf16")
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.fit(problem.batches, problem.batches, dry_run=True)
    assert all(torch.equal(one, other) for one, other in zip(trainer.model.parameters(), before, strict=True))
    assert trainer.context.progress.batches == 0


def test_a_sharded_trainer_rejects_a_bucket_size(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="bucket_size: torch sends the gradients of a sharded model block by block"):
        FSDPTrainer(Trainer(problem.model(), "cpu"), bucket_size=1)


def test_layer_arguments_without_effect_are_rejected(problem: Problem) -> None:
    with pytest.raises(ConfigError, match="init_scale: only float16 is scaled, got precision='bf16'"):
        AMPTrainer(make_trainer(problem), precision="bf16", init_scale=4.0)
    with pytest.raises(ConfigError, match="max_restarts: only processes that the trainer starts are restarted"):
        DDPTrainer(make_trainer(problem), max_restarts=1)
