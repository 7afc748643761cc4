"""Checkpoints with valid checksums and invalid values."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from problem import Problem
from torch import nn

from dovetail import Batches, Epochs, Trainer
from dovetail import checkpoint as store
from dovetail.callbacks import EMA, Callback, CSVLogger, EarlyStopping, GradientClipping, ReduceOnPlateau, Timer
from dovetail.errors import CheckpointError
from dovetail.trainers.decorators import AMPTrainer

_FORGERIES = 1500 if os.environ.get("DOVETAIL_TORTURE") == "1" else 80
_REMOVED = object()
_VALUES = [
    *(None, "x", b"x", -1, 1 << 70, 1e308, float("nan"), True),
    *([], {}, (), [None], ["x"], [[1, 2]], {"a": 1}, {1: 2}),
    *(torch.ones(2), torch.ones(2, dtype=torch.uint8), _REMOVED),
]
_Keys = tuple[Any, ...]


def trainer(folder: Path) -> Trainer:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))
    return Trainer(
        model,
        batch_size=8,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        callbacks=[
            EMA(),
            EarlyStopping("train_loss", patience=50),
            GradientClipping(1.0),
            Timer(),
            ReduceOnPlateau("train_loss"),
            CSVLogger(folder / "log.csv"),
        ],
        checkpoint_dir=folder / "runs",
        verbose=False,
    )


@pytest.fixture
def state(tmp_path: Path) -> dict[str, Any]:
    """The state of a trainer in the middle of its second epoch."""
    x = torch.randn(24, 4)
    whole = trainer(tmp_path)
    whole.fit((x, (x.sum(dim=1) > 0).long()), max_length=Batches(5))
    return store.load(whole.save_checkpoint(tmp_path / "ck"))


def _places(value: Any, keys: _Keys = ()) -> Iterator[_Keys]:
    """Yield the keys of everything in a state; of long lists, the first four items."""
    if keys:
        yield keys
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value[:4] if isinstance(value, (list, tuple)) else ())
    )
    for key, item in inner:
        yield from _places(item, (*keys, key))


def _replaced(value: Any, keys: _Keys, new: Any) -> Any:
    if not keys:
        return new
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    items[keys[0]] = _replaced(items[keys[0]], keys[1:], new)
    if items[keys[0]] is _REMOVED:
        del items[keys[0]]
    return items if isinstance(value, dict) else type(value)(items.values())


# Names of callbacks that the trainer lacks, and rows of a log that are gone, are warned about.
@pytest.mark.full_size
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_any_forged_state_is_restored_or_rejected_in_one_sentence(tmp_path: Path, state: dict[str, Any]) -> None:
    chance, places = random.Random(0), list(_places(state))
    num_refused = 0
    for _ in range(_FORGERIES):
        keys, value = chance.choice(places), chance.choice(_VALUES)
        path = store.save(tmp_path / "forged", _replaced(state, keys, value))
        try:
            trainer(tmp_path).load_checkpoint(path)
        except CheckpointError as error:
            num_refused += 1
            message = str(error)
            assert message.startswith(f"{path}/state.json: "), (keys, value)
            # The sentence names the section, at least.
            assert re.search(rf"\b{keys[0]}\b|does not fit the trainer", message), (keys, value, message)
            assert "\n" not in message
    assert num_refused > _FORGERIES / 2


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("progress", "epoch"), "x", r"progress\.epoch: .* expected a number, got a str"),
        (("progress", "epoch"), -1, "progress: .* epoch: expected a number from 0"),
        (("run_id",), _REMOVED, "run_id: the state cannot be restored: it lacks 'run_id'"),
        (("optimizers", 0, "param_groups", 0, "lr"), [], r"optimizers\.0\.param_groups\.0\.lr: .* expected a number"),
        (
            ("optimizers", 0, "state", 1, "exp_avg"),
            torch.ones(7),
            r"optimizers\.0\.state\.1\.exp_avg: .* expected a tensor of shape \(3,\), got a tensor of shape \(7,\)",
        ),
        (("optimizers", 0, "state", 1, "exp_avg"), _REMOVED, r"optimizers\.0\.state\.1: .* it lacks 'exp_avg'"),
        (("schedulers", 0, "scheduler", "step_size"), [], r"schedulers\.0\.scheduler\.step_size: .* expected a number"),
        (("callbacks", 1, "state", "num_worse"), "x", r"callbacks\.EarlyStopping\.num_worse: .* expected a number"),
        (("model", "0.bias"), "x", "'0.bias' is a str in it and a tensor of shape"),
        (("epoch_start",), {}, "epoch_start: .* it lacks 'rng'"),
        (("epoch_start", "share", 0), [None], "epoch_start: .* share: expected two numbers"),
        (("history", "rows", 0), {"loss": 1.0}, "history: .* expected a row with a 'stage'"),
        (("rng", "torch"), torch.ones(2), "rng: .*"),
    ],
)
def test_the_state_error_names_the_key(
    tmp_path: Path, state: dict[str, Any], keys: _Keys, value: Any, sentence: str
) -> None:
    path = store.save(tmp_path / "forged", _replaced(state, keys, value))
    with pytest.raises(CheckpointError, match=rf"forged/state\.json: .*{sentence}"):
        trainer(tmp_path).load_checkpoint(path)


def test_the_state_error_names_the_section_of_a_layer(problem: Problem, tmp_path: Path) -> None:
    def layered() -> Any:
        return AMPTrainer(Trainer(problem.model(), verbose=False), precision="fp16")

    path = layered().save_checkpoint(tmp_path / "ck")
    store.save(path, {**store.load(path), "mixed_precision": {"scale": []}})
    with pytest.raises(CheckpointError, match=r"ck/state\.json: mixed_precision: the state cannot be restored"):
        layered().load_checkpoint(path)


class _Strict(Callback):
    """A user's callback that does not like its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"secret": 1}

    def load_state_dict(self, state: Any) -> None:
        raise LookupError("not mine")


class _Participant(_Strict):
    pass


@pytest.mark.parametrize("register", [False, True])
def test_an_error_in_user_code_keeps_its_type_and_gets_a_note(problem: Problem, tmp_path: Path, register: bool) -> None:
    def make() -> Trainer:
        made = Trainer(problem.model(), verbose=False, callbacks=[] if register else [_Strict()])
        if register:
            made.context.run.register("mine", _Participant())
        return made

    path = make().save_checkpoint(tmp_path / "ck")
    with pytest.raises(LookupError, match="not mine") as caught:
        make().load_checkpoint(path)
    key = "participants.mine" if register else "callbacks._Strict"
    assert any(key in note for note in caught.value.__notes__)
    assert any(str(path) in note for note in caught.value.__notes__)


def test_a_state_of_the_same_structure_fits_other_settings(tmp_path: Path, state: dict[str, Any]) -> None:
    """Settings that torch saves as None, a number or a tensor may be another of these."""
    changes: list[tuple[_Keys, Any]] = [
        (("optimizers", 0, "param_groups", 0, "lr"), torch.tensor(0.5)),
        (("optimizers", 0, "param_groups", 0, "foreach"), True),
        (("optimizers", 0, "param_groups", 0, "amsgrad"), None),
        (("saver", "best"), None),
        (("used",), _REMOVED),
    ]
    for keys, value in changes:
        path = store.save(tmp_path / "forged", _replaced(state, keys, value))
        trainer(tmp_path).load_checkpoint(path)


# Names of callbacks that the trainer lacks, and rows of a log that are gone, are warned about.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trainer_restored_from_a_forged_state_trains(tmp_path: Path, state: dict[str, Any]) -> None:
    chance = random.Random(1)
    places = [
        keys for keys in _places(state) if keys[0] in ("meter", "saver", "validated_at", "callbacks", "schedulers")
    ]
    x = torch.randn(24, 4)
    data = x, (x.sum(dim=1) > 0).long()
    for _ in range(30):
        path = store.save(
            tmp_path / "forged", _replaced(state, chance.choice(places), chance.choice(["x", [], None, b""]))
        )
        resumed = trainer(tmp_path)
        try:
            resumed.load_checkpoint(path)
        except CheckpointError:
            continue
        resumed.fit(data, max_length=Epochs(2))
