"""What is loaded for the packed forward pass, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    FalconConfig,
    Gemma3Config,
    GPT2Config,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniCPM3Config,
    ModernBertDecoderConfig,
    OPTConfig,
    Qwen2Config,
    StableLmConfig,
)

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner import model as model_module
from hpc_grpo.learner.model import check_packing, load_policy
from hpc_grpo.learner.packing import pack
from tests.support.configs import minimal_config
from tests.support.sequences import ordinary_sequence
from tests.support.tiny_models import HEADS, SHAPE, TOKENS, VOCABULARY
from tests.support.varlen import attend_by_documents

SMALL = {"vocab_size": VOCABULARY, "num_attention_heads": 4, **TOKENS}
WINDOWED = Qwen2Config(**SHAPE, **HEADS, **TOKENS, use_sliding_window=True, sliding_window=16, max_window_layers=0)


def saved(settings: Any, path: Path) -> Any:
    """Save a model of random weights at `path`; returns it."""
    model = AutoModelForCausalLM.from_config(settings)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    saved(LlamaConfig(**SHAPE, **HEADS, **TOKENS), path)
    return path


def make_config(path: Path, **changes: Any) -> Config:
    tiny = {
        "model": {"path": str(path), "dtype": "float32", "device": "cpu"},
        "data": {"max_prompt_tokens": 32},
        "rollout": {"max_new_tokens": 32},
    }
    return minimal_config(tiny, **changes)


def test_a_folder_that_is_missing_or_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_policy(make_config(tmp_path / "absent"), False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be loaded as a causal language model"):
        load_policy(make_config(tmp_path), False)


def test_weights_are_read_from_the_nodes_copy_and_a_teachers_are_not(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HPC_GRPO_WEIGHTS_DIR", str(model_path))
    slow = str(tmp_path / "slow")
    for path in (None, slow):  # a reference may be the model itself
        policy = load_policy(make_config(tmp_path / "slow"), False, path, "loss.kl.reference.model")
        assert policy.language_model.name_or_path == str(model_path)
    with pytest.raises(ConfigError, match=r"task\.args\.teacher = .*/slow: no such folder"):
        load_policy(make_config(model_path), False, slow, "task.args.teacher")


@pytest.fixture
def has_varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "require_varlen_attention", lambda: None)


@pytest.mark.usefixtures("has_varlen")
def test_torchs_kernel_for_documents_takes_a_model_with_a_sliding_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_documents)
    model = saved(WINDOWED, tmp_path).eval()
    policy = load_policy(make_config(tmp_path, train={"attention": "varlen"}, rollout={"temperature": 1.0}), False)
    tokens = np.random.default_rng(0).integers(2, VOCABULARY, 40).astype(np.int32)
    with torch.no_grad():
        packed, _ = policy(pack([ordinary_sequence(0, 0, tokens[:9], 5), ordinary_sequence(1, 0, tokens, 30)]))
        logprobs = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
    expected = logprobs[9:-1].gather(-1, torch.from_numpy(tokens[10:].astype(np.int64))[:, None])[:, 0]
    torch.testing.assert_close(packed[5:], expected, rtol=0.0, atol=1e-5)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a context shorter than prompt and completion": (
        LlamaConfig(**SHAPE, **HEADS, **TOKENS), {"data": {"max_prompt_tokens": 33}}, r"= 65 exceeds .*: 64 tokens"
    ),
    "heads that torch's kernel for documents does not take": (
        LlamaConfig(**SHAPE, **{**HEADS, "head_dim": 12}, **TOKENS), {"train": {"attention": "varlen"}},
        r"heads of 12 channels; .* multiples of 8, up to 256",
    ),
    "layers that look across documents beside attention": (
        Lfm2Config(**SHAPE, **HEADS, **TOKENS, block_ff_dim=48, layer_types=["conv", "full_attention"]), {},
        "Lfm2ForCausalLM mixes neighbouring tokens by convolutions",
    ),
    "no choice of attention kernels": (
        FalconConfig(**SMALL, hidden_size=32, num_hidden_layers=1, alibi=False), {},
        "cannot be loaded as a causal language model: 'packed_sdpa'",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("has_varlen")
@pytest.mark.parametrize(("settings", "changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_packed_is_refused(
    settings: Any, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(settings, tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_policy(make_config(tmp_path, **changes), use_gradient_checkpointing=False)


@pytest.mark.parametrize("capability", [None, (7, 5)], ids=["no GPU", "an older GPU"])
def test_torchs_kernel_for_documents_is_refused_where_it_does_not_run(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    with pytest.raises(ConfigError, match=r"varlen needs a GPU .* of compute capability 8.0"):
        load_policy(make_config(model_path, train={"attention": "varlen"}), False)


def test_without_images_a_vision_tower_is_frozen(model_path: Path, tmp_path: Path) -> None:
    """A tower without a gradient would shrink by weight decay alone."""
    text = {**SHAPE, **HEADS, **TOKENS, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14}  # fmt: skip
    described = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_index=5)
    AutoModelForImageTextToText.from_config(described).save_pretrained(tmp_path)
    named = list(load_policy(make_config(tmp_path), use_gradient_checkpointing=False).hf_named_parameters())
    frozen = {name for name, own in named if not own.requires_grad}
    assert (
        frozen == {name for name, _ in named if name.startswith(("model.vision_tower", "model.multi_modal"))} != set()
    )
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=False)
    assert all(own.requires_grad for own in policy.parameters())


DROPPING = {
    "in modules": GPT2Config(
        **SMALL, n_embd=32, n_layer=2, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    ),
    "as numbers": OPTConfig(
        **SMALL, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, max_position_embeddings=64,
        dropout=0.5, attention_dropout=0.5, layerdrop=0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("settings", DROPPING.values(), ids=DROPPING)
def test_a_model_with_dropout_is_loaded_without_it(settings: Any, tmp_path: Path) -> None:
    saved(settings, tmp_path)
    policy = load_policy(make_config(tmp_path), use_gradient_checkpointing=False)
    assert policy.training
    batch = pack([ordinary_sequence(0, 0, np.arange(20) % VOCABULARY, 12)])
    torch.testing.assert_close(policy(batch)[0], policy(batch)[0], rtol=0.0, atol=0.0)


def test_a_model_that_lets_a_document_see_the_one_before_it_is_refused(model_path: Path) -> None:
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=False)
    policy.language_model.get_input_embeddings().register_forward_hook(lambda _module, _ids, states: states.cumsum(1))
    with pytest.raises(ConfigError, match="computes a sequence differently after another sequence"):
        check_packing(policy, "model.path", "cpu")


MORE_THAN_A_HEAD = {
    "scaled": MiniCPM3Config(
        **SHAPE, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, max_position_embeddings=64, dim_model_base=4, **TOKENS,
    ),
    "a layer between": ModernBertDecoderConfig(
        **SHAPE, num_attention_heads=4, max_position_embeddings=64, local_attention=8, decoder_bias=True,
        bos_token_id=2, eos_token_id=1, pad_token_id=0, initializer_range=0.5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("settings", MORE_THAN_A_HEAD.values(), ids=MORE_THAN_A_HEAD)
def test_a_model_with_more_than_an_output_layer_after_its_decoder_is_refused(settings: Any, tmp_path: Path) -> None:
    saved(settings, tmp_path)
    policy = load_policy(make_config(tmp_path), use_gradient_checkpointing=False)
    with pytest.raises(ConfigError, match="has more than an output layer after its decoder"):
        check_packing(policy, "model.path", "cpu")


def test_a_model_whose_decoder_is_not_apart_is_refused(tmp_path: Path) -> None:
    saved(Llama4TextConfig(**SHAPE, **HEADS, head_dim=8, intermediate_size_mlp=48, num_local_experts=2), tmp_path)
    with pytest.raises(ConfigError, match="Llama4ForCausalLM does not tell its decoder from its output layer"):
        load_policy(make_config(tmp_path), use_gradient_checkpointing=False)


def test_an_attention_that_is_not_told_where_documents_begin_is_refused(tmp_path: Path) -> None:
    saved(StableLmConfig(**SHAPE, **HEADS, **TOKENS), tmp_path)
    policy = load_policy(make_config(tmp_path), use_gradient_checkpointing=False)
    with pytest.raises(ConfigError, match="StableLmAttention of transformers does not receive the borders"):
        check_packing(policy, "model.path", "cpu")


def test_no_attention_kernel_is_fetched_from_a_hub(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package `kernels`, and without flash-attn, transformers asks the hub for one."""
    fetched: list[str] = []

    def fetch(name: str, **_: Any) -> None:
        fetched.append(name)
        raise OSError("no network")

    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    monkeypatch.setattr("transformers.modeling_utils.lazy_import_flash_attention", fetch)
    with pytest.raises(ConfigError) as caught:
        load_policy(make_config(model_path, train={"attention": "flash_attention_2"}, model={"device": "auto"}), False)
    assert fetched == []
    assert "set train.attention: sdpa" in str(caught.value)
