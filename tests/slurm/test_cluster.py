"""The test bed itself: what other Slurm tests rely on is true of it."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = pytest.mark.slurm

BOTH = ("--nodes=2", "--ntasks-per-node=1")


def test_tasks_run_on_hosts_of_their_own(slurm_cluster: SlurmCluster) -> None:
    printed = slurm_cluster.output(["srun", *BOTH, "hostname"])
    assert sorted(printed.split()) == list(slurm_cluster.node_names)


def test_every_host_resolves_every_name_and_its_own_loopback(slurm_cluster: SlurmCluster) -> None:
    names = [*slurm_cluster.node_names, "slurmctl", "login01", "localhost"]
    lookup = f"import socket; print(*[socket.getaddrinfo(n, 1)[0][4][0] for n in {names!r}])"
    lines = set(slurm_cluster.output(["srun", *BOTH, "python3", "-c", lookup]).splitlines())
    assert lines == {"198.18.0.11 198.18.0.12 198.18.0.1 198.18.0.2 127.0.0.1"}


def test_a_host_finds_its_address_by_its_route_to_the_world(slurm_cluster: SlurmCluster) -> None:
    # Ray and vLLM do this; without a default route vLLM settles on 0.0.0.0.
    probe = (
        "import socket; s = socket.socket(type=socket.SOCK_DGRAM)\n"
        "s.connect(('8.8.8.8', 80)); print(s.getsockname()[0])"
    )
    printed = slurm_cluster.output(["srun", *BOTH, "python3", "-c", probe])
    assert sorted(printed.split()) == ["198.18.0.11", "198.18.0.12"]


def test_slurm_counts_four_gpus_a_node(slurm_cluster: SlurmCluster) -> None:
    printed = slurm_cluster.output(["sinfo", "-h", "-N", "-p", "workq", "-o", "%G"])
    counts = [int(gres.partition("(")[0].rpartition(":")[2]) for gres in printed.split()]
    assert counts == [4, 4]


def test_a_job_gets_its_gpus_by_environment(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = "#!/bin/bash\necho $CUDA_VISIBLE_DEVICES $ROCR_VISIBLE_DEVICES $GPU_DEVICE_ORDINAL\n"
    printed = slurm_cluster.run_job(script, tmp_path, "--gpus-per-node=4")
    assert printed.split() == ["0,1,2,3"] * 3


def test_two_steps_at_once_get_different_gpus_of_a_node(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = (
        "#!/bin/bash\n"
        "both='printenv CUDA_VISIBLE_DEVICES > $0; until [ -s a ] && [ -s b ]; do sleep 0.1; done'\n"
        'for name in a b; do srun --exact --ntasks=1 --gpus=2 --mem=100 timeout 60 bash -c "$both" $name & done\n'
        "wait; cat a b\n"
    )
    printed = slurm_cluster.run_job(script, tmp_path, "--nodes=1", "--ntasks=2", "--gpus=4")
    assert sorted(",".join(printed.split()).split(",")) == ["0", "1", "2", "3"]


def test_a_batch_job_starts_overlapping_steps_on_both_nodes(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = """#!/bin/bash
step() { srun --overlap --mem=0 --nodes=1 --ntasks=1 --gpus-per-node=4 --nodelist="$1" bash -c "$2"; }
# The first step holds both nodes until the second has run on the other one.
srun --overlap --mem=0 --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 \\
    bash -c 'touch $(hostname); until [ -e go ]; do sleep 0.1; done' &
until [ -e nid001 ] && [ -e nid002 ]; do sleep 0.1; done
step nid002 'hostname; echo $CUDA_VISIBLE_DEVICES'
touch go
wait
"""
    printed = slurm_cluster.run_job(script, tmp_path, *BOTH, "--gpus-per-node=4", "--nodelist=nid[001-002]")
    assert printed.split() == ["nid002", "0,1,2,3"]


def test_a_job_submits_and_inspects_another(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = """#!/bin/bash
child=$(sbatch --parsable --output=child.out --wrap 'echo from the child; scontrol show job $SLURM_JOB_ID')
until [ "$(sacct -X -n -P -j $child -o State)" = COMPLETED ]; do sleep 0.2; done
cat child.out
"""
    printed = slurm_cluster.run_job(script, tmp_path)
    assert "from the child" in printed
    assert "JobState=RUNNING" in printed


def test_accounting_tells_success_from_failure(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    good = slurm_cluster.submit("#!/bin/bash\nexit 0\n", tmp_path)
    bad = slurm_cluster.submit("#!/bin/bash\nexit 3\n", tmp_path)
    assert slurm_cluster.wait_for_job(good, 60).state == "COMPLETED"
    failed = slurm_cluster.wait_for_job(bad, 60)
    assert (failed.state, failed.exit_code) == ("FAILED", "3:0")


def test_shared_memory_and_processes_are_private_to_a_node(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    name = f"/dev/shm/{uuid.uuid4().hex}"
    look = f"if [ -e {name} ]; then echo yes; else echo no; fi; grep -lx slurmd /proc/[0-9]*/comm | wc -l"
    script = f"""#!/bin/bash
touch {name}
for node in nid001 nid002; do
    srun --overlap --mem=0 --nodes=1 --ntasks=1 --nodelist=$node bash -c '{look}'
done
rm {name}
"""
    printed = slurm_cluster.run_job(script, tmp_path, *BOTH, "--nodelist=nid[001-002]")
    assert printed.split() == ["yes", "1", "no", "1"]
    assert not Path(name).exists()


def test_partitions_differ_in_their_default_memory(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = (
        "#!/bin/bash\necho ${SLURM_MEM_PER_CPU:-unset}\n"
        "scontrol show job $SLURM_JOB_ID | grep -o 'mem=[^,]*' | head -1\n"
    )
    with_default = slurm_cluster.run_job(script, tmp_path, "--partition=workq", "--cpus-per-task=2")
    without = slurm_cluster.run_job(script, tmp_path, "--partition=nodefmem", "--cpus-per-task=2")
    assert with_default.split() == ["1500", "mem=3000M"]
    assert without.split() == ["unset", "mem=12000M"]


def test_a_job_that_outgrows_its_memory_is_killed(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    grow = "import time; hoard = bytearray(600 << 20); time.sleep(60)"
    job_id = slurm_cluster.submit(f"#!/bin/bash\nsrun python3 -c '{grow}'\n", tmp_path, "--mem=200")
    end = slurm_cluster.wait_for_job(job_id, 90)
    printed = (tmp_path / f"{job_id}.out").read_text()
    # OUT_OF_MEMORY needs cgroups; Slurm's own accounting kills just as surely and calls it FAILED.
    assert end.state == "FAILED", printed
    assert "exceeded memory limit" in printed


@pytest.mark.long
def test_a_killed_node_comes_back(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job_id = slurm_cluster.submit("#!/bin/bash\nsleep 300\n", tmp_path, "--nodelist=nid002", "--no-requeue")

    def state() -> str:
        return slurm_cluster.output(["sacct", "-X", "-n", "-P", "-j", str(job_id), "-o", "State"]).strip()

    slurm_cluster.wait_until(lambda: state() == "RUNNING", 30, "the job runs on nid002")
    slurm_cluster.kill_node("nid002")
    try:
        assert slurm_cluster.wait_for_job(job_id, 90).state == "NODE_FAIL"
    finally:
        slurm_cluster.start_node("nid002")
    assert slurm_cluster.output(["srun", "--nodelist=nid002", "hostname"]).strip() == "nid002"
