"""`dovetail demo`: every demo runs, and leaves what it says."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dovetail import checkpoint
from dovetail.cli import main
from dovetail.demos import DEMOS, Outcome, catalogue, classify, experiment, federated, gan, resume
from dovetail.errors import DovetailError
from dovetail.history import History

Run = Callable[..., tuple[Any, str, str]]


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def left_in(folder: Path, outcome: Outcome) -> bool:
    """Whether a demo has left all that it names, and nothing beside it."""
    return {path.name for path in folder.iterdir()} == set(outcome.files)


# ------------------------------------------------------------------ the demos


def test_demo_classify_learns_plots_and_writes_checkpoints(tmp_path: Path) -> None:
    outcome = classify.run(tmp_path, num_epochs=4)
    assert left_in(tmp_path, outcome)
    assert is_picture(tmp_path / "digits.png")
    assert len(History.load(tmp_path / "run" / "ck_history.jsonl").get_metric_values("valid_loss")) == 4
    assert checkpoint.latest(tmp_path / "run") is not None
    assert float(outcome.result.split()[2].rstrip("%")) > 80


def test_demo_gan_evaluates_six_times_and_improves(tmp_path: Path) -> None:
    outcome = gan.run(tmp_path, num_epochs=5)
    assert left_in(tmp_path, outcome)
    assert is_picture(tmp_path / "samples.png")
    assert [row[0] for row in outcome.rows] == ["0", "1", "2", "3", "4", "5"]
    first, last = (int(outcome.rows[place][1].rstrip("%")) for place in (0, -1))
    assert first == 0 < last


def test_demo_federated_compares_two_algorithms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = federated.run(tmp_path, rounds=6)
    assert left_in(tmp_path, outcome)
    assert is_picture(tmp_path / "rounds.png")
    assert outcome.columns == ("round", "FedAvg", "SCAFFOLD")
    assert [row[0] for row in outcome.rows] == ["1", "5", "6"]
    assert capsys.readouterr().out.count("round 6/6  5 clients") == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_demo_resume_kills_a_process_and_ends_with_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = resume.run(tmp_path, num_epochs=10)
    assert left_in(tmp_path, outcome)
    assert is_picture(tmp_path / "losses.png")
    assert outcome.result == (
        "190 of 190 losses are equal, bit for bit; final weights, optimizer and random states are equal, too"
    )
    _, straight, killed = zip(*outcome.rows, strict=True)
    assert straight[2:] == killed[2:]
    assert "killed by SIGKILL after batch 170;" in capsys.readouterr().out
    # The killed one had to do some of its batches again.
    assert int(killed[1]) > 0


@pytest.mark.slow
def test_demo_experiment_searches_in_processes_and_reports(tmp_path: Path) -> None:
    small = ("searcher.max_trials=2", "searcher.num_rungs=1", "searcher.max_length={epochs: 3}")
    outcome = experiment.run(tmp_path, settings=small)
    assert {path.name for path in tmp_path.iterdir()} == {*outcome.files, "report-best.png"}
    assert is_picture(tmp_path / "report-curves.png")
    assert outcome.columns == ("trial", "accuracy", "batches", "dropout", "learning_rate", "width", "state")
    assert sorted(row[0] for row in outcome.rows) == ["1", "2"]
    assert float(outcome.rows[0][1]) >= float(outcome.rows[1][1]) > 0.4
    # The code that it leaves is the one that ran: it can be edited and run again.
    assert "class SpiralsTrial" in (tmp_path / "code" / "train.py").read_text()


@pytest.mark.slow
def test_a_demo_search_without_a_value_prints_the_reason(tmp_path: Path) -> None:
    broken = ("searcher.max_trials=1", "searcher.num_rungs=1", "entrypoint=python3 nothing.py")
    with pytest.raises(DovetailError, match=r"no trial has reported an accuracy: .*log\.txt"):
        experiment.run(tmp_path, settings=broken)


# ------------------------------------------------------------------ the command


def test_the_default_demo_is_classify_in_a_new_folder_each_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(classify.run, "__kwdefaults__", {"num_epochs": 1})
    (tmp_path / "dovetail-demo" / "classify").mkdir(parents=True)
    code, out, err = run("demo")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [DEMOS["classify"].shows, "writes to dovetail-demo/classify-2"]
    assert "  dovetail-demo/classify-2/digits.png  the learning curves" in out
    assert "  dovetail checkpoint list dovetail-demo/classify-2/run" in lines
    assert lines[-1].startswith("result: test accuracy ")
    assert list((tmp_path / "dovetail-demo" / "classify").iterdir()) == []


def next_step(name: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the printed next step if this program starts the command in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module(f"dovetail.demos.{name}"), "run", lambda folder: Outcome("done", {}))
    monkeypatch.setattr(sys, "argv", [str(program), "demo", name])
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 0
    return out.getvalue().partition("next step:\n  ")[2].partition("\n\n")[0]


def test_the_next_step_is_a_valid_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "dovetail"
    program.parent.mkdir()
    program.touch(mode=0o755)
    folder = "dovetail-demo/classify"
    monkeypatch.setenv("PATH", "/usr/bin")
    assert next_step("classify", program, tmp_path, monkeypatch) == f"bin/dovetail checkpoint list {folder}/run"
    monkeypatch.setenv("PATH", str(program.parent))
    assert next_step("classify", program, tmp_path, monkeypatch) == f"dovetail checkpoint list {folder}-2/run"
    module = Path(catalogue.__file__).parents[1] / "__main__.py"
    python = shlex.quote(sys.executable)
    command = f"{python} -m dovetail checkpoint list {folder}-3/run"
    assert next_step("classify", module, tmp_path, monkeypatch) == command


@pytest.mark.parametrize("name", DEMOS)
def test_the_next_step_names_files_that_exist(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = next_step(name, Path(sys.executable).with_name("dovetail"), tmp_path, monkeypatch)
    assert "{" not in step
    ours = [word for word in step.split() if word.endswith((".py", ".md"))]
    assert [word for word in ours if not Path(word).exists()] == []


# Prints the end of a demo, as the command does.
ENDS = """
from dovetail.cli.output import print_command, print_prose
print_prose("the generator's output for the same noise, at six well-known epochs", "  dovetail-demo/gan/samples.png  ")
print_command("dovetail experiment create dovetail-demo/experiment/search.yaml dovetail-demo/experiment/code --home h")
"""


def on_a_terminal(columns: int, program: str) -> str:
    """Return the output of a program on a terminal of this width."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    shown = b""
    with subprocess.Popen([sys.executable, "-c", program], stdout=theirs, env=environment) as process:
        os.close(theirs)
        # When the last program has left it, a terminal raises an error.
        with contextlib.suppress(OSError):
            while chunk := os.read(ours, 1 << 16):
                shown += chunk
    os.close(ours)
    assert process.returncode == 0
    return shown.decode().replace("\r\n", "\n")


def test_a_terminal_of_80_columns_cuts_no_word_and_no_command() -> None:
    assert (
        on_a_terminal(80, ENDS)
        == """\
  dovetail-demo/gan/samples.png  the generator's output for the same noise, at
                                 six well-known epochs
  dovetail experiment create dovetail-demo/experiment/search.yaml \\
    dovetail-demo/experiment/code --home h
"""
    )
    assert on_a_terminal(200, ENDS).count("\n") == 2


def test_columns_of_numbers_are_aligned_at_the_right(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = Outcome("done", {}, ("trial", "accuracy", "state"), [["8", "0.997", "COMPLETED"], ["10", "–", "STOPPED"]])
    monkeypatch.setattr(gan, "run", lambda folder: outcome)
    _, out, _ = run("demo", "gan", "--output", tmp_path)
    assert [line for line in out.splitlines() if line.startswith("│")][1:] == [
        "│     8 │    0.997 │ COMPLETED │",
        "│    10 │        – │ STOPPED   │",
    ]


def test_a_folder_with_files_is_not_changed_by_a_demo(run: Run, tmp_path: Path) -> None:
    mine = tmp_path / "digits.png"
    mine.write_text("mine")
    code, out, err = run("demo", "classify", "--output", tmp_path)
    assert (code, out) == (1, "")
    assert err == f"dovetail: --output: {tmp_path} is not empty, and a demo never overwrites files: give a new folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["digits.png"]
    assert mine.read_text() == "mine"


def test_an_unknown_name_suggests_the_nearest(run: Run) -> None:
    known = "(known: classify, experiment, federated, gan, resume)"
    assert run("demo", "federate") == (1, "", f"dovetail: unknown demo 'federate': did you mean 'federated'? {known}\n")


def test_the_help_names_every_demo(run: Run) -> None:
    _, out, _ = run("demo", "--help")
    assert f"NAME is {', '.join(list(DEMOS)[:-1])} or {list(DEMOS)[-1]}." in " ".join(out.split())


# A package that appears to be missing in this process, and a short demo.
WITHOUT = """
import sys
sys.modules[sys.argv.pop(1)] = None
if "federated" in sys.argv:
    from dovetail.demos import federated
    federated.run.__kwdefaults__["rounds"] = 1
from dovetail.cli import main
main()
"""


def run_without(module: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, module, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.torture
def test_without_matplotlib_the_demo_only_skips_the_plot(tmp_path: Path) -> None:
    done = run_without("matplotlib", "demo", "federated", "--output", tmp_path / "new")
    assert (done.returncode, done.stderr) == (0, "")
    assert "rounds.png is not written: matplotlib is not installed: pip install 'dovetail[plot]'" in done.stdout
    assert "the digits of each client" not in done.stdout
    assert "│ round │ FedAvg │ SCAFFOLD │" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("result: test accuracy after 1 round: FedAvg ")


def test_a_missing_package_is_named_and_no_empty_folder_remains(tmp_path: Path) -> None:
    done = run_without("optuna", "demo", "experiment", "--output", tmp_path / "new")
    assert (done.returncode, done.stderr) == (1, "dovetail: optuna is not installed: pip install 'dovetail[search]'\n")
    assert not (tmp_path / "new").exists()
