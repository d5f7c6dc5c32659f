"""Numbers that peers' own tests expect, against ours: their inputs and results, and no code of theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpc_grpo.algorithms.objective import policy_objective
from hpc_grpo.algorithms.terms import LossInputs, LossOutput, interpolated_proximal, kl_estimate
from hpc_grpo.metrics.reductions import EffectiveSampleSize
from tests.support.configs import loss_of

NEMO = "NVIDIA-NeMo/RL tests/unit/algorithms/test_loss_functions.py"
SKYRL = "NovaSky-AI/SkyRL skyrl-train/tests/cpu/utils/test_ppo_utils.py"
VERL = "verl-project/verl tests/trainer/ppo/test_rollout_corr.py"
AREAL = "inclusionAI/AReaL tests/test_prox_approx.py"
SLIME = "THUDM/slime tests/test_policy_loss.py"
SLIME_CISPO = "yitianlian/slime tests/test_cispo_loss.py"
OPENRLHF = "OpenRLHF/OpenRLHF tests/test_loss_aggregation.py"
OPEN_INSTRUCT = "allenai/open-instruct open_instruct/test_olmo_core_train_modules.py"

ADVANTAGE = [1.0, -1.0, 2.0]
LEARNER, PROXIMAL, ENGINE = [-1.69315, -1.0, -0.59453], [-1.0] * 3, [-0.5, -1.5, -0.8]
UNBOUNDED = 1e6
NONE = {"correction": "none"}


def inputs(
    learner: Sequence[float], proximal: Sequence[float], engine: Sequence[float], advantages: Sequence[float],
    lengths: Sequence[int] = (), reference: Sequence[float] | None = None,
) -> LossInputs:  # fmt: skip
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    ids = [index for index, length in enumerate(lengths or [len(learner)]) for _ in range(length)]
    live = column(learner).requires_grad_()
    ref = None if reference is None else column(reference)
    return LossInputs(live, column(proximal), column(engine), ref, column(advantages), torch.tensor(ids))


def evaluate(tokens: LossInputs, longest: int = 1, **settings: Any) -> tuple[float, LossOutput]:
    config = loss_of(**settings)
    objective = policy_objective(config)
    output = objective.loss(tokens)
    mask = torch.ones(len(tokens.advantages), dtype=torch.float64)
    weights = objective.token_weights(longest, tokens.sequence_ids, mask)
    return (torch.dot(output.per_token, weights.of_tokens) / weights.units).item(), output


def nemo(**settings: Any) -> float:
    return evaluate(inputs(LEARNER, PROXIMAL, ENGINE, ADVANTAGE), **settings)[0]


def nemo_gspo(**settings: Any) -> float:
    return nemo(name="gspo", clip_low=0.2, clip_high=0.2, **settings)


def nemo_two_sequences() -> float:
    tokens = inputs(LEARNER * 2, PROXIMAL + [-2.0] * 3, PROXIMAL + [-2.0] * 3, ADVANTAGE * 2, lengths=(3, 3))
    return evaluate(tokens, name="gspo", clip_low=0.2, clip_high=0.2)[0]


def nemo_kl() -> float:
    tokens = inputs([0.0, -1.0, -2.0], [0.0] * 3, [0.0] * 3, [0.0] * 3, reference=[-1.0] * 3)
    return evaluate(tokens, kl={"coef": 0.1}, **NONE)[0]


def nemo_dual_clip() -> float:
    tokens = inputs([-1.69315, -1.0, -0.69741], [-1.0, -1.0, -3.0], [-1.0, -1.0, -3.0], [1.0, -1.0, -4.0])
    return evaluate(tokens, dual_clip=3.0, **NONE)[0]


def nemo_icepop() -> float:
    tokens = inputs(PROXIMAL, PROXIMAL, [-0.5, -3.5, -0.8], ADVANTAGE)
    return evaluate(tokens, correction="icepop")[0]


def nemo_masked_by_sequence() -> float:
    tokens = inputs(PROXIMAL, PROXIMAL, [-1.0005] * 3, ADVANTAGE)
    return evaluate(tokens, correction="geometric")[0]


def nemo_kl_gradient() -> list[float]:
    """The gradient of the penalty that is weighed to the engine's policy, with the term of sampling."""
    tokens = inputs([-1.2, -0.7], [-1.0, -0.8], [-1.5, -0.4], [0.0, 0.0], reference=[-0.9, -1.1])
    settings = {"kl": {"coef": 0.3, "estimator": "unbiased"}, "correction": {"cap": UNBOUNDED}}
    _, output = evaluate(tokens, **settings)
    return gradient(output.per_token.sum() / 2.0, tokens)


def nemo_kl_gradient_expected() -> list[float]:
    rows = [(-1.2, -1.5, -0.9), (-0.7, -0.4, -1.1)]
    return [0.3 * math.exp(now - was) * ((math.exp(r - now) - 1 - (r - now)) + 1 - math.exp(r - now)) / 2
            for now, was, r in rows]  # fmt: skip


def gradient(loss: Tensor, tokens: LossInputs) -> list[float]:
    return torch.autograd.grad(loss, tokens.learner_logprobs)[0].tolist()


def kls(estimator: str, learner: Sequence[float], reference: Sequence[float]) -> list[float]:
    return kl_estimate(estimator, torch.tensor(learner), torch.tensor(reference)).tolist()


def slime_cispo(low: float, high: float, ratios: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
    learner = [-0.7, -1.2, -0.4, -2.1]
    proximal = [now - math.log(ratio) for now, ratio in zip(learner, ratios, strict=True)]
    tokens = inputs(learner, proximal, proximal, [1.0, -0.5, 2.0, -1.0])
    _, output = evaluate(tokens, name="cispo", clip_low=low, clip_high=high)
    per_token = output.per_token.tolist()
    return per_token, gradient(output.per_token.sum(), tokens), output.means["policy/clip_fraction"].tolist()


def slime_tokens(ratios: Sequence[float], advantages: Sequence[float]) -> LossInputs:
    proximal = [-1.0 - math.log(ratio) for ratio in ratios]
    return inputs([-1.0] * 4, proximal, proximal, advantages)


def slime_clip() -> list[float]:
    tokens = slime_tokens([1.5, 0.7, 1.1, 0.9], [2.0, -3.0, -1.0, 0.5])
    return evaluate(tokens, clip_low=0.2, clip_high=0.3, **NONE)[1].per_token.tolist()


def slime_sapo() -> list[float]:
    tokens = slime_tokens([1.5, 0.7, 1.0, 1.4], [2.0, -3.0, 0.0, -1.0])
    return evaluate(tokens, name="sapo", **NONE)[1].per_token.tolist()


def slime_sapo_at_one() -> list[float]:
    tokens = slime_tokens([1.0] * 4, [2.0, -3.0, 0.0, 0.5])
    return gradient(evaluate(tokens, name="sapo", **NONE)[1].per_token.sum(), tokens)


def areal(engine: list[float], learner: list[float], versions: list[float], version: int) -> list[float]:
    tokens = inputs(learner, learner, engine, engine)
    return interpolated_proximal(tokens, torch.tensor(versions).double(), version - 1, version).tolist()


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def corrected(ratios: Sequence[float], **settings: Any) -> LossOutput:
    """The output for tokens whose proximal probability is `ratios` times their engine's."""
    engine = [-math.log(ratio) for ratio in ratios]
    zeros = [0.0] * len(ratios)
    return evaluate(inputs(zeros, zeros, engine, [1.0] * len(ratios)), **settings)[1]


def weights(ratios: Sequence[float], **settings: Any) -> list[float]:
    return corrected(ratios, **settings).weights["correction/ess"].tolist()


def verl_icepop_sample_size() -> float:
    own = torch.tensor(weights([0.4, 0.8, 6.0], correction="icepop"))
    return EffectiveSampleSize(own.sum().item(), own.square().sum().item(), 3).result()


def aggregated(losses: Sequence[Sequence[float]], denominator: str, longest: int = 1) -> float:
    """The loss of tokens that lose these numbers: the ratio is 1, so a token loses minus its advantage."""
    flat = [-value for row in losses for value in row]
    zeros = [0.0] * len(flat)
    tokens = inputs(zeros, zeros, zeros, flat, lengths=[len(row) for row in losses])
    return evaluate(tokens, longest, denominator=denominator)[0]


def advantages(name: str, *groups: Sequence[float]) -> list[float]:
    keys = {"normalize_std": False} if name == "group" else {}
    chosen = loss_of(advantage={"name": name, **keys}).advantage
    return [a for group in groups for a in chosen.of_group(group, [True] * len(group))]


THREE = ((1.0, 2.0), (3.0, 4.0, 5.0), (7.0,))
PPO_BAND = ([1.0, 1.14, 1.56, 0.4], [1.0, 1.14, 1.28, 0.8])
WIDE_BAND = ([1.0, 3.0, 9.0, 0.4], [1.0, 3.0, 5.0, 0.4])


def cispo_expected(clamped: Sequence[float], ratios: Sequence[float]) -> tuple[list[float], list[float], list[float]]:
    rows = list(zip(clamped, [1.0, -0.5, 2.0, -1.0], [-0.7, -1.2, -0.4, -2.1], strict=True))
    return (
        [-c * a * logprob for c, a, logprob in rows],
        [-c * a for c, a, _ in rows],
        [float(c != r) for c, r in zip(clamped, ratios, strict=True)],
    )


Numbers = Callable[[], Any]
FOREIGN: list[tuple[str, str, Any, Numbers, float]] = [
    (NEMO, "PPO", -0.6333, lambda: nemo(**NONE), 5e-5),
    (NEMO, "PPO x IS", -0.2065, lambda: nemo(correction={"cap": UNBOUNDED}), 5e-5),
    (NEMO, "PPO x TIS 0.8", -0.4744, lambda: nemo(correction={"cap": 0.8}), 5e-5),
    (NEMO, "GSPO", -0.6057, lambda: nemo_gspo(**NONE), 5e-5),
    (NEMO, "GSPO, two sequences", -0.4912, nemo_two_sequences, 5e-5),
    (NEMO, "GSPO x IS", -0.4959,
     lambda: nemo_gspo(correction={"name": "sequence", "cap": UNBOUNDED}), 5e-5),
    (NEMO, "GSPO x TIS 0.8", -0.4846,
     lambda: nemo_gspo(correction={"name": "sequence", "cap": 0.8}), 5e-5),
    (NEMO, "CISPO", (0.8 * -1.69315 * -1 + -1.0 + 1.2 * 0.59453 * 2) / 3,
     lambda: nemo(name="cispo", clip_low=0.2, clip_high=0.2, **NONE), 1e-5),
    (NEMO, "k3 x 0.1", 0.0362, nemo_kl, 5e-5),
    (NEMO, "k1", (-1.0, 14.0), lambda: kls("k1", [-1.0, -1.0], [0.0, -15.0]), 1e-6),
    (NEMO, "k2", (0.5, 98.0), lambda: kls("k2", [-1.0, -1.0], [0.0, -15.0]), 1e-6),
    (NEMO, "k3", (0.7183, 13.0), lambda: kls("k3", [-1.0, -1.0], [0.0, -15.0]), 5e-5),
    (NEMO, "KL weighed to the engine, gradient", nemo_kl_gradient_expected(), nemo_kl_gradient, 1e-12),
    (NEMO, "dual clip 3", 4.1667, nemo_dual_clip, 5e-5),
    (NEMO, "IcePop", (-math.exp(-0.5) - 2 * math.exp(-0.2)) / 3, nemo_icepop, 1e-12),
    (NEMO, "seq-mask-tis", -2 * math.exp(0.0005) / 3, nemo_masked_by_sequence, 1e-12),
    (VERL, "IcePop weights", (0.0, 0.8, 0.0), lambda: weights([0.4, 0.8, 6.0], correction="icepop"), 1e-6),
    (VERL, "IcePop effective sample size", 1 / 3, verl_icepop_sample_size, 1e-6),
    (VERL, "IcePop out of bounds", 2 / 3,
     lambda: corrected([0.4, 0.8, 6.0], correction="icepop").means["correction/masked_fraction"].mean(),
     1e-6),
    (VERL, "token TIS weights", (0.368, 1.649), lambda: weights([math.exp(-1), math.exp(0.5)]), 5e-4),
    (AREAL, "loglinear, one step of two", (-1.25, -2.25, -3.25),
     lambda: areal([-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5], [0, 0, 0], 2), 1e-6),
    (AREAL, "loglinear, mixed versions", (-1.375, -2.1), lambda: areal([-1.0, -2.0], [-1.5, -2.2], [0, 2], 4), 1e-6),
    (AREAL, "loglinear, sampled by the proximal", -1.0, lambda: areal([-1.0], [-2.0], [4], 5), 1e-6),
    (AREAL, "loglinear, no step between", -1.0, lambda: areal([-1.0], [-2.0], [3], 3), 1e-6),
    (SLIME, "clip 0.2, 0.3", (-2.6, 2.4, 1.1, -0.45), slime_clip, 1e-6),
    (SLIME, "SAPO", (-4 * sigmoid(0.5) * 2, 4 / 1.05 * sigmoid(1.05 * -0.3) * 3, 0.0, 4 / 1.05 * sigmoid(1.05 * 0.4)),
     slime_sapo, 1e-6),
    (SLIME, "SAPO at ratio 1, gradient", (-2.0, 3.0, 0.0, -0.5), slime_sapo_at_one, 1e-6),
    (SLIME_CISPO, "CISPO 0.2, 0.28", cispo_expected(PPO_BAND[1], PPO_BAND[0]),
     lambda: slime_cispo(0.2, 0.28, PPO_BAND[0]), 1e-6),
    (SLIME_CISPO, "CISPO 1, 4", cispo_expected(WIDE_BAND[1], WIDE_BAND[0]),
     lambda: slime_cispo(1.0, 4.0, WIDE_BAND[0]), 1e-6),
    (OPEN_INSTRUCT, "TIS mask 0.5 to 2", (0.0, 1.0, 1.0, 0.0),
     lambda: [float(w > 0) for w in weights([0.49, 1.0, 1.99, 3.0], correction={"name": "icepop", "cap": 2.0})], 0.0),
    (OPENRLHF, "mean over tokens", 22 / 6, lambda: aggregated(THREE, "tokens"), 1e-6),
    (OPENRLHF, "mean over sequences", 13 / 3,
     lambda: aggregated(((1.0, 3.0), (2.0, 4.0), (8.0,)), "sequences"), 1e-6),
    (OPENRLHF, "two microbatches of one step", 28 / 7,
     lambda: aggregated(((1.0, 2.0), (3.0, 4.0, 5.0), (6.0, 7.0)), "tokens"), 1e-6),
    (SKYRL, "token_mean", 2.5, lambda: aggregated(((1.0, 2.0, 3.0), (4.0,)), "tokens"), 1e-6),
    (SKYRL, "sequence_mean", 3.0, lambda: aggregated(((1.0, 2.0, 3.0), (4.0,)), "sequences"), 1e-6),
    (SKYRL, "seq_mean_token_sum_norm, 4", 1.25, lambda: aggregated(((1.0, 2.0, 3.0), (4.0,)), "constant", 4), 1e-6),
    (SKYRL, "RLOO", (3.0, -3.0, -3.0, 3.0, 0.0), lambda: advantages("rloo", (6.0, 3.0), (9.0, 12.0), (1.0,)), 1e-6),
    (SKYRL, "GRPO without std", (1.5, -1.5, -1.5, 1.5), lambda: advantages("group", (6.0, 3.0), (9.0, 12.0)), 1e-6),
    (SKYRL, "MaxRL", (1.5 / 4.5, -1.5 / 4.5, -1.5 / 10.5, 1.5 / 10.5),
     lambda: advantages("maxrl", (6.0, 3.0), (9.0, 12.0)), 1e-6),
]  # fmt: skip
"""Whose test -> what, what it expects there, ours, and how far apart they may be: half of the last digit they print."""


def flat(value: Any) -> list[float]:
    return [number for each in value for number in flat(each)] if isinstance(value, list | tuple) else [float(value)]


def test_peers_numbers_to_every_digit_they_print(show: Callable[[str], None]) -> None:
    show("| whose test | what | theirs | ours | difference |\n|---|---|---|---|---|")
    differing = []
    for source, what, theirs, ours, tolerance in FOREIGN:
        expected, found = flat(theirs), flat(ours())
        difference = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        texts = (" ".join(f"{value:.6g}" for value in values[:5]) for values in (expected, found))
        show(f"| {source} | {what} | {' | '.join(texts)} | {difference:.1e} |")
        if difference > tolerance + 1e-12:
            differing.append((what, theirs, found))
    assert differing == []
