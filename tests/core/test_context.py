from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import forked
import pytest

from dovetail import core
from dovetail.core import METRICS, read_metrics
from dovetail.errors import InvalidHP
from dovetail.info import VARIABLE, TrialInfo, write_info

EXAMPLE = Path(__file__).parents[2] / "examples" / "core_api.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)


def launched_as(info: TrialInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    write_info("trial.json", info)
    monkeypatch.setenv(VARIABLE, "trial.json")


def places(context: core.Context) -> tuple[str, str]:
    return str(context.checkpoint.directory), str(context.train.directory)


def test_a_script_without_a_launcher_stores_everything_in_checkpoints(tmp_path: Path) -> None:
    with core.init() as context:
        assert places(context) == ("checkpoints", "checkpoints")
        assert context.info is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("info", "storage", "expected"),
    [
        (TrialInfo(1, directory="trial"), None, ("trial", "trial")),
        (TrialInfo(1, directory="trial"), "mine", ("mine", "trial")),
        (TrialInfo(1, config={"checkpoint_storage": {"host_path": "/h"}}), None, ("/h", "/h")),
        (TrialInfo(1), {"type": "directory", "container_path": "/c"}, ("/c", "/c")),
        (TrialInfo(1), None, ("checkpoints", "checkpoints")),
    ],
)
def test_script_arguments_override_the_launcher_which_overrides_the_file(
    monkeypatch: pytest.MonkeyPatch, info: TrialInfo, storage: object, expected: tuple[str, str]
) -> None:
    launched_as(info, monkeypatch)
    context = core.init(checkpoint_storage=storage)  # type: ignore[arg-type]  # as the cases have it
    assert places(context) == expected
    assert context.info == info


def test_signals_are_received_only_inside_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    context = core.init()
    assert signal.getsignal(signal.SIGTERM) is before
    with context:
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_invalid_hyperparameters_are_reported_and_raised() -> None:
    with pytest.raises(InvalidHP), core.init():
        raise InvalidHP("too deep")
    assert [row["exited"] for row in read_metrics(Path("checkpoints", METRICS))] == ["INVALID_HP"]


def test_an_alert_is_recorded_with_the_metrics() -> None:
    with core.init() as context:
        context.alert(title="slow", description="one batch took 90 s", level="warn")
    rows = read_metrics(Path("checkpoints", METRICS))
    assert [row["alert"] for row in rows] == [{"title": "slow", "description": "one batch took 90 s", "level": "warn"}]


def test_a_context_can_be_started_and_closed_without_a_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    context = core.init()
    context.start()
    assert signal.getsignal(signal.SIGTERM) is not before
    context.close()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("name", "instead"), [("searcher", "decides how long it trains"), ("profiler", "torch.profiler")]
)
def test_unsupported_names_of_determined_raise_a_one_sentence_error(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=f"the core context has no '{name}': .*{instead}"):
        getattr(core.init(), name)
    with pytest.raises(AttributeError, match=r"the core context has no 'trian'$"):
        core.init().trian  # noqa: B018


# ------------------------------------------------------------------ a script that is stopped and run again

# The example, waiting at its 160th step.
_WAITING = """
import os, runpy, sys
from dovetail.core import TrainContext
report = TrainContext.report_training_metrics
def report_and_wait(self, steps_completed, metrics):
    report(self, steps_completed, metrics)
    if steps_completed == 160:
        os.write(1, b".")
        os.read(0, 1)
TrainContext.report_training_metrics = report_and_wait
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(folder: Path) -> str:
    folder.mkdir(exist_ok=True)
    done = forked.run(EXAMPLE, folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def interrupt(folder: Path, number: signal.Signals) -> tuple[int, str, str]:
    """Send a signal to the example at its 160th step, and return its code and what it says."""
    folder.mkdir()
    script = folder / "waiting.py"
    script.write_text(_WAITING)
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with forked.start(script, EXAMPLE, folder=folder, **pipes) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.read(1) == b"."
            program.send_signal(number)
            output, errors = program.communicate(b"." if number != signal.SIGKILL else None)
        finally:
            program.kill()
    return program.returncode, output.decode(), errors.decode()


def last_rows(folder: Path) -> dict[tuple[str, int], object]:
    rows = read_metrics(folder / "runs" / "core_api" / METRICS)
    return {(row["group"], row["steps_completed"]): row["metrics"] for row in rows if "group" in row}


@pytest.mark.full_size
@pytest.mark.slow
def test_a_script_stopped_and_restarted_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed")
    assert undisturbed.startswith("result: held-out loss ")
    for number in (signal.SIGTERM, signal.SIGKILL):
        folder = tmp_path / number.name
        code, output, errors = interrupt(folder, number)
        if number == signal.SIGKILL:
            assert code == -signal.SIGKILL
        else:
            assert (code, output) == (0, "stopped after 160 steps; run me again to go on\n")
            assert errors.strip().startswith(f"{number.name}: exit requested")
            checkpoints = core.CheckpointContext(folder / "runs" / "core_api")
            latest = checkpoints.latest()
            assert latest is not None
            assert checkpoints.get_metadata(latest) == {"steps_completed": 160}
        assert run(folder) == undisturbed
        assert last_rows(folder) == last_rows(tmp_path / "undisturbed")
        assert [name for name in os.listdir(folder / "runs" / "core_api") if name.startswith(".")] == []
