"""What learners with models beside the policy do, for `test_learner_models`: in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hpc_grpo.algorithms.losses import KlSettings
from hpc_grpo.config.train import DistillArgs, DistillTask, PpoArgs, PpoTask
from hpc_grpo.learner.model import gathered
from hpc_grpo.learner.packing import pack
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.types import Minibatch, TrainSequence
from tests.integration.learner_processes import make_config, make_sequences, make_step, save_together, weights_of
from tests.support.sequences import ordinary_sequence

REFRESHED: dict[str, tuple[int, str, float, int]] = {
    "averaged, stage 1": (1, "float32", 0.25, 1),
    "copied every second step in bfloat16, stage 2": (2, "bfloat16", 1.0, 2),
    "averaged in bfloat16, stage 3": (3, "bfloat16", 0.25, 1),
}
"""ZeRO stage, dtype, loss.kl.mixup and loss.kl.refresh_steps."""
DIGITS = np.arange(2, 14)
"""Holds the tokens that base and teacher write, a small alphabet."""


def train_all(rank: int, world_size: int, store: Any, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"critic": train_with_critic(rank, world_size, store, root)}
    if world_size == 2:
        return found | {"references": refresh(rank, world_size, root)}
    return found | {"references": read_alone(root), "frozen": frozen(root)}


def train_with_critic(rank: int, world_size: int, store: Any, root: Path) -> dict[int, Any]:
    """Six steps of two minibatches on the same rollouts under each ZeRO stage; the last also from a checkpoint.

    The critic is exported, and another learner begins with it.
    """
    from hpc_grpo.learner.checkpoint import export_model, load_checkpoint
    from hpc_grpo.learner.learner import Learner

    results = {}
    for stage in (1, 2, 3):
        config = make_config(root / "model", root, zero_stage=stage).model_copy(
            update={"task": PpoTask(args=PpoArgs(critic_lr=1e-2, value_clip=None))}
        )
        learner = Learner(config, rank, world_size, store)
        step = lambda own: own.train_step(make_step(1, rank, world_size, num_minibatches=2))  # noqa: E731
        metrics = [step(learner) for _ in range(5)]
        folder = root / f"critic_{world_size}_{stage}"
        save_together(learner, folder, {}, behind=True)()
        metrics.append(step(learner))
        fresh = Learner(config, rank, world_size)
        load_checkpoint(fresh, folder)
        again = step(fresh)
        values = []
        if stage != 2:
            export_model(learner, root / f"export_{world_size}_{stage}")
            dist.barrier()  # only rank 0 writes
            critic = str(root / f"export_{world_size}_{stage}" / "critic")
            begun = Learner(config.model_copy(update={"task": PpoTask(args=PpoArgs(critic=critic))}), rank, world_size)
            values = [values_of(each, make_sequences(5)[0]) for each in (learner, begun)]
        results[stage] = (metrics, weights_of(learner), again, weights_of(fresh), values)
    return results


def values_of(learner: Any, sequence: TrainSequence) -> list[float]:
    (critic,) = (part for part in learner.parts if part.ds_engines)
    return critic.values([pack([sequence])])[0].tolist()  # type: ignore[no-any-return]


def refreshed(root: Path, name: str, rank: int, world_size: int) -> Any:
    from hpc_grpo.learner.learner import Learner

    stage, dtype, mixup, every = REFRESHED[name]
    config = make_config(root / "model", root, zero_stage=stage)
    model = config.model.model_copy(update={"dtype": dtype})
    kl = config.loss.kl.model_copy(update={"mixup": mixup, "refresh_steps": every})
    loss = config.loss.model_copy(update={"kl": kl})
    return Learner(config.model_copy(update={"model": model, "loss": loss}), rank, world_size)


def reference_of(learner: Any) -> dict[str, Any]:
    with gathered(learner.parts[0].model, [spec.name for spec in learner.parameter_specs()]) as parameters:
        return {name: tensor.float().numpy().copy() for name, tensor in parameters.items()}


def refresh(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Three steps of each kind; the third once more from a checkpoint."""
    from hpc_grpo.learner.checkpoint import load_checkpoint

    found = {}
    for name in REFRESHED:
        learner = refreshed(root, name, rank, world_size)
        weights, references = [], [reference_of(learner)]
        for seed in (1, 2, 3):
            metrics = learner.train_step(make_step(seed, rank, world_size))
            weights.append(weights_of(learner))
            references.append(reference_of(learner))
            if seed == 2:
                save_together(learner, root / name, {}, behind=True)()
        fresh = refreshed(root, name, rank, world_size)
        load_checkpoint(fresh, root / name)
        restored = reference_of(fresh)
        again = fresh.train_step(make_step(3, rank, world_size))
        found[name] = (weights, references, restored, metrics == again, reference_of(fresh))
    return found


def read_alone(root: Path) -> dict[str, Any]:
    """What a single learner reads of the references that two have written."""
    found = {}
    for name in REFRESHED:
        learner = refreshed(root, name, 0, 1)
        learner.parts[0].load(root / name, learner.files)
        found[name] = reference_of(learner)
    return found


def frozen(root: Path) -> list[str]:
    """The files of a checkpoint."""
    from hpc_grpo.learner.learner import Learner

    save_together(Learner(make_config(root / "model", root)), root / "frozen", {})()
    return [file.name for file in (root / "frozen").iterdir()]


def distil(rank: int, world_size: int, store: Any, root: Path) -> tuple[list[float], list[float]]:
    """Thirty steps on what the student samples; the learner's estimate of the reverse KL, and the KL before and after.

    The student of each step is loaded anew from the learner's weights, and samples in transformers.
    """
    from hpc_grpo.learner.learner import Learner

    config = make_config(root / "base", root, lr=6e-3, adamw={"eps": 1e-4}, max_tokens_per_microbatch=4096).model_copy(
        update={"task": DistillTask(args=DistillArgs(teacher=str(root / "teacher")))}
    )
    config = config.model_copy(update={"loss": config.loss.model_copy(update={"kl": KlSettings()})})
    learner = Learner(config)
    student, teacher = (AutoModelForCausalLM.from_pretrained(root / name) for name in ("base", "teacher"))
    temperature, estimates, exact = config.rollout.temperature, [], []
    torch.manual_seed(0)
    for step in range(31):
        weights = {name: torch.from_numpy(weight) for name, weight in weights_of(learner).items()}
        student.load_state_dict(weights, strict=False)
        prompts = torch.from_numpy(DIGITS)[torch.randint(12, (256, 1))]
        tokens = student.generate(
            prompts, do_sample=True, top_k=0, temperature=temperature, min_new_tokens=12, max_new_tokens=12
        )
        with torch.no_grad():
            own, taught = ((each(tokens).logits[:, :-1] / temperature).log_softmax(-1) for each in (student, teacher))
        if step in (0, 30):
            exact.append(float((own.exp() * (own - taught)).sum(-1).mean()))
        logprobs = own.gather(-1, tokens[:, 1:, None])[..., 0].numpy()
        sequences = tuple(
            ordinary_sequence(256 * step + index, 0, row.numpy(), 12, logprobs[index], advantage=0.0)
            for index, row in enumerate(tokens)
        )
        minibatch = Minibatch(sequences, 256 * 12, 256)
        estimates.append(merge([learner.train_step([minibatch])])["kl/learner_teacher"])
    return estimates, exact
