"""A key that is left out has upstream's default: for every key of upstream, as its released package has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.foreign.reading import dotted
from hpc_grpo.foreign.systems import SYSTEMS
from hpc_grpo.foreign.table import Kind, Translation, translate
from tests.support.configs import minimal_config

UPSTREAM = Path(__file__).parent / "upstream"
PLACES = {"output_dir", "trainer.default_local_dir", "data.train_files", "data.val_files", "model_name_or_path",
          "actor_rollout_ref.model.path", "actor.path"}  # fmt: skip
"""Keys whose default is a place of upstream's own: where a run lies, what it reads."""

OURS = dict(dotted(json.loads(minimal_config().model_dump_json())))
"""Our defaults, by dotted keys."""


def upstream(system: str) -> dict[str, Any]:
    return yaml.safe_load((UPSTREAM / f"{system}.yaml").read_text())


def told(translation: Translation) -> set[tuple[Kind, str]]:
    """What a user is told beside our keys: refusals and differences, whether a key was given or not."""
    kinds = (Kind.REFUSED, Kind.DIFFERS, Kind.BY_HAND, Kind.UNKNOWN)
    return {(outcome.kind, outcome.note) for kind in kinds for outcome in translation.of(kind)}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_key_that_is_left_out_has_upstreams_default(system: str) -> None:
    assert not_as_left_out(system, upstream(system)["defaults"], {}) == {}


@pytest.mark.parametrize("system", upstream("older"))
def test_an_older_version_has_its_own_defaults(system: str) -> None:
    facts = upstream("older")[system]
    assert not_as_left_out(system, facts["defaults"], facts["given"]) == {}


def not_as_left_out(system: str, defaults: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The keys that mean something else, or are told of otherwise, where they are given with upstream's default."""
    without = SYSTEMS[system].translated(given)
    meant, wrong = OURS | without.ours, {}
    for key, default in defaults.items():
        translation = SYSTEMS[system].translated({key: default, **given})
        changed = {ours: own for ours, own in (OURS | translation.ours).items() if meant.get(ours, own) != own}
        if key not in PLACES and (changed or told(translation) != told(without)):
            wrong[key] = (default, changed, told(translation) ^ told(without))
    return wrong


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_key_of_upstream_is_known(system: str) -> None:
    facts = upstream(system)
    keys = [*facts["defaults"], *facts["required"]]
    unknown = [outcome.theirs for outcome in translate(SYSTEMS[system].rows, dict.fromkeys(keys)).of(Kind.UNKNOWN)]
    assert unknown == []


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_a_row_takes_for_a_further_key_is_upstreams_default(system: str) -> None:
    """A key that only some settings read, such as the estimator of a KL whose weight is 0 by default."""
    facts, rows = upstream(system)["defaults"], SYSTEMS[system].rows
    taken = {key: own for row in rows for key, own in row.also.items() if key in facts}
    assert taken == {key: facts[key] for key in taken}


@pytest.mark.parametrize("section", upstream("areal")["sections"])
def test_a_section_that_is_given_in_part_has_upstreams_defaults(section: str) -> None:
    whole = {f"{section}.{key}": own for key, own in upstream("areal")["sections"][section].items()}
    given = {"actor.use_decoupled_loss": True, "valid_dataset.path": "d", "evaluator.freq_steps": 1}
    meant = SYSTEMS["areal"].translated(given | whole).ours
    for key in (key for key, own in whole.items() if own is not None):
        assert SYSTEMS["areal"].translated(given | {key: whole[key]}).ours == meant, key
