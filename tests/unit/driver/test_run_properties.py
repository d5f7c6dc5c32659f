"""What holds of every run, whatever is cut, fails, is filtered, replaced, at rest or ahead: properties, by hypothesis.

The default number of examples is small; `HYPOTHESIS_EXAMPLES=5000` takes more.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_grpo.algorithms.advantages import has_signal, of_each_turn
from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.driver import remote
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import Advantage, GroupGrades, TrainSequence
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
        loss={"advantage": draw(st.sampled_from(["group", "rloo", "reinforce_pp", "turns"]))},
        grading={"max_failed_fraction": 1.0},
        train={"total_steps": draw(st.integers(1, 8)), "num_minibatches": minibatches},
    )
    solves = draw(st.lists(st.sampled_from([1.0, 0.5, 0.0, 0.9]), min_size=num_sources, max_size=8))
    odds = Odds(draw(CHANCES), draw(CHANCES), solves, draw(st.sampled_from([0, 1, 3])))
    return Scene(config, odds, draw(st.integers(1, 3)))


@contextmanager
def run_folder() -> Iterator[RunDir]:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(remote, "ray", FakeRay())
        yield RunDir(Path(folder))


def trained_sequences(step: TrainedStep) -> list[TrainSequence]:
    return [own for share in step.shares for _, sequences in share for own in sequences]


def check_rollout(
    sequences: list[TrainSequence], index: int, grades: GroupGrades, advantage: Advantage, turn_lengths: list[int]
) -> None:
    """Sequences are of their own group's sample, learned where that was written, and worth what its rewards made it."""
    assert grades.valid[index], "a masked rollout was trained on"
    written = np.concatenate([own.token_ids[own.loss_mask] for own in sequences])
    assert written.tolist() == [FIRST_TOKEN + grades.ordinal * 100 + index] * grades.num_completion_tokens[index]
    worth = np.concatenate([own.advantages[own.loss_mask] for own in sequences])
    of_turns = np.asarray(of_each_turn(advantage, len(turn_lengths)), np.float32)
    np.testing.assert_array_equal(worth, np.repeat(of_turns, turn_lengths))
    for own in sequences:
        assert (own.token_ids[~own.loss_mask] < FIRST_TOKEN).all(), "a token of the completion is not trained"
        assert not own.advantages[~own.loss_mask].any()
        np.testing.assert_array_equal(own.engine_logprobs, np.where(own.loss_mask, -own.token_ids, 0))


def check_step(scene: Scene, step: TrainedStep, run: SimulatedRun) -> None:
    config, batch, grades = scene.config, step.batch, run.grades
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
    of_rollouts: dict[tuple[int, int], list[TrainSequence]] = {}
    for sequence in sorted(trained_sequences(step), key=lambda own: own.sample_index):
        of_rollouts.setdefault((sequence.ordinal, sequence.sample_index % rollout.group_size), []).append(sequence)
    for (ordinal, index), own in of_rollouts.items():
        lengths = run.turn_lengths[ordinal][index]
        check_rollout(own, index, grades[ordinal], advantages[ordinal][index], lengths)
    wanted = {
        (ordinal, index + rollout.group_size * number)
        for ordinal in trained
        for index, valid in enumerate(grades[ordinal].valid)
        if valid and (has_signal(advantages[ordinal]) or not rollout.drop_zero_variance)
        for number in range(grades[ordinal].num_sequences[index])
    }
    got = [(sequence.ordinal, sequence.sample_index) for sequence in trained_sequences(step)]
    assert sorted(got) == sorted(wanted), "each valid rollout is trained on once, by one learner"
    for position in range(config.train.num_minibatches):
        parts = [share[position] for share in step.shares]
        of_all = [sequence for _, sequences in parts for sequence in sequences]
        for minibatch, _ in parts:
            assert minibatch.num_valid_tokens == sum(sequence.num_trained_tokens for sequence in of_all)
            assert minibatch.num_sequences == len(of_all)
    versions = [own for ordinal in sampled for own in grades[ordinal].min_policy_versions if own >= 0]
    assert step.policy_version - min(versions, default=step.policy_version) <= rollout.max_policy_lag


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
            if ordinal not in step.batch.passed_over and any(run.grades[ordinal].is_scored):
                rewards = list(compress(run.grades[ordinal].rewards, run.grades[ordinal].is_scored))
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
            check_step(scene, step, run)
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
            check_step(scene, step, again)
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
