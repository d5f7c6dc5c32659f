from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, JobInDoubtError, LaunchError
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.place.job_queue import JobRequest, job_python, setup_lines
from hpc_grpo.launch.place.slurm import jobs
from hpc_grpo.launch.place.slurm import sbatch as slurm
from hpc_grpo.launch.place.slurm.jobs import SlurmQueue
from hpc_grpo.run.chain import before_it_ran
from hpc_grpo.run.contract import WARNING_BEFORE_END_S
from hpc_grpo.run.paths import RunDir

GOLDEN = Path(__file__).parents[4] / "golden" / "job_script.sh"
BY_HAND = Path(__file__).parents[5] / "sbatch" / "grpo_rlzero.sbatch"
RUN = RunDir(Path("/scratch/my runs/demo"))


def launch(**slurm_values: object) -> LaunchConfig:
    return LaunchConfig.model_validate(
        {
            "modules": ["brics/nccl", "cudatoolkit"],
            "setup_lines": ["ulimit -l unlimited"],
            "num_nodes": 4,
            "slurm": {"partition": "workq", "account": "brics.x", "gpus_per_node": 4, **slurm_values},
        }
    )


def test_the_script_is_the_golden_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/env/bin/python")
    command = attempt_command(RUN)
    extra = {"exclusive": True, "mail_user": "a@b"}
    request = JobRequest(RUN, launch(extra=extra), command)
    assert slurm.render(request) == GOLDEN.read_text()


def test_both_ways_into_a_job_ask_for_the_same_warning() -> None:
    assert f"--signal=B:USR1@{WARNING_BEFORE_END_S}\n" in BY_HAND.read_text()


def test_a_warning_before_the_supervisor_runs_ends_no_job(tmp_path: Path) -> None:
    job = tmp_path / "python"
    job.write_text("#!/bin/sh\nkill -USR1 $$\nexit 5\n")
    job.chmod(0o755)
    run = RunDir(tmp_path / "run")
    run.slurm_logs.mkdir(parents=True)
    launch = LaunchConfig(setup_lines=["kill -USR1 $$"], python=str(job))
    script = slurm.render(JobRequest(run, launch, "true"))
    env = {"SLURM_JOB_ID": "42", "PATH": os.defpath}
    assert subprocess.run(["bash", "-c", script], env=env, check=False).returncode == 5


@pytest.mark.parametrize(
    "line",
    [
        "kill -USR1 $$",
        "[[ -f /no/such/file ]] && source /no/such/file",
        "false | true; echo $UNSET",
        "config=/etc/site.conf; setup=; home=/; set -- site",
    ],
)
def test_no_setup_line_that_a_submitted_job_survives_ends_a_job_by_hand(tmp_path: Path, line: str) -> None:
    (tmp_path / "hpc_grpo").mkdir()
    (tmp_path / "hpc_grpo" / "__init__.py").touch()
    for name, text in {
        "scontrol": "true",
        "hpc-grpo": f"""if [ "$1" = job-setup ]; then echo '{line}'; else kill -USR1 $$
[ "$*" = "train --link config.yaml run.name=two words" ] && exit 5; fi""",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_ID": "42", "HPC_GRPO_HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.defpath}"}
    words = ["bash", str(BY_HAND), "config.yaml", "run.name=two words"]
    assert subprocess.run(words, env=env, check=False).returncode == 5


def test_the_script_for_sbatch_knows_the_checkout_by_a_file_that_exists() -> None:
    (name,) = re.findall(r"-f \$submitted/(\S+)", BY_HAND.read_text())
    assert (BY_HAND.parents[1] / name).is_file()


def test_hosts_to_reach_by_ssh_are_refused_and_not_passed_over() -> None:
    with pytest.raises(ConfigError, match=r"launch\.hosts = n1 .*Slurm chooses the nodes"):
        slurm.render(JobRequest(RUN, LaunchConfig(hosts=["n1"]), attempt_command(RUN)))


@pytest.mark.parametrize("name", ["held-out-10%test", "a\\b"])
def test_a_run_whose_path_slurm_would_change_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"Slurm replaces .* Choose another run\.name"):
        slurm.render(JobRequest(RunDir(Path("/scratch") / name), launch(), "true"))


def last_line(launch: LaunchConfig) -> str:
    return slurm.render(JobRequest(RUN, launch, attempt_command(RUN))).splitlines()[-1]


def test_the_job_runs_the_python_that_the_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(job_python.__globals__, "find_spec", lambda _name: None)  # a light installation on a login node
    expected = "exec '/proj/my env/bin/python' -E -u '/scratch/my runs/demo/source' attempt '/scratch/my runs/demo'"
    assert last_line(LaunchConfig(python="/proj/my env/bin/python")) == expected


def test_an_installation_without_ray_submits_no_job_that_would_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fake_sbatch(tmp_path, monkeypatch, f"touch {tmp_path}/submitted; echo Submitted batch job 42\n")
    monkeypatch.setitem(job_python.__globals__, "find_spec", lambda name: None if name == "ray" else name)
    for hand_over in (slurm.render, SlurmQueue().submit):
        with pytest.raises(ConfigError, match=r"This Python has no Ray.*Set launch\.python"):
            hand_over(JobRequest(run, launch(), attempt_command(run)))
    assert not (tmp_path / "submitted").exists()


def test_the_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(GOLDEN)], check=True)


@pytest.mark.parametrize("key", ["nodes", "gpus-per-node", "gpus_per_node", "signal", "output", "array"])
def test_options_that_belong_elsewhere_are_refused_with_the_place(key: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.slurm\.extra must not hold"):
        slurm.parameters(JobRequest(RUN, launch(extra={key: "1"}), "true"))


def test_the_first_line_leaves_a_mark_though_the_lines_after_it_end_the_job(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "my run's")
    run.slurm_logs.mkdir(parents=True)
    request = JobRequest(run, LaunchConfig(setup_lines=["exit 1"]), "true")
    script = slurm.render(request)
    done = subprocess.run(["bash", "-c", script], env={"SLURM_JOB_ID": "42", "PATH": "/usr/bin:/bin"}, check=False)
    assert done.returncode == 1
    assert run.job_mark("42").read_text().strip()
    assert before_it_ran(run, "42").endswith(f"ended before hpc-grpo ran in it: {run.slurm_log('42')} says why.")
    assert before_it_ran(run, "43") == "It ended before it had begun."


def test_a_job_that_waits_for_another_says_so_in_its_script() -> None:
    script = slurm.render(JobRequest(RUN, launch(), "true", after=("41", "42")))
    assert "#SBATCH --dependency=afterany:41:42\n" in script


def test_without_modules_nothing_is_reset() -> None:
    assert setup_lines(LaunchConfig(setup_lines=["true"])) == ["true"]


def fake_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> RunDir:
    for name in ("sbatch", "srun"):
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return RunDir(folder / "run")


def test_submit_gives_sbatch_the_script_and_nothing_of_this_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fake_sbatch(
        tmp_path, monkeypatch, f"env > {tmp_path}/env; cat > {tmp_path}/script; echo Submitted batch job 42\n"
    )
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "100")
    command = attempt_command(run)
    request = JobRequest(run, launch(), command)
    assert SlurmQueue().submit(request) == "42"
    assert (tmp_path / "script").read_text() == slurm.render(request)
    assert "SLURM_MEM_PER_CPU" not in (tmp_path / "env").read_text()
    assert run.slurm_log("42").parent.is_dir()


def test_a_refusal_is_told_in_sbatchs_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fake_sbatch(tmp_path, monkeypatch, "echo 'sbatch: error: invalid partition specified: nope' >&2; exit 1\n")
    request = JobRequest(run, launch(), "true")
    with pytest.raises(JobInDoubtError, match=r"nope\nThe job may be queued all the same: `squeue --me`"):
        SlurmQueue().submit(request)
    (tmp_path / "squeue").write_text("#!/bin/sh\necho '41|mine'\n")
    (tmp_path / "squeue").chmod(0o755)
    with pytest.raises(LaunchError, match=r"invalid partition specified: nope$") as refused:
        SlurmQueue().submit(request)
    assert type(refused.value) is LaunchError


QUEUES_AND_FAILS = """
name=${1#--comment=}
cat > /dev/null
echo "$name" >> SENT
[ -e TAKES ] && echo "42|$name" >> JOBS
echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2
exit 1
"""


@pytest.mark.parametrize("answers_at_once", [True, False])
def test_a_job_that_was_queued_although_sbatch_failed_is_not_queued_twice(
    answers_at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = QUEUES_AND_FAILS
    for name in ("SENT", "TAKES", "JOBS"):
        script = script.replace(name, str(tmp_path / name))
    run = fake_sbatch(tmp_path, monkeypatch, script)
    (tmp_path / "TAKES").touch()
    (tmp_path / "JOBS").write_text("41|mine\n")
    squeue = tmp_path / "squeue"
    monkeypatch.setenv("SQUEUE_PARTITION", "other")  # squeue would leave out our job
    # Without --all squeue leaves out jobs of a hidden partition.
    shows = f'#!/bin/sh\n[ "$SQUEUE_PARTITION" ] || [ "$1" != --all ] || cat {tmp_path}/JOBS\n'
    squeue.write_text(shows if answers_at_once else "#!/bin/sh\nexit 1\n")
    squeue.chmod(0o755)
    request = JobRequest(run, launch(), "true")
    if not answers_at_once:
        with pytest.raises(JobInDoubtError, match="Socket timed out"):
            SlurmQueue().submit(request)
        squeue.write_text(shows)
        request = replace(request, may_be_queued=True)
    assert SlurmQueue().submit(request) == "42"
    assert (tmp_path / "SENT").read_text().split() == [request.name]


@pytest.mark.parametrize("ask", [lambda queue, run: queue.submit(JobRequest(run, launch(), "true")),
                                 lambda queue, run: queue.show("7"),
                                 lambda queue, run: queue.show("8").asked(launch(), by_hand=True)])  # fmt: skip
def test_a_caller_in_a_hurry_waits_no_minute_for_slurm(
    ask: Callable[[SlurmQueue, RunDir], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_IN_A_HURRY_S", 0.5)
    run = fake_sbatch(tmp_path, monkeypatch, '[ "$*" = "show job 8" ] && echo JobId=8 || exec sleep 50')
    for name in ("squeue", "scontrol"):
        shutil.copy(tmp_path / "sbatch", tmp_path / name)
    begun = time.monotonic()
    with pytest.raises(LaunchError, match="no answer within"):
        ask(SlurmQueue().in_a_hurry(), run)
    assert time.monotonic() - begun < 30.0


def test_a_machine_without_slurm_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="no Slurm"):
        SlurmQueue().submit(JobRequest(RunDir(tmp_path / "run"), launch(), "true"))


def test_a_submission_from_inside_a_job_carries_nothing_of_it() -> None:
    environ = {"SLURM_MEM_PER_CPU": "100", "SBATCH_X": "1", "SRUN_X": "1", "SLURM_CONF": "/c", "PATH": "/bin"}
    assert slurm.submission_environment(environ) == {"SLURM_CONF": "/c", "PATH": "/bin"}


@pytest.mark.parametrize(("module", "code"), [("cuda", 0), ("no such", 78)])
def test_a_module_that_cannot_be_loaded_ends_the_job_and_is_named(module: str, code: int) -> None:
    site = 'module() { [[ $1 == reset || $2 == cuda ]] || { echo "unable to locate $2" >&2; return 1; }; }'
    lines = setup_lines(LaunchConfig(modules=[module, "cuda"], setup_lines=["echo trains"]))
    done = subprocess.run(["bash", "-c", "\n".join([site, *lines])], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert (done.stdout == "trains\n", "launch.modules: 'no such' could not be loaded" in done.stderr) == (
        code == 0,
        code == 78,
    )


def test_the_programs_beside_the_python_of_a_job_are_found_first() -> None:
    script = slurm.render(JobRequest(RUN, LaunchConfig(python="/proj/my env/bin/python", modules=["cuda"]), "true"))
    lines = script.splitlines()
    path = lines.index("export PATH='/proj/my env/bin':$PATH")
    assert lines.index("module reset") < path < len(lines) - 1


@pytest.mark.parametrize(
    ("slurm_values", "options"),
    [
        ({"extra": {"exclusive": True, "network": "job_vni"}}, {"--exclusive", "--network=job_vni"}),
        ({"extra": {"exclusive": "user", "network": "no_vni"}}, {"--exclusive=user", "--network=no_vni"}),
        ({}, set()),
    ],
)
def test_whole_nodes_and_their_network_are_asked_for(slurm_values: dict[str, object], options: set[str]) -> None:
    directives = slurm.render(JobRequest(RUN, launch(**slurm_values), "true")).splitlines()
    found = {line.split()[1] for line in directives if line.startswith(("#SBATCH --excl", "#SBATCH --net"))}
    assert found == options
