"""`hpc-grpo submit --sweep` as a user calls it: its runs, its array, what it refuses, and the table of results."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from hpc_grpo.cli.options import runs_below
from hpc_grpo.config import load_config, load_resolved
from hpc_grpo.errors import EXIT_CONFIG, LaunchError
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.launch.place.job_queue import JobRequest
from hpc_grpo.plan import disk as plan_disk
from hpc_grpo.plan.disk import disk_budget
from hpc_grpo.plan.fit import plan_of
from hpc_grpo.plan.memory import GH200
from hpc_grpo.report.dashboard import Dashboard
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.compiled import archive_of
from hpc_grpo.run.frozen_config import flat
from hpc_grpo.run.lock import RunLock
from hpc_grpo.run.paths import CELLS, RunDir, tokenized_data
from hpc_grpo.system.disk import Room
from tests.support.command import call
from tests.support.model_folders import make_model
from tests.support.places import FakeQueue
from tests.support.run_builder import RunBuilder
from tests.support.slurm_programs import SlurmPrograms
from tests.unit.cli.test_submit_inputs import QWEN_7B

GRID = ["--sweep", "train.lr=1e-6,2e-6", "--seeds", "3"]
NAMES = [f"lr-{lr}_seed-{seed}" for lr in ("1e-06", "2e-06") for seed in (0, 1, 2)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "debug"


def submit(root: Path, *words: str) -> Result:
    inputs = ["data.train.path=org/rows", "eval.every=null", f"run.root={root.parent}"]
    return call("submit", "local/debug", *inputs, *words)


def test_each_combination_is_a_run_with_its_values_and_two_jobs_behind_its_task(queue: FakeQueue, root: Path) -> None:
    result = submit(root, *GRID, "--at-once", "2")
    assert result.exit_code == 0, result.stderr
    assert f"Submitted array 100 for 6 runs in {root}" in result.output
    assert f"TASK  train.lr  run.seed  RUN\n0     1e-06     0         {root}/{NAMES[0]}\n" in result.output
    array, *followers = queue.requests
    assert (array.tasks, array.at_once, array.is_held) == (tuple(range(6)), 2, True)
    assert [request.after for request in followers[:4]] == [("100_0",), ("100_0", "101"), ("100_1",), ("100_1", "103")]
    assert queue.asked[-1] == "release 100"
    runs = [RunDir(root / name) for name in NAMES]
    seen = [load_resolved(run.config) for run in runs]
    assert [(own.train.lr, own.run.seed) for own in seen] == [(lr, seed) for lr in (1e-6, 2e-6) for seed in range(3)]
    assert [link.job_id for link in read_chain(runs[1]).links] == ["100_1", "103", "104"]
    assert [(root / CELLS / str(task)).readlink() for task in array.tasks] == [run.path for run in runs]
    assert all(run.slurm_logs.is_dir() for run in runs)


def test_the_script_trains_the_run_behind_the_link_of_its_task(queue: FakeQueue, tmp_path: Path) -> None:
    """Also in a folder whose name the shell must not take apart."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    root = tmp_path / "my runs" / "debug"
    result = submit(root, *GRID, f"launch.python={python}", "--at-once", "4", "--dry-run")
    assert result.exit_code == 0, result.stderr
    script = result.output
    assert "#SBATCH --array=0,1,2,3,4,5%4\n" in script
    assert f"#SBATCH --output='{root}/.cells/%a/slurm/%A_%a_0_log.out'\n" in script
    assert "#SBATCH --job-name=debug\n" in script
    assert [line for line in script.splitlines() if line.startswith("# 4 ")] == [
        f"# 4     2e-06     1         {root}/{NAMES[4]}"
    ]
    assert not root.exists()
    (root / CELLS / "4" / "slurm").mkdir(parents=True)
    environ = {"SLURM_JOB_ID": "104", "SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "4", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    cell = f"{root}/.cells/4"
    assert done.stdout.splitlines() == ["-E", "-u", f"{cell}/source", "attempt", cell]
    assert (root / CELLS / "4" / "slurm" / "100_4.began").is_file()


def test_the_same_command_submits_the_runs_that_are_not_complete(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    for name in NAMES[:4]:
        (root / name / "COMPLETE").touch()
    tried = submit(root, *GRID, "--one-job", "--dry-run").output
    assert "#SBATCH --array=4,5\n" in tried
    assert [line.split()[1] for line in tried.splitlines() if str(root / "lr") in line] == ["complete"] * 4 + ["4", "5"]
    assert f"for 2 runs in {root}" in submit(root, *GRID, "--one-job").output
    assert queue.requests[-1].tasks == (4, 5)
    for name in NAMES[4:]:
        (root / name / "COMPLETE").touch()
    for further in ([], ["--dry-run"]):
        assert "All 6 runs" in submit(root, *GRID, *further).output


def test_a_dry_run_names_what_each_run_lacks_in_the_cache_once(queue: FakeQueue, root: Path) -> None:
    below = submit(root, "--sweep", "model.path=org/a,org/b", "--seeds", "2", "--dry-run").output
    lacks = "model.path = org/a, data.train.path = org/rows, model.path = org/b"
    assert f"# Not in the cache: {lacks}. Without a network" in below


def test_a_dry_run_says_which_run_it_plans(queue: FakeQueue, root: Path) -> None:
    (root.parents[1] / "qwen").mkdir(parents=True)
    (root.parents[1] / "qwen" / "config.json").write_text(json.dumps(QWEN_7B))
    assert "# Plan of the first of 6 runs, assuming " in submit(root, "model.path=./qwen", *GRID, "--dry-run").output


def test_more_steps_take_complete_runs_up_again(queue: FakeQueue, root: Path) -> None:
    submit(root, "--seeds", "2")
    for seed in (0, 1):
        (root / f"seed-{seed}" / "COMPLETE").touch()
    assert "for 2 runs" in submit(root, "--seeds", "2", "train.total_episodes=1000").output


def test_the_disk_must_hold_all_runs_at_once(queue: FakeQueue, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(root.parents[1] / "qwen", QWEN_7B)
    words = ["model.path=./qwen", "--sweep", "train.lr=1e-6,2e-6", "--seeds", "2"]
    one = disk_budget(plan_of(load_config("local/debug", ["model.path=./qwen"]), {}, GH200), Room(0, "")).sure_bytes
    monkeypatch.setattr(plan_disk, "room_in", lambda _: Room(4 * one - 1, "left of the user quota"))
    result = submit(root, *words)
    assert (result.exit_code, "the 4 runs keep checkpoints" in result.stderr) == (EXIT_CONFIG, True), result.stderr
    assert "submit would refuse this. run.root" in submit(root, *words, "--dry-run").output
    monkeypatch.setattr(plan_disk, "room_in", lambda _: Room(4 * one, "left of the user quota"))
    assert submit(root, *words).exit_code == 0


def test_slurm_is_asked_once_about_the_partition_of_all_runs(
    queue: FakeQueue, programs: SlurmPrograms, root: Path
) -> None:
    assert submit(root, *GRID).exit_code == 0
    assert [call for call in programs.calls if "show partition" in call] == ["scontrol --all show partition --oneliner"]


def test_the_runs_of_a_sweep_share_data_and_kernels_with_the_runs_beside_it(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    submit(root, "run.name=alone")
    alone, swept = (load_resolved(root.parent / name / "config.yaml") for name in ("alone", f"debug/{NAMES[0]}"))
    assert tokenized_data(swept) == tokenized_data(alone) == root.parent / ".data"
    assert archive_of(swept) == archive_of(alone)


def test_more_seeds_later_are_further_tasks(queue: FakeQueue, root: Path) -> None:
    submit(root, "--seeds", "2")
    assert submit(root, "--sweep", "run.seed=5,1", "--one-job").exit_code == 0
    assert queue.requests[-1].tasks == (2, 1)


def test_a_sweep_with_a_run_that_is_held_queues_nothing(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID, "--one-job")
    hold = RunLock.take(RunDir(root / NAMES[2]), "17", 1)
    result = submit(root, *GRID)
    hold.release()
    assert "is being trained by attempt 1" in result.stderr
    assert len(queue.requests) == 1


@pytest.mark.parametrize(
    ("sweep", "names", "values"),
    [
        ("checkpoint.every=5 steps,10 steps", ["every-5-steps", "every-10-steps"], ["5 steps", "10 steps"]),
        ("data.prompt_format='a, b','{prompt}'", ["prompt_format-a-b", "prompt_format-prompt"], ["a, b", "{prompt}"]),
        ("model.path=org/a,org/b", ["path-org-a", "path-org-b"], ["org/a", "org/b"]),
        ("data.shuffle=true,false", ["shuffle-True", "shuffle-False"], [True, False]),
    ],
)
def test_values_may_be_texts(queue: FakeQueue, root: Path, sweep: str, names: list[str], values: list[Any]) -> None:
    result = submit(root, "--sweep", sweep)
    assert result.exit_code == 0, result.stderr
    found = [flat(load_resolved(root / name / "config.yaml").model_dump(mode="json")) for name in names]
    assert [run[sweep.partition("=")[0]] for run in found] == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", "train.lrr=1,2"], "did you mean 'lr'?"),
        (["--sweep", "train.lr="], "must be a key and its values, none of them empty"),
        (["--sweep", "train.lr=1e-6,,2e-6"], "must be a key and its values, none of them empty"),
        (["--sweep", "train.lr"], "must be a key and its values"),
        (["--sweep", "train.lr=1e-6,1.0e-6"], "two runs have the name lr-1e-06"),
        (["--sweep", "train.lr=1e-6,-1"], "train.lr"),
        (["--sweep", "launch.num_nodes=1,2"], "launch.num_nodes is the same in all runs"),
        (["--sweep", "run.name=a,b"], "run.name is the same in all runs"),
        (["--sweep", "run.seed=1,2", "--seeds", "2"], "run.seed are given twice"),
        (["--sweep", "train.lr=[1"], "is not valid YAML"),
        (["--sweep", "train.lr=1e-6,2e-6", "train.lr=3e-6"], "train.lr are given twice"),
        (["--sweep", "data.prompt_format={prompt} A,{prompt} B"], "Quote values with commas, braces or brackets"),
        (["--sweep", "train.lr=[1e-6,2e-6]"], "train.lr = [1e-06, 2e-06]: must be a number"),
        (["--at-once", "2"], "--at-once needs --sweep or --seeds"),
        (["--seeds", "0"], "0 is not in the range"),
    ],
)
def test_a_bad_sweep_is_one_error(queue: FakeQueue, root: Path, words: list[str], message: str) -> None:
    for further in ([], ["--dry-run"]):
        result = submit(root, *words, *further)
        assert (result.exit_code, message in result.stderr) == (EXIT_CONFIG, True), result.stderr
        assert (queue.requests, root.exists()) == ([], False)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LaunchError("too many jobs")])
def test_a_sweep_that_breaks_off_leaves_no_job_held(
    queue: FakeQueue, root: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """At the second run. At Ctrl+C it is not known what the queue has taken, so the runs stay."""
    submit_job = queue.submit

    def limited(request: JobRequest) -> str:
        if len(queue.requests) == 4:
            raise error
        return submit_job(request)

    monkeypatch.setattr(queue, "submit", limited)
    assert submit(root, *GRID, "launch.slurm.jobs_can_submit=false", "--chain", "2").exit_code
    assert queue.asked[-1] == "cancel 100 101 102 103"
    assert root.exists() == isinstance(error, KeyboardInterrupt)


def test_runs_that_the_queue_refuses_leave_those_of_before(queue: FakeQueue, root: Path) -> None:
    assert submit(root, "--seeds", "1").exit_code == 0
    queue.refused = len(queue.requests) + 1
    assert "too many jobs" in submit(root, "--seeds", "2").stderr
    assert [run.path.name for run in runs_below(root)] == ["seed-0"]


def test_runs_of_a_cell_may_have_been_resumed_with_other_requests(queue: FakeQueue, root: Path) -> None:
    assert submit(root, *GRID).exit_code == 0
    assert call("submit", str(root / NAMES[0]), "--time", "2:00:00").exit_code == 0
    assert len(json.loads(call("compare", str(root), "--json").output)["cells"]) == 2


def test_a_name_that_no_folder_can_have_is_no_sweep(queue: FakeQueue) -> None:
    for command in ("status", "compare"):
        assert call(command, "x" * 300).exit_code == EXIT_CONFIG


def test_a_run_is_no_folder_for_a_sweep(queue: FakeQueue, root: Path) -> None:
    freeze(load_config("local/debug", [f"run.root={root.parent}"]), [], [])
    result = submit(root, *GRID)
    assert (result.exit_code, "a sweep needs a folder for its runs" in result.stderr) == (EXIT_CONFIG, True)


def test_a_sweep_that_others_may_write_is_refused(queue: FakeQueue, root: Path) -> None:
    """They could let its tasks start other code."""
    submit(root, *GRID)
    root.chmod(0o775)
    result = submit(root, *GRID)
    assert (result.exit_code, f"{root} may be written by others" in result.stderr) == (EXIT_CONFIG, True)


def test_the_folder_of_a_sweep_becomes_no_run(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    for further in ([], ["--dry-run"]):
        result = submit(root, *further)
        assert (result.exit_code, f"{root} is the folder of a sweep" in result.stderr) == (EXIT_CONFIG, True)


def test_commands_about_all_runs_show_those_of_sweeps(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    submit(root, "run.name=alone")
    names = ["alone", *(f"debug/{name}" for name in NAMES)]
    below = ["--root", str(root.parent)]
    assert [one["run"] for one in json.loads(call("status", *below, "--json").output)] == names
    assert [row.split()[0] for row in call("status", *below).output.splitlines()[1:]] == names
    assert [Path(one["run"]) for one in json.loads(call("disk", "du", *below, "--json").output)] == [
        root.parent / name for name in names
    ]
    dashboard = Dashboard(lambda: runs_below(root.parent), 0)
    dashboard.server_close()
    assert [one["name"] for one in dashboard.answer("/api/runs", {})] == names
    assert dashboard.answer("/api/run", {"run": names[1]})["name"] == names[1]


def test_the_name_of_a_sweep_stands_for_its_runs(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    for name in (str(root), "debug"):
        rows = call("status", name, HPC_GRPO_RUNS_ROOT=str(root.parent)).output.splitlines()[1:]
        assert [row.split()[0] for row in rows] == [f"debug/{name}" for name in NAMES]
    assert len(json.loads(call("disk", "du", str(root), "--json").output)) == 6


def test_a_sweep_under_way_shows_what_each_run_does(queue: FakeQueue, root: Path) -> None:
    """A complete run, one that failed, one that trains and three that wait: only the failed one is submitted alone."""
    submit(root, *GRID)
    (root / NAMES[0] / "COMPLETE").touch()
    failed, training = (RunBuilder.of(RunDir(root / name)) for name in NAMES[1:3])
    failed.attempt(1, "crash", job_id="100_1", why="The driver crashed.")
    failed.chain("100_1", ended="No new checkpoint in 3 attempts")
    training.attempt(1, job_id="100_2")
    training.hold(1)
    training.state(1)
    (root / NAMES[2] / "metrics.jsonl").write_text('{"step": 1, "attempt": 1, "reward/mean": 0.5}\n')
    rows = call("status", str(root)).output.splitlines()[1:]
    assert [row.split()[1] for row in rows] == ["complete", "failed", "training", *["submitted"] * 3]
    assert [line.split() for line in call("compare", str(root)).output.splitlines()[1:3]] == [
        ["train.lr=1e-06", "1/3", "0-1", "0.500"],
        ["train.lr=2e-06", "0/3", "0", "-"],
    ]
    assert f"{root / NAMES[2]}" in submit(root, *GRID).stderr
    assert call("submit", str(root / NAMES[1])).exit_code == 0
    assert queue.requests[-3].run.path == root / NAMES[1]


def test_a_run_without_node_hours_is_named(queue: FakeQueue, root: Path) -> None:
    hours = "launch.slurm.max_node_hours=4"
    submit(root, *GRID, hours)
    RunBuilder.of(RunDir(root / NAMES[1])).attempt(1, "resumable", age_s=4 * 3600.0, ended_at=time.time())
    result = submit(root, *GRID, hours)
    assert result.exit_code == EXIT_CONFIG
    assert f"debug/{NAMES[1]}: The jobs of this run have taken" in result.stderr
    assert submit(root, *GRID, "launch.slurm.max_node_hours=8.5").exit_code == 0
    assert [request.launch.slurm.time_min for request in queue.requests if request.tasks] == [60, 30]


def test_a_command_for_one_run_names_the_runs_of_a_sweep(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    for words in (["logs"], ["submit"]):
        said = call(*words, str(root)).stderr
        assert f"{root} is a sweep of 6 runs. Name one: {root / NAMES[0]}" in said, said


def test_stop_ends_all_runs_of_a_sweep(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    (root / NAMES[0] / "COMPLETE").touch()
    hold = RunLock.take(RunDir(root / NAMES[1]), "100_1", 1)
    printed = call("stop", str(root)).output.splitlines()
    hold.release()
    assert printed == [
        f"The run in {root / NAMES[0]} is complete.",
        f"debug/{NAMES[1]} stops after its step and a checkpoint.",
        *(f"debug/{name}: No job trains it now. A waiting job will end as soon as it starts." for name in NAMES[2:]),
        "To resume: the command that submitted the sweep",
    ]
    assert [(root / name / "STOP").exists() for name in NAMES] == [False, *[True] * 5]
    assert queue.cancelled == []
    assert call("stop", str(root), "--now").exit_code == 0
    assert queue.cancelled == [
        f"{job}" for task in range(1, 6) for job in (102 + 2 * task, 101 + 2 * task, f"100_{task}")
    ]


def test_a_folder_of_other_runs_stands_for_none(queue: FakeQueue, root: Path) -> None:
    submit(root, "run.name=alone")
    for words in (["stop"], ["disk", "clean"], ["status"]):
        assert call(*words, str(root.parent)).exit_code == EXIT_CONFIG
    assert not RunDir(root.parent / "alone").stop_marker.exists()


def test_a_sweep_that_was_stopped_is_submitted_again_by_the_same_command(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    call("stop", str(root), "--now")
    result = submit(root, *GRID)
    assert result.exit_code == 0, result.stderr
    array = [request for request in queue.requests if request.tasks][-1]
    assert array.tasks == tuple(range(6))
    assert not any((root / name / "STOP").exists() for name in NAMES)


def test_compare_shows_each_cell_over_its_seeds(queue: FakeQueue, root: Path) -> None:
    submit(root, *GRID)
    for number, name in enumerate(NAMES[:5]):
        lines = [{"step": s, "attempt": 1, "reward/mean": number + s, "eval/pass@1": number / 10} for s in (1, 2)]
        (root / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / NAMES[0] / "COMPLETE").touch()
    printed = call("compare", str(root)).output.splitlines()
    assert [line.split() for line in printed[:3]] == [
        ["CELL", "COMPLETE", "STEP", "reward/mean", "eval/pass@1"],
        # s = 1, t = 4.303, N = 3
        ["train.lr=1e-06", "1/3", "2", "3.000", "[0.516,", "5.484]", "0.100", "[-0.148,", "0.348]"],
        # of two runs: s = 0.707, t = 12.706
        ["train.lr=2e-06", "0/3", "0-2", "5.500", "[-0.853,", "11.853]", "0.350", "[-0.285,", "0.985]"],
    ]
    first, _ = json.loads(call("compare", str(root), "--json").output)["cells"]
    assert (first["values"], first["runs"]) == ({"train.lr": 1e-6}, [f"debug/{name}" for name in NAMES[:3]])
