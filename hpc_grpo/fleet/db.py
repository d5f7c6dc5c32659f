"""A fleet's database, SQLite or PostgreSQL: its tables, and transactions on them.

A command or any INSERT may add a row: missing columns have defaults. Times are unix seconds by the database's clock.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import make_url

from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.fleet.settings import DATABASE_VARIABLE, SETTINGS, Fleet, open_fleet
from hpc_grpo.run.owner import SHARED_VARIABLE

metadata = sa.MetaData()


def _integer(name: str, default: int) -> sa.Column[int]:
    return sa.Column(name, sa.Integer, nullable=False, server_default=sa.text(str(default)))


def _text(name: str, default: str = "") -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, server_default=default)


vms = sa.Table(
    "vms",
    metadata,
    sa.Column("vm_id", sa.Integer, primary_key=True),
    _text("name"),
    sa.Column("ip_address", sa.Text, nullable=False),
    _text("user"),
    _text("ssh_key_path"),
    _integer("port", 22),
    _text("host_key"),  # pinned: "ssh-ed25519 AAAA…"; empty: the fleet's known_hosts
    _text("transport", "ssh"),  # or local
    _text("python", "python3"),  # a Python with hpc_grpo
    _text("work_dir", "hpc-grpo-fleet"),  # below the user's home unless absolute
    _text("nvidia_smi", "nvidia-smi"),
    _integer("available_gpus", 0),
    _text("state", "new"),
    _text("error"),
    sa.Column("last_seen", sa.Double),
    sa.Column("poll_at", sa.Double, nullable=False, server_default=sa.text("0")),
    _integer("is_drained", 0),
    sqlite_autoincrement=True,  # A job's row names its VM by id, so the id of a deleted VM is never used again.
)

gpus = sa.Table(
    "gpus",
    metadata,
    sa.Column("vm_id", sa.Integer, sa.ForeignKey("vms.vm_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("gpu_index", sa.Integer, primary_key=True),
    _text("uuid"),
    _integer("memory_mib", 0),
    _integer("used_mib", 0),
    _integer("claimed_mib", 0),  # Memory of jobs that share the GPU. An exclusive job is in job_id.
    _integer("is_busy", 0),  # used by other processes, or by memory that belongs to no job
    sa.Column("job_id", sa.Text),
    sa.Column("attempt", sa.Integer),
    sa.Index("gpus_by_job", "job_id"),
)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    # What to run: a config of hpc-grpo, or arguments of train_grpo.py.
    _text("config_name"),
    _text("config"),
    _text("overrides", "[]"),
    _text("model"),
    _text("dataset"),
    _text("reward_function"),
    _integer("max_steps", 0),
    _text("output_dir"),
    _integer("use_unsloth", 0),
    _text("preprocessing"),
    # The resources of the job.
    _integer("num_gpus", 1),
    _integer("gpu_memory_mib", 0),  # on each GPU, shared with other jobs; 0: exclusive GPUs
    _integer("priority", 0),
    sa.Column("max_retries", sa.Integer),
    # The state of the job.
    _text("status", "queued"),
    _integer("retry_count", 0),
    _text("failure_reason"),
    _integer("attempt", 0),
    sa.Column("vm_id", sa.Integer),  # of the newest attempt
    sa.Column("step", sa.Integer),
    _integer("stalled", 0),
    _integer("is_cancelled", 0),
    sa.Column("exit_code", sa.Integer),
    sa.Column("submitted_at", sa.Double, nullable=False, server_default=sa.text("0")),
    sa.Column("changed_at", sa.Double, nullable=False, server_default=sa.text("0")),
    sa.Column("started_at", sa.Double),  # of the newest attempt, once its VM has started it
    sa.Column("retry_at", sa.Double),
    sa.Index("jobs_by_status", "status", "priority", "submitted_at"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job_id", sa.Text, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("vm_id", sa.Integer, nullable=False),
    _text("gpus"),  # JSON list of indices
    _integer("gpu_memory_mib", 0),
    sa.Column("claimed_at", sa.Double, nullable=False),
    sa.Column("started_at", sa.Double),
    sa.Column("ended_at", sa.Double),
    _text("outcome"),  # exit, not_started, lost; empty while it runs
    sa.Column("exit_code", sa.Integer),
    _text("reason"),
)

vm_name: sa.ColumnElement[str] = sa.func.coalesce(sa.func.nullif(vms.c.name, ""), vms.c.ip_address)
HAS_ROOM = sa.and_(vms.c.state == "ready", vms.c.is_drained == 0, gpus.c.job_id.is_(None), gpus.c.is_busy == 0)
IS_FREE = sa.and_(HAS_ROOM, gpus.c.claimed_mib == 0)
"""Conditions on GPUs joined with their VMs. HAS_ROOM: jobs may share the GPU. IS_FREE: a job may have it alone."""


_BUSY_S = 30
_CONNECT_S = 5
_UNDEFINED = ("42P01", "42703")
"""PostgreSQL's error codes for a missing table and a missing column."""

_LACKS = (
    "The fleet's database lacks tables or columns of this version. `hpc-grpo place fleet init` makes missing tables. "
    "Drop the tables of an older version first, or give the fleet a new database."
)
_NOT_IN_SQLITE = re.compile(r"no such (table|column)|table \w+ has no column")


class DatabaseAwayError(HpcGrpoError):
    """The database cannot be reached now: the loops wait for it."""


class Database:
    """Transactions on the fleet's tables. Threads may share it."""

    def __init__(self, url: str) -> None:
        """Open the database. Raises ConfigError for an unknown URL, and does not print it: it may hold a password."""
        try:
            parsed = make_url(url)
        except (sa.exc.ArgumentError, ValueError):
            raise ConfigError(f"{_OF_URL} It cannot be read as a URL.") from None
        kind = parsed.get_backend_name()
        if kind not in ("sqlite", "postgresql"):
            raise ConfigError(f"{_OF_URL} It begins with {kind}.")
        self.is_sqlite = kind == "sqlite"
        if self.is_sqlite:
            if parsed.database and parsed.database != ":memory:":
                _make_private(Path(parsed.database))
            self._engine = sa.create_engine(parsed, connect_args={"timeout": _BUSY_S})
            _prepare_sqlite(self._engine)
        else:
            parsed = parsed.set(drivername="postgresql+psycopg")
            # Notice dead peers: a connection to a machine that is gone would wait forever.
            options = {
                "connect_timeout": _CONNECT_S,
                "tcp_user_timeout": 10_000,
                "application_name": "hpc-grpo place fleet",
            }
            self._engine = sa.create_engine(parsed, pool_pre_ping=True, pool_size=10, connect_args=options)

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a transaction that changes nothing. Raises DatabaseAwayError, and ConfigError if tables are missing."""
        try:
            with self._engine.connect() as connection:
                yield connection
        except sa.exc.TimeoutError as error:  # all connections wait for an answer
            raise DatabaseAwayError("The database does not answer: transactions wait for it.") from error
        except sa.exc.DBAPIError as error:
            if getattr(error.orig, "sqlstate", "") in _UNDEFINED or _NOT_IN_SQLITE.match(str(error.orig)):
                raise ConfigError(_LACKS) from error
            if error.connection_invalidated or isinstance(error, sa.exc.OperationalError):
                first = next(iter(str(error.orig).strip().splitlines()), type(error.orig).__name__)
                raise DatabaseAwayError(f"The database does not answer: {first}") from error
            raise

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Open a transaction: committed at the end of the block, rolled back by an exception. Raises DatabaseAwayError.

        On SQLite the transaction is the only writer from its start, so what it has read stays valid.
        """
        with self.read() as connection, connection.execution_options(writes=True).begin():
            yield connection

    def now(self, connection: sa.Connection) -> float:
        """Return the time of the clock that all controllers share: the server's, or this machine's."""
        if self.is_sqlite:
            return time.time()
        return float(connection.scalar(sa.text("SELECT extract(epoch FROM clock_timestamp())")))

    def create_tables(self) -> None:
        """Create missing tables and keep existing rows. Raises ConfigError for tables that lack columns."""
        with self.write() as connection:
            if not self.is_sqlite:  # one controller at a time
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(4862718)"))
            metadata.create_all(connection)
            for table in metadata.tables.values():
                found = {column["name"] for column in sa.inspect(connection).get_columns(table.name)}
                if lacks := sorted({*table.columns.keys()} - found):
                    raise ConfigError(f"The table {table.name} has no {', '.join(lacks)}. {_LACKS}")

    def close(self) -> None:
        self._engine.dispose()


def _make_private(file: Path) -> None:
    """Create an SQLite file that only this user may read and write, or take other users' permissions from it.

    SQLite gives its other files the same mode. Raises ConfigError for another user's file.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        if os.environ.get(SHARED_VARIABLE) == "1":
            return
        if (owner := file.stat().st_uid) != os.geteuid():
            raise ConfigError(
                f"{file} belongs to user {owner}, not to you ({os.geteuid()}): that user could run code on every VM. "
                f"If you trust that user: export {SHARED_VARIABLE}=1"
            )
        file.chmod(0o600)
    except OSError as error:
        fix = f"mkdir -p {file.parent}" if isinstance(error, FileNotFoundError) else f"set `database` in {SETTINGS}"
        raise ConfigError(
            f"The fleet's database {file} cannot be opened: {error.strerror}. To fix this: {fix}"
        ) from error


_OF_URL = (
    f"The fleet's database ({DATABASE_VARIABLE}, or `database` of fleet.yaml) must be a URL such as "
    f"sqlite:////srv/fleet.db or postgresql://user@host/name."
)


def _prepare_sqlite(engine: sa.Engine) -> None:
    """Use a write-ahead log in SQLite, so that readers do not wait, and start transactions explicitly."""

    @sa.event.listens_for(engine, "connect")
    def _connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver would begin transactions at the first write
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def open_folder(folder: Path | None) -> tuple[Fleet, Database]:
    """Return the fleet in `folder`, by default $HPC_GRPO_FLEET or ./fleet, and its database. Raises ConfigError."""
    fleet = open_fleet(folder)
    return fleet, Database(fleet.database_url)
