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
    make_table,
    moment,
    open_store,
    plain,
    print_facts,
    print_json,
)
from dovetail.errors import CheckpointError, ConfigError
from dovetail.printing import printable

if TYPE_CHECKING:
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

    infos, damaged = scan(_existing(_place(path, trial, home, store)))
    if as_json:
        return print_json({"checkpoints": [_as_dict(info) for info in infos], "damaged": [str(e) for e in damaged]})
    rows = [
        (
            info.path.name,
            "" if info.step is None else str(info.step),
            moment(info.created),
            bytes_text(info.size),
            ", ".join(f"{name} {value:.6g}" for name, value in info.metrics.items()),
        )
        for info in infos
    ]
    columns = ("name", "step", "created", "size", "metrics")
    console().print(make_table(*columns, numbers=("step", "size"), long="metrics", rows=rows))
    return _report_damaged(damaged)


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

    format = model_format(output)
    source = _place(path, trial, home, store)
    if trial is not None:
        found = best_checkpoint(source)
        if found is None:
            raise CheckpointError(f"trial {trial} has no checkpoints in {source}")
        source = found
    state = checkpoint.load(source)
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
