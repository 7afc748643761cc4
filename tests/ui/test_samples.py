"""Samples of a run on the page: curves inside of an epoch, and hostile files."""

from __future__ import annotations

import json
import math
import os
from array import array
from pathlib import Path

import pytest

from dovetail.history import History
from dovetail.history import samples as module
from dovetail.history.journal import RunJournal, journal_path
from dovetail.ui.library import Library
from dovetail.ui.runs import Run
from dovetail.ui.samples import SamplesReader
from dovetail.ui.use_charts import usage

HEAD = b'{"start": 100.0, "batches": 0}\n'


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "SHORTEST", "_COST_FACTOR"):
        monkeypatch.setattr(module, name, 0.0)


def following(folder: Path) -> tuple[History, RunJournal, Run]:
    path = folder / "ck_history.jsonl"
    history, journal = History(), RunJournal(journal_path(path))
    history.attach(path, journal)
    journal.start({"settings": {"batch_size": 4}}, is_new=True, probe=lambda: {"updates": 7, "gradient_norm": 2.0})
    library = Library([folder])
    library.scan()
    library.poll()
    return history, journal, next(iter(library.runs.values()))


@pytest.mark.usefixtures("always")
def test_the_loss_moves_inside_an_epoch_and_its_end_has_all_losses(tmp_path: Path) -> None:
    history, _, run = following(tmp_path)
    assert (run.summary().state, run.metrics()) == ("running", [])
    history.extend_losses([3.0, 1.0])
    assert run.poll() is True
    assert (run.metrics(), run.summary().batches) == (["batch_loss"], 2)
    history.extend_losses([0.5])
    run.poll()
    assert [each.tolist() for each in run.series("batch_loss", "batches")] == [[2, 3], [2.0, 0.5]]
    assert run.series("batch_loss", "samples")[0].tolist() == [8, 12]
    assert run.series("batch_loss", "updates")[0].tolist() == [7, 7]
    assert 0 <= run.series("batch_loss", "time")[0][0] < 60
    history.record("train", {"loss": 1.5}, epoch=1, batches=3, updates=7)
    run.poll()
    assert [each.tolist() for each in run.series("batch_loss", "batches")] == [[1, 2, 3], [3.0, 1.0, 0.5]]
    history.extend_losses([0.25])
    run.poll()
    places, values = run.series("batch_loss", "epoch")
    assert (places.round(3).tolist(), values.tolist()) == ([0.333, 0.667, 1, 1.333], [3.0, 1.0, 0.5, 0.25])
    assert run.sampled("gradient_norm", "batches")[1].tolist() == [2.0] * 4


@pytest.mark.usefixtures("always")
def test_a_released_run_reads_its_samples_again(tmp_path: Path) -> None:
    history, journal, run = following(tmp_path)
    history.extend_losses([3.0])
    run.poll()
    before = run.series("batch_loss", "batches")
    run.release()
    assert [each.tolist() for each in run.series("batch_loss", "batches")] == [each.tolist() for each in before]
    journal.end("failed", "no")
    run.poll()
    assert run.summary().batches is None


def test_samples_after_the_checkpoint_of_a_resume_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "ck_samples.jsonl"
    rows = [{"time": 100.0 + n, "batches": 10 * n, "loss": float(n), "cpu": 50.0} for n in range(1, 4)]
    path.write_bytes(HEAD + b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    reader = SamplesReader(path)
    reader.update()
    with path.open("ab") as file:
        file.write(b'{"start": 200.0, "batches": 15}\n{"time": 201.0, "batches": 20, "loss": 9.0, "cpu": 1.0}\n')
    assert reader.update() is True
    assert [each.tolist() for each in reader.series("loss", "batches")] == [[10, 20], [1.0, 9.0]]
    assert reader.series("cpu", "time")[1].tolist() == [50, 50, 50, 1]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff\xfe\n", b"[1]\n3\nnull\n", b"{" * 9999 + b"\n", b'{"time": "x", "batches": null, "loss": []}\n',
        b'{"time": 1e999, "batches": ' + b"9" * 400 + b', "cpu": 1e308}\n', b'{"start": [], "batches": "a"}\n',
        b'{"start": 1, "batches": -1}\n', b'{"time": 5.0, "batches": 1, "lo',
    ],
)  # fmt: skip
def test_damaged_lines_are_left_out_and_later_ones_are_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ck_samples.jsonl"
    path.write_bytes(HEAD + content)
    reader = SamplesReader(path)
    reader.update()
    json.dumps(list(usage(reader, None)), allow_nan=False)
    with path.open("ab") as file:
        file.write(b'\n{"time": 101.5, "batches": 2, "loss": "NaN", "cpu": 25.0, "<b>": 1.0}\n')
    reader.update()
    assert reader.last("cpu") == 25.0
    assert reader.last("loss") is None
    assert "<b>" not in reader.rows.columns
    drawn = dict(usage(reader, None))
    assert drawn["CPU, percent"]["series"][0]["data"][-1][1] == 25.0
    json.dumps(drawn, allow_nan=False)


def test_a_file_that_is_replaced_cut_or_a_fifo_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "ck_samples.jsonl"
    reader = SamplesReader(path)
    assert reader.update() is False
    path.write_bytes(HEAD + b'{"time": 1.0, "batches": 1, "cpu": 1.0}\n' * 3)
    reader.update()
    path.write_bytes(HEAD + b'{"time": 1.0, "batches": 1, "cpu": 7.0}\n')
    assert (reader.update(), reader.series("cpu", "time")[1].tolist()) == (True, [7.0])
    path.unlink()
    assert (reader.update(), reader.last("cpu")) == (True, None)
    os.mkfifo(path)
    assert reader.update() is False


def test_usage_has_a_chart_for_each_kind_of_value(tmp_path: Path) -> None:
    path = tmp_path / "ck_samples.jsonl"
    values = {"cpu": 150.0, "machine_cpu": 80.0, "memory": 2e9, "machine_memory": 3e9, "machine_total": 8e9}
    rows = [{"time": 100.0 + n, "batches": n, **values, "device_memory": 1e9, "device_use": 97.0} for n in range(3)]
    path.write_bytes(HEAD + b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    reader = SamplesReader(path)
    reader.update()
    drawn = dict(usage(reader, 90.0))
    assert {title: [each["data"][0] for each in options["series"]] for title, options in drawn.items()} == {
        "CPU, percent": [[10.0, 150.0], [10.0, 80.0]],
        "Memory of the process and its children, GB": [[10.0, 2.0]],
        "Memory of the machine, GB": [[10.0, 3.0], [10.0, 8.0]],
        "Memory of the device, GB": [[10.0, 1.0]],
        "Use of the device, percent": [[10.0, 97.0]],
    }


def test_a_window_with_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    sampler = module.Sampler(tmp_path / "ck_samples.jsonl")
    sampler.start(is_new=True)
    losses = array("d", [1.0, math.inf])
    sampler.sample(losses)
    losses.append(4.0)
    sampler.sample(losses)
    reader = SamplesReader(sampler.path)
    reader.update()
    assert reader.series("loss", "batches")[1].tolist() == [math.inf, 4.0]
