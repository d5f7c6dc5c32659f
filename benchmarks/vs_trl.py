"""Compare a GRPO step of hpc_grpo with TRL's, and with the sum of its bare halves, on the CPUs of this machine.

`python benchmarks/vs_trl.py`: 16 prompts x 8 completions x 128 tokens in float32, completions of fixed length, the
same trivial reward, no reference model. hpc_grpo runs as users run it (`hpc-grpo train`: supervisor, Ray, vLLM,
DeepSpeed). Bare training and TRL are tuned first, once. Then rounds measure all sides one after the other, and
sides are compared within a round only: a machine's speed may drift by more than what tells them apart.
Needs `pip install -e .[cpu,bench]`.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
from bare_parts import PACKED, PADDED, prompts
from common import load_average, median, print_table
from sides import (
    BareTraining,
    Engines,
    Layout,
    Shape,
    StepTimes,
    Trl,
    Work,
    generation_seconds,
    hpc_grpo_times,
    median_times,
    training_seconds,
    trl_seconds,
    write_rows,
)

from hpc_grpo.demo.model import ModelSize, write_model

SIZES = {
    "600k": ModelSize(hidden_size=128, num_layers=4),
    "31M": ModelSize(hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, intermediate_size=2048),
}
_LAYOUT = "layout: engines x threads + learner threads"
_Setting = TypeVar("_Setting", BareTraining, Trl)


@dataclass(frozen=True)
class Plan:
    """What is measured and how often. Microbatches are in sequences, budgets in tokens a microbatch."""

    sizes: tuple[str, ...] = tuple(SIZES)
    layouts: tuple[str, ...] = ("2x1+2", "2x1+2@1", "1x2+2")
    microbatches: tuple[int, ...] = (8, 16, 32)
    budgets: tuple[int, ...] = (1024, 2048, 4096)
    threads: tuple[int, ...] = (1, 2)
    steps: int = 5
    rounds: int = 3
    batch: tuple[int, int, int] = (16, 8, 128)

    @property
    def shape(self) -> Shape:
        return Shape(*self.batch, self.steps)

    def trainings(self) -> list[BareTraining]:
        kinds = ((PADDED, self.microbatches), (PACKED, self.budgets))
        return [BareTraining(kind, size, n) for n in self.threads for kind, sizes in kinds for size in sizes]

    def trls(self) -> list[Trl]:
        return [Trl(microbatch, n) for n in self.threads for microbatch in self.microbatches]


_FULL = Plan()
_QUICK = Plan(("600k",), ("1x2+2",), (16,), (2048,), (2,), steps=2, rounds=1, batch=(4, 4, 16))


@dataclass(frozen=True)
class Tuned:
    """The fastest setting of each side; `budget` is that of the packed microbatches, which hpc_grpo trains on too."""

    training: BareTraining
    budget: int
    trl: Trl


@dataclass(frozen=True)
class Round:
    """Seconds a step of every side, measured close together in time."""

    training: float
    generation: Mapping[Engines, float]
    trl: float
    ours: Mapping[Layout, StepTimes]

    def bare_sum(self, layout: Layout) -> float:
        return self.generation[layout.engines] + self.training

    def speed_to_trl(self, layout: Layout) -> float:
        return self.trl / self.ours[layout].step

    def step_to_bare(self, layout: Layout) -> float:
        return self.ours[layout].step / self.bare_sum(layout)


def tune(work: Work, plan: Plan) -> Tuned:
    trainings = {it: _told(it, training_seconds(work, it)) for it in plan.trainings()}
    trls = {it: _told(it, trl_seconds(work, it)) for it in plan.trls()}
    packed = {it: seconds for it, seconds in trainings.items() if it.kind == PACKED}
    tuned = Tuned(_fastest(trainings), _fastest(packed).size, _fastest(trls))
    chosen = (tuned.training, tuned.trl)
    rows = [
        [str(it), *_rates(work.shape, seconds), "chosen" if it in chosen else ""]
        for it, seconds in (*trainings.items(), *trls.items())
    ]
    print_table("tuning, once", ["", "s/step", "tokens/s", ""], rows)
    return tuned


def measure_round(work: Work, tuned: Tuned, layouts: Sequence[Layout]) -> Round:
    training = _told(tuned.training, training_seconds(work, tuned.training))
    distinct = dict.fromkeys(layout.engines for layout in layouts)
    generation = {it: _told(it, generation_seconds(work, it)) for it in distinct}
    trl = _told(tuned.trl, trl_seconds(work, tuned.trl))
    ours = {}
    for layout in layouts:
        ours[layout] = hpc_grpo_times(work, layout, tuned.budget)
        _told(f"hpc_grpo {layout}", ours[layout].step)
    return Round(training, generation, trl, ours)


def compare(work: Work, plan: Plan) -> None:
    layouts = [Layout.parse(text) for text in dict.fromkeys(plan.layouts)]
    tuned = tune(work, plan)
    rounds = []
    for number in range(1, plan.rounds + 1):
        click.echo(f"round {number} of {plan.rounds}", err=True)
        rounds.append(measure_round(work, tuned, layouts))
    _print_seconds(work.shape, tuned, rounds)
    _print_ratios(rounds)
    _print_phases(rounds)


def _told(what: object, seconds: float) -> float:
    """`seconds`, after a line of progress."""
    click.echo(f"  {what}: {seconds:.2f} s ({load_average()})", err=True)
    return seconds


def _fastest(seconds: Mapping[_Setting, float]) -> _Setting:
    return min(seconds, key=seconds.__getitem__)


def _median(rounds: Sequence[Round], figure: Callable[[Round], float]) -> float:
    return median([figure(it) for it in rounds])


def _rates(shape: Shape, seconds: float) -> list[str]:
    return [f"{seconds:.2f}", f"{shape.num_tokens / seconds:,.0f}"]


def _ratio(ratios: Sequence[float]) -> list[str]:
    return [f"{median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]


def _print_seconds(shape: Shape, tuned: Tuned, rounds: Sequence[Round]) -> None:
    first = rounds[0]
    seconds = {
        str(tuned.training): _median(rounds, lambda it: it.training),
        **{str(engines): _median(rounds, lambda it, key=engines: it.generation[key]) for engines in first.generation},
        str(tuned.trl): _median(rounds, lambda it: it.trl),
        **{f"hpc_grpo {layout}": _median(rounds, lambda it, key=layout: it.ours[key].step) for layout in first.ours},
    }
    print_table(
        f"steps: medians of {len(rounds)} rounds, each the median of {shape.steps} steps; "
        f"hpc_grpo with microbatches of {tuned.budget} tokens; {load_average()}",
        ["", "s/step", "tokens/s"],
        [[what, *_rates(shape, one)] for what, one in seconds.items()],
    )


def _print_ratios(rounds: Sequence[Round]) -> None:
    rows = [
        [
            str(layout),
            *_ratio([it.speed_to_trl(layout) for it in rounds]),
            *_ratio([it.step_to_bare(layout) for it in rounds]),
            f"{median([it.bare_sum(layout) for it in rounds]):.2f}",
        ]
        for layout in rounds[0].ours
    ]
    header = [_LAYOUT, "speed / TRL", "min-max", "step / bare sum", "min-max", "bare sum s"]
    print_table(f"ratios within a round: medians of {len(rounds)} rounds", header, rows)


def _print_phases(rounds: Sequence[Round]) -> None:
    training = _median(rounds, lambda it: it.training)
    rows = []
    for layout in rounds[0].ours:
        times = astuple(median_times([it.ours[layout] for it in rounds]))
        generation = median([it.generation[layout.engines] for it in rounds])
        rows.append([str(layout), *(f"{one:.2f}" for one in (*times, generation, training))])
    header = [_LAYOUT, *(field.name for field in fields(StepTimes)), "bare generation", "bare training"]
    print_table(f"seconds in a step of hpc_grpo: medians of {len(rounds)} rounds", header, rows)


def _several(name: str, **settings: Any) -> Callable[..., Any]:
    """Make a repeatable option for a field of Plan, which shows the default."""
    field = settings.pop("field")
    default = ", ".join(map(str, getattr(_FULL, field)))
    return click.option(name, field, multiple=True, show_default=default, **settings)


@click.command()
@_several("--size", field="sizes", type=click.Choice(list(SIZES)))
@_several("--layout", field="layouts", help="ENGINESxTHREADS+LEARNER_THREADS[@LAG].")
@_several("--microbatch", field="microbatches", type=int, help="Sequences; tried out for TRL and bare training.")
@_several("--budget", field="budgets", type=int, help="Tokens a packed microbatch; tried out for bare training.")
@_several("--threads", field="threads", type=int, help="Tried out for TRL and bare training.")
@click.option("--steps", type=click.IntRange(min=1), show_default=str(_FULL.steps), help="Timed in each measurement.")
@click.option(
    "--rounds", type=click.IntRange(min=1), show_default=str(_FULL.rounds), help="Times that all sides are measured."
)
@click.option("--quick", is_flag=True, help="The small model, short completions, one layout, one round.")
def main(quick: bool, **given: Any) -> None:
    # So that `timeout` and an end of the session also end the run in progress, by the `finally` around it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan = replace(_QUICK if quick else _FULL, **{name: value for name, value in given.items() if value})
    for name in plan.sizes:
        with tempfile.TemporaryDirectory(prefix="hpc-grpo-bench-") as text:
            folder = Path(text)
            num_parameters = write_model(folder / "model", SIZES[name], seed=0)
            batch = " x ".join(map(str, plan.batch))
            click.echo(f"\n{name}: {num_parameters:,} parameters, float32, {batch} tokens a step")
            data = write_rows(folder / "rows.jsonl", [{"prompt": it, "answer": ""} for it in prompts(plan.batch[0])])
            compare(Work(folder / "model", folder, plan.shape, data), plan)


if __name__ == "__main__":
    main()
