"""The policy: a Hugging Face causal language model that maps packed microbatches to log-probabilities.

`load_policy` refuses a model that the packed forward pass cannot compute.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpc_grpo.config import Config
from hpc_grpo.config.resources import LOGPROB_CHUNK_TOKENS
from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.attention import (
    PACKED_SDPA,
    PACKED_VARLEN,
    document_layout,
    register_kernels,
    require_flash_attention,
    require_varlen_attention,
    varlen_layout,
)
from hpc_grpo.learner.experts import Routers
from hpc_grpo.learner.packing import PackedBatch, pack
from hpc_grpo.learner.sequence import sequence_group
from hpc_grpo.learner.vision import Vision, tower_parameters
from hpc_grpo.run.contract import WEIGHTS_DIR_VARIABLE
from hpc_grpo.run.pulse import PULSE
from hpc_grpo.types import ParameterSpec, TrainSequence
from hpc_grpo.weights.contract import refuse_long_rope, refuse_scaled_logits, refuse_short_context, refuse_uneven_heads

ADAPTER = "default"
"""peft's name of the only adapter (`lora.py`)."""
_PEFT_PREFIX = "base_model.model."
"""Prefix of names in PEFT's files."""

_PROBED_TOKENS = 16
_PROBED_DIFFERENCE = 0.05
"""In nats. Rounding changes the log-probabilities of equal documents by much less."""


class _Float32Product(torch.autograd.Function):  # type: ignore[misc]
    """Multiplies `hidden` `[C, D]` by `weight` `[V, D]`, both bfloat16, into float32 logits `[C, V]`.

    On CUDA one kernel does this without float32 copies of its operands; torch has no gradient for it. vLLM calls the
    same kernel (`LogitsProcessor._apply_head`). On other devices, both operands are converted to float32 first.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.float().t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        # Multiply in bfloat16, the type of both gradients. In float32 a GPU would take fifteen times as long.
        hidden, weight = ctx.saved_tensors
        rounded = grad.to(weight.dtype)
        # With LoRA the weight is frozen.
        return rounded @ weight, rounded.t() @ hidden if ctx.needs_input_grad[1] else None


class LogprobHead(nn.Module):  # type: ignore[misc]
    """Replaces a model's `lm_head` and holds its parameters, so parameter names and tied weights do not change.

    `in_float32`: compute logits in float32 for parameters of any precision (`model.head_dtype`).
    `entropy_gradient`: entropies have a gradient too, and a chunk's probabilities are kept for it.

    The loop over chunks is inside `forward`. Under ZeRO-3 the module's hooks then gather the weight once per
    microbatch, although ranks have different numbers of chunks.
    """

    def __init__(
        self, head: Any, chunk_tokens: int, *, in_float32: bool = True, entropy_gradient: bool = False
    ) -> None:
        super().__init__()
        self.weight, self.bias, self._chunk_tokens = head.weight, head.bias, chunk_tokens
        self._in_float32, self._entropy_gradient = in_float32, entropy_gradient

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, temperature: float = 1.0, *, with_entropy: bool = True
    ) -> Any:
        """Return log-probabilities and entropies, both `[C]` float32 in nats, of the tempered distribution.

        `hidden` is `[C, D]`, `targets` `[C]` int64. Float32 logits exist for one chunk at a time. With several chunks,
        the backward pass recomputes each chunk. Without `with_entropy`, as in scoring, entropies are None.

        The model's own forward pass gives only `hidden` `[1, C, D]`, and gets logits `[1, C, V]`.
        """
        if targets is None:
            return self._logits(hidden.squeeze(0)).unsqueeze(0)
        chunks = list(zip(hidden.split(self._chunk_tokens), targets.split(self._chunk_tokens), strict=True))
        compute: Any = self._chunk
        if len(chunks) > 1 and torch.is_grad_enabled():
            compute = partial(checkpoint, self._chunk, use_reentrant=False, preserve_rng_state=False)
        logprobs, entropies = zip(*(compute(*chunk, temperature, with_entropy) for chunk in chunks), strict=True)
        return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None

    def _logits(self, hidden: Tensor) -> Tensor:
        if not self._in_float32 or hidden.dtype == torch.float32:
            return functional.linear(hidden, self.weight, self.bias).float()
        logits = _Float32Product.apply(hidden, self.weight)
        return logits if self.bias is None else logits + self.bias.float()

    def _chunk(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logits = self._logits(hidden)
        if temperature != 1.0:
            logits = logits / temperature
        log_normalizer = logits.logsumexp(dim=-1)
        logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_normalizer
        if not with_entropy:
            return logprobs, None
        # The entropy comes last: the recomputation in backward stops before it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._entropy_gradient):
            # Not log_normalizer - sum(p * logits): this difference would lose precision for a small entropy.
            all_logprobs = logits - log_normalizer.unsqueeze(-1)
            entropy = -(all_logprobs.exp() * all_logprobs).sum(dim=-1)
        return logprobs, entropy


class PolicyModel(nn.Module):  # type: ignore[misc]
    """Wraps a causal language model. `forward` returns the inputs of losses, never logits."""

    def __init__(self, language_model: Any, config: Config, vision: Vision | None = None) -> None:
        super().__init__()
        head = LogprobHead(
            language_model.get_output_embeddings(),
            LOGPROB_CHUNK_TOKENS,
            in_float32=config.model.head_dtype == "float32",
            entropy_gradient=config.loss.entropy_coef > 0.0,
        )
        self.language_model = language_model
        self._vision = vision
        language_model.set_output_embeddings(head)
        # Without rollouts (SFT), no temperature was applied.
        self._temperature = config.rollout.temperature if config.needs.rollouts else 1.0
        self._hf_names = frozenset(name for name, _ in language_model.named_parameters())
        self._group = sequence_group(config.train.sequence_parallel)
        self.routers = Routers(language_model)

    def forward(
        self, batch: PackedBatch, *, with_entropy: bool = True, with_balance: bool = False, by_itself: bool = False
    ) -> Any:
        """Return the head's outputs for the targets of `batch`: log-probabilities and entropies, both `[C]` float32.

        `with_balance` appends the loss `[C]` that balances a mixture's experts. With `train.sequence_parallel` above 1
        this is a collective of the group. `by_itself`: log-probabilities by the model's own forward pass.
        """
        if with_balance:
            with self.routers.recorded() as logits:
                outputs = self.forward(batch, with_entropy=with_entropy)
            return (*outputs, self.routers.balance(logits, batch, self._group))
        if self._group is None:
            return self._of_slice(batch, with_entropy, by_itself)
        own, places = self._group.slice_of(batch)
        outputs = self._of_slice(own, with_entropy, by_itself)
        whole = partial(self._group.whole, places=places, num_targets=len(batch.target_ids))
        return tuple(None if values is None else whole(values) for values in outputs)

    def _of_slice(self, batch: PackedBatch, with_entropy: bool, by_itself: bool) -> Any:
        """Return the outputs for `batch`, a row or a slice. Only attention uses document borders and other slices."""
        decoder, inputs = self._inputs(batch)
        if by_itself:
            logits = self.language_model(**inputs, sequence_group=self._group).logits[0]
            logprobs = (logits.index_select(0, batch.target_positions).float() / self._temperature).log_softmax(-1)
            return logprobs.gather(-1, batch.target_ids.unsqueeze(-1)).squeeze(-1), None
        states = decoder(**inputs, sequence_group=self._group).last_hidden_state
        hidden = states[0].index_select(0, batch.target_positions)
        head = self.language_model.get_output_embeddings()
        return head(hidden, batch.target_ids, self._temperature, with_entropy=with_entropy)

    def _inputs(self, batch: PackedBatch) -> tuple[Any, dict[str, Any]]:
        """Return the decoder, and its inputs and document borders for `batch`."""
        lengths, device = batch.document_lengths, batch.input_ids.device
        kernel = self.language_model.config.get_text_config()._attn_implementation
        borders: dict[str, Any]
        if kernel == PACKED_SDPA:
            borders = {"packed_layout": document_layout(lengths, device, batch.prompts)}
        elif kernel == PACKED_VARLEN:
            borders = {"packed_layout": varlen_layout(lengths, device, batch.prompts)}
        else:
            borders = {f"cu_seq_lens_{heads}": batch.cu_seqlens for heads in "qk"}
            borders |= {f"max_length_{heads}": max(lengths) for heads in "qk"}
        if batch.experts is not None:
            borders["routed_experts"] = batch.experts
        if self._vision is not None:
            return self._vision.decoder, {**self._vision.inputs(batch), **borders, "use_cache": False}
        ids, positions = batch.input_ids.unsqueeze(0), batch.position_ids.unsqueeze(0)
        return self.language_model.base_model, {
            "input_ids": ids, "position_ids": positions, **borders, "use_cache": False,
        }  # fmt: skip

    def hf_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the loaded model's parameters under their Hugging Face names; tied parameters appear once."""
        named = ((name.replace(".base_layer.", "."), own) for name, own in self.language_model.named_parameters())
        yield from (own for own in named if own[0] in self._hf_names)


def score(model: PolicyModel, batch: PackedBatch) -> Tensor:
    """Return the log-probabilities, or a critic's values, `[C]` of a microbatch without gradient. Reports progress."""
    with torch.no_grad():
        logprobs, _ = model(batch, with_entropy=False)
    PULSE.beat()
    return logprobs


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape before ZeRO-3's partitioning, which sets `.shape` to `(0,)`."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def adapter_parameters(model: PolicyModel) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by their names in PEFT's files."""
    named = model.language_model.named_parameters()
    return {f"{_PEFT_PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": own for name, own in named if f".{ADAPTER}." in name}


def parameter_specs(model: PolicyModel, dtype: str, *, of_adapter: bool = False) -> list[ParameterSpec]:
    """List every parameter once, in the model's order, without a tied output layer; or the adapter's parameters."""
    named = adapter_parameters(model) if of_adapter else dict(model.hf_named_parameters())
    return [ParameterSpec(name, full_shape(p), dtype) for name, p in named.items()]


@contextmanager
def gathered(model: PolicyModel, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Yield full parameters by name, valid only inside the `with` block: they are the live weights, not copies.

    `names` are all the model's, or all the adapter's (`parameter_specs`). For a module with `merged_weight()`, yields
    the merged weight, a copy (`LearnerPart`). Under ZeRO-3 a collective: every learner must enter with the same names.
    Raises KeyError for an unknown name.
    """
    of_adapter = all(name.startswith(_PEFT_PREFIX) for name in names)
    parameters = adapter_parameters(model) if of_adapter else dict(model.hf_named_parameters())
    chosen = {name: parameters[name] for name in names}
    weights = [] if of_adapter else [name for name in names if name.endswith(".weight")]
    owners = {name: model.language_model.get_submodule(name.removesuffix(".weight")) for name in weights}
    merging = {name: own for name, own in owners.items() if hasattr(own, "merged_weight")}
    with gathered_parameters([*chosen.values(), *(p for module in merging.values() for p in module.parameters())]):
        merged = {name: module.merged_weight().detach() for name, module in merging.items()}
        yield {**{name: p.detach() for name, p in chosen.items()}, **merged}


@contextmanager
def gathered_parameters(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Make parameters full inside the block: a collective under ZeRO-3, otherwise no effect."""
    if not any(hasattr(p, "ds_id") for p in parameters):
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield


def load_policy(
    config: Config, use_gradient_checkpointing: bool, path: str | None = None, key: str = "model.path"
) -> PolicyModel:
    """Load `model.path`, or `path`, the value of `key`. Raises ConfigError if the model cannot be loaded or packed."""
    path = path or config.model.path
    source = f"{key} = {path}"
    kernel: str = config.train.attention
    if kernel == "flash_attention_2":
        require_flash_attention()
    else:
        register_kernels(exchanges=config.train.sequence_parallel > 1)
        if kernel == "varlen":
            require_varlen_attention()
        kernel = PACKED_VARLEN if kernel == "varlen" else PACKED_SDPA
    folder = os.environ.get(WEIGHTS_DIR_VARIABLE, path) if path == config.model.path else path
    dtype = getattr(torch, config.model.dtype)
    has_images = config.data.images is not None
    attention = {"text_config": kernel, "vision_config": "sdpa"} if has_images else kernel
    language_model = _from_pretrained(folder, source, has_images=has_images, dtype=dtype, attn_implementation=attention)
    _check_model(language_model, config, source)
    # Ratios compare two passes over one sequence, and dropout would make these passes differ. Models have dropout as
    # modules, or as numbers with various names (`attention_dropout`, `layerdrop`, a router's `jitter_noise`).
    for module in language_model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("drop" in name or name in ("jitter_noise", "moe_jitter_eps")) and isinstance(value, float):
                setattr(module, name, 0.0)
    if use_gradient_checkpointing:
        language_model.gradient_checkpointing_enable({"use_reentrant": False})
    # Gradient checkpointing acts only in training mode; without dropout the mode changes nothing else.
    language_model.train()
    for own in tower_parameters(language_model):
        # Without images a tower has no gradient, and weight decay alone would change it.
        own.requires_grad_(config.model.train_vision)
    vision = Vision(language_model, source, trains=config.model.train_vision) if has_images else None
    return PolicyModel(language_model, config, vision)


def check_packing(model: PolicyModel, source: str, device: Any) -> None:
    """Compute a document twice in one row, and by the model's own forward pass. A collective under ZeRO-3.

    Raises ConfigError if the results differ. This detects layers that mix tokens outside attention, attention across
    documents, randomness, and steps between decoder and logits.
    """
    tokens = np.arange(_PROBED_TOKENS, dtype=np.int32) % model.language_model.get_input_embeddings().num_embeddings
    zeros = np.zeros(len(tokens), np.float32)
    probe = TrainSequence(0, 0, tokens, np.arange(len(tokens)) > 0, zeros, zeros)
    # Only an adapter still has dropout: `load_policy` has removed the model's.
    dropouts = [own for own in model.modules() if isinstance(own, nn.Dropout) and own.training]
    for dropout in dropouts:
        dropout.eval()
    row = pack([probe, probe]).to(device)  # of one length for all passes: others round differently
    first, second = score(model, row).chunk(2)
    with torch.no_grad():
        plain = model(row, with_entropy=False, by_itself=True)[0].chunk(2)[0]
    for dropout in dropouts:
        dropout.train()
    for own, other, what in (
        (first, second, "computes a sequence differently after another sequence in a packed row"),
        (first, plain, "has more than an output layer after its decoder, which learners do not compute"),
    ):
        difference = float((own - other).abs().max())
        if difference > _PROBED_DIFFERENCE:
            raise ConfigError(
                f"{source}: {type(model.language_model).__name__} {what} (log-probabilities differ by "
                f"{difference:.2g}). Use a model of another architecture, such as Llama, Qwen or Mistral."
            )


def _from_pretrained(path: str, source: str, *, has_images: bool, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise ConfigError(f"{source}: no such folder. Give a Hugging Face model folder, or a name.")
    try:
        return kind.from_pretrained(path, trust_remote_code=False, **kwargs)
    except (OSError, ValueError, ImportError, KeyError) as error:
        # A KeyError comes from an architecture whose own table of attention functions lacks this kernel.
        raise ConfigError(
            f"{source} cannot be loaded as a causal language model: {error}\n"
            f"Give a folder with config.json and weights, or the name of a model in the local Hugging Face cache."
        ) from error


def _check_model(language_model: Any, config: Config, source: str) -> None:
    settings, architecture = language_model.config.get_text_config(), type(language_model).__name__
    refuse_short_context(getattr(settings, "max_position_embeddings", None), config, source)
    refuse_long_rope(settings.to_dict(), config, source)
    refuse_scaled_logits(settings.to_dict(), source)
    head_size = getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads
    if config.train.attention == "varlen" and (head_size > 256 or head_size % 8):
        raise ConfigError(
            f"{source} has heads of {head_size} channels; train.attention = varlen needs multiples of 8, up to 256. "
            f"Set train.attention: sdpa."
        )
    refuse_uneven_heads(settings.to_dict(), config.train.sequence_parallel, source)
    if any(isinstance(module, nn.Conv1d) for module in language_model.modules()):
        raise ConfigError(
            f"{source}: {architecture} mixes neighbouring tokens by convolutions, as state-space models do. In a "
            f"packed row these would mix tokens of different sequences. Use a model with attention layers only."
        )
    if language_model.base_model is language_model:
        raise ConfigError(
            f"{source}: {architecture} does not tell its decoder from its output layer. Use another model."
        )
    if "position_ids" not in inspect.signature(language_model.base_model.forward).parameters:
        raise ConfigError(f"{source}: {architecture} accepts no position_ids, which packing needs.")
