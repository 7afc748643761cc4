"""What trials report, read while it is written."""

from __future__ import annotations

import math
from pathlib import Path

from dovetail.core.train import TrainContext, read_metrics
from dovetail.search.reports import METRICS, Reports, number


def test_what_the_core_api_writes_is_read_without_torch_as_it_reads_it_itself(tmp_path: Path) -> None:
    context = TrainContext(tmp_path)
    context.report_validation_metrics(3, {"loss": 0.5, "worst": math.inf})
    context.report_progress(0.5)
    rows = list(Reports(tmp_path / METRICS).read())
    expected = read_metrics(tmp_path / METRICS)
    assert number(rows[0]["metrics"], "worst") == expected[0]["metrics"]["worst"] == math.inf
    assert rows[0]["steps_completed"] == 3
    assert rows[1:] == expected[1:]


def test_every_line_is_read_once_and_when_it_is_finished(tmp_path: Path) -> None:
    path, found = tmp_path / METRICS, []
    reports = Reports(path)
    text = b'{"progress": 0.25}\n{"progress": 0.5}\n'
    for end in range(len(text) + 1):
        path.write_bytes(text[:end])
        found.append([row["progress"] for row in reports.read()])
    assert [rows for rows in found if rows] == [[0.25], [0.5]]


def test_lines_that_are_no_reports_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_bytes(b'rubbish\n[1]\n\xff\xfe\n\n{"progress": 1}\n')
    assert list(Reports(path).read()) == [{"progress": 1}]


def test_a_file_that_is_begun_anew_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    reports = Reports(path)
    path.write_text('{"progress": 0.25}\n{"progress": 0.5}\n')
    assert len(list(reports.read())) == 2
    path.write_text('{"progress": 0}\n')
    assert list(reports.read()) == [{"progress": 0}]
