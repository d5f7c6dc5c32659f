"""The names that launching and training agree on besides the run directory and the exit codes."""

from __future__ import annotations

DEFAULT_DRIVER = "hpc_grpo.driver.main"
"""The default driver module. The supervisor runs it with the run directory as argument."""

EVAL_DRIVER = "hpc_grpo.driver.evaluation"
"""The driver module of an eval. It starts no learners."""

RAY_ADDRESS_FILE_VARIABLE = "HPC_GRPO_RAY_ADDRESS_FILE"
"""A file that the supervisor writes once every node is in Ray."""

ATTEMPT_VARIABLE = "HPC_GRPO_ATTEMPT"
"""The attempt's number."""

ATTEMPT_DIR_VARIABLE = "HPC_GRPO_ATTEMPT_DIR"

NUM_NODES_VARIABLE = "HPC_GRPO_NUM_NODES"
"""Nodes of the attempt. If Ray has fewer, a node was lost, and training must not continue."""

ENDS_AT_VARIABLE = "HPC_GRPO_ENDS_AT"
"""Unix time at which the allocation ends. Unset: no limit."""

STOP_GRACE_VARIABLE = "HPC_GRPO_STOP_GRACE_S"
"""Seconds for a checkpoint after SIGTERM, set by the program that starts and ends this run. Unset: no limit."""

WARNING_BEFORE_END_S = 120
"""Seconds before its end at which a job asks Slurm for SIGUSR1. The signal comes up to a minute earlier."""

DISKS_VARIABLE = "HPC_GRPO_DISKS"
"""Set to "private" for the driver if not all nodes see the run directory, and for actors on nodes that do not."""

SHM_DIR_VARIABLE = "HPC_GRPO_SHM_DIR"
"""The run's own folder in the node's shared memory. The node's agent removes the folder."""

PULSE_VARIABLE = "HPC_GRPO_PULSE"
"""Path of the driver's pulse file (run/pulse.py). The supervisor sets the variable and reads the file."""

COMPILED_DIR_VARIABLE = "HPC_GRPO_COMPILED_DIR"
"""The node's folder of compiled kernels (run/compiled.py). Unset: the node has none."""

COMPILED_ARCHIVE_VARIABLE = "HPC_GRPO_COMPILED_ARCHIVE"
"""The archive beside the runs that keeps compiled kernels for later jobs."""

WEIGHTS_DIR_VARIABLE = "HPC_GRPO_WEIGHTS_DIR"
"""The node's copy of `model.path` (launch.stage.model). Unset: no copy."""

COPY_VARIABLES = (COMPILED_DIR_VARIABLE, COMPILED_ARCHIVE_VARIABLE, WEIGHTS_DIR_VARIABLE)

KEEPS_ENGINES_VARIABLE = "HPC_GRPO_KEEPS_ENGINES"
"""Set if a crashed driver is restarted in the same Ray. The supervisor ends this Ray with the attempt."""

PYTHON_VARIABLES = {"engine": "HPC_GRPO_ENGINE_PYTHON", "learner": "HPC_GRPO_LEARNER_PYTHON"}
"""Kind of actor -> the variable with the command that starts its process on this node. Unset: the driver's Python."""

TEMPLATE_MODULE = "hpc_grpo.template.server"
"""The program that actors are forked from. The agent runs it with parent, socket, kind and run directory."""
