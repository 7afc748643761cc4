"""Command `dovetail demo`: small example runs."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.output import console, make_table, print_command, print_prose
from dovetail.demos import DEMOS, Outcome, catalogue
from dovetail.errors import ConfigError, UnknownNameError


def complete_demos(incomplete: str) -> list[str]:
    """Return the names of demos with a prefix."""
    return [name for name in DEMOS if name.startswith(incomplete)]


def demo(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="The demo.", autocompletion=complete_demos)
    ] = "classify",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="A new folder.", show_default="dovetail-demo/NAME"),
    ] = None,
) -> None:
    """Run a small example, in a minute or less, and write its results to a folder.

    NAME is classify, gan, experiment, federated or resume.
    """
    if name not in DEMOS:
        raise UnknownNameError("demo", name, DEMOS)
    # Set this before torch is imported. A second core does not make such a small model faster, and is slower when busy.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Never an existing result: each run of a demo has its folder.
    folder = _free_folder(name) if output is None else _empty_folder(output)
    print_prose(DEMOS[name].shows)
    print(f"writes to {folder}\n", flush=True)

    try:
        outcome = DEMOS[name].run(folder)
    except BaseException:
        # Files of an unfinished demo stay; an empty folder is removed.
        with suppress(OSError):
            folder.rmdir()
        raise

    if outcome.rows:
        console().print(make_table(*outcome.columns, numbers=_numbers(outcome), rows=outcome.rows))
    print("\nwritten:")
    written = {str(folder / each): what for each, what in outcome.files.items() if (folder / each).exists()}
    for path, what in written.items():
        print_prose(what, f"  {path.ljust(max(map(len, written)))}  ")
    code = Path(catalogue.__file__).with_name(f"{name}.py")
    words = {"folder": shlex.quote(str(folder)), "dovetail": _command(), "code": _short_path(code)}
    print("next step:")
    if DEMOS[name].preparation:
        print_prose(DEMOS[name].preparation.format(**words), "  ")
    print_command(DEMOS[name].next_step.format(**words))
    print()
    print_prose(f"result: {outcome.result}")


def _numbers(outcome: Outcome) -> list[str]:
    """Return the headings of the columns whose cells are mostly numbers, which are aligned at the right."""
    columns = zip(*outcome.rows, strict=True)
    counts = [sum(cell[:1].isdigit() for cell in column) for column in columns]
    return [name for name, count in zip(outcome.columns, counts, strict=True) if 2 * count >= len(outcome.rows)]


def _command() -> str:
    """Return the command line that runs now, as the user can type it again: `.venv/bin/dovetail` after `make demo`."""
    if Path(sys.argv[0]).name == "__main__.py":
        return f"{_typed(sys.executable)} -m dovetail"
    return _typed(sys.argv[0])


def _typed(program: str) -> str:
    """Return a program by its name if the PATH leads to it, else by its path."""
    path = Path(os.path.abspath(program))
    found = shutil.which(path.name)
    if found is not None and Path(os.path.abspath(found)) == path:
        return path.name
    return _short_path(path)


def _short_path(path: Path) -> str:
    """Return a path for a shell, relative if it is below the current folder."""
    return shlex.quote(os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path))


def _empty_folder(folder: Path) -> Path:
    """Return an existing folder without content, so that nothing is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"--output: {folder} is not empty, and a demo never overwrites files: give a new folder")
    return folder


def _free_folder(name: str) -> Path:
    """Return a new folder with this name, if necessary with a number."""
    parent = Path("dovetail-demo")
    parent.mkdir(exist_ok=True)
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always a free number")
