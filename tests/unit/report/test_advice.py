from __future__ import annotations

import re

import pytest

from hpc_grpo.config import Config, load_config, with_overrides
from hpc_grpo.launch.freeze import CHANGEABLE, is_listed
from hpc_grpo.launch.supervisor.transitions import DriverEnded, end_of_driver
from hpc_grpo.report import explain as tables
from hpc_grpo.report.explain import advise

RAY_ACTOR_DIED = """ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process
is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) SIGSEGV."""


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        ("crash", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of GPU memory"),
        ("crash", "RuntimeError: CUDA error: out of memory", "out of GPU memory"),
        ("crash", "ValueError: No available memory for the cache blocks.", "out of GPU memory"),
        ("crash", end_of_driver(DriverEnded(-9), signalled="", lost={}).why, "out of host memory (probably)"),
        ("crash", "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.", "out of host memory (probably)"),
        ("killed", "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=12.0", "out of host memory (probably)"),
        ("crash", "ray.exceptions.OutOfMemoryError: Task was killed due to", "out of host memory (probably)"),
        ("crash", "DefaultCPUAllocator: can't allocate memory", "out of host memory (probably)"),
        ("crash", "WeightSyncError: The weight store needs 15.00 GiB in /dev/shm/x: No space", "out of shared memory"),
        ("crash", end_of_driver(DriverEnded(-7), signalled="", lost={}).why, "out of shared memory"),
        ("crash", "OSError: [Errno 28] No space left on device: 'checkpoints/step_5'", "disk full"),
        ("bringup_failed", "OSError: [Errno 122] Disk quota exceeded", "disk full"),
        ("crash", "RuntimeError: [enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534", "disk full"),
        ("crash", "RuntimeError: basic_ios::clear: iostream error", "disk full"),
        ("crash", "checksum mismatch in bucket 3 of weight version 7 (a … b)", "damaged weights"),
        ("config", "error: The reward failed for 6 of 6 prompts, more than", "reward error"),
        ("config", "error: Reward 'x.py:nan' returned nan for completion 0", "reward error"),
        ("config", "error: Reward 'x' does not exist. Built in: correctness", "reward error"),
        ("crash", "error: The gradient of the policy in optimizer step 7 is not finite (nan).", "diverged"),
        ("config", "error: model.path = 'm': no tokenizer can be loaded from it", "configuration error"),
        ("crash", "Watchdog caught collective operation timeout: WorkNCCL(", "nodes stopped talking (NCCL or Gloo)"),
        ("crash", "NCCL error: unhandled system error", "nodes stopped talking (NCCL or Gloo)"),
        ("crash", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer", "nodes stopped talking (NCCL or Gloo)"),
        ("crash", "Timed out waiting 1800000ms for recv operation", "nodes stopped talking (NCCL or Gloo)"),
        ("killed", "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***", "walltime"),
        ("walltime", "", "walltime"),
        ("killed", "slurmstepd: error: *** JOB 12 CANCELLED DUE TO NODE FAILURE ***", "node lost"),
        ("node_lost", "NCCL error: unhandled system error", "node lost"),
        ("killed", "", "killed without a word"),
        ("bringup_failed", "After 300 s not in Ray: n2.", "nodes did not come up"),
        ("cancelled", "KeyboardInterrupt: SIGKILL", "cancelled"),
        ("resumable", "SIGKILL", "stopped in time"),
        ("resumable", "Stopping after step 3: the disk is full (time limit). No later step is saved.", "disk full"),
        ("cancelled", "error: x\nA stop was requested while waiting: the disk is full (SIGTERM).", "disk full"),
        ("resumable", "a reward said: the disk is full of stars", "stopped in time"),
        ("stopped", "", "stopped by request"),
        ("crash", RAY_ACTOR_DIED, "an engine, learner or grader died"),
        ("crash", "KeyError: 'x'", "not recognised"),
        ("a kind of the future", "", "not recognised"),
    ],
)
def test_the_cause_follows_from_the_exit_kind_and_from_what_was_printed(kind: str, text: str, cause: str) -> None:
    advice = advise(kind, "", text)
    assert advice is not None
    assert advice.cause == cause
    assert advice.todo.endswith(".")


def test_the_first_text_with_a_known_pattern_decides() -> None:
    advice = advise("crash", "No space left on device", "CUDA out of memory")
    assert advice is not None
    assert advice.cause == "disk full"


def test_a_complete_run_needs_no_advice() -> None:
    assert advise("complete", "CUDA out of memory") is None


@pytest.mark.parametrize("kind", ["resumable", "stopped", "cancelled", "node_lost", "killed"])
def test_an_attempt_that_was_no_job_is_not_sent_to_a_scheduler(kind: str) -> None:
    advice = advise(kind, "", has_jobs=False)
    assert advice is not None
    assert not re.search("resume RUN|job|[Ss]lurm", advice.todo)


def test_a_corrected_reward_is_resumed_with_the_option_that_accepts_it() -> None:
    advice = advise("config", "error: Reward 'x.py:nan' returned nan for completion 0")
    assert advice is not None
    assert "Then {command} --accept-changes, or KEY=VALUE" in advice.todo


TODOS = [
    advice.todo for table in (tables._BY_KIND, tables._WITHOUT_JOBS, tables._OTHERWISE) for advice in table.values()
]
TODOS += [advice.todo for advice in tables._BY_PATTERN.values()] + [tables._UNKNOWN.todo]
KEY = re.compile(rf"\b((?:{'|'.join(Config.model_fields)})\.\w+(?:\.\w+)*)")
NEEDS_A_NEW_RUN = {
    "model.path",
    "run.name",
    "train.lr",
    "train.max_grad_norm",
    "train.offload_optimizer",
    "train.zero_stage",
}


@pytest.mark.parametrize("todo", TODOS)
def test_only_the_placeholder_names_the_command_that_starts_the_run(todo: str) -> None:
    assert not re.search("hpc-grpo (submit|train)", todo.format(command="COMMAND"))


@pytest.mark.parametrize("todo", [todo for todo in TODOS if KEY.search(todo)])
def test_what_it_says_to_change_exists_and_may_change(todo: str) -> None:
    assert "  " not in todo
    keys = [key.replace(".N.", ".0.") for key in KEY.findall(todo)]
    before = load_config("local/debug", ["rewards=[{name: correctness}]"])
    for key in keys:
        with_overrides(before, [f"{key}={value_of(before, key)}"])  # raises for a key that does not exist
    kept = {key for key in keys if not is_listed(key, CHANGEABLE)}
    assert kept <= NEEDS_A_NEW_RUN
    assert not kept or "new run.name" in " ".join(todo.split())


def value_of(config: Config, key: str) -> object:
    """The value of a key; of one that a free-form section lacks, 1."""
    value: object = config.model_dump(mode="json")
    for part in key.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part, 1)  # type: ignore[attr-defined]
    return "null" if value is None else value
