"""Databases of studies: an SQLite file, or a server."""

from __future__ import annotations

import fcntl
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.extras import require
from dovetail.search.records import ExperimentError
from dovetail.search.secrets import masked_url, without_secrets

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from sqlalchemy import Engine

_FILE = "store.db"


def file_url(home: Path) -> str:
    """Return the URL of the database file in a folder of experiments."""
    return f"sqlite:///{home / _FILE}"


def open_file(home: Path) -> RDBStorage:
    """Open the database file in a folder of experiments; create it if it does not exist."""
    from optuna.storages import RDBStorage

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(home / _FILE, timeout=60, check_same_thread=False)
        # Readers do not wait for the writer, and a commit does not wait for the disk: a killed process loses nothing;
        # a power failure may lose the last moment.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    # Otherwise two processes that create the tables at once would both fail.
    with open(home / "store.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return RDBStorage(file_url(home), engine_kwargs={"creator": connect})


def open_server(url: str) -> RDBStorage:
    """Open the studies on a server; create their tables if they do not exist.

    Raises:
        MissingExtraError: The driver of the server is not installed.
        ExperimentError: The address is invalid, or the server does not respond.
    """
    from optuna.storages import RDBStorage
    from sqlalchemy import exc, text

    engine = server_engine(url)
    try:
        with engine.connect() as connection:
            # Otherwise two processes that create the tables at once would both fail. The connection holds the lock.
            if engine.name == "postgresql":
                connection.execute(text("SELECT pg_advisory_lock(7265746)"))
            address = engine.url.render_as_string(hide_password=False)
            # A runner may wait for hours between two events, after which the server has closed idle connections.
            return RDBStorage(address, engine_kwargs={"pool_pre_ping": True})
    except exc.SQLAlchemyError as error:
        problem = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        raise ExperimentError(
            f"the store at {_place(url)} cannot be opened: {without_secrets(problem, url)}"
        ) from error
    finally:
        engine.dispose()


def server_engine(url: str, **options: Any) -> Engine:
    """Return an SQLAlchemy engine for a server, with options of `create_engine`; it has not connected yet.

    Raises:
        MissingExtraError: The driver of the server is not installed.
        ExperimentError: The address is invalid.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ExperimentError("the store: expected a URL such as postgresql://user@host/name")
    if scheme in ("postgres", "postgresql"):
        require("psycopg", "postgres")
        scheme = "postgresql+psycopg"
    alchemy = require("sqlalchemy", "search")
    try:
        engine: Engine = alchemy.create_engine(f"{scheme}://{rest}", **options)
    except (ImportError, alchemy.exc.NoSuchModuleError) as error:
        raise ExperimentError(f"the store at {_place(url)} cannot be opened: {error}") from error
    except Exception:
        # Do not show the original error, which may contain a part of the password.
        raise ExperimentError(
            f"the store at {_place(url)}: expected a URL such as postgresql://user@host:5432/name, in whose password "
            "@ / : ? are written %40 %2F %3A %3F"
        ) from None
    return engine


def _place(url: str) -> str:
    return masked_url(url).partition("://")[2].rpartition("@")[2]
