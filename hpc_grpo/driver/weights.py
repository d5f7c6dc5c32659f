"""The driver's side of weight sync: a few calls per process, for any number of parameters.

`publish` returns once every engine of every node holds the new version, and replaces engines that die.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayError

from hpc_grpo.config import Config
from hpc_grpo.driver.engines import RemoteEngine, RemoteGrader, is_engine_failure
from hpc_grpo.driver.remote import ActorLostError, Deadline, death, errors_in_time, get_all
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.errors import ConfigError, HpcGrpoError, PromptError, WeightSyncError
from hpc_grpo.types import Completion, GroupRequest, Prompt, SamplingSpec
from hpc_grpo.weights.store import PUBLISHER_RANK, GroupMembership, StoredVersion, StoreSpec, bucket_layout

if TYPE_CHECKING:
    from hpc_grpo.types import Float32Array

_ENGINE_ERROR_GRACE_S = 5.0
_MAX_PROMPT_TOKENS = 64
_NUM_TOKENS = 4
_BOUNDS = {"float32": 0.05, "bfloat16": 1.0}
"""Limit of the canary's difference in nats. Sound engines differ by 1e-5 in float32 and by 0.03 in bfloat16."""
_MOVED = {"float32": 1e-4, "bfloat16": 0.05}
"""An engine that repeats its answer is stale if a learner's logprob moved by more than this, in nats.

After a smaller move a correct engine may repeat its answer too, because it rounds.
"""
_LEAST_BOUNDS = {"float32": 2e-3, "bfloat16": 1.0}
_OVER_FIRST = 100.0
"""An engine's bound is this many times its first distance, but at least `_LEAST_BOUNDS` and at most `_BOUNDS`."""


class Canary:
    """Proves that engines sample from the weights just published, by their answers to one probe prompt.

    After a publish every engine completes the probe, on the same path and through the same prefix cache as rollouts.
    The learners score the answer. The run ends in two cases. First, engine and learner differ by more than a bound.
    Second, an engine repeats its answer to the last bit although the learners' logprobs have moved. It then has its old
    weights, or a cache of old keys and values. The second case is detected long before the difference is large. An
    engine that was near the learners at first has a tighter bound. If it loads only a part of the new weights, it soon
    exceeds this bound.
    """

    def __init__(self, config: Config, prompt: Prompt) -> None:
        """Make the probe from any `prompt` of the run: its last 64 tokens, or all tokens of a prompt with images."""
        is_exact = config.model.dtype == config.engine_dtype == "float32"
        precision = "float32" if is_exact else "bfloat16"
        self._bound, self._least, self._moved = _BOUNDS[precision], _LEAST_BOUNDS[precision], _MOVED[precision]
        self._seen: dict[object, tuple[Completion, Float32Array]] = {}
        """An engine's last new answer, and the learners' logprobs of this answer at that time."""
        self._first: dict[object, float] = {}
        """An engine's distance from the learners at its first check, in nats a token."""
        sampling = SamplingSpec(_NUM_TOKENS, temperature=config.rollout.temperature)
        token_ids: Sequence[int] = prompt.token_ids[-_MAX_PROMPT_TOKENS:]
        images: Any = ()
        if prompt.images:
            token_ids, images = prompt.token_ids, ray.put(prompt.images)
        self.request = GroupRequest(prompt.ordinal, token_ids, (config.run.seed,), sampling, True, images)

    def judge(self, engine: object, completion: Completion, learner_logprobs: Float32Array, version: int) -> float:
        """Return the mean absolute difference of the engine's and the learners' logprobs, in nats a token.

        `engine` is a key that changes when the engine is replaced. Raises WeightSyncError if the engine does not sample
        from the weights of `version`.
        """
        if not (completion.policy_versions == version).all():
            held = completion.policy_versions[0]
            raise WeightSyncError(f"An engine holds weight version {held} after the publish of version {version}.")
        own = completion.engine_logprobs
        distance = float(np.abs(own - learner_logprobs).mean())
        shown = (" ".join(f"{value:.4f}" for value in each) for each in (own, learner_logprobs))
        both = "logprobs of the probe: engine {}, learner {}".format(*shown)
        before, scored_before = self._seen.get(engine, (None, learner_logprobs))
        if (
            before is None
            or not np.array_equal(before.token_ids, completion.token_ids)
            or not np.array_equal(before.engine_logprobs, own)
        ):
            self._seen[engine] = completion, learner_logprobs
        elif (moved := float(np.abs(learner_logprobs - scored_before).max())) > self._moved:
            raise WeightSyncError(
                f"An engine keeps old weights after the publish of version {version}: it repeats its earlier "
                f"logprobs, while the learner's moved by {moved:.3g} nats ({both})."
            )
        bound = min(self._bound, max(self._least, _OVER_FIRST * self._first.get(engine, self._bound)))
        if not distance <= bound:
            raise WeightSyncError(
                f"An engine does not sample from weight version {version}: it is {distance:.3g} nats a token from the "
                f"learner, more than {bound:g} ({both})."
            )
        self._first.setdefault(engine, distance)
        return distance


@dataclass(frozen=True)
class NodeMembers:
    """One node's actors; its first learner writes the node's store. SFT has neither engines nor a grader."""

    learners: Sequence[Any]
    engines: Sequence[RemoteEngine]
    grader: RemoteGrader | None = None


class WeightSync:
    """Publishes the learners' weights to the engines of all nodes. An engine that fails is replaced."""

    def __init__(self, config: Config, nodes: Sequence[NodeMembers]) -> None:
        """Let each node's first learner open the weight store, which takes seconds a GiB, while engines start."""
        self._config, self._nodes = config, nodes
        self._deadline = Deadline(config.deadlines.publish_s, "2 times deadlines.silent_s")
        self._learners = [learner for node in nodes for learner in node.learners]
        self._engines = [engine for node in nodes for engine in node.engines]
        self._generations = itertools.count()
        specs = get_all([self._learners[0].parameter_specs.remote()], None, "the learner's parameters")[0]
        layout = bucket_layout([replace(spec, dtype=config.engine_dtype) for spec in specs])
        self._store = StoreSpec(layout, secrets.randbits(63))  # 63 bits: checksums travel in signed integers
        self._opening = [
            learner.open_weight_store.remote(self._store, writes=index == 0)
            for node in nodes
            for index, learner in enumerate(node.learners)
        ]

    def connect(self, canary: Canary) -> None:
        """Check the contract, wait for the stores, join the groups. Raises ConfigError if the parameters differ."""
        self._canary = canary
        contract = self._engines[0].actor.contract_differences.remote(self._store.layout)
        if differences := get_all([contract], None, "the weight contract")[0]:
            raise ConfigError(
                "Learner and engine disagree on the model's parameters, so weights cannot be published:\n  "
                + "\n  ".join(differences)
            )
        deadline = Deadline(self._config.deadlines.start_s, "deadlines.start_s")
        folders = get_all(self._opening, deadline, "the weight stores")
        self._folders = [folder for folder in folders if folder is not None]
        self._replace(self._join(self._nodes))

    def publish(self, version: int) -> dict[str, float]:
        """Stage on the learners and verify on the engines while these sample. Then let all engines load the version.

        Replaces engines that fail. The canary checks every engine. Returns `mismatch/canary`, the largest difference of
        an engine in nats a token. Raises WeightSyncError for wrong checksums, or for an engine that does not sample
        from these weights. Raises ActorLostError if a learner died.
        """
        staging = [learner.stage_weights.remote(version) for learner in self._learners]
        staged = [each for each in get_all(staging, self._deadline, "staging weights") if each is not None]
        shares_gpus = self._config.placement.colocate
        if shares_gpus:  # First of all: a replacement of a dead engine needs the memory.
            freeing = [learner.free_cached_memory.remote() for learner in self._learners]
            get_all(freeing, self._deadline, "the learners' memory")
        self._verify(version, staged)
        if shares_gpus:
            self._have_all(Sampler.wake_up, "the engines to wake up")
        failures, loading = self._announce(version)
        while failures:
            self._replace(failures)
            failures, loading = self._announce(version)
        return {"mismatch/canary": self._judge(version, loading)}

    def put_engines_to_sleep(self) -> None:
        """Let the engines free their GPU memory for the learners until the next publish. No engine has work."""
        self._have_all(Sampler.sleep, "the engines to sleep")

    def revive(self, engine: RemoteEngine, error: Exception) -> None:
        """Replace an engine that failed with `error`. The new engine loads the published version from its node's store.

        Replaces other engines of the node too if they turn out to be dead.
        """
        failures = {engine: error}
        replaced = set[RemoteEngine]()
        while failures:
            replaced |= self._replace(failures)
            loading = {engine: engine.actor.between_steps.remote(Sampler.load_stored_weights) for engine in replaced}
            failures = self._failures(loading, [], "the weights of an engine that was started again")

    def _verify(self, version: int, staged: Sequence[StoredVersion]) -> None:
        """Let the engines verify the checksums of the staged weights while they sample, each engine a part.

        A failed engine is replaced. The new engine verifies all checksums while it loads.
        """
        verifying = {
            engine: engine.actor.verify_weights.remote(of_node)
            for node, of_node in zip(self._nodes, staged, strict=True)
            for engine in node.engines
        }
        try:
            failures = self._failures(verifying, [], f"the checksums of weight version {version}")
        except WeightSyncError as error:
            raise WeightSyncError(f"Publishing weight version {version} failed: {error}") from error
        self._replace(failures)

    def _have_all(self, method: Callable[[Sampler], None], waiting_for: str) -> None:
        """Call a method of every engine's sampler. Replace an engine that fails, and call its replacement too."""
        engines: set[RemoteEngine] | list[RemoteEngine] = self._engines
        while engines:
            calls = {engine: engine.actor.between_steps.remote(method) for engine in engines}
            engines = self._replace(self._failures(calls, [], waiting_for))

    def _announce(self, version: int) -> tuple[dict[RemoteEngine, Exception], dict[RemoteEngine, Any]]:
        """Let every engine load the staged version. Return the failed engines with their errors, and all calls."""
        probe = self._canary.request
        loading = {engine: engine.actor.receive_weights.remote(version, probe) for engine in self._engines}
        announcing = [learner.announce_weights.remote() for learner in self._learners]
        try:
            return self._failures(loading, announcing, f"the publish of weight version {version}"), loading
        except (HpcGrpoError, RayError) as error:
            ends = errors_in_time(announcing, _ENGINE_ERROR_GRACE_S).values()
            if any(map(death, ends)):  # engines only see that the group broke
                raise ActorLostError(f"A learner died over the publish of weight version {version}.") from error
            if isinstance(error, PromptError):
                raise
            raise WeightSyncError(f"Publishing weight version {version} failed: {error}") from error

    def _judge(self, version: int, loading: Mapping[RemoteEngine, Any]) -> float:
        """Let the learners score each distinct answer to the probe once, and check all engines with the canary.

        Return the largest distance of an engine, in nats a token.
        """
        answers = get_all(list(loading.values()), self._deadline, "the answers to the probe")
        said = [tuple(completion.token_ids.tolist()) for completion in answers]
        once = list(dict.fromkeys(said))
        asked = self._canary.request
        prompt = np.asarray(answers[0].context_ids).tolist() or asked.prompt_token_ids
        scoring = [learner.score.remote(prompt, once, asked.images) for learner in self._learners]
        scores = dict(zip(once, get_all(scoring, self._deadline, "the learners' scores of the probe")[0], strict=True))
        return max(
            self._canary.judge(engine.actor, completion, scores[own], version)
            for engine, completion, own in zip(loading, answers, said, strict=True)
        )

    def _replace(self, failures: Mapping[RemoteEngine, Exception]) -> set[RemoteEngine]:
        """Replace the failed engines, and let all members of their nodes join new groups. Return the replaced engines.

        Other engines may be dead too, and a group with a dead engine would wait until the publish's deadline. So first
        wait for a sign of life of each engine of these nodes.
        """
        replaced = set[RemoteEngine]()
        while failures:
            for engine, error in failures.items():
                engine.replace(error)
            replaced |= failures.keys()
            nodes = [node for node in self._nodes if not replaced.isdisjoint(node.engines)]
            asked = {engine: engine.actor.ready.remote() for node in nodes for engine in node.engines}
            failures = self._failures(asked, [], "a sign of life of the engines") or self._join(nodes)
        return replaced

    def _failures(
        self, calls: Mapping[RemoteEngine, Any], others: Sequence[Any], waiting_for: str
    ) -> dict[RemoteEngine, Exception]:
        """Wait for `calls` and `others`. Return each failed engine with its error; {} if all calls succeed.

        After a first error, waits 5 s for the errors of other engines: an engine that only notices the failure of
        another engine often answers first. Raises the first error if no engine failed by itself (`is_engine_failure`).
        """
        try:
            get_all([*calls.values(), *others], self._deadline, waiting_for)
        except (HpcGrpoError, RayError) as error:
            engines = {call: engine for engine, call in calls.items()}
            errors = errors_in_time([*engines], _ENGINE_ERROR_GRACE_S)
            failures = {engines[call]: own for call, own in errors.items() if is_engine_failure(own)}
            if not failures and errors:
                raise next(iter(errors.values())) from error
            if not failures:
                raise
            return failures
        return {}

    def _join(self, nodes: Sequence[NodeMembers]) -> dict[RemoteEngine, Exception]:
        """Form the groups of `nodes`. Return the engines that failed to join."""
        generation, deadline_s = next(self._generations), self._config.deadlines.publish_s
        engine_ranks = self._config.engine.tensor_parallel
        joining: dict[RemoteEngine, Any] = {}
        publishers = []
        for node, folder in zip(self._nodes, self._folders, strict=True):
            if node in nodes:
                size = 1 + len(node.engines) * engine_ranks
                publisher = GroupMembership(folder, PUBLISHER_RANK, size, deadline_s, generation)
                publishers.append(node.learners[0].join_weight_group.remote(publisher))
                for index, engine in enumerate(node.engines):
                    own = replace(publisher, rank=1 + index * engine_ranks)
                    joining[engine] = engine.actor.join_weight_group.remote(own, self._store)
        return self._failures(joining, publishers, "the weight groups")
