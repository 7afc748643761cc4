"""Demo `dovetail demo resume`: a training process is killed and resumed.

`python -m dovetail.demos.resume FOLDER NUM_EPOCHS [BATCH]` is the training process. It prints the loss of every batch
and resumes from the newest checkpoint of the folder, if there is one. If BATCH is given, the process waits after this
batch until it is killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import AdamW

from dovetail import checkpoint
from dovetail.callbacks import Callback
from dovetail.data import digits
from dovetail.data.models import cnn
from dovetail.demos.catalogue import Outcome
from dovetail.demos.pictures import BLUE, GREY, ORANGE, picture
from dovetail.errors import DovetailError
from dovetail.history.drawing import INK, tidy
from dovetail.trainers import Trainer
from dovetail.units import Batches

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext

# The batch after which the process is killed is neither at the end of an epoch nor directly after a checkpoint.
_KILLED_AT = 170
_SAVE_EVERY = 50


def run(folder: Path, *, num_epochs: int = 20) -> Outcome:
    """Train once without an interruption and once with a kill, and compare."""
    straight, killed = folder / "straight", folder / "killed"
    print("starting the same training in two processes; one of them will be killed", flush=True)
    with ThreadPoolExecutor() as pool:
        undisturbed = pool.submit(_run_process, straight, num_epochs)
        before = _run_process(killed, num_epochs, kill_at=_KILLED_AT)
        saved = checkpoint.latest(killed)
        assert saved is not None
        print(f"killed by SIGKILL after batch {max(before)}; its newest checkpoint is {saved.name}", flush=True)
        after = _run_process(killed, num_epochs)
        print(f"the same command resumed with batch {min(after)}; final loss {after[max(after)]:.6f}", flush=True)
        expected = undisturbed.result()
    print(f"the uninterrupted run: {len(expected)} batches, final loss {expected[max(expected)]:.6f}")

    picture(folder / "losses.png", (10, 4.6), partial(_draw, expected, before, after))
    runs = (before, after)
    same = [batch for batch, loss in expected.items() if {run[batch] for run in runs if batch in run} == {loss}]
    digests = [_digest(each) for each in (straight, killed)]
    return Outcome(
        f"{len(same)} of {len(expected)} losses are equal, bit for bit; final weights, optimizer and random states are "
        + ("equal, too" if digests[0] == digests[1] else "NOT equal"),
        {
            "losses.png": "the losses of both runs, batch by batch",
            "straight": "the checkpoints of the uninterrupted run",
            "killed": "the checkpoints of the killed and resumed run",
        },
        ("", "uninterrupted", "killed and resumed"),
        [
            ["batches trained", str(len(expected)), f"{len(before)} + {len(after)}"],
            ["batches trained twice", "0", str(len(before.keys() & after.keys()))],
            ["final loss", repr(expected[max(expected)]), repr(after[max(after)])],
            ["SHA-256 of weights, optimizer, random states", *(digest[:16] + "…" for digest in digests)],
        ],
    )


def train(folder: Path, num_epochs: int, waits_at: int | None = None) -> None:
    """Train on digits, print the number and the loss of every batch, and resume from a checkpoint, if there is one.

    Args:
        folder: The folder of the checkpoints.
        num_epochs: The number of epochs.
        waits_at: After this batch the process waits until its input is closed, so that the parent process can kill
            it at exactly this batch. None means that it does not wait.
    """
    data, _, _ = digits()
    trainer = Trainer(
        # Dropout needs the right random state in every batch, so a wrongly restored one would be visible.
        lambda: nn.Sequential(nn.Dropout(0.1), cnn(channels=1, size=8, classes=10)),
        optimizer=partial(AdamW, lr=3e-3),
        num_epochs=num_epochs,
        batch_size=64,
        checkpoint_dir=folder,
        keep_last=2,
        callbacks=[_PrintLoss(waits_at)],
        verbose=False,
        seed=0,
    )
    trainer.fit(data, checkpoint_period=Batches(_SAVE_EVERY), resume="auto")


class _PrintLoss(Callback):
    def __init__(self, waits_at: int | None) -> None:
        self.waits_at = waits_at

    def on_step_end(self, context: TrainingContext, output: Mapping[str, Any]) -> None:
        # Hexadecimal text has all bits of a float.
        print(context.progress.batches, output["loss"].item().hex(), flush=True)
        # The parent kills this process here; without the wait, it would already be some batches further.
        if context.progress.batches == self.waits_at:
            sys.stdin.read()


def _run_process(folder: Path, num_epochs: int, kill_at: int | None = None) -> dict[int, float]:
    """Run `train` in another process, and return the losses that it printed, by batch."""
    command = [sys.executable, "-m", "dovetail.demos.resume", str(folder), str(num_epochs)]
    command += [] if kill_at is None else [str(kill_at)]
    losses: dict[int, float] = {}
    with subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                # A line without a line end was cut by the kill.
                if line.endswith("\n"):
                    number, loss = line.split()
                    losses[int(number)] = float.fromhex(loss)
                if kill_at is not None and kill_at in losses:
                    process.kill()
        except BaseException:
            # Do not leave the process running if this function fails.
            process.kill()
            raise
    wanted = 0 if kill_at is None else -signal.SIGKILL
    if process.returncode != wanted:
        raise DovetailError(
            f"the training process ended with code {process.returncode}, expected {wanted}: run the demo again"
        )
    return losses


def _digest(folder: Path) -> str:
    """Return the SHA-256 of all tensors in the newest checkpoint: weights, optimizer and random states."""
    newest = checkpoint.latest(folder)
    assert newest is not None
    return checkpoint.inspect(newest).files["tensors.safetensors"].sha256


def _draw(expected: dict[int, float], before: dict[int, float], after: dict[int, float], figure: Any) -> None:
    killed, resumed = max(before), min(after)
    whole, near = figure.subplots(1, 2, width_ratios=[1, 1.3])
    rings = {"marker": "o", "markersize": 9, "markerfacecolor": "none"}
    for axes, ring, dot in ((whole, {}, {}), (near, rings, {"marker": "o", "markersize": 3.5})):
        axes.plot(*_points(expected), color=GREY, linewidth=6, label="uninterrupted")
        axes.plot(*_points(before), color=BLUE, linewidth=1.2, label="before the kill", **ring)
        axes.plot(*_points(after), color=ORANGE, linewidth=1.2, label="resumed", **dot)
        axes.axvline(killed, color=INK, linewidth=1, linestyle="--")
    whole.set_yscale("log")
    tidy(whole, "loss of every batch", x="batch")
    whole.legend(frameon=False, fontsize=9, labelcolor=INK, loc="upper right")

    # Slightly more than the batches that were trained twice.
    first, last = resumed - 15, killed + 15
    seen = [loss for batch, loss in expected.items() if first <= batch <= last]
    near.set(xlim=(first, last), ylim=(0, max(seen) * 1.25))
    note = f"{resumed} to {killed}: trained twice"
    near.axvspan(resumed, killed, color=GREY, alpha=0.25, linewidth=0, zorder=0)
    for text, batch, side in ((note, resumed, "left"), ("SIGKILL", killed, "left")):
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top", "ha": side}
        near.annotate(text, (batch, 1), (6, -6), fontsize=9, color=INK, **place)
    tidy(near, "around the kill", x="batch")


def _points(losses: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
