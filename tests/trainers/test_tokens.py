"""Lengths and periods in tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail import Batches, Epochs, Tokens
from dovetail.callbacks import Timer
from dovetail.errors import ConfigError
from dovetail.trainers import CompiledTrainer, Trainer

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(dim=1) > 0).long()


def step(trainer: Any, batch: Any) -> dict[str, Any]:
    inputs, targets = batch
    return {"loss": nn.functional.cross_entropy(trainer.model(inputs), targets), "num_tokens": (inputs > 0).sum()}


def make(**settings: Any) -> Trainer:
    torch.manual_seed(1)
    given = {"batch_size": 4, "train_step": step, "seed": 0, "verbose": False, **settings}
    return Trainer(nn.Linear(4, 2), "cpu", **given)


def test_training_ends_after_the_batch_that_reaches_the_tokens() -> None:
    counted: list[int] = []

    def counting(trainer: Any, batch: Any) -> dict[str, Any]:
        output = step(trainer, batch)
        counted.append(int(output["num_tokens"]))
        return output

    trainer = make(train_step=counting)
    trainer.fit((X, Y), max_length=Tokens(100))
    assert sum(counted) == trainer.context.progress.tokens >= 100 > sum(counted[:-1])


def test_validations_follow_a_period_in_tokens() -> None:
    trainer = make()
    history = trainer.fit((X, Y), (X, Y), max_length=Batches(8), validation_period=Tokens(20))
    counted = [0]

    def counting(trainer: Any, batch: Any) -> dict[str, Any]:
        output = step(trainer, batch)
        counted.append(counted[-1] + int(output["num_tokens"]))
        return output

    make(train_step=counting).fit((X, Y), max_length=Batches(8))
    due = [number for number in range(1, 9) if counted[number] // 20 > counted[number - 1] // 20]
    assert [row["batches"] for row in history if row["stage"] == "valid"] == sorted({*due, 8})


def test_tokens_are_counted_without_a_unit_that_needs_them() -> None:
    trainer = make()
    trainer.fit((X, Y), max_length=Epochs(2))
    assert trainer.context.progress.tokens == 2 * int((X > 0).sum())


def test_a_resumed_run_ends_at_the_same_token_with_the_same_weights(tmp_path: Path) -> None:
    whole = make()
    whole.fit((X, Y), max_length=Tokens(150))
    settings = {"checkpoint_dir": tmp_path, "save_every": 3}
    make(**settings).fit((X, Y), max_length=Tokens(60))
    resumed = make(**settings)
    resumed.fit((X, Y), max_length=Tokens(150), resume="auto")
    assert resumed.context.progress == whole.context.progress
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


def test_a_checkpoint_without_tokens_counts_from_zero() -> None:
    trainer = make()
    trainer.fit((X, Y), max_length=Batches(2))
    state = trainer.state_dict()
    del state["progress"]["tokens"]
    fresh = make()
    fresh.fit((X, Y), max_length=Batches(1))
    fresh.load_state_dict(state)
    assert (fresh.context.progress.batches, fresh.context.progress.tokens) == (2, 0)


def test_a_run_whose_steps_count_no_tokens_is_rejected_in_its_first_batch() -> None:
    trainer = Trainer(nn.Linear(4, 2), "cpu", batch_size=4, verbose=False)
    with pytest.raises(ConfigError, match=r"max_length: Tokens\(10\) is never reached.*return 'num_tokens'"):
        trainer.fit((X, Y), max_length=Tokens(10))


def test_a_schedule_over_the_run_rejects_a_length_in_tokens() -> None:
    trainer = make(lr_scheduler="cosine")
    with pytest.raises(ConfigError, match=r"any number of tokens and max_length is Tokens\(10\)"):
        trainer.fit((X, Y), max_length=Tokens(10))


def test_several_steps_per_call_end_at_the_same_token() -> None:
    plain, compiled = make(), CompiledTrainer(make(), steps_per_call=4, backend="eager")
    for trainer in (plain, compiled):
        trainer.fit((X, Y), max_length=Tokens(50))
    assert compiled.context.progress == plain.context.progress


def test_the_timer_counts_the_tokens_of_the_progress() -> None:
    timer = Timer(clock=iter([0.0, 2.0]).__next__)
    trainer = make(callbacks=[timer])
    trainer.fit((X, Y), max_length=Epochs(1))
    assert timer.tokens_per_second == int((X > 0).sum()) / 2
