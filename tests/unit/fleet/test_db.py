"""The database: its schema on disk, what it says where it is away, and that no password is ever told."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from hpc_grpo.errors import ConfigError
from hpc_grpo.fleet.db import Database, DatabaseAwayError, gpus, jobs, vms
from hpc_grpo.fleet.settings import DATABASE_VARIABLE, SETTINGS, Fleet, open_fleet, template


def test_the_id_of_a_deleted_vm_is_never_anothers_and_its_gpus_go(db: Database) -> None:
    with db.write() as connection:
        for address in ("a", "b"):
            connection.execute(sa.insert(vms).values(ip_address=address))
        connection.execute(sa.insert(gpus).values(vm_id=2, gpu_index=7, uuid="GPU-x"))
        connection.execute(sa.delete(vms).where(vms.c.vm_id == 2))
        assert connection.scalars(sa.select(gpus.c.vm_id)).all() == []
        connection.execute(sa.insert(vms).values(ip_address="c"))
    db.create_tables()  # a second time changes nothing
    with db.read() as connection:
        assert connection.scalars(sa.select(vms.c.vm_id).order_by(vms.c.vm_id)).all() == [1, 3]


def test_a_row_of_somebodys_own_insert_has_a_default_for_whatever_it_left_out(db: Database) -> None:
    with db.write() as connection:
        connection.execute(
            sa.text("INSERT INTO jobs (job_id, model, dataset, reward_function) VALUES ('job123', 'm', 'd', 'r')")
        )
        connection.execute(sa.text("INSERT INTO vms (ip_address, user, ssh_key_path) VALUES ('10.0.0.1', 'me', '/k')"))
    with db.read() as connection:
        assert connection.scalar(sa.select(jobs.c.status)) == "queued"
        assert connection.scalar(sa.select(vms.c.state)) == "new"


@pytest.mark.parametrize("statement", ["DROP TABLE jobs", "ALTER TABLE jobs DROP COLUMN step"])
def test_a_database_without_tables_or_columns_is_told_apart_from_one_that_is_away(db: Database, statement: str) -> None:
    with db.write() as connection:
        connection.execute(sa.text(statement))
    with pytest.raises(ConfigError, match="fleet init"), db.read() as connection:
        connection.execute(sa.select(jobs))
    with pytest.raises(ConfigError, match="fleet init"), db.write() as connection:
        connection.execute(sa.insert(jobs).values(job_id="a", step=1))


def test_tables_of_an_older_version_are_not_taken_for_this_ones(db: Database) -> None:
    with db.write() as connection:
        connection.execute(sa.text("ALTER TABLE gpus DROP COLUMN claimed_mib"))
    with pytest.raises(ConfigError, match=r"table gpus has no claimed_mib\. .* Drop the tables"):
        db.create_tables()


def test_a_failed_transaction_leaves_nothing(db: Database) -> None:
    with pytest.raises(ZeroDivisionError), db.write() as connection:
        connection.execute(sa.insert(jobs).values(job_id="a", model="m"))
        raise ZeroDivisionError
    with db.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(jobs)) == 0


def test_a_database_that_is_away_says_so_without_its_password() -> None:
    database = Database("postgresql://user:hunter2secret@127.0.0.1:9/fleet")
    with pytest.raises(DatabaseAwayError) as caught, database.read():
        pass
    assert "does not answer" in str(caught.value)
    assert "hunter2secret" not in f"{caught.value}{caught.value.__cause__}"


def test_transactions_that_wait_too_long_for_a_connection_wait_for_the_database(db: Database) -> None:
    pool = db._engine.pool
    assert isinstance(pool, sa.QueuePool)
    pool._timeout, pool._max_overflow = 0.01, 0
    held = [pool.connect() for _ in range(pool.size())]
    with pytest.raises(DatabaseAwayError, match="wait"), db.read():
        pass
    for connection in held:
        connection.close()


@pytest.mark.parametrize("url", ["mysql://u:hunter2secret@h/d", "hunter2secret"])
def test_a_url_of_no_known_database_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Database(url)
    assert "sqlite:///" in str(caught.value)
    assert "hunter2secret" not in str(caught.value)


def fleet_with(folder: Path, text: str, **environ: str) -> Fleet:
    (folder / SETTINGS).write_text(text)
    return open_fleet(folder, environ)


def test_the_template_of_settings_is_the_defaults(tmp_path: Path) -> None:
    every_key = "\n".join(
        line.removeprefix("# ") if ": " in line and line[2].islower() else line for line in template().splitlines()
    )
    assert fleet_with(tmp_path, every_key).settings == fleet_with(tmp_path, template()).settings


def test_a_url_with_a_password_comes_from_the_environment_alone(tmp_path: Path) -> None:
    url = "postgresql://u:hunter2secret@h/d"
    with pytest.raises(ConfigError, match=DATABASE_VARIABLE) as caught:
        fleet_with(tmp_path, f"database: {url}")
    assert "hunter2secret" not in str(caught.value)
    assert fleet_with(tmp_path, "", **{DATABASE_VARIABLE: url}).database_url == url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lease_s: 15", "lease_s"),
        ("pol_s: 3", "pol_s"),
        ("poll_s: 0", "poll_s"),
        ("- 1", "mapping"),
        ("env: {HF_TOKEN: x}", "HF_TOKEN"),
    ],
)
def test_settings_that_are_wrong_are_refused_with_their_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fleet_with(tmp_path, text)
