"""What holds for every built-in reward: settings that no column can change, checked when a config is loaded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import RewardConfig, load_config, to_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.registry import REWARDS
from hpc_grpo.rewards import score
from tests.support.configs import minimal_config
from tests.support.isolation import needs_isolation
from tests.support.stand_in_server import Reply, Serve

Case = tuple[dict[str, Any], dict[str, Any], list[str], list[float]]
"""Settings, a row, completions, their scores."""

GCD = {"question": "gcd of 4 and 6?", "answer": "2", "task": "gcd", "task_args": "{}", "metadata": "{}"}
WISHES = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
CASES: dict[str, Case] = {
    "code": ({}, {"tests": "assert x == 1"}, ["x = 1", "x = 2"], [1.0, 0.0]),
    "correctness": ({}, {"answer": "2"}, ["2", "3"], [1.0, 0.0]),
    "exact": ({}, {"answer": "Yes"}, ["Yes", "yes"], [1.0, 0.0]),
    "gsm8k": ({}, {"answer": "#### 2"}, ["#### 2", "2"], [1.0, 0.0]),
    "ifeval": ({}, WISHES, ["No comma.", "One, comma."], [1.0, 0.0]),
    "json_schema": ({}, {"schema": {"type": "integer"}}, ["1", '"a"'], [1.0, 0.0]),
    "keyword_match": ({}, {"keywords": ["tea"]}, ["Tea.", "Coffee."], [1.0, 0.0]),
    "length": ({"most": 2}, {}, ["one two", "one two three four"], [0.0, -1.0]),
    "llm_judge": ({"url": "URL", "model": "m"}, {"answer": "2"}, ["2", "3"], [0.5, 0.5]),
    "math": ({}, {"answer": r"2\sqrt{2}"}, [r"\boxed{\sqrt{8}}", r"\boxed{\sqrt{7}}"], [1.0, 0.0]),
    "multiple_choice": ({}, {"answer": "B"}, ["B", "C"], [1.0, 0.0]),
    "reasoning_gym": ({}, GCD, ["<answer>2</answer>", "<answer>3</answer>"], [1.0, 0.0]),
    "regex": ({}, {"pattern": "^yes$"}, ["yes", "no way"], [1.0, 0.0]),
    "remote": ({"url": "URL"}, {"level": 3}, ["a", "b"], [0.25, 0.25]),
    "repetition": ({}, {}, ["a b c d", "a b c a b c"], [0.0, -0.25]),
    "strict_format": ({}, {}, ["<reasoning>a</reasoning><answer>b</answer>", "b"], [1.0, 0.0]),
    "string_f1": ({}, {"answer": "Paris"}, ["paris", "London"], [1.0, 0.0]),
}


def settings_of(name: str) -> list[str]:
    return [info.alias or key for key, info in REWARDS.find(name).settings.model_fields.items()]


def answered(path: str, body: Any) -> Reply:
    if path.endswith("/score"):
        return 200, {"scores": [0.25] * len(body["completions"])}
    return 200, {"choices": [{"message": {"content": "Score: 5"}}]}


def test_every_built_in_has_a_case() -> None:
    assert set(CASES) == set(REWARDS.names())


@needs_isolation
@pytest.mark.parametrize("name", CASES)
def test_a_column_that_is_called_like_a_setting_stays_a_column(name: str, serve: Serve) -> None:
    """Through the worker, with the default names of columns, for each setting of each built-in at once."""
    args, row, completions, scores = CASES[name]
    args = {key: serve(answered).url if value == "URL" else value for key, value in args.items()}
    row = {**dict.fromkeys([*settings_of(name), "timeout_s", "settings", "group"], "odd"), **row}
    with closing(RewardPool([RewardConfig(name=name, args=args)], num_workers=1)) as pool:
        pool.check()
        outcome = pool.submit("p", completions, row).result()
    assert outcome.errors == ()
    assert outcome.rewards == pytest.approx(tuple(scores))


@pytest.mark.parametrize(
    ("name", "column", "values"),
    [
        ("math", "answer", [None, ["2"], {"text": "2"}]),
        ("exact", "answer", [None, ["2"]]),
        ("string_f1", "answer", [None, {"text": ["a"]}]),
        ("regex", "pattern", [None, 5, ["^yes$"]]),
        ("keyword_match", "keywords", [5, {"tea": 1}]),
        ("json_schema", "schema", [None, 5, [1]]),
        ("ifeval", "kwargs", [None, "[{}]", ["{}"]]),
    ],
)
def test_a_column_of_another_type_is_refused_and_scores_nothing(name: str, column: str, values: list[Any]) -> None:
    """As text it would be a reference that no completion meets, and every completion would score 0."""
    _, row, completions, _ = CASES[name]
    for value in values:
        with pytest.raises(ConfigError, match=rf"the column '{column}' holds|need a mapping of arguments"):
            score(name, completions, {**row, column: value})


def test_every_setting_has_a_description_and_what_is_required_is_named() -> None:
    required = set()
    for name in CASES:
        for key, info in REWARDS.find(name).settings.model_fields.items():
            assert info.description, f"{name}: {key}"
            required |= {(name, key)} if info.is_required() else set()
    assert required == {("llm_judge", "model"), ("llm_judge", "url"), ("remote", "url")}


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        (
            "regex",
            {"patern": "a"},
            "rewards.0.args.patern: unknown key; did you mean 'pattern'? Valid here: completion_s, pattern, "
            "pattern_field, mode, ignore_case.",
        ),
        ("regex", {"pattern": "("}, "rewards.0.args.pattern = '(': must be a pattern of Python's module re"),
        ("regex", {"mode": "match"}, "rewards.0.args.mode = 'match': must be 'search' or 'fullmatch'."),
        ("gsm8k", {"method": "loose"}, "rewards.0.args.method = 'loose': must be 'strict' or 'flexible'."),
        ("ifeval", {"mode": "lose"}, "rewards.0.args.mode = 'lose'"),
        ("json_schema", {"shema": {}}, "rewards.0.args.shema: unknown key; did you mean 'schema'?"),
        ("length", {}, "must have one of most and target; got most=None, target=None"),
        ("length", {"most": 3, "target": 3}, "must have one of most and target; got most=3, target=3"),
        ("length", {"most": 0}, "rewards.0.args.most = 0: must be greater than 0, or null."),
        ("length", {"target": 3, "unit": "tokens"}, "rewards.0.args.unit = 'tokens'"),
        ("repetition", {"ngram": 0}, "rewards.0.args.ngram = 0"),
        ("code", {"isolation": "none"}, "rewards.0.args.isolation = 'none': must be 'strong'"),
        ("code", {"time_s": 0}, "rewards.0.args.time_s = 0"),
        ("remote", {}, "rewards.0.args.url: must be set."),
        ("remote", {"url": "judge:8200"}, "rewards.0.args.url = 'judge:8200'"),
        ("llm_judge", {"url": "http://j/v1", "model": "m", "scale": 0}, "rewards.0.args.scale = 0"),
        ("llm_judge", {"url": "http://j/v1", "model": "m", "pattern": "a"}, "must have exactly one group"),
    ],
)
def test_settings_that_cannot_work_are_refused_when_the_config_is_loaded(
    tmp_path: Path, name: str, args: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml({**minimal_config().model_dump(mode="json"), "rewards": [{"name": name, "args": args}]}))
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), [])
    assert words in str(caught.value)
    assert caught.value.exit_code == 78


def test_settings_are_checked_without_the_libraries_of_a_reward() -> None:
    """On a login node, which has none of them."""
    heavy = ["torch", "numpy", "sympy", "math_verify", "jsonschema", "referencing", "httpx", "langdetect", "punkt"]
    heavy += ["reasoning_gym", "ray", "vllm", "transformers", "datasets"]
    program = (
        "import sys\nfrom hpc_grpo.registry import REWARDS\n"
        "for name in REWARDS.names(): REWARDS.find(name).settings\n"
        f"print(sorted(set(sys.modules) & set({heavy!r})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_reward_of_ones_own_may_build_on_a_built_in(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from hpc_grpo.rewards import score\n"
        "def half(prompts, completions, answer, factor=1.0, **columns):\n"
        "    return [factor * one for one in score('math', completions, {'answer': answer[0]})]\n"
    )
    with closing(RewardPool([RewardConfig(name=f"{own}:half", args={"factor": 0.5})], num_workers=1)) as pool:
        pool.check()
        # `args` win over a column of the same name.
        outcome = pool.submit("p", ["It is 4.", "It is 5."], {"answer": "4", "factor": 7.0}).result()
    assert outcome.rewards == (0.5, 0.0)


def test_threads_of_a_reward_get_the_scores_of_their_own_completions() -> None:
    rows = [(f"It is {number}.", str(number) if number % 2 else "x") for number in range(60)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda row: score("math", [row[0]], {"answer": row[1]}), rows))
    assert found == [[float(answer != "x")] for _, answer in rows]


def test_an_async_reward_may_build_on_one_that_asks_a_server(serve: Serve) -> None:
    url = serve(lambda path, body: (200, {"scores": [0.25]})).url

    async def own() -> list[float]:
        return score("remote", ["a"], {}, args={"url": url})

    assert asyncio.run(own()) == [0.25]


@pytest.mark.parametrize("name", ["remote", "code"])
def test_a_budget_that_a_reward_does_not_read_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    args = {"url": "http://judge:8200"} if name == "remote" else {}
    rewards = [{"name": name, "args": {**args, "completion_s": 3.0}}]
    path.write_text(to_yaml({**minimal_config().model_dump(mode="json"), "rewards": rewards, "eval": {"reward": name}}))
    with pytest.raises(ConfigError, match=r"rewards\.0\.args\.completion_s: unknown key"):
        load_config(str(path), [])
