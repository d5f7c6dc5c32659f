"""What a step looks like on a terminal or in a log file: pure functions from a record to text."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.system.readable import clock, short_number

REWARD = "reward/mean"
PASS_AT_1 = "eval/pass@1"
_ETA = "time/eta_s"
_NO_PHASES = ("time/step_s", _ETA)
_PHASE_NAMES = {"generate_wait": "generate"}


def plain_line(record: StepRecord) -> str:
    """One line for a log: place in the run, the numbers a reader looks for first, and where the time went."""
    numbers = [f"{label} {value}" for label, value in headline(record)]
    line = " ".join([place(record), *numbers])
    shares = " ".join(f"{name} {share:.0%}" for name, share in time_shares(record.metrics).items())
    return f"{line} | {shares}" if shares else line


def headline(record: StepRecord) -> list[tuple[str, str]]:
    """The few numbers of a step that are shown, as (label, text); those it does not have are left out."""
    metrics = record.metrics
    # The policy loss of GRPO is near zero by construction and tells nothing; that of SFT is all there is.
    quality = ("reward", REWARD, "{:.3f}") if REWARD in metrics else ("loss", "loss/policy", "{:.4f}")
    shown = []
    for label, name, form in (
        quality,
        ("pass@1", PASS_AT_1, "{:.3f}"),
        ("lag", "lag/mean", "{:g}"),
        ("mismatch", "mismatch/logprob_abs_diff_mean", "{:.0e}"),
    ):
        if name in metrics:
            shown.append((label, form.format(metrics[name])))
    if "throughput/tokens_per_s" in metrics:
        shown.append(("tokens/s", short_number(metrics["throughput/tokens_per_s"])))
    if _ETA in metrics:
        shown.append(("eta", clock(metrics[_ETA])))
    return shown


def place(record: StepRecord) -> str:
    """`Epoch 1/5 step 6/19 global step 6`; the eval before the first step is `Epoch 1/5 global step 0`."""
    epoch = f"Epoch {record.epoch}/{record.total_epochs}"
    if record.step == 0:
        return f"{epoch} global step 0"
    return f"{epoch} step {record.step_in_epoch}/{record.steps_per_epoch} global step {record.step}"


def time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Each phase's share of `time/step_s`, largest first; phases below half a percent are left out."""
    step_s = metrics.get("time/step_s", 0.0)
    if step_s <= 0:
        return {}
    shares = {}
    for name, seconds in metrics.items():
        if name.startswith("time/") and name.endswith("_s") and name not in _NO_PHASES:
            phase = name.removeprefix("time/").removesuffix("_s")
            shares[_PHASE_NAMES.get(phase, phase)] = seconds / step_s
    return {name: share for name, share in sorted(shares.items(), key=lambda kv: -kv[1]) if share >= 0.005}
