"""Command `dovetail plan`: the memory that a training script needs, before it trains."""

from __future__ import annotations

import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.output import print_json, print_line
from dovetail.errors import ConfigError
from dovetail.printing import show_bytes

if TYPE_CHECKING:
    from dovetail.trainers.memory_plan import MemoryPlan


def plan(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The training script.", exists=True, dir_okay=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="The number of processes.", show_default="the trainer's own")
    ] = None,
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="SIZE", help="The memory of one device, such as 80GB or 24GiB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the plan, as JSON.")] = False,
) -> None:
    """Show the peak memory of a training step without training.

    The script runs up to its first call of fit; this call is planned instead, and the script ends there. The exit
    code is 1 if the step does not fit into the given memory.
    """
    size = None if memory is None else parse_bytes(memory)
    from dovetail.trainers.memory_plan import plan_script

    # The output of the script must not mix with the plan.
    with redirect_stdout(sys.stderr):
        found = plan_script(script, arguments or [], num_processes=gpus, memory=size)
    if as_json:
        print_json(found.to_plain())
    else:
        print_line("\n".join(_table(found)))
    if found.fits is False:
        raise typer.Exit(1)


def parse_bytes(text: str) -> int:
    """Return the number of bytes of a text such as `80GB` (decimal) or `24GiB` (binary).

    Example:
        >>> parse_bytes("1.5 GB"), parse_bytes("2KiB"), parse_bytes("100")
        (1500000000, 2048, 100)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is None or (match[3] and not match[2]) or not float(match[1]):
        raise ConfigError(f"memory: expected a size such as 80GB or 24GiB, got {text!r}")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _table(plan: MemoryPlan) -> list[str]:
    processes = "one process" if plan.num_processes == 1 else f"each of {plan.num_processes} processes, {plan.strategy}"
    lines = [f"memory of {processes}, batches of {plan.batch_size}"]
    for kind, size in plan.kinds.items():
        lines.append(f"  {kind:<12} {show_bytes(size):>12} {size / max(1, plan.peak):>6.1%}")
    lines.append(f"  {'peak':<12} {show_bytes(plan.peak):>12}")
    if plan.collectives:
        lines.append("bytes that a process exchanges per update")
        lines += [f"  {name:<14} {show_bytes(size):>10}" for name, size in plan.collectives.items()]
    if plan.memory is not None:
        if plan.fits:
            lines.append(f"fits into {show_bytes(plan.memory)}: {show_bytes(plan.memory - plan.peak)} are left")
        else:
            lines.append(f"does not fit into {show_bytes(plan.memory)}: {show_bytes(plan.peak - plan.memory)} too much")
            largest = max(plan.kinds, key=lambda kind: plan.kinds[kind])
            lines.append(f"  the largest part is {largest}: {_ADVICE.get(largest, _ADVICE['temporary'])}")
    lines += [f"note: {note}" for note in plan.notes]
    return lines


_SHARD = "FSDPTrainer divides it over the processes"
_ADVICE = {
    "parameters": _SHARD,
    "gradients": _SHARD,
    "optimizer": _SHARD,
    "activations": "use ActivationCheckpointTrainer, smaller batches or AMPTrainer",
    "gathered": "choose smaller blocks with shard=",
    "messages": "choose smaller blocks with shard=",
    "buckets": _SHARD,
    "temporary": "use smaller batches",
}
