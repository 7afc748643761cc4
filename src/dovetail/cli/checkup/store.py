"""Check of the store of experiments: whether it can be opened and written."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from dovetail.cli.checkup.check import Check, shortened
from dovetail.cli.checkup.files import nearest
from dovetail.errors import MissingExtraError
from dovetail.units import counted

_CONNECT_SECONDS = 5


def check_store(home: Path | None = None, url: str | None = None) -> Check:
    """Check whether the store of experiments can be opened and written; no table or file is created.

    Args:
        home: The folder of experiments; None means `DOVETAIL_HOME`, or else `.dovetail`.
        url: A database server; None means `DOVETAIL_STORE`, or else the file in `home`.
    """
    try:
        from dovetail.search.store import STORE, home_directory
    except ImportError as error:
        # A package that every run needs is missing; another check reports it.
        return Check("experiments", "store", "problem", f"cannot be checked: {error}")
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
        with tempfile.TemporaryDirectory(prefix=".dovetail-doctor-", dir=nearest(path.parent)) as scratch:
            _try_database(Path(scratch) / "store.db")
    except (OSError, sqlite3.Error) as error:
        remedy = "dovetail doctor --home DIR  # a writable folder"
        return Check("experiments", "store", "problem", f"{path} cannot be used: {error}", remedy)
    return Check("experiments", "store", "ok", f"none yet; {path} can be created")


def _look_into(path: Path) -> str:
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True, timeout=_CONNECT_SECONDS)) as database:
        # Python would start a transaction itself before the statement below.
        database.isolation_level = None
        count = database.execute("SELECT count(*) FROM studies").fetchone()[0]
        # This takes the write lock without writing.
        database.execute("BEGIN IMMEDIATE")
        database.execute("ROLLBACK")
    return f"{counted(count, 'experiment')}, can be written"


def _try_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        # Network file systems often have none, and experiments need it for readers beside the runner.
        if mode != "wal":
            raise sqlite3.OperationalError(f"SQLite has no write-ahead log there, only {mode!r}")
        database.execute("CREATE TABLE try (value)")
        database.commit()


def _check_server(url: str) -> Check:
    from dovetail.search.databases import server_engine
    from dovetail.search.records import ExperimentError
    from dovetail.search.secrets import masked_url, without_secrets

    shown = masked_url(url)
    timeout = {"connect_timeout": _CONNECT_SECONDS} if url.startswith(("postgres", "mysql")) else {}
    try:
        engine = server_engine(url, connect_args=timeout)
    except MissingExtraError as error:
        missing, _, remedy = str(error).partition(": ")
        return Check("experiments", "store", "problem", f"{shown}: {missing}", remedy)
    except ExperimentError as error:
        return Check("experiments", "store", "problem", str(error))
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("SELECT 1")
    # Drivers also raise errors that do not derive from SQLAlchemy's.
    except Exception as error:
        problem = without_secrets(shortened(str(getattr(error, "orig", None) or error)), url)
        return Check("experiments", "store", "problem", f"{shown} cannot be opened: {problem}")
    finally:
        engine.dispose()
    return Check("experiments", "store", "ok", f"{shown} responds")
