"""Evals on held-out data sets, in the loop or apart from training: metrics and completions.

In the loop an eval runs between two steps, on the engines of training. With a policy lag, rollouts continue at the same
time, and the eval's prompts have priority. Seeds depend on the prompt, not on the step: evals of a run are comparable.

For an eval apart from training the supervisor starts `python -m hpc_grpo.driver.evaluation FOLDER`. It reads the
folder's config and request, and writes completions, result.json and the text to print. Its engines load the weights
from the model's folder. It evaluates one model after the other, each on all engines.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_grpo.config import Config
from hpc_grpo.data.stream import PromptStream
from hpc_grpo.driver.actors import Workers, reserve_nodes
from hpc_grpo.driver.engines import RolloutPool
from hpc_grpo.driver.inputs import load_inputs
from hpc_grpo.driver.remote import connect, run_driver
from hpc_grpo.driver.rollouts import GradedGroup, check_failures, request_of
from hpc_grpo.driver.schedule import Schedule, TrainLength, wait_for_ray
from hpc_grpo.metrics.evals import EvalGroup, eval_metrics, eval_prefix, paired_differences, with_interval
from hpc_grpo.metrics.record import StepTimer, played
from hpc_grpo.metrics.rollouts import lines_of_turns, solved
from hpc_grpo.registry import EVAL_METRICS
from hpc_grpo.run.adapter import with_model
from hpc_grpo.run.evals import ANSWER, RESULT, EvalRequest, completions_file, read_request
from hpc_grpo.run.files import read_jsonl, when_there_is_space, write_atomic, write_json_atomic
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.pulse import PULSE, patience_of_driver
from hpc_grpo.system.readable import UNKNOWN, counted, table
from hpc_grpo.types import GroupRequest

_SEED_OFFSET = 1_000_003
"""Keeps the sampling seeds of evals apart from those of training."""

Sampled = Mapping[str, Sequence[EvalGroup]]
"""The graded prompts of each eval set, by its name."""


class EvalSets:
    """Samples `eval.num_samples` completions of every prompt of the eval sets and grades them."""

    def __init__(self, config: Config, streams: Mapping[str, PromptStream], pool: RolloutPool) -> None:
        self._config, self._streams, self._pool = config, streams, pool
        self._is_beside_training = config.rollout.max_policy_lag > 0
        self._own_metrics = {name: EVAL_METRICS.find(name) for name in config.eval.metrics}

    def run(self, file_of: Callable[[str], Path]) -> tuple[dict[str, float], Sampled]:
        """Return the metrics of each set, `eval/NAME` or `eval/SET/NAME` (see `eval_metrics`), and its graded prompts.

        Writes the completions of a set to the path `file_of(set)`. Samples all sets together. Without a policy lag,
        empties the engines' prefix caches afterwards. Raises RewardError if rewards failed for more prompts of a set
        than allowed.
        """
        prompts = {name: list(map(stream.prompt, range(len(stream)))) for name, stream in self._streams.items()}
        every = [prompt for of_set in prompts.values() for prompt in of_set]
        requests: list[GroupRequest] = []
        for name, of_set in prompts.items():
            settings, seed = self._config.eval_settings(name), self._config.run.seed + _SEED_OFFSET
            assert settings.top_p is not None, "eval_settings resolves it"
            sampling = self._config.rollout.sampling(settings.temperature, settings.top_p)
            is_urgent, count = self._is_beside_training, settings.num_samples
            requests += [request_of(prompt, seed, count, sampling, 0, is_urgent=is_urgent) for prompt in of_set]
        graded = iter(self._pool.wait(self._pool.start(every, requests, [True] * len(every)), "eval"))
        if not self._is_beside_training:
            # Training must not use prefixes cached here: a resumed run without this eval has none.
            self._pool.forget_prefixes()
        sampled = {name: self._checked([next(graded) for _ in of_set]) for name, of_set in prompts.items()}
        metrics: dict[str, float] = {}
        for name, groups in sampled.items():
            _write_completions(file_of(name), groups)
            measured = eval_metrics(groups, self._config.eval_settings(name), self._own_metrics)
            metrics |= {f"{eval_prefix(name)}{key}": value for key, value in measured.items()}
        return metrics, sampled

    def _checked(self, graded: Sequence[GradedGroup]) -> list[EvalGroup]:
        check_failures([group.grades for group in graded], self._config.grading.max_failed_fraction)
        return [
            EvalGroup(
                group.grades.shown_prompt or group.prompt.text,
                group.prompt.source,
                group.prompt.fields,
                group.grades.texts,
                group.grades.rewards,
                solved(group.grades, self._config.eval),
                group.grades.num_completion_tokens,
                # Not `valid`: a completion masked by rollout.mask_truncated was graded too.
                is_graded=all(group.grades.is_scored),
                turns=lines_of_turns(group.grades),
                thumbnails=group.grades.thumbnails,
            )
            for group in graded
        ]


class Evaluation:
    """The evals of a run: before its first step, after its last step, and as often as `eval.every` says."""

    def __init__(self, config: Config, sets: EvalSets, run_dir: RunDir, length: TrainLength) -> None:
        self._sets, self._run_dir, self._total_steps = sets, run_dir, length.total_steps
        self._schedule = Schedule(config.eval.every, length)

    def is_due(self, step: int, in_s: float = 0.0) -> bool:
        """Return whether to evaluate after `step`, which ends `in_s` seconds from now."""
        return step in (0, self._total_steps) or self._schedule.is_due(step, in_s)

    def run(self, step: int) -> dict[str, float]:
        """Evaluate the policy after `step`. Raises RewardError if rewards failed for more prompts than allowed."""
        metrics, _ = self._sets.run(lambda name: self._run_dir.eval_rollouts(step, name))
        self._schedule.start_over()
        return metrics


def evaluate(folder: RunDir) -> bool:
    """Evaluate the request's models, and write the results and COMPLETE into `folder`. Return True.

    Raises ConfigError for a wrong input before any actor starts.
    """
    config, request, timer = read_config(folder), read_request(folder), StepTimer(on_phase=PULSE.turn_to)
    PULSE.open("driver", patience_of_driver(config))
    configs = {name: with_model(config, path) for name, path in request.models.items()}
    with timer.phase("inputs"):
        inputs = {name: load_inputs(own, trains=False) for name, own in configs.items()}
    address = wait_for_ray(lambda: False)
    with timer.phase("connect"):
        connect(address)
    for number in (signal.SIGTERM, signal.SIGINT):  # after `connect`: Ray's crash handler takes SIGTERM for itself
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # at once: an eval has nothing to save
    with timer.phase("start"):
        slots = reserve_nodes(config, trains=False)
    results: dict[str, Mapping[str, float]] = {}
    sampled: dict[str, Sampled] = {}
    for name, own in configs.items():
        with timer.phase("start"):
            workers = Workers(own, slots, inputs[name], total_optimizer_steps=0)
            workers.start()
        with timer.phase("eval"):
            sets = EvalSets(own, inputs[name].eval_streams, workers.rollout_pool())
            results[name], sampled[name] = sets.run(functools.partial(completions_file, folder, name))
        workers.stop()  # the next model's engines and graders need their places
    if request.prompts or request.plays:
        answer = shown_completions(folder, request)
    else:
        streams = next(iter(inputs.values())).eval_streams
        apart = differences(sampled, config)
        folders = {name: str(completions_file(folder, name).parent) for name in results}
        models = {
            name: {"path": request.models[name], "metrics": metrics, "completions": folders[name]}
            for name, metrics in results.items()
        }
        data, settings = [source.path for _, source in config.data.judged_sources], config.eval.model_dump(mode="json")
        values = {"models": models, "differences": apart, "data": data, "settings": settings}
        write_json_atomic(folder.path / RESULT, values)
        sources = {name: [part.name for part in stream.parts] for name, stream in streams.items()}
        answer = shown_metrics(results, sources, config)
        if apart:
            answer += f"\n\n{shown_metrics(apart, sources, config, of='DIFFERENCE')}"
    write_atomic(folder.path / ANSWER, answer + "\n")
    write_atomic(folder.complete_marker, "evaluated\n")
    return True


def differences(sampled: Mapping[str, Sampled], config: Config) -> dict[str, dict[str, float]]:
    """Return the metrics of each other model B minus those of the first model A, under the name `B - A`.

    Compares the same prompts of each eval set. Returns {} for a single model.
    """
    (first, before), *others = sampled.items()
    return {
        f"{name} - {first}": {
            f"{eval_prefix(of_set)}{key}": value
            for of_set in before
            for key, value in paired_differences(before[of_set], after[of_set], config.eval_settings(of_set)).items()
        }
        for name, after in others
    }


def shown_metrics(
    results: Mapping[str, Mapping[str, float]], sources: Mapping[str, Sequence[str]], config: Config, of: str = "MODEL"
) -> str:
    """Return a table with 95% intervals: one line for each model (or difference), eval set and source."""
    ks = sorted({1, *(config.eval_settings(of_set).num_samples for of_set in sources)})
    columns = [*(f"pass@{k}" for k in ks), "reward_mean", "tokens_mean"]
    columns += ["failed_fraction"] if of == "MODEL" else []
    rows = []
    for model, metrics in results.items():
        for of_set, names in sources.items():
            for end, where in [("", of_set or "all"), *((f"/{name}", name) for name in names if len(names) > 1)]:
                cells = (with_interval(metrics, f"{eval_prefix(of_set)}{column}{end}") for column in columns)
                rows.append((model, f"{of_set}/{where}" if of_set and end else where, *cells))
    return table((of, "DATA", *(name.removesuffix("_mean").upper() for name in columns)), rows)


def shown_completions(folder: RunDir, request: EvalRequest) -> str:
    """Return the completions or episodes as text. A single completion is returned without prompt and model name."""
    lines = [(model, line) for model in request.models for line in read_jsonl(completions_file(folder, model))]
    if len(lines) == 1 and not request.plays:
        return str(lines[0][1]["completion"]).strip()
    blocks: dict[int, list[str]] = {}
    for model, line in lines:
        prompt = request.prompts[line["ordinal"]] if request.prompts else line["prompt"].strip()
        block = blocks.setdefault(line["ordinal"], [f"> {prompt}"])
        if request.plays:
            reward = UNKNOWN if line["reward"] is None else f"{line['reward']:g}"
            block.append(f"[{model}] {counted(len(line['turns']), 'turn')}, reward {reward}\n{played(line['turns'])}")
        else:
            block.append(f"[{model}] {line['completion'].strip()}")
    return "\n\n".join(map("\n".join, blocks.values()))


def _write_completions(path: Path, groups: Sequence[EvalGroup]) -> None:
    """Write a line for each completion; reward and solved are None if the reward failed."""
    lines = [
        {
            "ordinal": ordinal,
            "source": group.source,
            "sample": index,
            "prompt": group.prompt,
            "answer": group.fields.get("answer"),
            "completion": completion,
            "reward": group.rewards[index] if group.is_graded else None,
            "solved": group.solved[index] if group.is_graded else None,
            **({"turns": group.turns[index]} if group.turns else {}),
            **({"images": group.thumbnails} if group.thumbnails and not index else {}),
        }
        for ordinal, group in enumerate(groups)
        for index, completion in enumerate(group.completions)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    when_there_is_space(lambda: write_atomic(path, text), "the eval's completions")


if __name__ == "__main__":
    sys.exit(run_driver(evaluate))
