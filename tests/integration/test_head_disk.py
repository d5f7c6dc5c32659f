"""Real DeepSpeed and real Ray: a learner whose files lie on another node's disk trains on as one that sees the run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_grpo.demo.model import write_model
from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.paths import RunDir
from tests.integration.learner_processes import make_config, make_step, run_ranks, save_together, weights_of
from tests.support.tiny_models import TINY

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture
def keeper_address() -> Iterator[str]:
    import ray

    context = ray.init("local", num_cpus=2, include_dashboard=False, namespace="disks", object_store_memory=200 * 2**20)
    yield context.address_info["gcs_address"]
    ray.shutdown()


def trained_on(rank: int, world_size: int, store: Any, model: Path, root: Path, address: str) -> dict[str, Any]:
    """Save under every stage to both kinds of disk, and go on from each; also from one learner's checkpoint."""
    import ray
    import torch.distributed as dist

    from hpc_grpo.learner.checkpoint import load_checkpoint, write_universal
    from hpc_grpo.learner.head_disk import HeadDisk
    from hpc_grpo.learner.learner import Learner
    from hpc_grpo.learner.staging import RunDisk
    from hpc_grpo.run.files import recover_dirs

    ray.init(address=address, namespace="disks", logging_level="ERROR")
    own = Path(tempfile.mkdtemp(dir=root))
    results: dict[str, Any] = {}

    def learner_on(disk: str, stage: int, run: Path) -> Any:
        learner = Learner(make_config(model, root, zero_stage=stage), rank, world_size, store)
        is_away = disk == "heads" and rank > 0
        learner.files.disk = HeadDisk(ray.get_actor("keeper"), root, own) if is_away else RunDisk()
        return learner

    def two_steps(learner: Any) -> tuple[Any, Any]:
        return [learner.train_step(make_step(seed, rank, world_size)) for seed in (7, 8)], weights_of(learner)

    for stage in (1, 2, 3):
        for disk in ("seen", "heads"):
            run = RunDir(root / f"{world_size}" / disk / f"stage_{stage}")
            learner = learner_on(disk, stage, run.path)
            learner.train_step(make_step(1, rank, world_size))
            write = save_together(learner, run.checkpoint(1), {"step": 1}, behind=stage != 2)
            straight = two_steps(learner)
            write()
            fresh = learner_on(disk, stage, run.path)
            load_checkpoint(fresh, run.checkpoint(1))
            results[f"{stage} {disk}"] = (straight, two_steps(fresh))
            if world_size == 1:
                continue
            alone = RunDir(root / "1" / "seen" / f"stage_{stage}").checkpoint(1)
            fresh = learner_on(disk, stage, run.path)
            if rank == 0:
                write_universal(alone)
            dist.barrier()
            load_checkpoint(fresh, alone)
            dist.barrier()
            if rank == 0:
                recover_dirs(alone.parent)
            results[f"{stage} {disk} resharded"] = two_steps(fresh)
    results["left"] = [path.name for path in own.rglob("*") if path.is_file() and path.stat().st_size]
    return results


def same(first: Any, second: Any) -> bool:
    """Say whether metrics and weights are the same to the last bit."""
    (metrics, weights), (other_metrics, other_weights) = first, second
    are_equal = all(np.array_equal(weights[name], other_weights[name]) for name in weights)
    return bool(metrics == other_metrics and weights.keys() == other_weights.keys() and are_equal)


def test_a_resume_from_the_heads_disk_is_one_from_a_disk_that_all_see(tmp_path: Path, keeper_address: str) -> None:
    import ray

    from hpc_grpo.run.keeper import Keeper

    write_model(tmp_path / "model", TINY, seed=0)
    keeper = ray.remote(Keeper).options(name="keeper", num_cpus=0, max_concurrency=8).remote(tmp_path)
    run_ranks(1, trained_on, tmp_path / "model", tmp_path, keeper_address)
    for results in run_ranks(2, trained_on, tmp_path / "model", tmp_path, keeper_address):
        assert results.pop("left") == []
        for stage in (1, 2, 3):
            straight, resumed = results[f"{stage} heads"]
            assert same(straight, resumed), stage
            assert same(straight, results[f"{stage} seen"][0]), stage
            assert same(results[f"{stage} heads resharded"], results[f"{stage} seen resharded"]), stage
    for stage in (1, 2, 3):
        names = []
        for disk in ("seen", "heads"):
            (checkpoint,) = valid_checkpoints(RunDir(tmp_path / "2" / disk / f"stage_{stage}"))
            names.append([entry.name for entry in checkpoint.manifest.files])
        assert names[0] == names[1]
    del keeper
