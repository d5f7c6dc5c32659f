"""The command lines of the guides of five systems, verbatim: what each does here, or how it is said here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from hpc_grpo.cli import grpo, main
from hpc_grpo.config import load_config
from hpc_grpo.foreign.systems import SYSTEMS
from hpc_grpo.foreign.table import Kind
from hpc_grpo.launch.place.joined.roles import find_role
from hpc_grpo.metrics.sinks import NAMES
from tests.support.command import call

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "coming-from.md").read_text()
_CONTAINER = "--privileged --gpus all --network host --shm-size 700g -v /storage:/storage"
_AREAL = f"docker run -d --name r1-ray-{{}} {_CONTAINER} ghcr.io/inclusionai/areal-runtime:v0.3.0 /bin/bash -c {{}}"
TRAIN = (
    "python train_grpo.py --model facebook/opt-1.3b --dataset /data/my_dataset.json --reward_function correctness "
    "--max_steps 300 --use_unsloth"
)

LINES: dict[str, tuple[str, ...]] = {
    "open-instruct on Slurm": (
        "sbatch configs/isambard/grpo_rlzero.sbatch configs/isambard/grpo_debug_single_node.sh",
        "tail -f /projects/a5k/public/logs_puria.a5k/open-instruct/<job_id>.out",
        "#SBATCH --nodes=2",
        "configs/isambard/ray_node_setup_slurm.sh",
        "configs/isambard/setup_open_instruct_env.sh",
        "configs/isambard/run_on_compute.sbatch",
        "--with_tracking",
        "uv sync",
        "make style && make quality",
        "uv run pytest",
        "git remote add upstream https://github.com/allenai/open-instruct.git",
        "git fetch upstream",
        "git merge upstream/main",
    ),
    "verl on two hosts": (
        "pip install verl ray",
        'export RAY_HEAD_IP="192.168.1.100"',
        'export RAY_HEAD_PORT="10001"',
        "cd /mnt/task_runtime/hinting",
        "bash launch_grpo_2nodes_ray.sh",
        "bash launch_grpo_2nodes_ray.sh head",
        "bash launch_grpo_2nodes_ray.sh worker",
        "ray status",
        "http://<node0_ip>:8265",
        "tail -f /tmp/ray/session_latest/logs/*.log",
        "ray stop",
    ),
    "AReaL in containers": (
        _AREAL.format("head", '"ray start --head --port=6379 && tail -f /dev/null"'),
        "RAY_HEAD_IP=xxx.xxx.xxx.xxx",
        _AREAL.format("worker", '"ray start --address=$RAY_HEAD_IP:6379 && tail -f /dev/null"'),
        "docker exec -it r1-ray-head bash",
        "ray status",
        "cd /storage/codes/AReaL",
        "pip3 install -e .",
        "python3 training/main_async_ppo.py --config-name=async-ppo-1.7b-gpu8",
        "python3 -m realhf.apps.quickstart async-ppo-math --help",
        "wandb login",
    ),
    "OpenRLHF-M on pods": (
        "export HEAD_POD_ID=abc123",
        "export DEBUG_RAY=1",
        "export RAY_WORKER=1",
        "cd /data/OpenRLHF-M",
        "bash examples/scripts/tests/train_grpo_ray_qwen2_5_vl_mathv60k_multinode.sh",
        "http://<head_pod_id>.runpod.internal:8265",
    ),
    "a fleet of VMs": (
        "INSERT INTO VM",
        "INSERT INTO Job",
        'await nc.publish("jobs.new", str(job_id).encode())',
        "python gpu_poller.py",
        "python dispatcher.py",
        TRAIN,
        "ssh -i <key>",
    ),
}


def said(system: str) -> dict[str, str]:
    """Their line -> what stands beside it on the page."""
    rows = PAGE.split(f"| {system} | here |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    cells = [re.fullmatch(r"\| `(.+?)` \| (.+) \|", row) for row in rows]
    assert None not in cells
    return {found[1]: found[2] for found in cells if found}


@pytest.mark.parametrize(("system", "line"), [(system, line) for system, lines in LINES.items() for line in lines])
def test_a_line_has_its_sentence_whose_commands_exist(system: str, line: str) -> None:
    for command in re.findall(r"`hpc-grpo ([^`]+)`", said(system)[line]):
        group: click.Command = main
        words = shlex.split(command)
        while isinstance(group, click.Group):
            found = group.get_command(click.Context(group), words.pop(0))
            assert found is not None, command
            group = found
        group.make_context(str(group.name), words, resilient_parsing=False)


def test_the_page_has_no_line_that_no_guide_has() -> None:
    assert {system: set(said(system)) for system in LINES} == {system: set(lines) for system, lines in LINES.items()}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose hpc-grpo, sbatch and scontrol write down how they are called; sbatch runs the job at once."""
    for name in ("sbatch", "configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, symlinks=True)
    shutil.copy(REPOSITORY / "launch_grpo_2nodes_ray.sh", tmp_path, follow_symlinks=False)
    (tmp_path / "hpc_grpo").mkdir()
    (tmp_path / "hpc_grpo" / "__init__.py").touch()
    programs = {
        "hpc-grpo": f'[ "$1" = job-setup ] || echo "$@" >> {tmp_path}/called',
        "scontrol": f"echo '   Command={tmp_path}/configs/isambard/grpo_rlzero.sbatch x'",
        "sbatch": 'SLURM_JOB_ID=7 exec bash "$@"',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.defpath}")
    monkeypatch.setenv("CONFIG", "my_run.yaml")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "called"),
    [
        (LINES["open-instruct on Slurm"][0], "train --link configs/isambard/grpo_debug_single_node.sh"),
        ("bash launch_grpo_2nodes_ray.sh", "place host head my_run.yaml"),
        ("bash launch_grpo_2nodes_ray.sh head", "place host head my_run.yaml"),
        ("bash launch_grpo_2nodes_ray.sh worker", "place host worker my_run.yaml"),
    ],
)
def test_a_script_runs_by_its_line(checkout: Path, line: str, called: str) -> None:
    subprocess.run(["bash", "-c", line], cwd=checkout, check=True)
    assert (checkout / "called").read_text() == f"{called}\n"


def test_the_scripts_of_open_instruct_are_here_by_their_names() -> None:
    folder = REPOSITORY / "configs" / "isambard"
    assert (folder / "setup_open_instruct_env.sh").samefile(folder / "setup_env.sh")
    assert (folder / "run_on_compute.sbatch").samefile(REPOSITORY / "sbatch" / "run_on_compute.sbatch")
    assert re.search(r"^#SBATCH --nodes=1$", (folder / "grpo_rlzero.sbatch").read_text(), re.MULTILINE)
    targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {"style", "quality", "test"} <= {*targets}


def test_train_grpo_trains_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "run_until_over", lambda _command: 75)
    assert call("grpo", *shlex.split(TRAIN)[2:]).exit_code == 75
    config = load_config("outputs/train_grpo.yaml")
    assert (config.model.path, config.train.total_steps) == ("facebook/opt-1.3b", 300)


@pytest.mark.parametrize(
    ("environ", "is_head", "head", "port"),
    [
        ({"HEAD_POD_ID": "abc123"}, True, "abc123.runpod.internal", None),
        ({"HEAD_POD_ID": "abc123", "RAY_WORKER": "0"}, True, "abc123.runpod.internal", None),
        ({"HEAD_POD_ID": "abc123", "RAY_WORKER": "1"}, False, "abc123.runpod.internal", None),
        ({"RAY_HEAD_IP": "192.168.1.100", "RAY_HEAD_PORT": "10001"}, False, "192.168.1.100", 10001),
    ],
)
def test_variables_say_what_a_node_is(environ: dict[str, str], is_head: bool, head: str, port: int | None) -> None:
    role = find_role(environ)
    assert (role.is_head, role.head, role.port) == (is_head, head, port)


AREALS_PARAMETERS = {
    "mode": "ray", "actor.path": "m", "ref.path": "m", "dataset.path": "d.jsonl", "cluster.fileroot": "/runs",
    "n_nodes": 1, "n_gpus_per_node": 8, "allocation_mode": "sglang.d4+d4", "exp_ctrl.total_train_epochs": 5,
    "exp_ctrl.save_freq_epochs": 1, "exp_ctrl.save_freq_steps": None, "exp_ctrl.save_freq_secs": None,
    "exp_ctrl.ckpt_freq_epochs": None, "exp_ctrl.ckpt_freq_steps": None, "exp_ctrl.ckpt_freq_secs": 600,
    "dataset.train_bs_n_seqs": 512, "group_size": 16, "actor_train.mb_spec.max_tokens_per_mb": 32768,
    "ref_inf.mb_spec.max_tokens_per_mb": 32768, "actor_inf.mb_spec.max_tokens_per_mb": 32768,
    "ppo.ppo_n_minibatches": 4, "ppo.recompute_logprob": True, "ppo.use_decoupled_loss": True,
    "ppo.gen.max_new_tokens": 16384, "ppo.gen.min_new_tokens": 0, "ppo.disable_value": True, "ppo.kl_ctl": 0.0,
    "wandb.mode": True,
}  # fmt: skip


@pytest.mark.parametrize("key", AREALS_PARAMETERS)
def test_a_parameter_of_areals_guide_is_known(key: str) -> None:
    translation = SYSTEMS["areal"].translated(AREALS_PARAMETERS)
    (kind,) = (outcome.kind for outcome in translation.outcomes if outcome.theirs == key)
    assert kind not in (Kind.UNKNOWN, Kind.REFUSED, Kind.BY_HAND)


@pytest.mark.parametrize(
    "name", ["task_reward", "importance_weight", "actor_clip_ratio", "actor_loss", "avg_seq_len", "no_eos_ratio"]
)
def test_a_statistic_of_areals_guide_has_its_name_with_its_names(name: str) -> None:
    assert name in NAMES["areal-0.3"].values()
