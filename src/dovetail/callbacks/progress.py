"""Display of the progress of training: on a terminal, in a notebook, or as lines of a log."""

from __future__ import annotations

import io
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dovetail.callbacks.base import Callback, Report
from dovetail.errors import ConfigError
from dovetail.units import Batches, Epochs

if TYPE_CHECKING:
    from dovetail.trainers.context import TrainingContext


class ProgressDisplay(Callback):
    """Show the current epoch as a bar, and print one line per epoch.

    On a terminal the bar shows the batches, the running means of loss and metrics, the learning rate, the speed and
    the remaining time. In a notebook bar and lines are one output that is updated in place. Elsewhere (a file, a pipe,
    a build server) there are only the lines. A validation inside of an epoch has its own line, and so has the
    reason why training was stopped.

    The display does nothing in a step: it reads the reports of the loop and is redrawn from time to time.

    Args:
        refresh_per_second: The maximal number of redraws per second.
        console: The console to draw on; None means the standard output at the start of training.

    Example:
        >>> from dovetail.trainers.context import TrainingContext
        >>> display, context = ProgressDisplay(console=Console(width=100, force_terminal=False)), TrainingContext()
        >>> display.on_train_start(context)
        >>> context.progress.epoch += 1
        >>> display.on_epoch_end(context, {"train_loss": 0.5, "valid_loss": 0.25})  # doctest: +ELLIPSIS
        epoch 1  train loss 0.5000  valid loss 0.2500  ...s
    """

    main_rank_only = True

    def __init__(self, refresh_per_second: float = 4.0, console: Console | None = None) -> None:
        if not refresh_per_second > 0:
            raise ConfigError(f"ProgressDisplay: refresh_per_second: expected more than 0, got {refresh_per_second!r}")
        self.refresh_per_second = refresh_per_second
        self._console = console
        self._surface: _Surface = _Surface()
        self._period = 1 / refresh_per_second
        self._due = math.inf
        self._clear_run()

    def __getstate__(self) -> dict[str, Any]:
        # A console belongs to one process.
        return {**self.__dict__, "_console": None, "_surface": _Surface()}

    def _clear_run(self) -> None:
        self._best = math.inf
        self._printed_at = -1
        self._began = time.monotonic()
        self._done_before: float | None = None
        self._clear_epoch()

    def _clear_epoch(self) -> None:
        self._total: int | None = None
        self._label = ""
        self._first_batch = self._first_record = 0
        self._epoch_began = self._training_began = self._validation_began = time.monotonic()
        self._metrics: Mapping[str, float] = {}
        self._validation: Mapping[str, float] = {}

    def on_train_start(self, context: TrainingContext) -> None:
        # An earlier run may have ended without `on_train_end`.
        self._surface.close()
        self._surface = _surface(self._console, self._period)
        # Without a bar nothing is ever due, so that a report costs one comparison.
        self._due = 0.0 if self._surface.has_bar else math.inf
        self._clear_run()
        self._begin_epoch(context)
        # The work of earlier runs must not count for the speed of this one.
        self._done_before = self._done(context)

    def on_epoch_start(self, context: TrainingContext) -> None:
        self._begin_epoch(context)
        self._draw_if_due(context)

    def on_report(self, context: TrainingContext, report: Report) -> None:
        self._metrics = report.metrics
        self._draw_if_due(context)

    def on_validation_start(self, context: TrainingContext) -> None:
        self._validation_began = now = time.monotonic()
        # Draw at once in a long epoch, because its validation may be long, too, and has no reports.
        if self._surface.has_bar and (now >= self._due or now - self._epoch_began > self._period):
            self._due = now + self._period
            self._surface.show(self._bar(context, now, validates=True))

    def on_validation_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        # The speed is the speed of training, without validations.
        self._training_began += time.monotonic() - self._validation_began
        self._validation = metrics
        # A validation at the end of an epoch is part of the epoch's line.
        if context.progress.batch not in (0, self._total):
            self._print_partial(context)

    def on_epoch_end(self, context: TrainingContext, metrics: Mapping[str, float]) -> None:
        self._validation = {name: value for name, value in metrics.items() if name.startswith("valid_")}
        train = {name: value for name, value in metrics.items() if name not in self._validation}
        self._print_line(context, train)

    def on_exception(self, context: TrainingContext, error: BaseException) -> None:
        self._close()

    def on_train_end(self, context: TrainingContext) -> None:
        if context.progress.batch > 0 and context.progress.batches != self._printed_at:
            self._print_partial(context)
        # A validation after the last epoch, which no line has shown yet.
        elif self._validation:
            self._print_line(context, {})
        if context.run.stop_reason is not None:
            self._surface.print(Text.assemble(("stopped: ", "bold yellow"), context.run.stop_reason))
        self._close()

    def _close(self) -> None:
        self._surface.close()
        self._surface, self._due = _Surface(), math.inf

    # Content of the display

    def _begin_epoch(self, context: TrainingContext) -> None:
        self._clear_epoch()
        trainer, has_data = context.run.trainer, context.run.data.get("train") is not None
        self._total = trainer.num_batches("train") if trainer is not None and has_data else None
        self._first_batch, self._first_record = context.progress.batch, context.progress.records
        number, last = context.progress.epoch + 1, self._last_epoch(context)
        self._label = f"epoch {number}" if last is None else f"epoch {number:>{len(str(last))}}/{last}"

    def _last_epoch(self, context: TrainingContext) -> int | None:
        length = context.run.plan.max_length if context.run.plan is not None else None
        if isinstance(length, Epochs):
            return length.length
        if isinstance(length, Batches) and self._total:
            return math.ceil(length.length / self._total)
        return None

    def _draw_if_due(self, context: TrainingContext) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._period
            self._surface.show(self._bar(context, now))

    def _bar(self, context: TrainingContext, now: float, *, validates: bool = False) -> RenderableType:
        """Return the row of the display: label, progress bar, batch, metrics and speed, as far as they fit."""
        batch, total = context.progress.batch, self._total
        # After the last batch the counters are already at the next epoch, but the display is not.
        if validates and batch == 0 and total is not None:
            batch = total
        head = Text(self._label, "bold")
        tail = [Text(self._count(batch) if total else f"batch {batch}")]
        metrics = [_measure(name, value) for name, value in self._metrics.items() if name != "tokens"]
        end = [Text("validating", "magenta")] if validates else self._speed(context, now)
        width = self._surface.width - head.cell_len - 12
        # On a narrow terminal the last metrics are left out; the first one, the loss, stays.
        while len(metrics) > 1 and _width([*tail, *metrics, *end]) > width:
            metrics.pop()
        tail += metrics + end
        row = Table.grid(padding=(0, 2, 0, 0))
        if total:
            # In steps of five, so that the width of the bar does not change when a number gets another digit.
            room = (self._surface.width - head.cell_len - _width(tail) - 4) // 5 * 5
            bar = ProgressBar(
                total, min(batch, total), width=max(10, min(30, room)), complete_style="cyan", finished_style="green"
            )
            row.add_row(head, bar, Text("  ").join(tail))
        else:
            row.add_row(head, Text("  ").join(tail))
        for column in row.columns:
            column.no_wrap, column.overflow = True, "ellipsis"
        return row

    def _speed(self, context: TrainingContext, now: float) -> list[Text]:
        """Return the learning rate, the batches per second and the remaining time."""
        shown = []
        if context.optimizers:
            shown.append(_pair("lr", f"{float(context.optimizers[0].param_groups[0]['lr']):.2g}"))
        seconds, batches = now - self._training_began, context.progress.batch - self._first_batch
        if batches and seconds > 0:
            rate = batches / seconds
            shown.append(Text(f"{rate:.0f} it/s" if rate >= 10 else f"{rate:.2f} it/s", "dim"))
            tokens = (context.progress.records - self._first_record) * context.run.meter.tokens_per_sample
            shown += [Text(f"{_short(tokens / seconds)} tok/s", "dim")] if tokens else []
        done, before = self._done(context), self._done_before
        if done is not None and before is not None and done > before:
            left = (now - self._began) * (1 - done) / (done - before)
            shown.append(_pair("eta", _duration(left)))
        return shown

    def _done(self, context: TrainingContext) -> float | None:
        """Return the completed share of the planned training, or None if it is unknown."""
        if context.run.plan is None:
            return None
        length, progress = context.run.plan.max_length, context.progress
        done: float = length.count(progress)
        if isinstance(length, Epochs):
            if not self._total:
                return None
            # `count` has whole epochs; add the part of the running one.
            done += progress.batch / self._total
        return done / length.length if length.length else None

    def _print_line(self, context: TrainingContext, train: Mapping[str, float], *, at_batch: bool = False) -> None:
        """Print the permanent line of an epoch, or with `at_batch` of a position inside of it."""
        parts = [Text(self._label, "bold")]
        if at_batch:
            parts.append(Text(f"batch {self._count(context.progress.batch)}"))
        parts += [self._stage("train", "cyan", train)] if train else []
        if self._validation:
            weights = next((it.validated_weights for it in context.callbacks if it.validated_weights), "")
            parts.append(self._stage("valid", "magenta", self._validation, weights))
        parts.append(Text(_duration(time.monotonic() - self._epoch_began, exact=True), "dim"))
        self._validation = {}
        self._printed_at = context.progress.batches
        self._surface.print(Text("  ").join(parts))

    def _print_partial(self, context: TrainingContext) -> None:
        train = {f"train_{name}": value for name, value in self._metrics.items()}
        self._print_line(context, train, at_batch=True)

    def _count(self, batch: int) -> str:
        return f"{batch:>{len(str(self._total))}}/{self._total}" if self._total else str(batch)

    def _stage(self, stage: str, style: str, metrics: Mapping[str, float], weights: str = "") -> Text:
        """Return the metrics of a stage as text; the best validation loss so far is green."""
        loss = metrics.get("valid_loss", math.nan)
        is_best = loss < self._best
        self._best = loss if is_best else self._best
        shown = [
            _measure(name.removeprefix(f"{stage}_"), value, "bold green" if is_best and name == "valid_loss" else "")
            for name, value in metrics.items()
            if name != "train_tokens"
        ]
        return Text(" ").join([Text(f"{stage} ({weights})" if weights else stage, style), *shown])


class _Surface:
    """A place for permanent lines and one changing bar; this base class, used between runs, shows nothing."""

    has_bar = False

    @property
    def width(self) -> int:
        """The number of columns for the bar."""
        return 80

    def print(self, line: Text) -> None:
        """Add a permanent line."""

    def show(self, bar: RenderableType) -> None:
        """Redraw the bar."""

    def close(self) -> None:
        """Remove the bar; the lines remain."""


class _Lines(_Surface):
    """A file or a pipe: plain lines, never wrapped."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True, highlight=False)


class _Terminal(_Surface):
    """A terminal, on which the bar is drawn below the lines."""

    has_bar = True

    def __init__(self, console: Console) -> None:
        self._console = console
        # Without a refresh thread, which would take time from the training and draw unchanged content.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    @property
    def width(self) -> int:
        return self._console.width

    def print(self, line: Text) -> None:
        # Remove the bar before printing the line; otherwise the bar of the ended epoch would remain below it.
        self._live.update(Group(), refresh=self._live.is_started)
        self._console.print(line, highlight=False)

    def show(self, bar: RenderableType) -> None:
        self._live.start()
        self._live.update(bar, refresh=True)

    def close(self) -> None:
        self._live.update(Group())
        self._live.stop()


class _Notebook(_Surface):
    """A notebook: one output that is updated in place, with the newest lines and the bar."""

    has_bar = True

    def __init__(self, period: float, display: Callable[..., Any]) -> None:
        self._period = period
        self._display = display
        self._handle: Any = None
        self._lines: deque[Text] = deque(maxlen=_MAX_LINES)
        self._num_lines = 0
        self._due = 0.0

    @property
    def width(self) -> int:
        return 110

    def print(self, line: Text) -> None:
        self._lines.append(line)
        self._num_lines += 1
        # Limits the messages to the browser if there are a thousand short epochs.
        if time.monotonic() >= self._due:
            self.show(Group())

    def show(self, bar: RenderableType) -> None:
        self._due = time.monotonic() + self._period
        hidden = self._num_lines - len(self._lines)
        head = [Text(f"… {hidden} earlier lines", "dim")] if hidden else []
        canvas = Console(file=io.StringIO(), record=True, width=self.width, force_terminal=True, force_jupyter=False)
        canvas.print(Group(*head, *self._lines, bar), highlight=False)
        content = {
            "text/plain": canvas.export_text(clear=False),
            "text/html": canvas.export_html(inline_styles=True, code_format=_HTML),
        }
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def close(self) -> None:
        if self._num_lines or self._handle is not None:
            self.show(Group())


_MAX_LINES = 50
_HTML = '<pre style="white-space:pre;overflow-x:auto;line-height:1.35;font-family:monospace">{code}</pre>'


def _surface(console: Console | None, period: float) -> _Surface:
    """Return the place to display: a notebook, a terminal, or plain lines."""
    is_ours = console is None
    console = console or Console()
    if console.is_jupyter:
        return _Notebook(period, import_module("IPython.display").display)
    # With FORCE_COLOR, rich treats the log of a build server as a terminal.
    is_log = is_ours and ("CI" in os.environ or not console.file.isatty())
    return _Terminal(console) if console.is_interactive and not is_log else _Lines(console)


def _measure(name: str, value: float, style: str = "") -> Text:
    return _pair(name, _number(value), style if math.isfinite(value) else "bold red")


def _pair(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _width(parts: list[Text]) -> int:
    return sum(part.cell_len for part in parts) + 2 * (len(parts) - 1)


def _number(value: float) -> str:
    """Return a number with four decimals if its size allows it, so that the lines of a run align."""
    size = abs(value)
    if size == 0 or not math.isfinite(size) or 1e-3 <= size < 1e3:
        return f"{value:.4f}"
    return f"{value:.1f}" if 1e3 <= size < 1e6 else f"{value:.2e}"


def _short(number: float) -> str:
    """Return a large number with a letter for thousands or millions."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _duration(seconds: float, *, exact: bool = False) -> str:
    if exact and seconds < 60:
        return f"{seconds:.2f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
