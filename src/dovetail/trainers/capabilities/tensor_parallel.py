"""Tensor parallelism: plans that divide the tensors of a model among processes, and plans of Hugging Face models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dovetail.distributed import is_part
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# A function of a model and the mesh of its tensors; styles by patterns of module names; "auto" or None for the plan
# that the model has.
Parallelize = Callable[[nn.Module, Any], nn.Module | None] | Mapping[str, Any] | str | None


# The attribute of a module with the names of its replicated parameters.
_REPLICAS = "_replicated_parameters"


def check_plan(plan: Any) -> Parallelize:
    """Return the option `parallelize`; raise if it has a wrong type."""
    if plan is None or plan == "auto" or callable(plan):
        return plan  # type: ignore[no-any-return]  # checked in the line above
    if isinstance(plan, Mapping) and plan and all(isinstance(name, str) for name in plan):
        return dict(plan)
    raise ConfigError(
        "parallelize: expected a function of a model and its mesh, a dict of styles by names of modules, such as "
        f"{{'blocks.*.up': 'colwise'}}, 'auto' or None, got {plan!r}"
    )


def parallelize(model: nn.Module, mesh: DeviceMesh, plan: Parallelize) -> list[tuple[nn.Module, str]]:
    """Divide the tensors of a model among the processes of a mesh; every process has the same model before.

    Parameters that the plan does not divide become replicated `DTensor`s, so that all parameters have one mesh:
    torch's optimizers and its clipping reject a mixture.

    Args:
        model: The model, which changes.
        mesh: The processes, one-dimensional.
        plan: The option `parallelize` of a layer.

    Returns:
        The modules and names of the parameters that the plan does not divide.

    Raises:
        ConfigError: There is no plan, or it does not fit the model.
    """
    owners = _owners(model)
    if callable(plan):
        returned = plan(model, mesh)
        if returned is not None and returned is not model:
            raise ConfigError(
                f"parallelize: the function returned another model, a {type(returned).__name__}; change the given one"
            )
    else:
        _apply(model, mesh, _plan_of_model(model, mesh.size()) if isinstance(plan, str) or plan is None else plan)
    _tie_again(owners)
    _check_divided(model, mesh)
    replicas = _replicate_others(model, mesh)
    for module, name in replicas:
        vars(module).setdefault(_REPLICAS, []).append(name)
    return replicas


class LocalWeights:
    """Replaces replicated parameters by plain tensors while a module computes, so that its code needs no `DTensor`s.

    Args:
        places: The modules and names of the parameters.
        is_partial: True if the gradient in a process has only the part of its activations, so that the gradients of
            all processes must be added; False if they are equal.
    """

    def __init__(self, places: list[tuple[nn.Module, str]], *, is_partial: bool = False) -> None:
        self._places = places
        self._is_partial = is_partial
        self._replaced: list[tuple[nn.Module, str, Tensor]] = []

    def install(self, module: nn.Module) -> None:
        """Replace the parameters in each call of a module."""
        module.register_forward_pre_hook(self._before)
        # Also after an error: otherwise the next call would not find the parameters.
        module.register_forward_hook(self._after, always_call=True)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        from torch.distributed.tensor import Partial, Replicate

        placement = Partial() if self._is_partial else Replicate()
        for owner, name in self._places:
            parameter: Any = owner._parameters[name]
            if is_part(parameter):
                self._replaced.append((owner, name, parameter))
                owner._parameters[name] = parameter.to_local(grad_placements=[placement])

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        for owner, name, parameter in self._replaced:
            owner._parameters[name] = parameter  # type: ignore[assignment]  # the parameter that was there before
        self._replaced.clear()
        # A layer whose output is divided returns a view, of which `fully_shard` warns.
        return tree_map_only(Tensor, _without_view, outputs)


def local_forward(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward function that also works outside of a call of the block, as when it is computed again."""
    places = [(module, name) for module in block.modules() for name in vars(module).get(_REPLICAS, ())]
    if not places:
        return forward

    def compute(*args: Any, **kwargs: Any) -> Any:
        weights = LocalWeights(places)
        weights._before(block, args)
        try:
            return forward(*args, **kwargs)
        finally:
            weights._after(block, args, None)

    return compute


class _Same(torch.autograd.Function):
    """The same values as a tensor that is not a view."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _without_view(values: Tensor) -> Tensor:
    return _Same.apply(values) if values._is_view() and values.requires_grad else values  # type: ignore[no-untyped-call]  # torch has no types for it


# ------------------------------------------------------------------ plans


def _apply(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any]) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    names = [name for name, _ in model.named_modules()]
    for pattern in plan:
        if not any(_matches(name, pattern) for name in names):
            raise ConfigError(f"parallelize: no module of the model has the name {pattern!r}")
    styles = {pattern: _style(pattern, style) for pattern, style in plan.items()}
    for pattern, style in styles.items():
        for name, module in list(model.named_modules()):
            if _matches(name, pattern):
                # Every process has the same values, so nothing is sent.
                parallelize_module(module, mesh, style, src_data_rank=None)


def _matches(name: str, pattern: str) -> bool:
    # Part by part, as torch does: a star does not include a dot.
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch, parts, patterns))


def _style(pattern: str, style: Any) -> Any:
    """Return torch's style for a name of Hugging Face's plans."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

    if isinstance(style, ParallelStyle):
        return style
    whole = Replicate()
    known: dict[str, Callable[[], ParallelStyle]] = {
        "colwise": ColwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=whole),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=whole),
        "rowwise": RowwiseParallel,
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=whole),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=whole),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=whole),
        "replicated_with_grad_allreduce": _partial_gradients,
    }
    if not isinstance(style, str) or style not in known:
        raise ConfigError(
            f"parallelize: the style of {pattern!r}: expected a ParallelStyle of torch, or one of {', '.join(known)}, "
            f"got {style!r}; a function of the model and its mesh can do what these styles cannot"
        )
    return known[style]()


def _partial_gradients() -> Any:
    """Return a style for a norm of divided activations: equal weights, and the sum of the gradients."""
    from torch.distributed.tensor.parallel import ParallelStyle

    class PartialGradients(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            LocalWeights(_replicate_others(module, device_mesh), is_partial=True).install(module)
            return module

    return PartialGradients()


def _plan_of_model(model: nn.Module, size: int) -> Mapping[str, Any]:
    """Return the plan of a Hugging Face model."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(
            f"parallelize: a {type(model).__name__} has no plan for tensor parallelism; give parallelize={{name of a "
            "module: 'colwise' or 'rowwise'}, or a function of the model and its mesh"
        )
    config: Any = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise ConfigError(
                f"parallelize: {name} of the model is {heads}, which {size} processes cannot share; choose a size of "
                "'tensor' that divides it"
            )
    names = [name for name, _ in model.named_modules()]
    # A plan of a family of models may name modules that this one does not have.
    return {pattern: style for pattern, style in plan.items() if any(_matches(name, pattern) for name in names)}


# ------------------------------------------------------------------ parameters


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def _owners(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the places of each parameter that several modules share."""
    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module, name, parameter in _places(model):
        places[id(parameter)].append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _tie_again(owners: list[list[tuple[nn.Module, str]]]) -> None:
    """Let modules share a parameter again: torch divides it once for each of them."""
    for places in owners:
        found: list[Any] = [module._parameters[name] for module, name in places]
        layouts = {it.placements if is_part(it) else None for it in found}
        if len(layouts) > 1:
            names = " and ".join(f"{type(module).__name__}.{name}" for module, name in places)
            raise ConfigError(
                f"parallelize: {names} are one parameter, which the plan divides in two ways; give both modules styles "
                "that divide it alike, such as 'embedding_rowwise' and 'colwise_gather_output'"
            )
        for module, name in places:
            module._parameters[name] = found[0]


def _check_divided(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raise if the plan divides nothing, or a parameter into parts of different sizes, with which layers fail."""
    divided = [(name, it, place) for name, it in _divided(model) for place in it.placements if place.is_shard()]
    if not divided:
        raise ConfigError("parallelize: the plan divides no parameter of the model")
    for name, parameter, placement in divided:
        length = parameter.shape[placement.dim]
        if length % mesh.size():
            raise ConfigError(
                f"parallelize: dimension {placement.dim} of {name!r} has the length {length}, which {mesh.size()} "
                "processes cannot share; choose a size of 'tensor' that divides it"
            )


def _divided(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if is_part(parameter)]


def _replicate_others(model: nn.Module, mesh: DeviceMesh) -> list[tuple[nn.Module, str]]:
    """Make the parameters that are not divided replicated `DTensor`s, and return their places."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    replicas: dict[int, nn.Parameter] = {}
    # A list, so that no old parameter is freed and its id used again.
    found = [place for place in _places(model) if not is_part(place[2]) and place[2].ndim]
    for module, name, parameter in found:
        if id(parameter) not in replicas:
            copied = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
            replicas[id(parameter)] = nn.Parameter(copied, requires_grad=parameter.requires_grad)
        module._parameters[name] = replicas[id(parameter)]
    return [(module, name) for module, name, _ in found]
