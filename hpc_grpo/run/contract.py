"""The names that launching and training agree on besides the run directory and the exit codes."""

from __future__ import annotations

DEFAULT_DRIVER = "hpc_grpo.driver.main"
"""The driver's module: the supervisor runs it with the run directory as its argument."""

EVAL_DRIVER = "hpc_grpo.driver.evaluation"
"""Runs an eval apart from training, without learners: no process is imported ahead for it (launch.templates)."""

RAY_ADDRESS_FILE_VARIABLE = "HPC_GRPO_RAY_ADDRESS_FILE"
"""A file that the supervisor writes once every node is in Ray."""

ATTEMPT_VARIABLE = "HPC_GRPO_ATTEMPT"
"""The attempt's number."""

ATTEMPT_DIR_VARIABLE = "HPC_GRPO_ATTEMPT_DIR"

NUM_NODES_VARIABLE = "HPC_GRPO_NUM_NODES"
"""Nodes of the attempt: with fewer in Ray one was lost, and training must not go on as if it had not."""

ENDS_AT_VARIABLE = "HPC_GRPO_ENDS_AT"
"""Unix time at which the allocation ends; absent where there is no limit."""

STOP_GRACE_VARIABLE = "HPC_GRPO_STOP_GRACE_S"
"""Seconds for a checkpoint after SIGTERM, from whoever starts this run and ends it; absent where nobody is in a hurry.
"""

WARNING_BEFORE_END_S = 120
"""A job asks Slurm for SIGUSR1 so long before its end. It comes up to a minute earlier than that."""

DISKS_VARIABLE = "HPC_GRPO_DISKS"
"""Says "private" to the driver of a run that not all nodes may see, and to actors on nodes that do not see it."""

SHM_DIR_VARIABLE = "HPC_GRPO_SHM_DIR"
"""The run's own folder in the node's shared memory, which the node's agent removes."""

PULSE_VARIABLE = "HPC_GRPO_PULSE"
"""The file in which the driver's pulse is kept (run/pulse.py), given by the supervisor, which reads it."""

COMPILED_DIR_VARIABLE = "HPC_GRPO_COMPILED_DIR"
"""The node's own folder of what engines compile (run/compiled.py); absent where they are not given one."""

COMPILED_ARCHIVE_VARIABLE = "HPC_GRPO_COMPILED_ARCHIVE"
"""The file beside the runs that keeps it for later jobs."""

WEIGHTS_DIR_VARIABLE = "HPC_GRPO_WEIGHTS_DIR"
"""The node's own copy of `model.path` (launch.stage.model); absent where there is none."""

COPY_VARIABLES = (COMPILED_DIR_VARIABLE, COMPILED_ARCHIVE_VARIABLE, WEIGHTS_DIR_VARIABLE)

KEEPS_ENGINES_VARIABLE = "HPC_GRPO_KEEPS_ENGINES"
"""Set where a driver that crashes is started again in the same Ray, which the supervisor ends with the attempt."""

PYTHON_VARIABLES = {"engine": "HPC_GRPO_ENGINE_PYTHON", "learner": "HPC_GRPO_LEARNER_PYTHON"}
"""By kind of actor: the command with which Ray starts its process on this node; absent where that is Python itself."""

TEMPLATE_MODULE = "hpc_grpo.template.server"
"""The program that such an actor is forked from: the agent runs it with parent, socket, kind and run directory."""
