"""A real multi-node Slurm cluster inside one machine: `python3 -m tools.virtual_slurm up --nodes 2`.

The controller, the login node and every compute node are *machines*: each has its own network, hostname,
PID space, IPC and mounts (private /dev/shm, own /etc/hosts and /etc/slurm). They share the rest of the file
system, as nodes share a parallel one. Slurm, munge, slurmdbd and MariaDB are the distribution's own; only the
GPUs are fake.

    layout.py      what there is and where: machines, addresses, every path below the state folder
    slurm_conf.py  the configuration files, as pure functions
    cgroups.py     control groups of the nodes: tracked processes, real cores
    services.py    the daemons
    cluster.py     up, down, kill-node, start-node, status
    packages.py    what must be installed

The machines themselves are `tools/virtual_machines`.
"""
