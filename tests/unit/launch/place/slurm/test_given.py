"""What a user gave sbatch, read from the script, the variables and the command line of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.launch.place.slurm.given import directives, from_variables, given_options, overlaid, where_silent
from hpc_grpo.launch.place.slurm.sbatch import extra_options, node_options

BY_HAND = Path(__file__).parents[5] / "sbatch" / "grpo_rlzero.sbatch"


def launch(**slurm: Any) -> LaunchConfig:
    return LaunchConfig.model_validate({"slurm": slurm})


def test_the_directives_of_a_script_end_with_its_first_command() -> None:
    script = "#!/bin/bash\n# words\n\n#SBATCH --time=5 -N 2  # two\n#SBATCH --exclusive\nset -e\n#SBATCH --nodes=9\n"
    assert directives(script) == {"time": "5", "nodes": "2", "exclusive": True}


def test_a_lone_quote_in_a_script_ends_no_run() -> None:
    assert directives("#SBATCH --comment=it's --time=5\n") == {"comment": "it's", "time": "5"}


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("sbatch --parsable -t4 -N 2 --exclusive job.sh --time=9", {"time": "4", "nodes": "2", "exclusive": True}),
        ("/usr/bin/sbatch --account proj -c 8 dir/job.sh", {"account": "proj", "cpus-per-task": "8"}),
        ("sbatch --comment=my own words -A proj ./job.sh a b", {"comment": "my own words", "account": "proj"}),
        ("sbatch --exclusive=user -x nid001 job.sh", {"exclusive": "user", "exclude": "nid001"}),
        ("sbatch job.sh", {}),
    ],
)
def test_the_words_on_the_command_line_are_read_up_to_the_script(line: str, given: dict[str, Any]) -> None:
    assert {name: value for name, value in given_options("", {}, line, "job.sh").items() if name != "parsable"} == given


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ("--nodes=2 -A root", {"nodes": "2", "account": "root"}),
        ("-A root --time 2:00:00", {"account": "root", "time": "2:00:00"}),
        ("--oom-kill-step -t 2-0", {"oom-kill-step": True, "time": "2-0"}),
        ("--an-option-of-tomorrow", {"an-option-of-tomorrow": True}),
    ],
)
def test_the_options_end_at_a_script_in_a_folder_with_blanks(options: str, given: dict[str, Any]) -> None:
    words = "sbatch/grpo_rlzero.sbatch conf.yaml run.name=x"
    assert given_options("", {}, f"sbatch {options} {words}", f"/home/u/my runs/{words}") == given


@pytest.mark.parametrize("limit", ["UNLIMITED", "0"])
def test_a_successor_of_a_job_without_a_limit_asks_for_a_year(limit: str) -> None:
    assert overlaid(launch(time_min=5), {"time": limit}).slurm.time_min == 365 * 24 * 60


@pytest.mark.parametrize("limit", ["", "5 x.sh", True])
def test_a_time_that_cannot_be_read_leaves_the_configs(limit: object) -> None:
    assert overlaid(launch(time_min=5), {"time": limit}).slurm.time_min == 5


def test_the_command_line_wins_over_variables_and_those_over_the_script() -> None:
    script = "#SBATCH --time=1\n#SBATCH --qos=a\n#SBATCH --account=a\n#SBATCH --mem=1G\n"
    environ = {"SBATCH_QOS": "b", "SBATCH_ACCOUNT": "b", "SBATCH_DEBUG": "1"}
    given = given_options(script, environ, "sbatch --account=c --mem-per-cpu=2G job.sh", "job.sh")
    assert given == {"time": "1", "qos": "b", "account": "c", "mem-per-cpu": "2G"}


def test_what_was_given_wins_over_the_config_and_the_rest_stays() -> None:
    given = {"nodes": "2-4", "time": "4:00:00", "partition": "p", "cpus-per-task": "8", "qos": "q", "hold": True}
    asked = overlaid(launch(account="a", time_min=5, extra={"mail_user": "x@y", "qos": "config"}), given)
    slurm = asked.slurm
    assert (asked.num_nodes, slurm.time_min, slurm.partition, slurm.account) == (2, 240, "p", "a")
    assert (slurm.cpus_per_node, slurm.extra) == (8, {"mail_user": "x@y", "qos": "q"})


@pytest.mark.parametrize(
    ("given", "gpus", "extra"),
    [
        ({"gpus-per-node": "2"}, 2, {"comment": "x"}),
        ({"gpus-per-node": "gh200:2"}, 0, {"comment": "x", "gres": "gpu:gh200:2"}),
        ({"gpus": "8"}, 0, {"comment": "x", "gpus": "8"}),
        ({"gres": "craynetwork:1"}, 4, {"comment": "x", "gres": "craynetwork:1"}),
        ({}, 4, {"comment": "x", "gres": "gpu:4"}),
    ],
)
def test_gpus_given_by_hand_replace_those_of_the_config(
    given: dict[str, Any], gpus: int, extra: dict[str, str]
) -> None:
    asked = overlaid(launch(gpus_per_node=4, extra={"comment": "x", "gres": "gpu:4"}), given).slurm
    assert (asked.gpus_per_node, asked.extra) == (gpus, extra)


@pytest.mark.parametrize(
    ("words", "per_node"),
    [
        ("--ntasks-per-node=4 --cpus-per-task=72 --gpus-per-task=1", None),
        ("--nodes=2 --ntasks=8 -c 9 --gpus-per-node=4", None),
        ("--ntasks-per-node=1 -c 8 --gpus-per-task=4", 1),
    ],
)
def test_a_successor_has_the_tasks_of_a_job_by_hand(words: str, per_node: int | None) -> None:
    """One task a node would get the CPUs and GPUs of one."""
    given = given_options("", {}, f"sbatch {words} job.sh", "job.sh")
    asked = overlaid(launch(gpus_per_node=1), given)
    options = {name.replace("_", "-"): str(value) for name, value in node_options(asked).items()}
    options |= extra_options(asked.slurm)
    assert node_options(asked).get("ntasks_per_node") == per_node
    assert options == {"nodes": "1", "time": "60"} | given


def test_whole_nodes_and_a_network_given_by_hand_win_over_further_options_of_the_config() -> None:
    config = launch(extra={"exclusive": "user", "network": "no_vni"})
    asked = overlaid(config, {"exclusive": True, "network": "job_vni"}).slurm
    assert asked.extra == {"exclusive": True, "network": "job_vni"}


def test_the_shipped_script_asks_for_whole_nodes_as_the_shipped_site_does() -> None:
    asked = overlaid(LaunchConfig(), directives(BY_HAND.read_text()))
    assert (asked.num_nodes, asked.slurm.time_min, asked.slurm.gpus_per_node) == (1, 1440, 4)
    assert asked.slurm.extra == {"exclusive": True}


def test_what_the_config_says_of_its_jobs_stays() -> None:
    config = launch(extra={"begin": "now+1hour", "deadline": "now+2days"})
    assert where_silent(config, {}) == config
    assert overlaid(config, {"begin": "now"}).slurm.extra == {"begin": "now+1hour", "deadline": "now+2days"}


def test_variables_of_sbatch_count_where_the_config_is_silent() -> None:
    environ = {"SBATCH_ACCOUNT": "proj", "SBATCH_PARTITION": "p", "SBATCH_QOS": "q", "SBATCH_TIMELIMIT": "30"}
    silent = where_silent(launch(), from_variables(environ)).slurm
    assert (silent.account, silent.partition, silent.extra, silent.time_min) == ("proj", "p", {"qos": "q"}, 30)
    said = {"account": "mine", "partition": "mine", "time_min": 60, "extra": {"qos": "mine"}}
    assert where_silent(launch(**said), from_variables(environ)) == launch(**said)


def test_a_variable_for_gpus_or_memory_does_not_stand_beside_the_configs() -> None:
    given = from_variables({"SBATCH_GRES": "gpu:4", "SBATCH_MEM_PER_NODE": "1G"})
    config = launch(gpus_per_node=2, extra={"mem_per_cpu": "2G"})
    assert where_silent(config, given) == config
    assert where_silent(launch(), given).slurm.extra == {"gres": "gpu:4", "mem": "1G"}
