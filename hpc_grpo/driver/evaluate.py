"""The driver of an eval apart from training: `python -m hpc_grpo.driver.evaluate FOLDER`, started by the supervisor.

Consumes the folder's config and request; produces the completions, result.json, and the answer to print. The engines
are those of training, with weights from the model's own folder: one model after the other, each on all engines.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from hpc_grpo.config import Config
from hpc_grpo.driver.actors import NodeSlots, Workers, reserve_nodes
from hpc_grpo.driver.eval import EvalSets
from hpc_grpo.driver.inputs import EvalInputs, load_eval_inputs
from hpc_grpo.driver.main import own_package_first
from hpc_grpo.driver.stop import wait_for_ray
from hpc_grpo.errors import EXIT_COMPLETE, HpcGrpoError
from hpc_grpo.metrics.evals import HIGH, LOW, EvalGroup, paired_differences
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.run.evals import EvalRequest, answer_file, completions_file, read_request, result_file
from hpc_grpo.run.files import read_jsonl, write_atomic, write_json_atomic
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.pulse import PULSE, patience_of_driver
from hpc_grpo.run.stacks import dump_stacks_on_signal
from hpc_grpo.system.readable import UNKNOWN, table


def evaluate(folder: RunDir) -> None:
    """Evaluate what the request names. Raises ConfigError before anything is started where an input is wrong."""
    config, request, timer = read_config(folder), read_request(folder), StepTimer(on_phase=PULSE.turn_to)
    PULSE.open("driver", patience_of_driver(config))
    configs = {name: _with_model(config, path) for name, path in request.models.items()}
    with timer.phase("inputs"):
        inputs = {name: load_eval_inputs(own) for name, own in configs.items()}
    address = wait_for_ray(lambda: False)
    with timer.phase("connect"), own_package_first():
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="hpc-grpo")
    _end_on_signals()  # after ray.init, whose crash handler takes SIGTERM for itself
    with timer.phase("start"):
        slots = reserve_nodes(config, trains=False)
    looks = {name: _look_at(name, own, slots, inputs[name], folder, timer) for name, own in configs.items()}
    if request.prompts:
        answer = shown_completions(folder, request)
    else:
        results, apart = {name: metrics for name, (metrics, _) in looks.items()}, differences(looks, config)
        _write_result(folder, config, request, results, apart)
        streams = next(iter(inputs.values())).eval_streams
        sources = {name: [part.name for part in stream.parts] for name, stream in streams.items()}
        answer = shown_metrics(results, sources, config)
        if len(looks) > 1:
            answer += "\n\n" + shown_metrics(apart, sources, config, of="DIFFERENCE")
    write_atomic(answer_file(folder), answer + "\n")
    write_atomic(folder.complete_marker, "evaluated\n")


def differences(
    looks: Mapping[str, tuple[Mapping[str, float], Mapping[str, Sequence[EvalGroup]]]], config: Config
) -> dict[str, dict[str, float]]:
    """Return by `B - A` how far each model B is from the first, A, on the prompts of all sets that both were asked."""
    (first, (_, before)), *others = looks.items()
    apart: dict[str, dict[str, float]] = {}
    for name, (_, after) in others:
        apart[f"{name} - {first}"] = {
            f"eval/{of_set}/{key}" if of_set else f"eval/{key}": value
            for of_set in before
            for key, value in paired_differences(before[of_set], after[of_set], config.eval_settings(of_set)).items()
        }
    return apart


def shown_metrics(
    results: Mapping[str, Mapping[str, float]],
    sources: Mapping[str, Sequence[str]],
    config: Config,
    of: str = "MODEL",
) -> str:
    """Return a table: a line for each model, or difference of two, eval set and source (`sources` by set), with 95%
    intervals.
    """
    ks = sorted({k for of_set in sources for k in (1, *config.eval_settings(of_set).pass_k)})
    columns = [*(f"pass@{k}" for k in ks), "reward_mean", "tokens_mean"]
    columns += ["failed_fraction"] if of == "MODEL" else []
    rows = []
    for model, metrics in results.items():
        for of_set, names in sources.items():
            prefix = f"eval/{of_set}/" if of_set else "eval/"
            for end, where in [("", of_set or "all"), *((f"/{name}", name) for name in names if len(names) > 1)]:
                cells = (_cell(metrics, f"{prefix}{column}", end) for column in columns)
                rows.append((model, f"{of_set}/{where}" if of_set and end else where, *cells))
    return table((of, "DATA", *(name.removesuffix("_mean").upper() for name in columns)), rows)


def shown_completions(folder: RunDir, request: EvalRequest) -> str:
    """Return the completions: of one prompt, model and sample the bare text."""
    lines = [(model, line) for model in request.models for line in read_jsonl(completions_file(folder, model, ""))]
    if len(lines) == 1:
        return str(lines[0][1]["completion"]).strip()
    blocks = []
    for ordinal, prompt in enumerate(request.prompts):
        given = [f"[{model}] {line['completion'].strip()}" for model, line in lines if line["ordinal"] == ordinal]
        blocks.append("\n".join([f"> {prompt}", *given]))
    return "\n\n".join(blocks)


def _look_at(
    name: str, config: Config, slots: Sequence[NodeSlots], inputs: EvalInputs, folder: RunDir, timer: StepTimer
) -> tuple[dict[str, float], dict[str, list[EvalGroup]]]:
    """Return the metrics of one model, and its graded prompts by set.

    Ends its engines and graders, so that those of the next one have their places.
    """
    with timer.phase("start"):
        workers = Workers(config, slots, inputs, total_optimizer_steps=0)
        workers.start()
    with timer.phase("eval"):
        sets = EvalSets(config, inputs.eval_streams, workers.rollout_pool())
        groups = sets.sample()
        metrics = sets.measure(groups, lambda of_set: completions_file(folder, name, of_set))
    workers.stop()
    return metrics, groups


def _with_model(config: Config, path: str) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def _write_result(
    folder: RunDir,
    config: Config,
    request: EvalRequest,
    results: Mapping[str, Mapping[str, float]],
    apart: Mapping[str, Mapping[str, float]],
) -> None:
    models = {
        name: {
            "path": request.models[name],
            "metrics": metrics,
            "completions": str(completions_file(folder, name, "").parent),
        }
        for name, metrics in results.items()
    }
    settings: dict[str, Any] = config.eval.model_dump(mode="json")
    values = {"models": models, "differences": apart, "data": data_of(config), "settings": settings}
    write_json_atomic(result_file(folder), values)


def data_of(config: Config) -> list[str]:
    """List the paths of the eval sets, and of the training data where a share of them is held out."""
    held_out = config.data.sources(for_eval=False) if config.data.held_out is not None else []
    return [source.path for _, source in (*held_out, *config.data.sources(for_eval=True))]


def _cell(metrics: Mapping[str, float], name: str, end: str) -> str:
    if (value := metrics.get(f"{name}{end}")) is None:
        return UNKNOWN
    low, high = metrics.get(f"{name}{LOW}{end}"), metrics.get(f"{name}{HIGH}{end}")
    shown = f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    digits = 3 if abs(value) < 10 else 1
    return shown if low is None or high is None else f"{shown} [{low:.{digits}f}, {high:.{digits}f}]"


def _end_on_signals() -> None:
    """End at once when asked to: an eval has nothing to save."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def main() -> int:
    dump_stacks_on_signal("driver")
    try:
        evaluate(RunDir(Path(sys.argv[1])))
    except HpcGrpoError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        ray.shutdown()
    return EXIT_COMPLETE


if __name__ == "__main__":
    sys.exit(main())
