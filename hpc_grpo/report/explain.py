"""Explain the end of each attempt of a run, and what to do."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hpc_grpo.launch.place.slurm.text import own_lines
from hpc_grpo.report.logs import DRIVER_LOG, tail, why_no_attempt
from hpc_grpo.report.status import RunRecords, ended_by_time_limit, read_records, summarize
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.last_error import last_error, reason_to_stop
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import UNKNOWN, duration, moment, printable

_READ = {"num_lines": 400, "max_bytes": 1 << 16}
_END_LINES = 40
"""Lines at the end of a log that are searched for patterns if no error message matches."""

_DUE_TO = "DUE TO "
"""Slurm's words for a job that Slurm itself cancelled: the time limit, a node failure, preemption."""

_NO_ERROR = ("complete", "resumable", "stopped")
_WIDTH = 110


class Advice(NamedTuple):
    """A cause and its fix. {command} in `todo` stands for the command that resumes the run."""

    cause: str
    todo: str


@dataclass(frozen=True)
class Explanation:
    """`kind` is the attempt's exit kind, or `walltime`, `killed` or `running`. `num_steps` are the steps it added.

    `error` is the last error in its log, or why its driver stopped early; it may be "".
    """

    record: AttemptRecord
    kind: str
    duration_s: float | None
    num_steps: int | None
    error: str
    advice: Advice | None

    def __str__(self) -> str:
        record = self.record
        gained = UNKNOWN if self.num_steps is None else f"{self.num_steps}, from step {record.first_step}"
        code = "" if record.exit_code is None else f" (exit code {record.exit_code})"
        running = f"not yet: {record.signalled} asked it to" if record.signalled else "not yet: it is running"
        is_repeated = "\n" not in self.error and self.error.removeprefix("error: ").rstrip(".") in record.why
        fields = [
            ("time", f"{moment(record.started_at)}, for {duration(self.duration_s)}"),
            ("nodes", f"{len(record.nodes)}: {', '.join(record.nodes) or UNKNOWN}"),
            ("steps", gained),
            ("ended", running if self.kind == "running" else f"{self.kind}{code}"),
            ("why", record.why),
            *(("lost node", f"{node}: {why}") for node, why in record.lost_nodes.items()),
            *(("stood still", why) for why in record.late),
            *(("restarted", why) for why in record.restarts),
            ("said", "" if is_repeated else self.error),
        ]
        if self.advice is not None:
            fields += [("cause", self.advice.cause), ("what to do", self.advice.todo)]
        title = f"Attempt {record.attempt} (job {record.job_id})"
        return "\n".join([title, *(_field(name, text) for name, text in fields if text)])


def explain_attempts(records: RunRecords, now: float) -> list[Explanation]:
    """Explain every attempt in order, from the end of its logs; `now` is in unix seconds."""
    return [_explain(records, index, now) for index in range(len(records.attempts))]


def explained_facts(run: RunDir) -> dict[str, Any]:
    """Return a run's status and how each of its attempts ended. `cause` and `todo` are None without advice."""
    records, now = read_records(run), time.time()
    attempts = [
        {
            **asdict(each.record),
            "ended_as": each.kind,
            "duration_s": each.duration_s,
            "num_steps": each.num_steps,
            "error": each.error,
            "cause": each.advice.cause if each.advice else None,
            "todo": each.advice.todo if each.advice else None,
        }
        for each in explain_attempts(records, now)
    ]
    return {**asdict(summarize(records, now)), "attempts": attempts, "chain_ended": records.chain.ended or None}


def explained(run: RunDir) -> Iterator[str]:
    """Yield paragraphs about the end of every attempt of a run, what to do, and the run's current state."""
    records = read_records(run)
    for explanation in explain_attempts(records, time.time()):
        yield f"{printable(str(explanation))}\n"
    recorded = {attempt.attempt for attempt in records.attempts}
    unrecorded = [path for number, path in run.attempt_dirs().items() if number not in recorded]
    for path in unrecorded:
        yield f"{path.relative_to(run.path)}: its attempt.json is missing or damaged. Was the disk full?\n"
    if not records.attempts and not unrecorded:
        yield why_no_attempt(records)
    if records.chain.ended:
        yield f"No further job of its chain: {records.chain.ended}"
    summary = summarize(read_records(run), time.time())  # read again: reading its logs may have taken a while
    yield f"{summary.run} is now: {summary.state}"


def _explain(records: RunRecords, index: int, now: float) -> Explanation:
    record = records.attempts[index]
    is_running = records.is_running(record, now)
    sign = records.last_sign_of_life() if record is records.newest else None
    end = record.ended_at if record.ended_at is not None else now if is_running else sign
    printed = _printed_by_slurm(records, record.job_id)
    kind = "running" if is_running else _kind(record, sign, printed)
    log = tail(records.run.attempt(record.attempt, record.job_id) / DRIVER_LOG, **_READ)
    error, printed = (reason_to_stop(log), "") if kind in _NO_ERROR else (last_error(log), printed)
    texts = (printed, error, record.why, "\n".join(log.splitlines()[-_END_LINES:]))
    advice = None if is_running else advise(kind, *texts, has_jobs=record.source == "slurm")
    return Explanation(
        record=record,
        kind=kind,
        duration_s=None if end is None else end - record.started_at,
        num_steps=_num_steps(records, index),
        error=error or printed,
        advice=advice and advice._replace(todo=advice.todo.format(command=records.start_command(record, "RUN"))),
    )


def _kind(record: AttemptRecord, sign: float | None, printed: str) -> str:
    """Return how an attempt ended. The record of a killed attempt does not say so, nor who killed it."""
    if record.exit_kind in ("running", "cancelled") and ended_by_time_limit(record, sign):
        return "walltime"
    if record.was_killed_in_teardown and _DUE_TO not in printed:
        return "cancelled"
    if record.exit_kind != "running":
        return record.exit_kind
    return "node_lost" if record.lost_nodes else "killed"


def _num_steps(records: RunRecords, index: int) -> int | None:
    """Return the steps that this attempt added to the run, without steps that were lost again."""
    record, state = records.attempts[index], records.state
    if index + 1 < len(records.attempts):
        return records.attempts[index + 1].first_step - record.first_step
    if state is None:
        return None
    return max(0, state.step - record.first_step) if state.attempt == record.attempt else 0


def _printed_by_slurm(records: RunRecords, job_id: str) -> str:
    """Return Slurm's own lines at the end of a job's output: the only trace of some kills."""
    path = records.job_output(job_id)
    try:
        lines = tail(path, **_READ).splitlines() if path.is_file() else []
    except OSError:  # the user may have put the file anywhere
        return ""
    return "\n".join(own_lines(lines, job_id))[-2000:]


def _field(name: str, text: str) -> str:
    """Return a named field, wrapped; an error keeps its lines."""
    lines = text.splitlines()
    if name != "said":
        lines = [part for line in lines for part in (textwrap.wrap(line, _WIDTH, break_long_words=False) or [""])]
    return "\n".join([f"  {name:<11}{lines[0]}", *(f"{'':13}{line}" for line in lines[1:])])


def advise(kind: str, *texts: str, has_jobs: bool = True) -> Advice | None:
    """Return what to do about an attempt that ended as `kind`: an exit kind, or `walltime` or `killed`.

    Without jobs (`has_jobs`), the advice names no scheduler command. `texts` are the attempt's texts, the clearest
    first: its last error, why it ended, the end of its log. Returns None for a run that is complete.

    >>> advise("crash", "torch.OutOfMemoryError: CUDA out of memory.").cause
    'out of GPU memory'
    """
    if kind == "complete":
        return None
    if kind in ("resumable", "cancelled") and any(_STOPPED_BY_DISK.search(text) for text in texts):
        return _DISK_FULL
    if advice := ({} if has_jobs else _WITHOUT_JOBS).get(kind) or _BY_KIND.get(kind):
        return advice
    found = (advice for text in texts for pattern, advice in _BY_PATTERN.items() if re.search(pattern, text, re.I))
    return next(found, _OTHERWISE.get(kind, _UNKNOWN))


_DISK_FULL = Advice(
    "disk full",
    "Free space where the run directory is, or raise your quota. Then {command}, or with a lower "
    "checkpoint.keep_last=N, continues from the last complete checkpoint.",
)

_STOPPED_BY_DISK = re.compile(r"^(Stopping after step \d+|A stop was requested while waiting): the disk is full", re.M)

_BY_KIND = {
    "resumable": Advice(
        "stopped in time",
        "Nothing is wrong. If no job of its chain waits, {command} continues from its last checkpoint.",
    ),
    "stopped": Advice("stopped by request", "{command} continues from its checkpoint."),
    "cancelled": Advice(
        "cancelled", "If that was not you, ask who ended the job. {command} continues from the last checkpoint."
    ),
    "walltime": Advice(
        "walltime",
        "The time limit came before the last checkpoint; later steps are trained again. Save more often or ask for "
        "more time: {command} checkpoint.every=N launch.slurm.time_min=MIN.",
    ),
    "node_lost": Advice(
        "node lost",
        "A machine failed, not the run. {command}, or the next job of its chain, continues from the last "
        "checkpoint. To avoid a node that fails again: {command} launch.slurm.extra.exclude=NODE.",
    ),
}
"""Looked up before patterns: with these kinds, messages in the log are only consequences."""

_WITHOUT_JOBS = {
    "resumable": Advice("stopped in time", "Nothing is wrong. The same command continues from its last checkpoint."),
    "stopped": Advice("stopped by request", "The same command continues from its checkpoint."),
    "cancelled": Advice(
        "cancelled", "If that was not you, ask who ended it. The same command continues from the last checkpoint."
    ),
    "node_lost": Advice(
        "node lost",
        "A machine failed, not the run: the same command continues from the last checkpoint, on every node whose "
        "worker does not wait for the head. launch.min_nodes continues with fewer nodes than launch.num_nodes.",
    ),
    "killed": Advice(
        "killed without a word",
        "Nothing could be recorded: the node died, or somebody killed the process. The same command continues from the "
        "last checkpoint.",
    ),
}
"""Looked up first for a run without jobs: on pods, on hosts, on a workstation."""

_BY_PATTERN = {
    r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|No available memory for the cache blocks|less than desired GPU memory utilization": Advice(
        "out of GPU memory",
        "Learner: lower train.max_tokens_per_microbatch; more nodes (launch.num_nodes) shard the optimizer further. "
        "Engine: lower engine.vllm.gpu_memory_utilization or engine.vllm.max_num_seqs. Then {command} "
        "KEY=VALUE. With a new run.name, train.zero_stage=3 and train.offload_optimizer=cpu hold less on the GPU.",
    ),
    r"weight store needs|SIGBUS|/dev/shm[^\n]*No space left|No space left[^\n]*/dev/shm": Advice(
        "out of shared memory",
        "Less must fit in the node's /dev/shm: {command} launch.object_store_gib=GIB, with a smaller one.",
    ),
    r"SIGKILL(?! by OOM killer)|oom[-_]kill|OUT_OF_MEMORY|ray\.exceptions\.OutOfMemoryError"
    r"|exceeded (job |virtual )*memory limit|task \d+: Out Of Memory"
    r"|node running low on memory|Cannot allocate memory|std::bad_alloc|DefaultCPUAllocator|\bMemoryError\b": Advice(
        "out of host memory (probably)",
        "A process was killed, most often because the job used more memory than it asked for. Ask for more "
        "(launch.slurm.extra.mem=0: all of the node), or use less: launch.object_store_gib, or fewer "
        "engine.engines_per_node. Then {command} KEY=VALUE. With a new run.name, also "
        "train.offload_optimizer=none if the GPU has room.",
    ),
    # The second line matches errors of torch.save, which lack the errno.
    r"No space left on device|Disk quota exceeded|ENOSPC|EDQUOT"
    r"|inline_container\.cc[^\n]*unexpected pos|basic_ios::clear: iostream error": _DISK_FULL,
    r"checksum mismatch": Advice(
        "damaged weights",
        "Bytes changed between a learner and an engine. Once may be chance, and the run continues from its checkpoint. "
        "Twice on one node is bad memory: exclude it (launch.slurm.extra.exclude=NODE) and tell the site.",
    ),
    r"The [\w ]+ failed for \d"
    r"|Reward '[^\n]*' (returned|does not|must be|raised)|RewardError|\breward '[^\n]*': ": Advice(
        "reward error",
        "The reward function failed; its own error is above. Fix it, raise rewards.N.timeout_s if it is only slow, or "
        "allow more failures: grading.max_failed_fraction. Then {command} --accept-changes, or KEY=VALUE with the "
        "changed key.",
    ),
    r"gradient of .* is not finite": Advice(
        "diverged",
        "A run with a checkpoint keeps its train.lr: give a new run.name and a lower train.lr or train.max_grad_norm. "
        "Its model.path may be an export of this run, if checkpoint.export_every made one.",
    ),
    r"NCCL[^\n]*(tim(e|ed)[ -]?out|unhandled|remote process|system error|abort)|collective operation timeout"
    r"|DistBackendError|ProcessGroupNCCL|gloo[^\n]*(timed out|connection|closed by peer)|Connection closed by peer"
    r"|weight group broke|Timed out waiting \d+ms": Advice(
        "nodes stopped talking (NCCL or Gloo)",
        "One process died or the network failed, and the others waited in vain: look for the first error with hpc-grpo "
        "logs RUN --node NODE. On several nodes set the network: launch.interface. If the same node fails each time, "
        "exclude it: launch.slurm.extra.exclude=NODE.",
    ),
    r"DUE TO TIME LIMIT|end of its walltime": _BY_KIND["walltime"],
    r"NODE_FAIL|DUE TO NODE FAILURE": _BY_KIND["node_lost"],
    # Last: Ray always names an OOM killer among the causes.
    r"potential root causes|ActorDiedError|WorkerCrashedError": Advice(
        "an engine, learner or grader died",
        "It left no error of its own; most often such a process was killed because the node's memory was used up. Its "
        "last output is among the files that hpc-grpo logs RUN --node NODE lists.",
    ),
}
"""Pattern -> advice. The first match counts, in one text after the other, ignoring case."""

_OTHERWISE = {
    "config": Advice(
        "configuration error",
        "A retry gives the same error. Change what the message names: {command} KEY=VALUE. The command "
        "says if a key may not change and needs a new run.name.",
    ),
    "bringup_failed": Advice(
        "nodes did not come up",
        "See hpc-grpo logs RUN --node NODE for each node named. A slow file system needs launch.bringup_deadline_s; a "
        "wrong network launch.interface; a broken node launch.slurm.extra.exclude=NODE.",
    ),
    "killed": Advice(
        "killed without a word",
        "Nothing could be recorded: the node died, or Slurm or a person killed the job. Slurm's output of the job may "
        "say which. {command}, or the next job of its chain, continues from the last checkpoint.",
    ),
}
_UNKNOWN = Advice(
    "not recognised",
    "Read the error above, if there is one, and hpc-grpo logs RUN. {command} tries again from the last "
    "checkpoint. The same error twice is a bug in the reward, the model or hpc-grpo.",
)
