"""Runs, notes and comparisons of the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dovetail.errors import ConfigError
from dovetail.history import History
from dovetail.history.journal import RunJournal, journal_path
from dovetail.ui import library as libraries
from dovetail.ui.compare import as_csv, as_json, groups_over_seeds, varied_settings
from dovetail.ui.library import Library
from dovetail.ui.notes import Note, Notes
from dovetail.ui.runs import main_metric
from dovetail.ui.series import band, downsample, smooth


def write_run(folder: Path, values: list[float], state: str | None = "finished", **settings: object) -> History:
    path = folder / "ck_history.jsonl"
    history, journal = History(), RunJournal(journal_path(path))
    history.attach(path, journal if state else None)
    if state:
        journal.start({"settings": settings}, is_new=True)
    for epoch, value in enumerate(values, start=1):
        history.record("valid", {"loss": value}, epoch=epoch, batches=10 * epoch)
    if state in ("finished", "failed"):
        journal.end(state, "ValueError: no" if state == "failed" else None)  # type: ignore[arg-type]
    return history


def read(*places: Path) -> Library:
    library = Library(places)
    library.scan()
    library.poll()
    return library


def test_runs_of_all_folders_are_found_with_state_best_and_last(tmp_path: Path) -> None:
    write_run(tmp_path / "one" / "a", [3.0, 1.0, 2.0], lr=0.1)
    write_run(tmp_path / "one" / "deep" / "b", [5.0], "failed")
    write_run(tmp_path / "two", [4.0], "running")
    library = read(tmp_path / "one", tmp_path / "two")
    found = {run.name: run.summary() for run in library.runs.values()}
    assert sorted(found) == ["a", "deep/b", "two"]
    assert (found["a"].best, found["a"].last, found["a"].epochs, found["a"].batches) == (1.0, 2.0, 3, 30)
    assert found["a"].spark == (3.0, 1.0, 2.0)
    states = {name: each.state for name, each in found.items()}
    assert states == {"a": "finished", "deep/b": "failed", "two": "running"}
    assert found["deep/b"].error == "ValueError: no"


def test_a_table_has_the_journals_before_any_history_is_read(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, [2.0, 1.0], lr=0.1)
    library = Library([tmp_path])
    library.scan()
    first, second = library.runs.values()
    assert first.poll_journal()
    it = first.summary()
    assert (it.state, it.metric, first.settings, first.is_read) == ("finished", "", {"lr": 0.1}, False)
    # A view that needs the numbers does not wait for the thread of the library.
    assert first.series("valid_loss", "epoch")[1].tolist() == [2.0, 1.0]
    library.poll()
    assert [run.summary().best for run in (first, second)] == [1.0, 1.0]
    assert first.series("valid_loss", "epoch")[1].tolist() == [2.0, 1.0]


def test_new_rows_new_runs_and_removed_runs_are_seen(tmp_path: Path) -> None:
    history = write_run(tmp_path / "a", [1.0], "running")
    library = read(tmp_path)
    run = library.runs["0:a/ck_history.jsonl"]
    before = library.version
    library.poll()
    assert library.version == before
    history.record("valid", {"loss": 0.5}, epoch=2, batches=20)
    library.poll()
    assert (library.version > before, run.summary().last) == (True, 0.5)
    write_run(tmp_path / "b", [1.0])
    library.scan()
    library.poll()
    assert (sorted(library.runs), library.runs["0:a/ck_history.jsonl"] is run) == (
        ["0:a/ck_history.jsonl", "0:b/ck_history.jsonl"],
        True,
    )
    (tmp_path / "a" / "ck_history.jsonl").unlink()
    library.scan()
    assert sorted(library.runs) == ["0:b/ck_history.jsonl"]


def test_a_run_whose_process_was_killed_is_shown_as_killed(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_runs import write_run
write_run(Path({str(tmp_path)!r}), [1.0, 0.5], "running")
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    summary = next(iter(read(tmp_path).runs.values())).summary()
    assert (summary.state, summary.last) == ("killed", 0.5)
    assert summary.seconds is not None
    assert summary.seconds < 60


def test_links_checkpoints_and_environments_are_not_searched(tmp_path: Path) -> None:
    write_run(tmp_path / "outside", [1.0])
    root = tmp_path / "root"
    write_run(root / "real", [1.0])
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "linked_history.jsonl").symlink_to(tmp_path / "outside" / "ck_history.jsonl")
    for name in ("manifest.json", "pyvenv.cfg"):
        write_run(root / name.partition(".")[0], [1.0])
        (root / name.partition(".")[0] / name).touch()
    assert list(read(root).runs) == ["0:real/ck_history.jsonl"]


def test_a_released_run_has_the_same_summary_and_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        write_run(tmp_path / name, [3.0, 1.0])
    library = read(tmp_path)
    before = [(run.summary(), run.series("valid_loss", "epoch")) for run in library.runs.values()]
    monkeypatch.setattr(libraries, "_BUDGET", 0)
    library.poll()
    assert all(run.reader.columns.num_bytes() == 0 for run in library.runs.values())
    after = [(run.summary(), run.series("valid_loss", "epoch")) for run in library.runs.values()]
    assert [each[0] for each in before] == [each[0] for each in after]
    assert np.array_equal(before[0][1], after[0][1])


def test_samples_and_time_are_positions(tmp_path: Path) -> None:
    write_run(tmp_path, [3.0, 1.0], batch_size=4)
    run = next(iter(read(tmp_path).runs.values()))
    assert run.series("valid_loss", "samples")[0].tolist() == [40, 80]
    places = run.series("valid_loss", "time")[0]
    assert 0 <= places[0] <= places[1] < 60


def test_a_wrong_place_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: expected a folder or the URL of a store, but it does not exist"):
        Library([tmp_path / "nowhere"])


def test_the_page_reads_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path, [1.0])
    code = f"""
import sys
from dovetail.ui.library import Library
it = Library([{str(tmp_path)!r}])
it.scan(), it.poll(), it.poll_stores()
print(len(it.runs), 'torch' in sys.modules, 'nicegui' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1 False False\n"


# Notes


def test_notes_survive_and_other_pages_see_them(tmp_path: Path) -> None:
    one, other = Notes(tmp_path), Notes(tmp_path)
    one.change("a", tags=["x", "x", "  two  words "])
    other.change("b", text="<b>")
    assert one.get("a") == other.get("a") == Note(("x", "two words"))
    assert one.get("b") == Note((), "<b>")
    one.change("a", tags=[])
    assert json.loads(one.path.read_text())["runs"] == {"b": {"tags": [], "note": "<b>"}}


@pytest.mark.parametrize("content", ["", "[]", '{"runs": 3}', '{"runs": {"a": 1, "b": {"tags": ["t"]}}}', "[" * 99999])
def test_a_damaged_file_of_notes_is_no_error(tmp_path: Path, content: str) -> None:
    notes = Notes(tmp_path)
    notes.path.write_text(content)
    assert notes.get("a") == Note()
    notes.change("a", text="new")
    assert Notes(tmp_path).get("a").text == "new"


def test_long_notes_are_cut(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    notes.change("a", tags=["t" * 1000, *map(str, range(100))], text="n" * 100_000)
    assert [len(notes.get("a").tags), len(notes.get("a").tags[0]), len(notes.get("a").text)] == [20, 40, 4000]


# Comparison


def test_only_differing_settings_are_compared() -> None:
    settings = [{"lr": 0.1, "size": 8, "checkpoint_dir": "a"}, {"lr": 0.1, "size": 16, "checkpoint_dir": "b", "x": 1}]
    assert varied_settings(settings) == {"size": [8, 16], "x": [None, 1]}
    assert list(varied_settings(settings, all_names=True)) == ["lr", "size", "x"]


def test_runs_that_differ_in_a_seed_are_one_group() -> None:
    settings = [{"lr": lr, "seed": seed} for seed in (1, 2) for lr in (0.1, 0.2)]
    assert groups_over_seeds(settings) == [[0, 2], [1, 3]]


def test_a_band_has_the_extremes_of_its_curves() -> None:
    x = np.arange(5.0)
    grid, low, mean, high = band([(x, x), (x, 2 * x), (x[:3], 3 * x[:3])])
    assert grid.tolist() == x.tolist()
    assert (low.tolist(), high.tolist()) == ([0, 1, 2, 3, 4], [0, 3, 6, 6, 8])
    assert mean.tolist() == [0, 2, 4, 4.5, 6]
    assert [len(each) for each in band([])] == [0, 0, 0, 0]


def test_fewer_points_keep_every_extreme() -> None:
    y = np.zeros(10_000)
    y[1234], y[8765], y[5] = 9.0, -9.0, np.nan
    x, found = downsample(np.arange(10_000.0), y, 400)
    assert len(x) <= 400
    assert (x[0], x[-1], x[found == 9.0].tolist(), x[found == -9.0].tolist()) == (0, 9999, [1234], [8765])


def test_smoothing_keeps_constants_and_skips_nan() -> None:
    assert smooth(np.array([2.0, np.nan, 2.0]), 0.9).tolist() == [2.0, 2.0, 2.0]
    values = np.array([1.0, 0.0])
    assert smooth(values, 0.0) is values
    assert smooth(values, 0.5).tolist() == [1.0, pytest.approx(1 / 3)]


def test_downloads_are_strict_and_safe() -> None:
    rows: list[dict[str, object]] = [
        {"name": '=HYPERLINK("x")', "loss": float("nan")},
        {"name": "a,b\nc", "tags": ["x"]},
    ]
    assert as_csv(rows) == 'name,loss,tags\n"\'=HYPERLINK(""x"")",nan,\n"a,b\nc",,"[""x""]"\n'
    assert json.loads(as_json(rows))[0] == {"name": '=HYPERLINK("x")', "loss": "nan"}


def test_the_metric_of_a_run_is_one_of_validation() -> None:
    assert main_metric(["train_loss", "train_lr", "valid_loss"]) == "valid_loss"
    assert main_metric(["train_lr", "mse", "batch_loss"]) == "mse"
    assert main_metric(["train_lr", "batch_loss"]) == "batch_loss"
    assert main_metric([]) == ""
