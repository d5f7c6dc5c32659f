"""A fleet's folder and its `fleet.yaml`: the database's URL, and all time limits."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import Field, ValidationInfo, field_validator

from hpc_grpo.config.checked import checked
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.owner import Holding, refuse_shared
from hpc_grpo.section import Section
from hpc_grpo.system.secret import secret_keys

FOLDER_VARIABLE = "HPC_GRPO_FLEET"
DATABASE_VARIABLE = "HPC_GRPO_FLEET_DATABASE"
NATS_VARIABLE = "HPC_GRPO_FLEET_NATS"
SETTINGS = "fleet.yaml"
_LOST_MARGIN_S = 30.0
_JOBS = Holding("run code on every VM: the jobs of a fleet are in its folder", "Choose another folder with --fleet.")


class FleetSettings(Section):
    """The keys of fleet.yaml. Times are in seconds. All controllers of a fleet must have the same settings."""

    database: str = Field(
        default="",
        description="SQLAlchemy URL of the database, without a password. Default: fleet.db in the fleet's folder. "
        f"Put a URL with a password into the variable {DATABASE_VARIABLE}.",
    )
    nats: str = Field(
        default="",
        description="NATS server that announces jobs, such as nats://localhost:4222. Default: none; see sweep_s.",
    )
    poll_s: float = Field(default=10.0, gt=0, description="Seconds between two visits of a VM.")
    sweep_s: float = Field(
        default=5.0, gt=0, description="Seconds between two searches for jobs that NATS did not announce."
    )
    visit_s: float = Field(default=20.0, gt=0, description="Deadline of a visit, in seconds.")
    start_s: float = Field(
        default=60.0,
        ge=25,
        description="Seconds for a claimed job to reach its VM. A job that does not is queued again.",
    )
    stale_s: float = Field(default=60.0, gt=0, description="Seconds without a visit after which a VM gets no new jobs.")
    lease_s: float = Field(default=300.0, gt=0, description="Seconds without a visit after which a VM ends its jobs.")
    end_s: float = Field(default=120.0, gt=0, description="Seconds that an ended job has to write its checkpoint.")
    max_retries: int = Field(
        default=3, ge=0, description="Retries of a failed job that was submitted without --retries."
    )
    retry_s: float = Field(
        default=30.0, ge=0, description="Seconds before the first retry. Each further retry waits twice as long."
    )
    max_retry_s: float = Field(default=3600.0, ge=0, description="Longest wait before a retry, in seconds.")
    no_retry: tuple[re.Pattern[str], ...] = Field(
        default=(), description="Regular expressions. A job whose failure_reason contains a match is not retried."
    )
    free_memory_mib: int = Field(
        default=512, ge=0, description="MiB. A GPU with more memory in use belongs to somebody else."
    )
    program: tuple[str, ...] = Field(
        default=(), description="Command and arguments that replace `hpc-grpo` on a VM, before `train CONFIG …`."
    )
    env: dict[str, str] = Field(
        default={}, description="Environment variables of every job. Set secrets on the VMs, not here."
    )

    @property
    def lost_s(self) -> float:
        """Return the seconds without a visit after which a VM's jobs have certainly ended: other VMs may run them."""
        return self.lease_s + self.end_s + _LOST_MARGIN_S

    @field_validator("lease_s", "stale_s")
    @classmethod
    def _polls_are_in_time(cls, value: float, info: ValidationInfo) -> float:
        if "poll_s" in info.data and value < 2 * info.data["poll_s"]:
            raise ValueError(f"must be at least twice poll_s = {info.data['poll_s']}")
        return value


@dataclass(frozen=True)
class Fleet:
    """A fleet's folder with its settings. The URLs include passwords, so they are never printed."""

    folder: Path
    settings: FleetSettings
    database_url: str
    nats_url: str

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def known_hosts(self) -> Path:
        """The pinned host keys of VMs whose rows have none, in OpenSSH's format."""
        return self.folder / "known_hosts"


def fleet_folder(folder: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the fleet's folder, by default $HPC_GRPO_FLEET or ./fleet."""
    return Path(os.path.expanduser(folder or environ.get(FOLDER_VARIABLE) or "fleet")).absolute()


def open_fleet(folder: Path | None, environ: Mapping[str, str] = os.environ) -> Fleet:
    """Read the settings of the fleet in a folder. Raises ConfigError."""
    folder = fleet_folder(folder, environ)
    path = folder / SETTINGS
    if not path.is_file():
        raise ConfigError(
            f"FLEET = {str(folder)!r} must be a fleet's folder (with a {SETTINGS}). Make one with `hpc-grpo place "
            f"fleet init`, or name another in --fleet or {FOLDER_VARIABLE}."
        )
    refuse_shared(folder, environ, _JOBS)
    settings = _read(path)
    url = environ.get(DATABASE_VARIABLE) or settings.database or f"sqlite:///{folder / 'fleet.db'}"
    return Fleet(folder, settings, url, environ.get(NATS_VARIABLE) or settings.nats)


def template() -> str:
    """Return a fleet.yaml with every key, its meaning, and its default as a comment."""
    lines = ["# A fleet of hpc-grpo. Keys that are left out have the value shown.\n"]
    for name, field in FleetSettings.model_fields.items():
        default = field.get_default(call_default_factory=True)
        shown = list(default) if isinstance(default, tuple) else default
        lines.append(f"# {field.description}\n# {name}: {'null' if shown == '' else shown}\n")
    return "\n".join(lines)


def _read(path: Path) -> FleetSettings:
    try:
        values = yaml.safe_load(path.read_text()) or {}
        given = {key: value for key, value in values.items() if value is not None}
    except (yaml.YAMLError, AttributeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be a YAML mapping: {error}") from error
    for key in secret_keys(given):  # check this first: later errors repeat values
        variable = {"database": DATABASE_VARIABLE, "nats": NATS_VARIABLE}.get(key)
        raise ConfigError(
            f"{path}: {key} must have no password. Put the whole URL into {variable}."
            if variable
            else f"{path}: {key} must hold no secret. Set it in the environment on the VMs."
        )
    return checked(FleetSettings, given, str(path))
