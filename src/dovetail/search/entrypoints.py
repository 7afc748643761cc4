"""Entrypoints of experiments: commands, trial classes, and the launchers of Determined.

A trial class has the form `module:Class`. The launcher `determined.launch.torch_distributed` is replaced by the
launcher of this library; `command_of` in `dovetail.search.starting` builds the command of either form.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dovetail.checks import Refused, list_of, text
from dovetail.config import names_trial_class
from dovetail.errors import UnknownNameError

TORCH_LAUNCHER = "determined.launch.torch_distributed"
"""The supported launcher of Determined."""

_LAUNCHER = re.compile(r"determined\.launch\.\w+")
_COMMAND = "expected a command such as python3 train.py, or a trial class such as model_def:MyTrial"


def parse_entrypoint(value: Any) -> list[str]:
    """Accept a command or a trial class, as text or as a list of words.

    Words after Determined's launcher are returned as a script with its arguments, or as `-m` and a module.

    Raises:
        Refused: The value is neither, or contains an unsupported launcher.

    Example:
        >>> parse_entrypoint("python3 -m determined.launch.torch_distributed -- python3 -u train.py --fast")
        ['python3', '-u', '-m', 'determined.launch.torch_distributed', 'train.py', '--fast']
        >>> parse_entrypoint("python3 -m determined.launch.torch_distributed --trial model_def:MyTrial")
        ['model_def:MyTrial']
    """
    if isinstance(value, str):
        try:
            # Determined runs every text in a shell. Without shell operators none is needed, and Python can be replaced.
            words = ["sh", "-c", value] if _has_operators(value) else shlex.split(value)
        except ValueError as error:
            raise Refused(f"expected a command ({str(error).lower()})") from error
    else:
        words = list_of(text)(value)
    if not words or not words[0] or any("\0" in word for word in words):
        raise Refused(_COMMAND)
    # The launcher is replaced in the words of a command; inside of a shell command it would not be found.
    if words[:2] == ["sh", "-c"] and (launcher := _LAUNCHER.search(" ".join(words[2:]))):
        raise Refused(f"expected {launcher[0]} as the whole command, because a shell does not find it here")
    if is_trial_class(words):
        return words
    python, arguments = split_python(words)
    if arguments[:1] == ["-m"] and arguments[1:] and _LAUNCHER.fullmatch(arguments[1]):
        return _launched(python, arguments[1], arguments[2:])
    return words


def is_trial_class(words: Sequence[str]) -> bool:
    """Return whether an entrypoint is a trial class, not a command."""
    return len(words) == 1 and names_trial_class(words[0])


def split_python(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return `python` with its options, and what it runs; the first part is empty for another program.

    Example:
        >>> split_python(["python3", "-W", "error", "-m", "train"])
        (['python3', '-W', 'error'], ['-m', 'train'])
        >>> split_python(["./train.sh"])
        ([], ['./train.sh'])
    """
    if not words or not re.fullmatch(r"python(3(\.\d+)?)?", words[0]):
        return [], list(words)
    program, *rest = words
    options = [program]
    # Options of Python up to the program; `-W` and `-X` have a value as the next word.
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        options += [rest.pop(0) for _ in range(min(len(rest), 2 if rest[0] in ("-W", "-X") else 1))]
    return options, rest


def trial_class_problem(name: str, folder: Path) -> str | None:
    """Return what is wrong with the name of a trial class, checked without importing its module.

    Args:
        name: The name, such as `model_def:MyTrial`.
        folder: The folder with the code.

    Returns:
        A sentence; None if nothing is wrong, or if the module is not in the folder but installed.
    """
    module, _, attribute = name.partition(":")
    first = module.partition(".")[0]
    place = folder.joinpath(*module.split("."))
    file = next((path for path in (Path(f"{place}.py"), place / "__init__.py") if path.is_file()), None)
    if file is None:
        is_here = (folder / first).is_dir() or (folder / f"{first}.py").is_file()
        # A namespace package, or an installed module: its names are not known without an import.
        if place.is_dir() or (not is_here and importlib.util.find_spec(first) is not None):
            return None
        return str(UnknownNameError(f"module of an entrypoint in {folder}", module, _modules(folder)))
    try:
        names = _names(ast.parse(file.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        # Importing the file will raise a better error.
        return None
    wanted = attribute.partition(".")[0]
    if names is None or wanted in names:
        return None
    classes = [known for known, is_class in names.items() if is_class]
    return str(UnknownNameError(f"class of an entrypoint in {file.name}", wanted, classes))


def _has_operators(command: str) -> bool:
    """Return whether a command has operators of the shell outside of quotes, such as `&&`, or several lines."""
    # Line breaks are operators here, not white space, and `#` starts no comment.
    lexer = shlex.shlex(command.strip(), posix=True, punctuation_chars="&|;<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    return any(set(word) <= set("&|;<>\n") for word in lexer if word)


def _launched(python: list[str], launcher: str, arguments: Sequence[str]) -> list[str]:
    """Return the entrypoint that a launcher of Determined starts."""
    if launcher != TORCH_LAUNCHER:
        raise Refused(
            f"expected {TORCH_LAUNCHER}, a script without a launcher, or a trial class such as model_def:MyTrial "
            f"(resources.slots_per_trial starts the processes; there is no {launcher} here)"
        )
    words = list(arguments)
    if "--" in words:
        at = words.index("--")
        options, words = words[:at], words[at + 1 :]
        if options:
            raise Refused(
                f"expected no options before -- of {launcher}: give the number of processes as "
                "resources.slots_per_trial and the number of restarts as max_restarts"
            )
    if words[:1] == ["--trial"]:
        if len(words) != 2 or not is_trial_class(words[1:]):
            raise Refused(f"expected one trial class such as model_def:MyTrial after --trial of {launcher}")
        return words[1:]
    inner, script = split_python(words)
    is_script = script[:1] not in ([], ["-c"], ["-"], ["-m"]) and (bool(inner) or script[0].endswith(".py"))
    if not is_script and not (inner and script[:1] == ["-m"] and len(script) > 1):
        raise Refused(f"expected a Python script after {launcher}, such as python3 train.py")
    return [*python, *inner[1:], "-m", launcher, *script]


def _modules(folder: Path) -> list[str]:
    """Return the names of the modules at the top of a folder."""
    return [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__init__.py")]


def _names(tree: ast.Module) -> dict[str, bool] | None:
    """Return the names that a module may define, each with whether it is a class; None if all are possible."""
    names: dict[str, bool] = {}
    # Also names inside of functions and conditions: a name that might exist must not be reported as missing.
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names[node.name] = True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, False)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if alias.name == "*":
                    return None
                names.setdefault(alias.asname or alias.name.partition(".")[0], False)
    return None if "__getattr__" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} else names
