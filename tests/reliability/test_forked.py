"""Processes that are forked are as good as new ones."""

from __future__ import annotations

import json
import signal
import tempfile
from pathlib import Path

import forked
import pytest

TELL = """
import atexit, json, os, sys
atexit.register(print, "over")
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ.get("OWN"), os.getpid()]))
class Here: pass
assert sys.modules["__main__"].Here is Here
assert sys.stdin.read() == ""
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tell.py"
    path.write_text(TELL)
    return path


def test_a_script_has_its_own_arguments_folder_output_and_end(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    done = forked.run(script, "a", "b", folder=folder)
    told, over = done.stdout.splitlines()
    *place, _ = json.loads(told)
    assert place == ["__main__", str(script), [str(script), "a", "b"], str(tmp_path), str(folder), None]
    assert (over, done.stderr, done.returncode) == ("over", "", 7)


def test_an_error_and_a_warning_end_a_script_as_always(tmp_path: Path) -> None:
    (tmp_path / "warn.py").write_text("import warnings\nwarnings.warn('beware')\n")
    done = forked.run(tmp_path / "warn.py", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("UserWarning: beware\n")


def test_a_process_can_be_waited_for_and_killed(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import signal\nsignal.pause()\n")
    with tempfile.TemporaryFile() as output:
        process = forked.start(tmp_path / "wait.py", folder=tmp_path, stdout=output, stderr=output)
        with pytest.raises(forked.subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(120) == -signal.SIGKILL
        process.kill()


def test_variables_are_those_of_this_process_and_some_more(script: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryFile("w+") as output:
        process = forked.start(script, folder=tmp_path, stdout=output, stderr=output, variables={"OWN": "1"})
        assert process.wait(120) == 7
        output.seek(0)
        *_, own, pid = json.loads(output.readline())
    assert (own, pid) == ("1", process.pid)
