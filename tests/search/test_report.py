from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.config import parse_config
from dovetail.errors import ConfigError
from dovetail.search.records import ExperimentRecord, TrialRecord, TrialState
from dovetail.search.report import (
    best_config,
    best_so_far,
    duration,
    flat,
    report,
    searched_names,
    to_yaml,
    varied_hparams,
)

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
CONFIG: dict[str, Any] = {
    "name": "demo",
    "entrypoint": "python3 train.py",
    "hyperparameters": {
        "lr": {"type": "log", "minval": -3, "maxval": -1},
        "model": {"width": {"type": "categorical", "vals": [2, 4]}, "bias": True},
    },
    "searcher": {"name": "random", "metric": "loss", "max_trials": 4},
}


def trial(number: int, values: Mapping[int, float], state: TrialState = "COMPLETED", **hparams: Any) -> TrialRecord:
    hparams = hparams or {"lr": 10.0 ** -(1 + number % 3), "model": {"width": 2 + 2 * (number % 2), "bias": True}}
    numbers = {step: value for step, value in values.items() if not math.isnan(value)}
    best_at = min(numbers, key=lambda step: numbers[step], default=None)
    return TrialRecord(
        id=100 + number,
        number=number,
        experiment_id=3,
        state=state,
        hparams=hparams,
        directory=Path("trials") / str(number),
        best=None if best_at is None else numbers[best_at],
        best_at=best_at,
        latest=list(values.values())[-1] if values else None,
        steps=max(values, default=0),
        started=START,
        ended=START + timedelta(seconds=90),
        values=dict(values),
    )


def experiment(*trials: TrialRecord, **changes: Any) -> ExperimentRecord:
    ended = START + timedelta(minutes=5)
    record = ExperimentRecord(3, "demo", "COMPLETED", CONFIG, Path("."), START, ended, trials=trials)
    return replace(record, **changes)


@pytest.fixture
def record() -> ExperimentRecord:
    return experiment(*(trial(number, {10: 2.0 + number, 20: 1.0 + number}) for number in range(6)))


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text += data

    def count(self, tag: str, **attributes: str) -> int:
        return sum(tag == name and attributes.items() <= having.items() for name, having in self.tags)


# ------------------------------------------------------------------ the page


def test_the_report_page_has_a_row_for_every_trial(record: ExperimentRecord, tmp_path: Path) -> None:
    page = Page(report(record, tmp_path / "report.html")[0])
    assert [having["data-trial"] for tag, having in page.tags if tag == "tr" and having] == [
        str(each.id) for each in record.trials
    ]


def test_the_page_states_that_the_metric_is_the_first_reported_one(tmp_path: Path) -> None:
    config = {**CONFIG, "searcher": {"name": "random", "max_trials": 4}}
    waiting = experiment(trial(0, {}), config=config)
    text = Page(report(waiting, tmp_path / "report.html")[0]).text
    assert "searcher random, by first reported metric" in text
    assert "No trial has reported a metric." in text
    with pytest.raises(
        ConfigError, match="experiment 3: no trial has reported a validation metric, so there is no best trial"
    ):
        best_config(waiting)
    done = experiment(trial(0, {10: 2.0}), config=config, first_metric="mse")
    text = Page(report(done, tmp_path / "report.html")[0]).text
    assert "searcher random, by mse (first reported, smaller is better)" in text
    assert "best mse (first reported, smaller is better)" in text
    assert best_config(done)["searcher"] == {"name": "single"}


def test_every_trial_is_in_the_three_trial_charts(record: ExperimentRecord, tmp_path: Path) -> None:
    page = Page(report(record, tmp_path / "report.html")[0])
    for each in record.trials:
        assert page.count("g", **{"data-trial": str(each.id)}) == 3


def test_the_page_loads_nothing_from_other_hosts(record: ExperimentRecord, tmp_path: Path) -> None:
    path = report(record, tmp_path / "report.html")[0]
    page = Page(path)
    sources = [having.get(name) for _, having in page.tags for name in ("src", "href", "xlink:href") if name in having]
    assert sources == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", path.read_text(encoding="utf-8"))


def test_images_are_stored_beside_the_page_with_its_name(record: ExperimentRecord, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    written = report(record, tmp_path / "deep" / "page.html")
    assert [path.name for path in written] == [
        *("page.html", "page-curves.png", "page-best.png", "page-importance.png", "page-parallel.png"),
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written[1:])


NASTY = "<script>alert('x')</script>&amp;\"$"


def test_user_text_is_escaped(tmp_path: Path) -> None:
    trials = [
        replace(
            trial(number, {10: 1.0 + number}, **{NASTY: f"{NASTY}{number}", "same": NASTY}),  # type: ignore[arg-type]
            reason=NASTY,
        )
        for number in range(6)
    ]
    searcher = {"name": NASTY, "metric": NASTY}
    config = {**CONFIG, "description": NASTY, "searcher": searcher, "name": NASTY}
    path = report(experiment(*trials, name=NASTY, reason=NASTY, config=config), tmp_path / "report.html")[0]
    page = Page(path)
    assert page.count("script") == 1
    assert page.text.count(NASTY) > 20


def test_only_the_script_of_the_page_may_run(record: ExperimentRecord, tmp_path: Path) -> None:
    import base64
    import hashlib

    text = report(record, tmp_path / "report.html")[0].read_text(encoding="utf-8")
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'\"" in text
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    "trials",
    [
        [],
        [trial(0, {}, "RUNNING")],
        [trial(0, {10: math.nan})],
        [trial(0, {10: math.inf, 20: -math.inf})],
        [trial(0, {0: 0.0})],
        [trial(number, {10: 1e300 * (-1) ** number}) for number in range(6)],
        [trial(number, {10: 1e-300 * (number + 1), 20: 1e300}) for number in range(6)],
        [
            trial(number, {10: 1.0}, x=value)
            for number, value in enumerate([None, True, 1, "a", [1], {"b": 2}, {}, 1.5])
        ],
        [trial(number, {10: 0.1 * number}, 学习率="学" * (number + 1)) for number in range(6)],
        [trial(number, {10: 0.1 * number}, x=10**18 + number) for number in range(6)],
        [trial(number, {10: 0.1 * number}, **{f"h{i}": i * number for i in range(40)}) for number in range(6)],  # type: ignore[arg-type]
    ],
    ids=["none", "running", "nan", "infinite", "zero", "huge", "wide", "mixed", "letters", "large integers", "many"],
)
def test_an_experiment_in_any_state_has_a_report(trials: list[TrialRecord], tmp_path: Path) -> None:
    page = Page(report(experiment(*trials), tmp_path / "report.html")[0])
    assert page.count("tr") == 1 + len(trials)
    drawn = [
        value for _, having in page.tags for name, value in having.items() if name in ("d", "points", "cx", "cy", "x")
    ]
    assert not any(re.search("nan|inf", value or "") for value in drawn)


def test_a_hundred_trials_are_written_within_seconds(tmp_path: Path) -> None:
    trials = [trial(number, {step: 1 / (step + number) for step in range(1, 101)}) for number in range(100)]
    path = report(experiment(*trials), tmp_path / "report.html")[0]
    assert path.stat().st_size < 1_000_000


# ------------------------------------------------------------------ importance


def test_importance_finds_the_hyperparameter_that_matters(tmp_path: Path) -> None:
    trials = [trial(n, {10: float((n % 5) ** 2)}, matters=n % 5, does_not=(7 * n) % 11) for n in range(40)]
    page = Page(report(experiment(*trials), tmp_path / "report.html")[0])
    matters = re.search(r"matters\s*(\d+) %", page.text)
    assert matters is not None
    assert int(matters[1]) > 80


def test_a_chart_that_cannot_be_drawn_is_a_sentence_without_a_panel(tmp_path: Path) -> None:
    trials = [*(trial(n, {10: 1.0 + n}) for n in range(3)), trial(3, {10: 1.0}, "STOPPED"), trial(4, {}, "ERROR")]
    page = Page(report(experiment(*trials), tmp_path / "report.html")[0])
    sentence = "Importance of hyperparameters: This needs at least 5 trials with a value of loss; there are 4."
    assert sentence in page.text
    assert page.count("section", id="importance") == 0
    assert page.count("section", id="config", **{"class": "wide"}) == 1


def test_trials_stopped_early_are_compared_after_equally_many_batches(tmp_path: Path) -> None:
    # The hyperparameter decides the value after 10 batches; only the long trials have small values in the end.
    trials = [
        trial(n, {10: float(n % 5)} | ({20: 0.0} if n in (3, 4) else {}), "STOPPED", matters=n % 5, does_not=7 * n % 11)
        for n in range(40)
    ]
    page = Page(report(experiment(*trials), tmp_path / "report.html")[0])
    assert "Estimated from 40 trials after 10 batches, because few were completed." in page.text
    assert page.count("section", id="importance") == 1
    shares = [int(share) for share in re.findall(r"(\d+) %", page.text)]
    assert shares[0] > 90


def test_equal_trials_have_no_importance(tmp_path: Path) -> None:
    trials = [trial(number, {10: 1.0 + number}, lr=0.1) for number in range(6)]
    page = Page(report(experiment(*trials), tmp_path / "report.html")[0])
    assert "The trials do not differ in their hyperparameters." in page.text


def test_writing_a_report_prints_nothing_and_changes_no_log_level(
    record: ExperimentRecord, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    optuna = pytest.importorskip("optuna")
    before = optuna.logging.get_verbosity()
    report(record, tmp_path / "report.html")
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == before


# ------------------------------------------------------------------ the best configuration


def test_the_best_configuration_is_a_single_trial_with_the_best_values(record: ExperimentRecord) -> None:
    assert best_config(record) == {
        "name": "demo",
        "entrypoint": "python3 train.py",
        "hyperparameters": {"lr": 0.1, "model": {"width": 2, "bias": True}},
        "searcher": {"name": "single", "metric": "loss"},
    }


def test_the_page_shows_the_best_configuration_for_copying(record: ExperimentRecord, tmp_path: Path) -> None:
    text = report(record, tmp_path / "report.html")[0].read_text(encoding="utf-8")
    shown = re.findall(r'<pre id="yaml">(.*?)</pre>', text, re.DOTALL)[0]
    assert parse_config(shown) == best_config(record)


def test_without_a_metric_value_there_is_no_best_trial() -> None:
    with pytest.raises(ConfigError, match="experiment 3: no trial has reported 'loss', so there is no best trial"):
        best_config(experiment(trial(0, {}, "ERROR")))


_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["1e-3", "no", "0o7", "1_0", "~", ".5", "2026-01-01", "- a", "a: b", "#", "<<", "=", "a\n b\n"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(value=_PLAIN)
def test_the_best_configuration_survives_a_yaml_round_trip(value: Any) -> None:
    assert parse_config(to_yaml({"value": value})) == {"value": value}


# ------------------------------------------------------------------ small things


def test_the_best_so_far_curve_is_monotonic() -> None:
    losses = [3.0, 5.0, 2.0, 2.5]
    record = experiment(*(trial(number, {10: loss}) for number, loss in enumerate(losses)), trial(4, {}, "ERROR"))
    assert best_so_far(record) == {100: 3.0, 101: 3.0, 102: 2.0, 103: 2.0}
    larger = replace(record, config={"searcher": {"metric": "loss", "smaller_is_better": False}})
    assert best_so_far(larger) == {100: 3.0, 101: 5.0, 102: 5.0, 103: 5.0}


def test_varying_hyperparameters_are_distinguished_from_searched_ones() -> None:
    record = experiment(trial(0, {10: 1.0}), trial(1, {10: 1.0}))
    assert varied_hparams(record.trials) == {"lr": [0.1, 0.01], "model.width": [2, 4]}
    assert searched_names(record) == {"lr", "model.width"}


def test_nested_hyperparameters_have_dotted_names() -> None:
    assert flat({"a": {"b": {"c": 1}}, "d": {}, "e": [1]}) == {"a.b.c": 1, "d": {}, "e": [1]}


def test_a_trial_that_has_not_started_has_no_duration() -> None:
    assert duration(None, None) is None
    assert duration(START, START + timedelta(seconds=61.4)) == timedelta(seconds=61)
