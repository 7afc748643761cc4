"""Downloads: the tables and curves of the views as CSV or JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fastapi import HTTPException, Response

from dovetail.ui.columns import rows_of
from dovetail.ui.compare import as_csv, as_json
from dovetail.ui.pages.compare import MOST_RUNS, UNITS
from dovetail.ui.pages.frame import Site
from dovetail.ui.samples import NAMES
from dovetail.ui.series import smooth

if TYPE_CHECKING:
    from fastapi import FastAPI

Kind = Literal["csv", "json"]


def add(application: FastAPI, site: Site) -> None:
    """Register the downloads."""

    @application.get("/download/runs.{kind}")
    def runs(kind: Kind) -> Response:
        rows = []
        for run in site.library.runs.values():
            summary, note = vars(run.summary()), site.library.note(run)
            kept = {name: value for name, value in summary.items() if name not in ("key", "spark")}
            rows.append({**kept, "tags": ", ".join(note.tags), "note": note.text,
                         **{f"settings.{name}": value for name, value in run.settings.items()}})  # fmt: skip
        return _file(rows, "runs", kind)

    @application.get("/download/run.{kind}")
    def run(kind: Kind, id: str = "") -> Response:
        if (found := site.run(id)) is None:
            raise HTTPException(404, "there is no such run")
        return _file(rows_of(found.load()), "run", kind)

    @application.get("/download/samples.{kind}")
    def samples(kind: Kind, id: str = "") -> Response:
        found = site.run(id)
        reader = None if found is None else found.live()
        if reader is None:
            raise HTTPException(404, "there is no such run, or it has no samples")
        columns = {name: each for name, each in zip(NAMES, reader.columns(*NAMES), strict=True) if each is not None}
        rows = [dict(zip(columns, values, strict=True))
                for values in zip(*(each.tolist() for each in columns.values()), strict=True)]  # fmt: skip
        return _file(rows, "samples", kind)

    @application.get("/download/partition.{kind}")
    def partition(kind: Kind, id: str = "") -> Response:
        found = next((each for each in site.library.federations.values() if each.id == id), None)
        if found is None or found.partition is None:
            raise HTTPException(404, "there is no such federation, or its partition is unknown")
        return _file(found.partition.rows(), "partition", kind)

    @application.get("/download/compare.{kind}")
    def compare(kind: Kind, runs: str = "", metric: str = "", x: str = "batches", smoothing: float = 0.0) -> Response:
        chosen = [found for each in runs.split(",")[:MOST_RUNS] if (found := site.run(each)) is not None]
        if x not in UNITS:
            raise HTTPException(400, f"x: expected one of {', '.join(UNITS)}")
        rows = []
        for each in chosen:
            xs, ys = each.series(metric, x)
            values = smooth(ys, min(smoothing, 0.99)).tolist()
            rows += [
                {"run": each.name, x: place, "value": value} for place, value in zip(xs.tolist(), values, strict=True)
            ]
        return _file(rows, "compare", kind)

    @application.get("/download/federation.{kind}")
    def federation(kind: Kind, id: str = "") -> Response:
        found = next((each for each in site.library.federations.values() if each.id == id), None)
        if found is None:
            raise HTTPException(404, "there is no such federation")
        rows = [{**{name: value for name, value in vars(each).items() if name != "metrics"}, **each.metrics}
                for each in found.rounds]  # fmt: skip
        return _file(rows, "federation", kind)


def _file(rows: Iterable[Mapping[str, Any]], name: str, kind: Kind) -> Response:
    text, media = (as_csv(rows), "text/csv") if kind == "csv" else (as_json(rows), "application/json")
    headers = {"Content-Disposition": f'attachment; filename="{name}.{kind}"', "Cache-Control": "no-store"}
    return Response(text.encode("utf-8", "replace"), media_type=f"{media}; charset=utf-8", headers=headers)
