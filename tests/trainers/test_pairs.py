"""Every pair of layers, in both orders: what happens is what the table in `docs/layers.md` says.

`python tests/trainers/test_pairs.py` rewrites the table.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem, make_problem

from dovetail import Epochs, Trainer
from dovetail.errors import ConfigError
from dovetail.trainers import (
    ActivationCheckpointTrainer,
    AMPTrainer,
    AutoBatchTrainer,
    CompiledTrainer,
    DDPTrainer,
    FSDPTrainer,
    PrivateTrainer,
    TimedTrainer,
)

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
MARK = "<!-- pairs -->\n"
LAYERS: list[Callable[[Any], Any]] = [
    partial(AMPTrainer, precision="bf16"),
    DDPTrainer,
    FSDPTrainer,
    # Without a compiler, to save time.
    partial(CompiledTrainer, backend="eager"),
    partial(PrivateTrainer, noise_seed=1),
    AutoBatchTrainer,
    TimedTrainer,
    partial(ActivationCheckpointTrainer, blocks=[torch.nn.Linear]),
]


def name(layer: Any) -> str:
    return str(getattr(layer, "func", layer).__name__)


def outcome(problem: Problem, outer: Callable[[Any], Any], inner: Callable[[Any], Any]) -> tuple[str, Any]:
    """What happens to a tiny run in one process, and its weights."""
    plain = Trainer(
        problem.model(), "cpu", optimizer=partial(torch.optim.SGD, lr=0.1), batch_size=8, seed=1, verbose=False
    )
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        try:
            trainer = outer(inner(plain))
            trainer.fit((problem.x, problem.y), max_length=Epochs(1))
        except ConfigError as error:
            return f"refused: {str(error).rpartition('cannot be combined: ')[2]}", None
    eager = [str(each.message) for each in messages if "without a graph" in str(each.message)]
    weights = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    return (f"works: {eager[0]}" if eager else "works"), weights


def row(problem: Problem, one: Callable[[Any], Any], other: Callable[[Any], Any]) -> str:
    (first, weights), (second, again) = outcome(problem, one, other), outcome(problem, other, one)
    if first != second:
        what = f"{name(one)} outside: {first}; {name(other)} outside: {second}"
    elif weights is None:
        what = first
    else:
        same = all(map(torch.equal, weights, again))
        what = f"{first}, with {'the same' if same else 'other'} bits in either order"
    return f"| `{name(one)}` | `{name(other)}` | {what} |"


def table(problem: Problem) -> list[str]:
    pairs = list(combinations(LAYERS, 2))
    return ["| layer | layer | what happens |", "|---|---|---|", *(row(problem, one, other) for one, other in pairs)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_pair_of_capabilities_behaves_as_in_the_table(problem: Problem) -> None:
    pytest.importorskip("opacus", reason="the extra 'privacy' is not installed")
    page = PAGE.read_text(encoding="utf-8")
    shown = page.partition(MARK)[2].strip().partition("\n\n")[0].splitlines()
    assert shown == table(problem)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    before, _, after = page.partition(MARK)
    if after.lstrip().startswith("| layer"):
        after = "\n" + after.strip().partition("\n\n")[2] + "\n"
    PAGE.write_text(f"{before}{MARK}\n" + "\n".join(table(make_problem())) + "\n" + after, encoding="utf-8")
    sys.exit(0)
