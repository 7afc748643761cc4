"""Command `dovetail new`: write a small project that runs."""

from __future__ import annotations

import re
import shlex
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from dovetail.errors import ConfigError, UnknownNameError

_STYLES = ("composable", "subclass", "trial", "federated")


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The folder of the project.")],
    style: Annotated[
        str,
        typer.Option(
            metavar="STYLE",
            help="composable (from strategies), subclass, trial (for searches) or federated.",
            autocompletion=lambda incomplete: [style for style in _STYLES if style.startswith(incomplete)],
        ),
    ] = _STYLES[0],
    into: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for the project's folder.", exists=True, file_okay=False)
    ] = Path("."),
) -> None:
    """Write a small project that runs: a script, its configuration, a test and a README."""
    # The name is used as a folder, in commands, and in Python and YAML text.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}", name):
        raise ConfigError(f"name: expected letters, digits, '_' and, not first, '-', 64 at most, got {name!r}")
    if style not in _STYLES:
        raise UnknownNameError("style", style, _STYLES)
    folder = into / name
    # Read all templates before the first file is written.
    files = {
        template.name.removesuffix(".template"): Template(template.read_text(encoding="utf-8")).substitute(name=name)
        for template in resources.files("dovetail").joinpath("templates", style).iterdir()
    }
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir() or any(folder.iterdir()):
            raise ConfigError(f"{folder} exists and is not an empty folder: choose another name or --into") from None
    for file, text in sorted(files.items()):
        # "x" raises if the file exists, for example because two commands run at once.
        with (folder / file).open("x", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
    print(f"created {folder} with {', '.join(sorted(files))}")
    print(f"run it:\n  cd {shlex.quote(str(folder))}\n  python train.py")
