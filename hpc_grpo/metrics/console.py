"""The console: a line for each step, on a terminal as in a job's log. `hpc-grpo watch` shows a run live."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_grpo.metrics.record import PASS_AT_1, REWARD, StepRecord, phase_seconds
from hpc_grpo.system.readable import clock, short_number


class ConsoleSink:
    def write(self, record: StepRecord) -> None:
        print(plain_line(record), flush=True)

    def close(self) -> None:
        """Do nothing: each line is written at once."""


def plain_line(record: StepRecord) -> str:
    """Return one line for a log: the position in the run, the most important numbers, and the times of the phases."""
    line = " ".join([_position(record), *(f"{label} {value}" for label, value in _headline(record))])
    shares = " ".join(f"{name} {share:.0%}" for name, share in _time_shares(record.metrics).items())
    return f"{line} | {shares}" if shares else line


def _headline(record: StepRecord) -> list[tuple[str, str]]:
    """Return the main numbers of a step as (label, text), without missing numbers."""
    metrics = record.metrics
    # GRPO's policy loss is always near zero, so show the reward. SFT has only the loss.
    quality = ("reward", REWARD, "{:.3f}".format) if REWARD in metrics else ("loss", "loss/policy", "{:.4f}".format)
    rows = (
        quality,
        ("pass@1", PASS_AT_1, "{:.3f}".format),
        ("lag", "lag/mean", "{:g}".format),
        ("mismatch", "mismatch/logprob_abs_diff_mean", "{:.0e}".format),
        ("tokens/s", "throughput/tokens_per_s", short_number),
        ("eta", "time/eta_s", clock),
    )
    return [(label, form(metrics[name])) for label, name, form in rows if name in metrics]


def _position(record: StepRecord) -> str:
    return f"Step {record.step}/{record.total_steps} epoch {record.epoch}/{record.total_epochs}"


def _time_shares(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return each phase's share of `time/step_s`, largest first, without phases below half a percent."""
    step_s = metrics.get("time/step_s", 0.0)
    shares = {phase: seconds / step_s for phase, seconds in phase_seconds(metrics).items() if step_s > 0}
    return {name: share for name, share in sorted(shares.items(), key=lambda kv: -kv[1]) if share >= 0.005}
