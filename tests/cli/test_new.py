"""`dovetail new`: what it writes runs, and what is there stays."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import forked
import pytest

Run = Callable[..., tuple[object, str, str]]

STYLES = ["composable", "federated", "subclass", "trial"]
FILES = ["README.md", "config.yaml", "test_train.py", "train.py"]
TESTS = Path(pytest.__file__).with_name("__main__.py")


def messages(done: CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------ what is written


@pytest.mark.full_size
@pytest.mark.slow
@pytest.mark.parametrize(
    "style", [pytest.param(it, marks=[pytest.mark.torture] if it == "composable" else []) for it in STYLES]
)
def test_script_and_tests_of_a_new_project_run(
    style: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("new", "my-digits", "--style", style, "--into", tmp_path)[0] == 0
    folder = tmp_path / "my-digits"
    last = messages(forked.run(folder / "train.py", folder=folder))[-1]
    accuracy = last.removeprefix("result: ").removeprefix("test ").removeprefix("accuracy ")
    assert float(accuracy.split("%")[0]) > 80
    # The plugins of our own tests take longer to start than these tests to run.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    assert messages(forked.run(TESTS, "-q", "-W", "error", "--rootdir", folder, folder=folder))[-1].startswith(
        "3 passed in"
    )


@pytest.mark.parametrize("style", STYLES)
def test_code_of_a_new_project_passes_ruff(style: str, run: Run, tmp_path: Path) -> None:
    run("new", "mine", "--style", style, "--into", tmp_path)
    settings = ["--isolated", "--no-cache", "--line-length", "120", "--target-version", "py310"]
    for words in (["format", "--check"], ["check", "--select", "E,F,I,B,UP,SIM,RUF,N,PT"]):
        command = [sys.executable, "-m", "ruff", *words, *settings]
        messages(subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, text=True, check=False))


@pytest.mark.parametrize("style", STYLES)
def test_the_project_name_is_in_every_title(style: str, run: Run, tmp_path: Path) -> None:
    run("new", "my-digits", "--style", style, "--into", tmp_path)
    folder = tmp_path / "my-digits"
    assert (folder / "README.md").read_text().startswith("# my-digits\n")
    assert (folder / "train.py").read_text().startswith('"""my-digits: ')


def test_strategies_are_the_default_style_and_the_next_commands_are_printed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("new", "mine")
    assert (code, err) == (0, "")
    assert out == f"created mine with {', '.join(FILES)}\nrun it:\n  cd mine\n  python train.py\n"
    assert names(tmp_path / "mine") == FILES
    assert "ComposableTrainer" in (tmp_path / "mine" / "train.py").read_text()


def test_the_printed_command_works_for_a_folder_with_a_space(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my projects").mkdir()
    assert f"  cd '{tmp_path}/my projects/mine'\n" in run("new", "mine", "--into", tmp_path / "my projects")[1]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", ["", ".", "..", ".mine", "a/b", "../a", "/a", "a b", "a.b", "a\n", "größe", "a" * 65])
def test_a_project_name_that_is_not_a_plain_folder_is_rejected(name: str, run: Run, tmp_path: Path) -> None:
    expected = f"dovetail: name: expected letters, digits, '_' and, not first, '-', 64 at most, got {name!r}\n"
    assert run("new", name, "--into", tmp_path) == (1, "", expected)
    assert names(tmp_path) == []


def test_a_project_name_that_looks_like_an_option_is_rejected(run: Run, tmp_path: Path) -> None:
    code, _, err = run("new", "--into", tmp_path, "--", "-mine")
    assert (code, err.count("\n")) == (1, 1)
    assert names(tmp_path) == []


def test_an_unknown_style_suggests_the_nearest(run: Run, tmp_path: Path) -> None:
    sentence = "unknown style 'trail': did you mean 'trial'? (known: composable, federated, subclass, trial)"
    assert run("new", "mine", "--style", "trail", "--into", tmp_path) == (1, "", f"dovetail: {sentence}\n")
    assert names(tmp_path) == []


@pytest.mark.parametrize("kept", ["train.py", "notes.txt"])
def test_a_folder_with_files_is_not_changed(kept: str, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / kept).write_text("mine")
    sentence = f"dovetail: {folder} exists and is not an empty folder: choose another name or --into\n"
    assert run("new", "mine", "--into", tmp_path) == (1, "", sentence)
    assert names(folder) == [kept]
    assert (folder / kept).read_text() == "mine"


def test_a_file_of_the_project_name_is_not_changed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    code, _, err = run("new", "mine", "--into", tmp_path)
    assert (code, err) == (
        1,
        f"dovetail: {tmp_path / 'mine'} exists and is not an empty folder: choose another name or --into\n",
    )
    assert (tmp_path / "mine").read_text() == "mine"


def test_an_empty_folder_is_filled_with_the_project(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert run("new", "mine", "--into", tmp_path)[0] == 0
    assert names(tmp_path / "mine") == FILES
