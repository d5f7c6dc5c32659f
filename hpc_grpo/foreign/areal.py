"""Translate the keys of AReaL 1.0.4 (areal/api/cli_args.py) and of versions down to 0.3 (realhf/api/cli_args.py).

AReaL's formulas are in areal/trainer/ppo/actor.py and areal/utils/functional/functional.py.
"""

from __future__ import annotations

import re
from typing import Any

from hpc_grpo.foreign import table
from hpc_grpo.foreign.table import ByHandError, Differs, RefusedError, Row, Theirs, below, by_hand, choice, named, only

DEFAULTS_0_3: dict[str, Any] = {
    "n_nodes": 1, "n_gpus_per_node": 8, "actor.bf16": False, "actor.gradient_checkpointing": True,
    "actor.optimizer.lr": 2e-5, "actor.optimizer.weight_decay": 0.05, "actor.optimizer.beta2": 0.95,
    "actor.optimizer.eps": 1e-5, "dataset.train_bs_n_seqs": 256, "dataset.max_prompt_len": 256,
    "gconfig.max_tokens": None, "ppo.early_stop_imp_ratio": 5.0,
}  # fmt: skip
"""Defaults of version 0.3 that differ from 1.0. A config of version 0.3 has a section `ppo` or `exp_ctrl`."""

_MAX_NEW = ("gconfig.max_new_tokens", "ppo.gen.max_new_tokens")
_MINIBATCHES = ("actor.ppo_n_minibatches", "ppo.ppo_n_minibatches")
_STEPS = ("total_train_steps", "exp_ctrl.total_train_steps")
_CAPS = ("actor.behave_imp_weight_cap", "actor.behav_imp_weight_cap", "ppo.behav_imp_weight_cap")
"""Names of the weight's cap before version 1.0. Tokens with a larger weight are masked; null means no cap."""
_OLDER_NORMS = ("actor.group_adv_norm", "group_adv_norm", "ppo.adv_norm")
_REJECTION = {f"actor.rejection_sampling.{key}": default for key, default in (
    ("level", "token"), ("action", "mask"), ("metric", "ratio"), ("upper", 5.0), ("lower", None))}  # fmt: skip
_NORM = {"mean_level": "batch", "std_level": "batch", "mean_leave1out": False, "std_unbiased": True, "eps": 1e-5}
_NORMS = _REWARD_NORM, _ADV_NORM = ("actor.reward_norm", "actor.adv_norm")
_DATA_SETS = {"openai/gsm8k": {"subset": "main"}}
"""Data sets that AReaL's own loaders read -> further keys of our source, such as the subset."""

_PART = re.compile(r"(?:(?P<backend>[a-z]+)(?:[\[(]\w+[\])])?[.:]?)??(?P<sizes>(?:[dtmpce]\d+)+)")
_FORM = "ENGINE:dN[tM]+[fsdp:]dN, such as vllm:d4t1+d2"


def parse_allocation(text: str) -> list[tuple[str, dict[str, int]]]:
    """Return backend and sizes of an allocation's two parts: the one that generates, then the one that trains.

    The grammar is areal/api/alloc_mode.py's: `vllm.d4p1t2+d8`, `vllm:d4t1+fsdp:d2`, `vllm[rollout]:d4+fsdp[actor]:d4`;
    d is data, t (m in version 0.3) tensor, p pipeline, c context and e expert parallelism. Raises RefusedError for
    other forms, and for shared GPUs (`|`).
    """
    if "|" in text or text.count("+") != 1:
        raise RefusedError(f"allocation_mode = {text!r} must be one part that generates and one that trains: {_FORM}")
    parts = []
    for part in text.split("+"):
        found = _PART.fullmatch(part.strip())
        if found is None:
            raise RefusedError(f"allocation_mode = {text!r}: {part.strip()!r} cannot be read. Write {_FORM}")
        sizes = {kind.replace("m", "t"): int(size) for kind, size in re.findall(r"([dtmpce])(\d+)", found["sizes"])}
        parts.append((found["backend"] or "", dict.fromkeys("dtpc", 1) | sizes))
    if parts[0][0] not in ("vllm", "sglang"):
        raise RefusedError(f"allocation_mode = {text!r} must begin with the engine: {_FORM}")
    return parts


def _allocation(value: Any, theirs: Theirs) -> Any:
    """Convert allocation_mode, or the keys rollout.backend and actor.backend (since 1.0), to our placement."""
    text = str(value or "+".join(str(theirs.get(f"{side}.backend", default="")) for side in ("rollout", "actor")))
    if text == "+":
        raise ByHandError("choose GPUs that sample and GPUs that train (rollout.backend, actor.backend)", "placement")
    (engine, generates), (trainer, trains) = parse_allocation(text)
    nodes = int(theirs.get("n_nodes", "cluster.n_nodes"))
    gpus = int(theirs.get("n_gpus_per_node", "cluster.n_gpus_per_node"))
    engines, tensor = generates["d"], generates["t"] * generates["p"] * generates["c"]
    learners = trains["d"] * trains["t"] * trains["p"] * trains["c"]
    needed = engines * tensor + learners
    if value and needed < nodes * gpus:
        raise RefusedError(f"{text} takes {needed} GPUs, and {nodes} nodes of {gpus} have {nodes * gpus}")
    shape = table.node_shape(learners, engines, tensor, nodes, min(gpus, -(-needed // nodes)))
    told = [note] if (note := table.engine(engine)) else []
    if generates["p"] * generates["c"] > 1:
        told.append(f"an engine's {tensor} GPUs are {text.split('+')[0]} there, tensor parallel here")
    if trains["d"] < learners or trainer in ("megatron", "archon"):
        told.append(f"{learners} GPUs train as {text.split('+')[1]} there, as {learners} learners with ZeRO 3 here")
    ours = {**shape, "train.zero_stage": 3}  # it shards like FSDP
    return Differs(ours, "; ".join(told)) if told else ours


def _warmup(value: Any, theirs: Theirs) -> Any:
    steps = theirs.get(*_STEPS)
    if value and value <= 0.01 and not steps:
        return Differs(0, f"there, {value:g} of the run's steps, which is 0 below {round(1 / value)} steps")
    return int(table.share_of_steps(value, steps, "train.warmup_steps")) * int(theirs.get(*_MINIBATCHES))


def _longest_prompt(value: Any, theirs: Theirs) -> int:
    """Return the limit of a prompt in tokens. Default: the engine's longest sequence minus the new tokens."""
    if value is not None:
        return int(value)
    whole = theirs.get("vllm.max_model_len", "sglang.context_length", "actor.sglang.context_length")
    return max(1, int(whole) - int(theirs.get(*_MAX_NEW)))


def _longest(theirs: Theirs) -> int:
    prompt = theirs.get("train_dataset.max_length", "dataset.max_prompt_len")
    return _longest_prompt(prompt, theirs) + int(theirs.get(*_MAX_NEW))


def _whole(value: Any, theirs: Theirs) -> dict[str, Any]:
    if value is not None and int(value) < (longest := _longest(theirs)):
        raise RefusedError(f"prompt and completion together have at most {value} tokens there; here each has its own "
                           f"bound, {longest} in all. Lower gconfig.max_new_tokens")  # fmt: skip
    return {}


def _group(value: Any, _theirs: Theirs) -> int:
    if int(value) < 2:
        raise RefusedError("a group needs at least two completions to compare", {"rollout.group_size": 2})
    return int(value)


def _loss(is_decoupled: Any, theirs: Theirs) -> Any:
    """Choose loss, proximal logprobs and correction from AReaL's switches.

    A decoupled loss takes its ratio to the proximal logprobs, and may correct by proximal / engine. Other losses take
    it to recomputed logprobs or to the engine's, without a correction.
    """
    by_sequence = theirs.get("actor.importance_sampling_level") == "sequence"
    ours: dict[str, Any] = {"loss.denominator": "tokens"}
    if is_decoupled:
        methods = {"recompute": "recomputed", "metrics": "recomputed", "loglinear": "interpolated"}
        method = choice(methods, "proximal logprobs by")(theirs.get("actor.prox_logp_method"))
        ours |= _correction(theirs) | {"loss.proximal": method}
    else:
        is_recomputed = theirs.get("actor.recompute_logprob", "ppo.recompute_logprob")
        ours |= {"loss.correction.name": "none", "loss.proximal": "recomputed" if is_recomputed else "engine"}
    if theirs.get("actor.use_sapo_loss"):
        ours |= {"loss.name": "sapo", "loss.args.temperature_positive": theirs.get("actor.sapo_tau_pos"),
                 "loss.args.temperature_negative": theirs.get("actor.sapo_tau_neg")}  # fmt: skip
        if is_decoupled or by_sequence:
            raise RefusedError("sapo is supported only with use_decoupled_loss false and a ratio for each token", ours)
        return ours
    low, dual = theirs.get("actor.eps_clip", "ppo.eps_clip"), theirs.get("actor.c_clip", "ppo.c_clip")
    high = theirs.get("actor.eps_clip_higher", default=low)
    ours |= {"loss.name": "gspo" if by_sequence else "decoupled_ppo" if is_decoupled else "grpo",
             "loss.clip_low": low, "loss.clip_high": high, "loss.args.dual_clip": dual}  # fmt: skip
    if (threshold := theirs.get("actor.m2_threshold")) is not None:
        without = {key: own for key, own in ours.items() if not key.startswith("loss.correction")}
        raise RefusedError(
            "there, m2_threshold masks per microbatch, divides by unmasked tokens, and weighs by rejection_sampling; "
            "here, loss.correction = m2po masks per optimizer step, and weighs unmasked tokens by learner / engine",
            without | {"loss.correction.name": "m2po", "loss.correction.args.cap": threshold},
        )
    told = []
    if by_sequence and ours["loss.correction.name"] == "icepop":
        told.append("there, a sequence's ratio is over its unmasked tokens; here, over all its tokens")
    if ours["loss.proximal"] == "interpolated":
        told.append("there, every minibatch interpolates, at the version before the step's start; here, from the "
                    "second minibatch on, at the step's start")  # fmt: skip
    return Differs(ours, "; ".join(told))


def _correction(theirs: Theirs) -> dict[str, Any]:
    """Return our correction for AReaL's weight proximal / engine: optional since 1.0 (rejection_sampling)."""
    none = {"loss.correction.name": "none"}
    caps = [theirs.exact(name) for name in _CAPS if theirs.is_given(name)]
    mode = theirs.get("actor.behave_imp_weight_mode")
    if mode not in (None, "token_mask", "disabled"):
        raise RefusedError("the only supported behave_imp_weight_mode is token_mask: the cap masks tokens", none)
    if mode == "disabled":
        return none
    if caps or theirs.has("ppo.") or mode:
        return _masked(None, caps[0] if caps else None if theirs.has("ppo.") else 5.0)
    if not theirs.has("actor.rejection_sampling"):
        return none
    level, action, metric, upper, lower = map(theirs.get, _REJECTION)
    if (level, metric) != ("token", "ratio") or (action == "clamp" and lower):
        raise RefusedError(
            f"rejection_sampling by {level}, {metric}, {action} is not supported: loss.correction has "
            f"icepop (token, ratio, mask) and truncated (token, ratio, clamp without lower)",
            _masked(lower, upper),
        )
    truncated = {"loss.correction.name": "truncated", "loss.correction.args.cap": upper}
    return _masked(lower, upper) if action == "mask" else truncated


def _masked(low: Any, cap: Any) -> dict[str, Any]:
    return below("loss.correction", {"name": "icepop", "args.low": low or 0.0, "args.cap": cap or 1e9})


def _norm(theirs: Theirs, norm: str) -> dict[str, Any]:
    """Return the settings of one of the two norms; {} if it is off."""
    given = {key: theirs.exact(name) for key in _NORM if theirs.is_given(name := f"{norm}.{key}")}
    return _NORM | given if theirs.has(f"{norm}.") else {}


_RAW = "there, A = r without a baseline; here, A = r - mean of its group"
_TOKENS = "there, (r - mean) / (deviation + 1e-5) over all tokens of the batch; here, over its completions"


def _advantage(_value: Any, theirs: Theirs) -> Any:
    """Choose the advantage from AReaL's reward_norm and adv_norm.

    Older versions had one norm, over the batch or over groups.
    """
    reward, advantage = _norm(theirs, _REWARD_NORM), _norm(theirs, _ADV_NORM)
    group, sizes = theirs.get("gconfig.n_samples", "group_size"), (f"{norm}.group_size" for norm in _NORMS)
    for norm, size in zip((reward, advantage), sizes, strict=True):
        if "group" in norm.values() and theirs.get(size, default=1) != group:
            raise RefusedError(f"{size} must be gconfig.n_samples = {group}: here a norm is over complete groups",
                               {"loss.advantage.name": "group"})  # fmt: skip
    if not reward and not advantage:
        centred = {"loss.advantage.name": "group", "loss.advantage.normalize_std": False}
        if not theirs.has("ppo.") and not any(map(theirs.is_given, _OLDER_NORMS)):
            raise RefusedError(f"neither reward_norm nor adv_norm is set: {_RAW}. Set one of them", centred)
        if theirs.exact("ppo.adv_norm") is False:
            raise RefusedError(f"ppo.adv_norm false: {_RAW}", centred)
        by_group = theirs.get("actor.group_adv_norm", "group_adv_norm")
        return Differs({"loss.advantage.name": "group" if by_group else "reinforce_pp"}, _TOKENS)
    if not reward:
        return _one_norm(advantage, is_of_tokens=True)
    reward["eps"] /= abs(theirs.get("actor.reward_scaling") or 1.0)  # the same as a scale of the rewards
    ours = _one_norm(reward, is_of_tokens=False)
    note = "there, b = norm of rewards and A = (b - mean(b)) / deviation(b) over tokens; here, A = b"
    return Differs(ours.ours if isinstance(ours, Differs) else ours, note) if advantage else ours


def _one_norm(norm: dict[str, Any], *, is_of_tokens: bool) -> Any:
    mean, std, leaves_one_out = norm["mean_level"], norm["std_level"], norm["mean_leave1out"]
    ours: dict[str, Any] = {"loss.advantage.name": "group", "loss.advantage.normalize_std": std is not None}
    if mean not in ("group", "batch") or (std == "group" and mean == "batch"):
        raise RefusedError(f"mean_level = {mean} with std_level = {std} is not supported", ours)
    if leaves_one_out:
        ours = {"loss.advantage.name": "rloo"}
        if (mean, std) != ("group", None):
            raise RefusedError("mean_leave1out is supported only with std_level: null", ours)
        return ours
    if mean == "batch":
        return Differs({**ours, "loss.advantage.name": "reinforce_pp"}, _TOKENS)
    if std == "batch":
        note = "there, deviation of b = r - mean of its group, + 1e-5; here, of the raw rewards, + 1e-4"
        return Differs({"loss.advantage.name": "group_step_std"}, _TOKENS if is_of_tokens else note)
    if std:
        ours |= below("loss.advantage.args", {"unbiased_std": norm["std_unbiased"], "eps": norm["eps"]})
    note = "there, a group's mean and deviation are over its tokens; here, over its completions"
    return Differs(ours, note) if is_of_tokens else ours


def _weight(theirs: Theirs) -> float:
    """Return reward_scaling if it changes the gradient: without normalised advantages, or with a KL in the reward."""
    norms = [norm for norm in (_norm(theirs, _REWARD_NORM), _norm(theirs, _ADV_NORM)) if norm]
    is_divided = not norms or any(norm["std_level"] for norm in norms)
    is_lost = is_divided and not theirs.get("actor.kl_ctl", "ppo.kl_ctl")
    return 1.0 if is_lost else float(theirs.get("actor.reward_scaling", "ppo.reward_output_scaling"))


def _reward_scale(_value: Any, theirs: Theirs) -> Any:
    weight, note = _weight(theirs), "there, (r + bias) * scale, clipped to +-reward_clip; here, weight * r, not clipped"
    return {} if weight == 1.0 else Differs({"rewards": [{"name": "correctness", "weight": weight}]}, note)


def _overlong(value: Any, theirs: Theirs) -> int | None:
    """Return the buffer of the penalty, which AReaL scales with the reward."""
    tokens, factor = (theirs.get(f"actor.overlong_{key}") for key in ("tokens", "penalty_factor"))
    return table.overlong(value, tokens, value and float(factor) * _weight(theirs))


def _kl(value: Any, theirs: Theirs) -> Any:
    if not value:
        return {"loss.kl.coef": 0.0}
    if not theirs.has("ppo.") and not theirs.has("ref."):
        raise RefusedError(f"kl_ctl = {value} without a section ref: AReaL then takes 0 for the reference's logprobs, "
                           f"and rewards lose kl_ctl * log p. Set kl_ctl 0, or give ref",
                           {"loss.kl.coef": 0.0})  # fmt: skip
    ours = {"loss.kl.coef": value, "loss.kl.where": "reward", "loss.kl.estimator": theirs.get("actor.kl_estimator")}
    if (reference := theirs.get("ref.path")) not in (None, theirs.get("actor.path")):
        ours["loss.kl.reference"] = reference
    return Differs(ours, "there, coef * KL from the token on is subtracted before the norm of advantages; here, after "
                   "it. A decoupled loss has the engine's KL there, the learner's here")  # fmt: skip


def _critic(value: Any, theirs: Theirs) -> dict[str, Any]:
    """Refuse a critic: a section `critic` since 1.0. In 0.3 there is a critic unless ppo.disable_value is true."""
    has_critic = not theirs.get("ppo.disable_value") if theirs.has("ppo.") else theirs.has("critic.") or bool(value)
    if has_critic:
        raise RefusedError("a critic needs task: ppo, which no table translates. Leave the section critic out, or in "
                           "0.3 set ppo.disable_value true")  # fmt: skip
    return {}


def _eval_data(value: Any, theirs: Theirs) -> dict[str, Any]:
    ours = {"path": value, **_DATA_SETS.get(str(value), {}), "split": theirs.get("valid_dataset.split")}
    is_read = any(theirs.get(f"{kind}_{unit}") for kind in ("evaluator.freq", "exp_ctrl.eval_freq")
                  for unit in ("epochs", "steps", "secs"))  # fmt: skip
    return below("data.eval", ours) if value and is_read else {}


def _often(section: str, older: str, ours: str, needs: str = "") -> Row:
    """Return the row that joins three frequencies, as in `50 steps, 1800 s`. If the key `needs` is unset: never."""
    names = {unit: (f"{section}.freq_{key}", f"exp_ctrl.{older}_freq_{key}")
             for unit, key in (("steps", "steps"), ("epochs", "epochs"), ("s", "secs"))}  # fmt: skip

    def convert(_value: Any, theirs: Theirs) -> str | None:
        spans = [f"{number} {unit}" for unit, own in names.items() if (number := theirs.get(*own))]
        return ", ".join(spans) or None if not needs or theirs.get(needs) else None

    further = dict.fromkeys((*names["epochs"], *names["s"]))
    return Row(" ".join(names["steps"]), ours, convert, default=None, also=further)


ROWS = (
    Row("experiment_name", "run.name", lambda value, theirs: "-".join(
        str(part) for part in (value, theirs.get("trial_name")) if part), default="areal", also={"trial_name": None}),
    Row("cluster.fileroot", "run.root", default="/tmp/areal/", note="the run directory is fileroot/NAME"),
    Row("seed", "run.seed", default=1),
    Row("total_train_epochs exp_ctrl.total_train_epochs", convert=lambda value, theirs: table.length(
        theirs.get(*_STEPS), value), default=1, also=dict.fromkeys(_STEPS)),
    Row("total_train_n_seqs", convert=only(why="a run's length is train.total_steps, total_episodes or total_epochs")),
    Row("mode", note="the command chooses the place: train here, submit to Slurm"),
    Row("recover_mode recover.mode", note="the same command resumes a run; another run.name starts a new run"),
    Row("recover_retries recover_after recover.retries", note="launch.max_stalled_attempts bounds attempts"),
    Row("recover.no_save_optim recover.no_load_optim", convert=only(False, why="a checkpoint has the optimizer")),
    Row("allocation_mode", convert=_allocation, default="",
        also={"rollout.backend": None, "actor.backend": None, "n_nodes": None, "cluster.n_nodes": 32,
              "n_gpus_per_node": None, "cluster.n_gpus_per_node": 8}),
    Row("rollout.max_head_offpolicyness max_head_offpolicyness", "rollout.max_policy_lag", lambda value, theirs: int(
        value) * int(theirs.get(*_MINIBATCHES)) if theirs.get("async_training") else 0, default=0,
        also={"async_training": True}),  # AReaL counts batches
    Row("dynamic_bs", convert=only(False, why="a step has rollout.prompts_per_step groups")),
    Row("rollout.return_routed_experts sglang.enable_return_routed_experts", "train.router_replay", default=False),
    Row("rollout.use_lora actor.use_lora vllm.enable_lora sglang.enable_lora",
        convert=only(False, why="set section lora instead: rank, alpha, targets")),
    Row("*lora* actor.peft_type actor.target_modules", note="part of LoRA"),
    Row("teacher teacher.*", convert=only(why="a teacher needs task: distill")),
    Row("gconfig.n_samples group_size", "rollout.group_size", _group, default=1),
    Row("gconfig.max_new_tokens ppo.gen.max_new_tokens", "rollout.max_new_tokens", default=16384),
    Row("gconfig.min_new_tokens ppo.gen.min_new_tokens", "rollout.min_new_tokens", default=0),
    Row("gconfig.temperature ppo.gen.temperature", "rollout.temperature", default=1.0),
    Row("gconfig.top_p ppo.gen.top_p", "rollout.top_p", default=1.0),
    Row("gconfig.top_k ppo.gen.top_k", convert=only(-1, 10**6, 10**8, why="top-k is not supported: use top_p")),
    Row("gconfig.greedy ppo.gen.greedy", convert=only(False, why="a group of greedy completions has no advantages")),
    Row("gconfig.use_beam_search gconfig.ignore_eos",
        convert=only(False, why="completions are sampled up to the end token")),
    Row("gconfig.stop", "rollout.stop", lambda value, _: value or []),
    Row("gconfig.stop_token_ids", convert=by_hand("give the texts of these tokens", "rollout.stop")),
    Row("gconfig.frequency_penalty", convert=only(0, 0.0, why="sampling has no frequency penalty")),
    Row("gconfig.max_tokens", convert=_whole, default=32768),
    Row("gconfig.skip_special_tokens ppo.gen.n ppo.gen.use_cuda_graph ppo.gen.force_*",
        note="part of sampling that only AReaL's workflows read"),
    Row("eval_gconfig.n_samples", "eval.num_samples"),
    Row("eval_gconfig.temperature", "eval.temperature"),
    Row("eval_gconfig.top_p", "eval.top_p"),
    Row("eval_gconfig eval_gconfig.*", note="evals use gconfig's: rollout.max_new_tokens"),
    Row("actor.path", "model.path"),
    Row("tokenizer_path", convert=lambda value, theirs: only(
        "", theirs.get("actor.path"), why="the tokenizer is that of model.path here")(value, theirs)),
    Row("actor.init_from_scratch", convert=only(False, why="a run needs initial weights")),
    Row("actor.dtype", "model.dtype", table.dtype, default="bfloat16"),
    Row("actor.bf16", convert=lambda value, _: {} if value else Differs(
        {"model.dtype": "bfloat16"}, "float16 there, bfloat16 here")),
    Row("actor.gradient_checkpointing", "train.gradient_checkpointing", default=False),
    Row("actor.mb_spec.max_tokens_per_mb actor_train.mb_spec.max_tokens_per_mb", "train.max_tokens_per_microbatch",
        lambda value, theirs: Differs(max(_longest(theirs), 8192), "unbounded there") if value is None
        else table.one_sequence(value, _longest(theirs)), default=None),
    Row("actor.optimizer", convert=only(why="actor.optimizer must be a section")),
    Row("actor.optimizer.type", convert=only("adam", "adamw", why="learners only have AdamW")),
    Row("actor.optimizer.lr", "train.lr", default=1e-3),
    Row("actor.optimizer.weight_decay", "train.adamw.weight_decay", table.weight_decay, default=0.01),
    Row("actor.optimizer.beta1", "train.adamw.betas",
        lambda value, theirs: [value, theirs.get("actor.optimizer.beta2")],
        default=0.9, also={"actor.optimizer.beta2": 0.999}),
    Row("actor.optimizer.eps", "train.adamw.eps", default=1e-8),
    Row("actor.optimizer.gradient_clipping", "train.max_grad_norm", default=1.0),
    Row("actor.optimizer.lr_scheduler_type", "train.schedule", lambda value, theirs: table.schedule(
        value, f"down to {end:g} of lr there, 0 here" if (end := theirs.get("actor.optimizer.min_lr_ratio")) else ""),
        default="constant", also={"actor.optimizer.min_lr_ratio": 0.0}),
    Row("actor.optimizer.warmup_steps_proportion", "train.warmup_steps", _warmup, default=0.001),
    Row(named("actor.optimizer", "initial_loss_scale min_loss_scale loss_scale_window hysteresis offload"),
        note="part of float16's loss scaling, or of offload"),
    Row("actor.use_decoupled_loss ppo.use_decoupled_loss", convert=_loss, default=False,
        also={"actor.recompute_logprob": False, "ppo.recompute_logprob": None, "actor.eps_clip": 0.2,
              "ppo.eps_clip": None, "actor.eps_clip_higher": None, "actor.c_clip": None, "ppo.c_clip": None,
              "actor.use_sapo_loss": False, "actor.sapo_tau_pos": 1.0, "actor.sapo_tau_neg": 1.05,
              "actor.importance_sampling_level": "token", "actor.prox_logp_method": "recompute",
              "actor.m2_threshold": None, "actor.behave_imp_weight_mode": None, **dict.fromkeys(_CAPS),
              "actor.rejection_sampling": None, **_REJECTION}),
    Row("critic ppo.disable_value", convert=_critic, default=None, also={"critic.path": None}),
    Row("critic.* critic_* ppo.value_* ppo.critic_sample_reuse ppo.fuse_rew_ref actor.rejection_sampling.agg",
        note="read only with a refused value: a critic, rejection_sampling.level sequence"),
    Row("actor.kl_ctl ppo.kl_ctl", convert=_kl, default=0.1, also={"actor.kl_estimator": "k1", "ref.path": None}),
    Row("ppo.use_adaptive_kl_ctl", convert=only(False, why="the KL's coefficient is constant")),
    Row("actor.ppo_n_minibatches ppo.ppo_n_minibatches", "train.num_minibatches",
        lambda value, _: table.whole_groups(value, "completions, balanced by tokens"), default=4),
    Row("actor.reward_norm.mean_level", convert=_advantage, default=None,
        also={f"{norm}.{key}": None for norm in _NORMS for key in (*_NORM, "group_size")}
        | dict.fromkeys(_OLDER_NORMS)),
    Row("actor.reward_scaling ppo.reward_output_scaling", convert=_reward_scale, default=1.0),
    Row("actor.reward_bias ppo.reward_output_bias", note="cancels in the advantages, because they are centred"),
    Row("actor.reward_clip ppo.max_reward_clip", note="here each reward function bounds its score"),
    Row("actor.discount actor.gae_lambda ppo.discount ppo.gae_lambda",
        convert=only(1, 1.0, why="without a critic each token has the whole reward of its sequence")),
    Row("ppo.actor_sample_reuse", convert=only(1, why="each rollout is trained on once")),
    Row("ppo.early_stop_imp_ratio", convert=lambda value, _: {} if value is None else Differs(
        {}, f"there, a minibatch whose mean ratio is above {value:g} is skipped; here, none is")),
    Row("actor.dynamic_sampling", "rollout.drop_zero_variance"),
    Row("actor.overlong_reward_penalty", "rollout.overlong_tokens", _overlong, default=False,
        also={"actor.overlong_tokens": None, "actor.overlong_penalty_factor": None}),
    Row("actor.mask_no_eos_with_zero mask_no_eos_with_zero", convert=only(
        False, why="there, a completion without an end token trains with reward 0; here, rollout.mask_truncated gives "
        "it no gradient", instead={"rollout.mask_truncated": True})),
    Row("mask_too_long", "rollout.mask_truncated"),
    Row(named("actor",
        "experiment_name trial_name attn_impl use_kernels is_critic temperature mb_spec.n_mbs mb_spec.granularity "
        "mb_spec.n_mbs_divisor mb_spec.packing_algorithm pad_to_maximum disable_dropout grad_reduce_dtype "
        "optimizer_dtype weight_update_mode fsdp fsdp.* archon.* megatron megatron.* offload enable_tree_training "
        "scheduling_spec* log_level request_timeout setup_timeout scheduling_strategy* log_agent_stats* "
        "max_new_tokens type.* sglang.* vllm.* reward_norm adv_norm group_size use_decoupled_loss_*"),
        note="part of AReaL's trainer; here: temperature of sampling, no dropout, weights through shared memory"),
    Row("ref ref.* ref_inf.* actor_inf.* actor_train.*", note="the reference has the policy's settings"),
    Row("vllm.dtype", "engine.dtype", table.dtype, default="bfloat16"),
    Row("vllm.gpu_memory_utilization", "engine.vllm.gpu_memory_utilization", default=0.9),
    Row("vllm.enforce_eager", "engine.vllm.enforce_eager", default=False),
    Row("vllm.max_num_seqs", "engine.vllm.max_num_seqs", default=256),
    Row("vllm.no_enable_prefix_caching", "engine.vllm.enable_prefix_caching", lambda value, _: not value, default=True),
    Row("train_dataset.max_length dataset.max_prompt_len", convert=lambda value, theirs: {
        "data.max_prompt_tokens": _longest_prompt(value, theirs),
        **({} if value is None else {"data.drop_long_prompts": True})}, default=None,  # AReaL's loaders drop them
        also={"sglang.context_length": 32768, "vllm.max_model_len": 32768, "actor.sglang.context_length": None}),
    Row("vllm.* sglang.*", note="part of AReaL's server; engine.* has vLLM's settings"),
    Row("train_dataset.path dataset.path", convert=lambda value, _: Differs(
        below("data.train", {"path": value, **_DATA_SETS.get(str(value), {})}),
        "the reward is in AReaL's script: rewards.0.name is correctness here")),
    Row("train_dataset.batch_size dataset.train_bs_n_seqs", "rollout.prompts_per_step", default=1),
    Row("train_dataset.shuffle shuffle_dataset", "data.shuffle", default=True),
    Row("train_dataset.split", "data.train.split", default="train"),
    Row("valid_dataset.path", convert=_eval_data, also={"valid_dataset.split": "test"}),
    Row("valid_dataset", note="no eval without a data set for it"),
    Row("train_dataset.* valid_dataset.* dataset.*", note="part of AReaL's data loader"),
    _often("saver", "save", "checkpoint.export_every"),
    _often("recover", "ckpt", "checkpoint.every"),
    _often("evaluator", "eval", "eval.every", needs="valid_dataset.path"),
    Row("stats_logger.wandb.mode wandb.mode", "metrics.wandb.mode",
        choice({"disabled": "disabled", "offline": "offline", "online": "auto", True: "auto"}, "W&B"),
        default="disabled"),
    Row("stats_logger.wandb.project wandb.project", "metrics.wandb.project", lambda value, _: value or "hpc-grpo"),
    Row("stats_logger.wandb.entity wandb.entity", "metrics.wandb.entity"),
    Row("stats_logger.tensorboard.path tensorboard.path", "metrics.tensorboard", lambda value, _: bool(value),
        default=None),
    Row("success_rate_ub success_rate_lb dataset_filter_threshold dataset_max_filter_percentage",
        convert=only(1.0, 0.0, 100.0, why="set data.curriculum, or rollout.drop_zero_variance")),
    Row("ref_ema_eta", convert=only(why="set loss.kl.refresh_steps and loss.kl.mixup")),
    Row("generation_size", convert=only(why="all completions of a group are trained on")),
    Row("no_training check_xml_format", convert=only(False, why="the run trains, and the reward is rewards.0.name")),
    Row("rollout.max_concurrent_rollouts max_concurrent_rollouts rollout.* n_rollout_workers flush_request_timeout",
        note="engines are always kept full; their limits: engine.vllm.max_num_seqs, rollout.max_policy_lag"),
    Row("evaluator.eval_before_train", note="if there are evals, one runs before training too"),
    Row("stats_logger.* wandb.* launcher.* scheduler.* perf_tracer* memory_profiler* saver.* recover.* evaluator.* "
        "checkpointer.* cluster.* exp_ctrl.* enable_offload torch_cache_mysophobia cache_clear_freq ray_temp_path "
        "rw_type metric_discovery_port cpus_per_* mem_per_* auto_eval* debug exclude nodelist partition schedule_* "
        "ignore_worker_error new_tokens_per_chunk check_verifier_status actor.init_critic_from_actor",
        note="AReaL's own processes: Ray and the run directory do this here"),
)  # fmt: skip
