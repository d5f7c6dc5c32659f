"""The packed forward pass against the plain Hugging Face model, document by document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.algorithms.terms import LossInputs
from hpc_grpo.config import Config
from hpc_grpo.config.resources import Budget
from hpc_grpo.learner import model as model_module
from hpc_grpo.learner.model import PolicyModel, load_policy, score
from hpc_grpo.learner.packing import pack
from hpc_grpo.learner.split import split_microbatches
from hpc_grpo.types import Completion, Episode, GroupSamples, TrainSequence
from tests.support.configs import minimal_config
from tests.support.sequences import ordinary_sequence
from tests.support.tiny_models import HEADS, SHAPE, TOKENS, VOCABULARY
from tests.support.varlen import attend_by_documents

MODELS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, **HEADS, **TOKENS, tie_word_embeddings=True)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS)
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    MODELS[request.param]().save_pretrained(path)
    return path


def make_config(path: Path, **changes: Any) -> Config:
    tiny = {
        "model": {"path": str(path), "dtype": "float32", "device": "cpu"},
        "data": {"max_prompt_tokens": 32},
        "rollout": {"max_new_tokens": 32, "temperature": 0.7},
    }
    return minimal_config(tiny, **changes)


def make_sequences(lengths: list[tuple[int, int]]) -> list[TrainSequence]:
    random = np.random.default_rng(0)
    return [
        ordinary_sequence(index, 0, random.integers(2, VOCABULARY, p + c), c) for index, (p, c) in enumerate(lengths)
    ]


def plain_logprobs(model: Any, sequence: TrainSequence, temperature: float) -> torch.Tensor:
    """`[C]`, with no packing, no chunks and transformers' own attention."""
    tokens = torch.from_numpy(sequence.token_ids.astype(np.int64))
    logits = model(tokens.unsqueeze(0)).logits[0, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return logprobs[sequence.loss_mask[1:]]


UNEQUAL = [(5, 7), (1, 20), (9, 1), (3, 30)]
EQUAL = [(4, 8), (7, 5), (1, 11)]


@pytest.mark.parametrize(
    ("lengths", "attention", "checkpointing"),
    [(UNEQUAL, "sdpa", False), (UNEQUAL, "eager", True), (EQUAL, "eager", False), ([(3, 9)], "sdpa", False)],
    ids=["unequal", "recomputed", "equal", "single"],
)
def test_packed_equals_unpacked(model_path: Path, lengths: Any, attention: str, checkpointing: bool) -> None:
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=checkpointing)
    plain = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation=attention).eval()
    sequences = make_sequences(lengths)
    batch = pack(sequences)
    packed, entropy = policy(batch)
    expected = torch.cat([plain_logprobs(plain, sequence, 0.7) for sequence in sequences])
    torch.testing.assert_close(packed, expected, rtol=0.0, atol=1e-5)
    assert entropy.shape == packed.shape
    weights = torch.linspace(-1.0, 1.0, len(packed))
    (packed * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in policy.hf_named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def grouped_sequences() -> list[TrainSequence]:
    """Groups of completions of 1 to 30 tokens: two of prompts of 9 and 2 tokens, one of a single completion, and
    episodes with an observation, the last two of which have another prompt from its fifth token on.
    """
    random, made = np.random.default_rng(1), []
    for ordinal, (prompt, completions) in enumerate([(9, (7, 30, 1, 20)), (2, (12, 5, 28)), (6, (8,))]):
        shared = random.integers(2, VOCABULARY, prompt)
        for sample, own in enumerate(completions):
            tokens = np.concatenate([shared, random.integers(2, VOCABULARY, own)])
            made.append(ordinary_sequence(ordinal, sample, tokens, own, advantage=float(random.normal())))
    prompt = random.integers(2, VOCABULARY, 8)
    for sample in range(4):
        rewritten = np.concatenate([prompt[:4], random.integers(2, VOCABULARY, 6)]) if sample > 1 else prompt
        tokens = np.concatenate([rewritten, random.integers(2, VOCABULARY, 12)])
        episode = ordinary_sequence(3, sample, tokens, 12, advantage=float(random.normal()))
        loss_mask = episode.loss_mask & (np.arange(len(tokens)) % 7 != 0)
        made.append(replace(episode, loss_mask=loss_mask, advantages=episode.advantages * loss_mask))
    return made


def logprobs_and_gradient(policy: PolicyModel, budget: Budget) -> tuple[dict[tuple[int, int], Any], torch.Tensor]:
    """The logprobs of each sequence, and the gradient of a sum of them over all microbatches, in float64."""
    policy.zero_grad()
    logprobs = {}
    for group in split_microbatches(grouped_sequences(), budget):
        batch = pack(group, shares_prompts=budget.shares_prompts)
        own, entropy = policy(batch)
        torch.dot(own, batch.advantages).backward()
        assert entropy.shape == own.shape
        parts = own.detach().split([each.num_trained_tokens for each in group])
        logprobs |= {(each.ordinal, each.sample_index): part for each, part in zip(group, parts, strict=True)}
    return logprobs, torch.cat([parameter.grad.double().flatten() for parameter in policy.parameters()])


@pytest.mark.parametrize("budget", [40, 64, 1000])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_prompt_that_goes_through_the_model_once_changes_no_number(
    model_path: Path, budget: int, checkpointing: bool
) -> None:
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=checkpointing)
    expected, gradient = logprobs_and_gradient(policy, Budget(1000))
    logprobs, own_gradient = logprobs_and_gradient(policy, Budget(budget, shares_prompts=True))
    assert logprobs.keys() == expected.keys()
    for place, own in logprobs.items():
        torch.testing.assert_close(own, expected[place], rtol=1e-5, atol=1e-5)
    assert float((own_gradient - gradient).norm() / gradient.norm()) < 1e-6


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_torchs_kernel_for_documents_changes_no_number(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, shares_prompts: bool
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_documents)
    monkeypatch.setattr(model_module, "require_varlen_attention", lambda: None)
    expected, gradient = logprobs_and_gradient(load_policy(make_config(model_path), False), Budget(1000))
    policy = load_policy(make_config(model_path, train={"attention": "varlen"}), use_gradient_checkpointing=True)
    logprobs, own_gradient = logprobs_and_gradient(policy, Budget(64, shares_prompts))
    for place, own in logprobs.items():
        torch.testing.assert_close(own, expected[place], rtol=1e-5, atol=1e-5)
    assert float((own_gradient - gradient).norm() / gradient.norm()) < 1e-6


def test_a_shared_prompt_is_as_exact_as_an_unshared_one_in_bfloat16(model_path: Path) -> None:
    """Distances to float32 of the same weights."""
    small = load_policy(make_config(model_path, model={"dtype": "bfloat16"}), use_gradient_checkpointing=False)
    whole = load_policy(make_config(model_path), use_gradient_checkpointing=False)
    with torch.no_grad():
        for parameter, rounded in zip(whole.parameters(), small.parameters(), strict=True):
            parameter.copy_(rounded)
    _, exact = logprobs_and_gradient(whole, Budget(1000))
    distances = [
        float((logprobs_and_gradient(small, Budget(1000, shares_prompts))[1] - exact).norm() / exact.norm())
        for shares_prompts in (False, True)
    ]
    assert 0.0 < distances[1] < 1.25 * distances[0] < 0.1


def test_an_observation_in_mid_episode_is_read_but_not_trained_on(model_path: Path) -> None:
    """Prompt 4, completion 5, observation 3, completion 6: as both completions, each after all that was before it."""
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=False)
    [whole] = make_sequences([(4, 14)])
    positions = np.arange(18)
    episode = replace(whole, loss_mask=((positions >= 4) & (positions < 9)) | (positions >= 12))
    first, second = (ordinary_sequence(0, 0, whole.token_ids[:end], count) for end, count in ((9, 5), (18, 6)))
    alone = torch.cat([policy(pack([segment]))[0] for segment in (first, second)])
    torch.testing.assert_close(policy(pack([episode]))[0], alone)


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_an_observation_has_a_gradient_of_exactly_0(model_path: Path, shares_prompts: bool) -> None:
    """Two episodes of three turns: from their records to the state of each token, which makes the next one's logits."""
    config = make_config(model_path, loss={"entropy_coef": 0.1, "denominator": "sequences"})
    policy, algorithm = load_policy(config, use_gradient_checkpointing=False), algorithm_of(config)
    draws, prompt = np.random.default_rng(0), np.arange(4, dtype=np.int32)

    def turn(context: Any, length: int) -> Completion:
        own = draws.integers(0, VOCABULARY, length).astype(np.int32)
        logprobs = -draws.random(length).astype(np.float32)
        return Completion(own, logprobs, np.zeros(length, np.int32), "stop", context, context is prompt)

    told = [draws.integers(0, VOCABULARY, 3).astype(np.int32) for _ in range(4)]
    episodes = tuple(Episode((turn(prompt, 5), turn(told[at], 2), turn(told[at + 1], 4)), "stop") for at in (0, 2))
    sequences = algorithm.sequences(GroupSamples(0, episodes), ((1.0, -1.0, 2.0), -0.5), (True, True))
    spoiled = [
        replace(own, **{name: np.where(own.loss_mask, getattr(own, name), np.nan).astype(np.float32)
                        for name in ("advantages", "engine_logprobs")})
        for own in sequences
    ]  # fmt: skip
    batch, states = pack(spoiled, shares_prompts=shares_prompts), []
    policy.language_model.base_model.register_forward_hook(lambda _model, _args, out: states.append(out[0]))
    logprobs, entropy = policy(batch)
    states[0].retain_grad()
    inputs = LossInputs(
        logprobs, logprobs.detach(), batch.engine_logprobs, None, batch.advantages, batch.sequence_ids, entropy=entropy
    )
    objective = algorithm.objective()
    weights = objective.token_weights(32, batch.sequence_ids, batch.mask)
    torch.dot(objective.loss(inputs).per_token, weights.of_tokens).backward()
    written = [False] * 3 + [True] * 5 + [False] * 3 + [True] * 2 + [False] * 3 + [True] * 4 + [False]
    # The last token of a shared prompt stands before both completions.
    written = [*written[:4], *written[4:] * 2] if shares_prompts else written * 2
    sizes = states[0].grad[0].abs().amax(dim=-1)
    assert sizes[~torch.tensor(written)].max() == 0.0
    assert sizes[torch.tensor(written)].min() > 0.0


def test_no_dense_mask_is_built(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.masking_utils as masking

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a mask was built")

    for name in list(masking.ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.setitem(masking.AttentionMaskInterface._global_mapping, name, refuse)
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=False)
    policy(pack(make_sequences(UNEQUAL)))


def test_sft_uses_the_plain_distribution(model_path: Path) -> None:
    policy = load_policy(make_config(model_path, task="sft"), use_gradient_checkpointing=False)
    plain = AutoModelForCausalLM.from_pretrained(model_path).eval()
    sequences = make_sequences([(4, 9)])
    expected = plain_logprobs(plain, sequences[0], 1.0)
    torch.testing.assert_close(policy(pack(sequences))[0], expected, rtol=0.0, atol=1e-5)


def test_a_scoring_pass_computes_no_entropies(model_path: Path) -> None:
    policy, batch = load_policy(make_config(model_path), use_gradient_checkpointing=False), pack(make_sequences(EQUAL))
    given: list[Any] = []
    policy.language_model.get_output_embeddings().register_forward_hook(lambda _head, _args, both: given.append(both))
    own = score(policy, batch)
    (logprobs, entropy) = given[0]
    assert entropy is None
    torch.testing.assert_close(own, policy(batch)[0].detach())
    assert logprobs is own
