"""Sinks of the driver's metrics, one record per step: metrics.jsonl, W&B, TensorBoard and the console."""

from __future__ import annotations

import html
import inspect
import json
import math
import netrc
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from hpc_grpo.config import Config, MetricsConfig
from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.metrics.record import PASS_AT_1, REWARD, StepRecord, phase_seconds, played
from hpc_grpo.run.files import drop_torn_line, when_there_is_space, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import clock, printable, short_number
from hpc_grpo.system.secret import without_secrets

NAMES: Mapping[str, Mapping[str, str]] = {
    "areal": {
        REWARD: "ppo_actor/task_reward/avg",
        "policy/ratio_mean": "ppo_actor/update/importance_weight/avg",
        "policy/clip_fraction": "ppo_actor/update/clip_ratio/avg",
        "policy/entropy": "ppo_actor/update/entropy/avg",
        "loss/policy": "ppo_actor/update/actor_loss/avg",
        "grad_norm": "ppo_actor/update/grad_norm",
        "lr": "ppo_actor/update/lr",
        "correction/weight_mean": "ppo_actor/update/behave_imp_weight/avg",
        "tokens/prompt_mean": "ppo_actor/prompt_len/avg",
        "tokens/sequence_mean": "ppo_actor/seq_len/avg",
        "tokens/truncated_fraction": "ppo_actor/no_eos_ratios/avg",
    },
    "areal-0.3": {
        REWARD: "task_reward",
        "policy/ratio_mean": "importance_weight",
        "policy/clip_fraction": "actor_clip_ratio",
        "loss/policy": "actor_loss",
        "tokens/prompt_mean": "avg_prompt_len",
        "tokens/sequence_mean": "avg_seq_len",
        "tokens/truncated_fraction": "no_eos_ratio",
    },
}
"""Value of `metrics.names` -> name of a metric here -> its name in AReaL (inclusionAI/AReaL).

`areal` is areal/trainer/ppo/actor.py (stats_tracker's scopes `ppo_actor` and `update`). `areal-0.3` has the names of
realhf's master worker (docs of version 0.3, "Key Training Statistics").
"""

COLUMNS = ("step", "prompt", "answer", "completion", "reward")
"""Columns of the tables of completions."""

_WANDB_ID = re.compile("[0-9a-f]{8}")
_WANDB_INIT_TIMEOUT_S = 60.0

Mode = Literal["online", "offline"]


class MetricSink(Protocol):
    def write(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


def make_sinks(config: Config, run_dir: RunDir) -> list[MetricSink]:
    """Open the sinks of `config`. metrics.jsonl comes first: a failing sink must not lose a line of this file."""
    first, others = JsonlSink(run_dir.metrics), list[MetricSink]()
    if (mode := wandb_mode(config.metrics)) is not None:
        others.append(WandbSink(config, run_dir, mode))
    if config.metrics.tensorboard:
        others.append(TensorBoardSink(run_dir, config.metrics.completions))
    if (names := config.metrics.names) != "ours":
        others = [RenamingSink(others, NAMES[names])]
    return [first, *others, ConsoleSink()]


class RenamingSink:
    """Gives its sinks the metrics under another system's names, and prints the renamed metrics."""

    def __init__(self, sinks: Sequence[MetricSink], names: Mapping[str, str]) -> None:
        self._sinks, self._names = sinks, names

    def write(self, record: StepRecord) -> None:
        metrics = {self._names.get(name, name): value for name, value in record.metrics.items()}
        for sink in self._sinks:
            sink.write(replace(record, metrics=metrics))
        shown = [f"{self._names[name]} {value:.4g}" for name, value in record.metrics.items() if name in self._names]
        if shown:
            print(f"Step {record.step}: {' '.join(shown)}", flush=True)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class JsonlSink:
    """Appends `{"step", "attempt", "time", <metrics>}` to metrics.jsonl and flushes; always on.

    A step trained again after a resume gets a second line; readers use the last line. A value that is not finite is
    written as null: JSON knows no NaN.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(path)
        self._file = path.open("a")

    def write(self, record: StepRecord) -> None:
        values = {name: float(value) if math.isfinite(value) else None for name, value in record.metrics.items()}
        line = {"step": record.step, "attempt": record.attempt, "time": record.time_s, **values}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        when_there_is_space(self._file.flush, "metrics.jsonl")  # unwritten data stays in the buffer

    def close(self) -> None:
        when_there_is_space(self._file.flush, "metrics.jsonl")
        self._file.close()


class ConsoleSink:
    def write(self, record: StepRecord) -> None:
        print(plain_line(record), flush=True)

    def close(self) -> None:
        """Do nothing: each line is written at once."""


def plain_line(record: StepRecord) -> str:
    """Return one line for a log: the position in the run, the most important numbers, and the times of the phases."""
    position = f"Step {record.step}/{record.total_steps} epoch {record.epoch}/{record.total_epochs}"
    line = " ".join([position, *(f"{label} {value}" for label, value in _headline(record))])
    shares = " ".join(f"{name} {share:.0%}" for name, share in _time_shares(record.metrics).items())
    return f"{line} | {shares}" if shares else line


def _headline(record: StepRecord) -> list[tuple[str, str]]:
    """Return the main numbers of a step as (label, text), without missing numbers."""
    metrics = record.metrics
    # GRPO's policy loss is always near zero, so show the reward. SFT has only the loss.
    quality = ("reward", REWARD, "{:.3f}".format) if REWARD in metrics else ("loss", "loss/policy", "{:.4f}".format)
    rows = (
        quality,
        ("pass@1", PASS_AT_1, "{:.3f}".format),
        ("lag", "lag/mean", "{:g}".format),
        ("mismatch", "mismatch/logprob_abs_diff_mean", "{:.0e}".format),
        ("tokens/s", "throughput/tokens_per_s", short_number),
        ("eta", "time/eta_s", clock),
    )
    return [(label, form(metrics[name])) for label, name, form in rows if name in metrics]


def _time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each phase's share of `time/step_s`, largest first, without phases below half a percent."""
    step_s = metrics.get("time/step_s", 0.0)
    shares = {phase: seconds / step_s for phase, seconds in phase_seconds(metrics).items() if step_s > 0}
    return {name: share for name, share in sorted(shares.items(), key=lambda kv: -kv[1]) if share >= 0.005}


class TensorBoardSink:
    """Writes event files below the run directory, one for each attempt; TensorBoard merges them.

    A step has a table of at most `num_completions` completions.
    """

    def __init__(self, run_dir: RunDir, num_completions: int = 0) -> None:
        # Imported here, because torch and tensorboard are slow to load.
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir.tensorboard))
        self._num_completions = num_completions

    def write(self, record: StepRecord) -> None:
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time_s)
        if rows := completion_rows(record, self._num_completions):
            # TensorBoard shows Markdown. Inside an HTML table, Markdown has no effect.
            cells = [[html.escape(str(cell)).replace("\n", "<br>") for cell in row] for row in (COLUMNS, *rows)]
            text = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
            self._writer.add_text("completions", f"<table>{text}</table>", record.step, walltime=record.time_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def wandb_mode(metrics: MetricsConfig, environ: Mapping[str, str] = os.environ) -> Mode | None:
    """Return W&B's mode, or None for no W&B. Without a key or a login, print how to log to W&B."""
    configured, wished = metrics.wandb.get("mode"), environ.get("WANDB_MODE")
    if configured == "disabled" or wished == "disabled":
        return None
    if configured == "offline" or wished == "offline":
        return "offline"
    if environ.get("WANDB_API_KEY") or _is_logged_in(environ):
        return "online"
    print(
        "W&B is off: WANDB_API_KEY is not set, and `wandb login` was never called. metrics.wandb.mode = offline logs "
        "to the run directory.",
        flush=True,
    )
    return None


def _is_logged_in(environ: Mapping[str, str]) -> bool:
    """Return whether `wandb login` left a key in ~/.netrc for W&B's server, or for WANDB_BASE_URL."""
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc  # with its port, as W&B writes it
    path = environ.get("NETRC") or f"{environ.get('HOME', '')}/.netrc"
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(path).authenticators(host) is not None
    return False


class WandbSink:
    """Logs to one W&B run for all attempts. Each attempt resumes the W&B run whose id is in the run directory."""

    def __init__(
        self, config: Config, run_dir: RunDir, mode: Mode, start_run: Callable[..., Any] | None = None
    ) -> None:
        """Resume or start the W&B run with `start_run`, by default `wandb.init`.

        Raises ConfigError for a key of metrics.wandb that is no argument of `wandb.init`.
        """
        # Imported here: it takes a second, which only users of W&B should pay.
        import wandb

        # wandb.Error: a bad key, no network, a refused project. ConnectionError: its background service is dead.
        # Anything else is a bug of ours and propagates.
        self._failures: tuple[type[Exception], ...] = (wandb.Error, ConnectionError)
        self._run: Any = None
        self._table, self._num_completions = wandb.Table, config.metrics.completions
        sweep = run_dir.path.parent.name if run_dir.is_cell else None
        given: dict[str, Any] = {"project": "hpc-grpo", "group": sweep, **config.metrics.wandb, "mode": mode}
        taken = inspect.signature(wandb.init).parameters
        if unknown := [key for key in given if key not in taken]:
            raise ConfigError(f"metrics.wandb.{unknown[0]}: unknown key{nearest(unknown[0], taken)}")
        try:
            self._run = (start_run or wandb.init)(
                **given,
                name=run_dir.name,
                id=wandb_run_id(run_dir),
                resume="allow",
                dir=str(run_dir.path),
                config=shared_config(config),
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    init_timeout=_WANDB_INIT_TIMEOUT_S,
                    disable_git=True,  # it would upload the working tree's diff, and the remote's address
                    save_code=False,
                ),
            )
            # W&B's own step may only grow, and steps trained again after a resume would be dropped. Use our `step`.
            self._run.define_metric("*", step_metric="step")
        except self._failures as error:
            self._give_up(error)
            return
        where = self._run.url if mode == "online" else f"offline, below {run_dir.path / 'wandb'}"
        print(f"W&B run {self._run.id}: {where}", flush=True)

    def write(self, record: StepRecord) -> None:
        values: dict[str, Any] = {**record.metrics, "step": record.step, "epoch": record.epoch}
        values["attempt"] = record.attempt
        if rows := completion_rows(record, self._num_completions):
            values["completions"] = self._table(columns=list(COLUMNS), data=rows)
        self._try(lambda run: run.log(values))

    def close(self) -> None:
        self._try(lambda run: run.finish())

    def _try(self, call: Callable[[Any], Any]) -> None:
        if self._run is not None:
            try:
                call(self._run)
            except self._failures as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Print the error once, then stop. Training continues, and metrics.jsonl has everything."""
        self._run = None
        print(f"W&B failed and is off for the rest of this attempt (metrics.jsonl continues): {error}", flush=True)


def completion_rows(record: StepRecord, most: int) -> list[list[Any]]:
    """Return the first `most` rollouts of a step as rows of a table, under COLUMNS.

    Removes secrets, and characters that change how other text looks. An episode is shown as its turns.
    """

    def shown(value: Any) -> str:
        text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        return printable(without_secrets(text), None)

    return [
        [
            record.step,
            shown(line["prompt"]),
            shown(line["answer"]),
            shown(played(line["turns"]) if line.get("turns") else line["completion"]),
            float(line["reward"]),
        ]
        for line in record.rollouts[:most]
    ]


def shared_config(config: Config) -> dict[str, Any]:
    """Return the public part of a config. Of `launch`, which describes the site, only `num_nodes` is public."""
    shown = config.model_dump(mode="json", exclude={"launch"})
    return {**shown, "launch": {"num_nodes": config.launch.num_nodes}}


def wandb_run_id(run_dir: RunDir) -> str:
    """Return the id of the W&B run that every attempt continues.

    Makes a new id if the file with the id is missing or damaged.
    """
    kept = run_dir.wandb_id.read_text(errors="replace").strip() if run_dir.wandb_id.exists() else ""
    if not _WANDB_ID.fullmatch(kept):
        kept = secrets.token_hex(4)
        write_atomic(run_dir.wandb_id, f"{kept}\n")
    return kept
