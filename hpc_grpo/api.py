"""Python for notebooks and scripts: read runs, submit them, train here, compare. A thin layer over the commands' code.

`import hpc_grpo` offers all of it, and loads this module at the first use of one of its names.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_grpo.cli.options import find_run, open_run
from hpc_grpo.cli.request import load_request
from hpc_grpo.cli.submit import queue_run
from hpc_grpo.cli.train import refuse_wrong_inputs, run_until_over
from hpc_grpo.config import Config
from hpc_grpo.errors import EXIT_COMPLETE, EXIT_CONFIG, EXIT_RESUMABLE, ConfigError, LaunchError
from hpc_grpo.launch.chain.submit import cancel_run
from hpc_grpo.launch.place import job_queue
from hpc_grpo.report.compare import Comparison, compare_runs
from hpc_grpo.report.explain import explained
from hpc_grpo.report.queue import ask_about
from hpc_grpo.report.status import RunSummary, is_over, read_records, summarize
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.readable import for_json

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Comparison", "Job", "Run", "compare", "submit", "train"]

_LOOK_S = 5.0
_ENDED_BADLY = {"failed", "cancelled"}


class Run:
    """A run, by its directory or its name in $HPC_GRPO_RUNS_ROOT or ./runs. Each call reads the run's files again.

    Raises ConfigError if there is no such run. Tables are pandas DataFrames, which need pandas.

    Example:
        >>> import hpc_grpo
        >>> run = hpc_grpo.Run("runs/my-run")     # doctest: +SKIP
        >>> run.metrics()["reward/mean"].plot(ylabel="reward/mean")   # doctest: +SKIP
    """

    def __init__(self, path: str | Path) -> None:
        self._dir = find_run(str(path))

    @property
    def path(self) -> Path:
        return self._dir.path

    @property
    def config(self) -> Config:
        """The resolved config of the run."""
        return read_config(self._dir)

    @property
    def status(self) -> RunSummary:
        """The run's status: `state`, `step`, `total_steps`, `reward`, `eta_s`, `problem` and more."""
        return summarize(read_records(self._dir), time.time())

    def metrics(self) -> DataFrame:
        """Return a row per step, a column per metric. Steps that a resumed run repeated appear once."""
        return _by_step(read_metrics(self._dir.metrics))

    def evals(self) -> DataFrame:
        """Return a row per step with an eval: pass@1, pass@1_low, pass@1_high, … of each eval set and source."""
        of_evals = {
            step: {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}
            for step, line in read_metrics(self._dir.metrics).items()
        }
        return _by_step({step: line for step, line in of_evals.items() if line})

    def rollouts(self, step: int | None = None, *, evals: bool = False, eval_set: str = "") -> DataFrame:
        """Return a row per completion of a step. Default: the newest step with completions.

        With `evals`, returns the completions of the eval after the step: of `data.eval`, or of the set `eval_set`.
        Raises ConfigError for a step without completions on disk.
        """

        def file_of(number: int) -> Path:
            return self._dir.eval_rollouts(number, eval_set) if evals else self._dir.rollouts(number)

        # Only steps with metrics: the file of a lost step remains until the resumed run repeats the step.
        steps = [number for number in read_metrics(self._dir.metrics) if file_of(number).is_file()]
        if not steps or step not in (None, *steps):
            there = ", ".join(map(str, steps)) if len(steps) <= 10 else f"{steps[0]} to {steps[-1]}"
            raise ConfigError(f"step = {step}: run {self.path.name} has completions of these steps: {there or 'none'}.")
        chosen = steps[-1] if step is None else step
        # pandas refuses half of a surrogate pair
        lines = for_json([*read_jsonl(file_of(chosen))], lambda text: text.encode("utf-8", "replace").decode())
        return _pandas().DataFrame([{"step": chosen, **line} for line in lines])

    def explain(self) -> str:
        """Explain how each attempt ended and what to do, like `hpc-grpo status --why`."""
        return "\n".join(explained(self._dir))

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


@dataclass(frozen=True)
class Job:
    """A Slurm job that `submit` queued, with its follow-on jobs: one run. `id` is "" if the run was complete."""

    id: str
    run: Run

    @property
    def state(self) -> str:
        """The run's state, one of `report.status.RunStatus`, such as submitted, training, waiting or complete."""
        return self.run.status.state

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait until the run is complete, or stopped at a checkpoint, and return it.

        Reads the run directory every 5 s, and asks Slurm at most once a minute. Raises LaunchError if the run failed,
        was cancelled, or waits for a job that will not start, and TimeoutError after `timeout_s`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            records = read_records(self.run._dir)
            summary = queued = summarize(records, time.time())
            if is_over(records, time.time()) and summary.state not in _ENDED_BADLY:
                return self.run
            if summary.state in _ENDED_BADLY:
                raise LaunchError(f"{self.run.path.name} is {summary.state}. {summary.problem}\n{self.run.explain()}")
            with suppress(LaunchError):  # a scheduler that does not answer is asked again later
                (queued,) = ask_about([records]).corrected([summary])
            if queued.problem != summary.problem:
                raise LaunchError(f"{self.run.path.name} is {queued.state}. {queued.problem}")
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self.run.path.name} is {summary.state} after {timeout_s:.0f} s.")
            time.sleep(_LOOK_S)

    def cancel(self) -> None:
        """End the run and all its jobs now; steps after the last checkpoint are lost."""
        run = open_run(str(self.run.path))
        if not run.is_complete():
            list(cancel_run(run, job_queue()))


def submit(config: str | Path, *, nodes: int | None = None, overrides: Mapping[str, Any] | None = None) -> Job:
    """Submit a run as a Slurm job, like `hpc-grpo submit CONFIG --nodes N KEY=VALUE`, and return at once.

    The same call resumes an interrupted run. Raises ConfigError for errors that would make the job fail.

    Example:
        >>> job = hpc_grpo.submit("my_run.yaml", nodes=2, overrides={"train.lr": 2e-6})   # doctest: +SKIP
        >>> job.wait().evals()                                                            # doctest: +SKIP
    """
    asked = {**({} if nodes is None else {"launch.num_nodes": nodes}), **(overrides or {})}
    queue = job_queue()
    request = load_request(str(config), _as_words(asked)).for_queue(queue)
    run, job_id = queue_run(request, queue)
    return Job(job_id, Run(run.path))


def train(
    config: str | Path,
    *,
    rewards: Sequence[Callable[..., Any] | str] = (),
    environment: type | str | None = None,
    on_step: Callable[..., Any] | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Run:
    """Train here, like `hpc-grpo train`, and return the run once it is complete or stopped at a checkpoint.

    `rewards` replace the rewards of the config: functions of a file, or names of built-ins. `environment` is a class of
    a file, and `on_step` a function that is called after each step (`train.on_step`). The processes of the run import
    that file, so a script needs `if __name__ == "__main__":` around this call. Raises ConfigError if the user must
    change something, and LaunchError if training failed.

    Example:
        >>> hpc_grpo.train("my_run.yaml", rewards=[my_reward], overrides={"train.lr": 2e-6})   # doctest: +SKIP
    """
    if any(frame.frame.f_globals.get("__name__", "").startswith("hpc_grpo_file_") for frame in inspect.stack(0)):
        raise ConfigError(
            "hpc_grpo.train was called while a process of a run imported this file for its functions. "
            'Put the call below `if __name__ == "__main__":`.'
        )
    asked = dict(overrides or {})
    if rewards:
        asked["rewards"] = [{"name": _name_of(each)} for each in rewards]
    if environment is not None:
        asked["environment.name"] = _name_of(environment)
    if on_step is not None:
        asked["train.on_step.name"] = _name_of(on_step)
    words = _as_words(asked)
    request = load_request(str(config), words)
    refuse_wrong_inputs(request)  # here too: a notebook shows an exception, not what a child prints
    run = RunDir(request.config.run_path)
    number = run.next_attempt_number()
    code = run_until_over([sys.executable, "-m", "hpc_grpo.cli", "train", str(config), *words])
    if code in (EXIT_COMPLETE, EXIT_RESUMABLE):
        return Run(run.path)
    kind = ConfigError if code == EXIT_CONFIG else LaunchError
    why = "\n".join(explained(run)) if run.next_attempt_number() > number else "The reason is printed above."
    raise kind(f"Training ended with exit code {code}.\n{why}")


def compare(runs: Sequence[str | Path | Run]) -> Comparison:
    """Compare each run with the first: config, last numbers, and newest evals prompt by prompt with 95% intervals.

    Example:
        >>> print(hpc_grpo.compare(["runs/a", "runs/b"]))   # doctest: +SKIP
    """
    return compare_runs([(run if isinstance(run, Run) else Run(run))._dir for run in runs])


def _by_step(lines: Mapping[int, Mapping[str, Any]]) -> DataFrame:
    frame: DataFrame = _pandas().DataFrame.from_dict(dict(lines), orient="index")
    return frame.drop(columns="step", errors="ignore").rename_axis("step")


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            "Tables of a run need pandas, which this Python lacks. The light installation does not install it: "
            "pip install pandas"
        ) from error
    return pandas


def _as_words(overrides: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]


def _name_of(function: Callable[..., Any] | str) -> str:
    """Return the name by which a run's processes import a function or class: path/to/file.py:name.

    Raises ConfigError if it is not at the top level of a file.
    """
    if isinstance(function, str):
        return function
    name, module = getattr(function, "__qualname__", ""), sys.modules.get(getattr(function, "__module__", ""))
    file = getattr(module, "__file__", None)
    if file is None or not name.isidentifier() or getattr(module, name, None) is not function:
        raise ConfigError(
            f"{function!r} must be a function or class at the top of a .py file: the processes of the run import it "
            f"there. Not a lambda, not a method, not a cell of a notebook (`%%writefile my_rewards.py` makes a file)."
        )
    return f"{os.path.relpath(file)}:{name}"
