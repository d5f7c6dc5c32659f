"""The cluster's configuration files, as pure functions of its shape."""

from __future__ import annotations

from tools.virtual_machines.layout import SUBNET_PREFIX

from .layout import CLUSTER_NAME, CONTROLLER, Layout, Shape

DATABASE_PORT = 3306
GRACE_S = 30


def slurm_conf(layout: Layout, shape: Shape, *, has_freezer: bool) -> str:
    """`has_freezer`: the host has cgroups by which a signal reaches a step's tasks alone, as on a real node."""
    names = ",".join(shape.node_names)
    addresses = {machine.name: machine.address for machine in shape.machines}
    memory_per_cpu = shape.mem_per_node_mib // shape.cpus_per_node
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={addresses[name]}"
        f" Sockets=1 CoresPerSocket={shape.cpus_per_node} ThreadsPerCore=1"
        f" RealMemory={shape.mem_per_node_mib}"
        + (f" Gres=gpu:gh200:{shape.gpus_per_node}" if shape.gpus_per_node else "")
        + " State=UNKNOWN"
        for name in shape.node_names
    )
    return f"""\
ClusterName={CLUSTER_NAME}
SlurmctldHost={CONTROLLER}({addresses[CONTROLLER]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={layout.munge_socket}

StateSaveLocation={layout.controller_state}
SlurmdSpoolDir={layout.spool}/%n
SlurmctldPidFile={layout.local}/slurmctld.pid
SlurmdPidFile={layout.local}/slurmd.pid
SlurmctldLogFile={layout.logs}/slurmctld.log
SlurmdLogFile={layout.logs}/slurmd-%n.log

ProctrackType=proctrack/{"cgroup" if has_freezer else "linuxproc"}
TaskPlugin={"task/affinity,task/cgroup" if shape.constrain_cores else "task/none"}
MpiDefault=none

SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
# The nodes claim more CPUs and memory than the host may have.
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=2

ReturnToService=2
SlurmdTimeout=15
KillWait=5
OverTimeLimit=0
MessageTimeout=30

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={CONTROLLER}
# Not a password: connections to slurmdbd ignore AuthInfo and take the socket from here.
AccountingStoragePass=socket={layout.munge_socket}
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
# The only way to have memory enforced without cgroups. Proportional set size, because every Ray process
# maps the whole object store and plain RSS would count it once per process.
JobAcctGatherParams=OverMemoryKill,UsePss
JobAcctGatherFrequency=task=2

{nodes}

# A site may or may not set a default memory, and different scripts break on each.
PartitionName=workq Nodes={names} Default=YES DefMemPerCPU={memory_per_cpu} PreemptMode=OFF State=UP
PartitionName=nodefmem Nodes={names} Default=NO PreemptMode=OFF State=UP

# Jobs of `urgent` take the nodes of jobs in the two below it, which have GraceTime seconds to leave.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes={names} PriorityTier=10 PreemptMode=OFF State=UP
PartitionName=requeued Nodes={names} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} State=UP
PartitionName=cancelled Nodes={names} PriorityTier=1 PreemptMode=CANCEL GraceTime={GRACE_S} State=UP
"""


def cgroup_conf() -> str:
    """Without task/cgroup and proctrack/cgroup nobody reads it, and the host's cgroups are left alone."""
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainCores=yes\n"


def gres_conf(layout: Layout, shape: Shape) -> str:
    if not shape.gpus_per_node:
        return "AutoDetect=off\n"
    names = ",".join(shape.node_names)
    devices = f"gpu[0-{shape.gpus_per_node - 1}]" if shape.gpus_per_node > 1 else "gpu0"
    return f"AutoDetect=off\nNodeName={names} Name=gpu Type=gh200 File={layout.gpus}/{devices}\n"


def slurmdbd_conf(layout: Layout, database_password: str) -> str:
    return f"""\
DbdHost={CONTROLLER}
DbdAddr={SUBNET_PREFIX}1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
LogFile={layout.logs}/slurmdbd.log
PidFile={layout.local}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={DATABASE_PORT}
StorageUser=slurm
StoragePass={database_password}
"""


def database_init_sql(database_password: str) -> str:
    # One statement a line: that is how --init-file reads it.
    return (
        f"CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY '{database_password}';\n"
        "GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';\n"
    )
