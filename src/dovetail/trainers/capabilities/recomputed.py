"""Activation checkpointing: blocks of a model are computed again in the backward pass, which saves memory."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dovetail.accelerators import random_state, set_random_state
from dovetail.errors import ConfigError
from dovetail.trainers.capabilities.core import Capability
from dovetail.trainers.capabilities.tensor_parallel import local_forward
from dovetail.trainers.whole_step import CannotCompileError

Blocks = Sequence[type[nn.Module] | str] | Callable[[nn.Module], bool]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class ActivationCheckpointing(Capability):
    """Stores only the inputs of blocks in the forward pass, and computes the blocks again in the backward pass.

    The results do not change, bit by bit: the second computation uses the same random numbers (dropout), the same
    precision and the same buffers, and it does not update buffers (batch norm) a second time. The layer replaces the
    `forward` of the blocks during training only, so that the keys of the model's state do not change.

    Args:
        blocks: The modules to compute again: classes of modules, names of modules (`"layers.*"` matches one level or
            more), or a function of a module. None means the repeated blocks of the model: members of a `Sequential`,
            `ModuleList` or `ModuleDict` that have children and whose class occurs there at least twice.
        every: 1 for all blocks, 2 for every second block, and so on; the other blocks store their activations.
        keep: Operators whose results are stored inside of a block, and not computed again: `"matmul"` for products of
            matrices and convolutions, or a list of operators of torch, such as `[torch.ops.aten.mm.default]`. Calls
            that draw random numbers are always computed again.

    Attributes:
        num_recomputed: The number of blocks that are computed again, in equal distances, in place of `every`; None
            means `every`. `limit_memory` sets it.

    Example:
        >>> from dovetail.trainers import Trainer
        >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        >>> trainer = Trainer.add_on(ActivationCheckpointing)(model, "cpu", every=2, verbose=False)
        >>> history = trainer.fit((torch.randn(64, 4), torch.zeros(64, dtype=torch.long)))
        >>> trainer.recomputed_blocks
        ['0', '2']
    """

    kind = "activation checkpointing"
    conflicts: ClassVar[Mapping[str, str]] = {
        "differential privacy": "a block that is computed twice would count the gradients of its samples twice"
    }

    _blocks: Blocks | None
    _every: int
    num_recomputed: int | None
    # The names of operators.
    _keep: tuple[str, ...]
    _replaced: list[tuple[nn.Module, Any]]
    _recomputed_names: list[str]
    # The configurations of models of transformers whose cache is switched off during the run.
    _uncached: list[Any]

    def __init__(
        self,
        *args: Any,
        blocks: Blocks | None = None,
        every: int = 1,
        keep: str | Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every: expected a whole number that is at least 1, got {every!r}")
        if blocks is not None and not callable(blocks) and not _are_blocks(blocks):
            raise ConfigError(
                "blocks: expected classes of modules, names of modules, a function of a module, or None, "
                f"got {blocks!r}"
            )
        self._blocks = blocks
        self._every = every
        self.num_recomputed = None
        self._keep = _operators(keep)
        self._replaced, self._recomputed_names, self._uncached = [], [], []
        super().__init__(*args, **kwargs)

    @property
    def recomputed_blocks(self) -> list[str]:
        """The names of the blocks that the running or last run computes again; empty before the first run."""
        return list(self._recomputed_names)

    def possible_blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the names and modules from which the blocks that are computed again are selected."""
        model = self.context.model
        return [] if model is None else _choose(model, self._blocks)

    def setup(self) -> None:
        """Replace the forward of the blocks, in training."""
        super().setup()
        # After the inner layers, which may build the model.
        context, model = self.context, self.context.model
        if context.stage != "train" or model is None:
            return
        possible, number = self.possible_blocks(), self.num_recomputed
        if number is None:
            chosen = possible[:: self._every]
        else:
            chosen = [possible[len(possible) * place // number] for place in range(number)]
        self._recomputed_names = [name for name, _ in chosen]
        keep = [_operator(name) for name in self._keep]
        for _, block in chosen:
            before = vars(block).get("forward")
            # Not a wrapper module: the keys of the state and the types of the modules must not change.
            vars(block)["forward"] = _Recomputed(block, local_forward(block, block.forward), keep, context.device)
            self._replaced.append((block, before))
        # The decoder of T5 has a configuration of its own, and a model of transformers may be a part of another model.
        for module in model.modules():
            config: Any = getattr(module, "config", None)
            if getattr(config, "use_cache", False) is True:
                # A block of transformers would append its keys and values to the cache a second time.
                config.use_cache = False
                self._uncached.append(config)

    def teardown(self, error: BaseException | None) -> None:
        """Restore the forward of the blocks."""
        for block, before in self._replaced:
            if before is None:
                del vars(block)["forward"]
            else:
                vars(block)["forward"] = before
        self._replaced = []
        for config in self._uncached:
            config.use_cache = True
        self._uncached = []
        super().teardown(error)


class _Recomputed:
    """The forward of a block whose activations are not stored.

    Args:
        block: The module.
        forward: The forward of the module before.
        keep: Operators whose results are stored.
        device: The device of the run.
    """

    def __init__(self, block: nn.Module, forward: Callable[..., Any], keep: list[Any], device: torch.device) -> None:
        self._block, self._forward, self._keep, self._device = block, forward, keep, device
        # Names of the buffers that a forward changes; None before the first forward, for which all are copied.
        self._changing: set[str] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and get_proxy_mode() is not None:
            raise CannotCompileError("ActivationCheckpointing computes blocks again in the backward pass")
        buffers = dict(self._block.named_buffers())
        if is_compiling:
            # A compiled graph keeps the buffers right itself: it computes again only what has no effects.
            context: dict[str, Any] = {"context_fn": partial(_selective, self._keep)} if self._keep else {}
            return checkpoint(self._forward, *args, use_reentrant=False, **context, **kwargs)
        first, second = _selective(self._keep) if self._keep else (nullcontext(), nullcontext())
        random_numbers = _SameRandomNumbers(second, self._device)
        # Torch finds the device, whose autocast and random numbers it restores, only in positional arguments.
        forward, args = _positional(self._forward, args, kwargs)
        if not buffers:
            contexts = first, random_numbers
            outputs = checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: contexts)
            random_numbers.end_first()
            return outputs
        changing = self._changing
        copies = {name: it.clone() for name, it in buffers.items() if changing is None or name in changing}
        versions = {name: it._version for name, it in buffers.items()}
        outputs = checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (first, _OldBuffers(self._block, copies, random_numbers)),
        )
        random_numbers.end_first()
        now = dict(self._block.named_buffers())
        changed = {name for name, it in buffers.items() if now.get(name) is not it or it._version != versions[name]}
        if changing is None:
            # Once, because it waits for the device. Some operators of torch change buffers and not their versions.
            changed |= {name for name, it in copies.items() if name in now and not torch.equal(it, now[name])}
            changing = _statistics(self._block)
        self._changing = changing | changed
        # The graph holds this dictionary until the backward pass, so it must not hold buffers that never change.
        for name in copies.keys() - self._changing:
            del copies[name]
        # Not copied before, because no earlier forward changed them: their values are lost, but they are not
        # updated twice.
        copies.update({name: now[name] for name in changed - copies.keys() if name in now})
        return outputs


def _statistics(block: nn.Module) -> set[str]:
    """Return the names of the running means and variances: they change in training mode, which may start later."""
    owners = [(name, it) for name, it in block.named_modules() if isinstance(it, nn.modules.batchnorm._NormBase)]
    return {f"{name}.{own}".lstrip(".") for name, it in owners for own, _ in it.named_buffers(recurse=False)}


class _OldBuffers:
    """Context in which a block has the buffers of its first computation, and changes copies of them."""

    def __init__(self, block: nn.Module, copies: Mapping[str, Tensor], inner: AbstractContextManager[Any]) -> None:
        self._block, self._copies, self._inner = block, copies, inner
        self._present: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> None:
        for name, value in self._copies.items():
            path, _, last = name.rpartition(".")
            owner: dict[str, Any] = self._block.get_submodule(path)._buffers
            self._present.append((owner, last, owner[last]))
            owner[last] = value.clone()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            for owner, name, value in self._present:
                owner[name] = value
            self._present = []


def _positional(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function that takes all arguments by position, and these arguments."""
    if not kwargs:
        return forward, args
    number, names = len(args), tuple(kwargs)

    def call(*values: Any) -> Any:
        return forward(*values[:number], **dict(zip(names, values[number:], strict=True)))

    return call, (*args, *kwargs.values())


class _SameRandomNumbers:
    """Context in which Python, NumPy and the device draw the numbers of the first computation again.

    Otherwise a block that draws with `random.random()`, such as LayerDrop, would compute something else. Torch restores
    its numbers of the CPU, and those of a device whose module has the attribute `_initialized`; that of mps has not.
    """

    def __init__(self, inner: AbstractContextManager[Any], device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._first: list[Any] | None = _states(device)
        self._present: list[Any] | None = None

    def end_first(self) -> None:
        """Drop the states if the first computation has drawn nothing, which is usual."""
        if self._first == _states(self._device):
            self._first = None

    def __enter__(self) -> None:
        if self._first is not None:
            self._present = _states(self._device)
            _set_states(self._device, self._first)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            if self._present is not None:
                _set_states(self._device, self._present)
                self._present = None


def _states(device: torch.device) -> list[Any]:
    """Return the states of the generators of Python, NumPy and an accelerator, which can be compared."""
    state: Any = np.random.get_state(legacy=True)
    kind, numbers, *rest = state
    own = random_state(device)
    return [random.getstate(), None if own is None else own.numpy().tobytes(), kind, numbers.tobytes(), *rest]


def _set_states(device: torch.device, states: list[Any]) -> None:
    python, own, kind, numbers, *rest = states
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(numbers, np.uint32), *rest))
    if own is not None:
        set_random_state(device, torch.frombuffer(bytearray(own), dtype=torch.uint8))


def _selective(keep: list[Any]) -> Contexts:
    """Return the contexts of the first and second computation, which store and read the results of operators."""

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_stored = operator in keep and not _draws(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if is_stored else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]  # torch
    return contexts


def _draws(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call draws random numbers: if it were not repeated, the calls after it would draw others."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # Attention draws only for dropout.
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _operators(keep: Any) -> tuple[str, ...]:
    """Return the names of operators: the operators of torch cannot be sent to other processes."""
    if keep == "matmul":
        return _PRODUCTS
    if isinstance(keep, str) or not isinstance(keep, Sequence) or not all(map(_is_operator, keep)):
        raise ConfigError(
            f"keep: expected 'matmul' or a list of operators such as torch.ops.aten.mm.default, got {keep!r}"
        )
    return tuple(map(str, keep))


def _is_operator(value: Any) -> bool:
    return isinstance(value, torch._ops.OpOverload)


def _operator(name: str) -> Any:
    return attrgetter(name)(torch.ops)


_PRODUCTS = tuple(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution"))


def _are_blocks(blocks: Any) -> bool:
    return (
        isinstance(blocks, Sequence)
        and not isinstance(blocks, str)
        and all(isinstance(it, str) or (isinstance(it, type) and issubclass(it, nn.Module)) for it in blocks)
    )


def _choose(model: nn.Module, blocks: Blocks | None) -> list[tuple[str, nn.Module]]:
    """Return the blocks with their names, in the order of the model; none is inside of another.

    Raises:
        ConfigError: There is no such block.
    """
    kind = type(model).__name__
    if blocks is None:
        repeated = _repeated_kinds(model)
        found = list(_outermost(model, lambda _, module: type(module) in repeated))
        if not found:
            raise ConfigError(
                f"blocks: {kind} has no repeated blocks in a Sequential or ModuleList; give their classes, "
                "blocks=[Block], or their names, blocks=['layers.*']"
            )
        return found
    if callable(blocks):
        chosen = blocks
        found = list(_outermost(model, lambda _, module: chosen(module)))
        if not found:
            raise ConfigError(f"blocks: {blocks!r} returns True for no module of {kind}")
        return found
    for wanted in blocks:
        if not any(_is_wanted(wanted, name, module) for name, module in model.named_modules() if name):
            raise ConfigError(f"blocks: {kind} has no module {_shown(wanted)}; it has {_some_names(model)}")
    choice = tuple(blocks)
    return list(_outermost(model, lambda name, module: any(_is_wanted(it, name, module) for it in choice)))


def _is_wanted(wanted: type[nn.Module] | str, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, wanted) if isinstance(wanted, str) else isinstance(module, wanted)


def _shown(wanted: type[nn.Module] | str) -> str:
    return repr(wanted) if isinstance(wanted, str) else f"of class {wanted.__name__}"


def _some_names(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "none"


def _outermost(
    module: nn.Module, is_block: Callable[[str, nn.Module], bool], path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks below a module, but not the blocks inside of blocks."""
    for name, child in module.named_children():
        here = f"{path}{name}"
        if is_block(here, child):
            yield here, child
        else:
            yield from _outermost(child, is_block, f"{here}.")


def _repeated_kinds(model: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of modules with children that occur at least twice in one container."""
    kinds: set[type[nn.Module]] = set()
    for container in model.modules():
        if isinstance(container, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            members = Counter(type(it) for it in container.children() if any(True for _ in it.children()))
            kinds.update(kind for kind, number in members.items() if number > 1)
    return kinds
