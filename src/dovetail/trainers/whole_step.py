"""One graph for a whole training step: forward, backward, clipping and the optimizer's update.

The graph is traced once per form of a batch, with tensors that hold no data, compiled by Inductor, and called without
Dynamo in between. It reads and writes the very parameters, buffers and optimizer state that eager training does, so the
two can take turns at any step.
"""

from __future__ import annotations

import hashlib
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, getitem, itemgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules import module as global_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils import _pytree as pytree

__all__ = ["CannotCompileError", "Outputs", "WholeStep", "check_compiler"]

# A form of batch that is not the first is compiled when it comes twice in a row, or this often in all: the last,
# shorter batch of every epoch costs less in eager mode than the seconds of a compiler.
_APPEARANCES = 8
_MOST_GRAPHS = 8
# Graphs that are kept from run to run, the newest of them.
_MOST_KEPT = 32
# Batches in more forms than this have none that is worth a graph.
_MOST_FORMS = 64

Compute = Callable[[Any], Mapping[str, Any]]
Outputs = dict[str, Any]
Group = Mapping[str, Any]
State = tuple[nn.Parameter, str]
Space = tuple[str, MutableMapping[str, Any]]


class CannotCompileError(Exception):
    """No graph can stand for a step; the message says why, as the end of a sentence. Nothing has changed."""


class _TraceError(CannotCompileError):
    """Something went wrong inside a trace."""


class WholeStep:
    """A training step as one compiled graph for each form of a batch.

    A call computes the outputs of a batch, differentiates the loss, clips, and updates parameters, buffers and the
    optimizer's state in place. What moves between two calls enters the graph as data: the batch, every tensor of the
    modules, the optimizer's state and its numbers such as `lr`. Random numbers come from torch's generator, in the
    order in which eager training draws them.

    What else Python holds when the graph is traced is fixed in it. So the loss of a new graph, and of the call after
    `look_again`, is compared with that of `compute`, and a step that has changed is refused.

    Args:
        compute: Returns `{"loss": …, …}` for a batch, from the tensors of the modules.
        modules: All modules whose tensors `compute` uses; the optimizer's parameters are among them.
        optimizer: `SGD`, `Adam` or `AdamW`.
        max_norm: Largest norm of all gradients together; 0 clips nothing.
        spaces: Names and attributes (`vars(it)`) of objects that `compute` must not change besides the modules: a graph
            would not do so again.

    Raises:
        CannotCompileError: The modules or the optimizer are of a kind that no graph can stand for.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = SGD(model.parameters(), lr=0.1)
        >>> step = WholeStep(lambda batch: {"loss": model(batch).square().mean()}, [model], optimizer)
        >>> step.num_graphs
        0
    """

    def __init__(
        self,
        compute: Compute,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        max_norm: float = 0.0,
        spaces: Sequence[Space] = (),
    ) -> None:
        self.optimizer = optimizer
        self._compute = compute
        self._max_norm = max_norm
        # One root for all modules, so that every tensor has one name.
        self._root = nn.ModuleList(modules)
        self._modules = list(self._root.modules())[1:]
        self._parameters = dict(self._root.named_parameters())
        self._spaces = [*((type(module).__name__, vars(module)) for module in self._modules), *spaces]
        _check_modules(self._modules, self._parameters)
        _check_optimizer(optimizer, self._parameters)
        self._rule = rule = _RULES[type(optimizer)]
        self._settings_of = itemgetter(*rule.settings)
        # Of the last call: the optimizer's settings but its rates, and which terms its updates have by them.
        self._settings: list[Any] = []
        self._terms: list[tuple[bool, ...]] = []
        self._grouped = [_ids(group["params"]) for group in optimizer.param_groups]
        self._graphs: dict[str, _Graph] = {}
        self._last: tuple[Any, _Graph] | None = None
        # Of the run: how often each form has come, which of them are computed by graphs, and the form before.
        self._seen: dict[str, int] = {}
        self._compiled: set[str] = set()
        self._previous = ""
        self._most_forms = _MOST_GRAPHS
        self._looks = True

    @property
    def num_graphs(self) -> int:
        """How many forms of batches have a graph."""
        return len(self._graphs)

    def begin(self, most_forms: int = _MOST_GRAPHS) -> None:
        """Begin another run: what is computed by a graph follows from its batches alone, not from runs before.

        Graphs that are there already are used where the run would have made them.

        Args:
            most_forms: How many forms of batches may be computed by graphs.
        """
        self._seen, self._compiled, self._previous, self._last = {}, set(), "", None
        self._most_forms = most_forms

    def adopt(self, modules: Sequence[nn.Module], optimizer: Optimizer) -> bool:
        """Go on with an optimizer, and return whether that works: its kind, modules and parameters are the same."""
        now = dict(self._root.named_parameters())
        if (
            type(optimizer) is not type(self.optimizer)
            or _ids(modules) != _ids(self._root)
            or list(now) != list(self._parameters)
            or _ids(now.values()) != _ids(self._parameters.values())
            or [_ids(group["params"]) for group in optimizer.param_groups] != self._grouped
        ):
            return False
        _check_optimizer(optimizer, self._parameters)
        self.optimizer = optimizer
        return True

    def find_again(self) -> bool:
        """Let graphs use the tensors that objects beside the modules hold now, where they held others at the trace.

        Graphs are forgotten for which such a tensor has another form now, or is held by none of those objects, so that
        which one it would be now is not known.

        Returns:
            Whether all graphs are kept.
        """
        number = len(self._graphs)
        self._graphs = {name: graph for name, graph in self._graphs.items() if graph.find_constants()}
        self._last = None
        return len(self._graphs) == number

    def look_again(self) -> None:
        """Compare the loss of the next call with that of `compute`, in which something may have changed."""
        self._looks = True

    def __call__(self, batch: Any) -> Outputs | None:
        """Make one update and return the outputs, detached; None for a batch whose form is not worth a graph yet.

        Raises:
            CannotCompileError: No graph can stand for this step, or what it computes has changed.
        """
        leaves, form = _described(batch)
        key = (form, self._state())
        if self._last is not None and key == self._last[0]:
            graph = self._last[1]
            self._previous = ""
        else:
            name = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
            if not self._is_worth_a_graph(name):
                return None
            if name not in self._graphs:
                self._graphs[name] = self._compile([batch], leaves)
                self._looks = True
                if len(self._graphs) > _MOST_KEPT:
                    del self._graphs[next(iter(self._graphs))]
            self._compiled.add(name)
            graph = self._graphs[name]
            self._last = (key, graph)
        self._bring_up_to_date(graph)
        if self._looks:
            self._looks = False
            return self._compared(graph, leaves, lambda: [self._expected(batch)], changes=False)[0]
        # Without `strict`, which costs time at every step.
        return dict(zip(graph.names, graph.run(leaves)), **graph.fixed)  # noqa: B905

    def several(self, batches: Sequence[Any]) -> list[Outputs] | None:
        """Make one update for each of some batches, all in one call of a graph, and return the outputs of each.

        The graph has as many steps as there are batches, and takes that much longer to compile.

        Returns:
            None, and nothing has happened, unless all batches have the form of the one that the last call was for: only
            a form whose single steps have proven to be a graph is worth a larger one.

        Raises:
            CannotCompileError: No graph can stand for these steps.
        """
        described = [_described(batch) for batch in batches]
        form = described[0][1]
        if self._looks or self._last is None or any(other != form for _, other in described):
            return None
        key, single = self._last
        if key != (form, self._state()):
            return None
        self._previous = ""
        leaves = [leaf for found, _ in described for leaf in found]
        graph = single.several.get(len(batches))
        if graph is not None:
            self._bring_up_to_date(graph)
            return graph.outputs(leaves)
        graph = self._compile(batches, leaves)
        for each in (graph, single):
            self._bring_up_to_date(each)
        outputs = self._compared(
            graph, leaves, lambda: [output for found, _ in described for output in single.outputs(found)], changes=True
        )
        single.several[len(batches)] = graph
        return outputs

    def state_dict(self) -> dict[str, Any]:
        """Return which forms have come how often: a resumed run is to compile what an uninterrupted one would."""
        return {"seen": dict(self._seen), "compiled": sorted(self._compiled), "previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._seen = {name: int(number) for name, number in state["seen"].items()}
        self._compiled, self._previous = set(state["compiled"]), state["previous"]

    # ------------------------------------------------------------------ private

    def _is_worth_a_graph(self, name: str) -> bool:
        previous, self._previous = self._previous, name
        is_first = not self._seen
        self._seen[name] = number = self._seen.get(name, 0) + 1
        if len(self._seen) > _MOST_FORMS:
            raise CannotCompileError(f"the batches come in more than {_MOST_FORMS} shapes")
        if name in self._compiled:
            return True
        return len(self._compiled) < self._most_forms and (is_first or name == previous or number >= _APPEARANCES)

    def _state(self) -> tuple[Any, ...]:
        """All but the batch that decides which graph stands for a step."""
        # Written for tiny steps, where every Python call counts: `map` and `operator` make none.
        groups = self.optimizer.param_groups
        settings = list(map(self._settings_of, groups))
        if settings != self._settings:
            self._settings, self._terms = settings, [self._rule.terms(group) for group in groups]
        return (
            self._terms,
            list(map(len, map(_PARAMS, groups))),
            list(map(_TRAINING, self._modules)),
            list(map(_REQUIRES_GRAD, self._parameters.values())),
        )

    def _bring_up_to_date(self, graph: _Graph) -> None:
        """Let a graph use the state and the numbers that the optimizer has now."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        if graph.bound is not optimizer.state or graph.num_bound != len(optimizer.state):
            graph.bind(optimizer)
        # A rate may be a tensor, which changes in place.
        settings = (list(map(float, map(_RATE, groups))), self._settings)
        if settings != graph.settings:
            graph.settings = settings
            graph.set_numbers([number for group in groups for number in self._rule.numbers(group)])

    def _compile(self, batches: Sequence[Any], leaves: list[Tensor]) -> _Graph:
        """Trace and compile one step after the other for batches like these."""
        optimizer, rule, terms = self.optimizer, self._rule, self._terms
        _check_optimizer(optimizer, self._parameters)
        buffers = dict(self._root.named_buffers())
        states = [
            (parameter, slot)
            for group, term in zip(optimizer.param_groups, terms, strict=True)
            for parameter in group["params"]
            for slot in rule.slots(term)
        ]
        hyper = torch.zeros(sum(len(rule.numbers(group)) for group in optimizer.param_groups), dtype=torch.float64)
        given: list[Tensor] = [
            *self._parameters.values(),
            *buffers.values(),
            *(_state_of(optimizer, parameter, slot) for parameter, slot in states),
            hyper,
        ]
        _check_memory(given)
        # Two inputs that are one tensor would be compiled as one input, which they need not be in the next batch.
        given += [_empty_like(it) for it in leaves]
        with self._unchanged():
            traced, names, fixed = self._traced(batches, list(buffers), states, given)
        constants = _lift_constants(traced)
        draws = _lift_draws(traced)
        places = [node for node in traced.graph.nodes if node.op == "placeholder"]
        is_used = [bool(node.users) for node in places]
        for node in places:
            if not node.users:
                traced.graph.erase_node(node)
        traced.recompile()
        drawn = [_empty_like(node.meta["val"]) for node in places[len(given) + len(constants) :]]
        # Of several steps the calls of kernels are compiled, too: from Python they take longer than a tiny kernel.
        in_one = len(batches) > 1 and all(it.device.type == "cpu" for it in given)
        call = _compiled(traced, list(compress([*given, *constants, *drawn], is_used)), in_one=in_one)
        used = iter(is_used)
        return _Graph(
            call,
            list(compress(self._parameters.values(), used)),
            [_place_of(self._root, name) for name in compress(buffers, used)],
            list(compress(states, used)),
            list(compress([hyper], used)),
            list(compress(range(len(leaves)), used)),
            kept := list(compress(constants, used)),
            draws,
            names,
            fixed,
            places=[self._place_of_constant(it) for it in kept],
        )

    def _place_of_constant(self, constant: Tensor) -> Callable[[], Any] | None:
        """Return what reads a tensor where it was found: an attribute, or an entry of one; None if it was not."""
        for _, space in self._spaces:
            for name, value in space.items():
                if value is constant:
                    return partial(getitem, space, name)
                entries = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_row(value) else ()
                for key, entry in entries:
                    if entry is constant:
                        return partial(_entry, space, name, key)
        return None

    def _traced(self, *step: Any) -> tuple[GraphModule, list[str], dict[str, Any]]:
        if any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in self._modules):
            # Inductor's code for images on a CPU is much faster where channels lie side by side.
            with suppress(_TraceError):
                return self._trace(_channels_last, *step)
            # A view of a feature map fails in that layout.
        return self._trace(lambda tensor: tensor, *step)

    def _trace(
        self,
        arrange: Callable[[Tensor], Tensor],
        batches: Sequence[Any],
        buffer_names: list[str],
        states: list[State],
        given: list[Tensor],
    ) -> tuple[GraphModule, list[str], dict[str, Any]]:
        """Return the graph of all steps, the names of a step's outputs, and those outputs that are no tensors."""
        # Imported here because it takes most of a second.
        from torch._subclasses import fake_tensor
        from torch.fx.experimental.proxy_tensor import make_fx

        names: list[str] = []
        fixed: dict[str, Any] = {}

        def steps(*inputs: Tensor) -> list[Tensor]:
            rest = iter(inputs)
            parameters = {parameter: next(rest) for parameter in self._parameters.values()}
            buffers = {name: next(rest) for name in buffer_names}
            state = {it: next(rest) for it in states}
            numbers = next(rest).unbind()
            leaves = map(arrange, rest)
            tensors: list[Tensor] = []
            for batch in batches:
                outputs = self._update(_with_tensors(batch, leaves), parameters, buffers, state, numbers)
                names[:] = [name for name, value in outputs.items() if isinstance(value, Tensor)]
                fixed.update((name, value) for name, value in outputs.items() if name not in names)
                tensors += [outputs[name].detach() for name in names]
            return tensors

        # Tensors that hold no data: nothing is computed, drawn or changed by a trace.
        mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(it.detach()) for it in given]
        try:
            with mode, torch.enable_grad():
                traced = make_fx(steps, _allow_non_fake_inputs=True)(*fakes)
        except CannotCompileError:
            raise
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            raise CannotCompileError("the step depends on the value of a tensor, by .item() or an if") from error
        except Exception as error:
            raise _TraceError(f"the step cannot be traced ({_first_line(error)})") from error
        for name, value in fixed.items():
            if not isinstance(value, (str, int, float, type(None))):
                raise CannotCompileError(f"the step returns a {type(value).__name__} as {name!r}")
        return traced, names, fixed

    def _update(
        self,
        batch: Any,
        parameters: Mapping[nn.Parameter, Tensor],
        buffers: Mapping[str, Tensor],
        state: Mapping[State, Tensor],
        numbers: Sequence[Tensor],
    ) -> Mapping[str, Any]:
        """Trace one step, which changes parameters, buffers and state in place, and return its outputs."""
        groups, rule, coming = self.optimizer.param_groups, self._rule, iter(numbers)
        leaves = {
            parameter: value.detach().requires_grad_(parameter.requires_grad) for parameter, value in parameters.items()
        }
        by_name = {name: leaves[parameter] for name, parameter in self._parameters.items()}
        swapped = {**by_name, **buffers}
        with _reparametrize_module(self._root, swapped, tie_weights=True):
            outputs = self._compute(batch)
        loss = _loss_of(outputs)
        trained = [it for group in groups for it in group["params"] if it.requires_grad]
        found = torch.autograd.grad(loss, [leaves[it] for it in trained], allow_unused=True)
        gradients = {it: gradient for it, gradient in zip(trained, found, strict=True) if gradient is not None}
        with torch.no_grad():
            # A module may replace a buffer where others write into it.
            for name, buffer in buffers.items():
                if swapped[name] is not buffer:
                    buffer.copy_(swapped[name])
            if self._max_norm:
                gradients = _clipped(gradients, self._max_norm)
            for group, term in zip(groups, self._terms, strict=True):
                own = [next(coming) for _ in rule.numbers(group)]
                for it in group["params"]:
                    if it in gradients:
                        slots = {slot: state[it, slot] for slot in rule.slots(term)}
                        rule.update(parameters[it], gradients[it], slots, own, term)
        return outputs

    def _expected(self, batch: Any) -> Mapping[str, Any]:
        """What `compute` returns for a batch; nothing changes."""
        copies = {name: value.clone() for name, value in self._root.named_buffers()}
        if not copies:
            return self._compute(batch)
        with _reparametrize_module(self._root, copies, tie_weights=True):
            return self._compute(batch)

    def _compared(
        self, graph: _Graph, leaves: list[Tensor], expect: Callable[[], Sequence[Mapping[str, Any]]], *, changes: bool
    ) -> list[Outputs]:
        """Run a graph and see that its losses are the expected ones; if not, put everything back.

        Args:
            graph: What is run.
            leaves: The tensors of its batches.
            expect: Returns the outputs that are due.
            changes: Whether it makes updates to that end.
        """
        # Python's and numpy's generators are not in it: a step that draws from them is no graph.
        randomness, written = _torch_generators(), graph.written()
        before = [value.detach().clone() for value in written]

        def put_back(*, weights: bool = True) -> None:
            for generator, state in randomness:
                generator.set_state(state)
            if weights:
                with torch.no_grad():
                    torch._foreach_copy_(written, before)

        expected = expect()
        put_back(weights=changes)
        try:
            outputs = graph.outputs(leaves)
        except Exception as error:
            cause = f"the graph of the step fails ({_first_line(error)})"
        else:
            if all(_agree(found, due, graph.fixed) for found, due in zip(outputs, expected, strict=True)):
                return outputs
            cause = "what the step computes changes from call to call, and not by its batch and weights alone"
        put_back()
        raise CannotCompileError(cause)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Refuse a trace that changes what it should only read, and put that back."""
        before = [
            (owner, space, {name: (it, _content(it)) for name, it in space.items()}) for owner, space in self._spaces
        ]
        dice = _dice()
        changed = []
        try:
            yield
        finally:
            for owner, space, old in before:
                changed += [f"{owner}.{name}" for name in _put_back(space, old)]
        if changed:
            raise CannotCompileError(f"the step changes {changed[0]}, which a graph would not do again")
        if dice != _dice():
            raise CannotCompileError("the step draws random numbers from Python or numpy, and not from torch")


@dataclass
class _Graph:
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
        several: Graphs of several such steps, by their number.
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
    several: dict[int, _Graph] = field(default_factory=dict)
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
            optimizer.state[parameter][slot] = _state_of(optimizer, parameter, slot)
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
        return True

    def set_numbers(self, numbers: list[float]) -> None:
        """Use these numbers of the optimizer from now on."""
        for hyper in self.hyper:
            # The array is a view of the tensor.
            hyper.numpy()[:] = numbers


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _entry(space: Mapping[str, Any], name: str, key: Any) -> Any:
    return space[name][key]


def _read(place: Callable[[], Any]) -> Any:
    try:
        return place()
    except (LookupError, TypeError):
        return None


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride(), tensor.requires_grad


def _torch_generators() -> list[tuple[torch.Generator, Tensor]]:
    """Torch's generators of all devices that are in use, with their states."""
    # There are none of CUDA before its first use.
    generators = (torch.default_generator, *torch.cuda.default_generators)
    return [(generator, generator.get_state()) for generator in generators]


_PARAMS, _RATE = itemgetter("params"), itemgetter("lr")
_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")
_LEAF = attrgetter("shape", "dtype", "device")


def _agree(outputs: Outputs, expected: Mapping[str, Any], fixed: Mapping[str, Any]) -> bool:
    """Whether a graph has computed what was expected, as far as a compiler and a machine have the same numbers."""
    loss, due = float(outputs["loss"]), float(expected["loss"].detach())
    is_near = math.isclose(loss, due, rel_tol=1e-3, abs_tol=1e-4) or not math.isfinite(due)
    return is_near and all(expected.get(name) == value for name, value in fixed.items())


# ------------------------------------------------------------------ the updates of optimizers


class _Rule(Protocol):
    """How an optimizer updates a parameter: its terms decide on the graph, its numbers are data of the graph."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of what terms and numbers are read from, besides `lr`."""

    def terms(self, group: Group) -> tuple[bool, ...]:
        """Return which terms the update has."""

    def numbers(self, group: Group) -> tuple[float, ...]:
        """Return what a schedule may move."""

    def slots(self, terms: tuple[bool, ...]) -> tuple[str, ...]:
        """Return the names of a parameter's state."""

    def update(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], numbers: Sequence[Tensor], terms: Any
    ) -> None:
        """Change a parameter and its state in place."""


class _SGDRule:
    """Stochastic gradient descent, with the momentum of torch: the first one is the gradient."""

    settings = ("momentum", "nesterov", "weight_decay", "maximize")

    def terms(self, group: Group) -> tuple[bool, ...]:
        return bool(group["momentum"]), group["nesterov"], bool(group["weight_decay"]), group["maximize"]

    def numbers(self, group: Group) -> tuple[float, ...]:
        return float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])

    def slots(self, terms: tuple[bool, ...]) -> tuple[str, ...]:
        return ("momentum_buffer",) if terms[0] else ()

    def update(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], numbers: Sequence[Tensor], terms: Any
    ) -> None:
        has_momentum, is_nesterov, decays, maximizes = terms
        rate, momentum, decay = numbers
        if maximizes:
            gradient = -gradient
        if decays:
            gradient = gradient + parameter * decay
        if has_momentum:
            average = state["momentum_buffer"].mul_(momentum).add_(gradient)
            gradient = gradient + average * momentum if is_nesterov else average
        parameter.sub_(gradient * rate)


class _AdamRule:
    """Adam, and AdamW, whose weight decay is decoupled from the gradient."""

    settings = ("betas", "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize")

    def terms(self, group: Group) -> tuple[bool, ...]:
        return bool(group["weight_decay"]), group["decoupled_weight_decay"], group["amsgrad"], group["maximize"]

    def numbers(self, group: Group) -> tuple[float, ...]:
        first, second = group["betas"]
        return float(group["lr"]), float(first), float(second), float(group["eps"]), float(group["weight_decay"])

    def slots(self, terms: tuple[bool, ...]) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if terms[2] else ()))

    def update(
        self, parameter: Tensor, gradient: Tensor, state: Mapping[str, Tensor], numbers: Sequence[Tensor], terms: Any
    ) -> None:
        decays, is_decoupled, is_amsgrad, maximizes = terms
        rate, first, second, epsilon, decay = numbers
        if maximizes:
            gradient = -gradient
        if decays and is_decoupled:
            parameter.mul_(1 - rate * decay)
        elif decays:
            gradient = gradient + parameter * decay
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.add_((gradient - mean) * (1 - first))
        square.mul_(second).add_(gradient * gradient * (1 - second))
        # In double precision, as Python computes them for torch: 1 - 0.999 has four good digits in single precision.
        step = state["step"].add_(1).double()
        root = (square if not is_amsgrad else _largest(state["max_exp_avg_sq"], square)).sqrt()
        denominator = root / (1 - second**step).sqrt() + epsilon
        parameter.sub_(mean / denominator * (rate / (1 - first**step)))


def _largest(largest: Tensor, square: Tensor) -> Tensor:
    return largest.copy_(torch.maximum(largest, square))


_RULES: dict[type[Optimizer], _Rule] = {SGD: _SGDRule(), Adam: _AdamRule(), AdamW: _AdamRule()}


def _state_of(optimizer: Optimizer, parameter: nn.Parameter, slot: str) -> Tensor:
    """Return a part of a parameter's state, as torch makes it before the first step if it is not there yet."""
    if parameter in optimizer.state and slot in optimizer.state[parameter]:
        known: Tensor = optimizer.state[parameter][slot]
        return known
    if slot != "step":
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)
    group = next(group for group in optimizer.param_groups if any(it is parameter for it in group["params"]))
    is_there = group["capturable"] or group["fused"]
    dtype = torch.float64 if torch.get_default_dtype() is torch.float64 and not group["fused"] else torch.float32
    return torch.zeros((), dtype=dtype, device=parameter.device if is_there else "cpu")


def _clipped(gradients: Mapping[nn.Parameter, Tensor], max_norm: float) -> dict[nn.Parameter, Tensor]:
    """Return gradients as `clip_grad_norm_` leaves them."""
    if not gradients:
        return {}
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(it) for it in gradients.values()]))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return {parameter: gradient * factor for parameter, gradient in gradients.items()}


# ------------------------------------------------------------------ batches and traces


def _described(batch: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of a batch, and all else that decides which graph it needs."""
    kind = type(batch)
    # Nearly every batch is a flat pair of tensors.
    if (kind is tuple or kind is list) and all(map(isinstance, batch, repeat(Tensor))):
        leaves, rest = list(batch), kind
    else:
        leaves, rest = _flattened(batch)
    return leaves, (rest, list(map(_LEAF, leaves)), list(map(Tensor.stride, leaves)))


def _flattened(batch: Any) -> tuple[list[Tensor], Any]:
    leaves, spec = pytree.tree_flatten(batch)
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
    for leaf in others:
        if not isinstance(leaf, (str, int, float, bool, type(None))):
            raise CannotCompileError(f"the batch holds an object of type {type(leaf).__name__}")
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], (str(spec), others)


def _with_tensors(batch: Any, tensors: Iterator[Tensor]) -> Any:
    return pytree.tree_map(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, batch)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim != 4 or tensor.device.type != "cpu" or not tensor.is_floating_point():
        return tensor
    if tensor.shape[1] == 1 and tensor.is_contiguous():
        # Of one channel both layouts are the same memory, and torch takes it for the other one.
        _, _, height, width = tensor.shape
        return tensor.as_strided(tensor.shape, (height * width, 1, width, 1))
    return tensor.contiguous(memory_format=torch.channels_last)


def _loss_of(outputs: Any) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.requires_grad:
        raise CannotCompileError("the step returns no loss that is one number and depends on the parameters")
    return loss


def _lift_constants(traced: GraphModule) -> list[Tensor]:
    """Make inputs of the tensors that a trace met outside of modules and batch: they are to stay who they are."""
    found: dict[str, tuple[Node, Tensor]] = {}
    for node in [node for node in traced.graph.nodes if node.op == "get_attr"]:
        value = getattr(traced, node.target)
        if value.requires_grad:
            raise CannotCompileError("the loss depends on a parameter that is not the model's")
        if node.target not in found:
            found[node.target] = (_new_input(traced, node.target, node), value)
        node.replace_all_uses_with(found[node.target][0])
        traced.graph.erase_node(node)
    return [value for _, value in found.values()]


def _lift_draws(traced: GraphModule) -> list[Callable[[], Tensor]]:
    """Make inputs of random numbers, and return what draws them: Inductor would draw them in an order of its own."""
    drawing = [node for node in traced.graph.nodes if torch.Tag.nondeterministic_seeded in _tags(node)]
    if len(drawing) == 1:
        return []
    draws: list[Callable[[], Tensor]] = []
    for number, node in enumerate(drawing):
        operation: Any = node.target
        tensors = [argument for argument in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(argument, Node)]
        name = operation._schema.name.partition("::")[2]
        if tensors and (len(tensors) > 1 or tensors[0] is not node.args[0] or name not in _DRAWN_BY_SHAPE):
            raise CannotCompileError(f"the step draws random numbers whose distribution it computes, by {name}")
        drawn = _new_input(traced, f"drawn_{number}", node)
        with traced.graph.inserting_before(node):
            if name.endswith("_"):
                new = traced.graph.call_function(torch.ops.aten.copy_.default, (node.args[0], drawn))
            else:
                # A copy, so that the step may write into it.
                new = traced.graph.call_function(torch.ops.aten.clone.default, (drawn,))
        node.replace_all_uses_with(new)
        traced.graph.erase_node(node)
        like = [_empty_like(tensor.meta["val"]) for tensor in tensors]
        draws.append(partial(operation, *like, *node.args[len(like) :], **node.kwargs))
    return draws


# What these draw depends on the shape of a tensor alone.
_DRAWN_BY_SHAPE = frozenset(
    {
        *("bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
        *("rand_like", "randn_like", "randint_like"),
    }
)


def _empty_like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same form in memory of its own, also for one that holds no data."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _new_input(traced: GraphModule, name: str, like: Node) -> Node:
    """Add an input behind the others."""
    last = [node for node in traced.graph.nodes if node.op == "placeholder"][-1]
    with traced.graph.inserting_after(last):
        made = traced.graph.placeholder(name)
    made.meta.update(like.meta)
    return made


def _tags(node: Node) -> Sequence[Any]:
    return node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()


def check_compiler() -> None:
    """Raise `CannotCompileError` where there is no compiler for the CPU."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise CannotCompileError("there is no C++ compiler, such as g++") from error


def _compiled(traced: GraphModule, inputs: list[Tensor], *, in_one: bool) -> Callable[..., Any]:
    """Compile a graph, without Dynamo; if it is to be in one piece, the calls of its kernels, too."""
    try:
        from torch._inductor import config, standalone_compile
    except ImportError as error:
        raise CannotCompileError("this version of torch cannot compile a graph by itself") from error
    check_compiler()
    try:
        # The generator's own numbers, for a graph that draws once.
        with torch.no_grad(), config.patch(fallback_random=True, cpp_wrapper=in_one), warnings.catch_warnings():
            # Torch warns of itself while it imports its compiler.
            warnings.simplefilter("ignore")
            return standalone_compile(traced, [*inputs], dynamic_shapes="from_example_inputs")
    except Exception as error:
        raise CannotCompileError(f"the compiler fails ({_first_line(error)})") from error


# ------------------------------------------------------------------ what no graph can stand for


def _check_modules(modules: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
    for module in modules:
        if isinstance(module, nn.RNNBase):
            # Its one operation is closed to Inductor, and unrolled it takes a minute to compile.
            raise CannotCompileError(f"the model has a recurrent layer, {type(module).__name__}")
        for name in _HOOKS:
            for hook in vars(module).get(name, {}).values():
                raise CannotCompileError(f"a {type(module).__name__} has the hook {_name_of(hook)}")
    if any(getattr(global_hooks, f"_global{name}", None) for name in _HOOKS):
        raise CannotCompileError("all modules have a global hook")
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            raise CannotCompileError(f"the parameter {name[2:]} is a {type(parameter).__name__}")
        if parameter.is_complex() or parameter.layout is not torch.strided:
            raise CannotCompileError(f"the parameter {name[2:]} is complex or sparse")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CannotCompileError(f"the parameter {name[2:]} has a hook on its gradient")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check_optimizer(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    known = set(_ids(parameters.values()))
    name = type(optimizer).__name__
    if type(optimizer) not in _RULES:
        raise CannotCompileError(f"the optimizer is {name}, and none of {', '.join(it.__name__ for it in _RULES)}")
    for group in optimizer.param_groups:
        if group.get("dampening"):
            raise CannotCompileError(f"the optimizer {name} has dampening")
        if group.get("differentiable"):
            raise CannotCompileError(f"the optimizer {name} is differentiable")
        settings = [group[setting] for setting in _RULES[type(optimizer)].settings]
        if any(isinstance(setting, Tensor) for setting in pytree.tree_leaves(settings)):
            raise CannotCompileError(f"the optimizer {name} has a tensor among its settings")
        if any(id(parameter) not in known for parameter in group["params"]):
            raise CannotCompileError(f"the optimizer {name} has a parameter that is not the model's")
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise CannotCompileError(f"the optimizer {name} has a hook on its steps")


def _check_memory(tensors: Sequence[Tensor]) -> None:
    addresses = [it.untyped_storage().data_ptr() for it in tensors if it.numel()]
    if len(set(addresses)) != len(addresses):
        raise CannotCompileError("two parameters or buffers share their memory")


def _ids(things: Iterable[Any]) -> list[int]:
    return [id(it) for it in things]


def _place_of(root: nn.Module, name: str) -> tuple[MutableMapping[str, Any], str]:
    path, _, last = name.rpartition(".")
    return root.get_submodule(path)._buffers, last


def _dice() -> tuple[Any, ...]:
    """The state of the generators that a trace would read as constants."""
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"]


def _content(value: Any) -> Any:
    """A copy of a list or a dictionary, which its owner could change; None for all else."""
    return value.copy() if isinstance(value, (list, dict)) else None


def _put_back(space: MutableMapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Undo changes by numbers, tensors and whatever holds some, and return their names."""
    changed = []
    for name, value in list(space.items()):
        earlier, content = old.get(name, (None, None))
        if value is earlier and content is not None and len(value) != len(content):
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        elif (
            value is earlier
            or not isinstance(value, (Tensor, int, float, str, list, dict, tuple))
            or (isinstance(value, (int, float, str)) and value == earlier)
        ):
            continue
        elif name in old:
            space[name] = earlier
        else:
            del space[name]
        changed.append(name)
    return changed


def _name_of(hook: Any) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
