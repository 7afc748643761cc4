"""`dovetail job …`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from dovetail.cli.job import app
from dovetail.cli.output import completion

SCRIPT = """
import json, os, sys
info = json.load(open(os.environ["DOVETAIL_TRIAL"]))
print(info["kind"], info["user_data"], flush=True)
sys.exit(info["user_data"].get("code", 0))
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "infer.py").write_text(SCRIPT)
    (tmp_path / "job.yaml").write_text("name: inference\nentrypoint: python3 infer.py\ndata: {trial_id: 3}\n")
    return tmp_path


def test_run_prints_the_output_of_the_script(run: Any, job: Path) -> None:
    code, out, err = run("job", "run", job / "job.yaml", job / "code", "--home", job / "home")
    assert (code, out, err) == (0, "job {'trial_id': 3}\n", "job 1 COMPLETED\n")


def test_a_failed_script_exits_with_3(run: Any, job: Path) -> None:
    code, _, err = run("job", "run", job / "job.yaml", job / "code", "--home", job / "home", "--set", "data.code=5")
    assert (code, err) == (3, "job 1 ERROR\n")


def test_list_and_logs_show_finished_jobs(run: Any, job: Path) -> None:
    arguments = ["job", "run", job / "job.yaml", job / "code", "--home", job / "home"]
    run(*arguments)
    run(*arguments, "--set", "data.code=5")
    _, out, _ = run("job", "list", "--home", job / "home", "--json")
    found = json.loads(out)
    assert [(each["id"], each["name"], each["state"], each["exit_code"]) for each in found] == [
        (1, "inference", "COMPLETED", 0),
        (2, "inference", "ERROR", 5),
    ]
    assert run("job", "logs", 1, "--home", job / "home") == (0, "job {'trial_id': 3}\n", "")
    assert "│  2 │ inference │ ERROR     │         5 │" in run("job", "list", "--home", job / "home")[1]


def test_an_unknown_job_prints_one_sentence(run: Any, finished: Any) -> None:
    code, _, err = run("job", "logs", 4, "--home", finished.home)
    assert (code, err) == (1, "dovetail: there is no job 4: there is none\n")


def test_listing_jobs_creates_no_store(run: Any, tmp_path: Path) -> None:
    words = f"there are no jobs in {tmp_path}/none: create one with 'dovetail job run', or give another --home\n"
    assert run("job", "list", "--home", tmp_path / "none") == (0, "", words)
    assert run("job", "list", "--home", tmp_path / "none", "--json") == (0, "[]\n", "")
    assert run("job", "logs", 1, "--home", tmp_path / "none") == (1, "", f"dovetail: {words}")
    assert not (tmp_path / "none").exists()


def test_shell_completion_of_jobs_lists_only_numbers(tmp_path: Path) -> None:
    for name in ("1", "2", "12", "12 (copy)"):
        (tmp_path / "jobs" / name).mkdir(parents=True)
    context = typer.Context(get_command(app))
    context.params["home"] = tmp_path
    assert completion("jobs/*")(context, "1") == ["1", "12"]


def test_ctrl_c_ends_the_job_and_the_command_exits_with_130(job: Path) -> None:
    (job / "code" / "infer.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    words = ["job", "run", job / "job.yaml", job / "code", "--home", job / "home"]
    command = [sys.executable, "-m", "dovetail", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.endswith("job 1 CANCELED\n")
