"""A model of images and text from rows to an export: the same pixels for engine, learner and rewards."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hpc_grpo.metrics.reductions import merge
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import Minibatch
from hpc_grpo.weights.contract import VISION_MODELS
from tests.integration.codeword_reward import COLOURS, codeword
from tests.integration.learner_processes import make_config, run_ranks, weights_of
from tests.integration.training_runs import (
    complete_in_cluster,
    exported_weights,
    metrics_of,
    run_to_end,
    tiny_config,
)
from tests.support.sequences import ordinary_sequence
from tests.support.stand_in_server import Reply, serving
from tests.support.tiny_vision import TOKENS, colour_image, noise_image, write_colours, write_vision_model

pytestmark = pytest.mark.integration

REWARD = str(Path(__file__).with_name("codeword_reward.py"))
TORCHVISION = {"env": {"PYTHONPATH": str(Path(sys.prefix) / "torchvision")}}
"""The folder of tools/setup.sh. Without it, the environment's own torchvision can be imported."""
TOWERS = (".vision_model.", ".connector.", ".visual.")


def colours_config(
    folder: Path, kind: str, name: str, *, shuffled: bool = False, **sections: Mapping[str, Any]
) -> Path:
    if not (folder / "model").is_dir():
        write_vision_model(folder / "model", kind)
    train = write_colours(folder / f"train-{shuffled}", COLOURS, 64, shuffled=shuffled)
    evaluated = write_colours(folder / f"eval-{shuffled}", COLOURS, 48, shuffled=shuffled, odd=True)
    values: dict[str, Any] = {
        "data": {"train": {"path": str(train)}, "eval": {"path": str(evaluated)}, "images": "image",
                 "template": "chat", "prompt_format": "{prompt}", "max_prompt_tokens": 24},
        "rewards": [{"name": f"{REWARD}:codeword"}],
        "eval": {"reward": f"{REWARD}:codeword"},
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": 1},
        "train": {"total_steps": 2, "lr": 3e-3, "max_tokens_per_microbatch": 512},
        "checkpoint": {"every": None},
        "launch": TORCHVISION if kind == "qwen2_5_vl" else {},
    }  # fmt: skip
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes} if isinstance(changes, Mapping) else changes
    path = tiny_config(folder, name, **{key: own for key, own in values.items() if key != "model"})
    written = yaml.safe_load(path.read_text())
    written["model"] |= {"path": str(folder / "model"), **values.get("model", {})}
    path.write_text(yaml.safe_dump(written))
    return path


def complete(kind: str, cluster: dict[str, str], config: Path) -> RunDir:
    """Run to COMPLETE. The processor of Qwen2.5-VL needs torchvision, which the shared cluster does not have."""
    return run_to_end(config).run_dir if kind == "qwen2_5_vl" else complete_in_cluster(cluster, config)


def give_other_numbers(rows: Path) -> None:
    """Of three rows, leave one its image, give one two images of other sizes, and one none."""
    (rows.parent / "noise.png").write_bytes(noise_image(90, 30))
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["image"] = [line["image"], [line["image"], "noise.png"], None][number % 3]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))


LOOKS = [{"name": f"{REWARD}:codeword"}, {"name": f"{REWARD}:codeword_of_image", "weight": 0.5}]
TRAINS_TOWER: dict[str, Any] = {
    "rewards": LOOKS,
    "model": {"train_vision": True},
    "train": {"total_steps": 3, "lr": 1e-2, "max_tokens_per_microbatch": 512},
    "loss": {"kl": {"coef": 0.01}},
    "eval": {"every": 3, "reward": f"{REWARD}:codeword"},
}


def test_engine_and_learner_agree_on_images_that_rewards_get_too(cluster: dict[str, str], tmp_path: Path) -> None:
    rollout = {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 6}
    config = colours_config(tmp_path, "idefics3", "images", rollout=rollout, **TRAINS_TOWER)
    give_other_numbers(tmp_path / "train-False" / "colours.jsonl")
    assert_exact(complete("idefics3", cluster, config), tmp_path / "model", "idefics3")


def test_three_rows_of_mathv60k_train_with_the_reward_server_of_openrlhf_m(tmp_path: Path) -> None:
    """The server finds the answer by the text of the message, as OpenRLHF-M's math_verifier.py does."""
    rows = mathv60k_rows(tmp_path)
    answers = {row["message"]: row["answer"] for row in rows}
    (tmp_path / "mathv60k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "mathv60k.jsonl"), "messages_field": "message"}

    def answer(path: str, body: Any) -> Reply:
        if path != "/get_reward":
            return 404, {}
        wanted = [answers[message] for message in body["prompts"]]
        texts = [query.rpartition(QUESTION)[2] for query in body["query"]]
        assert body["labels"] == wanted
        assert {len(images) for images in body.get("images", [[]])} == {body["prompts"][0].count("file://")}
        return 200, {"rewards": codeword(texts, wanted), "format_rewards": [9.0] * len(texts)}

    with serving() as serve:
        server = {"url": serve(answer).url, "protocol": "openrlhf", "prompt_field": "message"}
        config = colours_config(
            tmp_path,
            "qwen2_5_vl",
            "mathv60k",
            data={"train": source, "eval": source, "images": "message", "max_prompt_tokens": 160},
            rollout={"prompts_per_step": 3, "group_size": 8, "max_new_tokens": 6},
            **{**TRAINS_TOWER, "rewards": [*LOOKS, {"name": "remote", "args": server}]},
        )
        run = run_to_end(config).run_dir
    assert_exact(run, tmp_path / "model", "qwen2_5_vl")
    for metrics in metrics_of(run).values():
        assert metrics["reward/remote"] == metrics[f"reward/{LOOKS[0]['name']}"]


QUESTION = "Which colour is it?\nChoices:\n(A) red"


def mathv60k_rows(folder: Path) -> list[dict[str, str]]:
    """Make rows with one image, with two of other sizes, and with none; the message is JSON in a text."""
    (folder / "pictures").mkdir()
    files = {"red.png": colour_image("red"), "blue.jpg": colour_image("blue", (84, 56), "JPEG"),
             "noise.png": noise_image(90, 30)}  # fmt: skip
    for name, content in files.items():
        (folder / "pictures" / name).write_bytes(content)
    rows = []
    for names, colour in (["red.png"], "red"), (["blue.jpg", "noise.png"], "blue"), ([], "white"):
        parts = [{"type": "image", "image": f"file://{folder}/pictures/{name}"} for name in names]
        message = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
        rows.append({"id": colour, "message": json.dumps(message), "answer": f"$${COLOURS[colour]}$$"})
    return rows


def assert_exact(run: RunDir, model: Path, kind: str) -> None:
    """With the tower trained: an engine that kept its features over a publish would be off by tenths of a nat."""
    for metrics in metrics_of(run).values():
        assert metrics["mismatch/canary"] < 1e-5
        assert metrics["mismatch/logprob_abs_diff_mean"] < 1e-5
        assert metrics["mismatch/logprob_abs_diff_max"] < 1e-4
        by_data, by_image = (metrics[f"reward/{own['name']}"] for own in LOOKS)
        assert by_data == by_image
    assert {line["prompt"].count(TOKENS[kind][1]) for line in read_jsonl(run.rollouts(1))} == {0, 1, 2}
    exported, before = exported_weights(run), weights_in(model)
    assert exported.keys() == before.keys()
    assert not any(np.array_equal(exported[name], before[name]) for name in before if name.endswith("proj.weight"))
    [processor] = model.glob("*processor_config.json")
    assert (run.latest_export() / processor.name).is_file()  # type: ignore[operator]


def weights_in(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: own.float().numpy() for name, own in load_file(folder / "model.safetensors").items()}


def is_of_tower(name: str) -> bool:
    return any(part in name for part in TOWERS)


@pytest.mark.long
@pytest.mark.parametrize("kind", VISION_MODELS)
def test_a_task_that_needs_its_image_is_learned_and_with_shuffled_images_is_not(
    kind: str, cluster: dict[str, str], tmp_path: Path
) -> None:
    solved = {}
    for shuffled in (False, True):
        steps = {"total_steps": 30, "lr": 3e-3, "max_tokens_per_microbatch": 512}
        every = {"every": 30, "num_samples": 4, "reward": f"{REWARD}:codeword"}
        config = colours_config(tmp_path, kind, f"shuffled-{shuffled}", shuffled=shuffled, train=steps, eval=every)
        run = complete(kind, cluster, config)
        first = read_jsonl(run.eval_rollouts(0))
        last = metrics_of(run)[30]
        solved[shuffled] = float(np.mean([line["solved"] for line in first])), last["eval/pass@1"]
        exported, before = exported_weights(run), weights_in(tmp_path / "model")
        assert all(np.array_equal(exported[name], before[name]) for name in before if is_of_tower(name))
    for before_training, _ in solved.values():
        assert before_training < 0.45
    assert solved[False][1] >= 0.85
    assert solved[True][1] < 0.45


def train_share(rank: int, world_size: int, store: Any, root: Path, trains: bool, stage: int) -> dict[str, Any]:
    """Train two steps, resume after the first, and export. Images are in a share of rank 0 alone."""
    from hpc_grpo.learner.checkpoint import export_model, load_checkpoint
    from hpc_grpo.learner.learner import Learner
    from tests.integration.learner_processes import save_together

    config = make_config(root / "model", root, zero_stage=stage)
    config = config.model_copy(update={
        "model": config.model.model_copy(update={"train_vision": trains}),
        "data": config.data.model_copy(update={"images": "image"}),
    })  # fmt: skip
    name = f"{trains}-{stage}-{world_size}"
    learner = Learner(config, rank, world_size, store)
    norms = [merge([learner.train_step(share(root, rank, world_size, 1))])["grad_norm"]]
    save_together(learner, root / f"checkpoint-{name}", {})()
    norms.append(merge([learner.train_step(share(root, rank, world_size, 2))])["grad_norm"])
    weights = weights_of(learner)
    load_checkpoint(learner, root / f"checkpoint-{name}")
    learner.train_step(share(root, rank, world_size, 2))
    again = weights_of(learner)
    export_model(learner, root / f"export-{name}")
    return {"norms": norms, "weights": weights, "again": again}


def share(root: Path, rank: int, world_size: int, seed: int) -> list[Minibatch]:
    token = json.loads((root / "model" / "config.json").read_text())["image_token_id"]
    drawn, sequences = np.random.default_rng(seed), []
    for index in range(8):
        images = (colour_image("red"),) if index < 4 else ()
        prompt = [7, *[token] * 4, 8] if images else [7, 8]
        tokens = np.array([*prompt, *drawn.integers(2, 200, 6)], np.int32)
        logprobs, advantage = drawn.normal(-5.0, 0.3, 6).astype(np.float32), float(drawn.normal())
        made = ordinary_sequence(index // 4, index % 4, tokens, 6, logprobs, advantage)
        sequences.append(replace(made, images=images))
    shares = [sequences] if world_size == 1 else [sequences[:4], sequences[4:]]
    return [Minibatch(tuple(shares[rank]), sum(own.num_trained_tokens for own in sequences), len(sequences))]


@pytest.mark.parametrize("kind", VISION_MODELS)
@pytest.mark.parametrize(
    "trains", [pytest.param(False, marks=pytest.mark.long), True], ids=["frozen tower", "trained tower"]
)
def test_every_zero_stage_trains_alike_and_resumes_where_only_one_rank_has_images(
    kind: str, trains: bool, tmp_path: Path
) -> None:
    write_vision_model(tmp_path / "model", kind, vocab_size=320)
    before = weights_in(tmp_path / "model")
    ((expected),) = run_ranks(1, train_share, tmp_path, trains, 1)
    for stage in (1, 2, 3):
        for found in run_ranks(2, train_share, tmp_path, trains, stage):
            assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
            for name, weight in found["weights"].items():
                np.testing.assert_allclose(weight, expected["weights"][name], atol=1e-5, err_msg=f"{stage} {name}")
                np.testing.assert_array_equal(weight, found["again"][name], err_msg=f"{stage} {name}")
        exported = weights_in(tmp_path / f"export-{trains}-{stage}-2")
        for name in exported:
            assert np.array_equal(exported[name], before[name]) == (is_of_tower(name) and not trains), name
