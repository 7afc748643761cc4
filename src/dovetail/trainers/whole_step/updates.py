"""Update of an optimizer as a compiled graph, from gradients that were computed before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.trainers.whole_step.graph import Graph, State
from dovetail.trainers.whole_step.limits import CannotCompileError, check_memory, check_optimizer, first_line, ids
from dovetail.trainers.whole_step.reuse import reuse_code
from dovetail.trainers.whole_step.rules import checked_rule, state_of
from dovetail.trainers.whole_step.sharing import Code
from dovetail.trainers.whole_step.tracing import (
    Backend,
    compiled,
    drop_unused_inputs,
    empty_like,
    fake_inputs,
    naming_update,
    uncompiled,
)

# An optimizer with more combinations of used parameters than this is updated eagerly.
_MOST_GRAPHS = 4


class UpdateStep:
    """The update of one optimizer as one graph for all of its parameters.

    Args:
        optimizer: An optimizer of torch, as for `WholeStep`.
        backend: As for `WholeStep`.

    Raises:
        CannotCompileError: A graph does not support the optimizer.

    Example:
        >>> weight = nn.Parameter(torch.tensor([1.0]))
        >>> update = UpdateStep(torch.optim.SGD([weight], lr=0.25), backend="eager")
        >>> weight.grad = torch.tensor([2.0])
        >>> update(), weight.item()
        (True, 0.5)
    """

    def __init__(self, optimizer: Optimizer, backend: Backend = "inductor") -> None:
        self.optimizer = optimizer
        self._backend: Backend = backend
        everything = {str(number): it for number, it in enumerate(_parameters(optimizer))}
        check_optimizer(optimizer, everything)
        self._rule = checked_rule(optimizer)
        self._settings_of = itemgetter(*self._rule.settings)
        self._graphs: list[tuple[Any, Graph]] = []

    def __call__(self) -> bool:
        """Make the update from the `grad` of the parameters, and return False, without effect, if no graph can.

        Raises:
            CannotCompileError: The update cannot be compiled. Nothing has changed.
        """
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        parameters = [it for it in _parameters(optimizer) if it.grad is not None]
        gradients: list[Any] = list(map(_GRAD, parameters))
        settings = list(map(self._settings_of, groups))
        terms = [self._rule.terms(group) for group in groups]
        key = ids(parameters), list(map(_FORM, gradients)), list(map(Tensor.stride, gradients)), terms
        graph = next((graph for known, graph in self._graphs if known == key), None)
        if graph is None:
            if len(self._graphs) >= _MOST_GRAPHS or any(it.layout is not torch.strided for it in gradients):
                return False
            graph = self._compile(parameters, gradients, terms)
            self._graphs.append((key, graph))
        if graph.bound is not optimizer.state or graph.num_bound != len(optimizer.state):
            graph.bind(optimizer)
        now = ([float(group["lr"]) for group in groups], settings)
        if now != graph.settings:
            graph.settings = now
            graph.set_numbers([number for group in groups for number in self._rule.numbers(group)])
        graph.run(gradients)
        return True

    def _compile(self, parameters: list[nn.Parameter], gradients: list[Tensor], terms: list[Any]) -> Graph:
        """Trace and compile the update of these parameters."""
        optimizer, rule, groups = self.optimizer, self._rule, self.optimizer.param_groups
        used_ids = set(ids(parameters))
        chosen = [[it for it in group["params"] if id(it) in used_ids] for group in groups]
        states = [
            (parameter, slot)
            for members, term in zip(chosen, terms, strict=True)
            for parameter in members
            for slot in rule.slots(optimizer, parameter, term)
        ]
        hyper = torch.zeros(sum(len(rule.numbers(group)) for group in groups), dtype=torch.float64)
        own = [*parameters, *(state_of(optimizer, parameter, slot) for parameter, slot in states), hyper]
        check_memory(own)
        # The gradients may be views of one tensor, which the graph only reads.
        given = [*own, *map(empty_like, gradients)]

        numbers = {id(it): number for number, it in enumerate(_parameters(optimizer))}
        key = (
            type(optimizer),
            terms,
            [[numbers[id(it)] for it in members] for members in chosen],
            [(numbers[id(parameter)], slot) for parameter, slot in states],
            [(*_FORM(it), it.stride()) for it in given],
        )
        code = reuse_code(key, self._backend, lambda: self._make_code(parameters, chosen, terms, states, given))
        used = iter(code.is_used)
        return Graph(
            code.call,
            list(compress(parameters, used)),
            [],
            list(compress(states, used)),
            list(compress([hyper], used)),
            list(compress(range(len(gradients)), used)),
            constants=[],
            draws=[],
            names=[],
            fixed={},
        )

    def _make_code(
        self,
        parameters: list[nn.Parameter],
        chosen: list[list[nn.Parameter]],
        terms: list[Any],
        states: list[State],
        given: list[Tensor],
    ) -> Code:
        """Trace and compile the update: `chosen` are the parameters of each group, `given` all inputs."""
        # Imported here because it takes most of a second.
        from torch.fx.experimental.proxy_tensor import make_fx

        optimizer, rule, groups = self.optimizer, self._rule, self.optimizer.param_groups

        def update(*inputs: Tensor) -> list[Tensor]:
            rest = iter(inputs)
            values = {it: next(rest) for it in parameters}
            slots: dict[nn.Parameter, dict[str, Tensor]] = {it: {} for it in parameters}
            for owner, slot in states:
                slots[owner][slot] = next(rest)
            coming, found = iter(next(rest).unbind()), dict(zip(parameters, rest, strict=True))
            with torch.no_grad(), naming_update(optimizer):
                for group, members, term in zip(groups, chosen, terms, strict=True):
                    numbers = [next(coming) for _ in rule.numbers(group)]
                    tensors = [values[it] for it in members], [found[it] for it in members]
                    rule.update(optimizer, group, *tensors, [slots[it] for it in members], numbers, term)
            return []

        mode, fakes = fake_inputs(given, [False] * len(given))
        try:
            with mode:
                traced = make_fx(update)(*fakes)
        except CannotCompileError:
            raise
        except Exception as error:
            cause = f"the update of {type(optimizer).__name__} cannot be traced ({first_line(error)})"
            raise CannotCompileError(cause) from error
        _, is_used = drop_unused_inputs(traced)
        if self._backend == "eager":
            return Code(uncompiled(traced), tuple(is_used))
        in_one = all(it.device.type == "cpu" for it in given)
        call, library = compiled(traced, list(compress(given, is_used)), in_one=in_one)
        return Code(call, tuple(is_used), library=library)


_GRAD, _FORM = attrgetter("grad"), attrgetter("shape", "dtype", "device")


def _parameters(optimizer: Optimizer) -> Sequence[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
