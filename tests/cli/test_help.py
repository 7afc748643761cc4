"""Every command explains itself, at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from typer.main import get_command

from dovetail.cli import app

LOOK = """
import contextlib, io, json, sys
from dovetail.cli import app
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        app([*words, "--help"])
    assert "Usage: " in out.getvalue(), words
heavy = {"torch", "numpy", "optuna", "sqlalchemy", "matplotlib", "rich.live", "yaml", "http.server", "tensorboard"}
print(json.dumps(sorted(heavy & set(sys.modules))))
"""


def commands(group: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


EVERYTHING = list(commands(get_command(app)))


def test_every_planned_command_exists() -> None:
    named = {" ".join(words) for words in EVERYTHING}
    assert {
        *(f"experiment {name}" for name in ("create", "list", "describe", "logs", "pause", "resume", "cancel", "kill")),
        *(f"experiment {name}" for name in ("delete", "best", "report")),
        *("trial describe", "trial logs", "trial metrics", "checkpoint list", "checkpoint export"),
        *("job run", "job list", "job logs", "dashboard", "e create", "e list"),
    } <= named


def test_help_imports_no_heavy_package() -> None:
    command = [sys.executable, "-c", LOOK, json.dumps(EVERYTHING)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_the_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["experiment", "create", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "0 success; 1 error, explained in one sentence; 2 wrong usage; 3 the experiment or job ended in ERROR;" in text
    )


def test_arguments_are_documented_like_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        app(["federate", "--help"])
    assert "The YAML file." in capsys.readouterr().out
