"""Compiled graph of a step, with references to the tensors that it reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.trainers.whole_step.gradients import GradientBuffers
from dovetail.trainers.whole_step.limits import Space
from dovetail.trainers.whole_step.rules import state_of

Outputs = dict[str, Any]
State = tuple[nn.Parameter, str]


@dataclass
class Graph:
    """One or several compiled steps, with references to the tensors that they read and write.

    Attributes:
        call: Takes all inputs and returns the outputs.
        parameters: The first inputs.
        buffers: The dictionaries and names of the next inputs; modules sometimes replace their buffers.
        states: The parameters and names of the optimizer state, which are the next inputs.
        hyper: The optimizer's numbers, if any is used.
        leaves: The indices of the tensors of the batches that are used.
        constants: Tensors that were found in neither modules nor batch.
        draws: Functions that draw the random numbers of a call.
        names: The names of the outputs of a step.
        fixed: Outputs that are not tensors.
        sizes: The numbers of samples that the graph supports, if it supports several.
        several: Graphs of several such steps, by their number.
        shorter: The graph for batches of fewer samples; None if it was not compiled yet.
        read: The inputs of the step besides tensors when the graph was compared with it; None if unknown.
        bound: The optimizer state to which the graph is bound; loading a state replaces it.
        num_bound: The number of parameters in this state.
        settings: The optimizer's settings that the graph uses.
        places: Functions that read each constant from its owner; None for a constant without a known owner.
        plain: Like `call`, but calls the operations of the graph one by one; None if it is not needed or unknown.
        described: All inputs of the step besides tensors when the graph was made; None if unknown.
    """

    call: Callable[..., Any]
    parameters: list[nn.Parameter]
    buffers: list[tuple[MutableMapping[str, Any], str]]
    states: list[State]
    hyper: list[Tensor]
    leaves: list[int]
    constants: list[Tensor]
    draws: list[Callable[[], Tensor]]
    names: list[str]
    fixed: dict[str, Any]
    sizes: frozenset[int] = frozenset()
    several: dict[int, Graph] = field(default_factory=dict)
    shorter: Shorter | None = None
    read: Any = None
    bound: Any = None
    num_bound: int = 0
    settings: Any = None
    places: list[Callable[[], Any] | None] = field(default_factory=list)
    plain: Callable[..., Any] | None = None
    described: Any = None
    _spaces: list[MutableMapping[str, Any]] = field(default_factory=list)
    _slots: list[str] = field(default_factory=list)
    _updated: list[nn.Parameter] = field(default_factory=list)
    _changed: list[nn.Parameter] = field(default_factory=list)

    def run(self, leaves: list[Tensor]) -> Sequence[Tensor]:
        """Make the updates, and return the outputs of all steps in one sequence."""
        # The order of the inputs in the trace, see `WholeStep._compile`; unused inputs were removed from both.
        outputs: Sequence[Tensor] = self.call(
            *self.parameters,
            *map(getitem, self._spaces, self._slots),
            *self.hyper,
            *map(leaves.__getitem__, self.leaves),
            *self.constants,
            *([draw() for draw in self.draws] if self.draws else ()),
        )
        # Compiled code does not count its writes, by which autograd detects a backward pass with newer weights.
        _INCREMENT(self._changed)
        return outputs

    def output(self, leaves: list[Tensor]) -> Outputs:
        """Make the update of one batch, and return its outputs."""
        return dict(zip(self.names, self.run(leaves)), **self.fixed)  # noqa: B905 - `strict` costs time at every step

    def outputs(self, leaves: list[Tensor]) -> list[Outputs]:
        """Make the updates, and return the outputs of every step by their names."""
        found, number = self.run(leaves), len(self.names)
        return [
            {**dict(zip(self.names, found[start : start + number], strict=True)), **self.fixed}
            for start in range(0, len(found), number)
        ]

    def written(self) -> list[Tensor]:
        """Return the tensors that a run may change."""
        return [*self.parameters, *map(getitem, self._spaces, self._slots)]

    @property
    def updated(self) -> list[nn.Parameter]:
        """The parameters whose optimizer state the graph uses, each once."""
        return self._updated

    def bind(self, optimizer: Optimizer) -> None:
        """Look up the optimizer's state, and create what torch would create in a first step."""
        for parameter, slot in self.states:
            optimizer.state[parameter][slot] = state_of(optimizer, parameter, slot)
        cells = [*self.buffers, *((optimizer.state[parameter], slot) for parameter, slot in self.states)]
        self._spaces, self._slots = [space for space, _ in cells], [slot for _, slot in cells]
        self._updated = list(dict.fromkeys(parameter for parameter, _ in self.states))
        self._changed = [] if isinstance(optimizer, GradientBuffers) else self._updated or self.parameters
        self.bound, self.num_bound = optimizer.state, len(optimizer.state)
        # Torch's schedulers read this flag to warn if they step before the optimizer.
        vars(optimizer)["_opt_called"] = True

    def find_constants(self) -> bool:
        """Read the constants from their owners again, and return whether all exist in the same form."""
        for number, place in enumerate(self.places):
            value = None if place is None else _read(place)
            # The compiled code is valid for one form only.
            if not isinstance(value, Tensor) or _form(value) != _form(self.constants[number]):
                return False
            self.constants[number] = value
        self.several = {number: graph for number, graph in self.several.items() if graph.find_constants()}
        if self.shorter is not None and self.shorter.graph is not None and not self.shorter.graph.find_constants():
            self.shorter = None
        return True

    def set_numbers(self, numbers: list[float]) -> None:
        """Set the optimizer's numbers for the following calls."""
        for hyper in self.hyper:
            # The array is a view of the tensor.
            hyper.numpy()[:] = numbers


@dataclass
class Shorter:
    """One graph for batches of many lengths, all of them shorter than the batches of another graph.

    Attributes:
        graph: Makes one step; None if no such graph is possible.
        is_cut: For each tensor of a batch, True if it has fewer samples than in a full batch.
        is_proven: True if its loss was compared with the loss of an eager step.
    """

    graph: Graph | None
    is_cut: tuple[bool, ...] = ()
    is_proven: bool = False


_INCREMENT: Callable[[Iterable[Tensor]], None] = torch._C._increment_version


def buffer_place(root: nn.Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    """Return the dictionary that holds a buffer, and its name in it."""
    path, _, last = name.rpartition(".")
    return root.get_submodule(path)._buffers, last


def constant_place(spaces: Sequence[Space], constant: Tensor) -> Callable[[], Any] | None:
    """Return a function that reads a tensor from an attribute or an entry of one; None if it was not found."""
    for _, space in spaces:
        for name, value in space.items():
            if value is constant:
                return partial(getitem, space, name)
            for key, entry in _entries(value):
                if entry is constant:
                    return partial(_entry, space, name, key)
    return None


def _entries(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _entry(space: Mapping[str, Any], name: str, key: Any) -> Any:
    return space[name][key]


def _read(place: Callable[[], Any]) -> Any:
    try:
        return place()
    except (LookupError, TypeError):
        return None


def _form(tensor: Tensor) -> tuple[Any, ...]:
    # With strides: Inductor generates code for one layout in memory.
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad
