"""The environment `bfcl`: its verdicts are those of the package, and no text of the model's is evaluated."""

from __future__ import annotations

import json
import random

import pytest

from hpc_grpo.episodes.builtin import bfcl, environment_of
from hpc_grpo.episodes.host import checked
from hpc_grpo.errors import ConfigError

pytest.importorskip("bfcl_eval")


def message(*calls):
    return "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': own})}</tool_call>" for name, own in calls)


def begun(task_id):
    environment = environment_of("bfcl", {})
    environment.reset({"id": task_id}, 0)
    return environment


def play(task_id, turns):
    """Play a task, all calls of a turn in one message; return its last answer."""
    environment = begun(task_id)
    for calls in turns:
        if calls:
            assert not environment.step(message(*calls)).done
        answer = environment.step("Done.")
        if answer.done:
            break
    return answer


def spoiled(turns, place, draw):
    """The same turns, where one call is left out or has another argument."""
    number, changed = 0, [list(calls) for calls in turns]
    for calls in changed:
        for index, (name, own) in enumerate(calls):
            if number == place and (draw is None or draw.random() < 0.5 or not own):
                del calls[index]
                return changed
            if number == place:
                key = draw.choice(sorted(own))
                calls[index] = (name, own | {key: f"{own[key]}x"})
            number += 1
    return changed


def verdict_of_package(task, turns):
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as package

    texts = [[[f"{name}(**{own!r})" for name, own in calls]] if calls else [] for calls in turns]
    name = f"m{random.random()}"  # it keeps instances under the model's name
    return package.multi_turn_checker(texts, task["ground_truth"], task, "multi_turn", name)["valid"]


def test_replayed_calls_score_1_and_spoiled_ones_what_the_package_says():
    """800 of 800 score 1, and 0 of 800 without their first call: run once by hand. Here every twentieth."""
    draw = random.Random(0)
    for row in list(bfcl.tasks())[::20]:
        task = bfcl._tasks()[row["id"]]
        apis = bfcl.Apis(task)
        turns = [[apis.read(call) for call in calls] for calls in task["ground_truth"]]
        last = play(row["id"], turns)
        assert (last.done, last.reward) == (True, 1.0), row
        assert verdict_of_package(task, turns)
        assert play(row["id"], spoiled(turns, 0, None)).reward == 0.0, row
        for _ in range(3):
            other = spoiled(turns, draw.randrange(sum(map(len, turns))), draw)
            assert play(row["id"], other).reward == float(verdict_of_package(task, other)), (row, other)


def test_calls_in_xml_have_the_values_of_the_functions_parameters():
    rows = list(bfcl.tasks())[:20]
    for row in rows:
        task = bfcl._tasks()[row["id"]]
        apis, environment, answer = bfcl.Apis(task), begun(row["id"]), None
        for turn in task["ground_truth"]:
            for name, own in (apis.read(call) for call in turn):
                texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in own.items()}
                words = "".join(f"<parameter={key}>{text}</parameter>" for key, text in texts.items())
                environment.step(f"<tool_call><function={name}>{words}</function></tool_call>")
            answer = environment.step("Done.")
        assert answer is not None and answer.reward == 1.0, row


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("__class__", {}),
        ("_load_scenario", {"scenario": {}}),
        ("__import__('os').system", {"command": "id"}),
        ("cat.__func__", {}),
        ("instances", {}),
        ("exit", {}),
        ("print", {"x": 1}),
    ],
)
def test_only_functions_that_the_package_documents_are_called(name, arguments):
    [answer] = begun("multi_turn_base_0").step(message((name, arguments))).observation
    assert answer["content"] == f"Error during execution: name {name!r} is not defined"


def test_wrong_calls_are_told_and_leave_other_sessions_alone():
    environment, other = begun("multi_turn_base_0"), begun("multi_turn_base_0")
    turn = environment.step(message(("cd", {"folder": "nowhere"}), ("cd", {"to": 1}), ("mkdir", {"dir_name": "x"})))
    contents = [each["content"] for each in checked(turn)["messages"]]
    assert "No such file" in contents[0]
    assert "unexpected keyword argument 'to'" in contents[1]
    assert checked(environment.step("<tool_call>{oops"))["messages"][0]["content"].startswith("Error: ")
    [listing] = other.step(message(("ls", {}))).observation
    assert '"x"' not in listing["content"]
    assert environment.step("Done.").done


def test_the_mathematical_api_cannot_be_made_to_run_for_years():
    environment = begun("multi_turn_base_15")
    calls = [("logarithm", {"value": 2, "base": 10, "precision": 10**9})]
    calls += [("power", {"base": 9, "exponent": 9**9}), ("power", {"base": 10**4000, "exponent": 900})]
    contents = [each["content"] for each in environment.step(message(*calls)).observation]
    assert all("too large" in content for content in contents)


def test_an_episode_ends_after_too_many_messages_for_one_wish():
    environment = begun("multi_turn_base_0")
    turns = [environment.step(message(("ls", {}))) for _ in range(21)]
    assert [turn.done for turn in turns] == [False] * 20 + [True]
    assert turns[-1].reward == 0.0


def test_a_function_that_is_missing_is_shown_with_a_later_turn():
    environment = begun("multi_turn_miss_func_0")
    names = {tool["function"]["name"] for tool in environment.tools}
    assert {"sort", "cp"} & names == set()
    task = bfcl._tasks()["multi_turn_miss_func_0"]
    for calls in task["ground_truth"][:3]:
        if calls:
            environment.step(message(*map(environment._apis.read, calls)))
        turn = environment.step("Done.")
    assert '"name": "sort"' in turn.observation
    schema = next(tool["function"] for tool in environment.tools if tool["function"]["name"] == "cat")
    assert schema.keys() == {"name", "description", "parameters"}
    assert schema["parameters"]["type"] == "object"


def test_rows_and_categories_that_do_not_exist_are_refused():
    assert len(list(bfcl.tasks(["base", "miss_param"]))) == 400
    with pytest.raises(ConfigError, match="no category 'multi'"):
        list(bfcl.tasks(["multi"]))
    with pytest.raises(ConfigError, match=r"bfcl:tasks"):
        environment_of("bfcl", {}).reset({"question": "?"}, 0)


def test_a_missing_package_is_named_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr("hpc_grpo.episodes.builtin.bfcl.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps bfcl-eval"):
        environment_of("bfcl", {})
