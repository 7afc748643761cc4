"""Search for the compiled code of a step: in this process, on disk, then by a trace."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.trainers.whole_step.graph import State
from dovetail.trainers.whole_step.settings import settings_of_inductor, settings_of_torch
from dovetail.trainers.whole_step.sharing import Code, find_shared, share
from dovetail.trainers.whole_step.spelling import spell
from dovetail.trainers.whole_step.stored import load_code, store_code
from dovetail.trainers.whole_step.tracing import Backend, describe_batch


def reuse_code(described: Any, backend: Backend, make: Callable[[], Code]) -> Code:
    """Return the code of a step or an update, from an earlier trace if there is one.

    Args:
        described: All inputs of the trace; None if they are unknown.
        backend: Only compiled code is stored on disk.
        make: Traces and compiles.
    """
    compiler = settings_of_inductor()
    key = None if described is None or compiler is None else (described, backend, settings_of_torch(), compiler)
    found = find_shared(key)
    if found is not None:
        return found
    is_compiled = backend == "inductor"
    code = load_code(key) if is_compiled else None
    if code is None:
        code = make()
        if code.library is not None:
            store_code(key, code)
            # It is in memory now.
            shutil.rmtree(code.library.parent, ignore_errors=True)
    share(key, code)
    return code


def with_code(describe: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """Return a function that also describes the code of the user that a step calls.

    A global number of the user may change a loss by less than its rounding, or only the gradients.

    Args:
        describe: Returns all inputs of a step besides tensors: those of its parts, and its configuration; or None.
    """
    if describe is None:
        return None
    inputs = describe

    def described() -> Any:
        found = inputs()
        return None if found is None else (*found, spell(found[0]))

    return described


def trace_key(
    described: Any,
    root: nn.Module,
    optimizer: Optimizer,
    states: Sequence[State],
    given: Sequence[Tensor],
    rest: tuple[Any, Any, Sequence[bool], Sequence[Any]],
) -> Any:
    """Return all inputs of the trace of a step, to find the code of an equal one; None if they are unknown.

    Args:
        described: All inputs of the computation besides tensors, or None.
        root: All modules.
        optimizer: The optimizer.
        states: The parts of the optimizer's state that the trace has as inputs.
        given: The tensors that the trace has as inputs.
        rest: The clipping norm, the state of the step, the inputs of variable size, and the batches.
    """
    if described is None:
        return None
    max_norm, state, is_open, batches = rest
    numbers = {id(it): number for number, it in enumerate(root.parameters())}
    return (
        described,
        max_norm,
        state,
        list(is_open),
        [describe_batch(batch)[1][0] for batch in batches],
        type(optimizer),
        [[numbers[id(it)] for it in group["params"]] for group in optimizer.param_groups],
        [(numbers[id(parameter)], slot) for parameter, slot in states],
        # With the names of shared weights.
        [(name, numbers[id(it)]) for name, it in root.named_parameters(remove_duplicate=False)],
        [name for name, _ in root.named_buffers()],
        [(*_FORM(it), it.stride()) for it in given],
    )


_FORM = attrgetter("shape", "dtype", "device")
