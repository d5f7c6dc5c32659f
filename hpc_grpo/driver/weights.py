"""The driver's side of weight sync: two calls per process, whatever the number of parameters.

`publish` returns when every engine of every node holds the new version, and raises the first engine's own error
otherwise.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from hpc_grpo.config import Config
from hpc_grpo.driver.canary import Canary
from hpc_grpo.driver.engines import RemoteEngine, RemoteGrader, is_engine_failure
from hpc_grpo.driver.remote import ActorLostError, Deadline, all_errors, death, first_error, get_all
from hpc_grpo.errors import ConfigError, HpcGrpoError, PromptError, WeightSyncError
from hpc_grpo.types import GroupRequest
from hpc_grpo.weights.node_group import PUBLISHER_RANK, GroupMembership
from hpc_grpo.weights.store import BucketLayout, StoredVersion, StoreSpec, bucket_layout

_ENGINE_ERROR_GRACE_S = 5.0


@dataclass(frozen=True)
class NodeMembers:
    """One node's actors; its first learner writes the node's store. SFT has neither engines nor a grader."""

    learners: Sequence[Any]
    engines: Sequence[RemoteEngine]
    grader: RemoteGrader | None = None


class WeightStores:
    """The stores of all nodes, which their first learners begin to allocate at once, at some seconds a GiB."""

    def __init__(self, config: Config, nodes: Sequence[NodeMembers]) -> None:
        """Have them opened. Waits for the learners' parameters alone, so that engines can start meanwhile."""
        self._start_deadline = Deadline(config.deadlines.start_s, "deadlines.start_s")
        specs = get_all([nodes[0].learners[0].parameter_specs.remote()], None, "the learner's parameters")[0]
        published = [replace(spec, dtype=config.engine_dtype) for spec in specs]
        layout = bucket_layout(published, config.weights.bucket_mib * 2**20)
        # 63 bits: the checksums keyed with it travel in signed integers.
        self.spec = StoreSpec(layout, config.weights.num_buffers, secrets.randbits(63), config.weights.page_lock)
        self._opening = [
            learner.open_weight_store.remote(self.spec, writes=index == 0)
            for node in nodes
            for index, learner in enumerate(node.learners)
        ]

    def folders(self) -> list[Path]:
        """Return each node's folder, once its store is there."""
        folders = get_all(self._opening, self._start_deadline, "the weight stores")
        return [folder for folder in folders if folder is not None]


class WeightSync:
    """Publishes the learners' weights to the engines of all nodes. An engine that fails is replaced."""

    def __init__(self, config: Config, nodes: Sequence[NodeMembers], canary: Canary, stores: WeightStores) -> None:
        """Check the contract, wait for the stores, join the groups. Raises ConfigError where the parameters differ."""
        self._config = config
        self._canary = canary
        self._deadline = Deadline(config.weights.deadline_s, "weights.deadline_s")
        self._start_deadline = Deadline(config.deadlines.start_s, "deadlines.start_s")
        self._nodes = nodes
        self._learners = [learner for node in nodes for learner in node.learners]
        self._engines = [engine for node in nodes for engine in node.engines]
        self._store = stores.spec
        _check_contract(self._engines[0], self._store.layout)
        self._folders = stores.folders()
        self._generations = itertools.count()
        self._replace(self._join(nodes))

    def publish(self, version: int, *, is_checked: bool) -> dict[str, float]:
        """Stage on the learners and verify on the engines while these generate, then have all load the version.

        `is_checked`: the canary proves that engines sample from it; returns `mismatch/canary`, the nats a token by
        which the farthest engine is off. Raises WeightSyncError for one that does not sample from these weights.
        """
        staging = [learner.stage_weights.remote(version) for learner in self._learners]
        staged = [each for each in get_all(staging, self._deadline, "staging weights") if each is not None]
        shares_gpus = self._config.placement.colocate
        if shares_gpus:  # before engines are asked anything: one that takes a dead one's place needs the memory
            freeing = [learner.free_cached_memory.remote() for learner in self._learners]
            get_all(freeing, self._deadline, "the learners' memory")
        self._verify(version, staged)
        if shares_gpus:
            self._have_all("wake_up", "the engines to wake up")
        probe = self._canary.request if is_checked else None
        failures, loading = self._announce(version, probe)
        while failures:
            self._replace(failures)
            failures, loading = self._announce(version, probe)
        return self._judge(version, loading) if is_checked else {}

    def _verify(self, version: int, staged: Sequence[StoredVersion]) -> None:
        """Have the engines compare what was staged with its checksums, each its share, beside what they sample.

        One that fails is replaced, and compares everything as it loads.
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
        if failures:
            self._replace(failures)

    def put_engines_to_sleep(self) -> None:
        """Have the engines give their GPUs to the learners, until the next publish; each has nothing to sample."""
        self._have_all("sleep", "the engines to sleep")

    def _have_all(self, method: str, waiting_for: str) -> None:
        """Call a method of every engine; one that fails is replaced, and called in turn."""
        calls = {engine: getattr(engine.actor, method).remote() for engine in self._engines}
        while failures := self._failures(calls, [], waiting_for):
            calls = {engine: getattr(engine.actor, method).remote() for engine in self._replace(failures)}

    def revive(self, engine: RemoteEngine, error: Exception) -> None:
        """Replace an engine that failed with `error` by one that reads the published version from its node's store."""
        failures = {engine: error}
        replaced = set[RemoteEngine]()
        while failures:
            replaced |= self._replace(failures)
            loading = {engine: engine.actor.load_stored_weights.remote() for engine in replaced}
            failures = self._failures(loading, [], "the weights of an engine that was started again")

    def _announce(
        self, version: int, probe: GroupRequest | None
    ) -> tuple[dict[RemoteEngine, Exception], dict[RemoteEngine, Any]]:
        """Have every engine load what was staged; return those that failed, none once all hold it, and the calls."""
        loading = {engine: engine.actor.receive_weights.remote(version, probe) for engine in self._engines}
        announcing = [learner.announce_weights.remote() for learner in self._learners]
        try:
            return self._failures(loading, announcing, f"the publish of weight version {version}"), loading
        except (HpcGrpoError, RayError) as error:
            ends = all_errors(announcing, _ENGINE_ERROR_GRACE_S)
            if any(end and death(end) for end in ends):  # engines only see that the group broke
                raise ActorLostError(f"A learner died over the publish of weight version {version}.") from error
            # A publisher only sees that a worker failed, and often answers first: the engine knows why.
            cause = first_error(list(loading.values()), _ENGINE_ERROR_GRACE_S) or error
            if isinstance(cause, PromptError):
                raise cause from error
            raise WeightSyncError(f"Publishing weight version {version} failed: {cause}") from cause

    def _judge(self, version: int, loading: Mapping[RemoteEngine, Any]) -> dict[str, float]:
        """Have the learners score what the engines said to the probe, each completion once."""
        answers = get_all(list(loading.values()), self._deadline, "the answers to the probe")
        completions = {engine: samples.completions[0] for engine, samples in zip(loading, answers, strict=True)}
        said = {engine: tuple(completion.token_ids.tolist()) for engine, completion in completions.items()}
        once = list(dict.fromkeys(said.values()))
        scoring = [learner.score.remote(self._canary.request.prompt_token_ids, once) for learner in self._learners]
        scores = dict(zip(once, get_all(scoring, self._deadline, "the learners' scores of the probe")[0], strict=True))
        judged = [
            self._canary.judge(engine.actor, completion, scores[said[engine]], version)
            for engine, completion in completions.items()
        ]
        return {"mismatch/canary": max(judged)}

    def _replace(self, failures: Mapping[RemoteEngine, Exception]) -> set[RemoteEngine]:
        """Replace the engines that failed, and have all members of their nodes join new groups; return the replaced.

        Of engines that fail together only one may have been seen yet: each is asked for a sign of life first, since a
        group that waits for a dead one waits for all of `weights.deadline_s`.
        """
        replaced = set[RemoteEngine]()
        while failures:
            for engine, error in failures.items():
                engine.replace(self._start_deadline, error)
            replaced |= failures.keys()
            nodes = [node for node in self._nodes if not replaced.isdisjoint(node.engines)]
            asked = {engine: engine.actor.ready.remote() for node in nodes for engine in node.engines}
            failures = self._failures(asked, [], "a sign of life of the engines") or self._join(nodes)
        return replaced

    def _failures(
        self, calls: Mapping[RemoteEngine, Any], others: Sequence[Any], waiting_for: str
    ) -> dict[RemoteEngine, Exception]:
        """Wait for `calls` and `others`; return the engines that failed. Raises what no engine is to blame for."""
        try:
            get_all([*calls.values(), *others], self._deadline, waiting_for)
        except (HpcGrpoError, RayError):
            errors = zip(calls, all_errors(list(calls.values()), _ENGINE_ERROR_GRACE_S), strict=True)
            failures = {engine: own for engine, own in errors if own is not None and is_engine_failure(own)}
            if not failures:
                raise
            return failures
        return {}

    def _join(self, nodes: Sequence[NodeMembers]) -> dict[RemoteEngine, Exception]:
        """Form the groups of `nodes`; return the engines that failed over it."""
        generation, deadline_s = next(self._generations), self._config.weights.deadline_s
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


def _check_contract(engine: RemoteEngine, layout: BucketLayout) -> None:
    (differences,) = get_all([engine.actor.contract_differences.remote(layout)], None, "the weight contract")
    if differences:
        raise ConfigError(
            "Learner and engine disagree on the model's parameters, so weights cannot be published:\n  "
            + "\n  ".join(differences)
        )
