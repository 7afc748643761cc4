"""Comparison of a graph's losses with those of the step that it replaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from dovetail.trainers.whole_step.graph import Graph, Outputs
from dovetail.trainers.whole_step.limits import CannotCompileError, first_line

# The relative difference between the losses of a graph in float32 and of an eager step that is due to rounding.
SHARP = 1e-3


def run_and_compare(
    graph: Graph,
    leaves: list[Tensor],
    expect: Callable[[], Sequence[Mapping[str, Any]]],
    tolerance: float,
    *,
    describe: Callable[[], Any] | None = None,
    changes: bool = False,
) -> list[Outputs]:
    """Run a graph and check that its losses are the expected ones; if not, restore everything and raise.

    A step that has changed may compute a loss within the tolerance of a low precision. So the operations of the graph
    are also called one by one, with the rounding of the expected step. If only compiled code exists, because it was
    found on disk, the description of the step is compared instead.

    Args:
        graph: The graph to run.
        leaves: The tensors of its batches.
        expect: Returns the expected outputs.
        tolerance: The relative difference of a loss that is due to rounding in compiled code.
        describe: Returns all inputs of the step besides tensors, or None if they are unknown.
        changes: True if `expect` makes updates.
    """
    if tolerance > SHARP and graph.plain is None and describe is not None and graph.described != describe():
        raise CannotCompileError("a setting of the model, its loss or the configuration has changed")
    # Python's and numpy's generators are not needed: a step that uses them cannot be compiled.
    randomness, written = _torch_generators(), graph.written()
    before = [value.detach().clone() for value in written]

    def restore(*, weights: bool = True) -> None:
        for generator, state in randomness:
            generator.set_state(state)
        if weights:
            with torch.no_grad():
                torch._foreach_copy_(written, before)

    expected = expect()
    restore(weights=changes)

    def agree(outputs: list[Outputs], tolerance: float) -> bool:
        pairs = zip(outputs, expected, strict=True)
        return all(_agree(found, due, graph.fixed, tolerance) for found, due in pairs)

    try:
        is_same = True
        if graph.plain is not None and not changes:
            is_same = agree(replace(graph, call=graph.plain).outputs(leaves), SHARP)
            restore()
        outputs = graph.outputs(leaves)
    except Exception as error:
        cause = f"the graph of the step fails ({first_line(error)})"
    else:
        if is_same and agree(outputs, tolerance):
            return outputs
        cause = "the step computes something that changes from call to call independently of its batch and weights"
    restore()
    raise CannotCompileError(cause)


def eager_outputs(root: nn.Module, compute: Callable[[Any], Mapping[str, Any]], batch: Any) -> Mapping[str, Any]:
    """Return the outputs of a step for a batch, without a change of the buffers of its modules."""
    copies = {name: value.clone() for name, value in root.named_buffers()}
    if not copies:
        return compute(batch)
    with _reparametrize_module(root, copies, tie_weights=True):
        return compute(batch)


def _torch_generators() -> list[tuple[torch.Generator, Tensor]]:
    """Return torch's generators of all devices in use, with their states."""
    # There are none of CUDA before its first use. Only the types that Inductor compiles for have a tuple of them.
    generators = (torch.default_generator, *torch.cuda.default_generators, *torch.xpu.default_generators)
    return [(generator, generator.get_state()) for generator in generators]


def _agree(outputs: Outputs, expected: Mapping[str, Any], fixed: Mapping[str, Any], tolerance: float) -> bool:
    """Return whether a graph computed the expected loss, up to rounding, and the same outputs that are not tensors."""
    loss, due = float(outputs["loss"]), float(expected["loss"].detach())
    is_near = math.isclose(loss, due, rel_tol=tolerance, abs_tol=tolerance / 10) or not math.isfinite(due)
    return is_near and all(expected.get(name) == value for name, value in fixed.items())
