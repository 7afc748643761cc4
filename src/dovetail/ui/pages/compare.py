"""View that compares up to 100 runs: overlaid curves, and the settings that differ."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from nicegui import events, ui

from dovetail.printing import printable
from dovetail.ui.charts import Options, comparison, shortened
from dovetail.ui.compare import groups_over_seeds, varied_settings
from dovetail.ui.experiments import cell, finite
from dovetail.ui.pages.frame import NUMBER, SYMBOLS, Site, address, card, chart, follow, frame, update_chart
from dovetail.ui.pages.tables import TableLink, set_link
from dovetail.ui.runs import Run
from dovetail.ui.series import band, downsample, smooth

MOST_RUNS = 100
UNITS = {
    "batches": "batch",
    "updates": "update",
    "epoch": "epoch",
    "samples": "sample",
    "time": "time in s",
    "row": "row",
}
# Points of all curves together: more would make the chart slow.
_POINTS = 20_000


def add(site: Site) -> None:
    """Register the view."""

    @ui.page("/compare")
    def show(
        request: Request,
        runs: str = "",
        metric: str = "",
        x: str = "batches",
        smoothing: float = 0.0,
        log_x: bool = False,
        log_y: bool = False,
        bands: bool = False,
        baseline: str = "",
        everything: bool = False,
    ) -> None:
        with frame(site, request, "Compare", modules=["nicegui-echart", "nicegui-aggrid"]):
            chosen = list(dict.fromkeys(runs.split(",")))[:MOST_RUNS]
            # One pass over the library instead of one per run.
            by_id = {run.id: run for run in site.library.runs.values()}
            found = [by_id[each] for each in chosen if each in by_id]
            if not found:
                ui.label("Select runs in the table of all runs, and choose Compare.")
                ui.link("All runs", "/")
                return
            _Comparison(site, TableLink.of(request.query_params), found, metric, x if x in UNITS else "batches",
                        smoothing, log_x, log_y, bands, baseline, everything)  # fmt: skip


class _Comparison:
    """The controls, the chart and the table. Every setting is part of the address."""

    def __init__(
        self,
        site: Site,
        link: TableLink,
        runs: list[Run],
        metric: str,
        x: str,
        smoothing: float,
        log_x: bool,
        log_y: bool,
        bands: bool,
        baseline: str,
        everything: bool,
    ) -> None:
        self.site, self.link, self.runs = site, link, runs
        # A run that has not written a row has no metric.
        metrics = list(dict.fromkeys(name for run in runs for name in run.load().metrics())) or [""]
        mains = [run.summary().metric for run in runs]
        self.metric = metric if metric in metrics else max(sorted({*mains} & {*metrics}) or metrics, key=mains.count)
        self.x, self.smoothing = x, min(max(smoothing, 0.0), 0.99)
        self.log_x, self.log_y, self.bands, self.everything = log_x, log_y, bands, everything
        self.baseline = baseline if baseline in {run.id for run in runs} else ""
        self._controls(metrics)
        with card("", "w-full"):
            self.chart = chart(self._options(), "26rem", self.metric)
        self._table()
        follow(lambda: [run.version for run in self.runs], self._redraw)

    def _controls(self, metrics: list[str]) -> None:
        with ui.row().classes("w-full items-center gap-3"):
            names = {name: shortened(name, 40) for name in metrics}
            ui.select(names, value=self.metric, label="Metric", with_input=len(names) > 10).props(
                "dense outlined"
            ).classes("min-w-[11rem]").on_value_change(lambda e: self._set(metric=e.value))
            ui.select(UNITS, value=self.x, label="x axis").props("dense outlined").classes(
                "min-w-[7rem]"
            ).on_value_change(lambda e: self._set(x=e.value))
            with ui.column().classes("gap-0 w-36"):
                ui.label("Smoothing").classes("text-xs opacity-80")
                ui.slider(min=0, max=0.99, step=0.01, value=self.smoothing).props(
                    "label dense aria-label='Smoothing'"
                ).on("change", lambda e: self._set(smoothing=float(e.args)), throttle=0.1)
            for name, text in (("log_x", "log x"), ("log_y", "log y"), ("bands", "bands over seeds")):
                ui.checkbox(text, value=getattr(self, name)).props("dense").on_value_change(
                    lambda e, name=name: self._set(**{name: e.value})
                )
            names = {"": "none", **{run.id: shortened(run.name, 40) for run in self.runs}}
            ui.select(names, value=self.baseline, label="Baseline").props("dense outlined").classes(
                "min-w-[9rem]"
            ).on_value_change(lambda e: self._set(baseline=e.value))
            ui.button(
                "CSV", on_click=lambda: ui.navigate.to(address("/download/compare.csv", **self._settings()))
            ).props("flat no-caps")
            ui.button(
                "JSON", on_click=lambda: ui.navigate.to(address("/download/compare.json", **self._settings()))
            ).props("flat no-caps")

    def _settings(self) -> dict[str, Any]:
        return {
            "runs": ",".join(run.id for run in self.runs),
            "metric": self.metric,
            "x": self.x,
            "smoothing": self.smoothing or "",
            "log_x": self.log_x,
            "log_y": self.log_y,
            "bands": self.bands,
            "baseline": self.baseline,
            "everything": self.everything,
        }

    def _set(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self, name, value)
        set_link(**self._settings())
        self._redraw()

    def _show_everything(self, value: bool) -> None:
        self.everything = value
        # The table gets other columns.
        set_link(**self._settings())
        ui.navigate.reload()

    def _redraw(self) -> None:
        update_chart(self.chart, self._options())
        rows = self._rows()
        self.grid.run_grid_method("setGridOption", "rowData", rows)

    def _options(self) -> Options:
        most = max(100, min(1500, _POINTS // len(self.runs)))
        curves = []
        for run in self.runs:
            xs, ys = run.series(self.metric, self.x)
            curves.append((xs, smooth(ys, self.smoothing)))
        names = self._names()
        if self.bands:
            groups = groups_over_seeds([run.settings for run in self.runs])
            shown = []
            for group in groups:
                label = names[group[0]] + (f" and {len(group) - 1} more" if len(group) > 1 else "")
                shown.append((label, *band([curves[index] for index in group])))
            return comparison([], shown, UNITS[self.x], self.metric, log_x=self.log_x, log_y=self.log_y)
        lines = [
            (name, *downsample(xs, ys, most), run.id == self.baseline)
            for name, run, (xs, ys) in zip(names, self.runs, curves, strict=True)
        ]
        return comparison(lines, [], UNITS[self.x], self.metric, log_x=self.log_x, log_y=self.log_y)

    def _names(self) -> list[str]:
        """Return names for the legend; trials of several experiments also get the name of their experiment."""
        groups = {run.group for run in self.runs}
        return [f"{run.name}, {run.group}" if run.group and len(groups) > 1 else run.name for run in self.runs]

    # The table

    def _table(self) -> None:
        self.columns = varied_settings([run.settings for run in self.runs], all_names=self.everything)
        with card("Settings and results", "w-full"):
            ui.checkbox("show equal settings, too", value=self.everything).props("dense").on_value_change(
                lambda e: self._show_everything(e.value)
            )
            number = {":valueFormatter": NUMBER, "type": "rightAligned", "width": 120}
            columns: list[dict[str, Any]] = [
                {"field": "name", "headerName": "Run", "pinned": "left", "width": 200, "tooltipField": "name",
                 "cellClass": "cursor-pointer underline"},
                {"field": "state", "headerName": "State", "width": 125},
                {"field": "last", "headerName": "Last", **number},
                {"field": "delta", "headerName": "Δ to baseline", **number, "hide": not self.baseline},
                *({"field": f"hp:{name}", "headerName": shortened(name, 40), ":valueFormatter": NUMBER, "width": 150}
                  for name in self.columns),
            ]  # fmt: skip
            options = {
                **self.link.options(columns),
                "rowData": self._rows(),
                ":getRowId": "(p) => p.data.id",
                "domLayout": "autoHeight" if len(self.runs) < 15 else "normal",
            }
            self.grid = ui.aggrid(options, auto_size_columns=False).classes("w-full")
            if len(self.runs) >= 15:
                self.grid.style("height: 32rem")
            else:
                self.grid.style("height: auto")
            self.grid.on("cellClicked", self._open, ["colId", "data"])

    def _open(self, event: events.GenericEventArguments) -> None:
        if event.args.get("colId") == "name":
            ui.navigate.to(address("/run", id=event.args["data"]["id"]))

    def _rows(self) -> list[dict[str, Any]]:
        rows = result_rows(self.runs, self.metric, self.baseline)
        self.columns = varied_settings([run.settings for run in self.runs], all_names=self.everything)
        for index, row in enumerate(rows):
            row |= {f"hp:{name}": cell(column[index]) for name, column in self.columns.items()}
        self.grid_shows_delta()
        return rows

    def grid_shows_delta(self) -> None:
        """Show the column of differences only if there is a baseline."""
        if hasattr(self, "grid"):
            self.grid.run_grid_method("setColumnsVisible", ["delta"], bool(self.baseline))


def result_rows(runs: list[Run], metric: str, baseline: str = "") -> list[dict[str, Any]]:
    """Return the last value of a metric for each run, and its difference to the one of the baseline."""
    values = {run.id: run.load().last(metric) for run in runs}
    base = values.get(baseline)
    rows = []
    for run in runs:
        last = values[run.id]
        delta = None if base is None or last is None else last - base
        rows.append(
            {
                "id": run.id,
                "name": printable(run.name)[:300],
                "state": SYMBOLS[run.summary().state],
                "last": finite(last),
                "delta": finite(delta),
            }
        )
    return rows
