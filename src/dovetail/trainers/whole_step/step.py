"""Training step as compiled graphs: which batches get a graph, its inputs, and a check of its results."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import compress
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim import Optimizer

from dovetail.trainers.whole_step.comparing import SHARP, has_changed, run_and_compare
from dovetail.trainers.whole_step.effects import compute_only, fill_caches
from dovetail.trainers.whole_step.gradients import GradientBuffers
from dovetail.trainers.whole_step.graph import Graph, Outputs, Shorter, State, buffer_place, constant_place
from dovetail.trainers.whole_step.limits import (
    CannotCompileError,
    Space,
    TraceError,
    check_memory,
    check_modules,
    check_optimizer,
    ids,
    reject_changes,
    undo_if_rejected,
)
from dovetail.trainers.whole_step.reuse import reuse_code, trace_key, with_code
from dovetail.trainers.whole_step.rules import checked_rule, clipped, state_of
from dovetail.trainers.whole_step.sharing import Code
from dovetail.trainers.whole_step.tracing import (
    Backend,
    channels_last,
    compiled,
    cut,
    describe_batch,
    drop_unused_inputs,
    empty_like,
    lift_constants,
    lift_draws,
    loss_of,
    naming_update,
    reject_recomputation,
    sizes_of,
    trace,
    uncompiled,
    with_tensors,
)

# A form that is not the first is compiled when it comes twice in a row, or this often in total: compiling takes
# seconds, and the last, shorter batch of every epoch costs less in eager mode.
_APPEARANCES = 8
_MOST_GRAPHS = 8
# The largest number of graphs that are kept between runs; the newest are kept.
_MOST_KEPT = 32
# If batches have more forms than this, none is worth a graph.
_MOST_FORMS = 64

Compute = Callable[[Any], Mapping[str, Any]]


class WholeStep:
    """A training step as one compiled graph for each form of a batch.

    A call computes the outputs of a batch, calls backward, clips, and updates parameters, buffers and the optimizer's
    state in place. Everything that changes between two calls is an input of the graph: the batch, every tensor of the
    modules, the optimizer's state and its numbers such as `lr`. Random numbers come from torch's generator, in the
    same order as in eager training.

    All other Python values are constants of the graph. So the loss of a new graph, and of the call after `recheck`,
    is compared with the loss of `compute`, and a step that has changed is rejected.

    Args:
        compute: Returns `{"loss": …, …}` for a batch, from the tensors of the modules.
        modules: All modules whose tensors `compute` uses; the optimizer's parameters are among them.
        optimizer: An optimizer of torch, except `LBFGS` and `SparseAdam`.
        max_norm: Largest norm of all gradients together; 0 means no clipping.
        spaces: Names and attributes (`vars(it)`) of objects besides the modules that `compute` must not change: a graph
            would not repeat the change.
        backend: `inductor` compiles; `eager` calls the operations of the traced graph one by one, to find out whether
            a difference comes from the trace or from the compiler.
        tolerance: The relative difference between the losses of compiled code and of `compute` that is due to rounding.
        describe: Returns all inputs of `compute` besides tensors, or None if they are unknown: those of the modules and
            of other parts, and a configuration. Steps with equal inputs share compiled code.

    Raises:
        CannotCompileError: A graph does not support the modules or the optimizer.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
        backend: Backend = "inductor",
        tolerance: float = SHARP,
        describe: Callable[[], Any] | None = None,
    ) -> None:
        self.optimizer = optimizer
        # The second one is called by the first comparison after `recheck`, which has called it for the same batch.
        self._describe = self._describe_now = with_code(describe)
        self._tolerance = tolerance
        self._backend = backend
        self._compute = compute
        self.max_norm = max_norm
        # One root for all modules, so that every tensor has one name.
        self._root = nn.ModuleList(modules)
        self._modules = list(self._root.modules())[1:]
        self._parameters = dict(self._root.named_parameters())
        self._spaces = [*((type(module).__name__, vars(module)) for module in self._modules), *spaces]
        self._check(optimizer)
        self._rule = rule = checked_rule(optimizer)
        self._settings_of = itemgetter(*rule.settings)
        # The optimizer's settings in the last call, without its rates, and the terms that its updates have.
        self._settings: list[Any] = []
        self._terms: list[tuple[bool, ...]] = []
        self._grouped = [ids(group["params"]) for group in optimizer.param_groups]
        self._graphs: dict[str, Graph] = {}
        self._last: tuple[Any, Graph] | None = None
        self._last_run: Graph | None = None
        # State of the run: how often each form has come, the forms that have graphs, and the previous form.
        self._seen: dict[str, int] = {}
        self._compiled: set[str] = set()
        self._previous, self._is_among_many = "", False
        # True if the next graph is compared with an eager step, unless this was done for equal inputs.
        self._is_unchecked = True
        self._read: Any = None
        # True if a graph of this run was replaced because the description of the step has changed.
        self._has_replaced = False
        # The outputs of an eager step for the batch whose form was compiled last, until they are compared.
        self._expected: Any = None

    @property
    def num_graphs(self) -> int:
        """The number of forms of batches that have a graph."""
        return len(self._graphs)

    @property
    def last_updated(self) -> list[nn.Parameter]:
        """The parameters whose state the last graph has changed."""
        return [] if self._last_run is None else self._last_run.updated

    def start_run(self, *, is_among_many: bool = False) -> None:
        """Start another run: its own batches decide what is compiled, not the runs before.

        Existing graphs are reused when the run would have compiled them.

        Args:
            is_among_many: True if many runs follow, each on little data, whose last batches have many
                lengths: full batches share one graph, and all shorter batches another one.
        """
        self._seen, self._compiled, self._previous, self._last = {}, set(), "", None
        self._is_among_many, self._has_replaced = is_among_many, False

    def adopt(self, modules: Sequence[nn.Module], optimizer: Optimizer) -> bool:
        """Continue with another optimizer, and return whether its kind, modules and parameters are the same.

        Raises:
            CannotCompileError: They have changed in a way that a graph does not support, such as a hook.
        """
        now = dict(self._root.named_parameters())
        if (
            type(optimizer) is not type(self.optimizer)
            or ids(modules) != ids(self._root)
            or list(now) != list(self._parameters)
            or ids(now.values()) != ids(self._parameters.values())
            or [ids(group["params"]) for group in optimizer.param_groups] != self._grouped
        ):
            return False
        self._check(optimizer)
        self.optimizer = optimizer
        return True

    def refresh_constants(self) -> bool:
        """Update the constants of all graphs: tensors that objects besides the modules hold.

        A graph is dropped if such a tensor has another form now, or if no known object holds it. It is also dropped if
        the step has changed, except in one of many runs, whose graph is compared with its step.

        Returns:
            Whether all graphs are kept.
        """
        before, describe = self._graphs, None if self._is_among_many else self._describe
        is_kept = {name: it.find_constants() and not has_changed(it, describe) for name, it in before.items()}
        self._graphs, self._last = {name: it for name, it in before.items() if is_kept[name]}, None
        return len(self._graphs) == len(before)

    def recheck(self, read: Any = None) -> None:
        """Compare the loss of the next call with the loss of `compute`, which may have changed.

        Args:
            read: All inputs of `compute` besides tensors: a graph that was compared with equal inputs is not compared
                again. None if they are unknown.
        """
        self._is_unchecked, self._read, self._describe_now = True, read, self._describe and cache(self._describe)
        # Once in a run, because compiling takes seconds: a validation may set an attribute for the first time.
        if not self._is_among_many and not self._has_replaced:
            old = [name for name, graph in self._graphs.items() if has_changed(graph, self._describe_now)]
            for name in old:
                del self._graphs[name]
            self._has_replaced, self._last = bool(old), None if old else self._last

    def __call__(self, batch: Any) -> Outputs | None:
        """Make one update and return the detached outputs; None for a batch whose form has no graph yet.

        Raises:
            CannotCompileError: The step cannot be compiled, or its computation has changed.
        """
        leaves, form = describe_batch(batch)
        key = form, self._state()
        if self._last is not None and key == self._last[0]:
            graph = self._last[1]
            self._previous = ""
        else:
            name = hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest()
            if not self._is_worth_a_graph(name):
                return self._shorter(batch, leaves, *key)
            if name not in self._graphs:
                with undo_if_rejected(self._spaces):
                    self._expected = fill_caches(self._compute, self._root, batch, leaves, self._spaces)
                    self._graphs[name] = self._compile([batch], leaves)
                self._is_unchecked, self._describe_now = True, self._describe
                if len(self._graphs) > _MOST_KEPT:
                    del self._graphs[next(iter(self._graphs))]
            self._compiled.add(name)
            graph = self._graphs[name]
            self._last = (key, graph)
        self._refresh(graph)
        if self._is_unchecked:
            self._is_unchecked = False
            if self._read is None or self._read != graph.read:
                (outputs,) = self._compare(graph, batch, leaves)
                graph.read = self._read
                return outputs
        return graph.output(leaves)

    def several(self, batches: Sequence[Any]) -> list[Outputs] | None:
        """Make one update for each of some batches in one call of a graph, and return the outputs of each.

        The graph contains one step per batch, and takes that much longer to compile.

        Returns:
            None, without any effect, unless all batches have the form of the last call's batch: a larger graph pays off
            only for a form whose single steps could be compiled.

        Raises:
            CannotCompileError: These steps cannot be compiled.
        """
        read = [describe_batch(batch) for batch in batches]
        form = read[0][1]
        if self._is_unchecked or self._last is None or any(other != form for _, other in read):
            return None
        key, single = self._last
        if key != (form, self._state()):
            return None
        self._previous = ""
        leaves = [leaf for found, _ in read for leaf in found]
        graph = single.several.get(len(batches))
        if graph is not None:
            self._refresh(graph)
            return graph.outputs(leaves)
        graph = self._compile(batches, leaves)
        for each in (graph, single):
            self._refresh(each)
        outputs = run_and_compare(
            graph,
            leaves,
            lambda: [output for found, _ in read for output in single.outputs(found)],
            self._tolerance,
            changes=True,
        )
        single.several[len(batches)] = graph
        return outputs

    def state_dict(self) -> dict[str, Any]:
        """Return how often each form has come, so that a resumed run compiles the same forms."""
        return {"seen": dict(self._seen), "compiled": sorted(self._compiled), "previous": self._previous}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self._seen = {name: int(number) for name, number in state["seen"].items()}
        self._compiled, self._previous = set(state["compiled"]), state["previous"]

    # ------------------------------------------------------------------ private

    def _check(self, optimizer: Optimizer) -> None:
        # `GradientBuffers` calls the hooks that wait for a gradient.
        check_modules(self._modules, self._parameters, calls_hooks=isinstance(optimizer, GradientBuffers))
        check_optimizer(optimizer, self._parameters)

    def _is_worth_a_graph(self, name: str) -> bool:
        previous, self._previous = self._previous, name
        is_first = not self._seen
        self._seen[name] = number = self._seen.get(name, 0) + 1
        if len(self._seen) > _MOST_FORMS:
            raise CannotCompileError(f"the batches come in more than {_MOST_FORMS} shapes")
        if name in self._compiled:
            return True
        most = 1 if self._is_among_many else _MOST_GRAPHS
        return len(self._compiled) < most and (is_first or name == previous or number >= _APPEARANCES)

    def _shorter(self, batch: Any, leaves: list[Tensor], form: Any, state: Any) -> Outputs | None:
        """Make the update of a batch with fewer samples than the last full one; None if no graph can."""
        if not self._is_among_many or self._last is None or self._last[0][1] != state:
            return None
        (full, _), single = self._last
        found = cut(form, full)
        if found is None:
            return None
        is_cut, size = found
        if single.shorter is None:
            single.shorter = self._compile_shorter(batch, leaves, full, is_cut)
        shorter, graph = single.shorter, single.shorter.graph
        if graph is None or is_cut != shorter.is_cut or size not in graph.sizes:
            return None
        self._refresh(graph)
        if shorter.is_proven:
            return graph.output(leaves)
        try:
            (outputs,) = self._compare(graph, batch, leaves)
        except CannotCompileError:
            single.shorter = Shorter(None)
            return None
        shorter.is_proven = True
        return outputs

    def _compile_shorter(self, batch: Any, leaves: list[Tensor], full: Any, is_cut: tuple[bool, ...]) -> Shorter:
        """Return a graph for all batches that are shorter than a full one."""
        most = next(shape[0] for (shape, *_), cuts in zip(full[1], is_cut, strict=True) if cuts) - 1
        # Always trace the longest size, so that the graph does not depend on which length comes first.
        shown = [
            torch.empty_strided((most, *it.shape[1:]), it.stride(), dtype=it.dtype, device=it.device) if cuts else it
            for it, cuts in zip(leaves, is_cut, strict=True)
        ]
        try:
            return Shorter(self._compile([batch], shown, is_cut), is_cut)
        except CannotCompileError:
            return Shorter(None)

    def _state(self) -> tuple[Any, ...]:
        """Return all values besides the batch that determine the graph of a step."""
        # Optimized for tiny steps, in which every Python call counts: `map` and `operator` make none.
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

    def _refresh(self, graph: Graph) -> None:
        """Update a graph to the current state and numbers of the optimizer."""
        self._last_run = graph
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        if graph.bound is not optimizer.state or graph.num_bound != len(optimizer.state):
            graph.bind(optimizer)
        # A rate may be a tensor that changes in place.
        settings = (list(map(float, map(_RATE, groups))), self._settings)
        if settings != graph.settings:
            graph.settings = settings
            graph.set_numbers([number for group in groups for number in self._rule.numbers(group)])

    def _compile(self, batches: Sequence[Any], leaves: list[Tensor], is_cut: Sequence[bool] = ()) -> Graph:
        """Trace and compile consecutive steps for batches of this form.

        Args:
            batches: One for every step.
            leaves: All their tensors.
            is_cut: For each tensor, True if it may have fewer samples; False for all by default.
        """
        optimizer, rule, terms = self.optimizer, self._rule, self._terms
        check_optimizer(optimizer, self._parameters)
        buffers = dict(self._root.named_buffers())
        states = [
            (parameter, slot)
            for group, term in zip(optimizer.param_groups, terms, strict=True)
            for parameter in group["params"]
            for slot in rule.slots(optimizer, parameter, term)
        ]
        hyper = torch.zeros(sum(len(rule.numbers(group)) for group in optimizer.param_groups), dtype=torch.float64)
        given: list[Tensor] = [
            *self._parameters.values(),
            *buffers.values(),
            *(state_of(optimizer, parameter, slot) for parameter, slot in states),
            hyper,
        ]
        check_memory(given)
        is_open = [False] * len(given) + (list(is_cut) or [False] * len(leaves))
        # If two inputs were one tensor here, they would be compiled as one input, but may differ in the next batch.
        given += [empty_like(it) for it in leaves]
        described = self._describe and self._describe()
        rest = (self.max_norm, self._state(), is_open, batches)
        key = trace_key(described, self._root, optimizer, states, given, rest)
        code = reuse_code(key, self._backend, lambda: self._make_code(given, is_open, batches, list(buffers), states))
        used = iter(code.is_used)
        return Graph(
            code.call,
            list(compress(self._parameters.values(), used)),
            [buffer_place(self._root, name) for name in compress(buffers, used)],
            list(compress(states, used)),
            list(compress([hyper], used)),
            list(compress(range(len(leaves)), used)),
            kept := list(compress(code.constants, used)),
            list(code.draws),
            list(code.names),
            dict(code.fixed),
            code.sizes,
            places=[constant_place(self._spaces, it) for it in kept],
            plain=code.plain,
            described=described,
        )

    def _make_code(self, given: list[Tensor], is_open: list[bool], *step: Any) -> Code:
        """Trace and compile consecutive steps; `step` are the other arguments of `_trace`, in its order."""
        with reject_changes(self._spaces):
            traced, names, fixed = self._traced(*step, given, is_open)
        constants = lift_constants(traced)
        draws = lift_draws(traced)
        places, is_used = drop_unused_inputs(traced)
        drawn = [empty_like(node.meta["val"]) for node in places[len(given) + len(constants) :]]
        # Compile the calls of kernels, too: from Python they take longer than a tiny kernel.
        in_one = all(it.device.type == "cpu" for it in given)
        inputs = list(compress([*given, *constants, *drawn], is_used))
        opened = is_open.index(True) if any(is_open) else None
        plain = None
        if self._backend == "eager":
            call, library = uncompiled(traced), None
        else:
            if self._tolerance > SHARP:
                # A copy, because compilers change a graph.
                plain = uncompiled(copy.deepcopy(traced))
            call, library = compiled(traced, inputs, in_one=in_one, is_open=opened is not None)
        sizes = frozenset() if opened is None else sizes_of(places[opened].meta["val"], len(given[opened]))
        found = tuple(names), tuple(fixed.items()), sizes, tuple(constants), library, plain
        return Code(call, tuple(is_used), tuple(draws), *found)

    def _traced(self, *step: Any) -> tuple[GraphModule, list[str], dict[str, Any]]:
        if any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in self._modules):
            # Inductor's code for images on a CPU is much faster with the channels last in memory.
            with suppress(TraceError):
                return self._trace(channels_last, *step)
            # Taking a view of a feature map fails in that layout.
        return self._trace(lambda tensor: tensor, *step)

    def _trace(
        self,
        arrange: Callable[[Tensor], Tensor],
        batches: Sequence[Any],
        buffer_names: list[str],
        states: list[State],
        given: list[Tensor],
        is_open: list[bool],
    ) -> tuple[GraphModule, list[str], dict[str, Any]]:
        """Return the graph of all steps, the names of a step's outputs, and the outputs that are not tensors."""
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
                outputs = self._update(with_tensors(batch, leaves), parameters, buffers, state, numbers)
                names[:] = [name for name, value in outputs.items() if isinstance(value, Tensor)]
                for name, value in outputs.items():
                    if not isinstance(value, (Tensor, str, int, float, type(None))):
                        raise CannotCompileError(f"the step returns a {type(value).__name__} as {name!r}")
                fixed.update((name, value) for name, value in outputs.items() if name not in names)
                tensors += [outputs[name].detach() for name in names]
            return tensors

        return trace(steps, given, is_open), names, fixed

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
        with _reparametrize_module(self._root, swapped, tie_weights=True), reject_recomputation():
            outputs = self._compute(batch)
        by_group = [[next(coming) for _ in rule.numbers(group)] for group in groups]
        loss = rule.weighted(loss_of(outputs), outputs, by_group[0], self._terms[0])
        trained = [it for group in groups for it in group["params"] if it.requires_grad]
        found = torch.autograd.grad(loss, [leaves[it] for it in trained], allow_unused=True)
        gradients = {it: gradient for it, gradient in zip(trained, found, strict=True) if gradient is not None}
        slots: dict[nn.Parameter, dict[str, Tensor]] = {it: {} for it in gradients}
        for (owner, slot), value in state.items():
            slots.setdefault(owner, {})[slot] = value
        with torch.no_grad():
            # Some modules replace a buffer, others write into it.
            for name, buffer in buffers.items():
                if swapped[name] is not buffer:
                    buffer.copy_(swapped[name])
            if self.max_norm:
                gradients = clipped(gradients, self.max_norm)
            for group, own, term in zip(groups, by_group, self._terms, strict=True):
                chosen = [it for it in group["params"] if it in gradients]
                tensors = [parameters[it] for it in chosen], [gradients[it] for it in chosen]
                with naming_update(self.optimizer):
                    rule.update(self.optimizer, group, *tensors, [slots[it] for it in chosen], own, term)
        return outputs

    def _compare(self, graph: Graph, batch: Any, leaves: list[Tensor]) -> list[Outputs]:
        """Make one update with a graph that is compared with `compute`."""
        tolerance = self._tolerance if self._backend == "inductor" else min(SHARP, self._tolerance)
        known, self._expected = self._expected, None
        describe, self._describe_now = self._describe_now, self._describe
        compute = partial(compute_only, self._compute, self._root, batch, leaves)
        return run_and_compare(graph, leaves, lambda: [known or compute()], tolerance, describe=describe)


_PARAMS, _RATE = itemgetter("params"), itemgetter("lr")
_TRAINING, _REQUIRES_GRAD = attrgetter("training"), attrgetter("requires_grad")
