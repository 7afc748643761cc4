"""What `dovetail doctor` finds: real folders, databases, groups and processes."""

from __future__ import annotations

import json
import os
import re
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dovetail.cli.checkup.check import Check
from dovetail.cli.checkup.files import check_descriptors, check_disk, check_folder, check_shared_memory
from dovetail.cli.checkup.packages import (
    PURPOSES,
    Requirement,
    check_extras,
    check_packages,
    check_python,
    read_requirements,
)
from dovetail.cli.checkup.store import check_store
from dovetail.cli.checkup.torch_build import TESTED_TORCH, check_torch
from dovetail.cli.doctor import checkup, table
from dovetail.cli.probe import PROBES

ROOT = Path(__file__).parent.parent.parent
UNKNOWN_PACKAGE = "a-package-that-does-not-exist"
FOUND = {"version": TESTED_TORCH, "threads": 1, "accelerators": [], "built_for": ""}


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """A folder in which this user can make nothing. Root can nearly everywhere, but not there."""
    if os.geteuid() == 0:
        yield Path("/proc")
        return
    folder = tmp_path / "unwritable"
    folder.mkdir(mode=0o555)
    yield folder
    folder.chmod(0o755)


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes cannot import torch, and so answer at once."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('libtorch is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# ------------------------------------------------------------------ Python and packages


def pyproject_extras() -> dict[str, list[str]]:
    """The optional dependencies of pyproject.toml, read without tomllib, which Python 3.10 does not have."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n\n")[0]
    listed = re.findall(r"^([a-z0-9]+) = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
    return {name: re.findall(r'"([^"]+)"', content) for name, content in listed}


def test_every_extra_except_joined_ones_has_a_purpose() -> None:
    assert set(PURPOSES) == set(pyproject_extras()) - {"bench", "demo", "dev", "docs"}


def test_the_tested_torch_is_the_pinned_one() -> None:
    assert f"\ntorch=={TESTED_TORCH}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_every_version_bound_of_the_requirements_is_parsed() -> None:
    wanted = [Requirement.parse(text) for texts in pyproject_extras().values() for text in texts]
    bounds = ",".join([*(each.bounds for each in wanted), *(each.bounds for each in read_requirements())])
    assert set(re.findall(r"[<>=!~]+", bounds)) == {">=", "<", "=="}


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("2.13.0+cpu", ">=2.6", True),
        ("2.13.0+cpu", "==2.13.0", True),
        ("2.5.1", ">=2.6", False),
        ("2.10", ">=2.9", True),
        ("5.0.0", ">=5.0", True),
        ("5", ">=5.0.0", True),
        ("1.42.0", "<1.42,>=1.41", False),
        ("1.41.3", "<1.42,>=1.41", True),
        ("1.14.0.post2", "==1.14.0.post2", True),
        ("1.14.0", "==1.14.0.post2", False),
        ("1", "", True),
    ],
)
def test_a_version_is_compared_by_its_numbers(
    version: str, bounds: str, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / f"thing-{version}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: thing\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    lack = "" if fits else f"thing {version} does not fit: {bounds} is required"
    assert Requirement("thing", bounds).lack() == lack


def test_the_current_python_version_is_accepted() -> None:
    assert check_python().status == "ok"


def test_a_missing_extra_is_a_note_with_its_command() -> None:
    checks = {check.name: check for check in check_extras([Requirement(UNKNOWN_PACKAGE, ">=1", "flower")])}
    assert checks["flower"] == Check(
        "extras",
        "flower",
        "note",
        f"{UNKNOWN_PACKAGE} is missing (for federations on Flower nodes)",
        "pip install 'dovetail[flower]'",
    )


def test_an_outdated_extra_counts_as_missing() -> None:
    (check, *_) = check_extras([Requirement("pytest", ">=999", "plot")])
    assert (check.status, check.remedy) == ("note", "pip install 'dovetail[plot]'")


def test_an_extra_that_includes_another_requires_its_packages() -> None:
    requirements = [
        Requirement("dovetail", extra="ui", extras=("search",)),
        Requirement("pytest", extra="ui"),
        Requirement(UNKNOWN_PACKAGE, extra="search"),
    ]
    checks = {check.name: check for check in check_extras(requirements)}
    assert checks["ui"].found == f"{UNKNOWN_PACKAGE} is missing (for dovetail ui and dovetail dashboard)"


def test_extras_unknown_to_the_installation_are_one_note() -> None:
    *_, check = check_extras([Requirement("pytest", extra=extra) for extra in PURPOSES if extra not in ("ray", "s3")])
    assert (check.status, check.found.rpartition("lacks ")[2]) == ("note", "ray, s3")


def test_a_missing_package_is_a_problem_with_its_command() -> None:
    there, missing = check_packages(
        [Requirement("pytest"), Requirement(UNKNOWN_PACKAGE, ">=1"), Requirement("x", "", "plot")]
    )
    assert there.status == "ok"
    assert (missing.status, missing.remedy) == ("problem", f"pip install '{UNKNOWN_PACKAGE}>=1'")


# ------------------------------------------------------------------ torch


def by_name(**answers: Any) -> dict[str, Check]:
    reported = {"torch": {"found": FOUND}, "gloo": {"found": 3.0}, "compiler": {"found": "g++"}, **answers}
    return {check.name: check for check in check_torch(reported)}


def test_two_processes_of_a_group_can_connect() -> None:
    assert PROBES["gloo"]() == 3.0


def test_a_missing_network_is_named_when_gloo_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError) as raised:
        PROBES["gloo"]()
    check = by_name(gloo={"error": f"RuntimeError: {raised.value}"})["gloo"]
    assert (check.status, check.remedy) == ("problem", "unset GLOO_SOCKET_IFNAME")
    assert "Unable to find address for: nowhere0" in check.found


def test_another_version_of_torch_is_a_note() -> None:
    check = by_name(torch={"found": {**FOUND, "version": "2.7.1+cu126"}})["torch"]
    assert (check.status, check.remedy) == ("note", f"pip install torch=={TESTED_TORCH}")


def test_more_threads_than_cores_are_a_note() -> None:
    check = by_name(torch={"found": {**FOUND, "threads": 4096}})["threads"]
    assert (check.status, check.remedy) == ("note", f"export OMP_NUM_THREADS={len(os.sched_getaffinity(0))}")


def test_graphics_cards_are_named() -> None:
    found = {**FOUND, "accelerators": ["cuda:0 A", "cuda:1 B"], "built_for": "12.6"}
    check = by_name(torch={"found": found})["devices"]
    assert (check.status, check.found) == ("ok", "cuda:0 A, cuda:1 B, cpu")


@pytest.mark.slow
def test_a_failed_check_has_its_command(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "GLOO_SOCKET_IFNAME": "nowhere0"}
    command = [sys.executable, "-m", "dovetail", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert (done.returncode, done.stderr) == (1, "")
    assert (checks["gloo"]["status"], checks["gloo"]["remedy"]) == ("problem", "unset GLOO_SOCKET_IFNAME")
    assert checks["compiler"]["status"] == "note"
    assert "g++" in checks["compiler"]["remedy"]


@pytest.mark.slow
def test_a_healthy_machine_has_no_problem_and_no_leftover_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    checks = checkup(tmp_path / "runs", tmp_path / "home")
    assert [check for check in checks if check.status == "problem"] == []
    assert {"torch", "gloo", "compiler", "folder", "store"} <= {check.name for check in checks}
    assert files_below(tmp_path) == set()


# ------------------------------------------------------------------ files


def test_a_checked_folder_is_left_unchanged(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    assert check_folder(tmp_path).status == "ok"
    assert files_below(tmp_path) == {"mine"}


def test_a_missing_folder_is_not_created_by_the_check(tmp_path: Path) -> None:
    check = check_folder(tmp_path / "runs" / "digits")
    assert (check.status, check.found.partition(": ")[0]) == ("ok", str(tmp_path))
    assert files_below(tmp_path) == set()


def test_a_folder_that_cannot_be_written_is_a_problem(unwritable: Path) -> None:
    check = check_folder(unwritable)
    assert check.status == "problem"
    assert check.found.startswith(f"no checkpoint can be written to {unwritable}: ")
    assert check.remedy


def test_a_file_in_place_of_a_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_folder(tmp_path / "file").found.endswith("/file: Not a directory")


@pytest.mark.parametrize(
    ("little", "too_little", "status"), [(0, 0, "ok"), (1 << 60, 0, "note"), (1 << 60, 1 << 60, "problem")]
)
def test_free_space_is_compared_with_the_needs_of_a_run(
    little: int, too_little: int, status: str, tmp_path: Path
) -> None:
    assert check_disk("disk", tmp_path, little=little, too_little=too_little).status == status


@pytest.mark.parametrize(("limit", "status"), [(1024, "ok"), (512, "note")])
def test_a_low_limit_of_open_files_is_a_note(limit: int, status: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        assert check_descriptors().status == status
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_system_without_a_shared_memory_limit_is_not_checked(tmp_path: Path) -> None:
    assert check_shared_memory(tmp_path / "shm") == []


# ------------------------------------------------------------------ the store


def test_a_missing_store_is_checked_without_creating_it(tmp_path: Path) -> None:
    assert check_store(tmp_path / "home").found == f"none yet; {tmp_path / 'home' / 'store.db'} can be created"
    assert files_below(tmp_path) == set()


def test_a_checked_store_is_left_unchanged(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="the extra 'search' is not installed")
    from dovetail.search.store import Store

    Store.open(tmp_path).storage.engine.dispose()  # type: ignore[attr-defined]
    before = (tmp_path / "store.db").read_bytes(), files_below(tmp_path)
    assert check_store(tmp_path).found.endswith(": 0 experiments, can be written")
    assert ((tmp_path / "store.db").read_bytes(), files_below(tmp_path)) == before


def test_checking_a_url_of_a_file_creates_no_file(tmp_path: Path) -> None:
    assert check_store(url=f"sqlite:///{tmp_path / 'other.db'}").status == "ok"
    assert files_below(tmp_path) == set()


def test_a_store_that_is_not_a_database_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_text("This is a letter, and not a database." * 100)
    check = check_store(tmp_path)
    assert (check.status, check.found.rpartition(": ")[2]) == ("problem", "file is not a database")


def test_a_store_locked_by_another_process_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.cli.checkup.store._CONNECT_SECONDS", 0)
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.executescript("CREATE TABLE studies (id); BEGIN IMMEDIATE")
        assert check_store(tmp_path).found.endswith("database is locked")
    database.close()


@pytest.mark.parametrize("module", ["psutil", "yaml"])
def test_a_store_check_without_its_package_is_a_problem(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None; from dovetail.cli.checkup.store import check_store\n"
    code += "check = check_store(); print(check.status, check.found)"
    reported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert reported.stdout.startswith(f"problem cannot be checked: import of {module} halted"), reported.stderr


def test_a_folder_in_which_no_store_can_be_created_is_a_problem(unwritable: Path) -> None:
    assert check_store(unwritable / "home").status == "problem"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter%402@127.0.0.1:1/lab",
        "postgresql://me@127.0.0.1:1/lab?password=hunter%402",
        "postgresql://me:hunter@hunter@127.0.0.1:1/lab",
        "postgresql://me:hunter/hunter@127.0.0.1:1/lab",
        "postgresql://me:hunter?hunter@127.0.0.1:1/lab",
        "postgresql://me:hunter@127.0.0.1:port/lab",
        "nosuch://me:hunter%402@127.0.0.1/lab",
        "me:hunter@127.0.0.1",
    ],
)
def test_a_server_that_cannot_be_opened_is_a_problem_without_its_password(url: str) -> None:
    check = check_store(url=url)
    assert check.status == "problem"
    assert "hunter" not in check.found + check.remedy


# ------------------------------------------------------------------ the command


@pytest.mark.usefixtures("without_torch")
def test_doctor_json_and_text_agree(run: Callable[..., Any], tmp_path: Path) -> None:
    options = "--folder", tmp_path, "--home", tmp_path / "home"
    code, out, _ = run("doctor", "--json", *options)
    reported = json.loads(out)
    code_of_text, text, _ = run("doctor", *options)
    assert (code, code_of_text, reported["ok"]) == (1, 1, False)
    lines = re.findall(r"^(ok|note|problem) +(\S+(?: \S+)*?)(?:  |$)", text, re.MULTILINE)
    assert lines == [(check["status"], check["name"]) for check in reported["checks"]]


@pytest.mark.usefixtures("without_torch")
def test_a_torch_that_cannot_be_imported_is_a_problem_with_its_command(run: Callable[..., Any], tmp_path: Path) -> None:
    _, out, _ = run("doctor", "--json", "--folder", tmp_path, "--home", tmp_path)
    (check,) = [check for check in json.loads(out)["checks"] if check["part"] == "torch"]
    assert check["found"] == "cannot be imported: ImportError: libtorch is broken"
    assert check["remedy"] == f"pip install torch=={TESTED_TORCH}"


@pytest.mark.usefixtures("without_torch")
def test_the_password_of_the_environment_is_never_printed(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOVETAIL_STORE", "postgresql://me:hunter2@127.0.0.1:1/lab")
    _, out, err = run("doctor", "--folder", tmp_path)
    assert "postgresql://***@127.0.0.1:1/lab cannot be opened" in out
    assert "hunter2" not in out + err


def test_a_table_of_80_columns_fits_and_breaks_no_command() -> None:
    command = "pip install 'dovetail[tensorboard]'"
    checks = [
        Check("python", "packages", "ok", "package 1.2.3, " * 20),
        Check("x", "temporary disk", "note", "", command),
    ]
    lines = str(table(checks, 80)).split("\n")
    assert max(map(len, lines)) <= 80
    assert sum(command in line for line in lines) == 1
    assert lines.count("") == 1
