"""Machines inside one machine: pods, hosts with sshd, VMs with GPUs: `python3 -m tools.virtual_machines up pods`.

A *machine* has its own network, hostname, PID space, IPC and mounts (private /dev/shm, own /etc/hosts). They share
the rest of the file system, as nodes share a parallel one, except what a kind of them gives each for itself.

    layout.py      what a machine is, and every path below the state folder
    namespaces.py  the Linux calls (unshare, setns, mount)
    processes.py   which process is ours: pid and start time, so that a recycled pid is never killed
    machine.py     boot a machine, run something in it, kill it
    network.py     the cables between them
    lifecycle.py   up whole or not at all, down leaving nothing
    host.py        what must be installed, and can this host do it at all

Above these, the kinds:

    bed_layout.py  pods, hosts, VMs: their names, addresses, environments; where the files of a bed lie
    building.py    its files, network and machines
    beds.py        a bed that is up: run, kill, start, unplug, plug, what is left behind
    daemons.py     what runs on a machine for good: start, stop, freeze, thaw
    sshd.py        on hosts and VMs
    gpus.py        what a VM's nvidia-smi (nvidia_smi.py) shows
    controller.py  nats-server and PostgreSQL on the VMs' controller
    containers.py  podman, without a registry
    apptainer.py   Apptainer, from Debian's unstable
    packages.py    what of Debian's must be installed

`tools/virtual_slurm` is a Slurm cluster of such machines.
"""
