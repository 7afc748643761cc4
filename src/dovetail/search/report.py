"""HTML report of an experiment: one self-contained page, and its charts as images."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Any

import yaml

from dovetail.config import parse_scalar, trial_length
from dovetail.errors import ConfigError
from dovetail.extras import require
from dovetail.printing import page_text as escape
from dovetail.printing import quiet
from dovetail.search.charts import BarChart, Dimension, Line, LineChart, ParallelChart, Scale, shown
from dovetail.search.records import ExperimentRecord, TrialRecord
from dovetail.units import counted, unit_name

# With fewer trials, the importance of hyperparameters cannot be estimated.
_ENOUGH = 5
Chart = LineChart | ParallelChart | BarChart


def report(record: ExperimentRecord, path: str | os.PathLike[str]) -> list[Path]:
    """Write an experiment's report, and return the files.

    The page needs no other file and no network. If matplotlib is installed, its charts are also written as images to
    the same folder: `report.html`, `report-curves.png`, ….

    Args:
        record: The record of the experiment.
        path: The path of the page; missing folders are created.

    Example:
        >>> import tempfile
        >>> config = {"searcher": {"name": "random", "metric": "loss"}}
        >>> record = ExperimentRecord(1, "demo", "ACTIVE", config, Path("."), datetime(2026, 1, 1))
        >>> report(record, f"{tempfile.mkdtemp()}/report.html")[0].name
        'report.html'
    """
    target = Path(path)
    charts = experiment_charts(record)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_page(record, charts), encoding="utf-8")
    if importlib.util.find_spec("matplotlib") is None:
        return [target]
    drawn = {name: chart for name, (_, chart) in charts.items() if not isinstance(chart, str)}
    return [target, *(_draw(chart, target.with_name(f"{target.stem}-{name}.png")) for name, chart in drawn.items())]


def best_config(record: ExperimentRecord) -> dict[str, Any]:
    """Return a configuration that repeats the best trial alone.

    Raises:
        ConfigError: No trial has a value yet.
    """
    best = record.best_trial
    if best is None:
        wanted = repr(record.metric) if record.metric else "a validation metric"
        raise ConfigError(f"experiment {record.id}: no trial has reported {wanted}, so there is no best trial")
    kept = ("metric", "smaller_is_better", "max_length")
    searcher = {key: value for key, value in record.config["searcher"].items() if key in kept}
    if "max_length" not in searcher and (length := trial_length(record.config)) is not None:
        # `single` has no max_time.
        searcher["max_length"] = {unit_name(length): length.length}
    return {**record.config, "hyperparameters": best.hparams, "searcher": {"name": "single", **searcher}}


def to_yaml(value: Any) -> str:
    """Return plain values as YAML, which `load_config` reads as the same values.

    Example:
        >>> print(to_yaml({"lr": 1e-05, "name": "1e-3"}), end="")
        lr: 1.0e-05
        name: '1e-3'
    """
    return yaml.dump(value, Dumper=_dumper(), sort_keys=False, allow_unicode=True, width=100)


def flat(hparams: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested hyperparameters by dotted names.

    Example:
        >>> flat({"lr": 0.1, "model": {"depth": 2}})
        {'lr': 0.1, 'model.depth': 2}
    """
    found: dict[str, Any] = {}
    for name, value in hparams.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def searched_names(record: ExperimentRecord) -> set[str]:
    """Return the dotted names of the hyperparameters that the searcher chooses."""
    names = dict.fromkeys(name for trial in record.trials for name in flat(trial.hparams))
    return {name for name in names if _declared(record, name) in ("int", "double", "log", "categorical")}


def best_so_far(record: ExperimentRecord) -> dict[int, float]:
    """Return the best value so far after each trial that has one, by its id."""
    pick = min if record.smaller_is_better else max
    found: dict[int, float] = {}
    for trial in measured_trials(record):
        found[trial.id] = pick([*list(found.values())[-1:], trial.best or 0.0])
    return found


def duration(started: datetime | None, ended: datetime | None) -> timedelta | None:
    """Return the duration until the end or until now, in whole seconds; None before the start."""
    if started is None:
        return None
    elapsed = (ended or datetime.now(started.tzinfo)) - started
    return timedelta(seconds=max(0, round(elapsed.total_seconds())))


@functools.cache
def _dumper() -> type[yaml.SafeDumper]:
    class Dumper(yaml.SafeDumper):
        """Quotes text that YAML 1.2, which we read, would parse as a number; PyYAML considers YAML 1.1 only."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else None
        # Line breaks of YAML 1.1, which it would convert to spaces.
        if re.search("[\x85\u2028\u2029\ufeff]", value):
            style = '"'
        elif style is None and re.match(r"[-+.\d]", value):
            try:
                is_text = isinstance(parse_scalar(value), str)
            except ConfigError:
                is_text = False
            style = None if is_text else "'"
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style)

    Dumper.add_representer(str, text)
    return Dumper


# Charts


def measured_trials(record: ExperimentRecord) -> list[TrialRecord]:
    """Return the trials with a finite value of the metric."""
    return [trial for trial in record.trials if trial.best is not None and math.isfinite(trial.best)]


def experiment_charts(record: ExperimentRecord, *, with_importance: bool = True) -> dict[str, tuple[str, Chart | str]]:
    """Return the title of each chart, and the chart or the reason why there is none, for the report and the live page.

    Args:
        record: The record of the experiment.
        with_importance: False leaves out the importance of hyperparameters, whose estimate takes seconds.
    """
    name = record.metric or record.metric_label
    return {
        "curves": (f"Learning curves: {name}", _curves(record)),
        "best": (f"Best {name} so far", _best(record)),
        **({"importance": ("Importance of hyperparameters", importance_chart(record))} if with_importance else {}),
        "parallel": ("Hyperparameters and results", _parallel(record)),
    }


def trial_quality(record: ExperimentRecord) -> dict[int, float]:
    """Return the quality of each trial, by id: from 0 for the worst to 1 for the best."""
    ranked = sorted(measured_trials(record), key=lambda trial: trial.best or 0.0, reverse=record.smaller_is_better)
    return {trial.id: rank / max(1, len(ranked) - 1) for rank, trial in enumerate(ranked)}


def _label(record: ExperimentRecord, trial: TrialRecord) -> str:
    hparams = ", ".join(f"{name} {shown(value)}" for name, value in flat(trial.hparams).items())
    return f"trial {trial.id}: {record.metric} {shown(trial.best)}\n{hparams}"


def _curves(record: ExperimentRecord) -> LineChart | str:
    quality = trial_quality(record)
    lines = [
        Line(_label(record, trial), points, quality.get(trial.id, 0.0), trial.id)
        for trial in record.trials
        if (points := tuple((steps, value) for steps, value in trial.values.items() if math.isfinite(value)))
    ]
    return LineChart("batches", record.metric, tuple(lines)) if lines else _nothing(record)


def _nothing(record: ExperimentRecord) -> str:
    return f"No trial has reported {record.metric or 'a metric'}."


def _best(record: ExperimentRecord) -> LineChart | str:
    quality, best = trial_quality(record), best_so_far(record)
    if not best:
        return _nothing(record)
    stairs = Line("best so far", tuple(best.items()), 1.0, style="stairs")
    dots = [
        Line(_label(record, trial), ((trial.id, trial.best or 0.0),), quality[trial.id], trial.id, "dots")
        for trial in measured_trials(record)
    ]
    return LineChart("trial", record.metric, (stairs, *dots))


def varied_hparams(trials: Sequence[TrialRecord]) -> dict[str, list[Any]]:
    """Return hyperparameters that differ between trials, by dotted names: a value per trial, None if it has none."""
    rows = [flat(trial.hparams) for trial in trials]
    columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
    return {name: column for name, column in columns.items() if len({json.dumps(each) for each in column}) > 1}


def _parallel(record: ExperimentRecord) -> ParallelChart | str:
    trials = measured_trials(record)
    columns = varied_hparams(trials)
    if not columns:
        return f"No two trials with a value of {record.metric or 'a metric'} differ in their hyperparameters."
    columns[record.metric] = [trial.best for trial in trials]
    placed = {name: _dimension(name, column, is_log_scale(record, name)) for name, column in columns.items()}
    quality = trial_quality(record)
    lines = [
        Line(
            _label(record, trial),
            tuple(enumerate(places[index] for _, places in placed.values())),
            quality[trial.id],
            trial.id,
        )
        for index, trial in enumerate(trials)
    ]
    return ParallelChart(tuple(dimension for dimension, _ in placed.values()), tuple(lines))


def _dimension(name: str, column: Sequence[Any], is_log: bool | None) -> tuple[Dimension, list[float]]:
    if all(is_number(value) for value in column):
        scale = Scale.of(column, is_log)
        distinct = sorted(set(column))
        inner = distinct[1:-1] if len(distinct) <= 6 else scale.ticks(4)
        labels = [(scale(value), shown(value)) for value in (distinct[0], distinct[-1])]
        for tick in inner:
            # Labels that are nearer would overlap. The ends come first, because they are always shown.
            if all(abs(scale(tick) - place) > 0.07 for place, _ in labels):
                labels.append((scale(tick), shown(tick)))
        return Dimension(name, tuple(labels), tuple(column), scale.is_log), [scale(value) for value in column]
    # Values that are not all numbers get evenly spaced positions in the order of their texts.
    spelled = [json.dumps(value) if isinstance(value, (list, dict)) else shown(value) for value in column]
    known = sorted(set(spelled))
    places = {label: (index + 0.5) / len(known) for index, label in enumerate(known)}
    labels = [(place, label) for label, place in places.items()]
    return Dimension(name, tuple(labels), tuple(spelled)), [places[each] for each in spelled]


def is_log_scale(record: ExperimentRecord, name: str) -> bool | None:
    """Return whether the configuration searches a hyperparameter on a logarithmic scale; None if it is not searched."""
    kind = _declared(record, name)
    return kind == "log" if kind in ("log", "double", "int") else None


def _declared(record: ExperimentRecord, name: str) -> Any:
    """Return the type that the configuration gives a hyperparameter, if any."""
    declared = record.config.get("hyperparameters")
    for key in name.split("."):
        declared = declared.get(key) if isinstance(declared, Mapping) else None
    return declared.get("type") if isinstance(declared, Mapping) else None


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def importance_chart(record: ExperimentRecord) -> BarChart | str:
    """Return the importance of hyperparameters, or a sentence why it is unknown."""
    values, note = _compared(record)
    trials = [trial for trial in record.trials if trial.id in values]
    columns = varied_hparams(trials)
    if len(trials) < _ENOUGH:
        name = record.metric or "a metric"
        return f"This needs at least {_ENOUGH} trials with a value of {name}; there are {len(measured_trials(record))}."
    if not columns:
        return "The trials do not differ in their hyperparameters."
    if importlib.util.find_spec("optuna") is None:
        return "This needs Optuna: pip install 'dovetail[search]'."
    optuna = require("optuna", "search")
    distributions = {}
    for name, column in columns.items():
        if all(is_number(value) for value in column):
            is_log = Scale.of(column, is_log_scale(record, name)).is_log
            distributions[name] = optuna.distributions.FloatDistribution(min(column), max(column), log=is_log)
        else:
            # As text, because Optuna's categories must be plain and distinct: 1 and True are equal in Python.
            columns[name] = [json.dumps(value) for value in column]
            distributions[name] = optuna.distributions.CategoricalDistribution(sorted(set(columns[name])))
    try:
        shares = _shares(record, list(values.values()), columns, distributions)
    except UserWarning:
        return f"The values of {record.metric} are too similar."
    return BarChart(tuple(sorted(shares.items(), key=lambda share: -share[1])), note)


def _compared(record: ExperimentRecord) -> tuple[dict[int, float], str]:
    """Return values of trials that can be compared, by id, and a sentence about them.

    If few trials were completed, because the searcher has stopped most of them early, compare the values after an equal
    number of batches: otherwise only the length of the trials would matter.
    """
    measured = measured_trials(record)
    completed = {trial.id: trial.best or 0.0 for trial in measured if trial.state == "COMPLETED"}
    if len(completed) >= _ENOUGH or len(measured) < _ENOUGH:
        return completed, f"Estimated from the best values of {counted(len(completed), 'completed trial')}."
    curves = {
        trial.id: {step: value for step, value in trial.values.items() if math.isfinite(value)} for trial in measured
    }
    at = sorted((max(curve, default=0) for curve in curves.values()), reverse=True)[_ENOUGH - 1]
    values = {
        trial_id: next(value for step, value in sorted(curve.items(), reverse=True) if step <= at)
        for trial_id, curve in curves.items()
        if curve and min(curve) <= at <= max(curve)
    }
    batches = counted(at, "batch", "batches")
    return values, f"Estimated from {counted(len(values), 'trial')} after {batches}, because few were completed."


def _shares(
    record: ExperimentRecord,
    values: Sequence[float],
    columns: Mapping[str, list[Any]],
    distributions: Mapping[str, Any],
) -> dict[str, float]:
    import optuna

    with quiet("optuna"):
        study = optuna.create_study(direction="minimize" if record.smaller_is_better else "maximize")
    for index, value in enumerate(values):
        params = {name: column[index] for name, column in columns.items()}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=dict(distributions), value=value))
    with warnings.catch_warnings():
        # Optuna only warns if the shares are meaningless.
        warnings.simplefilter("error", UserWarning)
        return optuna.importance.get_param_importances(study)


def _draw(chart: Chart, path: Path) -> Path:
    figures = require("matplotlib.figure", "plot")
    # Not pyplot: it would change global state and need a display.
    figure = figures.Figure(figsize=(7.0, 3.6), dpi=144, layout="constrained")
    with warnings.catch_warnings():
        # Warnings about letters that the font lacks, and numbers near the largest float. The page shows both.
        warnings.simplefilter("ignore")
        chart.draw(figure)
        figure.savefig(path)
    return path


# The page


def _page(record: ExperimentRecord, charts: Mapping[str, tuple[str, Chart | str]]) -> str:
    template = resources.files("dovetail.search").joinpath("report.html").read_text(encoding="utf-8")
    # Only our script may run in the page, even if some text is interpreted as markup.
    script = template.partition("<script>")[2].partition("</script>")[0]
    searcher = record.config["searcher"]
    goal = "smaller" if record.smaller_is_better else "larger"
    by = f"{record.metric}: {goal} is better" if searcher.get("metric") else record.metric_label
    description = record.config.get("description")
    drawn = {
        name: _section(name, title, chart) for name, (title, chart) in charts.items() if not isinstance(chart, str)
    }
    # The configuration is beside the importance, if there is one; the parallel coordinates need a whole row.
    config = _best_section(record, is_wide="importance" not in drawn)
    sections = {"curves": "", "best": "", "importance": "", "config": config, "parallel": ""} | drawn
    missing = [f"{title}: {chart}" for title, chart in charts.values() if isinstance(chart, str)]
    return Template(template).substitute(
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        title=escape(f"{record.name} · experiment {record.id}"),
        name=escape(record.name),
        id=record.id,
        state=escape(record.state),
        reason=escape(f" ({record.reason})" if record.reason else ""),
        warnings="".join(f'<p class="warning">Warning: {escape(sentence)}</p>' for sentence in record.warnings),
        searcher=escape(f"searcher {searcher.get('name', 'single')}, by {by}"),
        description=f"<p>{escape(str(description), lines=True)}</p>" if description else "",
        facts="\n".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in _facts(record).items()),
        charts="\n".join(sections.values()),
        missing="\n".join(f'<p class="faint">{escape(sentence)}</p>' for sentence in missing),
        table=_table(record),
        constants=_constants(record),
        version=escape(metadata.version("dovetail")),
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
    )


def _facts(record: ExperimentRecord) -> dict[str, str]:
    best = record.best_trial
    over = sum(trial.state in ("COMPLETED", "STOPPED") for trial in record.trials)
    return {
        f"best {record.metric_label}": shown(best and best.best),
        "best trial": "–" if best is None else str(best.id),
        "trials": f"{over} of {len(record.trials)} finished" if over < len(record.trials) else str(over),
        "batches": f"{sum(trial.steps for trial in record.trials):,}",
        "created": record.created.astimezone().strftime("%Y-%m-%d %H:%M"),
        "time": str(duration(record.created, record.ended)),
    }


def _section(name: str, title: str, chart: Chart) -> str:
    wide = ' class="wide"' if name == "parallel" else ""
    note = f'<p class="faint">{escape(chart.note)}</p>\n' if isinstance(chart, BarChart) and chart.note else ""
    content = f'<div class="scroll">{chart.svg()}</div>\n{note}'
    return f'<section id="{name}"{wide}>\n<h2>{escape(title)}</h2>\n{content}</section>'


def _columns(record: ExperimentRecord) -> Iterator[tuple[str, str, Callable[[TrialRecord], Any]]]:
    """Yield the heading of each column, the class of its cells, and a function that returns a cell."""
    yield "trial", "number", lambda trial: trial.id
    yield "state", "state", lambda trial: trial.state
    yield f"best {record.metric}", "number", lambda trial: trial.best
    for name, column in varied_hparams(record.trials).items():
        kind = "number" if all(value is None or is_number(value) for value in column) else "text"
        yield name, kind, functools.partial(lambda name, trial: flat(trial.hparams).get(name), name)
    yield "best at batch", "number", lambda trial: trial.best_at
    yield f"latest {record.metric}", "number", lambda trial: trial.latest
    yield "batches", "number", lambda trial: trial.steps
    if any(trial.restarts for trial in record.trials):
        yield "restarts", "number", lambda trial: trial.restarts
    yield "time", "number", lambda trial: duration(trial.started, trial.ended)


def _table(record: ExperimentRecord) -> str:
    columns = list(_columns(record))
    heads = "".join(f'<th class="{kind}"><button>{escape(name)}</button></th>' for name, kind, _ in columns)
    rows = []
    for trial in record.trials:
        cells = "".join(_cell(kind, get(trial), trial.reason if kind == "state" else None) for _, kind, get in columns)
        is_best = ' class="best"' if trial is record.best_trial else ""
        rows.append(f'<tr data-trial="{trial.id}"{is_best}>{cells}</tr>')
    return f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(rows) + "\n</tbody>\n</table>"


def _cell(kind: str, value: Any, reason: str | None) -> str:
    if value is None:
        key, text = "", "–"
    elif isinstance(value, timedelta):
        key, text = str(value.total_seconds()), str(value)
    else:
        key = text = json.dumps(value) if isinstance(value, (list, dict)) else shown(value)
        # The table is sorted by the full number, although it shows four digits.
        key = repr(value) if isinstance(value, float) else key
    look = f"state {value}" if kind == "state" else kind
    why = f"<small>{escape(reason)}</small>" if reason else ""
    return f'<td class="{escape(look)}" data-value="{escape(key)}">{escape(text)}{why}</td>'


def _constants(record: ExperimentRecord) -> str:
    if not record.trials:
        return ""
    different = varied_hparams(record.trials)
    same = {name: value for name, value in flat(record.trials[0].hparams).items() if name not in different}
    listed = ", ".join(f"{name} {shown(value)}" for name, value in same.items())
    return f'<p class="faint">The same in every trial: {escape(listed)}.</p>' if same else ""


def _best_section(record: ExperimentRecord, is_wide: bool) -> str:
    best = record.best_trial
    if best is None:
        return ""
    heading = f'<h2>Configuration of the best trial ({best.id})</h2><button id="copy">Copy</button>'
    content = escape(to_yaml(best_config(record)), lines=True)
    wide = ' class="wide"' if is_wide else ""
    return f'<section id="config"{wide}>\n<div class="row">{heading}</div>\n<pre id="yaml">{content}</pre>\n</section>'
