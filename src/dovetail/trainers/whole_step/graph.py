"""A compiled graph, and where the tensors that it reads and writes are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import getitem
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dovetail.trainers.whole_step.limits import Space
from dovetail.trainers.whole_step.rules import state_of

Outputs = dict[str, Any]
State = tuple[nn.Parameter, str]


@dataclass
class Graph:
    """One or several compiled steps, and where the tensors that they read and write are found.

    Attributes:
        call: Takes all inputs and returns the outputs.
        parameters: The first inputs.
        buffers: Where the next ones are: modules replace them at times.
        states: Whose optimizer state comes next, and which part of it.
        hyper: The optimizer's numbers, if any is used.
        leaves: Which tensors of the batches are used.
        constants: Tensors that were found in neither modules nor batch.
        draws: Make the random numbers of a call.
        names: The names of the outputs of a step.
        fixed: Outputs that are no tensors.
        sizes: The numbers of samples that it is for, where that is open.
        several: Graphs of several such steps, by their number.
        shorter: What there is for batches of fewer samples; None as long as nobody has tried.
        read: All that the step read besides tensors when the graph was compared with it; None where that is not known.
        bound: The optimizer's state that it was bound to, which is another one after loading.
        num_bound: Of how many parameters.
        settings: The optimizer's settings that it uses.
        places: What reads each of the constants where it was found; None where it is held by nothing that is known.
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
    _spaces: list[MutableMapping[str, Any]] = field(default_factory=list)
    _slots: list[str] = field(default_factory=list)

    def run(self, leaves: list[Tensor]) -> Sequence[Tensor]:
        """Make the updates, and return the outputs of one step behind those of the other."""
        outputs: Sequence[Tensor] = self.call(
            *self.parameters,
            *map(getitem, self._spaces, self._slots),
            *self.hyper,
            *map(leaves.__getitem__, self.leaves),
            *self.constants,
            *([draw() for draw in self.draws] if self.draws else ()),
        )
        return outputs

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

    def bind(self, optimizer: Optimizer) -> None:
        """Find the optimizer's state, and make what torch would make at a first step."""
        for parameter, slot in self.states:
            optimizer.state[parameter][slot] = state_of(optimizer, parameter, slot)
        cells = [*self.buffers, *((optimizer.state[parameter], slot) for parameter, slot in self.states)]
        self._spaces, self._slots = [space for space, _ in cells], [slot for _, slot in cells]
        self.bound, self.num_bound = optimizer.state, len(optimizer.state)
        # Torch's schedulers warn where they step before the optimizer, and this is how they know.
        vars(optimizer)["_opt_called"] = True

    def find_constants(self) -> bool:
        """Read the constants where they were found, and return whether there are such of the same form."""
        for number, place in enumerate(self.places):
            value = None if place is None else _read(place)
            if not isinstance(value, Tensor) or _form(value) != _form(self.constants[number]):
                return False
            self.constants[number] = value
        self.several = {number: graph for number, graph in self.several.items() if graph.find_constants()}
        if self.shorter is not None and self.shorter.graph is not None and not self.shorter.graph.find_constants():
            self.shorter = None
        return True

    def set_numbers(self, numbers: list[float]) -> None:
        """Use these numbers of the optimizer from now on."""
        for hyper in self.hyper:
            # The array is a view of the tensor.
            hyper.numpy()[:] = numbers


@dataclass
class Shorter:
    """One graph for batches of many lengths, all of them shorter than those of another graph.

    Attributes:
        graph: Makes one step; None where there can be no such graph.
        is_cut: Which tensors of a batch have fewer samples, and not as many as ever.
        is_proven: Whether its loss was compared with that of an eager step.
    """

    graph: Graph | None
    is_cut: tuple[bool, ...] = ()
    is_proven: bool = False


def buffer_place(root: nn.Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    """Return where a buffer is kept: its module's dictionary, and its name in it."""
    path, _, last = name.rpartition(".")
    return root.get_submodule(path)._buffers, last


def constant_place(spaces: Sequence[Space], constant: Tensor) -> Callable[[], Any] | None:
    """Return what reads a tensor where it was found: an attribute, or an entry of one; None if it was not."""
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
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad
