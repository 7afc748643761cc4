"""Settings for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

# Two test processes on two cores: torch's second thread would only spin. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Hundreds of processes import Dovetail, and all test processes the tests: without bytecode, each compiles them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def _keep_files_in_memory() -> Path | None:
    """Use a new folder in memory for temporary files, if there is room; remove those of ended runs.

    Tests sync thousands of small files. In memory this waits for no disk, and a killed process loses nothing of either.
    `make torture` uses the disk.

    Returns:
        The folder; None for the disk, and in a test process that got the folder from the one that started it.
    """
    memory = Path("/dev/shm")
    if (
        "TMPDIR" in os.environ
        or os.environ.get("DOVETAIL_TORTURE") == "1"
        or not os.access(memory, os.W_OK)
        or shutil.disk_usage(memory).free < 6e9
        # Tests compile libraries and load them from their folders.
        or os.statvfs(memory).f_flag & os.ST_NOEXEC
    ):
        return None
    for old in memory.glob(f"{_FOLDERS}*"):
        if not psutil.pid_exists(int(old.name.removeprefix(_FOLDERS))):
            shutil.rmtree(old, ignore_errors=True)
    folder = memory / f"{_FOLDERS}{os.getpid()}"
    # Other users may enter it: a PostgreSQL server does not run as root.
    folder.mkdir(mode=0o755, exist_ok=True)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    return folder


_FOLDERS = "dovetail-tests-"
_IN_MEMORY = _keep_files_in_memory()

# If Comet is installed, transformers imports it with its trainer: without telemetry, and without patches of torch.
os.environ.setdefault("COMET_ERROR_TRACKING_ENABLE", "false")
os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")

# Tests that share an expensive fixture and therefore run in one test process: prefix of their ids, and process name.
_TOGETHER = {
    "tests/trainers/test_whole_step.py": "graphs",
    "tests/trainers/capabilities/test_compiled.py": "graphs",
    "tests/federated/test_cost.py": "graphs",
    "tests/trainers/test_cost.py::test_a_layer_makes_at_most_8_more_python_calls_per_step[compiled": "graphs",
    "tests/accelerator/test_pretend_device.py": "accelerator",
    "tests/search/test_store.py": "store",
    # The syntax trees of all modules.
    "tests/test_rules.py": "rules",
    "tests/test_site.py": "site",
    "tests/trainers/test_processes.py::TestAfterTrainingElsewhere": "twins",
    "tests/reliability/test_kill.py": "nursery",
    "tests/integration/test_notebook.py": "notebooks",
    "tests/integration/test_example_notebook.py": "notebooks",
    # Two clusters of Ray at once on one small machine: nodes that start too slowly give up.
    "tests/integration/test_ray.py": "ray",
    "tests/integration/test_federated_ray.py": "ray",
}
_APART = "tests/integration/test_examples.py"


def _scope(nodeid: str) -> str:
    """Return the name of what a test shares with others, or its own."""
    for start, name in _TOGETHER.items():
        if nodeid.startswith(start):
            return name
    file = nodeid.split("::", 1)[0]
    return file if file.startswith("tests/integration/") and file != _APART else nodeid


@pytest.fixture(scope="session")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile every graph once: the processes of one run of tests share what the compiler has made."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "inductor"))
        yield


@pytest.fixture(scope="session")
def memory_bench() -> Any:
    """The benchmark that plans and measures the memory of training; it imports its own neighbours by name."""
    folder = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return import_module("memory_plan")
    finally:
        sys.path.remove(folder)


@pytest.fixture
def forking() -> Iterator[None]:
    """Fork every Python that a test starts, or that is started for it, from one that has imported torch."""
    from forked import forking

    with forking():
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "torture: only runs in `make torture`; other tests stand for it elsewhere")
    config.addinivalue_line("markers", "full_size: also runs in `make torture`, more often or in new interpreters")
    # A shell's background job ignores Ctrl-C, and so would all processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that only `make torture` runs, and start with the slow ones, so that no test process ends alone."""
    if os.environ.get("DOVETAIL_TORTURE") != "1":
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("torture")])
        items[:] = [item for item in items if not item.get_closest_marker("torture")]
    # By file, in which tests may share fixtures.
    slow = {item.nodeid.split("::", 1)[0] for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (_scope(item.nodeid) == item.nodeid, item.nodeid.split("::", 1)[0] not in slow))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude a million objects of imports and collected tests from later searches for garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out tests that belong together as a whole, and every other test by itself, in the order from above.

    The group marks of pytest-xdist 3.8 would say the same, but mean nothing to pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    config.option.loadscopereorder = False
    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Repeat in the last line that tests in a browser were skipped, because the summary above it is long."""
    yield
    # The files of failed tests stay in memory until the next run. At the exit, because other test processes still run.
    if _IN_MEMORY is not None and not exitstatus:
        atexit.register(shutil.rmtree, _IN_MEMORY, ignore_errors=True)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    # Test processes of pytest-xdist have no reporter.
    if reporter is not None and any("chromium" in str(it.longrepr) for it in reporter.stats.get("skipped", [])):
        reporter.write_line("browser tests are skipped: chromium is not installed", red=True, bold=True)
