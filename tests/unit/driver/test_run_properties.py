"""What holds of every run, whatever is cut, fails, is filtered, replaced, at rest or ahead: properties, by hypothesis.

The default number of examples is small; `HYPOTHESIS_EXAMPLES=5000` takes more.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.driver import remote
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import GroupGrades, TrainSequence
from tests.support.configs import minimal_config
from tests.support.ray_futures import FakeRay
from tests.support.simulated_run import FIRST_TOKEN, Odds, SimulatedRun, TrainedStep, stream_of

NUM_EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "40"))
CHANCES = st.sampled_from([0.0, 0.0, 0.3, 0.7])


@dataclass(frozen=True)
class Scene:
    config: Config
    odds: Odds
    num_learners: int


@st.composite
def scenes(draw: Any, max_lag_steps: int = 3) -> Scene:
    prompts_per_step = draw(st.integers(1, 4))
    minibatches = draw(st.integers(1, min(2, prompts_per_step)))
    num_sources = draw(st.integers(1, 2))
    sources = [{"path": f"{at}.jsonl", "answer_field": None} for at in range(num_sources)]
    for source in sources if num_sources > 1 else ():
        source["count"] = draw(st.integers(1, 4))
    curriculum = {
        "easy_rest": draw(st.sampled_from([1, None, 0, 3])),
        "hard_to": draw(st.sampled_from([0.0, None, 0.5])),
        "hard_rest": draw(st.sampled_from([1, None, 2])),
        "after": draw(st.integers(1, 2)),
    }
    config = minimal_config(
        run={"seed": draw(st.integers(0, 10**6))},
        data={
            "train": {"mix": sources} if num_sources > 1 else sources[0],
            "curriculum": draw(st.sampled_from([curriculum, None])),
            "shuffle": draw(st.booleans()),
        },
        rollout={
            "prompts_per_step": prompts_per_step,
            "group_size": draw(st.integers(2, 4)),
            "max_policy_lag": minibatches * draw(st.integers(0, max_lag_steps)),
            "dynamic_sampling": draw(st.sampled_from([None, 2, 3])),
            "mask_truncated": draw(st.booleans()),
            "drop_zero_variance": draw(st.booleans()),
            "logged_fraction": draw(st.sampled_from([0.0, 1.0])),
        },
        loss={"advantage": draw(st.sampled_from(["group", "rloo", "reinforce_pp"]))},
        grading={"max_failed_fraction": 1.0},
        train={"total_steps": draw(st.integers(1, 8)), "num_minibatches": minibatches},
    )
    solves = draw(st.lists(st.sampled_from([1.0, 0.5, 0.0, 0.9]), min_size=num_sources, max_size=8))
    return Scene(config, Odds(draw(CHANCES), draw(CHANCES), solves), draw(st.integers(1, 3)))


@contextmanager
def run_folder() -> Iterator[RunDir]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(remote, "ray", FakeRay())
        yield RunDir(Path(folder))


def trained_sequences(step: TrainedStep) -> list[TrainSequence]:
    return [own for share in step.shares for _, sequences in share for own in sequences]


def check_sequence(sequence: TrainSequence, grades: GroupGrades, advantages: tuple[float, ...]) -> None:
    """A sequence is its own group's sample, learned where that was written, and worth what its reward made it."""
    index, ordinal = sequence.sample_index, sequence.ordinal
    assert grades.valid[index], "a masked rollout was trained on"
    written = sequence.token_ids[sequence.loss_mask]
    assert written.tolist() == [FIRST_TOKEN + ordinal * 100 + index] * grades.num_completion_tokens[index]
    assert (sequence.token_ids[~sequence.loss_mask] < FIRST_TOKEN).all(), "a token of the completion is not trained"
    expected = np.where(sequence.loss_mask, np.float32(advantages[index]), 0.0)
    np.testing.assert_array_equal(sequence.advantages, expected)
    np.testing.assert_array_equal(sequence.engine_logprobs, np.where(sequence.loss_mask, -sequence.token_ids, 0))


def check_step(scene: Scene, step: TrainedStep, grades: dict[int, GroupGrades]) -> None:
    config, batch = scene.config, step.batch
    rollout, algorithm = config.rollout, algorithm_of(scene.config)
    ordinals = list(batch.ordinals)
    sampled = [ordinal for ordinal in ordinals if ordinal not in batch.passed_over]
    trained = [ordinal for ordinal in sampled if ordinal not in batch.dropped]
    assert ordinals == list(range(ordinals[0], ordinals[-1] + 1))
    assert len(trained) <= rollout.prompts_per_step
    if rollout.dynamic_sampling:
        assert all(algorithm.teaches(grades[ordinal]) for ordinal in trained)
        assert not any(algorithm.teaches(grades[ordinal]) for ordinal in batch.dropped)
        assert len(sampled) <= rollout.dynamic_sampling * rollout.prompts_per_step
    else:
        assert not batch.dropped
    if config.data.curriculum is None:
        assert not batch.passed_over
    values = algorithm.step_advantages([grades[ordinal] for ordinal in trained]) if trained else []
    advantages = dict(zip(trained, (tuple(own) for own in values), strict=True))
    for sequence in trained_sequences(step):
        check_sequence(sequence, grades[sequence.ordinal], advantages[sequence.ordinal])
    wanted = {
        (ordinal, index)
        for ordinal in trained
        for index, valid in enumerate(grades[ordinal].valid)
        if valid and (any(advantages[ordinal]) or not rollout.drop_zero_variance)
    }
    got = [(sequence.ordinal, sequence.sample_index) for sequence in trained_sequences(step)]
    assert sorted(got) == sorted(wanted), "each valid rollout is trained on once, by one learner"
    for position in range(config.train.num_minibatches):
        parts = [share[position] for share in step.shares]
        of_all = [sequence for _, sequences in parts for sequence in sequences]
        for minibatch, _ in parts:
            assert minibatch.num_valid_tokens == sum(sequence.num_trained_tokens for sequence in of_all)
            assert minibatch.num_sequences == len(of_all)
    versions = [version for ordinal in sampled for version in grades[ordinal].min_policy_versions]
    assert step.policy_version - min(versions) <= rollout.max_policy_lag


def check_rest(scene: Scene, run: SimulatedRun) -> None:
    """In a synchronous run, an ordinal was passed over where all groups of its prompt before say that it rests."""
    curriculum, stream = scene.config.data.curriculum, stream_of(scene.config, len(scene.odds.solves))
    assert curriculum is not None
    histories: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for step in run.steps:
        places = {ordinal: stream.place(ordinal) for ordinal in step.batch.ordinals}
        for ordinal, place in places.items():
            history = histories.get((place.source, place.item), [])
            easy = [mean >= curriculum.easy_from for _, mean in history[-curriculum.after :]]
            hard = [curriculum.hard_to is not None and mean <= curriculum.hard_to for _, mean in history]
            rest: int | None = 0
            if len(easy) == curriculum.after and all(easy):
                rest = curriculum.easy_rest
            elif len(hard) >= curriculum.after and all(hard[-curriculum.after :]):
                rest = curriculum.hard_rest
            rests = bool(history) and (rest is None or place.turn <= history[-1][0] + rest)
            assert rests == (ordinal in step.batch.passed_over)
        for ordinal, place in places.items():
            if ordinal not in step.batch.passed_over and not run.grades[ordinal].errors:
                rewards = run.grades[ordinal].rewards
                own = histories.setdefault((place.source, place.item), [])
                own.append((place.turn, sum(rewards) / len(rewards)))


def what_was_trained(step: TrainedStep) -> Any:
    """All that a learner meets of a step, by rank and minibatch, and what became of its ordinals."""
    batch = step.batch
    seen = [
        [
            [(each.ordinal, each.sample_index, each.token_ids.tolist(), each.advantages.tolist()) for each in sequences]
            for _, sequences in share
        ]
        for share in step.shares
    ]
    return seen, list(batch.ordinals), batch.dropped, batch.passed_over, batch.lines, dict(batch.metrics)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(scenes())
def test_groups_stay_whole_and_no_masked_token_is_trained(scene: Scene) -> None:
    with run_folder() as folder:
        run = SimulatedRun(scene.config, scene.odds, folder, scene.num_learners).run()
        for step in run.steps:
            check_step(scene, step, run.grades)
        verdict = check_ledger(folder)
        assert verdict.is_sound, verdict
        assert verdict.steps == len(run.steps)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(scenes(max_lag_steps=0), st.data())
def test_a_resume_at_any_step_gives_the_same_batches(scene: Scene, data: Any) -> None:
    with run_folder() as folder:
        whole = SimulatedRun(scene.config, scene.odds, folder, scene.num_learners).run()
        if scene.config.data.curriculum is not None:
            check_rest(scene, whole)
        if not whole.saved:
            return
        resumed_at = data.draw(st.integers(1, len(whole.saved)))
        again = SimulatedRun(scene.config, scene.odds, folder, scene.num_learners, attempt=2)
        again.run(whole.saved[resumed_at - 1])
        rest = whole.steps[resumed_at:]
        assert [what_was_trained(step) for step in again.steps] == [what_was_trained(step) for step in rest]
        assert again.saved == whole.saved[resumed_at:]
        verdict = check_ledger(folder)
        assert verdict.is_sound, verdict
        assert verdict.steps == len(whole.steps)


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(scenes(), st.data())
def test_a_resume_at_any_step_uses_each_ordinal_once_however_far_engines_were_ahead(scene: Scene, data: Any) -> None:
    with run_folder() as folder:
        killed = SimulatedRun(scene.config, scene.odds, folder, scene.num_learners).run()
        if not killed.saved:
            return
        resumed_at = data.draw(st.integers(1, len(killed.saved)))
        again = SimulatedRun(scene.config, scene.odds, folder, scene.num_learners, attempt=2)
        again.run(killed.saved[resumed_at - 1])
        for step in again.steps:
            check_step(scene, step, again.grades)
        verdict = check_ledger(folder)
        assert verdict.is_sound, verdict
        lineage = [*killed.steps[:resumed_at], *again.steps]
        chosen = killed.saved[resumed_at - 1]["ahead"]
        last = min([*chosen[-1:], *(run.steps[-1].batch.ordinals[-1] for run in (killed, again) if run.steps)])
        passed_over = [
            {each for step in steps for each in step.batch.passed_over if each <= last}
            for steps in (killed.steps, lineage)
        ]
        assert not chosen or passed_over[0] == passed_over[1], "the curriculum chose other prompts than before"
        trained = [sequence for step in lineage for sequence in trained_sequences(step)]
        assert len({(each.ordinal, each.sample_index) for each in trained}) == len(trained)
