"""View of one experiment: trials, charts, and buttons that pause, resume, cancel and kill."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import Request
from nicegui import events, ui
from nicegui import run as worker

from dovetail.errors import ConfigError, DovetailError
from dovetail.printing import printable
from dovetail.search.charts import BarChart
from dovetail.search.records import OVER, ExperimentRecord
from dovetail.search.report import best_config, duration, experiment_charts, importance_chart, to_yaml, varied_hparams
from dovetail.ui import charts
from dovetail.ui.experiments import Command, ExperimentSource, log_of, trial_rows
from dovetail.ui.pages.frame import (
    DURATION,
    NUMBER,
    Site,
    address,
    card,
    chart,
    facts,
    follow,
    frame,
    missing,
    text_block,
    update_chart,
)
from dovetail.ui.pages.tables import TableLink
from dovetail.ui.readers import LogTail
from dovetail.ui.runs import short_id

_CONFIRM = {"cancel": "End this experiment permanently? Its trials save first.",
            "kill": "Kill this experiment permanently, without saving?"}  # fmt: skip


def add(site: Site) -> None:
    """Register the view."""

    @ui.page("/experiment")
    def show(request: Request, store: int = 0, id: int = 0) -> None:
        found = site.library.experiment(store, id)
        title = found[1].name if found else "Experiment"
        with frame(site, request, title, modules=["nicegui-echart", "nicegui-aggrid"]):
            if found is None:
                missing("experiment")
            else:
                _ExperimentView(site, TableLink.of(request.query_params), *found)


class _ExperimentView:
    """The parts of the view; the table and the charts are updated in place."""

    def __init__(self, site: Site, link: TableLink, source: ExperimentSource, record: ExperimentRecord) -> None:
        self.site, self.link, self.source, self.id = site, link, source, record.id
        self.drawn: dict[str, Any] = {}
        self._header()
        self._buttons()
        self._table()
        self.area = ui.element("div").classes("dt-grid")
        self._charts()
        with ui.row():
            ui.button("Estimate importance", on_click=self._show_importance).props("outline no-caps")
        self.importance = ui.element("div").classes("w-full")
        self._configuration()
        follow(lambda: self.source.records.get(self.id), self._refresh)

    @property
    def record(self) -> ExperimentRecord:
        """The newest record."""
        return self.source.records[self.id]

    @ui.refreshable_method
    def _header(self) -> None:
        record = self.record
        best = record.best_trial
        with ui.row().classes("items-baseline gap-3 w-full"):
            with ui.element("h1").classes("text-xl font-semibold m-0 dt-wrap leading-tight"):
                ui.label(shortened(record.name))
            no_runner = record.state == "ACTIVE" and not record.is_running
            ui.label(record.state + (" (no runner)" if no_runner else "")).classes("font-semibold")
            ui.label(f"{len(record.trials)} trials · {duration(record.created, record.ended)}").classes("text-sm")
            if best is not None and best.best is not None:
                ui.label(f"best {shortened(record.metric, 30)} {best.best:.4g} (trial {best.id})").classes("text-sm")
        for sentence in (*record.warnings, *([record.reason] if record.reason else [])):
            ui.label(printable(sentence)).classes("text-amber-800 dark:text-amber-300 text-sm dt-wrap")
        if self.source.problem:
            ui.label(printable(self.source.problem)).classes("text-red-700 dt-wrap")

    @ui.refreshable_method
    def _buttons(self) -> None:
        record = self.record
        is_over = record.state in OVER
        with ui.row().classes("gap-2"):
            commands: list[tuple[Command, str, bool]] = [
                ("pause", "pause", record.is_running),
                ("resume", "play_arrow", not record.is_running and not is_over),
                ("cancel", "stop", not is_over),
                ("kill", "dangerous", not is_over),
            ]
            for command, icon, is_possible in commands:
                button = ui.button(command.capitalize(), icon=icon, on_click=partial(self._ask, command))
                button.props("outline no-caps" + ("" if command != "kill" else " color=negative"))
                button.set_enabled(is_possible and not self.site.read_only)
            ui.button("Copy the best configuration", icon="content_copy", on_click=self._copy).props("flat no-caps")
            runs = ",".join(short_id(f"t{self.source.place}-{trial.id}") for trial in record.trials[:100])
            ui.button("Compare trials", on_click=lambda: ui.navigate.to(address("/compare", runs=runs))).props(
                "flat no-caps"
            )

    async def _ask(self, command: Command) -> None:
        if self.site.refuse():
            return
        if command in _CONFIRM and not await _confirmed(_CONFIRM[command]):
            return
        try:
            await worker.io_bound(self.source.command, self.id, command)
            ui.notify(f"{command} requested")
        except (DovetailError, OSError) as error:
            ui.notify(printable(str(error))[:300], type="negative")

    def _copy(self) -> None:
        try:
            ui.clipboard.write(to_yaml(best_config(self.record)))
            ui.notify("copied")
        except ConfigError as error:
            ui.notify(printable(str(error))[:300], type="warning")

    # Trials

    def _table(self) -> None:
        record = self.record
        number = {":valueFormatter": NUMBER, "type": "rightAligned", "width": 115}
        columns: list[dict[str, Any]] = [
            {"field": "id", "headerName": "Trial", "pinned": "left", "width": 90,
             "cellClass": "cursor-pointer underline"},
            {"field": "state", "headerName": "State", "width": 120},
            {"field": "best", "headerName": f"Best {shortened(record.metric, 20)}", **number, "width": 140},
            {"field": "latest", "headerName": "Latest", **number},
            {"field": "batches", "headerName": "Batches", **number},
            *({"field": f"hp:{name}", "headerName": shortened(name, 30), ":valueFormatter": NUMBER, "width": 130}
              for name in varied_hparams(record.trials)),
            {"field": "seconds", "headerName": "Time", **number, ":valueFormatter": DURATION},
            {"field": "restarts", "headerName": "Restarts", **number, "hide": True},
            {"field": "reason", "headerName": "Note", "width": 260, "tooltipField": "reason"},
        ]  # fmt: skip
        options = {
            **self.link.options(columns),
            "rowData": self._rows(),
            ":getRowId": "(p) => String(p.data.id)",
            ":rowClassRules": "{'font-semibold': (p) => p.data.is_best}",
        }
        self.grid = ui.aggrid(options, auto_size_columns=False).classes("w-full").style("height: 20rem")
        self.grid.on("cellClicked", self._open, ["colId", "data"])

    def _rows(self) -> list[dict[str, Any]]:
        return [{**row, "reason": printable(row["reason"])[:300]} for row in trial_rows(self.record)]

    async def _open(self, event: events.GenericEventArguments) -> None:
        if event.args.get("colId") != "id":
            return
        trial_id = int(event.args["data"]["id"])
        trial = self.record.trial(trial_id)
        tail = LogTail(log_of(trial))
        tail.update()
        with ui.dialog() as dialog, ui.card().classes("w-full max-w-4xl"):
            with ui.row().classes("items-center w-full"):
                ui.label(f"Trial {trial_id}").classes("text-lg font-semibold")
                ui.link("curves", address("/run", id=short_id(f"t{self.source.place}-{trial_id}")))
                ui.space()
                is_running = trial.state == "RUNNING" and self.record.is_running and not self.site.read_only
                ui.button("Kill this trial", on_click=partial(self._kill_trial, trial_id)).props(
                    "outline color=negative no-caps"
                ).set_enabled(is_running)
                ui.button(icon="close", on_click=dialog.close).props("flat round aria-label=Close")
            facts(list(trial_rows_facts(self.record, trial_id)))
            block = text_block(tail.text or "The log is empty.", "50vh")

            def refresh() -> None:
                if dialog.value and tail.update():
                    block.text = printable(tail.text, lines=True)

            ui.timer(0.5, refresh)
        dialog.open()

    async def _kill_trial(self, trial_id: int) -> None:
        if self.site.refuse() or not await _confirmed(f"Kill trial {trial_id}?"):
            return
        try:
            await worker.io_bound(self.source.kill_trial, self.id, trial_id)
            ui.notify(f"trial {trial_id} is asked to exit")
        except (DovetailError, OSError) as error:
            ui.notify(printable(str(error))[:300], type="negative")

    # Charts

    def _charts(self) -> None:
        record = self.record
        shared = experiment_charts(record, with_importance=False).values()
        found: dict[str, charts.Options | None] = {
            **{title: None if isinstance(chart, str) else charts.drawn(chart) for title, chart in shared},
            "Rungs: trials that reached a number of batches": charts.rung_bars(record),
            "Workers": charts.gantt(record),
            **{f"{record.metric} by {name}": options for name, options in charts.slices(record)},
        }
        for title, options in found.items():
            if options is None:
                continue
            if title in self.drawn:
                update_chart(self.drawn[title], options)
                continue
            with self.area, card(title):
                self.drawn[title] = chart(options, "17rem", title)

    async def _show_importance(self) -> None:
        found = await worker.io_bound(importance_chart, self.record)
        # None means that the server is shutting down.
        if found is None:
            return
        self.importance.clear()
        with self.importance, card("Importance of hyperparameters"):
            if isinstance(found, BarChart):
                chart(charts.drawn(found), "14rem", "importance")
            ui.label(printable(found.note if isinstance(found, BarChart) else found)).classes("text-sm opacity-80")

    def _configuration(self) -> None:
        with ui.expansion("Configuration").classes("w-full dt-card"):
            text_block(to_yaml(self.record.config), "30rem")

    def _refresh(self) -> None:
        if self.id not in self.source.records:
            return
        self._header.refresh()
        self._buttons.refresh()
        self.grid.run_grid_method("setGridOption", "rowData", self._rows())
        self._charts()


def shortened(text: str, length: int = 100) -> str:
    """Return a name for display."""
    return charts.shortened(text, length)


def trial_rows_facts(record: ExperimentRecord, trial_id: int) -> list[tuple[str, Any]]:
    """Return what the dialog of a trial shows above its log."""
    row = next(row for row in trial_rows(record) if row["id"] == trial_id)
    hparams = [(name.removeprefix("hp:"), value) for name, value in row.items() if name.startswith("hp:")]
    return [
        ("state", row["state"]),
        ("best", row["best"]),
        ("batches", row["batches"]),
        *hparams,
        ("note", row["reason"]),
    ]


async def _confirmed(question: str) -> bool:
    with ui.dialog() as dialog, ui.card():
        ui.label(question)
        with ui.row():
            ui.button("Yes", on_click=lambda: dialog.submit(True)).props("color=negative no-caps")
            ui.button("No", on_click=lambda: dialog.submit(False)).props("flat no-caps")
    return bool(await dialog)
