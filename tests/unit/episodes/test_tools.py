"""The environment `tools`: calls as models write them, what tools do wrong, and what models try with them."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.episodes.builtin import check_built_in, environment_of
from hpc_grpo.episodes.builtin.tools import calculator, schema_of
from hpc_grpo.episodes.calls import before_calls, calls_of
from hpc_grpo.episodes.host import checked
from hpc_grpo.episodes.workers import EnvironmentFailedError, EnvironmentLostError, EnvironmentWorkers
from hpc_grpo.errors import ConfigError
from tests.support.isolation import needs_isolation
from tests.unit.episodes import my_tools

FILE = Path(my_tools.__file__)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tools_of(*tools, **args):
    environment = environment_of("tools", {**args, "tools": tools})
    environment.reset({}, 0)
    return environment


def answers(environment, *messages):
    """What the model reads after each message; several calls are answered in order."""

    async def played():
        turns = [checked(await environment.step(message)) for message in messages]
        return [[message["content"] for message in turn["messages"]] for turn in turns]

    return asyncio.run(played())


def read(text):
    return [call.error or (call.name, dict(call.arguments)) for call in calls_of(text)]


ADD = {"name": "add", "arguments": {"a": 1}}
LLAMA = {"name": "add", "parameters": {"a": 1}}


@pytest.mark.parametrize(
    "text",
    [
        f"I add.\n<tool_call>\n{json.dumps(ADD)}\n</tool_call>",
        f"<tool_call>{json.dumps(ADD)}",  # the end token came first
        f"<think>Or <tool_call>{{}}</tool_call>?</think>\n<tool_call>{json.dumps(ADD)}</tool_call>\n",
        f"<|python_tag|>{json.dumps(LLAMA)}",
        json.dumps(LLAMA, indent=2),
        f"```json\n{json.dumps(ADD)}\n```",
        f"[TOOL_CALLS] [{json.dumps(ADD)}]",
        json.dumps(ADD | {"arguments": json.dumps(ADD["arguments"])}),
        "[add(a=1)]",
        "<|python_start|>[add(a=1)]<|python_end|>",
        "I add.\n<function_calls>\nadd(a=1)\n</function_calls>",
    ],
)
def test_a_call_is_read_as_families_of_models_write_it(text):
    assert read(text) == [("add", {"a": 1})]


def test_values_of_a_call_in_xml_have_the_types_of_the_tools_parameters():
    environment = tools_of(f"{FILE}:lookup", "calculator")
    message = (
        "<tool_call>\n<function=lookup>\n<parameter=key>\n7\n</parameter>\n<parameter=times>\n2\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call><function=calculator><parameter=expression>6*7</parameter></function>"
    )
    assert answers(environment, message) == [["7!7!", "42"]]


@pytest.mark.parametrize(
    "text",
    [
        "[see(page 3)] The answer is 5.",
        "[f(x) = 2]",
        "The answer is 5.",
        '{"answer": 5}',
        '{"name": "Bob", "age": 3}',
        "Let x be {a, b}.",
        "",
        "{" * 5000,
    ],
)
def test_an_answer_without_a_call_ends_the_episode(text):
    turn = asyncio.run(tools_of("calculator").step(text))
    assert (turn.done, turn.observation, turn.reward) == (True, None, 0.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<tool_call>{oops}</tool_call>", "cannot be read"),
        ("<tool_call>", "cannot be read"),
        ('<tool_call>{"name": "add"}</tool_call>', "arguments an object"),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "name must be a text"),
        ('<tool_call>{"arguments": {}}</tool_call>', "it has no name"),
        ("<tool_call>[1]</tool_call>", "must be an object"),
        (f"<tool_call>{json.dumps(ADD)}}}</tool_call>", "does not end"),
        ('<tool_call>{"name": "add", "arguments": {"a": "\\ud83d"}}</tool_call>', "surrogates"),
        ("<tool_call>" + '{"name":' * 3000, "cannot be read"),
        ("<|python_tag|>print(1)", "has no JSON"),
        ('{"name": "add", "parameters": {"a": 1}', "cannot be read"),
        ("<function=add>\n<parameter=a>\n1\n</function>", "'<parameter=a>\\n1' is no parameter"),
        ("[add(a=1), sub(b=)]", "cannot be read"),
        ("[add(a=b'x')]", "bytes is not JSON serializable"),
        ("<function_calls>\nadd(1)\n</function_calls>", "arguments with names"),
        ("<function_calls>\n</function_calls>", "it must have a name"),
        ("<|python_start|>[add(**{})]<|python_end|>", "arguments with names"),
    ],
)
def test_a_call_that_cannot_be_read_is_answered_by_what_is_wrong_with_it(text, told):
    [[answer]] = answers(tools_of("calculator"), text)
    assert answer.startswith("Error: ")
    assert told in answer
    assert "Write " in answer


def test_calls_are_those_of_vllms_parsers():
    """A parser of vLLM's imports torch, for seconds: too long for the process of an environment."""
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
    from vllm.tool_parsers.llama_tool_parser import Llama3JsonToolParser

    tokenizer = SimpleNamespace(get_vocab=lambda: {"<|python_tag|>": 7})
    hermes, llama = Hermes2ProToolParser(tokenizer), Llama3JsonToolParser(tokenizer)
    draw, num_calls, num_none = random.Random(0), 0, 0
    values = [1, -2.5, "x", 'a\n"b"', "é🙂", "{}", "</think", True, None, [1, {"k": []}], {"deep": {"er": "}"}}]
    logging.disable(logging.CRITICAL)
    try:
        for _ in range(4000):
            key, parser = draw.choice([("arguments", hermes), ("arguments", llama), ("parameters", llama)])
            parts = []
            for _ in range(draw.choice([1, 1, 1, 2, 3])):
                given = {draw.choice("abc"): draw.choice(values) for _ in range(draw.randrange(4))}
                text = json.dumps({"name": draw.choice(["add", "f_2"]), key: given}, ensure_ascii=False)
                if draw.random() < 0.3:  # one character is lost, doubled or another one
                    at = draw.randrange(len(text))
                    text = text[:at] + draw.choice(["", text[at] * 2, draw.choice('{}",:[]x')]) + text[at + 1 :]
                space = draw.choice(["", "\n", " "])
                parts.append(f"<tool_call>{space}{text}{space}</tool_call>" if parser is hermes else text)
            text = draw.choice(["", "I call it. "]) + draw.choice(["\n", "; "]).join(parts)
            text = "<|python_tag|>" * (parser is llama and draw.random() < 0.5) + text
            text = text.removesuffix("</tool_call>") if draw.random() < 0.2 else text
            theirs = parser.extract_tool_calls(text, None).tool_calls
            expected = [(each.function.name, json.loads(each.function.arguments)) for each in theirs]
            ours = list(calls_of(text))
            if expected and all(isinstance(arguments, dict) for _, arguments in expected):
                assert [(each.name, each.arguments) for each in ours] == expected, text
                num_calls += 1
            else:
                assert not ours or any(each.error for each in ours), text
                num_none += 1
    finally:
        logging.disable(logging.NOTSET)
    assert num_calls > 1000
    assert num_none > 500


def _python(value, name):
    return f"{name}({', '.join(f'{key}={own!r}' for key, own in value.items())})"


def _xml(value, name):
    parameters = "".join(f"<parameter={key}>\n{own}\n</parameter>\n" for key, own in value.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize("form", ["pythonic", "llama4", "olmo3", "xml"])
def test_calls_in_python_and_xml_are_those_of_vllms_parsers(form):
    from vllm.parser.qwen3 import Qwen3Parser
    from vllm.tool_parsers.llama4_pythonic_tool_parser import Llama4PythonicToolParser
    from vllm.tool_parsers.olmo3_tool_parser import Olmo3PythonicToolParser
    from vllm.tool_parsers.pythonic_tool_parser import PythonicToolParser

    tokens = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4}
    tokenizer = SimpleNamespace(get_vocab=lambda: tokens, vocab=tokens)
    parser = {
        "pythonic": lambda: PythonicToolParser(tokenizer),
        "llama4": lambda: Llama4PythonicToolParser(tokenizer),
        "olmo3": lambda: Olmo3PythonicToolParser(tokenizer),
        "xml": lambda: Qwen3Parser(tokenizer, chat_template_kwargs={"enable_thinking": False}),
    }[form]()
    values = ["x", 'a "b"', "é🙂", "{}", "1"]
    values += [] if form == "xml" else [1, -2.5, True, None, [1, {"k": []}], {"deep": {"er": "}"}}]
    around, between = {
        "pythonic": ("[{}]", ", "),
        "llama4": ("<|python_start|>[{}]<|python_end|>", ", "),
        "olmo3": ("<function_calls>\n{}\n</function_calls>", "\n"),
        "xml": ("{}", "\n"),
    }[form]
    draw, num_errors = random.Random(0), 0
    logging.disable(logging.CRITICAL)
    try:
        for _ in range(1000):
            given = [
                {key: draw.choice(values) for key in "abc"[: draw.randrange(4)]} for _ in range(draw.choice([1, 3]))
            ]
            names = [draw.choice(["add", "f_2"]) for _ in given]
            calls = map(_xml if form == "xml" else _python, given, names)
            text = around.replace("{}", between.join(calls), 1)
            if is_damaged := draw.random() < 0.3:  # one character is lost, doubled or another one
                at = draw.randrange(len(text))
                text = text[:at] + draw.choice(["", text[at] * 2, draw.choice("()[]=,'x<")]) + text[at + 1 :]
            theirs = parser.extract_tool_calls(text, SimpleNamespace(tools=None, tool_choice="auto")).tool_calls
            expected = [(each.function.name, json.loads(each.function.arguments)) for each in theirs]
            ours = list(calls_of(text))
            is_told = any(each.error or each.name not in ("add", "f_2") for each in ours)
            if is_damaged and is_told:  # vLLM drops these calls, or their arguments
                num_errors += 1
            else:
                read, written = [(each.name, each.arguments) for each in ours], list(zip(names, given, strict=True))
                assert read == (expected or written * bool(read)), text  # vLLM takes no text behind <|python_end|>
                assert is_damaged or expected == written
    finally:
        logging.disable(logging.NOTSET)
    assert num_errors > 50


def test_the_schema_of_a_tool_is_that_of_transformers():
    from transformers.utils import get_json_schema

    ours, theirs = schema_of(my_tools.lookup)["function"], get_json_schema(_all_described)["function"]
    assert ours["name"] == "lookup"
    assert ours["description"] == "Look a word up in the book.\n\nIt knows few words."
    assert ours["parameters"]["properties"]["key"] == {"type": "string", "description": "The word, or what it is."}
    ours = schema_of(_all_described)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    assert ours["parameters"]["required"] == theirs["parameters"]["required"]
    for name, schema in theirs["parameters"]["properties"].items():
        own = dict(ours["parameters"]["properties"][name])
        own.pop("default", None)
        assert own == schema


def _all_described(key: str, times: int = 1, share: float = 0.5, ids: list[int] = [], by: dict[str, float] = {}):  # noqa: B006
    """Look a word up.

    Args:
        key: The word.
        times: How often.
        share: How much.
        ids: Which ones.
        by: By name.
    """


@pytest.mark.parametrize(
    ("tools", "told"),
    [
        ([], "environment.args.tools is empty"),
        (["pyton"], "did you mean 'python'"),
        ([f"{FILE}:undocumented"], "must have a docstring"),
        ([f"{FILE}:of_anything"], "only named parameters"),
        ([f"{FILE}:lookup", f"{FILE}:lookup"], "two functions of one name"),
        ([f"{FILE}:look"], "has no 'look'"),
    ],
)
def test_tools_that_no_model_can_call_are_refused(tools, told):
    with pytest.raises(ConfigError, match=told):
        environment_of("tools", {"tools": tools})


def test_a_login_node_checks_built_in_tools_and_their_seconds():
    check_built_in(EnvironmentConfig(name="tools", args={"tools": ["python", "nowhere.py:lookup"]}))
    check_built_in(EnvironmentConfig(name="my.py:Game"))
    with pytest.raises(ConfigError, match=r"python_s: 'float' = 5.0"):
        check_built_in(EnvironmentConfig(name="tools", args={"tools": ["python"], "seconds": 3}))
    with pytest.raises(ConfigError, match="a step of tools may take 50 s"):
        check_built_in(EnvironmentConfig(name="tools", args={"tools": ["python"], "python_s": 20}))


def test_several_calls_are_answered_in_order_and_counted():
    environment = tools_of("calculator", f"{FILE}:lookup", f"{FILE}:slow")
    message = call("calculator", expression="6*7") + call("lookup", key="fish", times="2") + call("slow", seconds=0)
    turn = asyncio.run(environment.step(f"Let me see. {message}{call('nope')}"))
    contents = [(each["role"], each["name"], each["content"]) for each in turn.observation]
    assert contents == [
        ("tool", "calculator", "42"),
        ("tool", "lookup", "fish!fish!"),
        ("tool", "slow", "0.0"),
        ("tool", "nope", "Error: there is no tool 'nope'. Tools: calculator, lookup, slow"),
    ]
    assert (turn.done, turn.metrics) == (False, {"tool_calls": 4, "tool_errors": 1})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "wrong arguments of lookup: key: Missing required argument"),
        ({"key": "a", "weight": 1}, "weight: Unexpected keyword argument"),
        ({"key": ["a"]}, "key: Input should be a valid string"),
        ({"key": "a", "mood": "sad"}, "mood: Input should be 'calm' or 'loud'"),
        ({"key": "nothing"}, "the book has no such word"),
    ],
)
def test_wrong_arguments_and_a_value_error_of_a_tool_are_told_to_the_model(arguments, told):
    [[answer]] = answers(tools_of(f"{FILE}:lookup"), call("lookup", **arguments))
    assert answer.startswith("Error: ")
    assert told in answer


@pytest.mark.parametrize(
    ("how", "error", "told"),
    [
        ("hang", TimeoutError, "the tool misbehave did not answer within 0.2 s"),
        ("quit", RuntimeError, r"raised SystemExit\(3\)"),
        ("time out", TimeoutError, "^the book did not open"),
        ("break", ConnectionError, "the database is away"),
    ],
)
def test_a_tool_that_fails_by_no_fault_of_the_model_raises_out_of_step(how, error, told):
    with pytest.raises(error, match=told):
        answers(tools_of(f"{FILE}:misbehave", call_s=0.2), call("misbehave", how=how))


def test_an_async_tool_that_hangs_raises_out_of_step():
    with pytest.raises(TimeoutError, match="the tool slow did not answer"):
        answers(tools_of(f"{FILE}:slow", call_s=0.2), call("slow", seconds=3600))


def test_what_a_flooding_or_lying_tool_returns_is_cut_and_becomes_text():
    environment = tools_of(f"{FILE}:misbehave", max_chars=1000)
    [[flood], [lie], [none]] = answers(environment, *(call("misbehave", how=how) for how in ("flood", "lie", "none")))
    assert flood == "x" * 1000 + "\n[9999000 more characters were cut]"
    assert lie == r"{'text': b'\xff', 'half': '\ud83d'}"
    assert none == "None"


def test_a_model_cannot_pass_the_deadline_of_the_environment_by_many_calls():
    environment = tools_of(f"{FILE}:slow", "calculator", call_s=1.0)
    begun = time.monotonic()
    [first, second] = answers(environment, call("slow", seconds=0.6) * 20, call("calculator", expression="1") * 500)
    assert time.monotonic() - begun < 10.0
    assert first[:2] == ["0.6", "0.6"]
    assert set(first[2:]) == {"Error: not called: the calls before it took too long"}
    assert second == ["1"] * 32 + ["Error: a message has at most 32 calls"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3*4", "14"), ("7/2", "3.5"), ("-7//2", "-4"), ("2**-1", "0.5"), ("0.1+0.2", "0.3"), ("(1+2)*3 % 4", "1"),
        ("sqrt(2)", "1.41421356237"), ("max(1, 2, round(2.6))", "3"), ("1e3", "1000"), ("2**200", str(2**200)),
        ("round(5, -10**9)", "0"), ("round(2.567, 1)", "2.6"),
    ],
)  # fmt: skip
def test_the_calculator_calculates(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9", "9**9**9**9", "10**9999", "(2**4096)*2", "1/0", "1e308*10**400", "(-8)**0.5", "2**0.5**-5000",
        "exp(1000)", "__import__('os').system('id')", "().__class__", "'a'*9", "[1]*9", "True", "lambda: 1", "x",
        "1 if 1 else 2", "f'{1}'", "max", "max()", "sqrt(-1)", "round(1, digits=2)", "1_0 +", "", "(" * 500,
        "-" * 999 + "1", "1+" * 499 + "1+", "9" * 2000, "2^3", "1,000", "max(*[1])", "log(0)", "1j", "...",
        "max(1, 2, key=abs)", "1 << 99999", "lcm(9**999, 7**999)", "2**-10**9", "round(1e9, 0.5)",
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_arithmetic_or_has_no_bound(expression):
    begun = time.monotonic()
    with pytest.raises((ValueError, TypeError)) as caught:
        calculator(expression)
    assert len(str(caught.value)) < 2000
    assert time.monotonic() - begun < 1.0


@needs_isolation
def test_programs_of_a_session_find_what_the_earlier_ones_left():
    environment = tools_of("python")
    first, second, third, fourth = answers(
        environment,
        call(
            "python",
            code="import random, sys\nx = random.random()\nprint('loud'); print('err', file=sys.stderr)\nx > 0",
        ),
        call("python", code="def double(n): return 2 * n\nopen('a.txt', 'w').write('kept')\ny = x; {'b', 'a'} ; 1 / 0"),
        call("python", code="print(double(21), open('a.txt').read(), x == y)"),
        call("python", code="None"),
    )
    assert first == ["loud\nTrue\nerr\n"]
    assert 'File "<call 2>", line 3' in second[0]
    assert "ZeroDivisionError: division by zero" in second[0]
    assert third == ["42 kept True\n"]
    assert fourth == ["(no output)"]
    environment.reset({}, 1)
    assert "NameError: name 'x' is not defined" in answers(environment, call("python", code="x"))[0][0]


@needs_isolation
@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("while True: pass", "it took more than 1 s"),
        ("import time; time.sleep(99)", "it took more than 1 s"),
        ("import os\nwhile True: os.write(1, b'x' * 9999)", "it printed more than 256 KiB"),
        ("import os; os._exit(0)", "its process ended (exit 0)"),
        ("import os; os.write(3, b'done'); os.kill(os.getpid(), 9)", "its process ended (signal 9)"),
        ("x = [bytearray(1 << 24) for _ in range(9999)]", "MemoryError"),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "forgotten"),
        ("import urllib.request; urllib.request.urlopen('http://1.1.1.1')", "Operation not permitted"),
        (f"open({str(FILE)!r}).read()", "FileNotFoundError"),
        ("import sys; sys.exit('over')", "SystemExit: over"),
        ("def f(:", "SyntaxError"),
        ("'\\ud83d'", "\\ud83d"),
        ("print('\\ud83d')", "surrogates not allowed"),
        ("class A:\n    def __repr__(self): raise KeyError('no')\nA()", "KeyError: 'no'"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start(); 7", "7"),
        ("import sys; sys.stdout.close()", ""),
        ("import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", ""),
        ("input()", "EOFError"),
    ],
)
def test_a_program_that_passes_a_limit_or_breaks_out_is_forgotten_or_told_and_the_session_goes_on(code, told):
    environment = tools_of("python", python_s=1.0 if told in ("it took more than 1 s", "forgotten") else 5.0)
    kept, answer, after = answers(
        environment, call("python", code="kept = 5"), call("python", code=code), call("python", code="kept")
    )
    assert kept == ["(no output)"]
    assert told in answer[0]
    assert len(answer[0]) < 4100
    assert after == ["5\n"]


def test_a_process_of_tools_imports_neither_torch_nor_transformers():
    program = (
        "import sys\nfrom hpc_grpo.episodes.builtin import environment_of\n"
        "environment_of('tools', {'tools': ['python', 'calculator']})\n"
        "print({'torch', 'transformers', 'vllm', 'numpy', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("how", ["exit", "break"])
def test_a_tool_that_kills_its_process_or_raises_costs_its_episode_alone(how):
    async def played():
        environment = EnvironmentConfig(name="tools", args={"tools": [f"{FILE}:misbehave"]}, num_workers=1)
        workers = EnvironmentWorkers(environment)
        try:
            session, _ = await workers.reset({}, 0)
            with pytest.raises(EnvironmentLostError if how == "exit" else EnvironmentFailedError):
                await session.step(call("misbehave", how=how))
            session.end()
            session, _ = await workers.reset({}, 0)
            return await session.step(call("misbehave", how="none"))
        finally:
            workers.close()

    assert asyncio.run(played()).messages[0]["content"] == "None"


@pytest.mark.parametrize(
    "call",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>",
        "<function_calls>add(a=1)</function_calls>",
        "<|python_start|>[add(a=1)]<|python_end|>",
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}',
        '[{"name": "add", "arguments": {"a": 1}}]',
        '{"arguments": {"a": 1}, "name": "add"}',
        '{"type": "function", "name": "add", "parameters": {"a": 1}}',
    ],
)
def test_text_before_a_call_ends_where_the_call_begins(call: str) -> None:
    said = "I add the set {1, 2}: "
    assert before_calls(f"<think>{call}</think>{said}{call}") == said
    assert [each.name for each in calls_of(call)] == ["add"]
