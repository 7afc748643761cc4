"""What trials report, read while it is written."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.train import TrainContext, read_metrics
from dovetail.search.reports import METRICS, Reports, number, parse_report


def test_core_api_reports_are_read_without_torch(tmp_path: Path) -> None:
    context = TrainContext(tmp_path)
    context.report_validation_metrics(3, {"loss": 0.5, "worst": math.inf})
    context.report_progress(0.5)
    rows = list(Reports(tmp_path / METRICS).read())
    expected = read_metrics(tmp_path / METRICS)
    assert number(rows[0]["metrics"], "worst") == expected[0]["metrics"]["worst"] == math.inf
    assert rows[0]["steps_completed"] == 3
    assert rows[1:] == expected[1:]


def test_every_report_line_is_read_once_when_it_is_complete(tmp_path: Path) -> None:
    path, found = tmp_path / METRICS, []
    reports = Reports(path)
    text = b'{"progress": 0.25}\n{"progress": 0.5}\n'
    for end in range(len(text) + 1):
        path.write_bytes(text[:end])
        found.append([row["progress"] for row in reports.read()])
    assert [rows for rows in found if rows] == [[0.25], [0.5]]


def test_lines_that_are_not_reports_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_bytes(b'rubbish\n[1]\n\xff\xfe\n\n{"progress": 1}\n')
    assert list(Reports(path).read()) == [{"progress": 1}]


def test_rejected_lines_have_a_number_and_a_reason(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_bytes(b'rubbish\n\n{"progress": 1}\n[1]\n')
    reports = Reports(path)
    assert len(list(reports.read())) == 1
    assert [(line.number, line.end) for line in reports.rejected] == [(1, 8), (4, 29)]
    path.write_bytes(path.read_bytes() + b'{"progress": true}\n')
    assert list(reports.read()) == []
    (line,) = reports.rejected
    assert (line.number, line.reason) == (5, "progress: expected a number from 0 to 1")


def test_a_line_that_is_too_long_is_skipped_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.search.reports._LONGEST_LINE", 32)
    path = tmp_path / METRICS
    reports, found, rejected = Reports(path), [], []
    text = b'{"progress": 0.25}\n{"status": "' + b"x" * 200 + b'"}\n{"progress": 0.5}\n'
    for end in range(len(text) + 1):
        path.write_bytes(text[:end])
        found += [row["progress"] for row in reports.read()]
        rejected += reports.rejected
    assert found == [0.25, 0.5]
    assert [(line.number, line.reason) for line in rejected] == [(2, "longer than 32 bytes")]


@given(
    st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda it: json.dumps(it).encode())
)
@settings(max_examples=30)
def test_any_line_is_a_report_or_raises_a_value_error(line: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(parse_report(line), dict)


def test_a_rewritten_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    reports = Reports(path)
    path.write_text('{"progress": 0.25}\n{"progress": 0.5}\n')
    assert len(list(reports.read())) == 2
    path.write_text('{"progress": 0}\n')
    assert list(reports.read()) == [{"progress": 0}]
