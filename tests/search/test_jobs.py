"""Jobs."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail.errors import CheckpointError, ConfigError
from dovetail.search.jobs import run_job
from dovetail.search.processes import LocalBackend
from dovetail.search.store import Store

Until = Callable[[Callable[[], bool]], None]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    return tmp_path


def _run(place: Path, script: str, text: str = "", **options: Any) -> Any:
    (place / "code" / "job.py").write_text(script)
    (place / "infer.yaml").write_text(f"entrypoint_script: python3 job.py\n{text}")
    return run_job(Store.open(place / "home"), place / "infer.yaml", place / "code", **options)


@pytest.fixture
def start(place: Path, forked: Callable[..., Any]) -> Callable[[str], tuple[Any, Path]]:
    """A function that runs a job in another process, and returns that and where the job works."""

    def begin(script: str) -> tuple[Any, Path]:
        (place / "code" / "job.py").write_text(script)
        (place / "infer.yaml").write_text("entrypoint: python3 job.py\n")
        process = forked(place / "home", place / "infer.yaml", place / "code")
        return process, place / "home" / "jobs" / "1" / "code"

    return begin


def test_a_job_receives_its_data_and_its_output_is_stored(place: Path) -> None:
    script = "import json, os; print(json.dumps(json.load(open(os.environ['DOVETAIL_TRIAL']))))"
    job = _run(place, script, "data: {trial_id: 777, batch_size: 64}\nresources: {slots: 1}\n")
    assert (job.id, job.name, job.state, job.exit_code) == (1, "infer", "COMPLETED", 0)
    assert job.started is not None
    assert job.ended is not None
    assert job.started <= job.ended
    info = json.loads((job.directory / "log.txt").read_text())
    assert (info["kind"], info["hparams"]) == ("job", {})
    assert info["user_data"] == {"trial_id": 777, "batch_size": 64}
    assert sorted(path.name for path in job.directory.iterdir()) == [
        *("attempts", "code", "config.yaml", "info.json", "job.json", "lock", "log.txt"),
    ]


def test_a_failed_job_raises_with_its_exit_code(place: Path) -> None:
    job = _run(place, "raise SystemExit(3)")
    assert (job.state, job.exit_code) == ("ERROR", 3)


def test_jobs_are_numbered_and_listed(place: Path) -> None:
    for code in (0, 1):
        _run(place, f"raise SystemExit({code})")
    assert [(job.id, job.state) for job in Store.open(place / "home").jobs()] == [(1, "COMPLETED"), (2, "ERROR")]


def test_the_output_of_a_job_is_streamed(place: Path) -> None:
    messages: list[str] = []
    heard = place / "heard"
    # The script continues after its first line was received, when a part of a 3-byte character is written.
    script = f"""
import pathlib, sys, time
sign = "━".encode()
sys.stdout.buffer.write(b"0\\n" + sign[:1])
while not pathlib.Path({str(heard)!r}).exists():
    time.sleep(0.01)
sys.stdout.buffer.write(sign[1:] + b"\\r1\\n")
"""

    def receive(text: str) -> None:
        messages.append(text)
        heard.touch()

    _run(place, script, on_output=receive)
    assert messages == ["0\n", "━\r1\n"]


def test_job_settings_override_the_file(place: Path) -> None:
    script = "import json, os; print(json.load(open(os.environ['DOVETAIL_TRIAL']))['user_data'])"
    job = _run(place, script, "data: {trial_id: 777}\n", overrides=["data.trial_id=3"])
    assert (job.directory / "log.txt").read_text() == "{'trial_id': 3}\n"


def test_an_invalid_job_leaves_no_files(place: Path) -> None:
    with pytest.raises(ConfigError, match="entrypiont"):
        _run(place, "", "entrypiont: true\n")
    (place / "infer.yaml").write_text("entrypoint: 'true'\n")
    with pytest.raises(ConfigError, match="does not exist"):
        run_job(Store.open(place / "home"), place / "infer.yaml", place / "nowhere")
    assert Store.open(place / "home").jobs() == []


def test_a_job_whose_launcher_was_killed_is_still_shown_correctly(place: Path, start: Any, until: Until) -> None:
    script = "import time, pathlib\nopen('begun', 'w').close()\n"
    script += "while not pathlib.Path('go').exists():\n    time.sleep(0.01)"
    process, work = start(script)
    until((work / "begun").exists)
    process.kill()
    store = Store.open(place / "home")
    assert store.job(1).state == "RUNNING"
    (work / "go").touch()
    until(lambda: store.job(1).state == "COMPLETED")


class Cluster:
    """Runs what it is given on this machine, but is not what runs things on this machine."""

    def __init__(self) -> None:
        local = LocalBackend()
        self.capacity, self.start, self.poll = local.capacity, local.start, local.poll
        self.stop, self.adopt = local.stop, local.adopt


def test_an_unattended_job_on_a_cluster_has_an_unknown_state(place: Path) -> None:
    done = _run(place, "import os, signal; os.kill(os.getppid(), signal.SIGKILL)", backend=Cluster())
    # A reader that waited for the end of the job sees its state.
    assert (done.state, done.exit_code) == ("ERROR", None)
    reported = json.loads((done.directory / "job.json").read_text())
    del reported["is_over"]
    (done.directory / "job.json").write_text(json.dumps(reported))
    assert Store.open(place / "home").job(1).state == "UNKNOWN"
    (done.directory / "attempts" / "0" / "exit").write_text("0")
    assert Store.open(place / "home").job(1).state == "COMPLETED"


def test_the_checkpoint_of_a_trial_is_found_in_the_experiments(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dovetail.checkpoint import save
    from dovetail.pytorch.loading import checkpoint_of

    monkeypatch.setenv("DOVETAIL_HOME", str(place / "home"))
    trial = place / "home" / "experiments" / "3" / "trials" / "trial_9"
    newest = save(trial / "ck_2", {"weight": 2}, summary={"batches": 2})
    assert checkpoint_of(None, 9) == checkpoint_of(place / "home" / "jobs", 9) == newest
    best = save(trial / "best_ck", {"weight": 1}, summary={"batches": 1})
    assert checkpoint_of(None, 9) == best
    with pytest.raises(
        CheckpointError, match=r"trial 8 has no checkpoints: there is no folder .*trial_8, nor one of an"
    ):
        checkpoint_of(place, 8)


@pytest.mark.parametrize("signals", [1, 2])
def test_ctrl_c_cancels_a_job_and_a_second_one_kills_it(place: Path, start: Any, until: Until, signals: int) -> None:
    script = "import signal, time\n"
    script += "signal.signal(signal.SIGTERM, lambda *_: open('heard', 'w').close())\n" if signals == 2 else ""
    script += "open('begun', 'w').close()\ntime.sleep(600)"
    process, work = start(script)
    until((work / "begun").exists)
    assert [job.state for job in Store.open(place / "home").jobs()] == ["RUNNING"]
    process.send_signal(signal.SIGINT)
    if signals == 2:
        until((work / "heard").exists)
        process.send_signal(signal.SIGINT)
    assert process.wait() == 1
    job = Store.open(place / "home").job(1)
    assert (job.state, job.exit_code) == ("CANCELED", 143 if signals == 1 else None)
