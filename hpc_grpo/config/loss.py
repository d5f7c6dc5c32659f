"""Section `loss`: the policy loss, its normalisation, and the terms and corrections around it.

Losses, corrections and advantages say at their registration which keys they read, and what their papers have for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from hpc_grpo.config.section import PathText, Section
from hpc_grpo.registry import ADVANTAGES, CORRECTIONS, LOSSES, Registry

if TYPE_CHECKING:
    ReadFloat = float
    ReadBool = bool
else:
    ReadFloat = NonNegativeFloat | None
    ReadBool = bool | None
# Types of keys that papers decide: null only where nothing reads the key, so who reads it always finds a value.

_OF_PAPER: Any = None

READERS: dict[str, tuple[str, Registry]] = {
    "clip_low": ("name", LOSSES),
    "clip_high": ("name", LOSSES),
    "dual_clip": ("name", LOSSES),
    "gate_temperatures": ("name", LOSSES),
    "cov_fraction": ("name", LOSSES),
    "cov_kl_coef": ("name", LOSSES),
    "importance_low": ("importance_correction", CORRECTIONS),
    "importance_cap": ("importance_correction", CORRECTIONS),
    "normalize_std": ("advantage", ADVANTAGES),
    "pass_k": ("advantage", ADVANTAGES),
}
"""Keys that not everything reads -> the key that names their reader, and where that is found."""

ARGUMENTS: dict[str, tuple[str, Registry]] = {
    "args": ("name", LOSSES),
    "correction_args": ("importance_correction", CORRECTIONS),
    "advantage_args": ("advantage", ADVANTAGES),
}
"""Keys with settings of one entry's own, by their names -> the key that names it, and where that is found."""

_FOR_USERS_OWN: Mapping[str, Any] = {"clip_low": 0.2, "clip_high": 0.2, "importance_cap": 2.0, "normalize_std": True}
"""Stand for the settings of a paper where the user's own function is named, which only the job imports."""


class LossConfig(Section):
    name: PathText = Field("grpo", description="A loss of algorithms/losses, or module:function.")
    denominator: Literal["tokens", "sequences", "constant"] = Field(
        _OF_PAPER,
        description="What divides the sum over a step's tokens. tokens: their number; sequences: each sequence's own "
        "number of them, then the number of sequences; constant: denominator_tokens for each sequence. "
        "null: as in the loss's paper.",
    )
    denominator_tokens: PositiveInt | None = Field(
        None, description="Tokens that denominator = constant counts for a sequence; null: rollout.max_new_tokens."
    )
    clip_low: ReadFloat = Field(
        _OF_PAPER, description="The ratio is clipped below at 1 - clip_low; null: as in the loss's paper."
    )
    clip_high: ReadFloat = Field(
        _OF_PAPER, description="The ratio is clipped above at 1 + clip_high; null: as in the loss's paper."
    )
    dual_clip: PositiveFloat | None = Field(
        None, gt=1.0, description="Largest ratio that counts where the advantage is negative, such as 3; null: any."
    )
    gate_temperatures: tuple[PositiveFloat, PositiveFloat] | None = Field(
        None, description="sapo's, where the advantage is positive and where it is negative; null: as in its paper."
    )
    cov_fraction: Annotated[ReadFloat, Field(gt=0.0, le=1.0)] = Field(
        _OF_PAPER,
        description="Share of the tokens that kl_cov holds near the old policy and clip_cov leaves out; null: as in "
        "their paper.",
    )
    cov_kl_coef: ReadFloat = Field(_OF_PAPER, description="Weight of the KL that holds them; null: as in its paper.")
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of the loss's own, by name; those left out are as in its paper.",
    )
    proximal: Literal["recomputed", "interpolated"] = Field(
        "recomputed",
        description="Where the later of train.num_minibatches have their proximal logprobs from: a forward pass before "
        "the first, or none: an interpolation between engine and learner by versions (AReaL).",
    )
    entropy_coef: NonNegativeFloat = Field(
        0.0, description="Weight of the entropy bonus, whose gradient takes memory as logits do; 0: none."
    )
    kl_coef: NonNegativeFloat = Field(0.0, description="Weight of the KL to the reference; 0: no reference.")
    ref_refresh_steps: PositiveInt | None = Field(
        None, description="Steps after which the reference follows the policy, again and again; null: it is frozen."
    )
    ref_mixup: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        1.0,
        description="Share of the policy in the reference that follows it, the rest of it stays: 1 is a copy, less an "
        "exponential average, in float32.",
    )
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        "k3",
        description="Estimates that KL. In the loss k1 has no gradient on average, k2 that of the KL on-policy, "
        "unbiased (k3 times the ratio to the engine) also off-policy.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="reward: each token's advantage loses kl_coef times the KL of the rest of its sequence."
    )
    advantage: PathText = Field("group", description="An advantage of algorithms/advantages, or module:function.")
    normalize_std: ReadBool = Field(
        _OF_PAPER, description="Divide advantages by the standard deviation of the group; null: as in the papers."
    )
    pass_k: PositiveInt | None = Field(None, description="pass_k's k; null: 4.")
    advantage_args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of an advantage of yours, or settings of a built-in's own."
    )
    importance_correction: PathText = Field(
        _OF_PAPER,
        description="Corrects for the mismatch of engine and learner logprobs: one of algorithms/corrections, or "
        "module:function; none: nothing does. null: truncated, or as in the loss's paper.",
    )
    correction_args: dict[str, Any] = Field(default_factory=dict, description="Settings of the correction's own.")
    importance_low: ReadFloat = Field(
        _OF_PAPER, description="Lower bound of the importance weight; null: as in the correction's paper."
    )
    importance_cap: Annotated[ReadFloat, Field(gt=0.0)] = Field(
        _OF_PAPER, description="Upper bound of the importance weight; null: as in the correction's paper."
    )

    @property
    def functions(self) -> dict[str, str]:
        """Return the keys that name a function, and its name: a built-in's, or the user's `module:function`."""
        chosen = {"name": self.name, "advantage": self.advantage, "importance_correction": self.importance_correction}
        return {f"loss.{key}": name for key, name in chosen.items()}

    @property
    def averages_reference(self) -> bool:
        """Tell whether the reference is an exponential average of the policy."""
        return self.ref_refresh_steps is not None and self.ref_mixup < 1.0

    @property
    def compares_advantages(self) -> bool:
        """Tell whether the loss looks at the advantages of all tokens of an optimizer step before it."""
        return "prepare" in (LOSSES.paper_of(self.name) or {})

    @property
    def compares_minibatch(self) -> bool:
        """Tell whether the loss or the correction looks at all tokens of an optimizer step before it."""
        papers = LOSSES.paper_of(self.name), CORRECTIONS.paper_of(self.importance_correction)
        return any("prepare" in (paper or {}) for paper in papers)

    @property
    def is_still_without_advantage(self) -> bool:
        """Tell whether a token of advantage 0 has no gradient, and changes that of no other.

        So built-in losses say of themselves (`scales_advantage`); one of the user's may pull towards something else,
        and what looks at all tokens of an optimizer step needs these too.
        """
        is_built_in = CORRECTIONS.paper_of(self.importance_correction) is not None
        scales = bool((LOSSES.paper_of(self.name) or {}).get("scales_advantage"))
        return scales and is_built_in and not self.compares_minibatch and not self.entropy_coef

    @model_validator(mode="before")
    @classmethod
    def _take_from_papers(cls, values: Any) -> Any:
        """Replace null by what the chosen loss, correction and advantage have in their papers."""
        if not isinstance(values, dict):
            return values
        taken = {**values, **{key: value for key, value in _of_papers(values).items() if values.get(key) is None}}
        for key, (names_reader, registry) in ARGUMENTS.items():
            given = values.get(key) or {}
            if isinstance(given, dict) and (own := arguments_of(registry, str(taken.get(names_reader, "grpo")))):
                taken[key] = {**own, **given}
        return taken


def keys_read(registry: Registry, name: str) -> set[str]:
    """List the keys of READERS that an entry reads; all of its kind where it is the user's own."""
    paper = registry.paper_of(name)
    return {key for key, (_, own) in READERS.items() if own is registry and (paper is None or key in paper)}


def arguments_of(registry: Registry, name: str) -> Mapping[str, Any] | None:
    """Return the settings of an entry's own as its paper has them; None where it is the user's own."""
    paper = registry.paper_of(name)
    return None if paper is None else paper.get("args", {})


def _of_papers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section's keys that papers decide. Names of nothing are the rules' to refuse."""
    loss = LOSSES.paper_of(str(values.get("name") or "grpo")) or {}
    named = {
        "denominator": loss.get("denominator", "tokens"),
        "importance_correction": loss.get("importance_correction", "truncated"),
        "advantage": "group",
    }
    chosen = {"name": "grpo", **named, **{key: value for key, value in values.items() if value is not None}}
    for key, (names_reader, registry) in READERS.items():
        paper = registry.paper_of(str(chosen[names_reader]))
        paper = _FOR_USERS_OWN if paper is None else paper
        is_as_wanted = registry is not CORRECTIONS or chosen[names_reader] == loss.get(names_reader)
        named[key] = {**paper, **(loss if is_as_wanted else {})}.get(key) if key in paper else None
    return named
