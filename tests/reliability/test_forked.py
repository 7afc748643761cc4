"""Processes that are forked are as good as new ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.full_size

REPORT_LINE = """
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
    path.write_text(REPORT_LINE)
    return path


def test_a_forked_script_has_its_arguments_folder_output_and_exit_code(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    done = forked.run(script, "a", "b", folder=folder)
    reported, over = done.stdout.splitlines()
    *place, _ = json.loads(reported)
    assert place == ["__main__", str(script), [str(script), "a", "b"], str(tmp_path), str(folder), None]
    assert (over, done.stderr, done.returncode) == ("over", "", 7)


def test_an_error_and_a_warning_end_a_forked_script_as_usual(tmp_path: Path) -> None:
    (tmp_path / "warn.py").write_text("import warnings\nwarnings.warn('beware')\n")
    done = forked.run(tmp_path / "warn.py", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("UserWarning: beware\n")


def test_a_forked_process_can_be_waited_for_and_killed(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import signal\nsignal.pause()\n")
    with tempfile.TemporaryFile() as output:
        process = forked.start(tmp_path / "wait.py", folder=tmp_path, stdout=output, stderr=output)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(120) == -signal.SIGKILL
        process.kill()


def test_a_forked_script_gets_the_environment_plus_given_variables(script: Path, tmp_path: Path) -> None:
    with tempfile.TemporaryFile("w+") as output:
        process = forked.start(script, folder=tmp_path, stdout=output, stderr=output, variables={"OWN": "1"})
        assert process.wait(120) == 7
        output.seek(0)
        *_, own, pid = json.loads(output.readline())
    assert (own, pid) == ("1", process.pid)


def test_a_forked_module_runs_as_usual_and_may_warn(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(
        "import os, sys, warnings\nwarnings.warn('beware')\n"
        "print(__name__, __spec__.name, *sys.argv, sys.path[0], os.getsid(0) == os.getpid())\n"
    )
    command = [sys.executable, "-m", "tell", "a"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forked.Python(command, cwd=tmp_path, start_new_session=True, **pipes) as process:
        out, err = process.communicate(timeout=120)
    assert out == f"__main__ tell {tmp_path}/tell.py a {tmp_path} True\n"
    assert "UserWarning: beware" in err
    assert process.returncode == 0


def test_forked_code_runs_as_usual_with_its_arguments(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    code = "import os, sys; os.write(int(sys.argv[1]), repr([__name__, *sys.argv, sys.path[0]]).encode())"
    with forked.Python([sys.executable, "-c", code, str(writing)], cwd=tmp_path, pass_fds=[writing]) as process:
        os.close(writing)
        with os.fdopen(reading) as reported:
            assert reported.read() == repr(["__main__", "-c", str(writing), ""])
    assert process.returncode == 0


def test_output_of_an_unbuffered_process_arrives_at_once(tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text("import signal\nprint('.', end='')\nsignal.pause()\n")
    with forked.Python([sys.executable, "-u", "wait.py"], cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"."
        process.terminate()
    assert process.returncode == -signal.SIGTERM


IS_FORK = "import sys\nprint('torch' in sys.modules, flush=True)\n"


def test_start_up_variables_require_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "tell.py").write_text(IS_FORK)
    for variables, is_fork in (
        ({}, forked._FORKS),
        # Ray sets this one for the rest of the process.
        ({"PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace"}, forked._FORKS),
        ({"OMP_NUM_THREADS": "7"}, False),
        ({"PYTHONHASHSEED": "1"}, False),
    ):
        process = forked.start(
            "tell.py", folder=tmp_path, variables=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.communicate()[0].decode() == f"{is_fork}\n"


def test_a_new_python_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "distant.py").write_text("")
    (tmp_path / "tell.py").write_text("import sys, distant\nprint(sys.path.index(sys.argv[1]))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "far"), prepend=os.pathsep)
    assert forked.run(tmp_path / "tell.py", tmp_path / "far", folder=tmp_path).stdout == "1\n"


@pytest.mark.parametrize("spreads", [False, True])
def test_the_forking_fixture_reaches_processes_started_by_libraries(tmp_path: Path, spreads: bool) -> None:
    again = "import subprocess\nsubprocess.run([sys.executable, 'inner.py'])\n"
    (tmp_path / "outer.py").write_text(IS_FORK + again)
    (tmp_path / "inner.py").write_text(IS_FORK)
    command = [sys.executable, "outer.py"]
    if spreads:
        with forked.forking():
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    else:
        with forked.Python(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
            done = subprocess.CompletedProcess(command, 0, process.communicate()[0], "")
    assert (done.stdout, done.stderr) == (f"{forked._FORKS}\n{spreads and forked._FORKS}\n", "")
