"""Command `dovetail doctor`: checks of this machine, with the commands that install what is missing."""

from __future__ import annotations

import dataclasses
import tempfile
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

    from dovetail.cli.checkup.check import Check

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="DIR", help="Folder for checkpoints.", show_default="current folder")
    ] = Path(),
    accelerator: Annotated[
        bool,
        typer.Option("--accelerator", help="Check training on this machine's accelerator instead; at most 3 minutes."),
    ] = False,
    report: Annotated[
        Path,
        typer.Option("--report", metavar="FILE", help="File for the results of --accelerator."),
    ] = Path("dovetail-accelerator.json"),
    as_json: AsJson = False,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Check Python, torch, gloo, extras, disks and the store of experiments. No files are left behind.

    Each missing package is followed by the command that installs it. The exit code is 1 if something essential fails.
    With --accelerator, check instead that training on a GPU waits for nothing, overlaps copies and resumes exactly.
    """
    if accelerator:
        from dovetail.cli.checkup.accelerator import check_accelerator

        checks = check_accelerator(report)
    else:
        checks = checkup(folder, home, store)
    problems = [check.name for check in checks if check.status == "problem"]
    if as_json:
        print_json({"ok": not problems, "checks": [dataclasses.asdict(check) for check in checks]})
    else:
        screen = console()
        screen.print(table(checks, screen.width), soft_wrap=True)
        notes = sum(check.status == "note" for check in checks)
        end = f"; {counted(notes, 'note')}" if notes else ""
        fine = "no problem was found" if accelerator else "nothing essential is missing"
        screen.print(f"\nproblems: {', '.join(problems)}{end}" if problems else f"\n{fine}{end}")
        if accelerator:
            screen.print(f"results: {printable(str(report))} (attach this file to an issue)", soft_wrap=True)
    if problems:
        raise typer.Exit(1)


def checkup(folder: Path, home: Path | None = None, store: str | None = None) -> list[Check]:
    """Return all checks, in the order of the table.

    Args:
        folder: The folder for checkpoints; it need not exist.
        home: The folder of experiments; None means `DOVETAIL_HOME`, or else `.dovetail`.
        store: The URL of a database server; None means `DOVETAIL_STORE`, or else the file in `home`.
    """
    from dovetail.cli.checkup.files import check_descriptors, check_disk, check_folder, check_shared_memory
    from dovetail.cli.checkup.packages import check_extras, check_packages, check_python, read_requirements
    from dovetail.cli.checkup.store import check_store
    from dovetail.cli.checkup.torch_build import answers_of, check_torch, probing

    requirements = read_requirements()
    # Importing torch takes seconds, so run the other checks meanwhile.
    with probing() as probe:
        before = [check_python(), *check_packages(requirements)]
        after = [
            *check_extras(requirements),
            check_folder(folder),
            check_disk("disk", folder),
            check_disk("temporary disk", Path(tempfile.gettempdir())),
            check_descriptors(),
            *check_shared_memory(),
            check_store(home, store),
        ]
        # The slow answers are awaited last, although the table shows them in the middle.
        return [*before, *check_torch(answers_of(probe)), *after]


def table(checks: Sequence[Check], width: int) -> Text:
    """Return one line per check, and an empty line before every part; long lines are wrapped and indented.

    Example:
        >>> from dovetail.cli.checkup.check import Check
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
        # Names of packages and paths have hyphens.
        lines = textwrap.wrap(check.found, max(width - indent, 20), break_on_hyphens=False)
        found = [printable(line) for line in lines] or [""]
        text.append(check.status.ljust(9), _STYLES[check.status]).append(check.name.ljust(widest + 2), "bold")
        text.append(("\n" + " " * indent).join(found) + "\n")
        if check.remedy:
            # Never wrapped, so that it can be copied.
            text.append(f"{' ' * indent}→ ").append(f"{printable(check.remedy)}\n", "cyan")
    # The console adds the last line break.
    text.right_crop(1)
    return text
