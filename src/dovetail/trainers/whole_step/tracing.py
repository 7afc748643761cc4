"""Tracing and compilation of a graph with Inductor."""

from __future__ import annotations

import copy
import gc
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dovetail.trainers.whole_step.limits import CannotCompileError, StoredTensorError, TraceError, first_line
from dovetail.trainers.whole_step.settings import changed_settings
from dovetail.trainers.whole_step.stored import library_call

Backend = Literal["inductor", "eager"]


def describe_batch(batch: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of a batch, and its form: everything else that determines its graph."""
    kind = type(batch)
    # Nearly every batch is a flat pair of tensors.
    if (kind is tuple or kind is list) and all(map(isinstance, batch, repeat(Tensor))):
        leaves, rest = list(batch), kind
    else:
        leaves, rest = _flattened(batch)
    return leaves, (rest, list(map(_LEAF, leaves)), list(map(Tensor.stride, leaves)))


_LEAF = attrgetter("shape", "dtype", "device")


def _flattened(batch: Any) -> tuple[list[Tensor], Any]:
    leaves, spec = pytree.tree_flatten(batch)
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    for leaf in others:
        if not isinstance(leaf, (str, int, float, bool, type(None))):
            raise CannotCompileError(f"the batch holds an object of type {type(leaf).__name__}")
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], (str(spec), others)


def cut(form: Any, full: Any) -> tuple[tuple[bool, ...], int] | None:
    """Return which tensors of a batch have fewer samples than in a full batch, and how many they have.

    Args:
        form: The form of the batch, from `describe_batch`.
        full: The form of the full batch.

    Returns:
        None if the forms also differ in something else.
    """
    (rest, leaves, strides), (full_rest, full_leaves, full_strides) = form, full
    if rest != full_rest or strides != full_strides or len(leaves) != len(full_leaves):
        return None
    is_cut, sizes = [], set()
    for (shape, *kind), (full_shape, *full_kind) in zip(leaves, full_leaves, strict=True):
        if kind != full_kind or shape[1:] != full_shape[1:]:
            return None
        is_cut.append(shape != full_shape)
        if shape != full_shape:
            sizes.add((shape[0], full_shape[0]))
    if len(sizes) != 1:
        return None
    ((size, most),) = sizes
    return (tuple(is_cut), size) if size < most else None


def with_tensors(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a batch with its tensors replaced by others."""
    return pytree.tree_map(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, batch)


def channels_last(tensor: Tensor) -> Tensor:
    """Return images with the channels last in memory, and other tensors unchanged."""
    if tensor.ndim != 4 or tensor.device.type != "cpu" or not tensor.is_floating_point():
        return tensor
    if tensor.shape[1] == 1 and tensor.is_contiguous():
        # With one channel both layouts are the same memory, and torch would treat it as the other one.
        _, _, height, width = tensor.shape
        return tensor.as_strided(tensor.shape, (height * width, 1, width, 1))
    return tensor.contiguous(memory_format=torch.channels_last)


def trace(steps: Callable[..., list[Tensor]], given: Sequence[Tensor], is_open: Sequence[bool]) -> GraphModule:
    """Return the graph of a function of tensors, which computes, draws and changes nothing during the trace.

    Args:
        steps: The function.
        given: Tensors of the form of its arguments.
        is_open: As for `fake_inputs`.

    Raises:
        CannotCompileError: The function depends on the value of a tensor.
        TraceError: It cannot be traced for another reason.
    """
    # Imported here because it takes most of a second.
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

    mode, fakes = fake_inputs(given, is_open)
    # The tensors of the trace, by weak references.
    computed: Any = ()

    def note_tensors(*inputs: Tensor) -> list[Tensor]:
        nonlocal computed
        running: Any = get_proxy_mode()
        computed = running.tracer.tensor_tracker
        return steps(*inputs)

    try:
        with mode, torch.enable_grad():
            traced = make_fx(note_tensors, _allow_non_fake_inputs=True)(*fakes)
    except CannotCompileError:
        raise
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
        raise CannotCompileError("the step depends on the value of a tensor, by .item() or an if") from error
    except Exception as error:
        raise TraceError(f"the step cannot be traced ({first_line(error)})") from error
    if len(computed) > len(fakes):
        gc.collect()
    if len(computed) > len(fakes):
        raise StoredTensorError
    return traced


def fake_inputs(given: Sequence[Tensor], is_open: Sequence[bool]) -> tuple[Any, list[Any]]:
    """Return tensors without data, for a trace that computes, draws and changes nothing, and their mode.

    Args:
        given: Tensors of the same form.
        is_open: For each tensor, True if its number of samples is a variable; all of them share one variable.
    """
    # Imported here because it takes most of a second.
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not any(is_open):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        return mode, [mode.from_tensor(it.detach()) for it in given]
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = []
    for it, opens in zip(given, is_open, strict=True):
        # Tensors of equal length share one symbol.
        sizes = [DimDynamic.DUCK if opens and not dimension else DimDynamic.STATIC for dimension in range(it.ndim)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * it.ndim)
        fakes.append(mode.from_tensor(it.detach(), symbolic_context=context))
    return mode, fakes


def sizes_of(fake: Tensor, most: int) -> frozenset[int]:
    """Return the numbers of samples for which a graph is valid: those that satisfy all guards of the trace.

    Args:
        fake: An input whose number of samples is a variable.
        most: The largest number to check.
    """
    import sympy

    size: Any = fake.shape[0]
    if not isinstance(size, torch.SymInt):
        return frozenset()
    symbol, environment = size.node.expr, size.node.shape_env
    if not isinstance(symbol, sympy.Symbol) or symbol in environment.replacements:
        return frozenset()
    granted = [guard.expr for guard in environment.guards]
    # Torch specializes on sizes 0 and 1.
    return frozenset(
        number
        for number in range(2, most + 1)
        if all(each.xreplace({symbol: sympy.Integer(number)}) == sympy.true for each in granted)
    )


def loss_of(outputs: Any) -> Tensor:
    """Return the loss of a step; raise if it cannot be differentiated."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise CannotCompileError("the step returns no loss that is one number and depends on the parameters")
    return loss if loss.ndim == 0 else loss.reshape(())


@contextmanager
def reject_recomputation() -> Iterator[None]:
    """Raise if the step uses `torch.utils.checkpoint`: a trace would draw other random numbers the second time."""
    reason = "the step computes activations again in the backward pass, by torch.utils.checkpoint or another hook"
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(reason):
            yield
    except RuntimeError as error:
        if str(error) != reason:
            raise
        raise CannotCompileError(reason) from error


@contextmanager
def naming_update(optimizer: Optimizer) -> Iterator[None]:
    """Turn an error of a traced update that reads a tensor into one that names the optimizer."""
    from torch._subclasses import fake_tensor

    try:
        yield
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
        cause = f"the update of {type(optimizer).__name__} depends on the value of a tensor"
        raise CannotCompileError(cause) from error


def drop_unused_inputs(traced: GraphModule) -> tuple[list[Node], list[bool]]:
    """Remove inputs that a graph does not use; return all former inputs, and which of them are used."""
    places = [node for node in traced.graph.nodes if node.op == "placeholder"]
    is_used = [bool(node.users) for node in places]
    for node in places:
        if not node.users:
            traced.graph.erase_node(node)
    traced.recompile()
    return places, is_used


def lift_constants(traced: GraphModule) -> list[Tensor]:
    """Turn tensors that are neither in the modules nor in the batch into inputs, so that the graph uses no copies."""
    found: dict[str, tuple[Node, Tensor]] = {}
    for node in [node for node in traced.graph.nodes if node.op == "get_attr"]:
        value = getattr(traced, node.target)
        if not isinstance(value, Tensor):
            raise CannotCompileError(f"the step uses a {type(value).__name__}, which is not an input of a graph")
        if value.requires_grad:
            raise CannotCompileError("the loss depends on a parameter that is not the model's")
        if _is_literal(value) and all(user.target in _CREATED for user in node.users):
            # Numbers of Python, which the step has put into a tensor: constants of the graph, like all such numbers.
            continue
        if node.target not in found:
            found[node.target] = (_new_input(traced, node.target, node), value)
        node.replace_all_uses_with(found[node.target][0])
        traced.graph.erase_node(node)
    return [value for _, value in found.values()]


# Copies that a trace makes of a tensor that the step creates from numbers, by `torch.tensor`.
_CREATED = frozenset({torch.ops.aten.lift_fresh_copy.default})


def _is_literal(value: Tensor) -> bool:
    """Return whether Inductor writes a tensor into the code as numbers; others become a part of its file."""
    return value.device.type == "cpu" and value.ndim <= 1 and 0 < value.numel() <= 8


def lift_draws(traced: GraphModule) -> list[Callable[[], Tensor]]:
    """Turn random numbers into inputs, and return functions that draw them: Inductor would draw in another order."""
    drawing = [node for node in traced.graph.nodes if _draws(node)]
    if len(drawing) == 1:
        return []
    draws: list[Callable[[], Tensor]] = []
    for number, node in enumerate(drawing):
        operation: Any = node.target
        tensors = [argument for argument in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(argument, Node)]
        name = operation._schema.name.partition("::")[2]
        if tensors and (len(tensors) > 1 or tensors[0] is not node.args[0] or name not in _DRAWN_BY_SHAPE):
            raise CannotCompileError(f"the step draws random numbers whose distribution it computes, by {name}")
        if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.meta["val"].shape):
            raise CannotCompileError("the step draws more random numbers if a batch has more samples")
        drawn = _new_input(traced, f"drawn_{number}", node)
        with traced.graph.inserting_before(node):
            if name.endswith("_"):
                new = traced.graph.call_function(torch.ops.aten.copy_.default, (node.args[0], drawn))
            else:
                # A copy, so that the step may write into it.
                new = traced.graph.call_function(torch.ops.aten.clone.default, (drawn,))
        node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
        like = [empty_like(tensor.meta["val"]) for tensor in tensors]
        draws.append(partial(operation, *like, *node.args[len(like) :], **node.kwargs))
    return draws


# The numbers that these draw depend only on the shape of a tensor.
_DRAWN_BY_SHAPE = frozenset(
    {
        *("bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
        *("rand_like", "randn_like", "randint_like"),
    }
)


def empty_like(tensor: Tensor) -> Tensor:
    """Return a new tensor of the same form, also for a tensor without data."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _new_input(traced: GraphModule, name: str, like: Node) -> Node:
    """Add an input after all others."""
    last = [node for node in traced.graph.nodes if node.op == "placeholder"][-1]
    with traced.graph.inserting_after(last):
        placeholder = traced.graph.placeholder(name)
    placeholder.meta.update(like.meta)
    return placeholder


def _draws(node: Node) -> bool:
    """Return whether a node draws random numbers; torch also tags attention without dropout, which draws none."""
    operation = node.target
    if not isinstance(operation, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    given = dict(zip((it.name for it in operation._schema.arguments), node.args, strict=False)) | node.kwargs
    defaults = {it.name: it.default_value for it in operation._schema.arguments if it.has_default_value()}
    return bool((defaults | given).get("dropout_p", 1.0))


def check_compiler() -> None:
    """Raise `CannotCompileError` if there is no compiler for the CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise CannotCompileError("there is no C++ compiler, such as g++") from error


def uncompiled(traced: GraphModule) -> Callable[..., Any]:
    """Return a function that calls the operations of a graph one by one."""

    def call(*inputs: Tensor) -> Any:
        with torch.no_grad():
            return traced(*inputs)

    return call


def compiled(
    traced: GraphModule, inputs: list[Tensor], *, in_one: bool = False, is_open: bool = False
) -> tuple[Callable[..., Any], Path | None]:
    """Compile a graph, without Dynamo, and return its function and its file, if it has one.

    The file is the only content of its folder that is needed; the caller removes the folder.

    Args:
        traced: The graph.
        inputs: Example inputs.
        in_one: True to compile the calls of its kernels, too.
        is_open: True to keep the variable sizes of the trace.
    """
    # Imported here because it takes seconds.
    from torch._inductor import aot_compile, config, standalone_compile
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    check_compiler()
    changed = changed_settings(config)
    # `fallback_random` uses torch's own generator, for a graph that draws once.
    settings: dict[str, Any] = {"fallback_random": True, "cpp_wrapper": in_one}
    settings.update((name, value) for name, value in _BUILD.items() if name not in changed)
    if config.cpp.vec_isa_ok is None:
        # Torch would build and load six test programs. Every compiler for C++20 knows these instructions.
        settings["cpp.vec_isa_ok"] = True
    try:
        with torch.no_grad(), config.patch(settings), warnings.catch_warnings():
            # Torch raises warnings about itself while it imports its compiler.
            warnings.simplefilter("ignore")
            if in_one and not is_open:
                # A library that is called directly: a tiny step takes two thirds of the time.
                folder = Path(tempfile.mkdtemp(prefix="dovetail-", dir=cache_dir()))
                try:
                    with config.patch({"aot_inductor.output_path": str(folder)}):
                        library = Path(str(aot_compile(copy.deepcopy(traced), (*inputs,))))
                    return library_call(library), library
                except Exception:
                    shutil.rmtree(folder, ignore_errors=True)
            shapes: Any = "from_graph" if is_open else "from_example_inputs"
            return standalone_compile(traced, [*inputs], dynamic_shapes=shapes), None
    except Exception as error:
        raise CannotCompileError(f"the compiler fails ({first_line(error)})") from error


# Settings of Inductor that shorten the first step and do not change its kernels. The user's settings have priority.
_BUILD: dict[str, Any] = {
    "aot_inductor.enable_line_tables": False,
    # Precompiled headers take 17 s, and a graph that includes them is compiled 3 s earlier.
    "aot_inductor.precompile_headers": False,
    "cpp_cache_precompile_headers": False,
}
