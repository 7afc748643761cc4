from __future__ import annotations

import subprocess
import sys

import pytest

LIGHT = """
import sys, threading
before = set(sys.modules)
opened = []
sys.addaudithook(lambda event, args: opened.append((event, args)) if event.startswith(("socket.", "subprocess.")) or
    (event == "open" and isinstance(args[1], str) and any(mode in args[1] for mode in "wax+")) else None)
import {module}
heavy = sorted({{"torch", "numpy", "rich.live", "pandas", "matplotlib", "sklearn"}} & set(sys.modules))
assert not heavy, heavy
assert threading.active_count() == 1
assert not opened, opened
"""


@pytest.mark.parametrize("module", ["dovetail", "dovetail.units", "dovetail.errors"])
def test_a_light_import_loads_no_torch_and_starts_no_thread(module: str) -> None:
    script = LIGHT.format(module=module)
    done = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_trainer_is_imported_without_the_compiler_of_torch() -> None:
    # The compiler takes a second, and the command line and data tools do without it.
    script = "import sys; import dovetail.trainers; assert 'torch._dynamo' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_imported_on_first_access() -> None:
    import dovetail

    for name in dovetail.__all__:
        assert getattr(dovetail, name) is not None
    assert set(dovetail.__all__) <= set(dir(dovetail))


def test_an_unknown_name_raises_an_attribute_error() -> None:
    import dovetail

    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        dovetail.Trianer  # noqa: B018


def test_the_format_of_log_records_has_level_process_and_logger() -> None:
    import dovetail

    values = {"levelname": "INFO", "process": 7, "name": "mine", "message": "hello"}
    assert dovetail.LOG_FORMAT % values == "INFO: [7] mine: hello"
