"""Checks of Python and of the packages that Dovetail requires."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from dovetail.cli.checkup.check import Check

PURPOSES: Mapping[str, str] = {
    "plot": "figures of runs and reports",
    "metrics": "metrics of torchmetrics",
    "pandas": "histories as data frames",
    "datasets": "the handwritten digits of the examples",
    "privacy": "PrivateTrainer, and noise with an accountant",
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandBLogger",
    "mlflow": "MLflowLogger",
    "neptune": "NeptuneLogger",
    "search": "experiments",
    "ui": "dovetail ui and dovetail dashboard",
    "postgres": "experiments on a PostgreSQL server",
    "ray": "trials and clients on a Ray cluster",
    "flower": "federations on Flower nodes",
    "compression": "compressed updates",
    "s3": "checkpoints in S3",
    "huggingface": "models of transformers",
    "adapters": "LoRA and other adapters of peft",
    "timm": "models of timm",
    "polars": "data frames of polars",
    "streams": "streams of torchdata, webdataset, litData and Hugging Face datasets",
    "onnx": "models exported to ONNX",
    "trackio": "TrackioLogger",
    "comet": "CometLogger",
}
"""The extras and their purposes, without extras that only combine others."""


@dataclass(frozen=True)
class Requirement:
    """A package that Dovetail requires, from its metadata.

    Example:
        >>> Requirement.parse('flwr<1.42,>=1.41; extra == "flower"')
        Requirement(name='flwr', bounds='<1.42,>=1.41', extra='flower', extras=())
    """

    name: str
    bounds: str = ""
    extra: str = ""
    extras: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Requirement:
        """Return the requirement in one line of the metadata."""
        wanted, _, marker = text.partition(";")
        match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?\s*\(?([^()]*)\)?\s*", wanted)
        assert match is not None, text
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)", marker)
        extras = tuple(each.strip() for each in (match[2] or "").split(",") if each)
        return cls(match[1], match[3].strip(), extra[1] if extra else "", extras)

    @property
    def installed(self) -> str | None:
        """The installed version, or None."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def lack(self) -> str:
        """Return what is wrong with the installed version; empty if it is suitable.

        Example:
            >>> Requirement("torch", ">=99").lack().partition(" ")[2].partition(" ")[2]
            'does not fit: >=99 is required'
        """
        version = self.installed
        if version is None:
            return f"{self.name} is missing"
        return "" if _fits(version, self.bounds) else f"{self.name} {version} does not fit: {self.bounds} is required"


def read_requirements() -> list[Requirement]:
    """Return the requirements in Dovetail's metadata; an empty list if it is not installed."""
    try:
        return [Requirement.parse(text) for text in metadata.requires("dovetail") or ()]
    except metadata.PackageNotFoundError:
        return []


def check_python() -> Check:
    """Compare the version of Python with the required one."""
    found = f"{platform.python_version()} in {sys.prefix}"
    try:
        needed = metadata.metadata("dovetail")["Requires-Python"]
    except metadata.PackageNotFoundError:
        remedy = "pip install -e .  # in the checkout"
        return Check("python", "python", "problem", f"{found}, but dovetail is not installed there", remedy)
    if _fits(platform.python_version(), needed):
        return Check("python", "python", "ok", found)
    return Check("python", "python", "problem", f"{found}: {needed} is required", "python3.11 -m venv .venv")


def check_packages(requirements: Sequence[Requirement]) -> list[Check]:
    """Check the packages that every run needs: one check for all suitable ones, and one for each other."""
    needed = [each for each in requirements if not each.extra]
    found = ", ".join(f"{each.name} {each.installed}" for each in needed if not each.lack())
    missing = [
        Check("python", each.name, "problem", lack, f"pip install '{each.name}{each.bounds}'")
        for each in needed
        if (lack := each.lack())
    ]
    return [*([Check("python", "packages", "ok", found)] if found else []), *missing]


def check_extras(requirements: Sequence[Requirement]) -> list[Check]:
    """Check the packages of every extra. None of them is essential."""
    known = {each.extra for each in requirements}
    checks = [_check_extra(extra, requirements) for extra in PURPOSES if extra in known]
    if unknown := [extra for extra in PURPOSES if extra not in known]:
        found = f"the installed metadata is older than the code, and lacks {', '.join(unknown)}"
        checks.append(Check("extras", "other extras", "note", found, "pip install -e .  # in the checkout"))
    return checks


def _check_extra(extra: str, requirements: Sequence[Requirement]) -> Check:
    needed = _needs(extra, requirements)
    if lacks := [lack for each in needed if (lack := each.lack())]:
        found = f"{', '.join(lacks)} (for {PURPOSES[extra]})"
        return Check("extras", extra, "note", found, f"pip install 'dovetail[{extra}]'")
    return Check("extras", extra, "ok", ", ".join(f"{each.name} {each.installed}" for each in needed))


def _needs(extra: str, requirements: Sequence[Requirement]) -> list[Requirement]:
    own = [each for each in requirements if each.extra == extra]
    # An extra may include others: `ui` requires dovetail[search].
    joined = [
        each for name in own if name.name == "dovetail" for one in name.extras for each in _needs(one, requirements)
    ]
    return [*joined, *(each for each in own if each.name != "dovetail")]


def _fits(version: str, bounds: str) -> bool:
    """Return whether a version satisfies the bounds `>=`, `<` and `==`; other operators are ignored."""
    for operator, bound in re.findall(r"(>=|<(?!=)|==)\s*([\w.]+)", bounds):
        # A local version such as 2.13.0+cpu satisfies ==2.13.0.
        if operator == "==" and version.partition("+")[0] != bound:
            return False
        if operator != "==" and (_release(version) >= _release(bound)) != (operator == ">="):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(each) for each in match[0].split(".")] if match else []
    # 2.0 and 2.0.0 are the same version.
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
