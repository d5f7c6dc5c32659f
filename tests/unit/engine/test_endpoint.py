"""The OpenAI-compatible server, asked over HTTP, on an engine whose completions a test writes."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import pytest

from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.data.templates import PromptStyle
from hpc_grpo.engine.endpoint import Chats, Endpoint
from hpc_grpo.episodes.dialogue import Dialogue
from hpc_grpo.types import Completion

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] + ('<eos>' if m['role'] == 'assistant' else '') + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
NESTED = functools.reduce(lambda inner, _: {"a": inner}, range(600), {})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Scene:
    """An episode behind a server; `write(prompt)` is what the model says, and `prompts` what it was given."""

    def __init__(self, tokenizer: Any, write: Callable[[str], str], **limits: Any) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.prompts: list[str] = []
        self.seen: list[list[int]] = []
        self.mays: list[int | None] = []
        self.gate: asyncio.Event | None = None
        style = PromptStyle("chat", "{prompt}", None, None, {})
        known = EnvironmentConfig(name="x", **{"max_tokens": 400, **limits})
        self.chats = Chats(Dialogue(tokenizer, style), known, 400, self.ask)
        self.endpoint = Endpoint("/models/tiny", 800)

    async def ask(self, prompt: Any, turn: int, most: int | None) -> Completion:
        if self.gate is not None:
            await self.gate.wait()
        text = tokenizer_text(self.tokenizer, prompt)
        self.prompts.append(text)
        self.seen.append(list(prompt))
        self.mays.append(most)
        ids = [*self.tokenizer(self.write(text))["input_ids"], self.tokenizer.eos_token_id]
        is_cut = most is not None and len(ids) > most
        ids = ids[:most]
        return Completion(
            np.array(ids, np.int32),
            np.full(len(ids), -0.5, np.float32),
            np.zeros(len(ids), np.int32),
            "length" if is_cut else "stop",
        )

    async def post(
        self,
        messages: Any,
        *,
        key: str | None = None,
        headers: Any = None,
        route: str = "chat/completions",
        **fields: Any,
    ) -> Any:
        """Return status and body of a request for a completion."""
        data = messages if isinstance(messages, bytes) else None
        field = "messages" if route.startswith("chat") else "prompt"
        body = None if data is not None else {"model": "x", field: messages, **fields}
        head = {"Authorization": f"Bearer {self.key if key is None else key}", **(headers or {})}
        url = f"{self.endpoint.base_url}/{route}"
        async with aiohttp.ClientSession() as client, client.post(url, json=body, data=data, headers=head) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def say(self, messages: Any, **fields: Any) -> dict[str, Any]:
        status, body = await self.post(messages, **fields)
        assert status == 200, body
        message: dict[str, Any] = body["choices"][0]["message"]
        return message

    def sequences(self) -> list[list[Completion]]:
        """Return the turns by sequence; each begins with what its model was given."""
        found: list[list[Completion]] = []
        for turn in self.chats.turns():
            if turn.starts_anew:
                found.append([])
            found[-1].append(turn)
        return found


def tokenizer_text(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def in_scene(write: Callable[[str], str] = lambda _: "yes", **limits: Any) -> Callable[..., Any]:
    """Run an async test with a scene whose server listens. A parameter `limits` of the test is the scene's."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def run(make_tokenizer: Callable[..., Any], **given: Any) -> None:
            async def running() -> None:
                scene = Scene(make_tokenizer(TEMPLATE), write, **{**limits, **given.get("limits", {})})
                scene.key = await scene.endpoint.open(lambda: scene.chats)
                try:
                    await asyncio.wait_for(test(scene, **given), 30.0)
                finally:
                    await scene.chats.close()
                    scene.endpoint.stop()

            asyncio.run(running())

        _, *others = inspect.signature(test).parameters.values()
        tokenizer = inspect.Parameter("make_tokenizer", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([tokenizer, *others])  # type: ignore[attr-defined]
        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


@in_scene()
async def test_a_request_that_goes_on_from_another_extends_its_ids_by_the_delta(scene: Scene) -> None:
    first = await scene.say([user("a")])
    await scene.say([user("a"), {**first, "refusal": None}, user("b")])
    assert scene.prompts[1] == "<user>a\n<assistant>yes<eos>\n<user>b\n<assistant>"
    [[one, two]] = scene.sequences()
    ids = [*one.context_ids, *one.token_ids, *two.context_ids]
    assert ids == scene.seen[1]
    assert [one.starts_anew, two.starts_anew] == [True, False]
    assert scene.chats.turns(0.5)[-1].reward == 0.5


@in_scene(lambda _: " yes \n")
async def test_what_the_model_wrote_stays_as_sampled_where_the_agent_strips_it(scene: Scene) -> None:
    await scene.say([user("a")])
    await scene.say([user("a"), {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}, user("b")])
    assert "<assistant> yes \n<eos>\n<user>b" in scene.prompts[1]
    assert len(scene.sequences()) == 1


@pytest.mark.parametrize(
    ("messages", "tools", "shared"),
    [
        ([user("a"), {"role": "assistant", "content": "no"}, user("b")], [], False),
        ([{"role": "system", "content": "be short"}, user("a")], [], False),
        ([user("a"), {"role": "assistant", "content": "yes"}, user("c")], [ADD], False),
        ([user("a"), {"role": "assistant", "content": "yes"}, user("c")], [], True),
    ],
    ids=["rewritten", "other conversation", "other tools", "branch"],
)
@in_scene()
async def test_another_history_is_another_sequence(
    scene: Scene, messages: list[Any], tools: list[Any], shared: bool
) -> None:
    first = await scene.say([user("a")])
    await scene.say([user("a"), first, user("b")])
    await scene.say(messages, tools=tools)
    one, two = scene.sequences()
    assert (len(one), len(two)) == (2, 1)
    assert two[0].context_ids.tolist() == scene.seen[2]
    sampled = [*one[0].context_ids, *one[0].token_ids]
    assert (scene.seen[2][: len(sampled)] == sampled) == shared


@in_scene()
async def test_two_conversations_in_turn_are_two_sequences_and_the_last_answer_ends_the_episode(scene: Scene) -> None:
    one, two = await scene.say([user("one")]), await scene.say([user("two")])
    await scene.say([user("one"), one, user("more")])
    assert [len(own) for own in scene.sequences()] == [1, 2]
    assert tokenizer_text(scene.tokenizer, scene.sequences()[0][0].context_ids) == "<user>two\n<assistant>"
    assert two["content"] == "yes"


@in_scene(lambda prompt: "three" if "<tool>" in prompt else f"I add.{CALL}")
async def test_tool_calls_are_read_and_their_answers_go_on_from_the_sampled_ids(scene: Scene) -> None:
    message = await scene.say([user("1 + 2")], tools=[ADD])
    [call] = message["tool_calls"]
    assert (call["function"], message["content"]) == ({"name": "add", "arguments": '{"a": 1, "b": 2}'}, "I add.")
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    status, body = await scene.post([user("1 + 2"), message, answer], tools=[ADD])
    assert (status, body["choices"][0]["finish_reason"]) == (200, "stop")
    assert scene.prompts[1].endswith(f"I add.{CALL}<eos>\n<tool>3\n<assistant>")
    assert '{"type": "function", "function": {"name": "add"' in scene.prompts[0]
    assert len(scene.sequences()) == 1
    await scene.say([user("2 + 2"), message, answer, user("again")], tools=[ADD])
    assert CALL in scene.prompts[2], "a template without tool calls shows them as text"
    await scene.say([user("1 + 2"), message, answer, user("sum up")])
    assert f"<assistant>I add.{CALL}<eos>" in scene.prompts[3], "also where the request has no tools"


@pytest.mark.parametrize(
    ("written", "before"),
    [
        (f"The set {{1, 2}} needs adding.{CALL}", "The set {1, 2} needs adding."),
        ('I add.\n[{"name": "add", "arguments": {}}]', "I add."),
        ('<|python_tag|>{"name": "add", "parameters": {}}', None),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {}}]', None),
    ],
)
@in_scene()
async def test_the_text_before_a_call_is_kept(scene: Scene, written: str, before: str | None) -> None:
    scene.write = lambda _: written
    message = await scene.say([user("x")], tools=[ADD])
    assert (message["content"], len(message["tool_calls"])) == (before, 1)


XML = "".join(f"<parameter={name}>{text}</parameter>" for name, text in {"a": 1, "b": "x", "c": "[2]", "d": 1}.items())


@in_scene(lambda _: f"<tool_call><function=add>{XML}</function></tool_call>")
async def test_arguments_in_xml_have_the_types_of_the_tools_parameters(scene: Scene) -> None:
    types = {"a": {"type": ["integer", "null"]}, "b": {"type": ["string", "null"]}, "c": True, "d": {"enum": ["1"]}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": types}}}
    [call] = (await scene.say([user("x")], tools=[tool]))["tool_calls"]
    assert call["function"]["arguments"] == '{"a": 1, "b": "x", "c": [2], "d": "1"}'


@in_scene(lambda _: '<tool_call>{"na')
async def test_a_call_that_cannot_be_read_is_text(scene: Scene) -> None:
    assert (await scene.say([user("1 + 2")], tools=[ADD])) == {"role": "assistant", "content": '<tool_call>{"na'}


@in_scene()
async def test_logprobs_usage_and_models_are_those_of_the_sampled_ids(scene: Scene) -> None:
    _, body = await scene.post([user("a")], logprobs=True, temperature=0.1, seed=3, user="x")
    tokens = body["choices"][0]["logprobs"]["content"]
    assert [(own["token"], own["logprob"]) for own in tokens] == [(text, -0.5) for text in (*"yes", "<eos>")]
    assert body["usage"] == {"prompt_tokens": 19, "completion_tokens": 4, "total_tokens": 23}
    head = {"Authorization": f"Bearer {scene.key}"}
    async with aiohttp.ClientSession() as client:
        models = await (await client.get(f"{scene.endpoint.base_url}/models", headers=head)).json()
    assert [(own["id"], own["max_model_len"]) for own in models["data"]] == [("tiny", 800)]


@in_scene(lambda _: CALL)
async def test_the_sdk_reads_a_stream(scene: Scene) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=scene.endpoint.base_url, api_key=scene.key) as client:
        stream = await client.chat.completions.create(
            model="x", messages=[user("a")], tools=[ADD], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    [call] = chunks[0].choices[0].delta.tool_calls
    assert (call.index, call.function.name) == (0, "add")
    assert (chunks[1].choices[0].finish_reason, chunks[2].usage.completion_tokens) == ("tool_calls", len(CALL) + 1)


@in_scene()
async def test_a_retry_of_a_request_under_way_gets_its_answer_and_other_requests_their_own(scene: Scene) -> None:
    scene.gate = asyncio.Event()
    first = {"x-stainless-retry-count": "0"}
    asked = [
        asyncio.create_task(scene.post([user("a")], headers=headers))
        for headers in (first, {"x-stainless-retry-count": "1"}, first)
    ]
    while scene.chats._num_open < 2:
        await asyncio.sleep(0.01)
    scene.gate.set()
    await asyncio.gather(*asked)
    assert len(scene.chats.turns()) == 2


@in_scene()
async def test_the_answer_to_one_of_two_equal_requests_leaves_the_other_to_its_retry(scene: Scene) -> None:
    scene.gate = asyncio.Event()
    first = {"x-stainless-retry-count": "0"}
    one = asyncio.create_task(scene.post([user("a")], headers=first))
    while scene.chats._num_open < 1:
        await asyncio.sleep(0.01)
    gate, scene.gate = scene.gate, asyncio.Event()
    lost = asyncio.create_task(scene.post([user("a")], headers=first))
    while scene.chats._num_open < 2:
        await asyncio.sleep(0.01)
    gate.set()
    await one
    lost.cancel()
    retry = asyncio.create_task(scene.post([user("a")], headers={"x-stainless-retry-count": "1"}))
    await asyncio.wait([retry], timeout=0.3)
    scene.gate.set()
    assert ((await retry)[0], len(scene.chats.turns())) == (200, 2)


@in_scene()
async def test_an_answer_that_a_client_did_not_wait_for_is_given_to_its_retry(scene: Scene) -> None:
    scene.gate = asyncio.Event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(scene.post([user("a")]), 0.3)
    scene.gate.set()
    while not scene.chats.turns():
        await asyncio.sleep(0.01)
    assert (await scene.say([user("a")]))["content"] == "yes"
    assert len(scene.chats.turns()) == 1
    await scene.say([user("a")])
    assert len(scene.chats.turns()) == 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"stop": ["x"]}, "rollout.stop"),
        (
            {"n": 2, "reasoning_effort": "low"},
            'n = 2, reasoning_effort = "low" cannot be used here. Ask n',
        ),
        (
            {"anything": 1},
            "Supported fields: messages, tools, max_tokens, max_completion_tokens, logprobs, stream, stream_opti",
        ),
        ({"anything": False}, "Ignored fields: temperature, top_p"),
        ({"response_format": {"type": "json_object"}}, 'response_format = {"type": "json_object"}'),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls = false"),
        ({"logprobs": 5}, "logprobs = 5"),
        ({"tool_choice": "required", "tools": [ADD]}, "tool_choice"),
        ({"tools": "x"}, "tools must be a list"),
        ({"tools": [NESTED]}, "nested too deeply"),
        ({"max_tokens": -1}, "positive integer, not -1"),
        ({"top_logprobs": 5}, "top_logprobs = 5"),
        ({"stream_options": 3}, "stream_options"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "data.template_args"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"min_tokens": 5}, "rollout.min_new_tokens"),
        ({"stop_token_ids": [5]}, "rollout.stop"),
        ({"function_call": {"name": "add"}}, "Supported fields: messages, tools"),
        ({"prompt": "x"}, 'prompt = "x"'),
        ({"messages": []}, "at least one"),
        ({"messages": "x"}, "must be a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be text"),
        ({"messages": [{"role": "user", "content": 3}]}, "must be text, not 3"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "half of a character"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "not be of the role assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, {"role": "user"}]}, "tool call needs"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}, {"role": "user"}]}, "tool call needs"),
    ],
)
@in_scene()
async def test_what_cannot_be_answered_as_meant_is_refused_in_openais_shape(
    scene: Scene, fields: dict[str, Any], told: str
) -> None:
    status, body = await scene.post(fields.pop("messages", [user("a")]), **fields)
    assert (status, body["error"]["type"]) == (400, "invalid_request_error")
    assert told in body["error"]["message"]
    assert scene.chats.turns() == ()
    await scene.say([user("a")])


@in_scene()
async def test_fields_that_change_no_answer_and_defaults_are_taken(scene: Scene) -> None:
    fields: dict[str, Any] = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "top_k": 5,
        "reasoning_effort": None,
    }
    fields |= {"n": 1, "stop": [], "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": False}
    await scene.say([user("a")], **fields)


@in_scene(lambda _: " yes \n")
async def test_a_text_that_goes_on_from_an_answer_extends_its_sampled_ids(scene: Scene) -> None:
    text = "<user>a\n<assistant>"
    _, body = await scene.post(text, route="completions", logprobs=1)
    [choice] = body["choices"]
    assert (body["object"], choice["text"], choice["finish_reason"]) == ("text_completion", " yes \n", "stop")
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 7
    assert choice["logprobs"]["text_offset"] == [*range(7)]
    assert body["usage"] == {"prompt_tokens": 19, "completion_tokens": 7, "total_tokens": 26}
    text += choice["text"] + "<eos>\n<user>b\n<assistant>"
    await scene.post(text, route="completions")
    assert scene.prompts[1] == text
    [[one, two]] = scene.sequences()
    assert [*one.context_ids, *one.token_ids, *two.context_ids] == scene.seen[1]
    assert scene.tokenizer.eos_token_id not in two.context_ids, "the end token is the model's own"
    # Without the end token, or with another answer, it is another sequence.
    for other in ("<user>a\n<assistant> yes \nand", "<user>a\n<assistant>no<eos>\n<user>b\n<assistant>"):
        await scene.post(other, route="completions")
        assert scene.prompts[-1] == other
    assert [len(own) for own in scene.sequences()] == [2, 1, 1]


@in_scene()
async def test_a_prompt_of_ids_is_given_as_it_is(scene: Scene) -> None:
    ids = scene.tokenizer("ab")["input_ids"]
    await scene.post([ids], route="completions")
    more = [*ids, *scene.chats.turns()[0].token_ids.tolist(), *ids]
    await scene.post(more, route="completions")
    assert scene.seen == [ids, more]
    assert [turn.context_ids.tolist() for turn in scene.chats.turns()] == [ids, ids]


@in_scene()
async def test_openais_client_asks_for_text_completions_also_as_a_stream(scene: Scene) -> None:
    from openai import AsyncOpenAI, BadRequestError

    async with AsyncOpenAI(base_url=scene.endpoint.base_url, api_key=scene.key) as client:
        whole = await client.completions.create(model="x", prompt="a", max_tokens=2, temperature=0.5, logprobs=0)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("ye", "length")
        assert whole.choices[0].logprobs is not None
        assert whole.choices[0].logprobs.tokens == ["y", "e"]
        stream = await client.completions.create(model="x", prompt="a", stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert [(own.text, own.finish_reason) for own in chunks] == [("yes", None), ("", "stop")]
        with pytest.raises(BadRequestError, match="best_of = 3, echo = true cannot"):
            await client.completions.create(model="x", prompt="a", best_of=3, echo=True)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (["a", "b"], "one prompt per request"),
        ([], "must be a text"),
        ([1, "a"], "must be a text"),
        (None, "must be a text"),
        ("", "no token"),
        ("\ud83d", "half of a character"),
        ([1, -1], "token id -1 is outside"),
        ([10**30], "is outside the tokenizer's vocabulary"),
    ],
)
@in_scene()
async def test_a_prompt_that_no_model_is_given_is_refused(scene: Scene, prompt: Any, told: str) -> None:
    status, body = await scene.post(prompt, route="completions")
    assert (status, scene.chats.turns()) == (400, ())
    assert told in body["error"]["message"]


@in_scene()
async def test_messages_without_a_token_are_refused(scene: Scene) -> None:
    scene.chats.dialogue = Dialogue(scene.tokenizer, PromptStyle("plain", "{prompt}", None, None, {}))
    status, body = await scene.post([user("")])
    assert (status, "no token" in body["error"]["message"], scene.seen) == (400, True, [])


@in_scene()
async def test_garbage_floods_large_bodies_and_wrong_keys_are_refused(scene: Scene) -> None:
    garbage = [scene.post(b"{" * 100_000) for _ in range(50)]
    assert {status for status, _ in await asyncio.gather(*garbage)} == {400}
    assert (await scene.post(b"x" * (50 << 20)))[0] == 413
    for key in ("", "sk-", f"sk-{'0' * 48}", scene.key[:-1], f"{scene.key}0", "sk-\u00e9"):
        status, body = await scene.post([user("a")], key=key.encode().decode("latin-1"))
        assert (status, body["error"]["code"]) == (401, "invalid_api_key"), key
    assert scene.chats.turns() == ()
    scene.endpoint.close(scene.key)
    assert (await scene.post([user("a")]))[0] == 401


@pytest.mark.parametrize(
    ("limits", "code"), [({"max_turns": 1}, "episode_ended"), ({"max_tokens": 4}, "context_length_exceeded")]
)
@in_scene()
async def test_behind_its_limit_an_episode_is_cut_and_requests_are_refused(
    scene: Scene, limits: dict[str, int], code: str
) -> None:
    first = await scene.say([user("a")], max_tokens=100)
    assert not scene.chats.is_cut
    status, body = await scene.post([user("a"), first, user("b")])
    assert (status, body["error"]["code"], scene.chats.is_cut) == (400, code, True)


@in_scene(max_turns=1)
async def test_an_answer_to_a_request_before_does_not_undo_that_a_later_one_was_cut(scene: Scene) -> None:
    scene.gate = asyncio.Event()
    first = asyncio.create_task(scene.post([user("a")]))
    while not scene.chats._num_open:
        await asyncio.sleep(0.01)
    status, _ = await scene.post([user("b")])
    scene.gate.set()
    assert (status, (await first)[0], scene.chats.is_cut) == (400, 200, True)


@in_scene()
async def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_encoded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Dialogue, "encode_prompt", lambda *_: pytest.fail("it was encoded"))
    status, body = await scene.post([user("word " * 3_000_000)])
    assert (status, body["error"]["code"], scene.chats.is_cut) == (400, "context_length_exceeded", True)
    assert "your messages have 150000" in body["error"]["message"]


@in_scene(max_tokens=3)
async def test_max_tokens_caps_an_answer_and_never_lifts_the_limit(scene: Scene) -> None:
    await scene.say([user("a")], max_completion_tokens=2)
    _, body = await scene.post([user("b")], max_tokens=500)
    assert scene.mays == [2, 3]
    assert (body["choices"][0]["message"]["content"], body["choices"][0]["finish_reason"]) == ("yes", "length")


@in_scene(max_tokens=20)
async def test_an_agent_that_shortens_its_history_goes_on_after_a_refusal(scene: Scene) -> None:
    first = await scene.say([user("a")])
    status, _ = await scene.post([user("a"), first, user("b" * 30)])
    await scene.say([user("b")])
    assert (status, scene.chats.is_cut) == (400, False)
