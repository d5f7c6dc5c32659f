"""Advise what to do about how an attempt ended: a table, and the function that looks it up."""

from __future__ import annotations

import re
from typing import NamedTuple


class Advice(NamedTuple):
    """What happened, and what the user does about it."""

    cause: str
    todo: str


_BY_KIND = {
    "resumable": Advice(
        "stopped in time",
        "Nothing is wrong: it wrote a checkpoint. If no job of its chain waits, hpc-grpo resume RUN continues.",
    ),
    "stopped": Advice("stopped by request", "hpc-grpo resume RUN continues from its checkpoint."),
    "cancelled": Advice(
        "cancelled",
        "If that was not you, ask who ended the job; hpc-grpo resume RUN continues from the last checkpoint.",
    ),
    "walltime": Advice(
        "walltime",
        "The time limit came before the last checkpoint; steps since then are trained again. "
        "Save more often or ask for more time: hpc-grpo resume RUN checkpoint.every_steps=N launch.slurm.time_min=MIN.",
    ),
    "node_lost": Advice(
        "node lost",
        "A machine failed, not the run: hpc-grpo resume RUN, or the next job of its chain, continues from the last "
        "checkpoint. If it is the same node again: hpc-grpo resume RUN launch.slurm.extra.exclude=NODE, with all nodes "
        "to keep off.",
    ),
}
"""Looked up first: what the log shows besides is a consequence."""

_WITHOUT_JOBS = {
    "resumable": Advice("stopped in time", "Nothing is wrong: it wrote a checkpoint. The same command continues."),
    "stopped": Advice("stopped by request", "The same command continues from its checkpoint."),
    "cancelled": Advice(
        "cancelled", "If that was not you, ask who ended it; the same command continues from the last checkpoint."
    ),
    "node_lost": Advice(
        "node lost",
        "A machine failed, not the run: the same command continues from the last checkpoint, on every node whose "
        "worker does not wait for the head. launch.min_nodes continues with fewer nodes than launch.num_nodes.",
    ),
    "killed": Advice(
        "killed without a word",
        "Nothing could be recorded: the node died, or somebody killed the process. The same command continues from "
        "the last checkpoint.",
    ),
}
"""Looked up before all others where a run has no jobs: on pods, on hosts, on a workstation."""

_BY_PATTERN = {
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|No available memory for the cache blocks|less than desired GPU memory utilization": Advice(
        "out of GPU memory",
        "Learner: lower train.max_tokens_per_microbatch or train.logprob_chunk_tokens; more nodes "
        "(launch.num_nodes) shard the optimizer further. Engine: lower engine.gpu_memory_utilization or "
        "engine.max_num_seqs. Then hpc-grpo resume RUN KEY=VALUE. If that is not enough, train.zero_stage=3 and "
        "train.offload_optimizer=cpu hold less on the GPU; a run with a checkpoint keeps both, so that they "
        "need a new run.name.",
    ),
    r"weight store needs|SIGBUS|/dev/shm[^\n]*No space left|No space left[^\n]*/dev/shm": Advice(
        "out of shared memory",
        "Less must fit in the node's /dev/shm: hpc-grpo resume RUN weights.num_buffers=1, or with a smaller "
        "launch.object_store_gib.",
    ),
    r"SIGKILL(?! by OOM killer)|oom[-_]kill|OUT_OF_MEMORY|ray\.exceptions\.OutOfMemoryError"
    r"|node running low on memory|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator|\bMemoryError\b": Advice(
        "out of host memory (probably)",
        "A process was killed, most often because the job used more memory than it asked for. Ask for more "
        "(launch.slurm.extra.mem=0: all of the node), or use less: launch.object_store_gib, weights.num_buffers=1, "
        "fewer engine.engines_per_node. Then hpc-grpo resume RUN KEY=VALUE. Without a checkpoint, or with a new "
        "run.name, also train.offload_optimizer=none if the GPU has room.",
    ),
    # The second line: torch.save's, without the errno.
    r"No space left on device|Disk quota exceeded|ENOSPC|EDQUOT"
    r"|inline_container\.cc[^\n]*unexpected pos|basic_ios::clear: iostream error": Advice(
        "disk full",
        "Free space where the run directory is, or raise your quota. Then hpc-grpo resume RUN, or with a lower "
        "checkpoint.keep_last=N, continues from the last whole checkpoint.",
    ),
    r"checksum mismatch": Advice(
        "damaged weights",
        "Bytes changed between a learner and an engine. Once may be chance, and the run continues from its checkpoint; "
        "twice on one node is bad memory: exclude it (launch.slurm.extra.exclude=NODE) and tell the site.",
    ),
    r"The reward failed for|Reward '[^\n]*' (returned|does not|must be|raised)|RewardError|\breward '[^\n]*': ": Advice(
        "reward error",
        "The reward function failed; its own error is above. Mend it, raise rewards.N.timeout_s if it is only slow, or "
        "allow more failures: grading.max_failed_fraction. Then hpc-grpo resume RUN KEY=VALUE, with what you raised.",
    ),
    r"gradient of .* is not finite": Advice(
        "diverged",
        "A run with a checkpoint keeps its train.lr: give a new run.name and a lower train.lr or "
        "train.max_grad_norm. Its model.path may be an export of this run, if checkpoint.export_every_steps made one.",
    ),
    r"NCCL[^\n]*(tim(e|ed)[ -]?out|unhandled|remote process|system error|abort)|collective operation timeout"
    r"|DistBackendError|ProcessGroupNCCL|gloo[^\n]*(timed out|connection|closed by peer)|Connection closed by peer"
    r"|weight group broke|Timed out waiting \d+ms": Advice(
        "nodes stopped talking (NCCL or Gloo)",
        "One process died or the network failed, and the others waited in vain: look for the first error with "
        "hpc-grpo logs RUN --node NODE. On several nodes name the network: launch.interface. "
        "If it is always one node, exclude it: launch.slurm.extra.exclude=NODE.",
    ),
    r"DUE TO TIME LIMIT|end of its walltime": _BY_KIND["walltime"],
    r"NODE_FAIL|DUE TO NODE FAILURE": _BY_KIND["node_lost"],
    # Last: Ray always names an OOM killer among the causes.
    r"potential root causes|ActorDiedError|WorkerCrashedError": Advice(
        "an engine, learner or grader died",
        "It left no error of its own; most often such a process was killed because the node's memory was used up. "
        "Its last output is among the files that hpc-grpo logs RUN --node NODE lists.",
    ),
}
"""Searched in order, in one text after the other; upper and lower case are the same."""

_OTHERWISE = {
    "config": Advice(
        "configuration error",
        "Trying again gives the same. Change what the message names: hpc-grpo resume RUN KEY=VALUE, which says "
        "whether a key may not change and needs a new run.name.",
    ),
    "bringup_failed": Advice(
        "nodes did not come up",
        "See hpc-grpo logs RUN --node NODE for each node named. A slow file system needs launch.bringup_deadline_s; "
        "a wrong network launch.interface; a broken node launch.slurm.extra.exclude=NODE.",
    ),
    "killed": Advice(
        "killed without a word",
        "Nothing could be recorded: the node died, or Slurm or a person killed the job. Slurm's output of the job may "
        "say which; hpc-grpo resume RUN, or the next job of its chain, continues from the last checkpoint.",
    ),
}
_UNKNOWN = Advice(
    "not recognised",
    "Read the error above, if there is one, and hpc-grpo logs RUN. hpc-grpo resume RUN tries again from the last "
    "checkpoint; the same error twice is a bug in the reward, the model or hpc-grpo.",
)


def advise(kind: str, *texts: str, has_jobs: bool = True) -> Advice | None:
    """Return what to do about an attempt that ended as `kind`: an exit kind, or `walltime` or `killed`.

    Without jobs (`has_jobs`), the advice sends nobody to a scheduler. `texts` are what the attempt left, the clearest
    first: its last error, why it ended, the end of its log. Returns None for a run that is complete.

    >>> advise("crash", "torch.OutOfMemoryError: CUDA out of memory.").cause
    'out of GPU memory'
    """
    if kind == "complete":
        return None
    if advice := ({} if has_jobs else _WITHOUT_JOBS).get(kind) or _BY_KIND.get(kind):
        return advice
    found = (advice for text in texts for pattern, advice in _BY_PATTERN.items() if re.search(pattern, text, re.I))
    return next(found, _OTHERWISE.get(kind, _UNKNOWN))
