"""Writing in the background keeps the promises of writing in the foreground."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from dovetail.checkpoint import AsyncWriter, CheckpointWarning, load
from dovetail.checkpoint.files import Files
from dovetail.errors import CheckpointError


class _Gate(Files):
    """Blocks a write until the test releases it."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def sync_directory(self, path: Path) -> None:
        self.reached.set()
        assert self.open.wait(120)
        super().sync_directory(path)


class _Broken(Files):
    def make_directory(self, path: Path) -> None:
        raise OSError(28, "No space left on device")


def test_the_written_state_is_the_one_at_submission(tmp_path: Path) -> None:
    gate = _Gate()
    tensor, counts = torch.ones(3), [1]
    with AsyncWriter(files=gate) as writer:
        writer.submit(tmp_path / "a", {"tensor": tensor, "tied": tensor, "counts": counts}, summary={"step": 1})
        assert gate.reached.wait(120)
        tensor.zero_()
        counts.append(2)
        gate.open.set()
    state = load(tmp_path / "a")
    assert torch.equal(state["tensor"], torch.ones(3))
    assert state["tied"] is state["tensor"]
    assert state["counts"] == [1]


def test_submitting_waits_for_the_previous_write(tmp_path: Path) -> None:
    with AsyncWriter() as writer:
        writer.submit(tmp_path / "a", {"a": 1})
        writer.submit(tmp_path / "b", {"b": 2})
        assert load(tmp_path / "a") == {"a": 1}
    assert load(tmp_path / "b") == {"b": 2}


def test_checking_the_writer_does_not_wait(tmp_path: Path) -> None:
    gate = _Gate()
    with AsyncWriter(files=gate) as writer:
        writer.submit(tmp_path / "a", {})
        assert gate.reached.wait(120)
        writer.check()
        assert not (tmp_path / "a").exists()
        gate.open.set()


@pytest.mark.parametrize("act", ["submit", "wait", "close"])
def test_a_failed_background_write_is_raised_by_the_next_call(tmp_path: Path, act: str) -> None:
    writer = AsyncWriter(files=_Broken())
    writer.submit(tmp_path / "a", {})
    with pytest.raises(CheckpointError, match=r"a: the checkpoint could not be written: .*No space left"):
        writer.submit(tmp_path / "b", {}) if act == "submit" else getattr(writer, act)()
    writer.close()


def test_checking_raises_the_error_of_a_finished_write(tmp_path: Path) -> None:
    writer = AsyncWriter(files=_Broken())
    writer.submit(tmp_path / "a", {})
    with pytest.raises(CheckpointError, match="No space left"):
        while True:
            writer.check()
    writer.close()


def test_a_failed_background_write_may_warn_instead(tmp_path: Path) -> None:
    writer = AsyncWriter(on_error="warn", files=_Broken())
    writer.submit(tmp_path / "a", {})
    with pytest.warns(CheckpointWarning, match="No space left"):
        writer.close()


def test_the_error_of_the_block_is_not_hidden_by_a_failed_write(tmp_path: Path) -> None:
    def fail() -> None:
        with AsyncWriter(files=_Broken()) as writer:
            writer.submit(tmp_path / "a", {})
            raise ZeroDivisionError

    with pytest.warns(CheckpointWarning, match="No space left"), pytest.raises(ZeroDivisionError):
        fail()


def test_state_that_cannot_be_stored_is_rejected_at_submission(tmp_path: Path) -> None:
    with AsyncWriter() as writer, pytest.raises(CheckpointError, match="a: cannot store"):
        writer.submit(tmp_path / "a", {"a": object()})
