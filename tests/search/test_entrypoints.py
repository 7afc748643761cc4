from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dovetail.checks import Refused
from dovetail.search.entrypoints import parse_entrypoint, trial_class_problem

TORCH = "determined.launch.torch_distributed"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("python3 train.py --name 'two words'", ["python3", "train.py", "--name", "two words"]),
        (["./train.sh", "a b"], ["./train.sh", "a b"]),
        ("pip install -e . && python3 train.py", ["sh", "-c", "pip install -e . && python3 train.py"]),
        ("python3 a.py\npython3 b.py\n", ["sh", "-c", "python3 a.py\npython3 b.py\n"]),
        ("python3 a.py>log 2>&1", ["sh", "-c", "python3 a.py>log 2>&1"]),
        ("python3 -c 'a; b()\nc()' \"x && y\" #1\n", ["python3", "-c", "a; b()\nc()", "x && y", "#1"]),
        (["python3", "a.py", "&&", "b"], ["python3", "a.py", "&&", "b"]),
        ("model_def:MyTrial", ["model_def:MyTrial"]),
        (["model_def:MyTrial"], ["model_def:MyTrial"]),
        ("my_lib.trial:Outer.MyTrial", ["my_lib.trial:Outer.MyTrial"]),
        (f"python3 -m {TORCH} train.py --lr 1", ["python3", "-m", TORCH, "train.py", "--lr", "1"]),
        (f"python3 -m {TORCH} -- train.py -- x", ["python3", "-m", TORCH, "train.py", "--", "x"]),
        (f"python -u -m {TORCH} python3 -W error train.py",
         ["python", "-u", "-W", "error", "-m", TORCH, "train.py"]),
        (["python3", "-m", TORCH, "--", "python3", "-m", "pkg.train", "a"],
         ["python3", "-m", TORCH, "-m", "pkg.train", "a"]),
        (f"python3 -m {TORCH} --trial model_def:MyTrial", ["model_def:MyTrial"]),
        (f"python3 -m {TORCH} -- --trial model_def:MyTrial", ["model_def:MyTrial"]),
    ],
)  # fmt: skip
def test_the_entrypoints_of_determined_are_accepted(given: Any, expected: list[str]) -> None:
    assert parse_entrypoint(given) == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("", "expected a command such as python3 train.py, or a trial class such as model_def:MyTrial"),
        (f"python3 -m {TORCH}", f"expected a Python script after {TORCH}, such as python3 train.py"),
        (f"python3 -m {TORCH} ./train.sh", f"expected a Python script after {TORCH}, such as python3 train.py"),
        (f"python3 -m {TORCH} python3 -c pass", f"expected a Python script after {TORCH}, such as python3 train.py"),
        (f"python3 -m {TORCH} python3 -m", f"expected a Python script after {TORCH}, such as python3 train.py"),
        (f"python3 -m {TORCH} --trial model_def:A train.py", "expected one trial class such as model_def:MyTrial "),
        (f"python3 -m {TORCH} --trial model_def", "expected one trial class such as model_def:MyTrial after --trial"),
        (f"python3 -m {TORCH} --nproc_per_node 4 -- train.py",
         f"expected no options before -- of {TORCH}: give the number of processes as resources.slots_per_trial"),
        ("python3 -m determined.launch.horovod python3 train.py",
         f"expected {TORCH}, a script without a launcher, or a trial class such as model_def:MyTrial "
         "(resources.slots_per_trial starts the processes; there is no determined.launch.horovod here)"),
        (f"pip install a && python3 -m {TORCH} a.py", f"expected {TORCH} as the whole command, because a shell"),
        ("python3 -m determined.launch.deepspeed --trial model_def:A", "there is no determined.launch.deepspeed here"),
    ],
)  # fmt: skip
def test_unsupported_entrypoints_are_rejected_with_an_alternative(given: str, sentence: str) -> None:
    with pytest.raises(Refused) as caught:
        parse_entrypoint(given)
    assert str(caught.value).startswith(sentence) or str(caught.value).endswith(f"{sentence})")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "model_def.py").write_text(
        "from elsewhere import Imported\nclass MyTrial:\n    pass\nOther = MyTrial\nlimit = 3\n"
    )
    (tmp_path / "open.py").write_text("from model_def import *\n")
    (tmp_path / "broken.py").write_text("class MyTrial(:\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "trial.py").write_text("class Deep:\n    class Inner:\n        pass\n")
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        *("model_def:MyTrial", "model_def:Other", "model_def:Imported", "package.trial:Deep.Inner"),
        # Names that are known only after an import: a star, a syntax error, a module that is installed.
        *("open:Anything", "broken:MyTrial", "dovetail.pytorch:PyTorchTrial"),
    ],
)
def test_a_trial_class_is_found_without_importing_its_module(code: Path, name: str) -> None:
    assert trial_class_problem(name, code) is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model_de:MyTrial", "unknown module of an entrypoint in {}: did you mean 'model_def'? (known: broken, model_"),
        ("package.trail:Deep", "unknown module of an entrypoint in {} 'package.trail' (known: broken, "),
        ("model_def.sub:MyTrial", "unknown module of an entrypoint in {} 'model_def.sub': did you mean 'model_def'?"),
        ("model_def:MyTrail", "unknown class of an entrypoint in model_def.py 'MyTrail': did you mean 'MyTrial'? (kno"),
        ("package.trial:Depe", "unknown class of an entrypoint in trial.py 'Depe': did you mean 'Deep'? (known: Deep"),
    ],
)
def test_an_unknown_module_or_class_suggests_the_nearest_name(code: Path, name: str, sentence: str) -> None:
    problem = trial_class_problem(name, code)
    assert problem is not None
    assert problem.startswith(sentence.format(f"{code} 'model_de'" if name.startswith("model_de:") else code))
