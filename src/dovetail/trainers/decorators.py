"""Trainer decorators: layers that add mixed precision, several processes or other features to a trainer object."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Iterable
from functools import cache
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, cast

from dovetail.errors import ConfigError, UnknownNameError
from dovetail.overrides import reject_lost_overrides
from dovetail.trainers import base, other_libraries
from dovetail.trainers.attributes import option_attribute_message
from dovetail.trainers.capabilities import (
    ActivationCheckpointing,
    AutoBatch,
    Compiled,
    DataParallel,
    DifferentialPrivacy,
    MixedPrecision,
    ShardedDataParallel,
    Timed,
)
from dovetail.trainers.options import OPTION_NAMES
from dovetail.trainers.preserve_state import layers
from dovetail.trainers.trainer import SingleProcess, Trainer


class TrainerDecorator(Trainer):
    """A trainer that forwards every verb and every other attribute to the trainer that it decorates.

    Subclass it and override the verbs that differ, with `super()`. The entry points (`fit`, `evaluate`, `run`,
    `train`, …) run on the layer they are called on, so that the outermost decorator receives every call.

    Attributes that the class body declares (`steps: int`) are the decorator's own. All others are read from, and
    written to, the decorated trainer. An attribute that neither of them has must be declared. Attributes that the
    constructor sets before it calls `super().__init__` are the decorator's own without a declaration.

    Args:
        trainer: The trainer to decorate.

    Raises:
        AttributeError: An attribute is assigned that neither the class declares nor the decorated trainer has.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> class Counting(TrainerDecorator):
        ...     steps: int
        ...     def __init__(self, trainer):
        ...         super().__init__(trainer)
        ...         self.steps = 0
        ...     def after_step(self, output):
        ...         self.steps += 1
        ...         super().after_step(output)
        >>> trainer = Counting(SingleProcess(torch.nn.Linear(2, 2), "cpu", num_epochs=3, verbose=False))
        >>> _ = trainer.fit((torch.zeros(8, 2), torch.zeros(8, dtype=torch.long)))
        >>> trainer.steps, trainer.options.num_epochs
        (3, 3)
    """

    _has_defaults = True
    _declares_attributes = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        reject_lost_overrides(cls, other_libraries.DECORATOR_HOOKS)
        # `super().run(…)` in a layer calls the decorated trainer, also for names that only trainers of `compat` have.
        for part in cls.__mro__[: cls.__mro__.index(TrainerDecorator)]:
            methods = {name for name, value in vars(part).items() if isinstance(value, FunctionType)}
            for name in methods & other_libraries.ATTRIBUTES.keys() - vars(TrainerDecorator).keys():
                setattr(TrainerDecorator, name, _Inner(name))

    trainer: Trainer

    def __init__(self, trainer: base.Trainer, **unknown: Any) -> None:
        if not isinstance(trainer, base.Trainer):
            raise ConfigError(f"{type(self).__name__}: expected a trainer to decorate, got {trainer!r}")
        for name in unknown:
            raise UnknownNameError("keyword", name, _keywords(type(self)))
        self.context = trainer.context
        # From here on, assignments to undeclared attributes go to the decorated trainer.
        self.trainer = cast(Trainer, trainer)

    @property
    def core(self) -> Trainer:
        """The innermost trainer, which decorates no other."""
        return cast(Trainer, self.trainer.core)

    def _customized_by(self, name: str) -> tuple[type[Any], ...]:
        """Return the classes of all layers that override a verb or another method, the outermost first."""
        return (*base.customizers(type(self), name), *self.trainer._customized_by(name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.trainer!r})"

    def unwrap(self) -> Trainer:
        """Return the innermost trainer: `core`."""
        return self.core

    def __getattr__(self, name: str) -> Any:
        # In a constructor, and while a pickled layer is loaded, there is no trainer yet: reading `self.trainer` below
        # would call this method without end. Names such as `__deepcopy__` concern this object, not the inner trainer.
        if "trainer" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self.trainer, name)
        if isinstance(found, MethodType) and _caller(found.__self__) is self.trainer:
            # The method runs on a view, so that any `fit` it starts runs on this layer.
            return MethodType(found.__func__, _view(cast(base.Trainer, found.__self__), _caller(self)))
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        # The layer's own attributes. Before `super().__init__` there is no inner trainer to receive the others.
        if name in own or name in _declared(type(self)) or ("trainer" not in own and name not in OPTION_NAMES):
            object.__setattr__(self, name, value)
        # An option as an attribute has no effect: the error names `trainer.options`.
        elif name in OPTION_NAMES and not ("trainer" in own and hasattr(type(self.core), name)):
            raise AttributeError(option_attribute_message(self, name))
        elif any(_has(layer, name) for layer in layers(self.trainer)):
            setattr(self.trainer, name, value)
        else:
            raise AttributeError(
                f"{type(self).__name__} does not declare {name!r}, and {type(self.core).__name__} has no such "
                f"attribute; declare it in the class body: `{name}: {type(value).__name__}`, or set it on "
                "the trainer inside: `trainer.core`"
            )

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *dir(self.trainer)})

    # The inherited two methods prepare strategies and options, which only the innermost trainer has.
    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class _Inner:
    """An attribute of a decorator that is read from the decorated trainer, unless the decorator has set its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layer: TrainerDecorator | None, kind: type[TrainerDecorator]) -> Any:
        return getattr(Trainer, self._name) if layer is None else layer.__getattr__(self._name)


class _View:
    """An inner trainer with the verbs and entry points of an outer layer.

    A layer calls the methods of inner trainers, such as `run`, on a view, so that a `fit` which the method starts runs
    on the layer. The class of a view derives from the class of the inner trainer, so that `super()` works. A view
    shares the attributes of the inner trainer, so that an assignment reaches the inner trainer.
    """

    __slots__ = ()

    _view_inner: base.Trainer
    _view_layer: base.Trainer

    def __init_subclass__(cls) -> None:
        """Skip `__init_subclass__` of the inner class, which expects the classes that users write."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class of a view has no name in a module, so it is built again.
        return _view, (self._view_inner, self._view_layer)


# A verb of a decorator is the bound method of the decorated trainer: it costs no call.
_VERBS = base.Trainer.__abstractmethods__ | {"settle", "gather", "launcher", "batch_length"}
for _name in _VERBS:
    setattr(TrainerDecorator, _name, property(attrgetter(f"trainer.{_name}")))
# Everything else that a trainer has is the decorated trainer's, which may override it. Entry points are inherited.
for _name in set(dir(Trainer)) - vars(base.Trainer).keys() - vars(TrainerDecorator).keys():
    if not _name.startswith("__"):
        setattr(TrainerDecorator, _name, _Inner(_name))
for _name in vars(base.Trainer):
    if not _name.startswith(("__", "_abc_")):
        setattr(_View, _name, property(attrgetter(f"_view_layer.{_name}")))


@cache
def _view_class(kind: type[base.Trainer]) -> type[Any]:
    # The name of the inner class, for messages. Slots, because the `__dict__` of a view is the inner trainer's.
    names = {"__module__": kind.__module__, "__slots__": ("_view_inner", "_view_layer")}
    return ABCMeta(kind.__name__, (_View, kind), names)


def _view(trainer: base.Trainer | _View, layer: base.Trainer) -> Any:
    """Return a view of an inner trainer for an outer layer; a view for another layer is replaced."""
    inner = trainer._view_inner if isinstance(trainer, _View) else trainer
    view = object.__new__(_view_class(type(inner)))
    # Bypass `__setattr__`, which would assign to the inner trainer.
    for name, value in {"__dict__": inner.__dict__, "_view_inner": inner, "_view_layer": layer}.items():
        object.__setattr__(view, name, value)
    return view


def _caller(trainer: Any) -> Any:
    """Return the layer that a view is for; any other trainer unchanged."""
    return trainer._view_layer if isinstance(trainer, _View) else trainer


# PyMarlin's name of the class.
AbstractTrainerDecorator = TrainerDecorator


@cache
def _declared(kind: type[TrainerDecorator]) -> frozenset[str]:
    """Return the names that the classes of a layer declare: annotations, values and properties, no methods."""
    own = [cls for cls in kind.__mro__ if cls not in TrainerDecorator.__mro__ and cls is not _View]
    # Methods are no attributes to assign: an assignment to their names goes to the inner trainer.
    values = [name for cls in own for name, value in vars(cls).items() if not isinstance(value, FunctionType)]
    return frozenset(values).union(*map(inspect.get_annotations, own))


def _has(trainer: base.Trainer, name: str) -> bool:
    """Return whether a trainer has or declares an attribute, without computing properties."""
    kind = type(trainer)
    return (
        name in vars(trainer) or hasattr(kind, name) or any(name in inspect.get_annotations(it) for it in kind.__mro__)
    )


def _keywords(kind: type[TrainerDecorator]) -> set[str]:
    classes = kind.__mro__[: kind.__mro__.index(TrainerDecorator) + 1]
    constructors = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]
    parameters = [it for constructor in constructors for it in inspect.signature(constructor).parameters.values()]
    return {it.name for it in parameters if it.name != "self" and it.kind not in (it.VAR_KEYWORD, it.VAR_POSITIONAL)}


class AMPTrainer(MixedPrecision, TrainerDecorator):
    """Layer for mixed precision.

    Args:
        trainer: Any trainer.
        precision: `bf16`, `fp16` or `fp32`; `auto` for the best of the device, which is `bf16` on a CPU; or a list in
            order of preference.
        init_scale: The initial loss scale for float16.

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
    """Layer for data-parallel training: several processes, each with its own batches.

    Args:
        trainer: Any trainer.
        num_processes: The number of processes to start; None means those that `torchrun` started, or only this one.
        max_restarts: How often a group that lost a process is restarted; it continues from the newest checkpoint.
        bucket_size: The largest number of bytes of gradients in a message.
        compression: The form in which gradients are sent: None (in full), "bf16", "fp16", "powersgd", or
            `PowerSGD(rank, warm_up)`.
        sync_batchnorm: True to normalise by the batches of all processes in `nn.BatchNorm`.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> trainer = DDPTrainer(trainer=SingleProcess(torch.nn.Linear(4, 2), "cpu", num_epochs=1, verbose=False))
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))  # still one process
    """

    @classmethod
    def from_single_process(
        cls,
        *args: Any,
        amp: bool = False,
        num_processes: int | None = None,
        max_restarts: int = 0,
        sync_batchnorm: bool = False,
        **kwargs: Any,
    ) -> DDPTrainer:
        """Return a new `SingleProcess` trainer in this layer.

        Args:
            args: Arguments of `SingleProcess`, or of `SingleProcessAMP`.
            amp: True for mixed precision.
            num_processes: The number of processes to start.
            max_restarts: How often a group that lost a process is restarted.
            sync_batchnorm: True to normalise by the batches of all processes in `nn.BatchNorm`.
            kwargs: Keywords of `SingleProcess`, or of `SingleProcessAMP`.

        Example:
            >>> import torch
            >>> DDPTrainer.from_single_process(torch.nn.Linear(4, 2), num_processes=2).num_processes
            2
        """
        inner = (SingleProcessAMP if amp else SingleProcess)(*args, **kwargs)
        return cls(inner, num_processes=num_processes, max_restarts=max_restarts, sync_batchnorm=sync_batchnorm)

    @classmethod
    def from_single_process_amp(cls, *args: Any, **kwargs: Any) -> DDPTrainer:
        """Return a new `SingleProcessAMP` trainer in this layer, with the arguments of `from_single_process`."""
        return cls.from_single_process(*args, amp=True, **kwargs)


class ActivationCheckpointTrainer(ActivationCheckpointing, TrainerDecorator):
    """Layer for activation checkpointing: blocks are computed again in the backward pass, which saves memory.

    Args:
        trainer: Any trainer.
        blocks: Classes, names or a predicate of the modules to compute again; None means the repeated blocks.
        every: 1 for all blocks, 2 for every second block, and so on.
        keep: Operators whose results are stored: `"matmul"`, or a list of operators of torch.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from dovetail.trainers import SingleProcess
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        >>> trainer = ActivationCheckpointTrainer(SingleProcess(model, "cpu", num_epochs=1, verbose=False))
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))
        >>> trainer.recomputed_blocks
        ['0', '1', '2']
    """


class AutoBatchTrainer(AutoBatch, TrainerDecorator):
    """Layer that splits a batch if the device runs out of memory.

    Args:
        trainer: Any trainer.
    """


class CompiledTrainer(Compiled, TrainerDecorator):
    """Layer for compilation: one compiled graph per step, or a compiled module.

    Args:
        trainer: Any trainer.
        mode: `step` for forward, backward, clipping and update in one graph; `model` for `torch.compile` of the module.
        steps_per_call: Steps that one call of a graph makes, in mode `step`, for models whose steps are tiny.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> trainer = CompiledTrainer(SingleProcess(torch.nn.Linear(4, 2), "cpu", verbose=False), steps_per_call=8)
        >>> trainer.graphs  # none before the first step
        0
    """


class PrivateTrainer(DifferentialPrivacy, TrainerDecorator):
    """Layer for differential privacy with Opacus (the extra `privacy`).

    Args:
        trainer: Any trainer.
        noise_multiplier: Standard deviation of the noise divided by `max_grad_norm`; None means the value that reaches
            `target_epsilon`, or 1 without a target.
        max_grad_norm: Largest norm of the gradient of one sample.
        delta: The probability that epsilon does not hold; None means one over the number of samples.
        target_epsilon: Epsilon after the planned length; it determines the noise.
        sample_rate: The expected share of the samples in a batch; None means that the loader determines it.
        poisson_sampling: True to draw each sample independently, as the privacy theorem requires.
        accountant: `rdp` or `prv`.
        noise_seed: Makes the noise reproducible, and therefore no longer private.
    """


class TimedTrainer(Timed, TrainerDecorator):
    """Layer that measures the time of each verb; `explain()` shows the times after a run.

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
    """Layer for sharded training: several processes, each with a part of the model and of the optimizer state.

    Args:
        trainer: Any trainer.
        num_processes: The number of processes to start; None means those that `torchrun` started, or only this one.
        max_restarts: How often a group that lost a process is restarted; it continues from the newest checkpoint.
        shard: The modules that are gathered and sharded as a whole: classes of modules, a predicate of a module, or
            None for every direct child of the model.
        reshard_after_forward: True to free the gathered parameters between forward and backward, too.
        sync_batchnorm: True to normalise by the batches of all processes in `nn.BatchNorm`.
        mesh: The number of copies of the model, of parts of each, and of processes that compute one part together:
            `{"replicate": 2, "shard": 2, "tensor": 2}`.
        parallelize: How tensors are divided among the processes of `tensor`: styles by patterns of module names, a
            function of the model and its `DeviceMesh`, or None for the plan that a Hugging Face model has.
        cpu_offload: True to keep shards, gradients and the optimizer's state in the memory of the host.

    Example:
        >>> import torch
        >>> from dovetail.trainers import SingleProcess
        >>> trainer = FSDPTrainer(SingleProcess(torch.nn.Linear(4, 2), "cpu", num_epochs=1, verbose=False))
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))  # still one process
    """


def build_trainer(name: str, *args: Any, **kwargs: Any) -> Trainer:
    """Return a trainer from a name that lists its layers.

    Args:
        name: `sp`, `ddp` or `fsdp`, followed by `-amp` for mixed precision or `-dp` for differential privacy, and by
            `+compile` for a compiled step: `"ddp-amp"`, `"sp-dp"`, `"ddp-dp"`, `"fsdp-amp"`, `"sp+compile"`.
        args: Arguments of `SingleProcess`.
        kwargs: Keywords of `SingleProcess` and of the layers. `compile_mode` is the mode of `CompiledTrainer`; the
            default is `step` if `+compile` is the only layer, else `model`. For differential privacy two keywords of
            PyMarlin also work: `per_sample_max_grad_norm`, and a `sample_rate` of 0 to read it from the data.

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
    # The trainer and `CompiledTrainer` both have a keyword `mode`; here it is the trainer's.
    trainer_mode = {"mode": kwargs.pop("mode")} if "mode" in kwargs else {}
    if CompiledTrainer in layers:
        # One graph cannot span several processes or scale a loss.
        kwargs["mode"] = kwargs.pop("compile_mode", "step" if layers == (CompiledTrainer,) else "model")
    # Each layer takes its own keywords. `SingleProcess` receives the rest, and rejects names that no part has.
    given = [{key: kwargs.pop(key) for key in sorted(_keywords(layer) & kwargs.keys())} for layer in layers]
    kwargs |= trainer_mode
    trainer: Trainer = SingleProcess(*args, **kwargs)
    for layer, settings in zip(layers, given, strict=True):
        trainer = layer(trainer, **settings)
    return trainer


def _from_pymarlin(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords in which PyMarlin's names and values are replaced by ours."""
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
# The layers of each name, the innermost first.
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
