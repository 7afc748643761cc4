from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dovetail import Batches, Epochs
from dovetail.callbacks import Profiler
from dovetail.errors import ConfigError


def events(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]]


def test_a_profiler_cycle_is_written_as_a_trace(make: Callable[..., Any], tmp_path: Path) -> None:
    profiler = Profiler(tmp_path / "traces", wait=1, warmup=1, active=2)
    make(profiler).fit(max_length=Epochs(1))
    assert profiler.traces == [tmp_path / "traces" / "trace_1.json"]
    assert events(profiler.traces[0]).count("aten::tanh") == 2


def test_the_profiler_table_lists_the_operators_of_the_last_cycle(make: Callable[..., Any], tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, rows=5)
    assert profiler.table == ""
    make(profiler).fit(max_length=Epochs(1))
    assert "aten::" in profiler.table
    assert sum(line.lstrip().startswith("aten::") for line in profiler.table.splitlines()) <= 5


@pytest.mark.parametrize(("repeat", "expected"), [(1, 1), (2, 2), (0, 5)])
def test_profiler_cycles_repeat(make: Callable[..., Any], tmp_path: Path, repeat: int, expected: int) -> None:
    profiler = Profiler(tmp_path, wait=1, warmup=1, active=1, repeat=repeat)
    make(profiler).fit(max_length=Epochs(3))
    assert len(profiler.traces) == expected


def test_a_cycle_cut_short_by_the_end_of_training_is_written(make: Callable[..., Any], tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, active=100)
    make(profiler).fit(max_length=Epochs(1))
    # Five steps: one to wait, one to warm up, three to record.
    assert events(profiler.traces[0]).count("aten::tanh") == 3


def test_a_cycle_cut_short_by_an_error_is_written(make: Callable[..., Any], tmp_path: Path) -> None:
    class Fails(nn.Linear):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 4:
                raise RuntimeError("in the fourth step")
            return super().forward(inputs)

    profiler = Profiler(tmp_path, active=100)
    with pytest.raises(RuntimeError, match="in the fourth step"):
        make(profiler, model=Fails(3, 2).double()).fit(max_length=Epochs(1))
    assert len(profiler.traces) == 1
    assert "KINETO_LOG_LEVEL" not in os.environ


def test_the_profiler_prints_nothing(
    make: Callable[..., Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make(Profiler(tmp_path, repeat=2, active=1)).fit(max_length=Epochs(2))
    assert capfd.readouterr() == ("", "")


def test_the_profiler_does_not_change_training(make: Callable[..., Any], tmp_path: Path) -> None:
    plain, profiled = make(), make(Profiler(tmp_path))
    plain.fit(max_length=Epochs(2))
    profiled.fit(max_length=Epochs(2))
    assert list(profiled.history.losses) == list(plain.history.losses)


def test_a_second_fit_adds_traces(make: Callable[..., Any], tmp_path: Path) -> None:
    profiler = Profiler(tmp_path)
    trainer = make(profiler)
    trainer.fit(max_length=Epochs(1))
    trainer.fit(max_length=Epochs(2))
    assert [trace.name for trace in profiler.traces] == ["trace_1.json", "trace_2.json"]
    assert all(trace.exists() for trace in profiler.traces)


def test_the_profiler_has_no_state() -> None:
    assert Profiler("traces").state_dict() == {}


def test_a_run_without_a_recorded_step_warns(make: Callable[..., Any], tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, wait=5, warmup=1)
    sentence = "Profiler: nothing was recorded: it waits for 5 steps and warms up in 1, and the run had 5 steps"
    with pytest.warns(UserWarning, match=sentence):
        make(profiler).fit(max_length=Epochs(1))
    assert profiler.traces == []


def test_a_continued_run_of_few_steps_does_not_warn(make: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make(profiler := Profiler(tmp_path))
    trainer.fit(max_length=Epochs(1))
    trainer.fit(max_length=Batches(6))
    assert len(profiler.traces) == 1


@pytest.mark.parametrize("mistake", [{"active": 0}, {"wait": -1}, {"warmup": 1.5}, {"repeat": True}, {"rows": 2.5}])
def test_the_profiler_rejects_invalid_arguments_by_name(mistake: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"Profiler: {next(iter(mistake))}: expected a whole number that is at least"):
        Profiler("traces", **mistake)
