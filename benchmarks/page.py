"""The page of all results: `RESULTS.md` and its figures, made from the sections that the benchmarks have written."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import Curve, Row, Section, Table, cells, header, middle_half

__all__ = ["draw", "markdown", "table_markdown"]

INK, QUIET, OURS, OTHERS = "#333333", "#999999", "#0072b2", "#777777"
COLOURS = {"met": "#009e73", "missed": "#d55e00", "unclear": "#e69f00"}

HEAD = "\n\n".join(
    [
        "# Results",
        "What `make bench` has measured. Every section is what its script has written last, with its own date, command "
        "and machine; this page is made from the files in `results/` by `benchmarks/run.py`. The numbers are those of "
        "one small machine: the ratios are what carries over, and not far.",
        "Contestants take turns within each round, in an order that changes, and ratios are taken within a round. A "
        "number is the median of the rounds; the middle half is where half of the rounds lie. A row that compares a "
        "contestant with itself is the noise. A bar is met or missed when the 95 % interval of the median lies on one "
        "side of it, and unclear otherwise. The interval leaves one outlier out: a round more than three times the "
        "width of the middle half away from it.\n",
    ]
)


def markdown(sections: Mapping[str, Section], titles: Mapping[str, str], links: Mapping[str, str]) -> str:
    """Return the page.

    Args:
        sections: What was measured, by name.
        titles: All sections, in their order.
        links: By name, what to say of a section that has a page of its own.
    """
    parts = [HEAD, _overview(sections, titles, links)]
    for name, title in titles.items():
        if name in links:
            parts.append(f"## {title}\n\n{links[name]}\n")
        elif name in sections:
            parts.append(_section(sections[name]))
        else:
            parts.append(f"## {title}\n\nNot measured yet: `python benchmarks/run.py --only {name}`.\n")
    return "\n".join(parts)


def _overview(sections: Mapping[str, Section], titles: Mapping[str, str], links: Mapping[str, str]) -> str:
    lines = ["| section | bars met | missed | unclear | date | seconds |", "|---|---|---|---|---|---|"]
    for name, title in titles.items():
        link = f"[{title}](#{_anchor(title)})"
        if name not in sections:
            lines.append(f"| {link} | | | | {'' if name in links else 'not measured yet'} | |")
            continue
        section = sections[name]
        rows = [row for table in section.tables for row in table.rows if row.bar is not None and row.samples]
        counts = [sum(row.verdict.startswith(word) for row in rows) for word in ("met", "missed", "unclear")]
        shown = " | ".join(str(count) if rows else "" for count in counts)
        lines.append(f"| {link} | {shown} | {section.date}{', quick' * section.is_quick} | {section.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def _section(section: Section) -> str:
    facts = section.machine
    where = (
        f"{facts['cores']} cores, {facts['processor']}, {facts['memory_gb']} GB, {facts['system']}; "
        f"Python {facts['python']}, torch {facts['torch']}, {facts['threads']} thread(s); load {facts['load']:g} before"
    )
    parts = [
        f"## {section.title}",
        section.what,
        f"`{section.command}`, {section.date}, {section.seconds:.0f} s. {where}.",
    ]
    if section.is_quick:
        parts.append("**A quick run: it shows that the benchmark works, and no more.**")
    if section.curves or any(table.is_drawn for table in section.tables):
        parts.append(f"![{section.title}](results/{section.name}.png)")
    parts += [table_markdown(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def table_markdown(table: Table) -> str:
    """Return a table with its title and note."""
    headings = header(table)
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    lines += [f"| {' | '.join(cells(row, table))} |" for row in table.rows]
    return "\n\n".join([f"**{table.title}**", "\n".join(lines), *([table.note] if table.note else [])])


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


# ------------------------------------------------------------------ figures


def draw(section: Section, path: Path) -> bool:
    """Write the figure of a section; return whether it has one."""
    tables = [table for table in section.tables if table.is_drawn]
    if not section.curves and not tables:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if section.curves:
        columns = min(3, len(section.curves))
        rows = -(-len(section.curves) // columns)
        figure = Figure(figsize=(3.4 * columns, 2.7 * rows), layout="constrained")
        FigureCanvasAgg(figure)
        for place, curve in enumerate(section.curves, start=1):
            _draw_curve(figure.add_subplot(rows, columns, place), curve)
    else:
        heights = [
            0.95 + 0.15 * len(_lines(table.title)) + 0.26 * sum(bool(row.samples) for row in table.rows)
            for table in tables
        ]
        figure = Figure(figsize=(8.5, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(len(tables), 1, height_ratios=heights)
        for place, table in enumerate(tables):
            _draw_rows(figure.add_subplot(grid[place]), table)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return True


def _draw_rows(axes: Any, table: Table) -> None:
    """One row per contestant: the median as a dot, the middle half as a line, the bar as a tick."""
    rows = [row for row in table.rows if row.samples]
    for place, row in enumerate(rows):
        low, high = middle_half(row.samples)
        colour = COLOURS.get(row.verdict.partition(",")[0], QUIET if row.is_noise else _colour(row))
        axes.plot([low, high], [place] * 2, color=colour, linewidth=4, alpha=0.4, solid_capstyle="butt")
        axes.plot(row.value, place, "o", color=colour, markersize=6)
        if row.bar is not None:
            axes.plot([row.bar] * 2, [place - 0.38, place + 0.38], color=INK, linewidth=1.4)
        axes.text(
            1.01,
            place,
            table.form.format(row.value),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color=INK,
        )
        if row.is_noise:
            # Whatever lies in this band cannot be told from the reference.
            axes.axvspan(low, high, color=QUIET, alpha=0.15, linewidth=0)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    if table.is_log:
        from matplotlib.ticker import LogLocator, NullLocator

        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
    _finish(axes, table.title, table.unit)


def _colour(row: Row) -> str:
    return OURS if "dovetail" in row.name.lower() else OTHERS


def _draw_curve(axes: Any, curve: Curve) -> None:
    """The middle half of the samples as lines, their medians as dots, and the straight line through them."""
    for x, samples in zip(curve.xs, curve.ys, strict=True):
        low, high = middle_half(samples)
        axes.plot([x, x], [low, high], color=OURS, linewidth=4, alpha=0.4, solid_capstyle="butt")
        axes.plot(x, _median(samples), "o", color=OURS, markersize=5)
    slope, intercept = (_median(column) for column in zip(*curve.lines, strict=True))
    ends = [min(curve.xs), max(curve.xs)]
    axes.plot(ends, [intercept + slope * x for x in ends], color=QUIET, linewidth=1, linestyle="--")
    axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    axes.set_ylabel(curve.y, color=INK, fontsize=8)
    _finish(axes, curve.title, curve.x)


def _median(samples: Sequence[float]) -> float:
    ordered = sorted(samples)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _lines(title: str) -> list[str]:
    """A title as wide as a figure has room for beside the names of rows."""
    return textwrap.wrap(title, 64, break_on_hyphens=False)


def _finish(axes: Any, title: str, below: str) -> None:
    axes.set_title("\n".join(_lines(title)), loc="left", fontsize=9, color=INK)
    axes.set_xlabel(below, color=INK, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=8)
    axes.grid(axis="x", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
