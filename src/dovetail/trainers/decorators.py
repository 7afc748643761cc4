"""Trainers that decorate trainers: responsibilities added to an object at run time, in any order."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.trainers import base
from dovetail.trainers.basic import SingleProcess
from dovetail.trainers.capabilities import (
    AutoBatch,
    Compiled,
    DataParallel,
    DifferentialPrivacy,
    MixedPrecision,
    ShardedDataParallel,
    Timed,
)
from dovetail.trainers.context import Plan, Stage
from dovetail.trainers.metrics import Meter
from dovetail.units import TrainUnit

__all__ = [
    "AMPTrainer",
    "AbstractTrainerDecorator",
    "AutoBatchTrainer",
    "CompiledTrainer",
    "DDPTrainer",
    "FSDPTrainer",
    "PrivateTrainer",
    "SingleProcessAMP",
    "SingleProcessAmp",
    "TimedTrainer",
    "TrainerDecorator",
    "build_trainer",
]


def _passed_on(verb: str) -> Any:
    """A verb of a decorator: the bound method of the decorated trainer, at no cost of a call."""
    return property(attrgetter(f"trainer.{verb}"))


class TrainerDecorator(base.Trainer):
    """A trainer that passes everything on to the one it decorates: every verb, and every other attribute.

    Subclass it and override the verbs that differ, with `super()`. The entry points (`fit`, `evaluate`, `run`,
    `train`, …) work on the layer they are called on, so that the outermost decorator sees every call. Attributes that
    the constructor sets are the decorator's own; all others are read from, and written to, the decorated trainer.

    Args:
        trainer: What it decorates.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> class Counting(TrainerDecorator):
        ...     def __init__(self, trainer):
        ...         self.steps = 0
        ...         super().__init__(trainer)
        ...     def after_step(self, output):
        ...         self.steps += 1
        ...         super().after_step(output)
        >>> trainer = Counting(SingleProcess(torch.nn.Linear(2, 2), "cpu", num_epochs=3, verbose=False))
        >>> _ = trainer.fit((torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)))
        >>> trainer.steps, trainer.num_epochs
        (3, 3)
    """

    trainer: base.Trainer

    def __init__(self, trainer: base.Trainer, **unknown: Any) -> None:
        if not isinstance(trainer, base.Trainer):
            raise ConfigError(f"{type(self).__name__}: expected a trainer to decorate, got {trainer!r}")
        for name in unknown:
            raise UnknownNameError("keyword", name, _keywords(type(self)))
        self.context = trainer.context
        # From here on, attributes that are not there yet belong to the decorated trainer.
        self.trainer = trainer

    def unwrap(self) -> base.Trainer:
        """Return the trainer itself, without any decorator."""
        return self.trainer.unwrap() if isinstance(self.trainer, TrainerDecorator) else self.trainer

    # The verbs. `self.verb`, and `super().verb` in a subclass, is the decorated trainer's bound method.

    if TYPE_CHECKING:

        def setup(self) -> None: ...
        def plan(self, **wishes: TrainUnit | Mapping[str, int] | None) -> Plan: ...
        def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
        def state_dict(self) -> dict[str, Any]: ...
        def teardown(self, error: BaseException | None) -> None: ...
        def batches(self, stage: Stage) -> Iterable[Any]: ...
        def num_batches(self, stage: Stage) -> int | None: ...
        def train_epoch(self) -> Mapping[str, float] | None: ...
        def val_epoch(self) -> Mapping[str, float] | None: ...
        def reduce(self, meter: Meter) -> Meter: ...
        def to_device(self, batch: Any) -> Any: ...
        def train_step(self, batch: Any) -> Mapping[str, Any]: ...
        def test_step(self, batch: Any) -> Mapping[str, Any]: ...
        def predict_step(self, batch: Any) -> Any: ...
        def backward(self, loss: Tensor, **kwargs: Any) -> None: ...
        def clip_gradients(self, optimizer: Optimizer) -> None: ...
        def optimizer_step(self, optimizer: Optimizer) -> bool: ...
        def scheduler_step(self, interval: str, metrics: Mapping[str, float] | None = None) -> None: ...
        def after_step(self, output: Mapping[str, Any]) -> None: ...
        def settle(self) -> None: ...
        def gather(self, parts: list[Any]) -> list[Any]: ...
        def launcher(self) -> base.Launcher | None: ...
        def batch_length(self, batch: Any) -> int: ...
    else:
        setup = _passed_on("setup")
        plan = _passed_on("plan")
        load_state_dict = _passed_on("load_state_dict")
        state_dict = _passed_on("state_dict")
        teardown = _passed_on("teardown")
        batches = _passed_on("batches")
        num_batches = _passed_on("num_batches")
        train_epoch = _passed_on("train_epoch")
        val_epoch = _passed_on("val_epoch")
        reduce = _passed_on("reduce")
        to_device = _passed_on("to_device")
        train_step = _passed_on("train_step")
        test_step = _passed_on("test_step")
        predict_step = _passed_on("predict_step")
        backward = _passed_on("backward")
        clip_gradients = _passed_on("clip_gradients")
        optimizer_step = _passed_on("optimizer_step")
        scheduler_step = _passed_on("scheduler_step")
        after_step = _passed_on("after_step")
        settle = _passed_on("settle")
        gather = _passed_on("gather")
        launcher = _passed_on("launcher")
        batch_length = _passed_on("batch_length")

    # Everything else.

    def __getattr__(self, name: str) -> Any:
        if "trainer" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self.trainer, name)
        if isinstance(found, partial) and found.func is _answer:
            found = found.args[1]
        if isinstance(found, MethodType) and isinstance(found.__self__, base.Trainer):
            return partial(_answer, self, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in own or "trainer" not in own:
            own[name] = value
        else:
            setattr(self.trainer, name, value)

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *dir(self.trainer)})

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


AbstractTrainerDecorator = TrainerDecorator


def _keywords(kind: type[TrainerDecorator]) -> set[str]:
    constructors = [vars(cls)["__init__"] for cls in kind.__mro__ if "__init__" in vars(cls)]
    parameters = [it for constructor in constructors for it in inspect.signature(constructor).parameters.values()]
    return {it.name for it in parameters if it.name != "self" and it.kind not in (it.VAR_KEYWORD, it.VAR_POSITIONAL)}


def _answer(layer: base.Trainer, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Let an inner layer answer a call for `layer`, which any run that begins inside of it then begins with."""
    context = layer.context
    before, context.run.addressed = context.run.addressed, context.run.addressed or layer
    try:
        return method(*args, **kwargs)
    finally:
        context.run.addressed = before


class AMPTrainer(MixedPrecision, TrainerDecorator):
    """Trains the decorated trainer in mixed precision.

    Args:
        trainer: Any trainer.
        precision: `bf16`, `fp16` or `fp32`; `auto` for the best of the device, which is `bf16` on a CPU; or a list in
            order of preference.
        init_scale: Where the scaler of float16 starts.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> trainer = AMPTrainer(SingleProcess(torch.nn.Linear(4, 2), "cpu", verbose=False), precision="bf16")
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))
        >>> trainer.model.weight.dtype
        torch.float32
    """


class SingleProcessAMP(MixedPrecision, SingleProcess):
    """A trainer in one process and in mixed precision, with the arguments of both.

    Example:
        >>> import torch
        >>> trainer = SingleProcessAMP(torch.nn.Linear(4, 2), "cpu", precision="bf16", verbose=False)
        >>> trainer.predict(torch.zeros(1, 4)).dtype
        torch.bfloat16
    """


SingleProcessAmp = SingleProcessAMP


class DDPTrainer(DataParallel, TrainerDecorator):
    """Trains the decorated trainer in several processes, each on its own batches.

    Args:
        trainer: Any trainer.
        num_processes: How many processes to start; None for those that `torchrun` started, or just this one.
        max_restarts: How often a group that lost a process is started again; it goes on from the newest checkpoint.
        bucket_size: Bytes of gradients that are sent at once.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> trainer = DDPTrainer(trainer=SingleProcess(torch.nn.Linear(4, 2), "cpu", num_epochs=1, verbose=False))
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))  # one process, as ever
    """

    @classmethod
    def from_single_process(
        cls, *args: Any, amp: bool = False, num_processes: int | None = None, max_restarts: int = 0, **kwargs: Any
    ) -> DDPTrainer:
        """Return a `SingleProcess`, decorated.

        Args:
            args: Those of `SingleProcess`, or of `SingleProcessAMP`.
            amp: Whether in mixed precision.
            num_processes: How many processes to start.
            max_restarts: How often a group that lost a process is started again.
            kwargs: Those of `SingleProcess`, or of `SingleProcessAMP`.

        Example:
            >>> import torch
            >>> DDPTrainer.from_single_process(torch.nn.Linear(4, 2), num_processes=2).num_processes
            2
        """
        inner = (SingleProcessAMP if amp else SingleProcess)(*args, **kwargs)
        return cls(inner, num_processes=num_processes, max_restarts=max_restarts)

    @classmethod
    def from_single_process_amp(cls, *args: Any, **kwargs: Any) -> DDPTrainer:
        """Return a `SingleProcessAMP`, decorated; the arguments are those of `from_single_process`."""
        return cls.from_single_process(*args, amp=True, **kwargs)


class AutoBatchTrainer(AutoBatch, TrainerDecorator):
    """Trains the decorated trainer, and splits a batch for which the memory does not suffice.

    Args:
        trainer: Any trainer.
    """


class CompiledTrainer(Compiled, TrainerDecorator):
    """Trains the decorated trainer with one compiled graph per step, or with a compiled module.

    Args:
        trainer: Any trainer.
        mode: `step` for forward, backward, clipping and update in one graph; `model` for `torch.compile` of the module.
        steps_per_call: How many steps one call of a graph makes, in mode `step`, for models whose steps are tiny.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> trainer = CompiledTrainer(SingleProcess(torch.nn.Linear(4, 2), "cpu", verbose=False), steps_per_call=8)
        >>> trainer.graphs  # none before the first step
        0
    """


class PrivateTrainer(DifferentialPrivacy, TrainerDecorator):
    """Trains the decorated trainer with differential privacy, by Opacus (the extra `privacy`).

    Args:
        trainer: Any trainer.
        noise_multiplier: Standard deviation of the noise over `max_grad_norm`; None for 1, or for what `target_epsilon`
            asks for.
        max_grad_norm: Largest norm of the gradient of one sample.
        delta: The probability that epsilon does not hold; None for one over the number of samples.
        target_epsilon: Epsilon after the planned length, from which the noise is found.
        sample_rate: The share of the samples in a batch; None to read it from the data.
        poisson_sampling: Whether batches are drawn as the theory wants it, each sample on its own.
        accountant: `rdp` or `prv`.
        noise_seed: Makes the noise reproducible, and so no longer private.
    """


class TimedTrainer(Timed, TrainerDecorator):
    """Trains the decorated trainer, and measures where the time goes: `explain()` shows it after a run.

    Args:
        trainer: Any trainer.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> trainer = TimedTrainer(SingleProcess(torch.nn.Linear(4, 2), "cpu", num_epochs=1, verbose=False))
        >>> _ = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))
        >>> trainer.verb_times["backward"].calls
        1
    """


class FSDPTrainer(ShardedDataParallel, TrainerDecorator):
    """Trains the decorated trainer in several processes, each of which holds a part of the model and of the optimizer.

    Args:
        trainer: Any trainer.
        num_processes: How many processes to start; None for those that `torchrun` started, or just this one.
        max_restarts: How often a group that lost a process is started again; it goes on from the newest checkpoint.
        shard: Which modules are put together and taken apart as a whole: classes of modules, a function of a module, or
            None for every direct child of the model.
        reshard_after_forward: Whether they are taken apart between forward and backward, too.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> trainer = FSDPTrainer(SingleProcess(torch.nn.Linear(4, 2), "cpu", num_epochs=1, verbose=False))
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))  # one process, as ever
    """


def build_trainer(name: str, *args: Any, **kwargs: Any) -> base.Trainer:
    """Return a trainer by the names of its layers.

    Args:
        name: `sp`, `ddp` or `fsdp`, and behind it `-amp` for mixed precision or `-dp` for differential privacy, and
            `+compile` for a compiled step: `"ddp-amp"`, `"sp-dp"`, `"ddp-dp"`, `"fsdp-amp"`, `"sp+compile"`.
        args: Those of `SingleProcess`.
        kwargs: Those of `SingleProcess` and of the layers; `compile_mode` is the mode of `CompiledTrainer`, by default
            `step` where nothing but the trainer itself is compiled, else `model`. For privacy PyMarlin's are known,
            too: `per_sample_max_grad_norm`, and a `sample_rate` of 0 to read it from the data.

    Example:
        >>> import torch
        >>> trainer = build_trainer("ddp-amp", torch.nn.Linear(4, 2), num_processes=2, precision="bf16")
        >>> type(trainer).__name__, type(trainer.trainer).__name__
        ('AMPTrainer', 'DDPTrainer')
    """
    if name not in _BUILDS:
        raise UnknownNameError("trainer", name, _BUILDS)
    layers = _BUILDS[name]
    if PrivateTrainer in layers:
        kwargs = _from_pymarlin(kwargs)
    trainer_mode = {"mode": kwargs.pop("mode")} if "mode" in kwargs else {}
    if CompiledTrainer in layers:
        # One graph cannot reach over processes, nor scale a loss.
        kwargs["mode"] = kwargs.pop("compile_mode", "step" if layers == (CompiledTrainer,) else "model")
    given = [{key: kwargs.pop(key) for key in sorted(_keywords(layer) & kwargs.keys())} for layer in layers]
    trainer: base.Trainer = SingleProcess(*args, **trainer_mode, **kwargs)
    for layer, settings in zip(layers, given, strict=True):
        trainer = layer(trainer, **settings)
    return trainer


def _from_pymarlin(kwargs: dict[str, Any]) -> dict[str, Any]:
    if kwargs.get("sample_rate") == 0:
        kwargs = {**kwargs, "sample_rate": None}
    if "per_sample_max_grad_norm" in kwargs:
        if "max_grad_norm" in kwargs:
            raise ConfigError("max_grad_norm and per_sample_max_grad_norm: give one of them, they are the same")
        kwargs = {"max_grad_norm" if key == "per_sample_max_grad_norm" else key: it for key, it in kwargs.items()}
    return kwargs


_Layers = tuple[type[TrainerDecorator], ...]
_PLACES: dict[str, _Layers] = {"sp": (), "ddp": (DDPTrainer,), "fsdp": (FSDPTrainer,)}
_WAYS: dict[str, _Layers] = {"": (), "-amp": (AMPTrainer,)}
_BUILDS: dict[str, _Layers] = {
    **{f"{place}{way}": (*_PLACES[place], *_WAYS[way]) for place in _PLACES for way in _WAYS},
    "sp-dp": (PrivateTrainer,),
    "ddp-dp": (DDPTrainer, PrivateTrainer),
    **{
        f"{place}{way}+compile": (CompiledTrainer, *_PLACES[place], *_WAYS[way])
        for place in ("sp", "ddp")
        for way in _WAYS
    },
}
