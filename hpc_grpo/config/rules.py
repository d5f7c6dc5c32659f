"""Check rules that span several fields. Each raises ConfigError with the rule, the values and the fix."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

from hpc_grpo.algorithms.advantages import PassKAdvantage, TurnsAdvantage
from hpc_grpo.config.resources import MOST_BESIDE_A_LEARNER, check_sequence_parallel, expects_gpus
from hpc_grpo.config.rollout import VllmArgs, owner_of
from hpc_grpo.config.schema import Config
from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.registry import ENVIRONMENTS, REWARDS

_HEADS = {"lm_head", "embed_tokens"}
_EVAL_SET = re.compile("[A-Za-z][A-Za-z0-9_-]*")


def check_rules(config: Config) -> None:
    """Raise ConfigError for the first rule that `config` breaks."""
    for rule in _RULES:
        rule(config)


def _run_name(config: Config) -> None:
    name = config.run.name
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(name.encode()) > 200:
        raise ConfigError(
            f"run.name = {name!r}: must be one folder name of at most 200 bytes, without '/'. Choose another name."
        )


def _one_length(config: Config) -> None:
    lengths = ("total_steps", "total_episodes", "total_epochs")
    given = [f"train.{name}" for name in lengths if getattr(config.train, name) is not None]
    if len(given) != 1:
        found = "None is set. Set one, such as train.total_epochs=1."
        if given:
            found = f"Set: {', '.join(given)}. Keep one, and set the others to null."
        raise ConfigError(
            f"Exactly one of train.total_steps, train.total_episodes and train.total_epochs must be set. {found}"
        )


def _nodes(config: Config) -> None:
    num_nodes, least = config.launch.num_nodes, config.launch.min_nodes
    if least is not None and least > num_nodes:
        raise ConfigError(
            f"launch.min_nodes = {least} must be at most launch.num_nodes = {num_nodes}: after the loss of a node, a "
            "run continues with at least launch.min_nodes. Lower launch.min_nodes, or set it to null."
        )
    if config.needs.critic and least is not None and least < num_nodes:
        raise ConfigError(
            f"launch.min_nodes = {least} is below launch.num_nodes = {num_nodes}. A run with a critic can only "
            "resume with as many learners as before. Set launch.min_nodes=null: the next job then has all nodes."
        )


def _lag_and_minibatches(config: Config) -> None:
    lag, minibatches = config.rollout.max_policy_lag, config.train.num_minibatches
    if lag % minibatches:
        raise ConfigError(
            f"rollout.max_policy_lag = {lag} counts optimizer steps and must be a multiple of "
            f"train.num_minibatches = {minibatches}. Choose such a multiple, or change train.num_minibatches."
        )
    if minibatches > config.items_per_step:
        key = "task.args.batch_size" if config.needs.labels else "rollout.prompts_per_step"
        raise ConfigError(
            f"train.num_minibatches = {minibatches} exceeds {key} = {config.items_per_step}: a minibatch holds at "
            f"least one group or demonstration. Lower it, or raise {key}."
        )


def _names(config: Config) -> None:
    """Check names and settings of built-ins, and that each source has rewards and prompts. Imports no user module."""
    if not config.needs.rollouts:
        return
    for key, reward in config.rewards_by_key.items():
        REWARDS.check(reward.name)
        reward.settings(key)
    environments = config.environments
    for _, environment in environments.values():
        if environment.name.partition(":")[0] not in ENVIRONMENTS.names():  # textarena:Sokoban is built in, too
            ENVIRONMENTS.check(environment.name)
    for key, source in config.data.sources():
        has_rewards = bool(config.rewards_of(source))
        if key in environments:
            if environments[key][1].name == "tools" and not has_rewards:
                raise ConfigError(
                    f"{key} uses the environment tools, which gives no reward, and rewards is empty. The model would "
                    "learn nothing. Add a reward, such as math or correctness."
                )
        elif config.needs.rewards and not has_rewards:
            raise ConfigError(
                f"rewards is empty, and {key} has no environment that gives rewards. Name one, such as correctness."
            )
        elif source.prompt_field is None and source.messages_field is None:
            raise ConfigError(
                f"{key}.prompt_field = null is for sources with an environment, which makes the prompt. Name the "
                f"column with the prompts, or set environment."
            )


def _needs_engines(config: Config) -> None:
    """Raise ConfigError for a key that needs engines, if the task has none."""
    for given, is_given, lacks, off in (
        ("eval.every is set", config.eval.every is not None, "engines to sample with", "null"),
        ("data.curriculum is set", config.data.curriculum is not None, "rollouts to judge prompts by", "null"),
        ("train.router_replay = true", config.train.router_replay, "engines that choose experts", "false"),
        ("placement.colocate = true", config.placement.colocate, "engines", "false"),
    ):
        if is_given and not config.needs.rollouts:
            raise ConfigError(f"{given}, but task {config.task.name} has no {lacks}. Set it to {off}.")


def _eval(config: Config) -> None:
    if config.eval.every is None:
        return
    if not config.data.has_eval:
        raise ConfigError(
            "eval.every is set, but data.eval is not. Set data.eval, hold out a share of data.train "
            "(data.held_out=0.05), or set eval.every to null."
        )
    sources = config.data.judged_sources
    names = [reward.name for _, source in sources for reward in config.rewards_of(source)]
    names += ["environment" for key, _ in sources if key in config.environments]
    if not all(config.rewards_of(source) or key in config.environments for key, source in sources):
        raise ConfigError("eval.every is set, but rewards is empty. Name the reward that counts, such as correctness.")
    if config.eval.reward not in (None, *names):
        raise ConfigError(
            f"eval.reward = {config.eval.reward!r} must be one of rewards: {', '.join(dict.fromkeys(names))}. Set it "
            "to one of them, or to null for the default: correctness, or the first reward."
        )


def _mixes(config: Config) -> None:
    for key, source in config.data.sources(for_eval=True):
        if source.weight is not None or source.count is not None:
            raise ConfigError(
                f"{key}: weight and count are for training. An eval uses each prompt once. Set max_items instead."
            )
    sources = config.data.sources(for_eval=False)
    weighted = [key for key, source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        without = ", ".join(key for key, source in sources if source.weight is None)
        raise ConfigError(
            f"{weighted[0]} has a weight, so each source of the mix needs a weight. Give {without} a weight."
        )
    if weighted and (counted := [key for key, source in sources if source.count is not None]):
        raise ConfigError(f"{counted[0]}: weight and count exclude each other. Use one of them in the whole mix.")


def _eval_data(config: Config) -> None:
    for name in config.data.eval_sets:
        if not _EVAL_SET.fullmatch(name):
            raise ConfigError(
                f"data.eval_sets has {name!r}: the name of a set must be letters, digits, '_' and '-', and must "
                "begin with a letter. It becomes part of metrics and paths. Choose another name."
            )
    named = [("eval.metrics has", name, "eval metrics") for name in config.eval.metrics]
    named += [("train.on_step.name =", name, "callbacks") for name in config.train.functions.values()]
    for given, name, kind in named:
        if ":" not in name:
            raise ConfigError(
                f"{given} {name!r}: there are no built-in {kind}. Name your function: module:function or "
                "path/to/file.py:function."
            )
    if config.data.eval is not None and config.data.held_out is not None:
        raise ConfigError("data.eval and data.held_out exclude each other: set one of them to null.")


def _curriculum(config: Config) -> None:
    curriculum = config.data.curriculum
    if curriculum is None:
        return
    for key, source in config.data.sources(for_eval=False):
        if not config.rewards_of(source) and key not in config.environments:
            raise ConfigError(
                f"data.curriculum judges prompts by rewards, and {key} has no rewards. Name some, or set "
                f"data.curriculum to null."
            )
    if curriculum.difficulty_field is None and curriculum.difficulty_epochs != 1.0:
        raise ConfigError(
            f"data.curriculum.difficulty_epochs = {curriculum.difficulty_epochs:g} has no effect without "
            "data.curriculum.difficulty_field. Set difficulty_field to a column, or remove difficulty_epochs."
        )
    if curriculum.hard_to is not None and curriculum.hard_to >= curriculum.easy_from:
        raise ConfigError(
            f"data.curriculum.hard_to = {curriculum.hard_to:g} must be less than data.curriculum.easy_from = "
            f"{curriculum.easy_from:g}: a prompt cannot be both easy and hard. Lower it, or set it to null."
        )


def _lora(config: Config) -> None:
    lora = config.lora
    if lora is None:
        if config.model.adapter is not None:
            raise ConfigError(
                f"model.adapter = {config.model.adapter} needs section lora. Set lora.rank, lora.alpha and "
                f"lora.targets to the adapter's values, or set model.adapter=null."
            )
        return
    named = [] if lora.targets == "all-linear" else lora.targets
    if not lora.targets or _HEADS & {*named}:
        raise ConfigError(
            f"lora.targets = {lora.targets} must be all-linear, or names of linear layers such as [q_proj, v_proj], "
            f"without {', '.join(sorted(_HEADS))}: vLLM's logprobs ignore adapters of these layers. Leave them out."
        )
    if dotted := next((name for name in named if "." in name), None):
        raise ConfigError(
            f"lora.targets has {dotted!r}, the path of a layer. A target is the name of all layers to adapt: write "
            f"{dotted.rpartition('.')[2]!r}."
        )
    if lora.dropout > 0.0 and config.needs.rollouts:
        raise ConfigError(
            f"lora.dropout = {lora.dropout:g} would make the policy ratios random: task {config.task.name} compares "
            f"two passes over a sequence. Set lora.dropout=0."
        )


def _images(config: Config) -> None:
    data = config.data
    if data.images is None:
        if config.model.train_vision or data.max_pixels is not None:
            key = "model.train_vision" if config.model.train_vision else "data.max_pixels"
            raise ConfigError(f"{key} is set, but data.images is not. Set data.images, or leave {key} out.")
        return
    refused = {
        f"task: {config.task.name}": config.task.name != "grpo",
        "lora": config.lora is not None,
        "environment": bool(config.environments),
        "loss.kl.reference": config.loss.kl.reference is not None,
        "template: plain": "plain" in (data.template, *(source.template for _, source in data.sources())),
        "train.sequence_parallel": config.train.sequence_parallel > 1,
        "train.attention: flash_attention_2": config.train.attention == "flash_attention_2",
    }
    if wrong := [key for key, is_set in refused.items() if is_set]:
        raise ConfigError(
            f"data.images = {data.images} does not work with {wrong[0]}. Training with images needs task: grpo, a "
            f"chat template, no lora and no environment. Change the setting {wrong[0]}, or set data.images to null."
        )
    for args in [reward.args for reward in config.all_rewards if reward.name == "remote"]:
        if args.get("protocol") == "openrlhf" and args.get("prompt_field") is None:
            raise ConfigError(
                "rewards.N.args.prompt_field must be set for protocol = openrlhf with data.images: OpenRLHF-M's "
                "reward server finds a row by its own prompt. Set it to the column of the server's --input_key, such "
                "as message."
            )


def check_engine(config: Config, *, on_gpu: bool) -> None:
    """Raise ConfigError for settings of `engine` that vLLM refuses, or runs wrongly, on this device."""
    if config.train.router_replay:
        if config.engine.vllm.get("enable_prefix_caching") not in (None, on_gpu):
            raise ConfigError(
                "engine.vllm.enable_prefix_caching must be true on GPU and false on CPU with train.router_replay = "
                "true: vLLM keeps the experts of cached tokens on GPU only. Set it to null."
            )
        if config.engine.tensor_parallel > 1 and not on_gpu:
            raise ConfigError(
                f"train.router_replay = true needs engine.tensor_parallel = 1 on CPU, not "
                f"{config.engine.tensor_parallel}: the engine reads the experts in its own process. Set it to 1."
            )
    if not on_gpu and (threshold := config.engine.vllm.get("long_prefill_token_threshold")):
        raise ConfigError(
            f"engine.vllm.long_prefill_token_threshold = {threshold} splits prompts, which engines on CPU must not: "
            "vLLM's sampling would depend on the split. Set it to null."
        )
    guesses, is_ahead = config.engine.ngram_tokens, config.engine.vllm.get("async_scheduling")
    if guesses is not None and not on_gpu:
        raise ConfigError(
            "engine.vllm.speculative_config needs engines on GPUs. On CPU, vLLM 0.32 leaves the temperature of "
            "guessed tokens unset, so completions and logprobs are wrong. Set it to null."
        )
    if is_ahead and not on_gpu:
        raise ConfigError(
            "engine.vllm.async_scheduling = true needs engines on GPUs: vLLM refuses it on CPU. Set it to null."
        )
    if is_ahead and guesses is not None:
        raise ConfigError(
            "engine.vllm.async_scheduling = true and engine.vllm.speculative_config exclude each other: vLLM guesses "
            "from the last tokens, and a step scheduled ahead lacks them. Set one of the two to null."
        )


def check_vllm_names(config: Config) -> None:
    """Raise ConfigError for an argument that the installed vLLM lacks. Reads vLLM's source without importing it."""
    names = _vllm_names()
    if unknown := [name for name in config.engine.vllm if names and name not in names]:
        free = [name for name in names if owner_of(name) is None]
        near, usual = nearest(unknown[0], free), ", ".join(VllmArgs.__annotations__)
        raise ConfigError(f"engine.vllm.{unknown[0]}: vLLM has no such argument{near} Usual arguments: {usual}.")


def _vllm_names() -> list[str]:
    """Return the arguments of vllm.EngineArgs, read from its source; [] without vLLM."""
    spec = find_spec("vllm")
    files = [Path(folder, "engine", "arg_utils.py") for folder in (spec and spec.submodule_search_locations) or ()]
    tree = ast.parse("".join(file.read_text() for file in files if file.is_file()))
    fields = (each.body for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "EngineArgs")
    annotated = (each.target for body in fields for each in body if isinstance(each, ast.AnnAssign))
    return [target.id for target in annotated if isinstance(target, ast.Name)]


def _engine(config: Config) -> None:
    check_engine(config, on_gpu=config.model.device != "cpu")
    of_another_environment = config.launch.container is not None or config.launch.python is not None
    if config.engine.vllm.keys() - VllmArgs.__annotations__.keys() and not of_another_environment:
        check_vllm_names(config)
    given, num_seqs = config.engine.vllm.get("max_num_batched_tokens"), config.engine.max_num_seqs
    if config.needs.rollouts and given is not None and given < num_seqs:
        raise ConfigError(
            f"engine.vllm.max_num_batched_tokens = {given} must be at least engine.vllm.max_num_seqs = {num_seqs}: "
            "each decoding request takes one token of a step. Raise it, remove it, or lower engine.vllm.max_num_seqs."
        )


def _sequence_lengths(config: Config) -> None:
    if config.needs.rollouts and config.train.max_tokens_per_microbatch < config.max_model_len:
        raise ConfigError(
            f"train.max_tokens_per_microbatch = {config.train.max_tokens_per_microbatch} must hold the longest "
            f"sequence: {config.longest_sequence} = {config.max_model_len}. Raise it, or lower one of the two lengths."
        )
    if config.train.share_prompts and config.train.attention == "flash_attention_2":
        raise ConfigError(
            "train.share_prompts = true needs train.attention = sdpa or varlen: with flash_attention_2, documents "
            "cannot share a prompt's keys. Set train.attention=sdpa, or train.share_prompts=false."
        )
    if config.rollout.min_new_tokens > config.rollout.max_new_tokens:
        raise ConfigError(
            f"rollout.min_new_tokens = {config.rollout.min_new_tokens} exceeds rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}. Lower it, or raise rollout.max_new_tokens."
        )


def _attention(config: Config) -> None:
    kernel = config.train.attention
    if kernel == "sdpa":
        return
    if config.model.device == "cpu":
        raise ConfigError(f"train.attention = {kernel} needs a GPU; with model.device = cpu choose sdpa.")
    if config.model.dtype == "float32":
        raise ConfigError(
            f"train.attention = {kernel} computes only in 16 bits; with model.dtype = float32 choose sdpa."
        )


def _sequence_parallel(config: Config) -> None:
    degree, learners = config.train.sequence_parallel, config.placement.learners_per_node
    check_sequence_parallel(config, config.launch.num_nodes * learners)
    if config.launch.min_nodes is not None and learners % degree:
        raise ConfigError(
            f"train.sequence_parallel = {degree} must divide placement.learners_per_node = {learners}, because with "
            f"launch.min_nodes = {config.launch.min_nodes} the run may lose nodes. Lower train.sequence_parallel, or "
            f"set launch.min_nodes=null."
        )
    if degree > 1 and config.train.attention == "flash_attention_2":
        raise ConfigError(
            f"train.sequence_parallel = {degree} needs train.attention = sdpa or varlen: flash_attention_2 does "
            f"not exchange heads with other learners. Set train.attention=varlen, or train.sequence_parallel=1."
        )


def _colocation(config: Config) -> None:
    if not config.placement.colocate:
        return
    engine, learners = config.engine, config.placement.learners_per_node
    if lag := config.rollout.max_policy_lag:
        raise ConfigError(
            "placement.colocate = true runs engines and learners in turns on a GPU. rollout.max_policy_lag = "
            f"{lag} runs both at the same time. Set rollout.max_policy_lag=0, or placement.colocate=false."
        )
    if engine.engines_per_node != learners or engine.tensor_parallel != 1:
        raise ConfigError(
            "placement.colocate = true puts one engine on each learner's GPU: engine.engines_per_node = "
            f"{engine.engines_per_node} must equal placement.learners_per_node = {learners}, and "
            f"engine.tensor_parallel = {engine.tensor_parallel} must be 1. Set engine.engines_per_node={learners} "
            "engine.tensor_parallel=1."
        )
    share = engine.gpu_memory_utilization
    if expects_gpus(config) and engine.kv_cache_gib is None and share > MOST_BESIDE_A_LEARNER:
        raise ConfigError(
            "placement.colocate = true keeps the learner's weights and optimizer on the GPU. "
            f"engine.vllm.gpu_memory_utilization = {share:g} leaves too little memory for them. Set it to "
            f"{MOST_BESIDE_A_LEARNER:g} or less, or set engine.kv_cache_gib. `hpc-grpo plan` shows what fits."
        )


def _staged_environment(config: Config) -> None:
    launch = config.launch
    if launch.container is not None and launch.stage.environment is not None:
        raise ConfigError(
            f"launch.stage.environment = {launch.stage.environment}, but Ray and training run in "
            f"launch.container.image = {launch.container.image}, which has its own Python. Set "
            f"launch.stage.environment=null or launch.container=null."
        )


def _importance_weights(config: Config) -> None:
    correction, rollout = config.loss.correction.name, config.rollout
    for key, value, off, over in (
        ("top_p", rollout.top_p, 1, "the nucleus"),
        ("min_new_tokens", rollout.min_new_tokens, 0, "the tokens that do not end a completion"),
    ):
        if value != off and correction != "none" and config.needs.rollouts:
            raise ConfigError(
                f"rollout.{key} = {value:g}: engines renormalise over {over} and the learner does not. The "
                f"importance weights of loss.correction = {correction} would be wrong. Set rollout.{key}={off}, "
                "or loss.correction=none."
            )


def _rewards(config: Config) -> None:
    """Raise ConfigError for keys that only change advantages from rewards, if a teacher's task uses no rewards."""
    if not config.needs.teacher or config.needs.rewards:
        return
    for key, is_default, default in (
        ("loss.advantage", config.loss.advantage == type(config.loss).model_fields["advantage"].default, "group"),
        ("rollout.overlong_tokens", config.rollout.overlong_tokens is None, "null"),
    ):
        if not is_default:
            raise ConfigError(
                f"{key} would have no effect: with task.args.reward_coef = 0 rewards give no advantages. Set "
                f"{key}={default}, or task.args.reward_coef above 0."
            )


def _advantages(config: Config) -> None:
    advantage, group_size = config.loss.advantage, config.rollout.group_size
    if isinstance(advantage, PassKAdvantage) and advantage.args.k > group_size:
        raise ConfigError(
            f"loss.advantage.args.k = {advantage.args.k} must be at most rollout.group_size = {group_size}. "
            "Lower it, or raise rollout.group_size."
        )
    overlong, longest = config.rollout.overlong_tokens, config.rollout.max_new_tokens
    if overlong is not None and overlong > longest:
        raise ConfigError(
            f"rollout.overlong_tokens = {overlong} must be at most rollout.max_new_tokens = {longest}. Lower it."
        )
    is_played = [key in config.environments for key, _ in config.data.sources(for_eval=False)]
    if overlong is not None and all(is_played):
        raise ConfigError(
            f"rollout.overlong_tokens = {overlong} would have no effect. It penalises long single answers, and "
            "all prompts use an environment. Set it to null, or let the environment's rewards penalise length."
        )
    if isinstance(advantage, TurnsAdvantage) and not any(is_played):
        raise ConfigError(
            "loss.advantage = turns compares the turns of episodes, and no prompt is played in an environment. Set "
            "loss.advantage=group, or environment."
        )


def _proximal(config: Config) -> None:
    loss = config.loss
    if loss.proximal == "engine" and loss.correction.name != "none":
        raise ConfigError(
            f"loss.correction = {loss.correction.name} would have no effect: with loss.proximal = engine the "
            "ratio already uses the engine's logprobs. Set loss.correction=none, or loss.proximal=recomputed."
        )
    if loss.proximal == "interpolated" and (loss.compares_minibatch or loss.correction.compares_minibatch):
        raise ConfigError(
            f"loss.proximal = interpolated has no proximal logprobs before the optimizer step. loss.name = {loss.name} "
            f"with loss.correction = {loss.correction.name} needs them to compare tokens. Set loss.proximal=recomputed."
        )


def _kl(config: Config) -> None:
    kl = config.loss.kl
    if not config.needs.reference:
        for key, value in kl.model_dump(exclude={"coef"}, exclude_defaults=True).items():
            raise ConfigError(
                f"loss.kl.{key} = {value} would have no effect: the run has no reference. Leave loss.kl.{key} out, or "
                f"set loss.kl.coef above 0."
            )
    if kl.refresh_steps is not None and kl.reference is not None:
        raise ConfigError(
            f"loss.kl.refresh_steps = {kl.refresh_steps} would replace the reference loss.kl.reference = "
            f"{kl.reference} by the policy. Set one of the two to null."
        )
    if kl.refresh_steps is None and kl.mixup < 1.0:
        raise ConfigError(
            f"loss.kl.mixup = {kl.mixup:g} would have no effect: the reference is frozen. Set loss.kl.refresh_steps, "
            f"the number of steps between two refreshes, or loss.kl.mixup=1."
        )
    if kl.where == "reward" and kl.estimator == "unbiased":
        raise ConfigError(
            "loss.kl.estimator = unbiased changes only the gradient, and loss.kl.where = reward has no gradient. "
            "Set loss.kl.estimator to k1, k2 or k3, or loss.kl.where=loss."
        )
    if kl.where == "reward" and config.loss.compares_minibatch:
        raise ConfigError(
            f"loss.name = {config.loss.name} compares advantages before an optimizer step, and loss.kl.where = reward "
            "changes them during the step. loss.args.fraction would select wrong tokens. Set loss.kl.where=loss."
        )


def _distillation(config: Config) -> None:
    if not config.needs.teacher:
        return
    if config.task_args.teacher is None:
        raise ConfigError(
            "task.args.teacher is not set, and task distill needs it. Set it to a Hugging Face model: a folder, or a "
            "name in the local cache."
        )
    if config.loss.compares_minibatch:
        raise ConfigError(
            f"loss.name = {config.loss.name} compares advantages before an optimizer step, but the teacher's "
            "advantages are computed during the step. Choose another loss.name, such as grpo."
        )


_RULES = (
    _names,
    _run_name,
    _one_length,
    _nodes,
    _lag_and_minibatches,
    _mixes,
    _eval_data,
    _needs_engines,
    _eval,
    _curriculum,
    _engine,
    _lora,
    _images,
    _sequence_lengths,
    _attention,
    _sequence_parallel,
    _colocation,
    _staged_environment,
    _importance_weights,
    _rewards,
    _advantages,
    _proximal,
    _kl,
    _distillation,
)
"""The rules in order. Names come first: other rules read what the named algorithm needs."""
