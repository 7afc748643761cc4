"""`dovetail doctor`: what this machine has, what is missing, and the command that installs it."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import AsJson, Home, StoreUrl, console, print_json
from dovetail.printing import printable
from dovetail.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from dovetail.cli.checkup import Check

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Where checkpoints would go.", show_default="here")
    ] = Path(),
    as_json: AsJson = False,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Look whether everything works here: Python, torch, gloo, extras, disks, the store. Nothing is left behind.

    Below what is missing stands the command that installs it. The exit code is 1 if anything essential does not work.
    """
    from dovetail.cli.checkup import checkup

    checks = checkup(folder, home, store)
    problems = [check.name for check in checks if check.status == "problem"]
    if as_json:
        print_json({"ok": not problems, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        screen = console()
        screen.print(table(checks, screen.width), soft_wrap=True)
        notes = sum(check.status == "note" for check in checks)
        end = f"; {counted(notes, 'note')}" if notes else ""
        screen.print(f"\nproblems: {', '.join(problems)}{end}" if problems else f"\nnothing essential is missing{end}")
    if problems:
        raise typer.Exit(1)


def table(checks: Sequence[Check], width: int) -> Text:
    """Return one line for each check, and an empty one before every part; what is too long goes on below itself.

    Example:
        >>> from dovetail.cli.checkup import Check
        >>> print(table([Check("extras", "plot", "note", "matplotlib is missing", "pip install matplotlib")], 40))
        note     plot  matplotlib is missing
                       → pip install matplotlib
    """
    from rich.text import Text

    text, part, widest = Text(), checks[0].part, max(len(check.name) for check in checks)
    indent = len("problem") + widest + 4
    for check in checks:
        if check.part != part:
            text.append("\n")
            part = check.part
        found = [printable(line) for line in textwrap.wrap(check.found, max(width - indent, 20))] or [""]
        text.append(check.status.ljust(9), _STYLES[check.status]).append(check.name.ljust(widest + 2), "bold")
        text.append(("\n" + " " * indent).join(found) + "\n")
        if check.remedy:
            # In one line, however long: it is there to be copied.
            text.append(f"{' ' * indent}→ ").append(f"{printable(check.remedy)}\n", "cyan")
    text.right_crop(1)
    return text
