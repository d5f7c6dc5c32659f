"""What `hpc-grpo plan` foretells beside what runs then measure, on one and two nodes of a real Slurm, lag 0 and 2.

As root, with the virtual cluster up (`make slurm-up`): `python benchmarks/simulate_check.py FOLDER`, which every node
must see. Its four runs are jobs of 24 steps with paced engines and learners (`paced_driver.py`), so that one machine's
cores are nobody's bottleneck; runs that are in FOLDER already are read only. Each run then foretells all four.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import yaml
from common import load_average, print_table

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from hpc_grpo.config import Config  # noqa: E402
from hpc_grpo.demo.make import write_tasks  # noqa: E402
from hpc_grpo.demo.model import ModelSize, write_model  # noqa: E402
from hpc_grpo.run.frozen_config import read_config  # noqa: E402
from hpc_grpo.run.paths import RunDir  # noqa: E402
from hpc_grpo.run.progress import read_metrics  # noqa: E402
from hpc_grpo.simulate.cluster import Setting, forecast  # noqa: E402
from hpc_grpo.simulate.measured import measured_rates, read_measurements  # noqa: E402
from tests.slurm.conftest import SlurmCluster  # noqa: E402

CASES = [(nodes, lag) for nodes in (1, 2) for lag in (0, 2)]
_STEPS, _WARM = 24, 4
"""Steps of a run, and of them those in which a pipeline fills."""
_TINY = ModelSize(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, max_tokens=160)
_DEADLINE_S = 420.0


def write_config(folder: Path, nodes: int, lag: int) -> Path:
    values = {
        "run": {"name": name_of(nodes, lag), "root": str(folder / "runs")},
        "model": {"path": str(folder / "model"), "dtype": "float32", "device": "cpu"},
        "data": {"train": {"path": str(folder / "train.jsonl")}, "template": "plain", "max_prompt_tokens": 16},
        "rewards": [{"name": f"{Path(__file__).with_name('common.py')}:letter_share"}],
        "grading": {"num_workers": 1},
        "rollout": {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 96, "max_policy_lag": lag},
        "engine": {"engines_per_node": 2, "vllm": {"max_num_seqs": 8}, "kv_cache_gib": 0.0625},
        "train": {"total_steps": _STEPS, "lr": 1e-6, "zero_stage": 1},
        "checkpoint": {"every": None},
        "launch": {
            "object_store_gib": 0.1,
            "num_nodes": nodes,
            "slurm": {"gpus_per_node": 4, "cpus_per_node": 4, "time_min": 10},
        },
    }
    path = folder / f"{name_of(nodes, lag)}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def name_of(nodes: int, lag: int) -> str:
    return f"nodes-{nodes}-lag-{lag}"


def measure(cluster: SlurmCluster, folder: Path, nodes: int, lag: int) -> None:
    """Have a job train the run to its end."""
    config = write_config(folder, nodes, lag)
    command = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(config)]
    driver = str(Path(__file__).with_name("paced_driver.py"))
    words = cluster.output([*command, "--driver", driver], cwd=folder).split()
    end = cluster.wait_for_job(int(words[words.index("job") + 1].strip(".,:;")), _DEADLINE_S)
    print(f"{name_of(nodes, lag)}: {end.state}, {load_average()}", flush=True)
    if end.exit_code != "0:0":
        sys.exit(f"see {folder / 'runs' / name_of(nodes, lag)}")


def measured_steps_per_h(run: RunDir) -> float:
    seconds = [line["time/step_s"] for step, line in read_metrics(run.metrics).items() if step > _WARM]
    return 3600 * len(seconds) / sum(seconds)


def foretold(run: RunDir, config: Config) -> list[float]:
    """Return the steps/h of all cases, by what one run has measured."""
    measured = read_measurements(run, config)
    rates = measured_rates(measured, config)
    print(f"{run.path.name}: {rates.decoding}, {rates.training}")
    return [forecast(config, rates, Setting(nodes, 1, 2, lag)).steps_per_h for nodes, lag in CASES]


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    if not (folder / "model").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", _TINY, seed=0)
        write_tasks(folder, num_train=64, num_eval=8, num_sft=8, seed=0)
    runs = {case: RunDir(folder / "runs" / name_of(*case)) for case in CASES}
    for case, run in runs.items():
        if not run.is_complete():
            begun = time.monotonic()
            measure(SlurmCluster(), folder, *case)
            print(f"  {time.monotonic() - begun:.0f} s", flush=True)
    found = {case: measured_steps_per_h(run) for case, run in runs.items()}
    rows = [["measured", *(f"{value:,.0f}" for value in found.values())]]
    for (nodes, lag), run in runs.items():
        values = zip(foretold(run, read_config(run)), found.values(), strict=True)
        rows.append([f"by {nodes}, lag {lag}", *(f"{own:,.0f} ({own / value - 1:+.1%})" for own, value in values)])
    print_table("steps/h", ["nodes, lag", *(f"{nodes}, lag {lag}" for nodes, lag in CASES)], rows)


if __name__ == "__main__":
    main()
