"""Command `dovetail checkpoint`: inspect, verify, list, export and prune checkpoints."""

from __future__ import annotations

import json
import sys
import warnings
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from dovetail.cli.output import (
    AsJson,
    Home,
    StoreUrl,
    bytes_text,
    console,
    fit_columns,
    make_table,
    moment,
    open_store,
    plain,
    print_facts,
    print_json,
    print_prose,
)
from dovetail.errors import CheckpointError, ConfigError
from dovetail.printing import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.checkpoint import CheckpointInfo

app = typer.Typer(help="Inspect, verify, list, export and prune checkpoints.", no_args_is_help=True)

_Checkpoint = Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint.")]
_Directory = Annotated[Path, typer.Argument(metavar="PATH", help="A directory of checkpoints.")]
_Trial = Annotated[int | None, typer.Option("--trial", metavar="ID", help="Use this trial instead of a PATH.")]


class _Mode(str, Enum):
    min = "min"
    max = "max"


@app.command()
def inspect(path: _Checkpoint, as_json: AsJson = False) -> None:
    """Show the metadata of a checkpoint: files, checksums and summary."""
    from dovetail import checkpoint

    info = checkpoint.inspect(path)
    if as_json:
        return print_json(_as_dict(info))
    facts = {
        "path": str(info.path),
        "created": moment(info.created),
        "size": bytes_text(info.size),
        "format": f"version {info.format_version}, by dovetail {info.dovetail_version}",
        **{f"file {name}": f"{bytes_text(file.size)}  sha256 {file.sha256}" for name, file in info.files.items()},
        **{f"summary {key}": json.dumps(plain(value)) for key, value in info.summary.items()},
    }
    return print_facts(facts)


@app.command()
def verify(path: _Checkpoint) -> None:
    """Read every byte of a checkpoint and compare it with its checksums."""
    from dovetail import checkpoint

    checkpoint.verify(path)
    print(f"{printable(str(path))}: intact ({bytes_text(checkpoint.inspect(path).size)})")


@app.command("list")
def list_(
    path: Annotated[Path | None, typer.Argument(metavar="PATH", help="A directory of checkpoints.")] = None,
    trial: _Trial = None,
    home: Home = None,
    store: StoreUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a directory, oldest first."""
    from dovetail.checkpoint.store import scan

    folder = _existing(_place(path, trial, home, store))
    infos, damaged = scan(folder)
    if as_json:
        return print_json({"checkpoints": [_as_dict(info) for info in infos], "damaged": [str(e) for e in damaged]})
    if infos:
        _print_table(infos)
    else:
        print_prose(f"there are no checkpoints in {folder}")
    return _report_damaged(damaged)


def _print_table(infos: Sequence[CheckpointInfo]) -> None:
    """Print a row for each checkpoint, with a column for each metric; the columns that do not fit are named."""
    names = sorted({name for info in infos for name in info.metrics})
    metrics = sorted(names, key=lambda name: name.startswith("train_"))
    every = [
        {
            "name": info.path.name,
            "step": "" if info.step is None else str(info.step),
            **{name: f"{info.metrics[name]:.4g}" if name in info.metrics else "" for name in metrics},
            "size": bytes_text(info.size),
            "created": moment(info.created),
        }
        for info in infos
    ]
    screen = console()
    # Values of validation are dropped last, because they tell which checkpoint is the best.
    shown = fit_columns(every, screen.width, ["train_lr", "created", *reversed(metrics), "size"])
    numbers = ("step", "size", *metrics)
    screen.print(make_table(*shown[0], numbers=numbers, long="name", rows=[list(row.values()) for row in shown]))
    if hidden := [name for name in every[0] if name not in shown[0]]:
        print_prose(f"not shown in {screen.width} columns: {', '.join(hidden)}; --json prints everything")


@app.command()
def export(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")],
    path: Annotated[Path | None, typer.Argument(metavar="PATH", help="A checkpoint.")] = None,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="ID", help="The best checkpoint of this trial, instead of a PATH.")
    ] = None,
    home: Home = None,
    store: StoreUrl = None,
) -> None:
    """Write the model weights of a checkpoint to one file: .safetensors, or torch.save (.pt, .pth, .ckpt)."""
    from dovetail import checkpoint
    from dovetail.checkpoint.model_file import model_format
    from dovetail.trainers.frozen import with_base

    # Checked first, because reading a large checkpoint for an unknown file type would take minutes.
    format = model_format(output)
    source = _place(path, trial, home, store)
    if trial is not None:
        found = best_checkpoint(source)
        if found is None:
            raise CheckpointError(f"trial {trial} has no checkpoints in {source}")
        source = found
    state = with_base(checkpoint.load(source), None)
    if not isinstance(state.get("model"), dict):
        raise CheckpointError(
            f"{source}: there is no model in it (it has: {', '.join(sorted(map(str, state))) or 'nothing'})"
        )
    print(printable(str(checkpoint.export_model(output, cast("dict[str, Any]", state["model"]), format))))


@app.command()
def prune(
    path: _Directory,
    keep_last: Annotated[int | None, typer.Option(help="Keep this number of the newest.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Keep this number of the best by --metric.")] = None,
    keep_every: Annotated[int | None, typer.Option(help="Keep each whose step is a multiple of this.")] = None,
    metric: Annotated[str | None, typer.Option(help="The metric that --keep-best compares.")] = None,
    mode: Annotated[
        _Mode | None, typer.Option(help="Whether the smallest or the largest metric is best.", show_default="min")
    ] = None,
    pattern: Annotated[str, typer.Option(help="Apply the rules to these names, with * and ?; keep others.")] = "*",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
) -> None:
    """Remove the checkpoints in a directory that no --keep option keeps. The newest is always kept."""
    from dovetail import checkpoint
    from dovetail.checkpoint import CheckpointWarning
    from dovetail.checkpoint.store import scan

    # The default is None, not "min", so that an option without effect can be reported.
    if mode is not None and keep_best is None:
        raise ConfigError(f"--mode: {mode.value!r} has no effect without --keep-best and --metric")
    infos, damaged = scan(_existing(path))
    with warnings.catch_warnings():
        # Damaged checkpoints are reported below.
        warnings.simplefilter("ignore", CheckpointWarning)
        removed = checkpoint.prune(
            path,
            last=keep_last,
            best=keep_best,
            metric=metric,
            mode="min" if mode is None else mode.value,
            every=keep_every,
            pattern=pattern,
            dry_run=dry_run,
        )
    for each in removed:
        print(f"{'would remove' if dry_run else 'removed'} {printable(str(each))}")
    print(f"{len(infos) - len(removed)} kept, {len(removed)} {'to remove' if dry_run else 'removed'}")
    _report_damaged(damaged)


def best_checkpoint(trial: Path) -> Path | None:
    """Return the best checkpoint in the folder of a trial, or else its newest; None if there is none."""
    from dovetail.search.checkpoints import checkpoints_of

    found = {checkpoint.path.name: checkpoint.path for checkpoint in checkpoints_of(trial)}
    # The trainer stores the best checkpoint under this name; others are named by their batch.
    return found.get("best_ck") or next(reversed(found.values()), None)


def _place(path: Path | None, trial: int | None, home: Path | None, store: str | None) -> Path:
    if (path is None) == (trial is None):
        raise ConfigError("which checkpoints: expected a path or --trial ID" + (", got both" if path else ""))
    return path if path is not None else open_store(home, store).trial(cast(int, trial)).directory


def _existing(directory: Path) -> Path:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: there is no such directory")
    return directory


def _report_damaged(damaged: list[CheckpointError]) -> None:
    for error in damaged:
        print(f"damaged: {printable(str(error))}", file=sys.stderr)


def _as_dict(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "path": str(info.path),
        "step": info.step,
        "created": info.created.isoformat(),
        "size": info.size,
        "format_version": info.format_version,
        "dovetail_version": info.dovetail_version,
        "files": {name: file._asdict() for name, file in info.files.items()},
        "summary": plain(info.summary),
    }
