"""The benchmarks work, and their page is what they have written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The modules of the driver; scripts find each other in their own folder."""
    names = ("report", "page", "run")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{name: import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in names:
            sys.modules.pop(name, None)


def sections(bench: Any) -> dict[str, Any]:
    return {path.stem: bench.report.Section.load(path) for path in RESULTS.glob("*.json")}


@pytest.mark.usefixtures("forking")
def test_a_quick_benchmark_writes_a_section_without_a_verdict(bench: Any, tmp_path: Path) -> None:
    target = tmp_path / "strategies.json"
    command = [sys.executable, str(BENCHMARKS / "strategies.py"), "--quick", "--json", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    section = bench.report.Section.load(target)
    assert section.command == "python benchmarks/strategies.py --quick"
    assert section.is_quick
    assert {row.verdict for table in section.tables for row in table.rows} == {"", "unclear"}
    assert all(row.samples for table in section.tables for row in table.rows)
    assert bench.page.draw(section, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_results_page_equals_its_generated_content(bench: Any) -> None:
    page = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    assert page == bench.page.markdown(sections(bench), bench.run.TITLES, bench.run.LINKS)


def test_every_figure_of_the_page_exists(bench: Any) -> None:
    page = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    drawn = {name for name in sections(bench) if f"(results/{name}.png)" in page}
    assert drawn == {path.stem for path in RESULTS.glob("*.png")}


def test_the_guide_has_the_measured_tables(bench: Any) -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in bench.run.GUIDE.rglob("*.md")}
    shown = {name: text for name, text in pages.items() if bench.run.MARKS.search(text)}
    assert shown.keys() == {"scaling", "compile", "backends", "plan", "postprocessors"}
    for text in shown.values():
        assert bench.run.with_tables(text, sections(bench)) == text


def test_every_section_has_a_script(bench: Any) -> None:
    assert [name for name in bench.run.TITLES if not (BENCHMARKS / f"{name}.py").exists()] == []
    assert sections(bench).keys() <= bench.run.TITLES.keys() - bench.run.LINKS.keys()


@pytest.mark.parametrize(
    ("samples", "bar", "sense", "said"),
    [
        ([0.90, 0.91, 0.92, 0.93, 0.94], 1.0, "≤", "met"),
        ([1.10, 1.11, 1.12, 1.13, 1.14], 1.0, "≤", "missed"),
        ([0.90, 0.95, 1.01, 1.05, 1.10], 1.0, "≤", "unclear"),
        ([3.1, 3.2, 3.3], 3.0, "≥", "met"),
        ([2.7, 2.8, 2.9], 3.0, "≥", "missed"),
    ],
)
def test_a_limit_is_checked_with_the_interval_of_the_median(
    bench: Any, samples: list[float], bar: float, sense: str, said: str
) -> None:
    assert bench.report.verdict(samples, bar, sense) == said


# The last round of Flower on the CNN contained its shutdown.
ONE_OUTLIER = [1.59114, 1.36076, 1.46962, 1.54046, 1.30867, 1.45706, 5.84511]


def test_one_outlier_does_not_make_a_missed_limit_unclear(bench: Any) -> None:
    assert bench.report.verdict(ONE_OUTLIER, 4.0, "≥") == "missed"
    assert bench.report.verdict(ONE_OUTLIER, 1.2, "≥") == "met"


def test_two_outliers_with_a_limit_within_the_samples_are_unclear(bench: Any) -> None:
    assert bench.report.verdict([*ONE_OUTLIER[1:], 5.9], 4.0, "≥") == "unclear"
    assert bench.report.verdict(ONE_OUTLIER, 1.5, "≥") == "unclear"


def test_only_a_distant_sample_is_treated_as_an_outlier(bench: Any) -> None:
    assert bench.report.without_outlier([1.0, 1.1, 1.2, 1.3, 9.0]) == [1.0, 1.1, 1.2, 1.3]
    assert bench.report.without_outlier([-9.0, 1.0, 1.1, 1.2, 1.3]) == [1.0, 1.1, 1.2, 1.3]
    assert bench.report.without_outlier([1.0, 1.1, 1.2, 1.3, 1.8]) == [1.0, 1.1, 1.2, 1.3, 1.8]
    assert bench.report.without_outlier([1.0, 1.1, 1.2, 9.0]) == [1.0, 1.1, 1.2, 9.0]


def test_noise_makes_results_near_the_limit_unclear(bench: Any) -> None:
    assert bench.report.verdict([0.90, 0.91, 0.92], 1.0, noise=0.02) == "met"
    assert bench.report.verdict([0.90, 0.91, 0.92], 1.0, noise=0.10) == "unclear"


def test_the_interval_of_a_median_excludes_the_tails(bench: Any) -> None:
    assert bench.report.certain(list(range(101))) == (40, 60)
    assert bench.report.certain([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_a_recorded_command_contains_no_user_folder(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/somewhere/benchmarks/federated.py", "--pfl-python", "/home/me/pfl/bin/python", "--json", "/tmp/x.json"]
    monkeypatch.setattr(sys, "argv", words)
    assert bench.report._command() == "python benchmarks/federated.py --pfl-python .../pfl/bin/python"


def test_a_section_survives_a_round_trip(bench: Any, tmp_path: Path) -> None:
    report = bench.report
    row = report.Row("one", [1.0, 2.0, 4.0], bar=3.0, verdict="unclear", cells=["x"])
    curve = report.Curve("c", "x", "y", [1.0, 2.0], [[1.0, 3.0], [2.0, 5.0]])
    section = report.Section("loop", "The loop", "what", curves=[curve], is_quick=True)
    section.add(report.Table("t", "ratio", [row], ["own"]))
    section.save(SimpleNamespace(json=tmp_path / "loop.json"))
    read = report.Section.load(tmp_path / "loop.json")
    section.seconds = read.seconds
    assert read == section
    assert read.curves[0].lines == [(1.0, 0.0), (2.0, 1.0)]
