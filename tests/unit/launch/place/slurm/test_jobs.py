from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.job_queue import JobEnd
from hpc_grpo.launch.place.slurm.jobs import SlurmJob, SlurmQueue
from hpc_grpo.launch.place.slurm.text import counts_per_node, fields, minutes, unix_time

# `scontrol show job` of Slurm 22.05, shortened.
SHOWN = """JobId=6 JobName=grpo_rlzero
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   Priority=4294901755 Nice=0 Account=brics.x QOS=normal
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:02 TimeLimit=00:05:00 TimeMin=N/A
   Partition=workq AllocNode:Sid=login01:1
   NumNodes=2 NumCPUs=16 NumTasks=2 CPUs/Task=2 ReqB:S:C:T=0:0:*:*
   TRES=cpu=16,mem=16000M,node=2,billing=16,gres/gpu=8
   MinCPUsNode=2 MinMemoryCPU=1000M MinTmpDiskNode=0
   OverSubscribe=NO Contiguous=0 Licenses=(null) Network=(null)
   Command=/home/u/sbatch/grpo_rlzero.sbatch configs/x.sh train.lr=1e-6
   TresPerNode=gres:gpu:gh200:4
"""


def job(job_id: str, shown: str) -> SlurmJob:
    return SlurmJob(job_id, fields(shown), SlurmQueue())


GIVEN = "sbatch --time=5 --comment=mine sbatch/grpo_rlzero.sbatch configs/x.sh"
SCRIPT = "#!/bin/bash\n#SBATCH --gpus-per-node=4\n#SBATCH --exclusive\nset -e\n"


def job_of(answers: dict[str, str], shown: str = SHOWN) -> SlurmJob:
    return SlurmJob("6", fields(shown), replace(queue(answers), sleep=lambda _: None))


@pytest.mark.parametrize("extra", [{"gres": "gpu:4"}, {"gpus": 4, "qos": "long"}])
def test_a_successor_asks_for_what_the_config_says_and_not_for_what_its_job_has(extra: dict[str, str]) -> None:
    """GPUs would double from link to link, and a site may rename a QOS or a partition."""
    launch = LaunchConfig.model_validate({"slurm": {"partition": "gpu", "extra": extra}})
    shown = SHOWN.replace("QOS=normal", "QOS=long_internal").replace("Partition=workq", "Partition=gpu_internal")
    assert job_of({}, shown).asked(launch, by_hand=False) == launch


def test_a_successor_of_a_job_by_hand_asks_for_what_sbatch_was_given() -> None:
    launch = LaunchConfig.model_validate({"slurm": {"account": "config", "time_min": 60, "extra": {"gres": "gpu:2"}}})
    slurm = job_of({"scontrol": SCRIPT, "sacct": GIVEN}).asked(launch, by_hand=True).slurm
    assert (slurm.account, slurm.partition, slurm.time_min) == ("config", None, 5)
    assert (slurm.gpus_per_node, slurm.extra) == (4, {"exclusive": True, "comment": "mine"})


@pytest.mark.parametrize("answers", [{"scontrol": SCRIPT}, {"scontrol": SCRIPT, "sacct": "\n"}])
def test_where_command_lines_are_not_kept_plain_resources_of_the_job_count(answers: dict[str, str]) -> None:
    asked = job_of(answers).asked(LaunchConfig(), by_hand=True)
    slurm = asked.slurm
    assert (asked.num_nodes, slurm.time_min, slurm.gpus_per_node, slurm.cpus_per_node) == (2, 5, 4, 2)
    assert (slurm.partition, slurm.extra) == (None, {"exclusive": True})


@pytest.mark.parametrize(
    ("answers", "extra", "seconds"),
    [
        pytest.param(["", GIVEN], {"comment": "mine"}, 5.0, id="it is behind"),
        pytest.param([LaunchError("Connection refused"), "", GIVEN], {"comment": "mine"}, 20.0, id="away"),
        pytest.param(["", LaunchError("no answer within 60 s"), GIVEN], {"comment": "mine"}, 20.0, id="later"),
        pytest.param(["", "", ""], {}, 20.0, id="it keeps no command lines"),
        pytest.param([LaunchError("sacct failed: Slurm accounting storage is disabled")], {}, 0.0, id="there is none"),
        pytest.param([LaunchError("sacct failed: no sacct on PATH")], {}, 0.0, id="no program to ask it"),
    ],
)
def test_accounting_that_is_behind_or_away_for_a_moment_is_asked_again(
    answers: list[str | LaunchError], extra: dict[str, str], seconds: float
) -> None:
    left, pauses = iter(answers), [0.0]

    def ask(argv: Sequence[str], deadline_s: float) -> str:
        answer = next(left) if argv[0] == "sacct" else SHOWN if argv[1] == "show" else SCRIPT
        if isinstance(answer, LaunchError):
            raise answer
        return answer

    job = SlurmQueue(ask, sleep=pauses.append).show("6")
    assert job is not None
    found = job.asked(LaunchConfig(), by_hand=True)
    assert (found.slurm.extra, sum(pauses), list(left)) == ({"exclusive": True, **extra}, seconds, [])


def test_a_successor_is_kept_off_the_nodes_that_its_job_was_kept_off() -> None:
    shown = f"{SHOWN}   ReqNodeList=(null) ExcNodeList=nid[004-005]\n"
    assert job_of({}, shown).asked(LaunchConfig(), by_hand=False).slurm.extra == {"exclude": "nid[004-005]"}


@pytest.mark.parametrize(("shown", "hours"), [(SHOWN, 2 * 5 / 60), ("JobId=6 TimeLimit=UNLIMITED NumNodes=2", None)])
def test_a_job_takes_its_nodes_until_its_limit(shown: str, hours: float | None) -> None:
    assert job("6", shown).node_hours == hours


@pytest.mark.parametrize(
    ("shown", "output"),
    [
        ("   StdIn=/dev/null\n   StdOut=/home/u/my runs/job-6.out\n   Power=\n", "/home/u/my runs/job-6.out"),
        ("   StdOut=\n   Power=\n", ""),
        ("   StdOut=job-6.out\n", ""),
        ("", ""),
    ],
)
def test_a_whole_path_is_the_output_and_nothing_else_is(shown: str, output: str) -> None:
    found = job("6", f"{SHOWN}{shown}")
    assert found.output == output
    assert (found.fields["TresPerNode"], found.fields.get("Power")) == ("gres:gpu:gh200:4", None)


@pytest.mark.parametrize(("needed", "excludes"), [("1-1", True), ("2", False)])
def test_nodes_are_excluded_only_where_enough_are_left(needed: str, excludes: bool) -> None:
    asked: list[str] = []

    def ask(argv: Sequence[str], deadline_s: float) -> str:
        asked.append(" ".join(argv))
        if "hostnames" in argv:
            return {"nid[001-003]": "nid001\nnid002\nnid003\n"}.get(argv[-1], argv[-1].replace(",", "\n"))
        assert "--all" in argv or "update" in argv, "a hidden partition is not found"
        return "PartitionName=workq\n   Nodes=nid[001-003]\n   State=UP TotalCPUs=24 TotalNodes=3"

    job = SlurmJob("8", {"Partition": "workq", "NumNodes": needed, "ExcNodeList": "nid001"}, SlurmQueue(ask))
    if excludes:
        job.exclude_nodes(["nid002"])
        assert asked[-1] == "scontrol update JobId=8 ExcNodeList=nid001,nid002"
    else:
        with pytest.raises(LaunchError, match="without nid002 its partition has fewer than 2 nodes"):
            job.exclude_nodes(["nid002"])
        assert not any("update" in call for call in asked)


def queue(answers: dict[str, str]) -> SlurmQueue:
    """A Slurm whose commands answer so; one that is not named fails."""

    def ask(argv: Sequence[str], deadline_s: float) -> str:
        if argv[0] not in answers:
            raise LaunchError(f"{argv[0]} failed: no such command")
        return answers[argv[0]]

    return SlurmQueue(ask)


RUNNING, TIMED_OUT = "JobId=7 JobState=RUNNING", "JobId=7 JobState=TIMEOUT"


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ({"sacct": "CANCELLED by 1000\n"}, "CANCELLED by 1000"),
        ({"scontrol": TIMED_OUT}, "TIMEOUT"),  # no accounting on this site
        ({"sacct": "RUNNING\n", "scontrol": TIMED_OUT}, "TIMEOUT"),  # accounting is behind
        ({"sacct": "", "scontrol": RUNNING}, ""),
        ({}, ""),
    ],
)
def test_an_end_is_read_from_accounting_and_else_from_the_controller(answers: dict[str, str], state: str) -> None:
    assert queue(answers).end_of("7").state == state


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (f"CANCELLED by {os.getuid()}", JobEnd(by_user=True)),
        (f"CANCELLED by {os.getuid() + 1}", JobEnd()),  # by an administrator
        ("CANCELLED", JobEnd(by_user=True)),
        ("TIMEOUT", JobEnd(at_time_limit=True)),
        ("NODE_FAIL", JobEnd(lost_a_node=True)),
        ("COMPLETED", JobEnd()),
        ("", JobEnd()),
    ],
)
def test_an_end_says_who_or_what_made_it(state: str, end: JobEnd) -> None:
    assert queue({"sacct": state}).end_of("7") == replace(end, state=state)


@pytest.mark.parametrize("state", ["RESV_DEL_HOLD", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "PENDING"])
def test_a_job_that_may_run_again_is_not_over(state: str) -> None:
    held, gone = (SlurmJob("7", {"JobState": word}, SlurmQueue()) for word in (state, "REVOKED"))
    assert (held.is_over, gone.is_over) == (False, True)


def test_a_job_is_shown_until_slurm_has_forgotten_it() -> None:
    def forgot(argv: Sequence[str], deadline_s: float) -> str:
        raise LaunchError("scontrol show job 7 failed: slurm_load_jobs error: Invalid job id specified")

    assert SlurmQueue(forgot).show("7") is None
    known = queue({"scontrol": f"{RUNNING}\n\nJobId=8 JobState=PENDING"}).show("7")
    assert known is not None
    assert (known.state, known.is_over) == ("RUNNING", False)
    with pytest.raises(LaunchError, match="no such command"):
        queue({}).show("7")


@pytest.mark.parametrize(
    ("changed", "is_preempted"),
    [
        ("JobState=RUNNING PreemptTime=2026-11-22T10:00:00 EndTime=2026-11-22T10:01:00", True),
        ("JobState=RUNNING PreemptTime=None EndTime=2026-11-22T12:00:00", False),
        ("JobState=COMPLETING PreemptTime=2026-11-22T10:00:00 EndTime=2026-11-22T10:00:09", False),
    ],
)
def test_a_job_that_is_preempted_has_until_its_new_end(changed: str, is_preempted: bool) -> None:
    deadlines: list[float] = []

    def ask(_argv: Sequence[str], deadline_s: float) -> str:
        deadlines.append(deadline_s)
        return f"JobId=6 {changed}"

    queue = SlurmQueue(ask)
    expected = time.mktime(time.strptime("2026-11-22T10:01:00", "%Y-%m-%dT%H:%M:%S"))
    assert queue.preempted_until("6") == (expected if is_preempted else None)
    assert deadlines == [2.0], "SIGKILL may be near"


def test_a_slurm_that_does_not_answer_preempts_nothing() -> None:
    def ask(_argv: Sequence[str], deadline_s: float) -> str:
        raise LaunchError("scontrol show job 6 took longer than 2 s")

    assert SlurmQueue(ask).preempted_until("6") is None


@pytest.mark.parametrize(("uid", "is_users"), [(os.getuid(), True), (os.getuid() + 1, False)])
def test_the_author_of_a_cancel_is_waited_for_while_accounting_is_behind(uid: int, is_users: bool) -> None:
    answers = ["RUNNING\n", "", f"CANCELLED by {uid}\n"]
    slept: list[float] = []

    def ask(argv: Sequence[str], deadline_s: float) -> str:
        return answers.pop(0) if argv[0] == "sacct" else "JobId=7 JobState=CANCELLED"

    assert SlurmQueue(ask, sleep=slept.append).end_of("7").by_user == is_users
    assert slept == [0.0, 5.0, 15.0]


def test_a_site_without_accounting_is_not_waited_for() -> None:
    def ask(argv: Sequence[str], deadline_s: float) -> str:
        if argv[0] == "sacct":
            raise LaunchError("sacct failed: Slurm accounting storage is disabled")
        return "JobId=7 JobState=CANCELLED"

    slept: list[float] = []
    assert SlurmQueue(ask, sleep=slept.append).end_of("7").by_user
    assert slept == [0.0]


@pytest.mark.parametrize(
    ("text", "num_nodes", "counts"),
    [("72(x2),36", 3, (72, 72, 36)), ("4", 1, (4,)), ("2,4(x3)", 4, (2, 4, 4, 4))],
)
def test_counts_per_node(text: str, num_nodes: int, counts: tuple[int, ...]) -> None:
    assert counts_per_node(text, num_nodes) == counts


def test_counts_in_another_form_are_refused_by_name() -> None:
    with pytest.raises(LaunchError, match=r"SLURM_JOB_CPUS_PER_NODE = '4\*2' is not in a known form"):
        counts_per_node("4*2", 2)


@pytest.mark.parametrize("text", ["Unknown", "N/A", ""])
def test_a_time_that_is_none_is_not_known(text: str) -> None:
    assert unix_time(text) is None


def test_time_limits() -> None:
    limits = ("00:03:00", "23:59:59", "2-00:00:00", "UNLIMITED", "")
    assert [minutes(limit) for limit in limits] == [3, 1440, 2880, None, None]
    given = ("30", "90:30", "0:01", "1-0", "1-2", "1-2:30", "1-2:30:01", "0:90:00", "1-", ":30", "1:2:3:4")
    assert [minutes(limit) for limit in given] == [30, 91, 1, 1440, 1560, 1590, 1591, 90, None, None, None]
