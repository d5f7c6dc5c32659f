"""`hpc-grpo submit` and `train` as a user calls them: options, a run that is held, what a dry run prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from hpc_grpo.cli.request import load_request
from hpc_grpo.config import load_config
from hpc_grpo.config.load import CONFIGS_DIR
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.errors import EXIT_CONFIG, JobInDoubtError, LaunchError
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.launch.place.job_queue import JobRequest
from hpc_grpo.launch.place.slurm import partition
from hpc_grpo.launch.place.slurm.sbatch import render
from hpc_grpo.run.lock import RunLock
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import duration
from tests.support.command import call
from tests.support.places import FakeJob, FakeQueue
from tests.support.run_builder import RunBuilder
from tests.support.slurm_programs import SlurmPrograms

SHELL_CONFIGS = sorted(set((CONFIGS_DIR / "isambard").glob("*.sh")) - set(CONFIGS_DIR.rglob("setup_*.sh")))


@pytest.mark.parametrize("command", ["train", "submit"])
def test_a_run_below_home_that_is_held_stays_as_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = freeze(load_config("local/debug", [f"run.root={tmp_path}/runs"]), [], [])
    before = run.config.read_text()
    hold = RunLock.take(run, "17", 1)
    result = call(command, "local/debug", "run.root=~/runs", "launch.slurm.time_min=7")
    hold.release()
    assert "is being trained by attempt 1" in result.stderr
    assert run.config.read_text() == before


def submit(*words: str) -> Result:
    """Submit a run that names nothing on this machine but what `words` say."""
    return call("submit", "local/debug", "data.train.path=org/rows", "eval.every=null", *words)


@pytest.mark.parametrize(
    ("words", "followers"), [((), 2), (("--until-complete",), 2), (("--chain", "1"), 1), (("--one-job",), 0)]
)
def test_follow_on_jobs_wait_unless_the_user_wants_one_job(
    queue: FakeQueue, words: tuple[str, ...], followers: int
) -> None:
    result = submit(*words)
    assert result.exit_code == 0, result.stderr
    assert len(queue.requests) == 1 + followers
    named = ["none", "101; a", "101, 102; a"][followers]
    assert f"  follow-on jobs:   {named}" in result.output
    assert ("--until-complete is the default now" in result.stderr) == (words == ("--until-complete",))


@pytest.mark.parametrize("refused", [1, 2], ids=["the first job", "a follow-on job"])
def test_a_job_that_the_queue_refuses_leaves_no_run(queue: FakeQueue, tmp_path: Path, refused: int) -> None:
    queue.refused = refused
    words = (f"run.root={tmp_path}/runs", "launch.slurm.jobs_can_submit=false", "--chain", "1")
    assert "too many jobs" in submit(*words).stderr
    assert list((tmp_path / "runs").iterdir()) == []
    queue.refused = 0
    assert submit(*words).exit_code == 0
    queue.refused = len(queue.requests) + refused
    before = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("config.yaml")}
    assert "too many jobs" in submit(*words).stderr
    assert {path: path.read_bytes() for path in (tmp_path / "runs").rglob("config.yaml")} == before != {}


@pytest.mark.parametrize("case", ["in doubt", "Ctrl+C", "not cancelled", "trained meanwhile"])
def test_a_run_stays_where_a_job_may_be_queued_or_an_attempt_has_begun(
    case: str, queue: FakeQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_job = queue.submit

    def refuse(request: JobRequest) -> str:
        match case:
            case "in doubt":
                raise JobInDoubtError("sbatch gave no answer")
            case "Ctrl+C":
                raise KeyboardInterrupt
            case "not cancelled" if not queue.requests:
                return submit_job(request)
            case "not cancelled":
                queue.is_silent = True
            case "trained meanwhile":
                RunBuilder.of(request.run).hold(1)
        raise LaunchError("too many jobs")

    monkeypatch.setattr(queue, "submit", refuse)
    result = submit(f"run.root={tmp_path}/runs", "launch.slurm.jobs_can_submit=false", "--chain", "1")
    assert result.exit_code
    assert (tmp_path / "runs" / "debug" / "config.yaml").exists()
    assert ("\nCancelling jobs 100 failed, so they may stay in the queue: " in result.stderr) == (
        case == "not cancelled"
    )


def test_where_jobs_cannot_submit_the_number_of_jobs_must_be_given(queue: FakeQueue) -> None:
    result = submit("launch.slurm.jobs_can_submit=false")
    assert result.exit_code == EXIT_CONFIG
    assert "launch.slurm.max_job_chains=N, or submit --chain N" in result.stderr
    assert submit("launch.slurm.jobs_can_submit=false", "--one-job").exit_code == 0


def test_variables_of_sbatch_count_where_neither_config_nor_options_say_anything(
    queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ACCOUNT", "PARTITION", "QOS"):
        monkeypatch.setenv(f"SBATCH_{name}", f"of-{name.lower()}")
    assert submit("--partition", "mine").exit_code == 0
    slurm = queue.requests[0].launch.slurm
    assert (slurm.account, slurm.partition, slurm.extra) == ("of-account", "mine", {"qos": "of-qos"})


def test_modules_that_a_shell_lacks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_grpo.cli.train.run_attempt", lambda *_args, **_kwargs: 0)
    monkeypatch.setattr("hpc_grpo.cli.train.refuse_unknown_models", lambda *_args: None)  # the hub has no org/m
    monkeypatch.setenv("LOADEDMODULES", "brics/userenv:brics/nccl/2.21")
    there = ["model.path=org/m", "data.train.path=org/rows", "eval.every=null"]
    words = ["local/debug", f"run.root={tmp_path}", "launch.modules=[brics/nccl, cudatoolkit]", *there]
    result = call("train", *words)
    assert "This shell has not loaded all launch.modules: cudatoolkit. Run `module load cudatoolkit`" in result.stderr
    assert "has not loaded" not in call("train", *words, "--link").stderr


@pytest.mark.parametrize("path", SHELL_CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_shell_configs_of_a_site_are_submitted(path: Path, queue: FakeQueue) -> None:
    result = call("submit", str(path))
    assert result.exit_code == 0, result.stderr
    assert [request.after for request in queue.requests[1:]] in ([], [("100",), ("100", "101")])


@pytest.mark.parametrize(
    ("time", "minutes"),
    [("30", 30), ("90:30", 91), ("24:00:00", 1440), ("1-0", 1440), ("1-12:30", 2190), ("1-00:00:01", 1441)],
)
def test_time_is_given_as_to_slurm(time: str, minutes: int) -> None:
    shown = call("submit", "local/debug", "--time", time, "--dry-run").output
    assert f"#SBATCH --time={minutes}\n" in shown and f"# Each job may run for {duration(60 * minutes)}. " in shown


@pytest.mark.parametrize("time", ["0", "0:00", "UNLIMITED", "1h", "1-", "1:2:3:4", "-5", "1.5", ""])
def test_a_time_that_slurm_does_not_know_is_one_error(time: str) -> None:
    result = call("submit", "local/debug", "--time", time, "--dry-run")
    assert (result.exit_code, result.stdout) == (EXIT_CONFIG, "")
    assert f"--time = {time!r} must be" in result.stderr
    assert "24:00:00" in result.stderr


@pytest.fixture
def model(tmp_path: Path) -> str:
    write_model(tmp_path / "model", ModelSize(hidden_size=64, num_heads=2), seed=0)
    return f"model.path={tmp_path}/model"


def dry_run(*words: str) -> tuple[str, str]:
    """Return the script that sbatch would get, and what is printed below it. The exit code is that of submit."""
    result = submit("--dry-run", *words)
    assert result.exit_code == (EXIT_CONFIG if "submit would refuse this" in result.stdout else 0), result.stderr
    request = load_request("local/debug", [word for word in words if "=" in word])
    run = RunDir(request.config.run_path)
    script = render(JobRequest(run, request.config.launch, attempt_command(run)))
    assert result.stdout.startswith(script)
    below = result.stdout.removeprefix(script)
    assert all(line == "" or line.startswith("#") for line in below.splitlines())
    assert "#SBATCH" not in below
    return script, below


def test_a_dry_run_ends_with_the_plan(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, below = dry_run(model)
    plan = call("plan", "local/debug", model, "data.train.path=org/rows", "eval.every=null").stdout
    assert "\nIt fits nodes with " in plan
    assert plan in below.replace("\n# ", "\n").replace("\n#\n", "\n\n")
    assert "assuming 96 GiB on each GPU and 460 GiB" in below
    assert "refuse" not in below


def test_a_plan_that_does_not_fit_is_shown_and_no_error(model: str) -> None:
    _, below = dry_run(model, "launch.object_store_gib=900")
    assert "# It does not fit:\n" in below


def test_a_dry_run_without_the_model_says_why_there_is_no_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    _, below = dry_run("model.path=org/not-here")
    follow_on, _, below = below.partition("\n#\n")
    assert follow_on == (
        "\n# Each job may run for 1 h 00 min. "
        "Follow-on jobs until the run is complete: as many as the run needs (--one-job: none)."
    )
    assert below.startswith("# No plan: model.path = org/not-here is not on this machine")
    assert below.splitlines()[1:] == [
        "#",
        "# Not in the cache: model.path = org/not-here, data.train.path = org/rows. Without a network on the nodes, "
        "run hpc-grpo cluster prefetch CONFIG.",
    ]


def test_gpus_that_a_run_on_cpus_would_leave_idle_are_told() -> None:
    result = submit("--dry-run", "--one-job", "model.device=cpu", "launch.slurm.gpus_per_node=4")
    assert "launch.slurm.gpus_per_node = 4, but model.device = cpu uses no GPU" in result.stderr
    assert " Follow-on jobs until the run is complete: none.\n" in result.stdout


def test_a_dry_run_says_what_submit_would_refuse() -> None:
    _, below = dry_run("model.path=./not-here")
    assert "# submit would refuse this. The run would not find" in below
    assert "#   model.path = ./not-here: there is no " in below
    assert submit("--dry-run", "model.path=./not-here").stderr == submit("model.path=./not-here").stderr


def test_a_dry_run_says_all_that_submit_would_refuse(programs: SlurmPrograms) -> None:
    shown = "PartitionName=workq Default=YES MaxNodes=2 MaxTime=UNLIMITED State=UP TotalNodes=9\n"
    programs.answer("scontrol", shown)
    _, below = dry_run("model.path=./not-here", "launch.num_nodes=3", "model.device=cuda")
    refused = [line for line in below.splitlines() if line.startswith("# submit would refuse this. ")]
    assert [line.split("this. ")[1][:12] for line in refused] == ["The run woul", "model.device", "launch.num_n"]
    assert "launch.num_nodes (--nodes) = 3" in refused[2]


def test_a_dry_run_refuses_the_name_of_another_run(queue: FakeQueue) -> None:
    assert submit().exit_code == 0
    tried = submit("run.seed=9", "--dry-run")
    assert tried.exit_code == EXIT_CONFIG
    assert "# submit would refuse this. The run name 'debug' is taken by another config" in tried.stdout
    assert tried.stderr == submit("run.seed=9").stderr
    assert submit("--dry-run").exit_code == 0


def test_a_dry_run_says_that_the_run_is_being_trained(queue: FakeQueue) -> None:
    assert submit().exit_code == 0
    hold = RunLock.take(RunDir(load_request("local/debug", []).config.run_path), "17", 1)
    tried, refused = submit("--dry-run"), submit()
    hold.release()
    assert (
        " is being trained by attempt 1 (job 17, "
        in tried.stdout.partition("# submit would refuse this. The run in ")[2]
    )
    assert (tried.stderr, tried.exit_code) == (refused.stderr, refused.exit_code) != ("", 0)


@pytest.mark.parametrize("words", [(), ("--seeds", "1")])
def test_submit_and_its_dry_run_ask_the_queue_whether_the_job_is_over(
    queue: FakeQueue, tmp_path: Path, words: tuple[str, ...]
) -> None:
    words = (f"run.root={tmp_path}/runs", *words)
    assert submit(*words).exit_code == 0
    (config,) = (tmp_path / "runs").rglob("config.yaml")
    job = "100_0" if "--seeds" in words else "100"
    run = RunBuilder.of(RunDir(config.parent))
    run.hold(1, beat_age_s=25.0)
    held = json.loads(run.run.holder.read_text())
    run.run.holder.write_text(json.dumps({**held, "job_id": job}))
    queue.jobs[job] = FakeJob(job)
    for options in (("--dry-run",), ()):
        assert "is being trained by attempt 1" in submit(*words, *options).stderr
    queue.jobs[job].is_over = True
    for options in (("--dry-run",), ()):
        assert submit(*words, *options).exit_code == 0


def test_a_dry_run_says_that_the_run_is_complete(queue: FakeQueue) -> None:
    assert submit().exit_code == 0
    run = RunDir(load_request("local/debug", []).config.run_path)
    run.complete_marker.write_text("complete\n")
    assert f"# submit would queue no job. The run in {run.path} is already complete" in submit("--dry-run").stdout
    assert "is already complete" not in submit("--dry-run", "train.total_steps=99").stdout
    assert run.is_complete()


@pytest.mark.parametrize("scontrol", [None, "echo no controller >&2; exit 1", "exec sleep 30"])
def test_a_dry_run_needs_no_slurm_that_answers(
    scontrol: str | None, model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    if scontrol is not None:
        (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{scontrol}\n")
        (tmp_path / "bin" / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(partition, "_DEADLINE_S", 0.5)
    _, below = dry_run(model, "launch.num_nodes=9")
    assert "refuse" not in below
    assert "# Plan, assuming" in below
