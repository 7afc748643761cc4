"""Comparison of a graph's losses with those of the step that it replaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail import accelerators
from dovetail.trainers.whole_step.graph import Graph, Outputs
from dovetail.trainers.whole_step.limits import CannotCompileError, first_line, remember_values

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
    are also called one by one, with the roundings of the expected step. If only compiled code exists, because it was
    found on disk, the configuration of the step is compared instead. The description of its parts is always compared,
    because a change may affect only the gradients.

    Args:
        graph: The graph to run.
        leaves: The tensors of its batches.
        expect: Returns the expected outputs.
        tolerance: The relative difference of a loss that is due to rounding in compiled code.
        describe: Returns all inputs of the step besides tensors, or None if they are unknown: those of its parts, its
            configuration, and the text of its code.
        changes: True if `expect` makes updates.
    """
    if has_changed(graph, describe, compares_configuration=tolerance > SHARP and graph.plain is None):
        raise CannotCompileError("a setting of the model, its loss or the configuration has changed")
    # Python's and numpy's generators are not needed: a step that uses them cannot be compiled.
    written = graph.written()
    restore_randomness = remember_randomness([*written, *leaves])
    before = [value.detach().clone() for value in written]
    # A step may also change these in place.
    restore_rest = remember_values([*graph.constants, *leaves])

    def restore() -> None:
        restore_randomness()
        with torch.no_grad():
            torch._foreach_copy_(written, before)
        restore_rest()

    expected = expect()
    restore()

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


def has_changed(graph: Graph, describe: Callable[[], Any] | None, *, compares_configuration: bool = False) -> bool:
    """Return whether the step has another description than when its graph was made; False if it had none."""
    if describe is None or graph.described is None:
        return False
    parts, configuration, code = graph.described
    now = describe()
    if now is None or (now[0], now[2]) != (parts, code):
        return True
    return compares_configuration and bool(now[1] != configuration)


def remember_randomness(tensors: Iterable[Tensor]) -> Callable[[], None]:
    """Return a function that restores the present states of torch's generators for the devices of some tensors."""
    host = torch.get_rng_state()
    # A step on the CPU must not start the accelerator.
    uses_accelerator = any(it.device.type != "cpu" for it in tensors)
    found = accelerators.random_states() if uses_accelerator else None

    def restore() -> None:
        torch.set_rng_state(host)
        if found is not None:
            accelerators.set_random_states(*found)

    return restore


def _agree(outputs: Outputs, expected: Mapping[str, Any], fixed: Mapping[str, Any], tolerance: float) -> bool:
    """Return whether a graph computed the expected loss, up to rounding, and the same outputs that are not tensors."""
    loss, due = float(outputs["loss"]), float(expected["loss"].detach())
    is_near = math.isclose(loss, due, rel_tol=tolerance, abs_tol=tolerance / 10) or not math.isfinite(due)
    return is_near and all(expected.get(name) == value for name, value in fixed.items())
