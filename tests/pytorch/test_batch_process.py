from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from dovetail.core import METRICS, CheckpointContext, read_metrics
from dovetail.errors import ConfigError, DataError
from dovetail.info import VARIABLE, TrialInfo, write_info
from dovetail.pytorch.batch_process import TorchBatchProcessor, TorchBatchProcessorContext, torch_batch_process


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)


CALLS: list[Any] = []


class Recorder(TorchBatchProcessor):
    fails_at: int | None = None

    def __init__(self, context: TorchBatchProcessorContext) -> None:
        super().__init__(context)
        CALLS.append("made")

    def process_batch(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.fails_at:
            raise ArithmeticError("no luck")
        CALLS.append((batch_idx, batch.tolist(), torch.is_grad_enabled()))

    def on_checkpoint_start(self) -> None:
        CALLS.append("checkpoint")

    def on_finish(self) -> None:
        CALLS.append("finish")


class Failing(Recorder):
    """The same processor, as far as its progress is concerned, that fails."""

    __qualname__ = Recorder.__qualname__
    fails_at = 3


def calls(processor: type[TorchBatchProcessor] = Recorder, size: int = 7, **arguments: Any) -> list[Any]:
    CALLS.clear()
    samples: Any = torch.arange(size)
    torch_batch_process(processor, samples, **{"batch_size": 2, **arguments})
    return list(CALLS)


def after_an_error(processor: type[Recorder] = Failing, **arguments: Any) -> list[Any]:
    with pytest.raises(ArithmeticError):
        calls(processor, **arguments)
    return list(CALLS)


def batches(found: list[Any]) -> list[int]:
    return [call[0] for call in found if isinstance(call, tuple)]


# ------------------------------------------------------------------ the whole way


def test_hooks_are_called_in_order_and_batches_run_without_gradients() -> None:
    assert calls(checkpoint_interval=2) == [
        "made",
        (0, [0, 1], False),
        (1, [2, 3], False),
        "checkpoint",
        (2, [4, 5], False),
        (3, [6], False),
        "checkpoint",
        "finish",
    ]
    assert torch.is_grad_enabled()


def test_the_last_batches_are_checkpointed() -> None:
    assert calls(checkpoint_interval=3)[-3:] == [(3, [6], False), "checkpoint", "finish"]


def test_max_batches_ends_processing_early() -> None:
    assert batches(calls(max_batches=2)) == [0, 1]
    assert batches(calls(max_batches=99)) == [0, 1, 2, 3]


def test_the_default_batch_size_is_one_sample() -> None:
    assert batches(calls(size=3, batch_size=None)) == [0, 1, 2]
    assert batches(calls(size=7, batch_size=None, dataloader_kwargs={"batch_size": 3, "drop_last": True})) == [0, 1]


def test_other_arguments_are_passed_to_the_loader() -> None:
    found = calls(size=3, dataloader_kwargs={"collate_fn": lambda samples: torch.stack(samples) * 10})
    assert [call[1] for call in found if isinstance(call, tuple)] == [[0, 10], [20]]


def test_an_empty_dataset_finishes_at_once() -> None:
    assert calls(size=0) == ["made", "finish"]


def test_batch_processing_reports_progress() -> None:
    calls(checkpoint_interval=2)
    rows = read_metrics(Path("checkpoints", METRICS))
    assert [row["progress"] for row in rows] == [0.5, 1]


# ------------------------------------------------------------------ going on


def test_the_same_call_after_an_error_resumes_from_the_last_checkpoint() -> None:
    assert batches(after_an_error(checkpoint_interval=2)) == [0, 1, 2]
    assert batches(calls(checkpoint_interval=2)) == [2, 3]


def test_the_same_call_after_completion_starts_from_the_beginning() -> None:
    first = calls()
    assert CheckpointContext("checkpoints").latest() is None
    assert calls() == first


def test_duplicate_progress_left_by_a_kill_is_deleted() -> None:
    after_an_error(checkpoint_interval=2)
    (progress,) = [path for path in Path("checkpoints").iterdir() if path.is_dir()]
    shutil.copytree(progress, progress.with_name("another"))
    calls()
    assert batches(calls()) == [0, 1, 2, 3]


def test_an_error_before_any_checkpoint_restarts_from_the_beginning() -> None:
    after_an_error(checkpoint_interval=5)
    assert batches(calls()) == [0, 1, 2, 3]


def test_an_error_in_on_finish_repeats_no_batch() -> None:
    class Unfinished(Recorder):
        __qualname__ = Recorder.__qualname__

        def on_finish(self) -> None:
            raise ArithmeticError("no luck")

    after_an_error(Unfinished)
    assert calls() == ["made", "finish"]


def test_another_processor_has_separate_progress() -> None:
    class Other(Recorder):
        pass

    after_an_error(checkpoint_interval=2)
    assert batches(calls(Other)) == [0, 1, 2, 3]
    assert batches(calls()) == [2, 3]


@pytest.mark.parametrize("other", [{"size": 8}, {"batch_size": 3}])
def test_progress_with_another_batch_size_is_rejected(other: dict[str, Any]) -> None:
    after_an_error(checkpoint_interval=2)
    sentence = "has the progress of Recorder with 7 samples in batches of 2, not of Recorder with"
    with pytest.raises(ConfigError, match=sentence):
        calls(**other)


_KILLED = """
import os, signal, sys
import torch
from dovetail.pytorch.batch_process import TorchBatchProcessor, torch_batch_process

class Writer(TorchBatchProcessor):
    def __init__(self, context):
        super().__init__(context)
        self.total = context.wrap_reducer(sum, name="total")

    def process_batch(self, batch, batch_idx):
        if batch_idx == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        self.total.update(batch.sum())
        with open("seen.txt", "a") as file:
            file.write(f"{batch_idx}\\n")
        with self.context.upload_path() as path:
            (path / f"{batch_idx}.txt").write_text(str(batch.tolist()))

torch_batch_process(Writer, torch.arange(40), batch_size=2, checkpoint_interval=4)
"""


@pytest.mark.full_size
@pytest.mark.slow
def test_after_a_kill_every_batch_after_the_checkpoint_is_processed() -> None:
    script = Path("killed.py")
    script.write_text(_KILLED)
    codes = [forked.run(script, at, folder=Path.cwd()).returncode for at in (10, 15, 99)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    seen = [int(line) for line in Path("seen.txt").read_text().split()]
    assert seen == [*range(10), *range(8, 15), *range(12, 20)]
    (metrics,) = [row["metrics"] for row in read_metrics(Path("checkpoints", METRICS)) if "metrics" in row]
    assert metrics == {"total": sum(range(40))}
    (output,) = Path("checkpoints").glob("output-*")
    found = {int(path.stem): json.loads(path.read_text()) for path in (output / "rank_0").iterdir()}
    assert found == {index: [2 * index, 2 * index + 1] for index in range(20)}
    assert sorted(os.listdir("checkpoints")) == [METRICS, output.name]


# ------------------------------------------------------------------ what the context can do


def given(check: Any) -> None:
    class Once(TorchBatchProcessor):
        def process_batch(self, batch: Any, batch_idx: int) -> None:
            check(self.context, batch)

    torch_batch_process(Once, TensorDataset(torch.ones(2, 3)), batch_size=2, max_batches=7)


def test_a_model_is_moved_and_set_to_evaluation_mode() -> None:
    model = nn.Dropout(1.0)

    def check(context: TorchBatchProcessorContext, batch: Any) -> None:
        assert context.prepare_model_for_inference(model) is model
        (inputs,) = context.to_device(batch)
        assert inputs.device == context.device
        assert model(inputs).tolist() == [[1.0] * 3] * 2
        assert (context.max_batches, context.distributed.size) == (7, 1)

    given(check)
    assert not model.training


def test_metrics_and_tensorboard_have_documented_folders() -> None:
    def check(context: TorchBatchProcessorContext, batch: Any) -> None:
        context.report_metrics("mine", 3, {"loss": torch.tensor(0.5)})
        assert context.get_tensorboard_path() == Path("checkpoints/tensorboard")

    given(check)
    row = read_metrics(Path("checkpoints", METRICS))[0]
    assert (row["group"], row["steps_completed"], row["metrics"]) == ("mine", 3, {"loss": 0.5})


def test_uploaded_files_appear_when_their_block_ends_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    def check(context: TorchBatchProcessorContext, batch: Any) -> None:
        with context.upload_path() as path:
            (path / "deep").mkdir()
            (path / "deep" / "file").write_text("x")
            assert not (context.output_path / "deep").exists()
        with pytest.raises(ArithmeticError), context.upload_path() as path:
            (path / "half").write_text("x")
            raise ArithmeticError
        found = [str(it.relative_to(context.output_path)) for it in context.output_path.rglob("*") if it.is_file()]
        assert found == ["deep/file"]

    with caplog.at_level(logging.INFO, logger="dovetail.pytorch"):
        given(check)
    (output,) = Path("checkpoints").glob("output-*")
    assert caplog.messages == [f"the files of upload_path are in {output}"]


# ------------------------------------------------------------------ mistakes


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class WithoutLength(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Stream(), WithoutLength()])
def test_a_dataset_without_indices_or_length_is_rejected(dataset: Any) -> None:
    with pytest.raises(DataError, match=f"expected a dataset with indices and a length, got {type(dataset).__name__}"):
        torch_batch_process(Recorder, dataset)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"checkpoint_interval": 0}, "checkpoint_interval: expected a number of batches from 1 on, got 0"),
        ({"checkpoint_interval": math.nan}, "checkpoint_interval: expected a number of batches from 1 on, got nan"),
        ({"checkpoint_interval": 2.5}, "checkpoint_interval: expected a number of batches from 1 on, got 2.5"),
        ({"max_batches": 2.5}, "max_batches: expected a number of batches from 1 on, or None, got 2.5"),
        ({"max_batches": 0}, "max_batches: expected a number of batches from 1 on, or None, got 0"),
        ({"batch_size": 0}, "batch_size: expected a number of samples from 1 on, got 0"),
        ({"dataloader_kwargs": {"batch_size": 3}}, "batch_size: expected as an argument or in dataloader_kwargs"),
        ({"dataloader_kwargs": {"shuffle": True}}, "shuffle=True is not accepted"),
        ({"dataloader_kwargs": {"sampler": [1]}}, "'sampler' is not accepted: batches are processed"),
        ({"dataloader_kwargs": {"batch_sampler": [[1]]}}, "'batch_sampler' is not accepted"),
        ({"dataloader_kwargs": {"rank": 1}}, "'rank' is not accepted"),
    ],
)
def test_invalid_arguments_raise_before_any_work(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        calls(**arguments)
    assert CALLS == []


class Misspelled(Recorder):
    def on_finished(self) -> None:
        raise AssertionError("this is never called")

    on_finish = TorchBatchProcessor.on_finish


def test_a_misspelled_method_warns_before_the_first_batch() -> None:
    with pytest.warns(UserWarning, match=r"Misspelled\.on_finished is never called: did you mean on_finish\?"):
        calls(Misspelled)
    assert "finish" not in CALLS


def test_shuffle_may_be_given_as_false() -> None:
    assert batches(calls(dataloader_kwargs={"shuffle": False})) == [0, 1, 2, 3]


# ------------------------------------------------------------------ what the context knows


def test_the_context_provides_ranks_and_hyperparameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_info(tmp_path / "trial.json", TrialInfo(trial_id=1, hparams={"width": 3}, directory=str(tmp_path)))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "trial.json"))
    found: list[Any] = []

    class Asking(Recorder):
        def process_batch(self, batch: Any, batch_idx: int) -> None:
            context = self.context
            found.append((context.get_distributed_rank(), context.get_distributed_size(), context.get_hparams()))
            found.append(context.to_device({"x": batch.numpy()}))

    torch_batch_process(Asking, TensorDataset(torch.arange(2.0)), batch_size=2, dataloader_kwargs={"collate_fn": first})
    assert found[0] == (0, 1, {"width": 3})
    assert torch.equal(found[1]["x"], torch.arange(2.0))


def first(samples: Any) -> Any:
    return torch.stack([sample[0] for sample in samples])


def test_hyperparameters_without_a_launcher_are_rejected() -> None:
    class Asking(Recorder):
        def process_batch(self, batch: Any, batch_idx: int) -> None:
            self.context.get_hparams()

    with pytest.raises(ConfigError, match=r"get_hparams: .*this script was not launched as a trial"):
        torch_batch_process(Asking, torch.arange(2), batch_size=2)  # type: ignore[arg-type]  # a tensor is a dataset
