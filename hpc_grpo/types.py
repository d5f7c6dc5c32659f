"""Records that cross a process boundary.

Array fields state their length, unit and zero convention. `G` is the group size. `P` (a prompt), `C` (a completion) and
`L` (a complete sequence) are lengths in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32Array = NDArray[np.int32]
    Float32Array = NDArray[np.float32]
    BoolArray = NDArray[np.bool_]

FinishReason = Literal["stop", "length"]
Advantage = float | tuple[float, ...]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Needs:
    """The parts of a task besides learners: engines that sample, a reference, a critic, completions to imitate, a
    teacher. `rewards`: at least one reward must grade the samples.
    """

    rollouts: bool = False
    reference: bool = False
    critic: bool = False
    labels: bool = False
    teacher: bool = False
    rewards: bool = True


@dataclass(frozen=True)
class Prompt:
    """One item of the prompt stream.

    `ordinal` counts prompts over the whole run from 0, so it identifies the prompt, its epoch and its place in this
    epoch's shuffle. `fields` are the columns of the data set, which rewards receive. `source` names the data source,
    `reward_set` the entry of `config.reward_sets` that grades it, and `environment` the entry of `config.environments`
    that plays it. With an environment, rollouts do not use `token_ids`: the environment makes the prompt.
    """

    ordinal: int
    epoch: int
    token_ids: tuple[int, ...]
    text: str
    fields: Mapping[str, Any]
    source: str = ""
    reward_set: int = 0
    environment: int | None = None
    images: Any = ()
    """Image files as bytes, in the order of the prompt. In calls to actors: a Ray reference to the files."""


@dataclass(frozen=True)
class Demonstration:
    """A prompt with the completion to imitate: one sequence of the SFT task."""

    ordinal: int
    epoch: int
    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class SamplingSpec:
    """The sampling settings of a completion. `temperature` 0 is greedy; lengths are in tokens.

    Each text of `stop` ends a completion, like the end token.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class GroupRequest:
    """Asks an engine for `len(seeds)` rollouts of one prompt; `seeds[i]` is rollout i's own seed.

    Without an `environment`, a rollout is one completion. `environment` is an index into `config.environments`. With an
    environment, each rollout is an episode that begins with the same `row` and the same `environment_seed`, and
    `prompt_token_ids` are not used. Inside an engine, a turn is a request with its prompt and one seed. An `is_urgent`
    request comes before all waiting requests.
    """

    ordinal: int
    prompt_token_ids: Sequence[int]
    seeds: tuple[int, ...]
    sampling: SamplingSpec
    is_urgent: bool = False
    images: Any = ()
    """Like `Prompt.images`. The token ids then have one placeholder for each image."""
    environment: int | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    environment_seed: int = 0


@dataclass(frozen=True)
class Completion:
    """The model's tokens of one turn, and the input that was new in this turn. The first three arrays have length C.

    `token_ids` includes the end token, or the tokens of a text of `stop`, if `finish_reason` is "stop".
    `engine_logprobs` are in nats, of the sampling distribution (after temperature and top_p). `policy_versions` are the
    optimizer steps of the weights that sampled each token. `context_ids` are the token ids of the new input: the first
    prompt, or an observation. If a completion `starts_anew`, they are the model's complete input: the first prompt, or
    a prompt in which the chat template has rewritten earlier turns. In a prompt with images each part of an image has a
    token. `reward` is the environment's reward of this turn. With `train.router_replay`, `experts` are the experts that
    each layer chose for a token, uint8 or uint16 `[N, layers, k]`. The last sampled token has none, because the engine
    did not compute it. So N = P + C - 1, and `as_turn` keeps the last rows.
    """

    token_ids: Int32Array
    engine_logprobs: Float32Array
    policy_versions: Int32Array
    finish_reason: FinishReason
    context_ids: Any = ()
    starts_anew: bool = True
    reward: float = 0.0
    experts: Any = None

    def as_turn(self, context_ids: Any, *, starts_anew: bool) -> Completion:
        """Return this completion with its new input, without the experts that earlier turns of the sequence have."""
        num_new = len(context_ids) + len(self.token_ids)
        experts = None if self.experts is None else self.experts[-num_new:]
        return replace(self, context_ids=context_ids, starts_anew=starts_anew, experts=experts)


@dataclass(frozen=True)
class Episode:
    """One rollout: the turns of a model with an environment. A single answer is an episode of one turn.

    `finish_reason` is "length" if a limit of tokens or turns ended the episode or its last completion. `failure` says
    how the environment failed, "" if it did not. An episode with a failure is masked. `metrics` are the environment's.
    """

    turns: tuple[Completion, ...]
    finish_reason: FinishReason
    failure: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_sequences(self) -> int:
        """Count the training sequences: a turn that starts anew begins another sequence."""
        return sum(turn.starts_anew for turn in self.turns)


@dataclass(frozen=True)
class GroupSamples:
    """The G episodes of one prompt, before grading."""

    ordinal: int
    episodes: tuple[Episode, ...]
    images: Any = ()
    """A reference to the images of the prompt, as bytes; () without images."""


@dataclass(frozen=True)
class GroupGrades:
    """A graded group in the driver: a few numbers per rollout, no token arrays.

    Tuples have length G, or are empty where a field says so. `errors` and `thumbnails` have other lengths. `rewards` is
    the weighted sum of `reward_parts`; the environment's part has weight 1. A rollout that is not `valid` has no
    gradient. Its reward is 0.0 if a reward or the environment failed. A completion masked by `rollout.mask_truncated`
    keeps its reward. `min_policy_versions` is the oldest version that sampled a token, -1 without a token. `measures`
    are the values of `metrics.rollouts.measure` by metric name. `texts` are the decoded completions, empty unless they
    were requested.
    """

    ordinal: int
    rewards: tuple[float, ...]
    reward_parts: Mapping[str, tuple[float, ...]]
    valid: tuple[bool, ...]
    num_completion_tokens: tuple[int, ...]
    """Tokens of the model, in all turns."""
    truncated: tuple[bool, ...]
    min_policy_versions: tuple[int, ...]
    mean_policy_versions: tuple[float, ...]
    measures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    """One line per failed reward call."""
    timed_out: bool = False
    """True if every failed call missed its deadline: the server may be slow, and the reward correct."""
    over_budget: tuple[str, ...] = ()
    """How a completion exceeded a reward's budget, for which it got the worst score; "" for other completions."""
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """The environment's reward of each turn; () without an environment."""
    shown_prompt: str = ""
    """The prompt that an environment made; "" unless decoded completions were requested."""
    shown_turns: tuple[tuple[tuple[str, str], ...], ...] = ()
    """For each turn the observation before it ("" for the first turn) and the model's text.

    Empty without an environment, and if no decoded completions were requested.
    """
    thumbnails: tuple[str, ...] = ()
    """A JPEG in base64 of each image of the prompt, if decoded completions were requested."""
    num_prompt_tokens: int = 0
    num_observed_tokens: tuple[int, ...] = ()
    """Tokens that an environment added after the first prompt."""
    num_sequences: tuple[int, ...] = ()
    failures: tuple[str, ...] = ()
    """How the environment of a rollout failed; "" if it did not."""

    @property
    def is_scored(self) -> tuple[bool, ...]:
        """Return for each rollout whether it has a reward: neither a reward nor its environment failed."""
        return tuple(not (self.errors or failure) for failure in self.failures or ("",) * len(self.rewards))


@dataclass(frozen=True)
class TrainSequence:
    """One training sequence. Every array has length L: the complete sequence with its prompt.

    Entry i of each array belongs to token i. `loss_mask[i]`: the model learns to produce token i from the tokens before
    it, so entry 0 is False. `advantages[i]` is the token's advantage, `engine_logprobs[i]` the engine's logprob in
    nats, `policy_versions[i]` the version of the weights that sampled it. These three are 0 where the mask is False.
    Without an engine, `engine_logprobs` are 0, and `policy_versions` are 0 or None. Tokens that the model did not write
    are masked: the prompt, and observations inside an episode. (ordinal, sample_index) orders sequences
    deterministically. `images` are the bytes of the prompt's image files. `experts` `[L, layers, k]` are the engine's
    experts of each token, None without `train.router_replay`. The last token predicts nothing, so its experts have no
    effect.

    A prompt [5, 6], the completion [7, 8] with advantage 0.5, an observation [9], and the completion [4]:

    >>> import numpy as np
    >>> loss_mask = np.array([False, False, True, True, False, True])
    >>> sequence = TrainSequence(
    ...     ordinal=0,
    ...     sample_index=0,
    ...     token_ids=np.array([5, 6, 7, 8, 9, 4], dtype=np.int32),
    ...     loss_mask=loss_mask,
    ...     advantages=loss_mask * np.float32(0.5),
    ...     engine_logprobs=np.array([0, 0, -1.2, -0.3, 0, -2.0], dtype=np.float32),
    ... )
    >>> sequence.token_ids[sequence.loss_mask].tolist(), sequence.num_trained_tokens
    ([7, 8, 4], 3)
    """

    ordinal: int
    sample_index: int
    token_ids: Int32Array
    loss_mask: BoolArray
    advantages: Float32Array
    engine_logprobs: Float32Array
    policy_versions: Int32Array | None = None
    images: tuple[bytes, ...] = ()
    experts: Any = None

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True)
class RemoteGroup:
    """A training group: a reference to its samples, and the driver's decisions about each of its G rollouts.

    A rollout's advantage is one number for all its turns, or one number per turn.
    """

    samples: Any
    advantages: tuple[Advantage, ...]
    valid: tuple[bool, ...]


@dataclass(frozen=True)
class Minibatch(Generic[Item]):
    """One learner's share of an optimizer step: groups or demonstrations. The learner replaces groups by sequences.

    `num_valid_tokens` and `num_sequences` count the trained tokens and the sequences of all learners' shares together.
    One of them divides the loss (`loss.denominator`), so the split into learners and microbatches does not change the
    gradient. `sequences` may be empty.
    """

    sequences: tuple[Item, ...]
    num_valid_tokens: int
    num_sequences: int


GIB = 2**30
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter in the weight contract. `dtype` is a name of torch, such as bfloat16.

    Names are Hugging Face's. An engine's parameters have vLLM's fused names.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
