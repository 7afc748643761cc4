"""The code that the five design documents print runs here, with the name of the package changed.

The documents are read from `shared/seeds` beside the checkout. Their own mistakes, and what they leave to the reader,
are listed here. The scripts, files and commands of document 004 are run by `tests/integration/test_seed_experiment.py`.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail import Epochs
from dovetail.compat import lernomatic
from dovetail.trainers import AbstractTrainerDecorator, DDPTrainer, SingleProcess, SingleProcessAMP, Trainer, basic
from dovetail.trainers import strategies as all_strategies
from dovetail.trainers.composable import ComposableTrainer
from dovetail.trainers.strategies import LossCriterionStrategy, ModelUpdateStrategy

SEEDS = Path(__file__).parents[2] / "shared" / "seeds"

pytestmark = pytest.mark.skipif(
    not SEEDS.is_dir(), reason="THE DESIGN DOCUMENTS ARE NOT BESIDE THE CHECKOUT, SO THEIR CODE IS NOT RUN"
)

PACKAGES = {"plato": "dovetail", "zae_engine.trainer": "dovetail.compat.zae_engine"}

# Parts that a block leaves to the reader, as text to replace or to add.
FIXES: dict[tuple[str, int], tuple[str, str]] = {
    ("000", 1): ("(...)", "(my_model)"),
    ("000", 2): ("(...)", "(my_model)"),
}
ADDED: dict[tuple[str, int], str] = {
    ("000", 0): "trainer = type('Own', (AbstractTrainerDecorator,), {'__init__': __init__})(Trainer(my_model))",
    ("000", 1): "trainer = ddp_trainer",
    ("000", 2): "trainer = ddp_trainer_with_amp",
    ("001", 10): "trainer = MyTrainer(model=my_model)",
    ("001", 11): "trainer.model = my_model",
    ("003", 0): "trainer = CustomTrainer(my_model, device, optimizer=optimizer, criterion='CrossEntropyLoss')",
}

# Blocks with a trainer, which must learn.
TRAINERS = [
    *(("000", place) for place in range(3)),
    *(("001", place) for place in (0, 1, 4, 5, 6, 10, 11, 13, 14)),
    *(("003", place) for place in range(2)),
]
# The others, and the test that covers each.
ELSEWHERE = {
    ("001", 2): "test_the_constructor_has_the_arguments_of_the_seed_document",
    ("001", 3): "tests/trainers/test_composable.py, the order of a run",
    ("001", 7): "test_the_federation_of_the_seed_document_learns",
    ("001", 8): "commands for plato's own test files",
    ("001", 9): "a command for plato's own example file",
    ("001", 12): "a comment without code",
    ("002", 0): "test_the_options_of_the_seed_document_are_attributes_with_its_defaults",
    **{("004", place): "tests/integration/test_seed_experiment.py" for place in range(6)},
}


def blocks() -> dict[tuple[str, int], str]:
    """Return the blocks of all documents, by the number of the document and their place in it."""
    found = {}
    for file in sorted(SEEDS.glob("*.txt")):
        texts = re.findall(r"^```\w*\n(.*?)^```", file.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        found.update({(file.name[:3], place): text for place, text in enumerate(texts)})
    return found


def prepared(key: tuple[str, int]) -> str:
    """Return a block with the package renamed and its gaps filled."""
    text = blocks()[key]
    for theirs, ours in PACKAGES.items():
        text = re.sub(rf"\b{re.escape(theirs)}\b", ours, text)
    if key in FIXES:
        assert FIXES[key][0] in text
        text = text.replace(*FIXES[key])
    return f"{text}\n{ADDED.get(key, '')}\n"


class MyLossStrategy(LossCriterionStrategy):
    def compute_loss(self, outputs: Any, labels: Any, context: Any) -> Any:
        return nn.functional.cross_entropy(outputs, labels)


class MyUpdateStrategy(ModelUpdateStrategy):
    """Every method of its kind may be left out."""


def run(key: tuple[str, int]) -> dict[str, Any]:
    """Run a block with what its text takes for granted."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    namespace: dict[str, Any] = {
        **{name: getattr(all_strategies, name) for name in all_strategies.__all__},
        "torch": torch,
        "basic": basic,
        "my_model": model,
        "model": model,
        "device": "cpu",
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, step_size=1),
        "MyCustomLoss": nn.CrossEntropyLoss,
        "MyLossStrategy": MyLossStrategy,
        "MyUpdateStrategy": MyUpdateStrategy,
        "Trainer": Trainer,
        "SingleProcess": SingleProcess,
        "SingleProcessAMP": SingleProcessAMP,
        "DDPTrainer": DDPTrainer,
        "ComposableTrainer": ComposableTrainer,
        "AbstractTrainerDecorator": AbstractTrainerDecorator,
    }
    exec(prepared(key), namespace)
    return namespace


def test_every_code_block_of_the_seed_documents_is_covered() -> None:
    assert blocks().keys() == {*TRAINERS, *ELSEWHERE}


@pytest.mark.parametrize("key", TRAINERS, ids=lambda key: f"{key[0]}-{key[1]}")
def test_a_trainer_of_the_seed_documents_learns(
    key: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = run(key)["trainer"]
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    data = x, (x.sum(dim=1) > 0).long()
    before = trainer.evaluate(data)["loss"]
    trainer.fit(data, data, max_length=Epochs(3))
    assert trainer.context.progress.epoch == 3
    assert trainer.evaluate(data)["loss"] < before


def test_the_constructor_has_the_arguments_of_the_seed_document() -> None:
    printed = ast.parse(prepared(("001", 2)).strip() + ": ...").body[0]
    assert isinstance(printed, ast.FunctionDef)
    ours = [*inspect.signature(ComposableTrainer.__init__).parameters]
    names = [argument.arg for argument in printed.args.args]
    assert ours[: len(names)] == names


def test_the_federation_of_the_seed_document_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    records = run(("001", 7))["server"].records
    assert records[-1].metrics["accuracy"] > records[0].metrics["accuracy"]


def test_the_options_of_the_seed_document_are_attributes_with_its_defaults() -> None:
    printed = dict(re.findall(r"kwargs\.pop\('(\w+)'\s*,\s*(.+?)\)", blocks()["002", 0]))
    assert len(printed) == 27
    trainer = lernomatic.Trainer(nn.Linear(2, 1))
    # Document 002: a batch size of 0 means the training batch size.
    expected = {**{name: ast.literal_eval(value) for name, value in printed.items()}, "test_batch_size": 64}
    assert {name: getattr(trainer, name) for name in printed} == expected
    for name in ("cur_epoch", "best_acc", "model"):
        assert hasattr(trainer, name), name
