"""View of one run: live curves, throughput, settings, environment, log and checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from fastapi import Request
from nicegui import run as worker
from nicegui import ui

from dovetail.errors import CheckpointError
from dovetail.printing import printable
from dovetail.ui.charts import Options, axes, legend, line, points, shortened
from dovetail.ui.columns import BATCH_LOSS
from dovetail.ui.pages.compare import UNITS
from dovetail.ui.pages.frame import (
    Site,
    address,
    card,
    chart,
    duration_text,
    environment,
    facts,
    follow,
    frame,
    missing,
    moment,
    state_label,
    text_block,
    update_chart,
)
from dovetail.ui.readers import LogTail
from dovetail.ui.runs import Run
from dovetail.ui.series import downsample, smooth
from dovetail.ui.use_charts import usage

_POINTS = 1500
_NORM = "gradient norm before clipping"
_TITLES = {"gradients_size": _NORM}
# The sampled values that are drawn in a chart, by its title.
_SAMPLED = {"loss": "loss", "lr": "lr", _NORM: "gradient_norm"}
_LABELS = {"loss": "mean of batches between samples"}
_TO_END = "const it = document.getElementById('dt-log'); if (it) it.scrollTop = it.scrollHeight"


def add(site: Site) -> None:
    """Register the view."""

    @ui.page("/run")
    def show(request: Request, id: str = "", x: str = "batches", smoothing: float = 0.0, log_y: bool = False) -> None:
        run = site.run(id)
        with frame(site, request, run.name if run else "Run"):
            if run is None:
                missing("run")
            else:
                _RunView(site, run, x if x in UNITS else "batches", smoothing, log_y)


def panels(run: Run) -> dict[str, list[str]]:
    """Return the metrics of each chart, by its title: `train_loss` and `valid_loss` are in one chart, `loss`."""
    found: dict[str, list[str]] = {}
    for name in run.metrics():
        stage, _, key = name.partition("_")
        title = "loss" if name == BATCH_LOSS else key if key and stage in ("train", "valid", "test") else name
        # `GradientClipping(log=True)` records the mean of each epoch.
        found.setdefault(_TITLES.get(title, title), []).append(name)
    return found


def throughput(run: Run) -> tuple[Any, Any]:
    """Return the batches at the end of each epoch, and the batches per second of the epoch."""
    batches, _ = run.series("train_loss", "batches")
    seconds, _ = run.series("train_loss", "time")
    if len(batches) != len(seconds) or not len(batches):
        return np.empty(0), np.empty(0)
    start = np.r_[0.0, seconds[:-1]]
    spent = np.maximum(seconds - start, 1e-9)
    return batches, np.diff(np.r_[0.0, batches]) / spent


def sampled_throughput(run: Run) -> tuple[Any, Any]:
    """Return the batches at each sample, and the batches per second since the sample before it."""
    batches, _ = run.sampled("batches", "batches")
    seconds, _ = run.sampled("batches", "time")
    done, spent = np.diff(batches), np.diff(seconds)
    # Between two starts, the number of batches falls, or the time of the pause is between them.
    is_known = (done > 0) & (spent > 0) & (spent < 20 * np.median(spent) if len(spent) else True)
    return batches[1:][is_known], done[is_known] / spent[is_known]


class _RunView:
    """The parts of the view; charts are updated in place."""

    def __init__(self, site: Site, run: Run, x: str, smoothing: float, log_y: bool) -> None:
        self.site, self.run, self.x = site, run, x
        self.smoothing, self.log_y = min(max(smoothing, 0.0), 0.99), log_y
        self.charts: dict[str, Any] = {}
        self._header()
        self._controls()
        self.area = ui.element("div").classes("dt-grid")
        self._charts()
        with ui.element("div").classes("dt-grid"):
            self._settings()
            self._environment()
            self._explain()
        self._checkpoints()
        self._log()
        follow(lambda: (run.version, int(run.summary().seconds or 0)), self._refresh)

    @ui.refreshable_method
    def _header(self) -> None:
        it = self.run.summary()
        with ui.row().classes("items-baseline gap-3 w-full"):
            with ui.element("h1").classes("text-xl font-semibold m-0 dt-wrap leading-tight"):
                ui.label(shortened(it.name, 120))
            state_label(it.state)
            ui.label(duration_text(it.seconds)).classes("text-sm")
            for name, value in (("best", it.best), ("last", it.last)):
                if value is not None:
                    ui.label(f"{name} {shortened(it.metric, 30)} {value:.4g}").classes("text-sm")
            usage = _usage(self.run)
            if usage:
                ui.label(usage).classes("text-sm opacity-80")
        if it.error:
            ui.label(printable(it.error)).classes("text-red-700 dark:text-red-300 dt-wrap")

    def _controls(self) -> None:
        with ui.row().classes("items-center gap-3 w-full"):
            ui.select(UNITS, value=self.x, label="x axis").props("dense outlined").classes(
                "min-w-[7rem]"
            ).on_value_change(lambda e: self._set(x=e.value))
            with ui.column().classes("gap-0 w-36"):
                ui.label("Smoothing").classes("text-xs opacity-80")
                ui.slider(min=0, max=0.99, step=0.01, value=self.smoothing).props(
                    "label dense aria-label='Smoothing'"
                ).on("change", lambda e: self._set(smoothing=float(e.args)), throttle=0.1)
            ui.checkbox("log y", value=self.log_y).props("dense").on_value_change(lambda e: self._set(log_y=e.value))
            for kind in ("csv", "json"):
                ui.button(
                    kind.upper(),
                    on_click=lambda kind=kind: ui.navigate.to(address(f"/download/run.{kind}", id=self.run.id)),
                ).props("flat no-caps")

    def _set(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)
        place = address("/run", id=self.run.id, x=self.x, smoothing=self.smoothing or "", log_y=self.log_y)
        ui.navigate.history.replace(place)
        self._charts()

    def _charts(self) -> None:
        for title, options in self._options():
            if title in self.charts:
                update_chart(self.charts[title], options)
            else:
                with self.area, card(title):
                    self.charts[title] = chart(options, "17rem", title)

    def _options(self) -> Iterator[tuple[str, Options]]:
        for title, names in panels(self.run).items():
            options = axes(UNITS[self.x], log_y=self.log_y and title != "lr")
            # Losses of single batches are behind the others, and pale.
            for index, name in enumerate(sorted(names, key=lambda name: name == BATCH_LOSS)):
                xs, ys = self.run.series(name, self.x)
                if name == BATCH_LOSS:
                    # The means that follow are a curve of their own.
                    num_losses = len(self.run.load().losses)
                    xs, ys = xs[:num_losses], ys[:num_losses]
                if self.log_y:
                    xs, ys = xs[ys > 0], ys[ys > 0]
                xs, ys = downsample(xs, smooth(ys, self.smoothing), _POINTS)
                pale = {"z": 1, "lineStyle": {"width": 1, "opacity": 0.45, "color": "#56B4E9"}, "color": "#56B4E9"}
                options["series"].append(line(name, points(xs, ys), index, **(pale if name == BATCH_LOSS else {})))
            self._add_samples(title, options)
            yield title, legend(options, len(options["series"]))
        # Before the first row of the history, there are only samples.
        for title in [each for each in _SAMPLED if each not in panels(self.run)]:
            options = axes(UNITS[self.x], log_y=self.log_y and title != "lr")
            if self._add_samples(title, options):
                yield title, options
        options = axes("batch")
        found = {"mean of each epoch": throughput(self.run), "between samples": sampled_throughput(self.run)}
        for index, (name, (batches, speed)) in enumerate(found.items()):
            if len(batches):
                options["series"].append(line(name, points(*downsample(batches, speed, _POINTS)), 2 + 2 * index))
        if options["series"]:
            yield "throughput, batches per second", legend(options, len(options["series"]))
        samples, journal = self.run.live(), self.run.journal
        if samples is not None:
            yield from usage(samples, None if journal is None else journal.first_start)

    def _add_samples(self, title: str, options: Options) -> bool:
        """Add the sampled values that belong to a chart, and return whether there are any."""
        name = _SAMPLED.get(title)
        xs, ys = self.run.sampled(name, self.x) if name else (np.empty(0), np.empty(0))
        if self.log_y:
            xs, ys = xs[ys > 0], ys[ys > 0]
        if len(xs):
            drawn = points(*downsample(xs, smooth(ys, self.smoothing), _POINTS))
            label = _LABELS.get(title, f"{name}, sampled")
            options["series"].append(line(label, drawn, len(options["series"]), z=3))
        return bool(len(xs))

    def _settings(self) -> None:
        settings = self.run.settings
        with card("Configuration"):
            if settings:
                facts(list(settings.items()))
            else:
                ui.label("The run has no journal, so its settings are unknown.").classes("text-sm opacity-80")

    def _environment(self) -> None:
        journal = self.run.journal
        if journal is None or not journal.start:
            return
        with card("Environment"):
            facts(environment(journal))

    def _explain(self) -> None:
        explained = self.run.journal.start.get("explain") if self.run.journal else None
        if isinstance(explained, str):
            with card("Parts of the trainer"):
                text_block(explained)

    def _checkpoints(self) -> None:
        from dovetail.checkpoint.store import scan

        try:
            infos, damaged = scan(self.run.folder)
        except (CheckpointError, OSError):
            return
        if not infos and not damaged:
            return
        with card("Checkpoints", "w-full"):
            for info in sorted(infos, key=lambda it: it.created, reverse=True)[:200]:
                with ui.row().classes("items-center gap-3 w-full py-1"):
                    ui.label(shortened(info.path.name, 60)).classes(
                        "dt-wrap" + (" font-semibold" if info.path.name.startswith("best_") else "")
                    )
                    ui.label(f"batch {info.step}, {_size(info.size)}, {moment(info.created.timestamp())}").classes(
                        "text-sm"
                    )
                    answer = ui.label("").classes("text-sm").props("role=status")
                    ui.button(
                        "Verify", on_click=lambda path=info.path, answer=answer: self._verify(path, answer)
                    ).props("dense flat no-caps")
            for error in damaged:
                ui.label(printable(str(error))).classes("text-red-700 dt-wrap")

    async def _verify(self, path: Path, answer: Any) -> None:
        answer.text = "reading …"
        answer.text = await worker.io_bound(_verified, path)

    def _log(self) -> None:
        path = _log_file(self.run.folder)
        if path is None:
            return
        tail = LogTail(path)
        tail.update()
        with card(f"Log: {path.name}", "w-full"):
            block = text_block(tail.text, "24rem")
            block.props["id"] = "dt-log"

        def refresh() -> None:
            if tail.update():
                block.text = printable(tail.text, lines=True)
                ui.run_javascript(_TO_END)

        ui.timer(0.5, refresh)
        ui.timer(0.1, lambda: ui.run_javascript(_TO_END), once=True)

    def _refresh(self) -> None:
        self._header.refresh()
        version = (self.run.version, self.x)
        if version != getattr(self, "_drawn", None):
            self._drawn = version
            self._charts()


def _verified(path: Path) -> str:
    from dovetail import checkpoint

    try:
        checkpoint.verify(path)
    except CheckpointError as error:
        return f"damaged: {printable(str(error))}"
    return "✓ intact"


def _log_file(folder: Path) -> Path | None:
    """Return the log file in the folder of a run: `log.txt`, or else the newest file that ends with `.log`."""
    if (folder / "log.txt").is_file() and not (folder / "log.txt").is_symlink():
        return folder / "log.txt"
    try:
        found = [path for path in folder.glob("*.log") if path.is_file() and not path.is_symlink()]
        return max(found, key=lambda path: path.stat().st_mtime, default=None)
    except OSError:
        return None


def _usage(run: Run) -> str:
    """Return the CPU and memory use of the run's process and its children; empty if it does not run here."""
    process = run.journal.process() if run.journal is not None and run.summary().state == "running" else None
    if process is None:
        return ""
    try:
        family = [process, *process.children(recursive=True)]
        memory = sum(each.memory_info().rss for each in family)
        spent = process.cpu_times()
        age = max(1e-3, time.time() - process.create_time())
        share = 100 * (spent.user + spent.system) / age
        return f"process {process.pid}: {_size(memory)} of memory, {share:.0f} % of a core"
    except psutil.Error:
        return ""


def _size(count: int) -> str:
    unit = min(3, int(math.log10(max(count, 1)) // 3))
    return f"{count / 1000**unit:.{1 if unit else 0}f} {('B', 'kB', 'MB', 'GB')[unit]}"
