"""Whether this machine has what Dovetail needs: one `Check` for each thing that was looked at.

Everything is tried, not guessed: files are written and renamed, a group of two meets on the loopback, the store is
opened. Nothing is left behind.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from dovetail.cli.output import bytes_text
from dovetail.errors import MissingExtraError
from dovetail.extras import require

__all__ = [
    "PURPOSES",
    "TESTED_TORCH",
    "Check",
    "Requirement",
    "check_descriptors",
    "check_disk",
    "check_extras",
    "check_folder",
    "check_packages",
    "check_python",
    "check_shared_memory",
    "check_store",
    "check_torch",
    "checkup",
    "read_requirements",
]

TESTED_TORCH = "2.13.0"
"""The version of torch that the tests run with."""

PURPOSES: Mapping[str, str] = {
    "plot": "pictures of runs and reports",
    "metrics": "metrics of torchmetrics",
    "pandas": "histories as data frames",
    "datasets": "the handwritten digits of the examples",
    "privacy": "PrivateTrainer, and noise with an accountant",
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandBLogger",
    "mlflow": "MLflowLogger",
    "neptune": "NeptuneLogger",
    "search": "experiments",
    "dashboard": "dovetail dashboard",
    "postgres": "experiments on a PostgreSQL server",
    "ray": "trials and clients on a Ray cluster",
    "flower": "federations on Flower nodes",
    "compression": "compressed updates",
    "s3": "checkpoints in S3",
}
"""The extras, and what each is for; not those that only join others."""

Status = Literal["ok", "note", "problem"]

# Seconds that torch has: from a cold disk alone it takes some twenty to import.
_PATIENCE = 90
_CONNECT_SECONDS = 5
_LITTLE_DISK, _TOO_LITTLE_DISK = 5_000_000_000, 200_000_000
_LITTLE_SHARED_MEMORY = 500_000_000
_FEW_DESCRIPTORS = 1024


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        part: What it belongs to: `"python"`, `"torch"`, `"extras"`, `"files"` or `"experiments"`.
        name: What it is.
        status: `"problem"` if something essential does not work, `"note"` if something is missing that may never be
            needed, else `"ok"`.
        found: What was found, in plain words.
        remedy: The command that installs or repairs it, or empty.

    Example:
        >>> check = check_descriptors()
        >>> check.part, check.name
        ('files', 'open files')
    """

    part: str
    name: str
    status: Status
    found: str
    remedy: str = ""


def checkup(folder: Path, home: Path | None = None, store: str | None = None) -> list[Check]:
    """Look at everything.

    Args:
        folder: Where checkpoints would go; it need not be there yet.
        home: The folder of experiments; None is that of `DOVETAIL_HOME`, or else `.dovetail`.
        store: The URL of a database server; None is that of `DOVETAIL_STORE`, or else the file in `home`.
    """
    requirements = read_requirements()
    # Torch takes seconds to import: the rest is done meanwhile.
    with _probe() as probe:
        before = [check_python(), *check_packages(requirements)]
        after = [
            *check_extras(requirements),
            check_folder(folder),
            check_disk("disk", folder),
            check_disk("temporary disk", Path(tempfile.gettempdir())),
            check_descriptors(),
            *check_shared_memory(),
            check_store(home, store),
        ]
        return [*before, *check_torch(_answers(probe)), *after]


# ------------------------------------------------------------------ Python and packages


@dataclass(frozen=True)
class Requirement:
    """A package that Dovetail asks for, as its metadata says it.

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
        """Read one line of the metadata."""
        wanted, _, marker = text.partition(";")
        match = re.fullmatch(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?\s*\(?([^()]*)\)?\s*", wanted)
        assert match is not None, text
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)", marker)
        extras = tuple(each.strip() for each in (match[2] or "").split(",") if each)
        return cls(match[1], match[3].strip(), extra[1] if extra else "", extras)

    @property
    def installed(self) -> str | None:
        """The version that is installed, or None."""
        try:
            return metadata.version(self.name)
        except metadata.PackageNotFoundError:
            return None

    def lack(self) -> str:
        """Say what is wrong with what is installed; nothing if it will do.

        Example:
            >>> Requirement("torch", ">=99").lack().partition(" ")[2].partition(" ")[2]
            'does not fit: >=99 is needed'
        """
        version = self.installed
        if version is None:
            return f"{self.name} is missing"
        return "" if _fits(version, self.bounds) else f"{self.name} {version} does not fit: {self.bounds} is needed"


def read_requirements() -> list[Requirement]:
    """Return what the metadata of Dovetail asks for; nothing where it is run without being installed."""
    try:
        return [Requirement.parse(text) for text in metadata.requires("dovetail") or ()]
    except metadata.PackageNotFoundError:
        return []


def check_python() -> Check:
    """Compare the version of Python with what Dovetail needs."""
    found = f"{platform.python_version()} in {sys.prefix}"
    try:
        needed = metadata.metadata("dovetail")["Requires-Python"]
    except metadata.PackageNotFoundError:
        remedy = "pip install -e .  # in the checkout"
        return Check("python", "python", "problem", f"{found}, in which dovetail is not installed", remedy)
    if _fits(platform.python_version(), needed):
        return Check("python", "python", "ok", found)
    return Check("python", "python", "problem", f"{found}: {needed} is needed", "python3.11 -m venv .venv")


def check_packages(requirements: Sequence[Requirement]) -> list[Check]:
    """Look for the packages that every run needs: one check for all that are there, and one for each that is not."""
    needed = [each for each in requirements if not each.extra]
    found = ", ".join(f"{each.name} {each.installed}" for each in needed if not each.lack())
    missing = [
        Check("python", each.name, "problem", lack, f"pip install '{each.name}{each.bounds}'")
        for each in needed
        if (lack := each.lack())
    ]
    return [*([Check("python", "packages", "ok", found)] if found else []), *missing]


def check_extras(requirements: Sequence[Requirement]) -> list[Check]:
    """Look for the packages of every extra. None of them is essential."""
    known = {each.extra for each in requirements}
    checks = [_check_extra(extra, requirements) for extra in PURPOSES if extra in known]
    if unknown := [extra for extra in PURPOSES if extra not in known]:
        found = f"this installation is older than its code, and does not know {', '.join(unknown)}"
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
    joined = [
        each for name in own if name.name == "dovetail" for one in name.extras for each in _needs(one, requirements)
    ]
    return [*joined, *(each for each in own if each.name != "dovetail")]


def _fits(version: str, bounds: str) -> bool:
    """Whether a version is within bounds, as far as `>=`, `<` and `==` say."""
    for operator, bound in re.findall(r"(>=|<(?!=)|==)\s*([\w.]+)", bounds):
        if operator == "==" and version.partition("+")[0] != bound:
            return False
        if operator != "==" and (_release(version) >= _release(bound)) != (operator == ">="):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(each) for each in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


# ------------------------------------------------------------------ torch


@contextmanager
def _probe() -> Iterator[subprocess.Popen[str]]:
    """Ask torch in another process, whose temporary files go with it."""
    with tempfile.TemporaryDirectory(prefix="dovetail-doctor-") as scratch:
        environment = {**os.environ, "TMPDIR": scratch, "TORCHINDUCTOR_CACHE_DIR": scratch, "PYTHONWARNINGS": "ignore"}
        if paths := environment.get("PYTHONPATH"):
            environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep)))
        # There, and not here: a file of the user's that is named like a module would be imported in its place.
        with subprocess.Popen(
            [sys.executable, "-m", "dovetail.cli.probe"],
            cwd=scratch,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def _answers(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the process has found, by name; an error where it has found nothing."""
    try:
        out, said = process.communicate(timeout=_PATIENCE)
        last = said.strip().rpartition("\n")[2]
        silence = f"its process ended with exit code {process.returncode}: {last}"
    except subprocess.TimeoutExpired:
        process.kill()
        out, silence = process.communicate()[0], f"no answer in {_PATIENCE} seconds"
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    answers = {line["name"]: line for line in lines}
    return {name: answers.get(name, {"error": silence}) for name in ("torch", "gloo", "compiler")}


def check_torch(answers: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """Judge what `dovetail.cli.probe` found: torch, its threads and devices, gloo, a compiler.

    Args:
        answers: For `"torch"`, `"gloo"` and `"compiler"` what was `"found"`, or the `"error"`.
    """
    torch = answers["torch"]
    if "error" in torch:
        found = f"cannot be imported: {_shortened(torch['error'])}"
        return [Check("torch", "torch", "problem", found, f"pip install torch=={TESTED_TORCH}")]
    found = torch["found"]
    return [_version(found), _threads(found), _devices(found), _gloo(answers["gloo"]), _compiler(answers["compiler"])]


def _version(found: Mapping[str, Any]) -> Check:
    version = str(found["version"])
    if version.partition("+")[0] == TESTED_TORCH:
        return Check("torch", "torch", "ok", f"{version}, which the tests run with")
    other = f"{version}; the tests run with {TESTED_TORCH}"
    return Check("torch", "torch", "note", other, f"pip install torch=={TESTED_TORCH}")


def _threads(found: Mapping[str, Any]) -> Check:
    threads, cores = int(found["threads"]), _num_cores()
    said = os.environ.get("OMP_NUM_THREADS")
    text = f"{threads} of torch on {cores} core{'s' * (cores != 1)}{f' (OMP_NUM_THREADS={said})' if said else ''}"
    if threads <= cores:
        return Check("torch", "threads", "ok", text)
    return Check("torch", "threads", "note", f"{text}: they take turns", f"export OMP_NUM_THREADS={cores}")


def _devices(found: Mapping[str, Any]) -> Check:
    devices = [f"cuda:{index} {name}" for index, name in enumerate(found["cuda"])] + ["mps"] * found["mps"]
    if devices:
        return Check("torch", "devices", "ok", ", ".join([*devices, "cpu"]))
    if found["built_for"]:
        text = f"cpu; torch is built for graphics cards ({found['built_for']}), but sees none"
        return Check("torch", "devices", "note", text, "nvidia-smi" if Path("/dev/nvidiactl").exists() else "")
    if Path("/dev/nvidiactl").exists():
        text = "cpu; there is a graphics card, but this build of torch cannot use it"
        return Check(
            "torch", "devices", "note", text, "pip install --force-reinstall torch  # from the index for your CUDA"
        )
    return Check("torch", "devices", "ok", "cpu")


def _gloo(answer: Mapping[str, Any]) -> Check:
    if "found" in answer:
        return Check("torch", "gloo", "ok", "two members of a group met, and added up")
    # Gloo begins with the line of its own source.
    problem = _shortened(re.sub(r"\[enforce fail at [^\]]*\] ", "", answer["error"]))
    remedy = f"export GLOO_SOCKET_IFNAME={'lo0' if sys.platform == 'darwin' else 'lo'}"
    if name := os.environ.get("GLOO_SOCKET_IFNAME"):
        problem, remedy = f"{problem} (GLOO_SOCKET_IFNAME={name})", "unset GLOO_SOCKET_IFNAME"
    return Check("torch", "gloo", "problem", f"processes cannot form a group: {problem}", remedy)


def _compiler(answer: Mapping[str, Any]) -> Check:
    if "found" in answer:
        return Check("torch", "compiler", "ok", f"{answer['found']}, for CompiledTrainer")
    text = f"{_shortened(answer['error'].partition(': ')[2])}: CompiledTrainer runs uncompiled"
    remedy = (
        "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++  # or as your system does it"
    )
    return Check("torch", "compiler", "note", text, remedy)


def _num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _shortened(text: str, length: int = 200) -> str:
    first = text.strip().partition("\n")[0]
    return first if len(first) <= length else f"{first[:length]}…"


# ------------------------------------------------------------------ files


def check_folder(folder: Path) -> Check:
    """Do in a folder what a checkpoint does: write, sync, lock, rename, remove."""
    from dovetail.checkpoint.files import DISK, reserve, write_file

    place = _there(folder)
    try:
        # A name that the next save sweeps, should this process be killed here.
        with reserve(DISK, place / "doctor") as scratch:
            DISK.make_directory(scratch / "new")
            write_file(DISK, scratch / "new" / "file", [b"dovetail"])
            DISK.sync_directory(scratch / "new")
            DISK.rename(scratch / "new", scratch / "checkpoint")
            DISK.sync_directory(scratch)
            found = f"{place} can be written, synced and renamed in"
            try:
                os.close(DISK.lock(scratch / "checkpoint"))
            except OSError as error:
                text = f"{found}, but not locked ({error.strerror}): two runs there may disturb each other"
                return Check("files", "folder", "note", text, "dovetail doctor --folder DIR  # one on a local disk")
    except OSError as error:
        remedy = f"chmod u+rwx '{place}'  # or another: dovetail doctor --folder DIR"
        return Check("files", "folder", "problem", f"no checkpoint can be written to {place}: {error.strerror}", remedy)
    return Check("files", "folder", "ok", found)


def check_disk(name: str, folder: Path, *, little: int = _LITTLE_DISK, too_little: int = _TOO_LITTLE_DISK) -> Check:
    """Compare the free space where a folder is, or will be, with what a run needs.

    Args:
        name: What the check is called.
        folder: The folder.
        little: Bytes below which there is a note.
        too_little: Bytes below which there is a problem.
    """
    place = _there(folder)
    free = shutil.disk_usage(place).free
    text = f"{bytes_text(free)} free in {place}"
    if free >= little:
        return Check("files", name, "ok", text)
    status: Status = "problem" if free < too_little else "note"
    return Check("files", name, status, f"{text}: little for checkpoints", f"du -sh '{place}'/* | sort -h")


def check_descriptors() -> Check:
    """Look at how many files a process may open: workers, sockets and shared tensors take some each."""
    import resource

    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Check("files", "open files", "ok", "as many as a process wants")
    text = f"at most {limit:,} in a process"
    if limit >= _FEW_DESCRIPTORS:
        return Check("files", "open files", "ok", text)
    goal = 4096 if most == resource.RLIM_INFINITY else min(4096, most)
    return Check("files", "open files", "note", f"{text}: few for loaders with many workers", f"ulimit -n {goal}")


def check_shared_memory(place: Path = Path("/dev/shm")) -> list[Check]:  # noqa: S108 - only looked at
    """Look at how much memory the workers of loaders can share, where a system has a limit for that."""
    if not place.exists():
        return []
    size = shutil.disk_usage(place).total
    text = f"{bytes_text(size)} in {place}"
    if size >= _LITTLE_SHARED_MEMORY:
        return [Check("files", "shared memory", "ok", text)]
    text = f"{text}: little for the batches of loaders with workers"
    return [Check("files", "shared memory", "note", text, "docker run --shm-size=2g …  # if this is a container")]


def _there(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    # Not `Path.exists`, which raises where this user may not even look.
    return next(place for place in (folder, *folder.parents) if os.path.exists(place))


# ------------------------------------------------------------------ experiments


def check_store(home: Path | None = None, url: str | None = None) -> Check:
    """Open the store of experiments and see whether it can be written; no table or file is made.

    Args:
        home: The folder of experiments; None is that of `DOVETAIL_HOME`, or else `.dovetail`.
        url: A database server; None is that of `DOVETAIL_STORE`, or else the file in `home`.
    """
    from dovetail.search.store import STORE, home_directory

    address = url or os.environ.get(STORE)
    if address is None:
        return _check_file(home_directory(home) / "store.db")
    scheme, _, rest = address.partition("://")
    if scheme.partition("+")[0] == "sqlite" and rest.startswith("/"):
        return _check_file(Path(rest[1:].partition("?")[0]).absolute())
    return _check_server(address)


def _check_file(path: Path) -> Check:
    try:
        if path.exists():
            return Check("experiments", "store", "ok", f"{path}: {_look_into(path)}")
        with tempfile.TemporaryDirectory(prefix=".dovetail-doctor-", dir=_there(path.parent)) as scratch:
            _try_database(Path(scratch) / "store.db")
    except (OSError, sqlite3.Error) as error:
        remedy = "dovetail doctor --home DIR  # one that can be written"
        return Check("experiments", "store", "problem", f"{path} cannot be used: {error}", remedy)
    return Check("experiments", "store", "ok", f"none yet; {path} can be made")


def _look_into(path: Path) -> str:
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_CONNECT_SECONDS)) as database:
        database.isolation_level = None
        count = database.execute("SELECT count(*) FROM studies").fetchone()[0]
        # Takes the lock of the one who writes, and writes nothing.
        database.execute("BEGIN IMMEDIATE")
        database.execute("ROLLBACK")
    return f"{count} experiment{'s' * (count != 1)}, can be written"


def _try_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise sqlite3.OperationalError(f"SQLite has no write-ahead log there, but {mode!r}")
        database.execute("CREATE TABLE try (value)")
        database.commit()


def _check_server(url: str) -> Check:
    from dovetail.search.secrets import masked_url

    shown = masked_url(url)
    scheme, separator, rest = url.partition("://")
    if not separator:
        return Check("experiments", "store", "problem", "--store is no URL such as postgresql://user@host/name")
    try:
        if scheme in ("postgres", "postgresql"):
            require("psycopg", "postgres")
            scheme = "postgresql+psycopg"
        alchemy = require("sqlalchemy", "search")
    except MissingExtraError as error:
        missing, _, remedy = str(error).partition(": ")
        return Check("experiments", "store", "problem", f"{shown}: {missing}", remedy)
    timeout = {"connect_timeout": _CONNECT_SECONDS} if scheme.startswith(("postgresql", "mysql")) else {}
    try:
        engine = alchemy.create_engine(f"{scheme}://{rest}", connect_args=timeout, poolclass=alchemy.pool.NullPool)
    except Exception:
        # Not the message, which may quote a part of the password.
        found = f"{shown}: no address that SQLAlchemy knows; in a password, @ / : ? are %40 %2F %3A %3F"
        return Check("experiments", "store", "problem", found)
    try:
        with engine.connect() as connection:
            connection.execute(alchemy.text("SELECT 1"))
    # Whatever a driver raises: not all of it is an error of SQLAlchemy.
    except Exception as error:
        problem = _without_secrets(_shortened(str(getattr(error, "orig", None) or error)), url)
        return Check("experiments", "store", "problem", f"{shown} cannot be opened: {problem}")
    return Check("experiments", "store", "ok", f"{shown} answers")


def _without_secrets(text: str, url: str) -> str:
    """Take out of a message what a URL says of passwords, and parts of it."""
    from dovetail.search.secrets import HIDDEN

    account, _, place = url.partition("://")[2].rpartition("@")
    secrets = [account.partition(":")[2], *re.findall(r"=([^&]+)", place)]
    parts = [part for secret in secrets for part in (secret, unquote(secret), *re.split(r"[@/:?#&=]", secret))]
    for part in sorted({*parts} - {""}, key=len, reverse=True):
        text = text.replace(part, HIDDEN)
    return text
