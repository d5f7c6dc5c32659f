"""The driver's loop with simulated engines and learners: how near the pipeline's bound it comes, and what it costs.

`python benchmarks/driver_scale.py [--minutes 60]`: first the time of a step beside the bound, for lags and cost ratios,
with long-tailed lengths; then 1,000 engines on 250 nodes at 5,000 completions/s, for so many simulated minutes. The
loop, batches, scheduler and metrics are the driver's own (`hpc_grpo/simulate`); Ray's share of its work is not in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from common import load_average, print_table

import hpc_grpo.simulate.cluster as cluster_of
from hpc_grpo.config import Config
from hpc_grpo.simulate.cluster import Setting, SimulatedEngine, SimulatedRun
from hpc_grpo.simulate.rates import LOGNORMAL, DrawnStep, Rate, Rates, Sequences, cut_lengths, draw_lengths

MEAN_TOKENS, LONGEST, GROUP = 400.0, 2000, 16
SEQUENCES = Sequences(LOGNORMAL, 16, leaves_out=False)


def make_config(prompts: int, lag: int, slots: int) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "driver-scale"},
            "model": {"path": "m"},
            "data": {"train": {"path": "d.jsonl"}},
            "rollout": {
                "prompts_per_step": prompts,
                "group_size": GROUP,
                "max_new_tokens": LONGEST,
                "max_policy_lag": lag,
                "logged_fraction": 0.0,
            },
            "engine": {"vllm": {"max_num_seqs": slots}},
            "train": {"total_steps": 1},
        }
    )


def make_rates(decode_s: float, train_s: float) -> Rates:
    """Return rates with which a decode step takes `decode_s` and a step of the learners `train_s`, publish and all."""
    return Rates(Rate(decode_s, 0.0), Rate(train_s, 0.0), (DrawnStep(MEAN_TOKENS),), SEQUENCES)


def pipeline(num_steps: int) -> None:
    """Compare the time of a step with the bound, for lags and cost ratios.

    With S seconds of sampling a step when all slots are full, T of training, and L until the last completion of a step
    on idle engines, a step takes S, T or, where the lag bound k lets a step begin k steps early, (L + T) / (k + 1).
    """
    nodes, engines, per_engine, slots = 8, 3, 16, 16
    prompts = nodes * engines * per_engine
    rows = []
    for sampling, training in ((3, 1), (1, 1), (1, 3)):
        for lag in (0, 1, 2, 4):
            config = make_config(prompts, lag, slots)
            rates = make_rates(sampling / (per_engine * GROUP * mean_tokens() / slots), training)
            cluster = SimulatedRun(config, rates, Setting(nodes, 1, engines, lag))
            step_s = mean_step_s(cluster, num_steps)
            bounds = (sampling, training, (last_completion_s(cluster, prompts) + training) / (lag + 1))
            bound = bounds[2] if lag == 0 else max(bounds)
            rows.append([f"{sampling}:{training}", str(lag), *(f"{own:.2f}" for own in bounds)])
            idle = engines_idle(cluster)
            rows[-1] += [f"{step_s:.2f}", f"{step_s / bound:.3f}", f"{idle:.1%}"]
    title = f"seconds of a step, simulated: {nodes} nodes of {engines} engines, {prompts} x {GROUP} rollouts"
    heads = ["sampling:training", "lag", "S", "T", "(L + T)/(k + 1)", "step", "step / bound", "engines idle"]
    print_table(title, heads, rows)


def straggler(num_steps: int) -> None:
    """Compare groups that go to engines in turn and to the one that has fewest, where one of 24 is at half speed.

    The bound is that of engines that are all full: S of 23.5 engines; and of L and T as in `pipeline`.
    """
    nodes, engines, per_engine, slots = 8, 3, 16, 16
    prompts, count = nodes * engines * per_engine, nodes * engines
    ways = {
        "in turn": lambda number, loads: [index % len(loads) for index in range(number)],
        "fewest": cluster_of.spread,
    }
    rows = []
    for sampling, training in ((3, 1), (1, 1)):
        for lag in (1, 2, 4):
            row = [f"{sampling}:{training}", str(lag), f"{sampling * count / (count - 0.5):.2f}"]
            for way in ways.values():
                cluster_of.spread = way
                rates = make_rates(sampling / (per_engine * GROUP * mean_tokens() / slots), training)
                cluster = SimulatedRun(make_config(prompts, lag, slots), rates, Setting(nodes, 1, engines, lag))
                slow = Rate(2 * rates.decoding.fixed_s, 0.0)
                cluster.engines[0] = SimulatedEngine(slow, slots)
                step_s = mean_step_s(cluster, num_steps)
                idle = engines_idle(cluster)
                row += [f"{step_s:.2f}", f"{idle:.1%}"]
            rows.append(row)
    heads = ["sampling:training", "lag", "S", "step, in turn", "idle", "step, fewest", "idle"]
    print_table("seconds of a step where one engine of 24 takes twice as long", heads, rows)


def mean_step_s(cluster: SimulatedRun, num_steps: int) -> float:
    """Run the driver's loop; return the mean of its steps without the first fifth, in which the pipeline fills."""
    ends: list[float] = []
    cluster.take_steps(num_steps, lambda: ends.append(cluster.now))
    warm = num_steps // 5
    return (ends[-1] - ends[warm]) / (num_steps - 1 - warm)


def engines_idle(cluster: SimulatedRun) -> float:
    """Return the share of the time so far in which engines sampled nothing."""
    elapsed_s, sampled_s, _ = cluster.spent()
    return 1 - sampled_s / (elapsed_s * len(cluster.engines))


def mean_tokens() -> float:
    """Return the mean of the lengths, which are cut at LONGEST."""
    return statistics.fmean(cut_lengths(LOGNORMAL, MEAN_TOKENS, LONGEST))


def last_completion_s(cluster: SimulatedRun, prompts: int) -> float:
    """Return the seconds until engines that were idle have sampled a step, the mean of some draws."""
    drawing, count = random.Random(1), len(cluster.engines)
    slots, seconds = cluster.config.engine.max_num_seqs, []
    for _ in range(20):
        last = 0.0
        for _ in range(count):
            engine = SimulatedEngine(cluster.rates.decoding, slots)
            lengths = draw_lengths(LOGNORMAL, MEAN_TOKENS, LONGEST, prompts // count * GROUP, drawing)
            last = max(last, engine.end_of(engine.submit([[(length, 0.0)] for length in lengths], 0.0)))
        seconds.append(last)
    return statistics.fmean(seconds)


def thousand_engines(minutes: float, turns: int = 1) -> None:
    """Follow the driver's memory and CPU over simulated minutes, by tenths.

    With more turns than one, environments take twice a turn in the mean, and a lag of 1 leaves 64 sessions an engine.
    """
    nodes, engines, prompts, lag = 250, 4, 2048, 4 if turns == 1 else 1
    step_s = prompts * GROUP / 5000
    rates = make_rates(decode_s=0.008, train_s=step_s)
    if turns > 1:
        seconds = 2 * 0.008 * mean_tokens() / turns
        rates = replace(rates, sequences=replace(SEQUENCES, turns=turns, environment_s=seconds))
    cluster = SimulatedRun(make_config(prompts, lag, 64), rates, Setting(nodes, 1, engines, lag))
    spent = {"stand-ins": 0.0}
    for name in ("start", "wait", "train"):
        setattr(SimulatedRun, name, counted(getattr(SimulatedRun, name), spent))
    process, rows = psutil.Process(), []
    num_steps = round(minutes * 60 / step_s)
    marks = [(time.process_time(), 0.0)]
    taken = 0

    def on_step() -> None:
        nonlocal taken
        taken += 1
        if taken % max(1, num_steps // 10) == 0:
            marks.append((time.process_time(), spent["stand-ins"]))
            own_s = (marks[-1][0] - marks[-2][0]) - (marks[-1][1] - marks[-2][1])
            share = own_s / (max(1, num_steps // 10) * step_s)
            memory = process.memory_info().rss / 2**20
            rows.append([f"{cluster.now / 60:.1f}", str(taken), f"{memory:.0f} MiB", f"{share:.1%}"])
            print("  ".join(rows[-1]), flush=True)

    cluster.take_steps(num_steps, on_step)
    idle = engines_idle(cluster)
    done = num_steps * prompts * GROUP / cluster.now
    title = f"{nodes * engines} engines on {nodes} nodes, {done:,.0f} rollouts/s of {turns} turns, idle {idle:.0%}"
    print_table(title, ["simulated minutes", "steps", "memory", "driver's CPU of one core"], rows)


def counted(method: Callable[..., Any], spent: dict[str, float]) -> Callable[..., Any]:
    """Return the method with its CPU seconds added to `spent`, so that what is left is the driver's own."""

    def run(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        try:
            return method(*args, **kwargs)
        finally:
            spent["stand-ins"] += time.process_time() - begun

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--turns", type=int, default=1, help="Of each rollout of the 1,000 engines.")
    parser.add_argument("--steps", type=int, default=60, help="Of each row of the first table.")
    options = parser.parse_args()
    print(load_average())
    if options.steps:
        pipeline(options.steps)
        straggler(options.steps)
    if options.minutes:
        thousand_engines(options.minutes, options.turns)


if __name__ == "__main__":
    main()
