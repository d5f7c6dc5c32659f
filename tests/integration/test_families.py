"""The columns of docs/models.md that need DeepSpeed or vLLM: each family under ZeRO, exported, and published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_grpo.algorithms.losses import KlSettings
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.weights.contract import MIXTURES
from tests.integration.learner_processes import (
    VOCABULARY,
    make_config,
    make_sequences,
    make_step,
    run_ranks,
    weights_of,
)
from tests.integration.mismatch import TOLERANCE
from tests.integration.training_runs import engine_report, tiny_config
from tests.support.tiny_models import FAMILIES, write_family

pytestmark = pytest.mark.integration

CANARYS_BOUND = 0.05


def train_all(rank: int, world_size: int, store: Any, root: Path) -> dict[str, Any]:
    """Each family after a step under each ZeRO stage; what stage 3 exports."""
    from hpc_grpo.learner.checkpoint import export_model
    from hpc_grpo.learner.learner import Learner, score_apart

    found: dict[str, Any] = {}
    for kind in FAMILIES:
        of_kind = found[kind] = {}
        for stage in (1, 2, 3):
            config = make_config(root / kind, root, zero_stage=stage)
            loss = config.loss.model_copy(update={"kl": KlSettings()})
            learner = Learner(config.model_copy(update={"loss": loss}), rank, world_size, store)
            metrics = merge([learner.train_step(make_step(1, rank, world_size))])
            of_kind[stage] = metrics["grad_norm"], weights_of(learner)
        sequence = make_sequences(5)[0]
        prompt = len(sequence.token_ids) - sequence.num_trained_tokens
        tokens = sequence.token_ids
        of_kind["scored"] = score_apart(learner.model, tokens[:prompt], [tokens[prompt:]], "cpu")[0]
        export_model(learner, root / f"export-{kind}")
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("families")
    for kind in FAMILIES:
        write_family(root / kind, kind, vocab_size=VOCABULARY)
    return root


def test_every_zero_stage_trains_each_family_alike_and_its_export_is_a_model_of_transformers(root: Path) -> None:
    ((found),) = run_ranks(1, train_all, root)
    sequence = make_sequences(5)[0]
    tokens = torch.tensor(sequence.token_ids)[None].long()
    for kind, of_kind in found.items():
        norm, weights = of_kind[1]
        for stage in (2, 3):
            assert of_kind[stage][0] == pytest.approx(norm, rel=1e-5)
            for name, weight in of_kind[stage][1].items():
                np.testing.assert_allclose(
                    weight, weights[name], rtol=1e-5, atol=1e-5, err_msg=f"{kind} {stage} {name}"
                )
        exported = AutoModelForCausalLM.from_pretrained(root / f"export-{kind}", dtype=torch.float32).eval()
        with torch.no_grad():
            logprobs = (exported(tokens).logits[0, :-1] / 0.8).log_softmax(-1)
        own = logprobs.gather(-1, tokens[0, 1:, None])[-sequence.num_trained_tokens :, 0]
        np.testing.assert_allclose(own.numpy(), of_kind["scored"], atol=1e-5, err_msg=kind)


PUBLISHED_IN_CI = ("mixtral",)


@pytest.mark.parametrize(
    "kind",
    [
        each if each in PUBLISHED_IN_CI else pytest.param(each, marks=pytest.mark.long)
        for each in FAMILIES
        if each != "olmo2"
    ],
)
def test_an_engine_samples_from_what_the_learner_publishes(kind: str, tmp_path: Path) -> None:
    """From version 0, for which it has no weights of its own, and from another one.

    The canary would see weights that are not published, and one expert of one layer that is not. A mixture's engine
    returns the experts that the learner's routers choose, of completions that it samples at once and computes again.
    """
    write_family(tmp_path / kind, kind)
    config = tiny_config(
        tmp_path,
        kind,
        kind,
        data={"max_prompt_tokens": 12},
        rollout={"max_new_tokens": 24, "group_size": 3},
        engine={"kv_cache_gib": 0.01},
        train={"router_replay": kind in MIXTURES},
    )
    report = engine_report("published_models", config)
    print(report)
    assert report["differences"] == []
    assert max(report["first"][0], report["second"][0], report.get("third", [0.0])[0]) < TOLERANCE
    assert report["not published"][1] > CANARYS_BOUND
    assert report.get("expert withheld", report["not published"])[1] > CANARYS_BOUND
    assert ("expert withheld" in report) == (kind in MIXTURES)
    assert report.get("other experts", 0.0) == 0.0
    assert ("other experts" in report) == (kind in MIXTURES)
