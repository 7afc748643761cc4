"""Rules of the project that the source must keep: verbs, training loops, docstrings and lengths of files.

A rule is a function that returns the places that break it. Every place is either fixed or in the rule's table of
exceptions, with a reason; an exception that is no longer needed fails too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomllib

from dovetail.trainers import TrainingContext, base

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dovetail"
VERBS = base.Trainer.__abstractmethods__ | {"settle", "gather", "launcher"}

# Base classes of trainers: `Trainer` by itself, `Mounted` of capabilities and add-ons.
TRAINERS = {"Trainer", "Mounted"}

VERBS_THAT_CALL_VERBS = {
    "AutoBatch.train_step -> backward": "Every micro-batch but the last is differentiated inside of the step.",
    "Compiled.train_step -> num_batches": "One of many runs whose pass is one batch is not worth a graph.",
    "Compiled.train_step -> to_device": "One call of the graph takes several batches, so later ones are moved early.",
    "SingleProcessTrainer.batches -> num_batches": "Data without a length is read one batch ahead to find its end.",
    "DataParallel.batches -> num_batches": "A process with fewer batches than the others repeats its last one.",
    "ShardedDataParallel.batches -> predict_step": "A process without a batch takes part in the collective calls.",
    "ShardedDataParallel.batches -> test_step": "A process without a batch takes part in the collective calls.",
    "ShardedDataParallel.batches -> to_device": "A process without a batch takes part in the collective calls.",
    "TrialTrainer.val_epoch -> gather": "One process evaluates the whole data set and sends the metrics to the others.",
}

LOOPS_THAT_TRAIN = {
    "AutoBatch._all_parts": "Loops over the parts of one batch.",
    "AutoBatch._in_parts": "Loops over the parts of one batch.",
    "TrainingContext.step": "Loops over the optimizers of one batch.",
    "TwoPassStepStrategy.training_step": "Repeats the batches of the open window for each later group of parameters.",
}

# Functions that differentiate, clear or step without the context or a layer of the trainer in between.
DIRECT_CALLS = {
    "AutoBatch._all_parts": "Repeats the backward pass of a batch that did not fit into memory.",
    "AutoBatch._release_graph.differentiate": "Differentiates the graph that the returned loss stands for.",
    "SingleProcessTrainer.backward": "The verb.",
    "SingleProcessTrainer.optimizer_step": "The verb.",
    "Precision.step": "Called by the verb `optimizer_step`.",
    "PyTorchTrialContext.backward": "Calls the training context, which it gets from `_run`.",
    "_Gradients.on_gradients": "Compares the gradients of a trainer with those of plain torch.",
    "_Walk.rates": "Steps an optimizer without gradients to read its learning rates.",
    "clear_gradients": "What the loop calls to clear gradients.",
    "make_update": "Called by the verb `optimizer_step`.",
}

# The kernel does not know federations. Words of its files that name one all the same, by file.
FEDERATED_WORDS = {
    "trainers/context.py: ClientContext": "The object that a federation attaches; a context outside of one has it too.",
    "trainers/context.py: client": "The attribute that holds this object.",
    "trainers/context.py: client_id": "plato's name, which its users read.",
    "trainers/context.py: client_state": "The section of checkpoints that holds the state of this object.",
    "trainers/context.py: current_round": "plato's name, which its users read.",
    "trainers/context.py: round": "The attribute that `current_round` returns.",
    "trainers/launching.py: Client": "The standard library's end of a connection.",
    "trainers/saving.py: client_id": "plato's name, which the summary of a checkpoint holds.",
    "trainers/strategies/model_update.py: current_round": "plato's name, which its users read.",
    "trainers/strategies/model_update.py: round_number": "plato's name, which its users read.",
}
# The names of other libraries, which are no part of the kernel.
OTHER_LIBRARIES = {"trainers/other_libraries.py"}

# Files above 500 lines, without comments. A limit may only be lowered, and follows the length of its file.
MOST_LINES = 500
LONG_FILES = {
    "checkpoint/store.py": 517,
    "data/loader.py": 602,
    "federated/data/partition.py": 656,
    "pytorch/adapter.py": 605,
    "pytorch/context.py": 591,
    "search/runner.py": 685,
    "testing/strategies.py": 504,
    "trainers/capabilities/privacy.py": 551,
    "trainers/strategies/training_step.py": 566,
    "trainers/whole_step/step.py": 523,
}

# Modules of tests whose errors mypy ignores, in pyproject.toml.
UNCHECKED_TESTS = 67

Function = ast.FunctionDef | ast.AsyncFunctionDef
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def sources() -> Iterator[tuple[str, str]]:
    """Return the path below the package and the text of every module."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8")


@cache
def trees_by_path() -> dict[str, ast.Module]:
    return {path: ast.parse(text) for path, text in sources()}


def parsed(*, without: str = "") -> list[ast.Module]:
    return [tree for path, tree in trees_by_path().items() if path != without]


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, Function]]:
    """Return every function by its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{within}{node.name}"
            if isinstance(node, Function):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, within)


def body_of(function: Function) -> Iterator[ast.AST]:
    """Return every node of a function that is not in a function inside of it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Function):
            yield node
            waiting += ast.iter_child_nodes(node)


def last_name(expression: ast.AST) -> str:
    """Return the name that an expression ends with: `trainer` for `cast(Trainer, self.context.run.trainer)`."""
    match expression:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.Call(func=ast.Name(id="cast"), args=[_, value]):
            return last_name(value)
        case ast.Call(func=ast.Name(id="super")):
            return "super"
    return ""


# ------------------------------------------------------------------ no verb calls another verb


class Classes:
    """All classes of some modules by name, and which of them are trainers or parts of one."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.bases: dict[str, set[str]] = {}
        self.methods: dict[str, dict[str, Function]] = {}
        for each in found:
            # `Base[T]` has the name of `Base`.
            named = [base.value if isinstance(base, ast.Subscript) else base for base in each.bases]
            self.bases.setdefault(each.name, set()).update(map(last_name, named))
            own = {node.name: node for node in each.body if isinstance(node, Function)}
            self.methods.setdefault(each.name, {}).update(own)

    def ancestors(self, name: str) -> list[str]:
        """Return the class and all classes above it, the nearest first."""
        found = [name]
        for each in found:
            found += [above for above in sorted(self.bases.get(each, ())) if above not in found]
        return found

    def is_trainer(self, name: str) -> bool:
        return not TRAINERS.isdisjoint(self.ancestors(name))

    def method(self, owner: str, name: str) -> Function | None:
        for each in self.ancestors(owner):
            if name in self.methods.get(each, {}):
                return self.methods[each][name]
        return None


def verbs_that_call_verbs(trees: Iterable[ast.Module]) -> set[str]:
    """Return `Class.verb -> other` for every verb that uses another one, itself or by other methods of its class."""
    classes = Classes(trees)
    found = set()
    for owner in filter(classes.is_trainer, classes.methods):
        for verb in VERBS & classes.methods[owner].keys():
            reached, waiting = {verb}, [classes.methods[owner][verb]]
            while waiting:
                for node in ast.walk(waiting.pop()):
                    if not isinstance(node, ast.Attribute) or node.attr in reached:
                        continue
                    receiver = last_name(node.value)
                    if node.attr in VERBS and receiver in {"self", "super", "trainer"}:
                        found.add(f"{owner}.{verb} -> {node.attr}")
                    elif receiver == "self" and (method := classes.method(owner, node.attr)) is not None:
                        reached.add(node.attr)
                        waiting.append(method)
    return found


def test_no_verb_calls_another_verb() -> None:
    assert_only(verbs_that_call_verbs(parsed()), VERBS_THAT_CALL_VERBS)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("self.backward(loss)", {"Mine.train_step -> backward"}),
        ("super().backward(loss)", {"Mine.train_step -> backward"}),
        ("self.context.run.trainer.backward(loss)", {"Mine.train_step -> backward"}),
        ("cast(Any, self.context.run.trainer).backward(loss)", {"Mine.train_step -> backward"}),
        ("differentiate = self.backward", {"Mine.train_step -> backward"}),
        ("self._clip(batch)", {"Mine.train_step -> clip_gradients"}),
        ("self.inherited()", {"Mine.train_step -> settle"}),
        ("super().train_step(batch)", set()),
        ("self.context.backward(loss)", set()),
        ("self.model.state_dict()", set()),
    ],
)
def test_a_verb_that_calls_another_is_found(code: str, found: set[str]) -> None:
    tree = ast.parse(
        "class Above(base.Trainer):\n"
        "    def inherited(self): self.settle()\n"
        "class Mine(Above):\n"
        f"    def train_step(self, batch): {code}\n"
        "    def _clip(self, batch): self.clip_gradients(batch)\n"
        "class Reader:\n"
        "    def batches(self): self.state_dict()\n"
    )
    assert verbs_that_call_verbs([tree]) == found


# ------------------------------------------------------------------ nothing else loops over a training loader


def loops_that_train(trees: Iterable[ast.Module]) -> set[str]:
    """Return the functions with a loop that goes over training batches, or that computes steps of training."""
    return {
        name
        for tree in trees
        for name, function in functions(tree)
        if any(_trains(node) for node in body_of(function) if isinstance(node, LOOPS))
    }


def _trains(loop: ast.AST) -> bool:
    return any(
        last_name(call.func) in {"train_step", "backward", "optimizer_step", "zero_grad"} or _are_batches(call)
        for call in ast.walk(loop)
        if isinstance(call, ast.Call)
    )


def _are_batches(call: ast.Call) -> bool:
    """Return whether a call gives the batches of training; a stage that is not written out may be training."""
    match call:
        case ast.Call(func=ast.Attribute(attr="batches"), args=[stage]):
            return not isinstance(stage, ast.Constant) or stage.value == "train"
    return False


def direct_calls(trees: Iterable[ast.Module]) -> set[str]:
    """Return the functions that differentiate, clear or step past the context and the layers of the trainer."""
    return {
        name
        for tree in trees
        for name, function in functions(tree)
        if any(_is_direct(node) for node in body_of(function))
    }


def _is_direct(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="backward" | "zero_grad", value=value)):
            return last_name(value) not in {"context", "trainer", "super"}
        case ast.Call(func=ast.Attribute(attr="step", value=value)):
            return last_name(value) in {"optimizer", "scaler"}
    return False


def test_only_the_loop_loops_over_training_batches() -> None:
    assert_only(loops_that_train(parsed(without="trainers/loop.py")), LOOPS_THAT_TRAIN)


def test_only_the_verbs_call_backward_and_step() -> None:
    assert_only(direct_calls(parsed()), DIRECT_CALLS)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("for batch in trainer.batches('train'): seen.append(batch)", True),
        ("for batch in islice(trainer.batches(stage), 3): seen.append(batch)", True),
        ("for batch in loader: model(batch).backward()", True),
        ("for batch in loader: trainer.train_step(batch)", True),
        ("return [train_step(batch) for batch in loader]", True),
        ("while more(): optimizer.zero_grad()", True),
        ("for batch in trainer.batches('predict'): seen.append(batch)", False),
        ("for batch in loader: seen.append(batch)", False),
        ("loss.backward()", False),
    ],
)
def test_a_second_training_loop_is_found(code: str, found: bool) -> None:
    assert bool(loops_that_train([ast.parse(f"def train():\n    {code}")])) is found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("loss.backward()", True),
        ("model.zero_grad()", True),
        ("self.optimizer.step()", True),
        ("context.backward(loss)", False),
        ("self.context.step(optimizer)", False),
        ("super().backward(loss)", False),
        ("scheduler.step()", False),
    ],
)
def test_an_optimizer_step_outside_the_trainer_is_found(code: str, found: bool) -> None:
    assert bool(direct_calls([ast.parse(f"class Mine:\n    def compute(self):\n        {code}")])) is found


# ------------------------------------------------------------------ the kernel does not know federations


def federated_words(text: str) -> set[str]:
    """Return the words of code, comments and docstrings that name a client, a round, a fleet or a personal model."""
    found = set()
    for word, bracket in re.findall(r"([A-Za-z_]\w*)(\(?)", text):
        parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", word)]
        # Not the function `round`.
        is_named = any(re.fullmatch(r"clients?|rounds?|fleets?|federat.*|personal.*", part) for part in parts)
        if is_named and word + bracket != "round(":
            found.add(word)
    return found


def test_the_trainer_core_does_not_mention_federations() -> None:
    found = {
        f"{path}: {word}"
        for path, text in sources()
        if path.startswith("trainers/") and path not in OTHER_LIBRARIES
        for word in federated_words(text)
    }
    assert_only(found, FEDERATED_WORDS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("context.client.state", {"client"}),
        ("def begin_client(self): ...", {"begin_client"}),
        ("from dovetail.client import ClientContext", {"client", "ClientContext"}),
        ("# The clients of a round are a fleet.", {"clients", "round", "fleet"}),
        ("is_personal = personalizes(federated.fleet)", {"is_personal", "personalizes", "federated", "fleet"}),
        ("round(loss, 2)  # rounding, in the background of everything around it", set()),
    ],
)
def test_a_mention_of_federations_is_found(text: str, found: set[str]) -> None:
    assert federated_words(text) == found


# ------------------------------------------------------------------ lengths of files


def num_lines(text: str) -> int:
    """Return the lines that are not comments: a limit must not make anyone delete a reason."""
    return sum(not line.lstrip().startswith("#") for line in text.splitlines())


def wrong_lengths(lengths: Mapping[str, int], limits: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the lengths of files and their limits, one sentence for each file."""
    found = []
    for path in sorted({*lengths, *limits}):
        length = lengths.get(path, 0)
        if length <= MOST_LINES:
            if path in limits:
                found.append(f"{path}: has {length} lines; remove it from LONG_FILES")
        elif path not in limits:
            found.append(f"{path}: {length} lines; a file has at most {MOST_LINES}, divide it")
        elif length > limits[path]:
            found.append(f"{path}: {length} lines; its limit is {limits[path]} and may only be lowered")
        elif length < limits[path] - 20:
            found.append(f"{path}: {length} lines; lower its limit of {limits[path]} to that")
    return found


def test_limits_of_long_files_only_shrink() -> None:
    assert wrong_lengths({path: num_lines(text) for path, text in sources()}, LONG_FILES) == []


def test_a_file_that_grows_and_a_limit_that_is_too_high_are_found() -> None:
    limits = {"grown.py": 600, "shrunk.py": 600, "short.py": 600, "gone.py": 600, "right.py": 600}
    lengths = {"new.py": 501, "grown.py": 601, "shrunk.py": 579, "short.py": 500, "right.py": 580, "small.py": 500}
    assert [line.partition(":")[0] for line in wrong_lengths(lengths, limits)] == [
        "gone.py",
        "grown.py",
        "new.py",
        "short.py",
        "shrunk.py",
    ]


# ------------------------------------------------------------------ tests that mypy does not check yet


def test_the_list_of_unchecked_tests_only_shrinks() -> None:
    settings: Any = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    (modules,) = [each["module"] for each in settings["overrides"] if each.get("ignore_errors")]
    folders = [*settings["mypy_path"].split(":"), "."]
    paths = {
        name: [path for each in folders if (path := ROOT / each / f"{name.replace('.', '/')}.py").exists()]
        for name in modules
    }
    assert [name for name, found in paths.items() if not found] == [], "no such test; remove it from pyproject.toml"
    assert len(modules) <= UNCHECKED_TESTS, "the list may only shrink: fix the errors of the new module"
    assert len(modules) == UNCHECKED_TESTS, f"lower UNCHECKED_TESTS to {len(modules)}"


def assert_only(found: set[str], exceptions: Mapping[str, str]) -> None:
    """Compare what breaks a rule with its named exceptions."""
    assert sorted(found - exceptions.keys()) == [], "breaks the rule; see docs/architecture.md"
    assert sorted(exceptions.keys() - found) == [], "no longer needs its exception; remove it"


# ------------------------------------------------------------------ docstrings of methods


def undocumented_methods(trees: Iterable[ast.Module]) -> set[str]:
    """Return the public methods of public classes that have no docstring, neither their own nor an inherited one."""
    modules = list(trees)
    kinds = [(tree, node) for tree in modules for node in tree.body if isinstance(node, ast.ClassDef)]
    private = {kind.name for tree, kind in kinds if not is_public(tree, kind.name)}
    methods = [(kind.name, node) for _, kind in kinds for node in kind.body if isinstance(node, Function)]
    documented = {(kind, node.name) for kind, node in methods if ast.get_docstring(node)}
    classes = Classes(modules)
    return {
        f"{kind}.{node.name}"
        for kind, node in methods
        if kind not in private
        and not node.name.startswith("_")
        and not any((above, node.name) in documented for above in classes.ancestors(kind))
    }


def is_public(tree: ast.Module, name: str) -> bool:
    """Whether a name is in `__all__` or, in a module without that list, has no underscore."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and last_name(node.targets[0]) == "__all__":
            return name in ast.literal_eval(node.value)
    return not name.startswith("_")


def test_public_methods_have_docstrings_or_inherit_them() -> None:
    assert undocumented_methods(parsed()) == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("class A:\n    def go(self): pass", {"A.go"}),
        ("class A:\n    def go(self):\n        'Go.'", set()),
        ("class A:\n    def go(self):\n        'Go.'\nclass B(A[int]):\n    def go(self): pass", set()),
        ("class A:\n    def go(self):\n        'Go.'\nclass B(A):\n    def stop(self): pass", {"B.stop"}),
        ("class _A:\n    def go(self): pass\nclass B:\n    def _go(self): pass", set()),
    ],
)
def test_a_method_without_a_docstring_is_found(code: str, found: set[str]) -> None:
    assert undocumented_methods([ast.parse(code)]) == found


def test_the_context_has_at_most_20_public_names() -> None:
    names = [name for name in dir(TrainingContext) if not name.startswith("_")]
    assert len(names) <= 20, names
