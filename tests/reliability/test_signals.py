"""Ctrl-C and SIGTERM, sent to real processes: what they leave behind, what they say, and with which code they end.

A process under test reports that it has reached a batch and waits there, so that every signal arrives at a known place.
"""

from __future__ import annotations

import runpy
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pytest

from dovetail import checkpoint as store
from dovetail.callbacks import Callback
from dovetail.history import History

_HERE = Path(__file__).parent
_TRAINING = runpy.run_path(str(_HERE / "training.py"))
train, make_trainer = _TRAINING["train"], _TRAINING["make_trainer"]

pytestmark = [pytest.mark.full_size, pytest.mark.slow]

_PROGRAM = """
import os, sys
sys.path.append(sys.argv[2])
from pathlib import Path
from dovetail.callbacks import LambdaCallback
from dovetail.trainers import Trainer
from dovetail.trainers.addons import SignalHandlerAddon
from dovetail.units import Batches
from training import make_trainer

def wait(context, batch):
    if context.progress.batches == 4:
        os.write(1, b".")
        os.read(0, 1)

folder = Path(sys.argv[1])
{make}
trainer.context.callbacks.add(LambdaCallback(on_step_start=wait))
trainer.fit(validation_period=Batches(7){wishes})
print("this is never reached")
"""

_MAKE = "trainer = make_trainer(folder)"


class Program:
    """A training in a separate process, which waits inside its fifth batch, the second of an accumulation window."""

    def __init__(self, folder: Path, make: str = _MAKE, wishes: str = "") -> None:
        script = folder / "program.py"
        script.write_text(_PROGRAM.format(make=make, wishes=wishes))
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = forked.start(script, folder, _HERE, folder=folder, **pipes)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.errors = self.process.stderr
        assert self.process.stdout.read(1) == b"."

    def hear(self, text: str) -> None:
        """Wait until the program has said `text`."""
        while text not in (line := self.errors.readline().decode()):
            assert line, f"the program ended without saying {text!r}"

    def go_on(self) -> tuple[int, bytes, str]:
        """Let the program leave its batch; return its exit code and what it said on both channels since."""
        output, errors = self.process.communicate(b".")
        return self.process.returncode, output, errors.decode()


@contextmanager
def _program(folder: Path, **settings: str) -> Iterator[Program]:
    program = Program(folder, **settings)
    with program.process:
        try:
            yield program
        finally:
            program.process.kill()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    folder: Path = tmp_path_factory.mktemp("reference")
    train(folder)
    return folder


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_window_saves_and_prints_the_path(
    tmp_path: Path, reference: Path, number: signal.Signals, code: int
) -> None:
    checkpoints = tmp_path / "checkpoints"
    with _program(tmp_path) as program:
        program.process.send_signal(number)
        returned, output, errors = program.go_on()
    assert (returned, output) == (code, b"")
    announced, left = errors.strip().splitlines()
    assert announced.startswith(f"{number.name}: finishing the current update")
    assert left == (
        f"interrupted by {number.name} after 0 epochs and 6 batches: "
        f"the checkpoint is in {checkpoints}, and fit(resume='auto') continues from it"
    )
    assert [info.path.name for info in store.list_checkpoints(checkpoints)] == ["ck_epoch_0_iter_6"]
    store.verify(checkpoints / "ck_epoch_0_iter_6")
    train(tmp_path)
    for name in ("model.safetensors", "log.csv"):
        assert (tmp_path / name).read_bytes() == (reference / name).read_bytes()
    assert History.load(tmp_path / "history.jsonl") == History.load(reference / "history.jsonl")
    assert History.load(checkpoints / "ck_history.jsonl") == History.load(reference / "history.jsonl")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_a_step_that_hangs(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with _program(tmp_path) as program:
        program.process.send_signal(number)
        program.hear("finishing the current update")
        program.process.send_signal(number)
        assert program.process.wait() == code
        assert program.errors.read().decode() == f"\n{number.name} again: stopping at once\n"
    assert store.list_checkpoints(tmp_path / "checkpoints") == []


def test_without_a_folder_the_message_states_that_nothing_is_saved(tmp_path: Path) -> None:
    with _program(tmp_path, wishes=", checkpoint_period=Batches(0)") as program:
        program.process.send_signal(signal.SIGINT)
        code, _, errors = program.go_on()
    assert code == 130
    assert errors.strip().splitlines()[1:] == [
        "interrupted by SIGINT after 0 epochs and 6 batches: nothing is saved (no checkpoint_dir)"
    ]
    assert not (tmp_path / "checkpoints").exists()


def test_the_add_on_saves_to_its_folder_and_logs_it(tmp_path: Path) -> None:
    extended = "Trainer.add_on(SignalHandlerAddon)"
    places = "signal_save_path=folder / 'interrupted', signal_log_path=folder / 'log' / 'signals.txt'"
    with _program(tmp_path, make=f"trainer = make_trainer(folder, {extended}, {places})") as program:
        program.process.send_signal(signal.SIGTERM)
        code, _, errors = program.go_on()
    assert (code, "Traceback" in errors) == (143, False)
    assert store.load(tmp_path / "interrupted")["progress"]["batches"] == 6
    (line,) = (tmp_path / "log" / "signals.txt").read_text().splitlines()
    assert line.endswith(f"SIGTERM after 0 epochs and 6 batches: saved to {tmp_path / 'interrupted'}")


class _Raise(Callback):
    """Sends a signal to the own process in the middle of the fifth batch."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def on_step_end(self, context: Any, output: Mapping[str, Any]) -> None:
        if context.progress.batches == 5:
            signal.raise_signal(self.number)


def test_a_signal_handler_of_the_user_is_kept(tmp_path: Path, reference: Path) -> None:
    received: list[int] = []

    def own(number: int, frame: Any) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, own)
    try:
        train(tmp_path, further_callbacks=[_Raise(signal.SIGTERM)])
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert (tmp_path / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()


def test_previous_signal_handlers_are_restored_after_training(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, further_callbacks=[_Raise(signal.SIGINT)])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_training_in_another_thread_changes_no_handler(tmp_path: Path, reference: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    class Look(Callback):
        def on_step_start(self, context: Any, batch: Any) -> None:
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=train, args=(tmp_path,), kwargs={"further_callbacks": [Look()]})
    thread.start()
    thread.join()
    assert set(seen) == {before}
    assert (tmp_path / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()


def test_the_message_does_not_name_a_checkpoint_that_was_not_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "checkpoints" / "ck_epoch_0_iter_6" / "precious"
    in_the_way.mkdir(parents=True)
    options = {"on_save_error": "warn", "save_every": 100, "further_callbacks": [_Raise(signal.SIGINT)]}
    with pytest.warns(store.CheckpointWarning, match="so it is not replaced"), pytest.raises(KeyboardInterrupt):
        train(tmp_path, **options)
    assert capfd.readouterr().err.splitlines()[-1] == (
        "interrupted by SIGINT after 0 epochs and 6 batches: nothing is saved (the checkpoint could not be written)"
    )


def test_a_signal_saves_even_if_only_the_best_is_kept(tmp_path: Path, reference: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, save_every=0, further_callbacks=[_Raise(signal.SIGTERM)])
    assert store.latest(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "ck_epoch_0_iter_6"
    train(tmp_path, save_every=0)
    assert (tmp_path / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
