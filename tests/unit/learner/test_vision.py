"""Images in the learner: features and positions of packed rows, against plain transformers one sequence at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from hpc_grpo.data.images import open_image
from hpc_grpo.learner.model import PolicyModel, check_packing, load_policy, score
from hpc_grpo.learner.packing import pack
from hpc_grpo.learner.vision import tower_parameters
from hpc_grpo.types import TrainSequence
from hpc_grpo.weights.contract import VISION_MODELS
from tests.support.configs import minimal_config
from tests.support.tiny_vision import noise_image, write_vision_model

FIRST, SECOND = noise_image(56, 55), noise_image(84, 56)


def config_of(path: Path, **model: Any) -> Any:
    return minimal_config(
        model={"path": str(path), "dtype": "float32", "device": "cpu", **model},
        data={"images": "image", "max_prompt_tokens": 64},
        rollout={"max_new_tokens": 16},
    )


@pytest.fixture(scope="module", params=VISION_MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp(request.param), request.param)


def make_sequences(policy: PolicyModel) -> list[TrainSequence]:
    """Two completions of a prompt with two images, one with a sampled image token; one without; one with one image."""
    token, drawn = policy.language_model.config.image_token_id, np.random.default_rng(0)
    is_qwen = policy.language_model.config.model_type == "qwen2_5_vl"
    first, second = [5, 6, *[token] * 4, 7], [8, *[token] * (6 if is_qwen else 4), 9]

    def sequence(ordinal: int, sample: int, prompt: list[int], images: tuple[bytes, ...], count: int) -> TrainSequence:
        ids = np.array([*prompt, *drawn.integers(2, 200, count)], dtype=np.int32)
        ids[len(prompt) + 1] = token
        zeros = np.zeros(len(ids), np.float32)
        return TrainSequence(ordinal, sample, ids, np.arange(len(ids)) >= len(prompt), zeros, zeros, images=images)

    return [
        sequence(0, 0, first + second, (FIRST, SECOND), 5),
        sequence(0, 1, first + second, (FIRST, SECOND), 9),
        sequence(1, 0, [3, 4, 5], (), 6),
        sequence(2, 0, first, (FIRST,), 4),
    ]


def plain_logprobs(plain: Any, processor: Any, sequence: TrainSequence) -> Tensor:
    """The logprobs `[C]` of a sequence alone, whose prompt has the images as transformers puts them there."""
    ids, first = torch.tensor(sequence.token_ids).long()[None], int(sequence.loss_mask.argmax())
    inputs: dict[str, Any] = {"inputs_embeds": plain.get_input_embeddings()(ids)}
    if sequence.images:
        processed = processor([[open_image(image) for image in sequence.images]], return_tensors="pt")
        is_image = (ids == plain.config.image_token_id) & (torch.arange(ids.shape[1]) < first)
        processed = {name: own for name, own in processed.items() if name not in ("rows", "cols")}
        features = plain.get_image_features(**processed).pooler_output
        flat = torch.cat([own.reshape(-1, own.shape[-1]) for own in features])
        inputs["inputs_embeds"] = inputs["inputs_embeds"].masked_scatter(is_image[..., None], flat)
        if "image_grid_thw" in processed:
            positions = plain.model.get_rope_index(ids, is_image.int(), image_grid_thw=processed["image_grid_thw"])
            inputs["position_ids"] = positions[0]
    logprobs = plain(**inputs).logits[0, first - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, first:, None])[:, 0]


@pytest.mark.parametrize("trains", [False, True], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize("shares", [False, True], ids=["each prompt", "shared prompt"])
def test_packed_images_have_the_logprobs_and_gradients_of_plain_transformers(
    path: Path, shares: bool, trains: bool
) -> None:
    policy = load_policy(config_of(path, train_vision=trains), use_gradient_checkpointing=trains)
    check_packing(policy, "model.path", "cpu")
    plain = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    sequences = make_sequences(policy)
    expected = torch.cat([plain_logprobs(plain, policy._vision._processor, each) for each in sequences])  # type: ignore[union-attr]
    packed, _ = policy(pack(sequences, shares_prompts=shares))
    torch.testing.assert_close(packed, expected, rtol=0.0, atol=1e-5)
    weights = torch.linspace(-1.0, 1.0, len(packed))
    (packed * weights).sum().backward()
    (expected * weights).sum().backward()
    of_tower = {id(own) for own in tower_parameters(policy.language_model)}
    theirs = dict(plain.named_parameters())
    for name, own in policy.hf_named_parameters():
        if id(own) in of_tower and not trains:
            assert own.grad is None, name
            continue
        if name.endswith("self_attn.k_proj.bias"):
            continue  # a softmax is the same for keys that all move alike: rounding is all that is there
        largest = float(theirs[name].grad.abs().max())
        assert largest > 0.0, name
        torch.testing.assert_close(own.grad, theirs[name].grad, rtol=0.0, atol=1e-5 * largest, msg=name)


def test_a_tower_computes_the_images_of_a_prompt_once_for_all_its_sequences(path: Path) -> None:
    policy = load_policy(config_of(path), use_gradient_checkpointing=False)
    seen: list[int] = []
    features = policy._vision._processed  # type: ignore[union-attr]
    policy._vision._processed = lambda images: (seen.append(len(images)), features(images))[1]  # type: ignore[union-attr]
    score(policy, pack(make_sequences(policy)))
    assert seen == [3]


def test_without_its_images_a_prompt_has_other_logprobs(path: Path) -> None:
    policy = load_policy(config_of(path), use_gradient_checkpointing=False)
    [sequence, *_] = make_sequences(policy)
    shown = score(policy, pack([sequence]))
    assert float((score(policy, pack([replace(sequence, images=())])) - shown).abs().max()) > 0.01
