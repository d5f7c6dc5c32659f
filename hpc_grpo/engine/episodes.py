"""Plays the episodes of an engine: asks vLLM and the environment in turn until an episode ends.

Runs in the engine's process, on the actor's event loop. Who waits for whom:

    driver ── GroupRequest ─► EpisodePlayer ── GroupRequest ─────► StepLoop (thread): vLLM, in batches
                                   │  ▲                                 │
                                   │  └───────── Completion ◄───────────┘
                                   │ text                                      of each turn; its ids are kept
                                   ▼
                              environment's process (episodes/host.py) ── messages, reward ─► EpisodePlayer

With an agent, the agent's process asks for turns over HTTP instead, and its messages are matched to the ids of
earlier turns (endpoint.py).

A single answer is an episode of one turn without an environment. While an environment works, the engine samples the
turns of other episodes. A synchronous run plays in waves: when the last environment has answered, turn k of all
episodes is queued at once, in the episodes' order. So a resumed run forms the same batches and samples the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from hpc_grpo.config import Config
from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.data.images import with_opened_images
from hpc_grpo.data.stream import sampling_seed
from hpc_grpo.data.templates import ChatTemplateError, PromptTemplate, Tokenizer, prompt_style
from hpc_grpo.engine.endpoint import Ask, Chats, Endpoint
from hpc_grpo.episodes.dialogue import Dialogue
from hpc_grpo.episodes.workers import Answer, EnvironmentFailedError, EnvironmentLostError, EnvironmentWorkers, Session
from hpc_grpo.types import Completion, Episode, GroupRequest, GroupSamples

_MAX_SUSPECTED = 3
"""An episode fails if this many processes ended during its own calls: it is the probable cause."""
_MAX_LOSSES = 30
"""An episode fails if it lost this many processes. Other episodes of a process may have been the cause."""

Sample = Callable[[Sequence[GroupRequest]], Awaitable[Sequence[Future[Completion]]]]
"""Queues a completion for each request, at once and in the given order."""


class EpisodePlayer:
    """Plays the groups of an engine."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None, sample: Sample) -> None:
        """`tokenizer` may be None without environments."""
        self._sample, self._in_waves = sample, config.rollout.max_policy_lag == 0
        self._playing: dict[asyncio.Task[GroupSamples], _Wave] = {}
        self._endpoint = Endpoint(config.model.path, config.max_model_len)
        self._stages = [_Stage(config, *own, tokenizer, self._endpoint) for own in config.environments.values()]

    def start(self, requests: Sequence[GroupRequest]) -> list[asyncio.Task[GroupSamples]]:
        """Play all groups. Without waves, episodes with an environment queue their turns independently."""
        wave, tasks = _Wave(self._sample), []
        for request in requests:
            if request.environment is None:
                playing = self._answers(request, wave, wave.join())
            else:
                waves = [wave if self._in_waves else _Wave(self._sample) for _ in request.seeds]
                seats = [(own, own.join()) for own in waves]
                playing = self._episodes(request, self._stages[request.environment], seats)
            tasks.append(asyncio.create_task(playing))
            self._playing[tasks[-1]] = wave
            tasks[-1].add_done_callback(self._playing.pop)
        return tasks

    def end_all(self) -> None:
        """Cancel all episodes and kill their environments' processes. The next episode starts new processes.

        An episode ends only after its running completion. The caller must abort this completion.
        """
        for task, wave in self._playing.items():
            wave.end()
            task.cancel()
        for stage in self._stages:
            stage.workers.close()
        self._endpoint.stop()

    async def _answers(self, request: GroupRequest, wave: _Wave, place: int) -> GroupSamples:
        """Sample a group of single answers, all in one turn of the wave."""
        try:
            opened = await with_opened_images(request) if request.images else request
            answers = await wave.ask(place, [replace(opened, seeds=(seed,)) for seed in request.seeds])
        finally:
            wave.leave()
        ids = np.asarray(request.prompt_token_ids, dtype=np.int32)  # one array for the group: pickled once
        turns = [own if len(own.context_ids) else replace(own, context_ids=ids) for own in answers]
        episodes = tuple(Episode((turn,), turn.finish_reason) for turn in turns)
        return GroupSamples(request.ordinal, episodes, request.images)

    async def _episodes(self, request: GroupRequest, stage: _Stage, seats: Sequence[tuple[_Wave, int]]) -> GroupSamples:
        """Play the episodes of a group. If one raises, end the others."""
        playing = [asyncio.ensure_future(self._episode(request, stage, i, *own)) for i, own in enumerate(seats)]
        try:
            return GroupSamples(request.ordinal, tuple(await asyncio.gather(*playing)))
        finally:
            for episode in playing:
                episode.cancel()

    async def _episode(self, request: GroupRequest, stage: _Stage, index: int, wave: _Wave, place: int) -> Episode:
        """Play one episode. Restart it if the process of its environment is lost.

        After too many losses, return an episode without turns and with a `failure`.
        """
        one_by_one: Any = asyncio.Lock() if self._in_waves else contextlib.nullcontext()

        async def ask(prompt: Sequence[int], turn: int, most: int) -> Completion:
            """Sample a turn of at most `most` tokens. In a synchronous run, an agent's requests run one by one."""
            sampling, seed = request.sampling, request.seeds[index]
            if most < sampling.max_new_tokens:
                sampling = replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))
            if turn:
                seed = sampling_seed(seed, request.ordinal, index, turn)
            own = GroupRequest(request.ordinal, prompt, (seed,), sampling, request.is_urgent)
            async with one_by_one:
                return (await wave.ask(place, [own]))[0]

        try:
            losses: list[EnvironmentLostError] = []
            while len(losses) < _MAX_LOSSES and sum(loss.is_suspect for loss in losses) < _MAX_SUSPECTED:
                try:
                    return await stage.play(request, ask)
                except EnvironmentLostError as error:
                    losses.append(error)
            return Episode((), "stop", f"{losses[-1]}; its environment's process was lost {len(losses)} times")
        finally:
            wave.leave()


class _Stage:
    """One environment with its processes, and the template of its source."""

    def __init__(
        self, config: Config, source: Any, environment: EnvironmentConfig, tokenizer: Any, endpoint: Endpoint
    ) -> None:
        self._endpoint = endpoint
        self._environment, self._max_prompt_tokens = environment, config.data.max_prompt_tokens
        self._template = PromptTemplate(config.data, source, tokenizer)
        self._dialogue = Dialogue(tokenizer, prompt_style(config.data, source))
        self.workers = EnvironmentWorkers(environment)

    async def play(self, request: GroupRequest, ask: Ask) -> Episode:
        """Play one episode. An error of the environment ends the episode and becomes the episode's `failure`.

        Raises EnvironmentLostError if the environment's process ends.
        """
        turns: list[Completion] = []
        metrics = {"env_s": 0.0}
        session = None
        try:
            session, answer = await self.workers.reset(request.row, request.environment_seed)
            if answer is None:
                return await self._play_agent(session, request, ask)
            messages = answer.messages or self._template.messages(request.row, request.ordinal)
            conversation = self._dialogue.begin(messages, answer.tools)
            longest = conversation.num_first + self._environment.max_tokens
            if conversation.num_first > self._max_prompt_tokens:
                raise EnvironmentFailedError(
                    f"reset gave a prompt of {conversation.num_first} tokens, more than data.max_prompt_tokens = "
                    f"{self._max_prompt_tokens}"
                )
            while (left := longest - len(conversation.prompt)) > 0:
                completion = await ask(conversation.prompt, len(turns), left)
                sampled = completion.token_ids.tolist()
                begun = time.monotonic()
                answer = await session.step(self._dialogue.text_of(sampled))
                metrics["env_s"] += time.monotonic() - begun
                ids, starts_anew = np.asarray(conversation.context_ids, np.int32), conversation.starts_anew
                turns.append(replace(completion.as_turn(ids, starts_anew=starts_anew), reward=answer.reward))
                metrics |= {name: metrics.get(name, 0.0) + value for name, value in answer.metrics.items()}
                if answer.done or len(turns) == self._environment.max_turns:
                    is_whole = answer.done and completion.finish_reason == "stop"
                    return Episode(tuple(turns), "stop" if is_whole else "length", metrics=metrics)
                conversation.go_on(sampled, answer.messages)
                if not conversation.context_ids:
                    raise EnvironmentFailedError("step gave an observation without a token")
            return Episode(tuple(turns), "length", metrics=metrics)
        except (EnvironmentFailedError, ChatTemplateError) as error:
            return Episode(tuple(turns), "stop", failure=str(error), metrics=metrics)
        finally:
            if session is not None:
                session.end()

    async def _play_agent(self, session: Session, request: GroupRequest, ask: Ask) -> Episode:
        """Let an agent play one episode. If a limit has refused its last request, its exception is no failure.

        Raises EnvironmentLostError, and errors of the engine.
        """
        chats = Chats(self._dialogue, self._environment, self._max_prompt_tokens, ask)
        key = await self._endpoint.open(lambda: chats)
        args = request.row, request.environment_seed, self._endpoint.base_url, key
        playing = asyncio.ensure_future(session.call("play", *args, left_s=chats.left_s))
        try:
            ends: list[asyncio.Future[Any]] = [playing, chats.broken]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if chats.broken.done():
                chats.broken.result()
            answer, failure = await playing, ""
        except EnvironmentFailedError as error:
            answer, failure = Answer([]), "" if chats.is_cut else str(error)
        finally:
            playing.cancel()
            self._endpoint.close(key)
            await chats.close()
        turns = chats.turns(answer.reward)
        failure = failure or ("" if turns else "play ended without a completion of the model")
        is_whole = failure or (not chats.is_cut and turns[-1].finish_reason == "stop")
        return Episode(turns, "stop" if is_whole else "length", failure, answer.metrics)


class _Wave:
    """Waits until all who play have asked for a turn, then queues these turns in the order in which they joined."""

    def __init__(self, sample: Sample) -> None:
        self._sample, self._num_playing = sample, 0
        self._asked: dict[int, Sequence[GroupRequest]] = {}
        self._queued: asyncio.Future[dict[int, list[Future[Completion]]]] = asyncio.Future()

    def join(self) -> int:
        """Add an episode, or a group of single answers. Return its place. All join before one leaves."""
        self._num_playing += 1
        return self._num_playing

    def leave(self) -> None:
        self._num_playing -= 1
        self._queue_if_all_asked()

    def end(self) -> None:
        """Cancel the collected turns instead of queueing them."""
        self._queued.cancel()
        self._asked.clear()

    async def ask(self, place: int, requests: Sequence[GroupRequest]) -> list[Completion]:
        """Ask for the turn of `place`, and return its completions.

        If cancelled after the engine has the requests, first waits for the completions: the engine still samples them.
        """
        self._asked[place], queued = requests, self._queued
        self._queue_if_all_asked()
        try:
            sampling = (await asyncio.shield(queued))[place]
            return await asyncio.gather(*map(asyncio.wrap_future, sampling))
        except asyncio.CancelledError:
            if queued is self._queued:
                self._asked.pop(place, None)
            else:
                await asyncio.wait([asyncio.wrap_future(own) for own in (await asyncio.shield(queued))[place]])
            raise

    def _queue_if_all_asked(self) -> None:
        if self._asked and len(self._asked) == self._num_playing:
            self._queueing = asyncio.create_task(self._queue(self._asked, self._queued))
            self._asked, self._queued = {}, asyncio.Future()

    async def _queue(self, asked: Mapping[int, Sequence[GroupRequest]], queued: asyncio.Future[Any]) -> None:
        places = sorted(asked)
        try:
            sampling = iter(await self._sample([request for place in places for request in asked[place]]))
            queued.set_result({place: [next(sampling) for _ in asked[place]] for place in places})
        except Exception as error:  # noqa: BLE001 - each `ask` that waits raises it
            queued.set_exception(error)
