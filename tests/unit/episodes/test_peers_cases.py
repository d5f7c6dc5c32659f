"""Cases of slime and verl about the token ids of several turns. Inputs and expected values are theirs.

A row is one training sequence. `[1:call</ast>]` are tokens that turn 1 sampled. Only these tokens have a logprob and
are trained. The other tokens are context. `…` stands for the beginning of a long prompt.

slime, tests/test_agent/test_trajectory_manager_branching.py at 9aa6e904819f61c88073d8e3f4da962b0c49d484, has 35 cases.
31 cases are here, with slime's numbers. slime records prompts and answers as ids. Here an agent asks the endpoint for
the same turns, with messages, with a text and with ids. Without a counterpart:

- 4.2 and 4.4 check arguments of slime's methods.
- 1.10 has an answer without tokens, 4.5 an answer without logprobs. Our engine returns neither.

verl, tests/utils/test_continuous_token_on_cpu.py at 787c0ec640a796f18ba4c3264fc7df756fbddd02, has 73 tests. With their
parameters, these are 120 cases. 28 tests (29 cases) are here, with verl's names. Without a counterpart:

- 18 tests (62 cases): names of model families, and the class of each name. Here the chat template decides.
- 18 tests (20 cases): images. Here an environment has no images.
- 9 tests (9 cases): fields, arguments and hooks of verl's classes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from tokenizers import AddedToken

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.data.templates import PromptStyle
from hpc_grpo.episodes.dialogue import Dialogue
from hpc_grpo.types import Completion, Episode, GroupSamples, TrainSequence
from tests.support.configs import minimal_config
from tests.unit.conftest import character_tokenizer
from tests.unit.engine.test_endpoint import Scene
from tests.unit.episodes.test_dialogue import CHAT, TOOL, ids_of, template_of, text_of, tokenizer_of, user

ROLES = {"sys": "system", "usr": "user", "ast": "assistant", "tul": "tool"}
TAGGED = (
    "{% for m in messages %}{% set tag = {'system': 'sys', 'user': 'usr', 'assistant': 'ast', 'tool': 'tul'}[m.role] %}"
    "<{{ tag }}>{{ m.content }}</{{ tag }}>{% endfor %}{% if add_generation_prompt %}<ast>{% endif %}"
)


def as_trained(turns: Sequence[Completion]) -> list[TrainSequence]:
    samples = GroupSamples(0, (Episode(tuple(turns), "stop"),))
    return algorithm_of(minimal_config()).sequences(samples, (1.0,), (True,))


def logprobs_of(turn: int, length: int) -> Any:
    """Return a logprob for each token of a turn, unlike all others, and exact in float32."""
    return -(turn + np.arange(length, dtype=np.float32) / 64)


def shown(tokenizer: Any, sequence: TrainSequence) -> str:
    """Write a sequence as a row. Fails if a mask, an advantage or a logprob belongs to another token."""
    row, turns = "", (-sequence.engine_logprobs).astype(int)
    assert sequence.loss_mask.tolist() == (turns > 0).tolist() == sequence.advantages.astype(bool).tolist()
    for turn, places in groupby(range(len(turns)), turns.__getitem__):
        own = list(places)
        text = text_of(tokenizer, sequence.token_ids[own])
        assert turn == 0 or sequence.engine_logprobs[own].tolist() == logprobs_of(turn, len(own)).tolist()
        row += f"[{turn}:{text}]" if turn else text
    return row


def ids_in(tokenizer: Any, row: str) -> list[int]:
    """Return the ids of a row: what is between two brackets was encoded in one piece."""
    return [token for part in re.split(r"\[\d:(.*?)\]", row, flags=re.DOTALL) for token in ids_of(tokenizer, part)]


def check(tokenizer: Any, prompts: Sequence[Sequence[int]], turns: Sequence[Completion], rows: Sequence[str]) -> None:
    """The turns are trained as these rows. Before each turn, its row has the ids that the model was given."""
    sequences = as_trained(turns)
    found = [shown(tokenizer, own) for own in sequences]
    ends = [f"…{own[1 - len(row) :]}" if row[0] == "…" else own for own, row in zip(found, rows, strict=False)]
    assert [*ends, *found[len(rows) :]] == rows
    for sequence, row in zip(sequences, rows, strict=True):
        ids = ids_in(tokenizer, row.removeprefix("…"))
        assert sequence.token_ids[-len(ids) :].tolist() == ids
    for number, prompt in enumerate(prompts, 1):
        [(sequence, starts)] = [
            (own, np.flatnonzero(own.engine_logprobs == -number)) for own in sequences if -number in own.engine_logprobs
        ]
        assert sequence.token_ids[: starts[0]].tolist() == list(prompt)


class Asked(Scene):
    """The endpoint of an agent. The model gives the `answers` in turn."""

    def __init__(self, answers: Sequence[str]) -> None:
        tokenizer = character_tokenizer(TAGGED)
        tags = [tag for name in ROLES for tag in (f"<{name}>", f"</{name}>")]
        tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags], special_tokens=True)
        tokenizer.eos_token = "</ast>"
        given = iter(answers)
        super().__init__(tokenizer, lambda _: next(given))

    async def ask(self, prompt: Any, turn: int, most: int | None) -> Completion:
        sampled = await super().ask(prompt, turn, most)
        return replace(sampled, engine_logprobs=logprobs_of(turn + 1, len(sampled.token_ids)))

    async def turn(self, route: str, prompt: str) -> int:
        """Ask for a prompt; return the status."""
        if route == "messages":
            said = [{"role": ROLES[tag], "content": text} for tag, text in re.findall(r"<(\w+)>(.*?)</\1>", prompt)]
            status, _ = await self.post(said)
        else:
            given = prompt if route == "text" else ids_of(self.tokenizer, prompt)
            status, _ = await self.post(given, route="completions")
        return int(status)


S = "<sys>S</sys><usr>u</usr><ast>"
T = "<tul>t</tul><ast>"
X, Y = "<tul>x</tul><ast>", "<tul>y</tul><ast>"
# "~" is the token that slime adds to a prompt, or puts in the place of another token.
SLIME: dict[str, tuple[list[tuple[str, str]], list[str]]] = {
    "1.1 2.1": ([("<sys>S</sys><usr>compute</usr><ast>", "ok")], ["<sys>S</sys><usr>compute</usr><ast>[1:ok</ast>]"]),
    "1.2 2.2": (
        [(S, "call"), (f"{S}call</ast><tul>4</tul><ast>", "done")],
        [f"{S}[1:call</ast>]<tul>4</tul><ast>[2:done</ast>]"],
    ),
    "1.3": (
        [("<sys>SA</sys><usr>u</usr><ast>", "a"), ("<sys>SB</sys><usr>u</usr><ast>", "a")],
        ["<sys>SA</sys><usr>u</usr><ast>[1:a</ast>]", "<sys>SB</sys><usr>u</usr><ast>[2:a</ast>]"],
    ),
    "1.4 2.9": (
        [("<sys>S</sys><usr>A</usr><ast>", "a"), ("<sys>S</sys><usr>B</usr><ast>", "b")],
        ["<sys>S</sys><usr>A</usr><ast>[1:a</ast>]", "<sys>S</sys><usr>B</usr><ast>[2:b</ast>]"],
    ),
    "1.5": ([(S, "a1"), (S, "a2")], [f"{S}[1:a1</ast>]", f"{S}[2:a2</ast>]"]),
    "1.6 2.10": (
        [(S, "call"), (f"{S}call</ast>{X}", "a2"), (f"{S}call</ast>{Y}", "a3")],
        [f"{S}[1:call</ast>]{X}[2:a2</ast>]", f"{S}call</ast>{Y}[3:a3</ast>]"],
    ),
    "1.7": (
        [(S, "a"), ("<sys>~S</sys><usr>u</usr><ast>", "b")],
        [f"{S}[1:a</ast>]", "<sys>~S</sys><usr>u</usr><ast>[2:b</ast>]"],
    ),
    "1.8": (
        [(S, "call"), (f"{S}call</ast><tul>A</tul><tul>B</tul><ast>", "done")],
        [f"{S}[1:call</ast>]<tul>A</tul><tul>B</tul><ast>[2:done</ast>]"],
    ),
    "2.3 2.8": (
        [(S, "call"), (f"<sys>S</sys><usr>u</usr>~<ast>call</ast>{T}", "done")],
        [f"{S}[1:call</ast>]", f"<sys>S</sys><usr>u</usr>~<ast>call</ast>{T}[2:done</ast>]"],
    ),
    # In 2.4, and in one half of 4.6, slime has a higher threshold, masks the first answer and has one row. Here every
    # sampled token is trained once, after the prompt that the model had.
    "2.4 2.5 2.6": (
        [(S, "call"), (f"{S}call~{T}", "done")],
        [f"{S}[1:call</ast>]", f"{S}call~{T}[2:done</ast>]"],
    ),
    "2.7": (
        [
            (S, "a1"),
            (f"{S}a1</ast><tul>t1</tul><ast>", "a2"),
            (f"{S}a1~<tul>t1</tul><ast>a2</ast><tul>t2</tul><ast>", "a3"),
        ],
        [
            f"{S}[1:a1</ast>]<tul>t1</tul><ast>[2:a2</ast>]",
            f"{S}a1~<tul>t1</tul><ast>a2</ast><tul>t2</tul><ast>[3:a3</ast>]",
        ],
    ),
    "2.11": (
        [
            (S, "a1"),
            (f"{S}a1</ast><tul>t1</tul><ast>", "a2"),
            (f"{S}a1</ast><tul>t1</tul><ast>a2</ast><ast>foreign</ast><tul>t2</tul><ast>", "a3"),
        ],
        [f"{S}[1:a1</ast>]<tul>t1</tul><ast>[2:a2</ast>]<ast>foreign</ast><tul>t2</tul><ast>[3:a3</ast>]"],
    ),
    # In 3.1 and 3.5, slime has no first row: it does not train a short answer that the agent rewrites.
    "3.1": ([(S, "ok"), (f"{S}ok </ast>{T}", "done")], [f"{S}[1:ok</ast>]", f"{S}ok </ast>{T}[2:done</ast>]"]),
    "3.2": ([(S, "ok"), (f"{S}ok2 </ast>{T}", "done")], [f"{S}[1:ok</ast>]", f"{S}ok2 </ast>{T}[2:done</ast>]"]),
    "3.3": ([(S, "ok"), (f"{S}ok3 </ast>{T}", "done")], [f"{S}[1:ok</ast>]", f"{S}ok3 </ast>{T}[2:done</ast>]"]),
    "3.4": (
        [(S, "a"), (S, "b"), (f"{S}c</ast>{T}", "d")],
        [f"{S}[1:a</ast>]", f"{S}[2:b</ast>]", f"{S}c</ast>{T}[3:d</ast>]"],
    ),
    "3.5": (
        [
            (S, "ok"),
            (f"{S}ok5 </ast><tul>t1</tul><ast>", "second"),
            (f"{S}ok5 </ast><tul>t1</tul><ast>second</ast><tul>t2</tul><ast>", "third"),
        ],
        [
            f"{S}[1:ok</ast>]",
            f"{S}ok5 </ast><tul>t1</tul><ast>[2:second</ast>]<tul>t2</tul><ast>[3:third</ast>]",
        ],
    ),
    "3.6": (
        [
            (S, "call"),
            (f"{S}call</ast>{X}", "ax2"),
            (f"<sys>S</sys><usr>u</usr>~<ast>call</ast>{X}ax2</ast><tul>xx</tul><ast>", "ax3"),
            (f"{S}call</ast>{Y}", "ay2"),
        ],
        [
            f"{S}[1:call</ast>]{X}[2:ax2</ast>]",
            f"<sys>S</sys><usr>u</usr>~<ast>call</ast>{X}ax2</ast><tul>xx</tul><ast>[3:ax3</ast>]",
            f"{S}call</ast>{Y}[4:ay2</ast>]",
        ],
    ),
    "3.7": (
        [
            (S, "a1"),
            (f"{S}a1</ast><tul>t1</tul><ast>", "a2"),
            *((f"{S}a1</ast><tul>t1</tul><ast>a2</ast><tul>{own}</tul><ast>", f"end-{own}") for own in "pqr"),
        ],
        [
            f"{S}[1:a1</ast>]<tul>t1</tul><ast>[2:a2</ast>]<tul>p</tul><ast>[3:end-p</ast>]",
            f"{S}a1</ast><tul>t1</tul><ast>a2</ast><tul>q</tul><ast>[4:end-q</ast>]",
            f"{S}a1</ast><tul>t1</tul><ast>a2</ast><tul>r</tul><ast>[5:end-r</ast>]",
        ],
    ),
    "3.8": (
        [
            (S, "a0"),
            (f"{S}a0</ast><tul>t0</tul><ast>", "a1"),
            (f"{S}a0</ast><tul>t0</tul><ast>a1</ast><tul>t1</tul><ast>", "a2"),
            (f"{S}a0</ast><tul>t0</tul><ast>a1</ast><tul>t1</tul><ast>a2</ast><tul>t2~<ast>", "a3"),
            (
                f"{S}a0</ast><tul>t0</tul><ast>a1</ast><tul>t1</tul><ast>a2</ast><tul>t2</tul><ast>a3</ast>"
                "<tul>t3</tul><ast>",
                "a4",
            ),
            (
                "<sys>S</sys><usr>u</usr>~<ast>a0</ast><tul>t0</tul><ast>a1</ast><tul>t1</tul><ast>a2</ast>"
                "<tul>t2</tul><ast>a3</ast><tul>t3</tul><ast>a4</ast><tul>t4</tul><ast>",
                "a5",
            ),
        ],
        [
            f"{S}[1:a0</ast>]<tul>t0</tul><ast>[2:a1</ast>]<tul>t1</tul><ast>[3:a2</ast>]<tul>t2~<ast>[4:a3</ast>]",
            f"{S}a0</ast><tul>t0</tul><ast>a1</ast><tul>t1</tul><ast>a2</ast><tul>t2</tul><ast>a3</ast>"
            "<tul>t3</tul><ast>[5:a4</ast>]",
            "<sys>S</sys><usr>u</usr>~<ast>a0</ast><tul>t0</tul><ast>a1</ast><tul>t1</tul><ast>a2</ast>"
            "<tul>t2</tul><ast>a3</ast><tul>t3</tul><ast>a4</ast><tul>t4</tul><ast>[6:a5</ast>]",
        ],
    ),
    "4.6": ([(S, "abc"), (f"{S}abc~{T}", "d")], [f"{S}[1:abc</ast>]", f"{S}abc~{T}[2:d</ast>]"]),
    # verl raises an error for another message. Here an agent may rewrite its history.
    "verl default_builder_rejects_mutated_message_prefix": (
        [("<usr>question</usr><ast>", "a"), ("<usr>different</usr><ast>", "b")],
        ["<usr>question</usr><ast>[1:a</ast>]", "<usr>different</usr><ast>[2:b</ast>]"],
    ),
}
OF_MESSAGES = {
    # slime has one row, as here with ids. A message with an answer that the model did not sample is a new history.
    "2.11": [
        f"{S}[1:a1</ast>]<tul>t1</tul><ast>[2:a2</ast>]",
        f"{S}a1</ast><tul>t1</tul><ast>a2</ast><ast>foreign</ast><tul>t2</tul><ast>[3:a3</ast>]",
    ],
    # slime masks the answer that the agent repeats with a space. Here white space around an answer may change.
    "3.1": [f"{S}[1:ok</ast>]{T}[2:done</ast>]"],
}


@pytest.mark.parametrize(
    ("route", "turns", "rows"),
    [
        pytest.param(route, turns, OF_MESSAGES.get(case, rows) if route == "messages" else rows, id=f"{case} {route}")
        for case, (turns, rows) in SLIME.items()
        for route in ("messages", "text", "ids")
        if route != "messages" or "~" not in str(turns)  # the template does not write "~"
    ],
)
def test_an_agents_requests_branch_as_in_slimes_cases(
    route: str, turns: list[tuple[str, str]], rows: list[str]
) -> None:
    async def played() -> Asked:
        scene = Asked([answer for _, answer in turns])
        scene.key = await scene.endpoint.open(lambda: scene.chats)
        for prompt, _ in turns:
            assert await scene.turn(route, prompt) == 200
        scene.endpoint.stop()
        return scene

    scene = asyncio.run(played())
    check(scene.tokenizer, scene.seen, scene.chats.turns(), rows)
    assert route == "messages" or [text_of(scene.tokenizer, own) for own in scene.seen] == [own for own, _ in turns]


def test_sessions_are_apart_and_end_as_in_slimes_cases_1_9_2_12_and_4_3() -> None:
    """slime ignores a request without messages, and returns no samples for an unknown session. Here both are errors.

    verl's default_builder_rejects_mutated_message_prefix has an error for no messages too.
    """

    async def played() -> None:
        one, two = Asked(["a"]), Asked(["b"])
        one.key, two.key = [await one.endpoint.open(lambda own=own: own.chats) for own in (one, two)]
        two.endpoint = one.endpoint
        for scene, name in ((one, "A"), (two, "B")):
            assert await scene.turn("messages", f"<sys>S</sys><usr>{name}</usr><ast>") == 200
        one.endpoint.close(one.key)
        assert [await scene.turn("messages", "") for scene in (one, two)] == [401, 400]
        for scene, row in (
            (one, "<sys>S</sys><usr>A</usr><ast>[1:a</ast>]"),
            (two, "<sys>S</sys><usr>B</usr><ast>[1:b</ast>]"),
        ):
            check(scene.tokenizer, scene.seen, scene.chats.turns(), [row])
        one.endpoint.stop()

    asyncio.run(played())


class Verl(NamedTuple):
    """The model's `answer` to a question, and what it is `told` then. Its next answer is 45. `end` ends an answer."""

    template: str
    answer: str
    told: Sequence[dict[str, str]]
    rows: list[str]
    end: str = "<|im_end|>"
    tools: Sequence[Any] = ()
    style: Mapping[str, Any] = MappingProxyType({})


def tool(text: str, **keys: str) -> dict[str, str]:
    return {**user(text, "tool"), **keys}


DEFAULT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_RESPONSES = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|tool_response>response:{{ m.name }}{value:{{ m.content }}}"
    "<tool_response|>{% else %}<{{ m.role }}>{{ m.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MINIMAX = (
    "{% for m in messages %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{{ m.content }}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]ai\n{% endif %}"
)
WITH_END = "{% for m in messages %}{{ m.content }}{{ '<|e|>' if m.role == 'assistant' }}{% endfor %}"
CHATML_ROW = "…<|im_start|>assistant\n[1:1<|im_end|>]\n<|im_start|>user\n23<|im_end|>\n<|im_start|>assistant\n[2:45]"
LOOKUP = [tool("answer", name="lookup")]
SPLIT = [tool("hits"), tool("42"), user("please continue"), tool("order shipped")]
AS_USER = (
    "<tool_response>\nhits\n</tool_response>\n<tool_response>\n42\n</tool_response>\nplease continue\n"
    "<tool_response>\norder shipped\n</tool_response>"
)


def gpt_oss(told: Sequence[dict[str, str]], text: str) -> Verl:
    asked = "…<|end|><|start|>user<|message|>question<|end|><|start|>assistant"
    then = f"<|channel|>final<|message|>1<|end|><|start|>user<|message|>{text}<|end|><|start|>assistant[2:45]"
    return Verl("gptoss", "1<|call|>", told, [f"{asked}[1:1<|call|>]", f"{asked}{then}"], "<|call|>")


VERL = {
    # verl's case ends with the first prompt. In later prompts, this template has no empty thoughts in earlier turns.
    "builder_forwards_template_kwargs_and_tools_when_rendering_initial_prompt": Verl(
        "qwen3",
        "1<|im_end|>",
        [user("23")],
        [
            "…<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[1:1<|im_end|>]",
            "…<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\n23<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n[2:45]",
        ],
        tools=[TOOL],
        style={"template_args": {"enable_thinking": False}},
    ),
    "qwen3_builder_inserts_missing_newline_after_im_end, model_specific_builders_validate_special_token_id_shape": Verl(
        "qwen3", "1<|im_end|>", [user("23")], [CHATML_ROW]
    ),
    "qwen35_builder_uses_qwen3_newline_boundary_logic": Verl(
        "qwen3_5_think",
        "1</think>2<|im_end|>",
        [tool("3")],
        [
            "…<|im_start|>assistant\n<think>\n[1:1</think>2<|im_end|>]\n<|im_start|>user\n<tool_response>\n3\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n[2:45]"
        ],
        tools=[TOOL],
    ),
    "qwen_merge_still_works": Verl("qwen2_5", "1<|im_end|>", [user("23")], [CHATML_ROW]),
    "merge_inherits_qwen_newline_patch": Verl("qwen3_vl", "1<|im_end|>", [user("23")], [CHATML_ROW]),
    "merge_inherits_mimo_newline_patch": Verl("chatml", "1<|im_end|>", [user("23")], [CHATML_ROW]),
    "merge_no_new_images": Verl(
        "qwen2_5_vl", "1<|im_end|>", [tool("result")], [CHATML_ROW.replace("user\n23", "tool\nresult")]
    ),
    "minimax_builder_inserts_missing_newline_after_eos": Verl(
        MINIMAX,
        "1[e~[",
        [user("23")],
        ["]~b]user\nquestion[e~[\n]~b]ai\n[1:1[e~[]\n]~b]user\n23[e~[\n]~b]ai\n[2:45]"],
        "[e~[",
    ),
    # verl removes a sampled end token if the template writes another token. Here it is trained, and a sequence begins.
    "glm47_builder_removes_ambiguous_boundary_token": Verl(
        "glm4moe",
        "1<|observation|>",
        [user("2")],
        [
            "[gMASK]<sop><|user|>\nquestion<|assistant|>[1:1<|observation|>]",
            "[gMASK]<sop><|user|>\nquestion<|assistant|>\n<think></think>\n1<|user|>\n2<|assistant|>[2:45]",
        ],
        "<|observation|>",
    ),
    "glm47_builder_removes_ambiguous_boundary_token, followed by an observation": Verl(
        "glm4moe",
        "<think>1</think>2<|observation|>",
        [tool("3")],
        [
            "…<|user|>\nquestion<|assistant|>[1:<think>1</think>2<|observation|>]\n<tool_response>\n3\n"
            "</tool_response><|assistant|>[2:45]"
        ],
        "<|observation|>",
        [TOOL],
    ),
    "non_assistant_alignment_handles_boundary_inserts_and_trims": Verl(
        WITH_END, "12<|x|>", [user("34")], ["question[1:12<|x|>]", "question12<|e|>34[2:45]"], "<|x|>"
    ),
    "builder_align_response_metadata_handles_inserted_boundary_tokens": Verl(
        WITH_END, "12", [user("3")], ["question[1:12]<|e|>3[2:45]"]
    ),
    "default_builder_appends_assistant_tokens_to_runtime_stream": Verl(
        WITH_END, "1", [user("23")], ["question[1:1]<|e|>23[2:45]"]
    ),
    "subclass_only_overrides_token_level_merge_hook": Verl(
        WITH_END, "123", [tool("answer")], ["question[1:123]<|e|>answer[2:45]"]
    ),
    "gemma4_builder_does_not_duplicate_existing_tool_response_boundary": Verl(
        WITH_RESPONSES,
        "1<|tool_response>",
        LOOKUP,
        [
            "<user>question\n<assistant>[1:1<|tool_response>]response:lookup{value:answer}<tool_response|>"
            "<assistant>[2:45]"
        ],
        "<|tool_response>",
    ),
    # verl appends no line end after these three answers. Here the template's own end of an answer always follows.
    "gemma4_builder_inserts_tool_response_boundary_for_appended_messages": Verl(
        WITH_RESPONSES,
        "123",
        LOOKUP,
        [
            "<user>question\n<assistant>[1:123]\n<|tool_response>response:lookup{value:answer}<tool_response|>"
            "<assistant>[2:45]"
        ],
        "<|tool_response>",
    ),
    "default_builder_merges_append_only_non_assistant_messages": Verl(
        DEFAULT,
        "123",
        [tool("answer")],
        ["<user>question\n<assistant>[1:123]\n<tool>answer\n<assistant>[2:45]"],
    ),
    "default_builder_tokenizes_system_and_user_appends_with_generation_prompt": Verl(
        DEFAULT,
        "123",
        [user("policy", "system"), user("retry")],
        ["<user>question\n<assistant>[1:123]\n<system>policy\n<user>retry\n<assistant>[2:45]"],
    ),
    "default_builder_returns_empty_delta_when_no_message_is_appended": Verl(
        DEFAULT, "12", [], ["question[1:12][2:45]"], style={"template": "plain"}
    ),
    # verl raises an error for a template that rewrites earlier messages. Here a sequence begins.
    "default_builder_rejects_non_prefix_stable_template_deltas": Verl(
        "{{ 'mutated-prefix:' if messages[1] }}" + DEFAULT,
        "123",
        [tool("answer")],
        [
            "<user>question\n<assistant>[1:123]",
            "mutated-prefix:<user>question\n<assistant>123\n<tool>answer\n<assistant>[2:45]",
        ],
    ),
    # verl looks up the name of the called function, and raises an error if it is not clear. Here the model's answers
    # stay text. If a template shows no tool's answer after a text, the user's message has it, without a name.
    "gemma4_builder_formats_tool_response_by_position_with_warning": Verl(
        "gemma4_v5",
        "1<turn|>",
        [tool("answer")],
        [
            "<bos><|turn>user\nquestion<turn|>\n<|turn>model\n[1:1<turn|>]\n<|turn>user\n<tool_response>\nanswer\n"
            "</tool_response><turn|>\n<|turn>model\n[2:45]"
        ],
        "<turn|>",
    ),
    "strict_tool_name_builders_reject_split_positional_tool_groups[gemma4]": Verl(
        "gemma4_v5",
        "1<turn|>",
        SPLIT,
        [
            f"<bos><|turn>user\nquestion<turn|>\n<|turn>model\n[1:1<turn|>]\n<|turn>user\n{AS_USER}<turn|>\n"
            "<|turn>model\n[2:45]"
        ],
        "<turn|>",
    ),
    "strict_tool_name_builders_reject_split_positional_tool_groups[gptoss]": gpt_oss(SPLIT, AS_USER),
    "gpt_oss_builder_formats_tool_responses_with_resolved_tool_name": gpt_oss(
        [tool("ok", tool_call_id="call_0")], "<tool_response>\nok\n</tool_response>"
    ),
    "gpt_oss_builder_prefers_tool_message_name_over_context_id": gpt_oss(
        [tool("ok", tool_call_id="call_0", name="from_message")], "<tool_response>\nok\n</tool_response>"
    ),
    "gpt_oss_builder_formats_multiple_tool_responses_by_position_with_warning": gpt_oss(
        [tool("hits"), tool("42")], "<tool_response>\nhits\n</tool_response>\n<tool_response>\n42\n</tool_response>"
    ),
    "gpt_oss_builder_rejects_ambiguous_positional_tool_name_resolution": gpt_oss(
        [tool("hits")], "<tool_response>\nhits\n</tool_response>"
    ),
    "gpt_oss_builder_does_not_use_older_assistant_tool_calls_for_position": gpt_oss(
        [tool("answer")], "<tool_response>\nanswer\n</tool_response>"
    ),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in VERL.items()])
def test_a_conversation_goes_on_as_in_verls_cases(case: Verl) -> None:
    template = case.template if "{" in case.template else template_of(case.template)
    tokenizer = tokenizer_of(template, case.end)
    dialogue = Dialogue(tokenizer, PromptStyle(**{**CHAT, "chat_template": template, **case.style}))
    conversation = dialogue.begin([user("question")], case.tools)
    prompts, turns = [], []
    for number, answer in enumerate((case.answer, "45"), 1):
        if prompts:
            conversation.go_on(turns[-1].token_ids.tolist(), case.told)
        prompts.append(conversation.prompt)
        ids = np.array(ids_of(tokenizer, answer), np.int32)
        sampled = Completion(ids, logprobs_of(number, len(ids)), np.zeros_like(ids), "stop")
        given = np.array(conversation.context_ids, np.int32)
        turns.append(sampled.as_turn(given, starts_anew=conversation.starts_anew))
    check(tokenizer, prompts, turns, case.rows)
    assert not case.tools or "calc" in text_of(tokenizer, prompts[0])
