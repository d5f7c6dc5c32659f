"""Debian's packages of the cluster, and the commands by which one sees that they are installed."""

PACKAGES = ("slurm-wlm", "slurmdbd", "mariadb-server", "munge", "iproute2", "podman", "crun", "squashfs-tools")
COMMANDS = (
    *("slurmctld", "slurmd", "slurmdbd", "sbatch", "srun", "sacct", "sacctmgr", "sinfo", "scontrol", "munged"),
    *("mariadbd", "mariadb-install-db", "mariadb-admin", "podman", "crun", "mksquashfs"),
)
