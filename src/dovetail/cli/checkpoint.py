"""`dovetail checkpoint`: look at checkpoints, verify them, and remove those that are not needed."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dovetail import checkpoint
from dovetail.checkpoint import CheckpointInfo, CheckpointWarning
from dovetail.checkpoint.store import scan
from dovetail.errors import CheckpointError, UnknownNameError

__all__ = ["app"]

app = typer.Typer(help="Inspect, verify, list and prune checkpoints.", no_args_is_help=True)

_Checkpoint = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint.")]
_Directory = Annotated[Path, typer.Argument(metavar="PATH", help="A directory of checkpoints.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class _Mode(str, Enum):
    min = "min"
    max = "max"


@app.command()
def inspect(path: _Checkpoint, as_json: _AsJson = False) -> None:
    """Show what a checkpoint says about itself."""
    info = checkpoint.inspect(path)
    if as_json:
        return _print_json(_as_dict(info))
    table = Table(show_header=False, box=None)
    rows = {
        "path": str(info.path),
        "created": _moment(info),
        "size": _bytes(info.size),
        "format": f"version {info.format_version}, by dovetail {info.dovetail_version}",
        **{f"file {name}": f"{_bytes(file.size)}  sha256 {file.sha256}" for name, file in info.files.items()},
        **{f"summary {key}": json.dumps(_plain(value)) for key, value in info.summary.items()},
    }
    for key, value in rows.items():
        table.add_row(f"[bold]{escape(key)}", escape(value))
    return _console().print(table)


@app.command()
def verify(path: _Checkpoint) -> None:
    """Read every byte of a checkpoint and compare it with its checksums."""
    checkpoint.verify(path)
    print(f"{path}: intact ({_bytes(checkpoint.inspect(path).size)})")


@app.command("list")
def list_(path: _Directory, as_json: _AsJson = False) -> None:
    """List the checkpoints in a directory, oldest first."""
    infos, damaged = scan(_existing(path))
    if as_json:
        return _print_json({"checkpoints": [_as_dict(info) for info in infos], "damaged": [str(e) for e in damaged]})
    table = Table("name", "step", "created", "size", "metrics")
    for info in infos:
        metrics = ", ".join(f"{name} {value:.6g}" for name, value in info.metrics.items())
        step = "" if info.step is None else str(info.step)
        table.add_row(escape(info.path.name), step, _moment(info), _bytes(info.size), escape(metrics))
    _console().print(table)
    return _report_damaged(damaged)


@app.command()
def prune(
    path: _Directory,
    keep_last: Annotated[int | None, typer.Option(help="Keep so many of the newest.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Keep so many of the best by --metric.")] = None,
    keep_every: Annotated[int | None, typer.Option(help="Keep each whose step is a multiple of this.")] = None,
    metric: Annotated[str | None, typer.Option(help="The metric that --keep-best compares.")] = None,
    mode: Annotated[_Mode, typer.Option(help="Whether the smallest or the largest metric is best.")] = _Mode.min,
    pattern: Annotated[str, typer.Option(help="Names that the rules are about, with * and ?; others stay.")] = "*",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove the checkpoints in a directory that no --keep option keeps. The newest always stays."""
    infos, damaged = scan(_existing(path))
    known = {name for info in infos for name in info.metrics}
    if metric is not None and infos and metric not in known:
        raise UnknownNameError("metric", metric, known)
    with warnings.catch_warnings():
        # What is damaged is reported below, in our own words.
        warnings.simplefilter("ignore", CheckpointWarning)
        removed = checkpoint.prune(
            path,
            last=keep_last,
            best=keep_best,
            metric=metric,
            mode=mode.value,
            every=keep_every,
            pattern=pattern,
            dry_run=dry_run,
        )
    for each in removed:
        print(f"{'would remove' if dry_run else 'removed'} {each}")
    print(f"{len(infos) - len(removed)} kept, {len(removed)} {'to remove' if dry_run else 'removed'}")
    _report_damaged(damaged)


def _existing(directory: Path) -> Path:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: there is no such directory")
    return directory


def _report_damaged(damaged: list[CheckpointError]) -> None:
    for error in damaged:
        print(f"damaged: {error}", file=sys.stderr)


def _console() -> Console:
    # A name of a file may be longer than a terminal is wide; in a pipe nothing is cut.
    return Console() if sys.stdout.isatty() else Console(width=200)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _as_dict(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "path": str(info.path),
        "step": info.step,
        "created": info.created.isoformat(),
        "size": info.size,
        "format_version": info.format_version,
        "dovetail_version": info.dovetail_version,
        "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in info.files.items()},
        "summary": _plain(info.summary),
    }


def _plain(value: Any) -> Any:
    """Return a summary as strict JSON has it: NaN and infinity become strings, other keys their spelling."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _moment(info: CheckpointInfo) -> str:
    return info.created.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _bytes(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
