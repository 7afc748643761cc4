"""Comparison of a graph's losses with those of the step that it replaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.trainers.whole_step.graph import Graph, Outputs
from dovetail.trainers.whole_step.limits import CannotCompileError, first_line


def run_and_compare(
    graph: Graph,
    leaves: list[Tensor],
    expect: Callable[[], Sequence[Mapping[str, Any]]],
    tolerance: float,
    *,
    changes: bool = False,
) -> list[Outputs]:
    """Run a graph and check that its losses are the expected ones; if not, restore everything and raise.

    Args:
        graph: The graph to run.
        leaves: The tensors of its batches.
        expect: Returns the expected outputs.
        tolerance: The relative difference of a loss that is due to rounding.
        changes: True if `expect` makes updates.
    """
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
    try:
        outputs = graph.outputs(leaves)
    except Exception as error:
        cause = f"the graph of the step fails ({first_line(error)})"
    else:
        pairs = zip(outputs, expected, strict=True)
        if all(_agree(found, due, graph.fixed, tolerance) for found, due in pairs):
            return outputs
        cause = "the step computes something that changes from call to call independently of its batch and weights"
    restore()
    raise CannotCompileError(cause)


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
