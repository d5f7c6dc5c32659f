"""Plays the episodes of an engine: gets a turn from vLLM, an answer from the environment, and so on until the end.

Runs in the engine's process, on the actor's event loop. Who waits for whom:

    driver ── GroupRequest ─► EpisodePlayer ── CompletionRequest ─► StepLoop (thread): vLLM, in batches
                                   │  ▲                                 │
                                   │  └───────── Completion ◄───────────┘
                                   │ text                                      of each turn, ids do not change
                                   ▼
                              environment's process (episodes/host.py) ── messages, reward ─► EpisodePlayer

An agent plays by itself instead: its process asks for turns over HTTP (endpoint.py), and its messages are matched to
the ids of earlier turns (chats.py).

A single answer is an episode of one turn without an environment. While an environment works, the engine samples the
turns of other episodes. A synchronous run plays in waves: when the last environment has answered, turn k of all
episodes is queued at once, in their order. A resumed run then forms the same batches, and samples the same bits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from hpc_grpo.config import Config
from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.data.order import sampling_seed
from hpc_grpo.data.templates import PromptTemplate, Tokenizer, prompt_style
from hpc_grpo.engine.chats import Chats
from hpc_grpo.engine.endpoint import Endpoint
from hpc_grpo.episodes.dialogue import Dialogue
from hpc_grpo.episodes.workers import Answer, EnvironmentFailedError, EnvironmentLostError, EnvironmentWorkers, Session
from hpc_grpo.types import Completion, CompletionRequest, Episode, GroupRequest, GroupSamples, Turn

if TYPE_CHECKING:
    from hpc_grpo.types import Int32Array

_MAX_SUSPECTED = 3
"""Limit of process ends during an episode's own call: at the third the episode is the probable cause."""
_MAX_LOSSES = 30
"""Limit of restarts of an episode: one bad episode ends its process, and with it the sessions of other episodes."""

Ask = Callable[[CompletionRequest], Awaitable[Completion]]
Sample = Callable[[Sequence[CompletionRequest]], Awaitable[Sequence[Future[Completion]]]]


class EpisodePlayer:
    """Plays the groups of an engine. `sample` queues completions at once, in the given order."""

    def __init__(self, config: Config, tokenizer: Tokenizer | None, sample: Sample) -> None:
        """The tokenizer is needed if the run has environments."""
        self._sample, self._in_waves = sample, config.rollout.max_policy_lag == 0
        self._playing: set[asyncio.Task[GroupSamples]] = set()
        self._waves = WeakSet[_Wave]()
        self._endpoint = Endpoint(config.model.path, config.max_model_len)
        self._stages = [_Stage(config, *own, tokenizer, self._endpoint) for own in config.environments.values()]

    def start(self, requests: Sequence[GroupRequest]) -> list[asyncio.Task[GroupSamples]]:
        """Play all groups. Without waves, episodes with an environment queue their turns independently."""
        import numpy as np

        wave, tasks = _Wave(self._sample), []
        self._waves.add(wave)
        for request in requests:
            prompt_ids = np.asarray(request.prompt_token_ids, dtype=np.int32)  # one array for all, so stored once
            episodes = [
                self._episode(
                    request, prompt_ids, index, wave.seat() if self._in_waves or request.scene is None else None
                )
                for index in range(len(request.seeds))
            ]
            tasks.append(asyncio.create_task(_group(request, episodes)))
        self._playing.update(tasks)
        for task in tasks:
            task.add_done_callback(self._playing.discard)
        return tasks

    def end_all(self) -> None:
        """End all episodes and their environments' processes. The next episode starts new processes.

        Episodes with running completions end with these completions: the caller ends them.
        """
        for wave in self._waves:
            wave.end()
        for task in self._playing:
            task.cancel()
        for stage in self._stages:
            stage.close()
        self._endpoint.stop()

    async def _episode(self, request: GroupRequest, prompt_ids: Int32Array, index: int, seat: _Seat | None) -> Episode:
        """Play one episode. Restart it if the process of its environment is lost."""
        try:
            ask = self._ask_alone if seat is None else seat.ask
            if request.scene is None:
                completion = await ask(_completion_request(request, index, request.prompt_token_ids))
                if completion.prompt_token_ids is not None:
                    prompt_ids = completion.prompt_token_ids
                return Episode((_turn(prompt_ids, completion, starts_anew=True),), completion.finish_reason)
            losses: list[EnvironmentLostError] = []
            while len(losses) < _MAX_LOSSES and sum(loss.is_suspect for loss in losses) < _MAX_SUSPECTED:
                try:
                    return await self._stages[request.scene.environment].play(request, index, ask)
                except EnvironmentLostError as error:
                    losses.append(error)
            return Episode((), "stop", f"{losses[-1]}; its process was lost {len(losses)} times")
        finally:
            if seat is not None:
                seat.leave()

    async def _ask_alone(self, request: CompletionRequest) -> Completion:
        async def sampled() -> Completion:
            [future] = await self._sample([request])
            return await asyncio.wrap_future(future)

        return await _to_its_end(sampled())


class _Stage:
    """One environment with its processes, and the template of its source."""

    def __init__(
        self, config: Config, source: Any, environment: EnvironmentConfig, tokenizer: Any, endpoint: Endpoint
    ) -> None:
        self._endpoint = endpoint
        self._environment, self._max_prompt_tokens = environment, config.data.max_prompt_tokens
        self._template = PromptTemplate(config.data, source, tokenizer)
        self._dialogue = Dialogue(tokenizer, prompt_style(config.data, source))
        self._workers = EnvironmentWorkers(environment)

    def close(self) -> None:
        self._workers.close()

    async def play(self, request: GroupRequest, index: int, ask: Ask) -> Episode:
        """Play one episode. An error of its environment ends the episode and is its `failure`.

        Raises EnvironmentLostError.
        """
        scene = request.scene
        assert scene is not None
        turns: list[Turn] = []
        metrics = {"env_s": 0.0}
        session = None
        try:
            session, answer = await self._workers.reset(scene.row, scene.seed)
            if answer is None:
                return await self._play_agent(session, request, index, ask)
            messages = answer.messages or self._template.messages(scene.row, request.ordinal)
            with _refusals():
                conversation = self._dialogue.begin(messages, answer.tools)
            context, num_first = conversation.context, len(conversation.prompt)
            if num_first > self._max_prompt_tokens:
                raise EnvironmentFailedError(
                    f"reset gave a prompt of {num_first} tokens, more than data.max_prompt_tokens = "
                    f"{self._max_prompt_tokens}"
                )
            while True:
                left = self._environment.max_tokens - (len(conversation.prompt) - num_first)
                if left <= 0:
                    return Episode(tuple(turns), "length", metrics=metrics)
                completion = await ask(_completion_request(request, index, conversation.prompt, len(turns), left))
                sampled = completion.token_ids.tolist()
                begun = time.monotonic()
                answer = await session.step(self._dialogue.text_of(sampled))
                metrics["env_s"] += time.monotonic() - begun
                turns.append(_turn(context.token_ids, completion, answer.reward, starts_anew=context.starts_anew))
                metrics |= {name: metrics.get(name, 0.0) + value for name, value in answer.metrics.items()}
                if answer.done or len(turns) == self._environment.max_turns:
                    is_whole = answer.done and completion.finish_reason == "stop"
                    return Episode(tuple(turns), "stop" if is_whole else "length", metrics=metrics)
                with _refusals():
                    context = conversation.go_on(sampled, answer.messages)
                if not len(context.token_ids):
                    raise EnvironmentFailedError("step gave an observation without a token")
        except EnvironmentFailedError as error:
            return Episode(tuple(turns), "stop", failure=str(error), metrics=metrics)
        finally:
            if session is not None:
                session.end()

    async def _play_agent(self, session: Session, request: GroupRequest, index: int, ask: Ask) -> Episode:
        """Let an agent play one episode. An exception of the agent after a limit does not count as its failure.

        Raises EnvironmentLostError, and errors of the engine.
        """
        scene = request.scene
        assert scene is not None
        chats = Chats(
            self._dialogue,
            self._environment,
            self._max_prompt_tokens,
            lambda prompt, turn, most: ask(_completion_request(request, index, prompt, turn, most)),
        )
        key = await self._endpoint.open(lambda: chats)
        args = scene.row, scene.seed, self._endpoint.base_url, key
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
        if not turns:
            failure = failure or "play ended without a completion of the model"
        is_whole = not chats.is_cut and bool(turns) and turns[-1].completion.finish_reason == "stop"
        return Episode(turns, "stop" if is_whole or failure else "length", failure, answer.metrics)


class _Wave:
    """Collects the turns of a wave until each running episode has asked, and queues them in the episodes' order."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._asked: dict[int, tuple[CompletionRequest, asyncio.Future[Future[Completion]]]] = {}
        self._num_seats = self._num_taken = 0
        self._queueing: asyncio.Task[None] | None = None

    def seat(self) -> _Seat:
        self._num_seats += 1
        self._num_taken += 1
        return _Seat(self, self._num_taken)

    async def ask(self, place: int, request: CompletionRequest) -> Completion:
        queued: asyncio.Future[Future[Completion]] = asyncio.get_running_loop().create_future()
        self._asked[place] = request, queued
        self._queue_if_all_asked()

        async def sampled() -> Completion:
            return await asyncio.wrap_future(await queued)

        def withdraw() -> None:
            if self._asked.pop(place, None) is not None:
                queued.cancel()

        return await _to_its_end(sampled(), withdraw)

    def leave(self) -> None:
        self._num_seats -= 1
        self._queue_if_all_asked()

    def end(self) -> None:
        """Queue none of the collected turns."""
        for _, queued in self._asked.values():
            queued.cancel()
        self._asked.clear()

    def _queue_if_all_asked(self) -> None:
        if self._asked and len(self._asked) == self._num_seats:
            asked, self._asked = [self._asked[place] for place in sorted(self._asked)], {}
            self._queueing = asyncio.create_task(self._queue(asked))

    async def _queue(self, asked: Sequence[tuple[CompletionRequest, asyncio.Future[Future[Completion]]]]) -> None:
        try:
            sampling = await self._sample([request for request, _ in asked])
        except Exception as error:  # noqa: BLE001 - raised by each episode that waits
            for _, queued in asked:
                if not queued.cancelled():
                    queued.set_exception(error)
        else:
            for (_, queued), own in zip(asked, sampling, strict=True):
                if not queued.cancelled():
                    queued.set_result(own)


class _Seat:
    """An episode's place in a wave."""

    def __init__(self, wave: _Wave, place: int) -> None:
        self._wave, self._place = wave, place
        self._turn = asyncio.Lock()

    async def ask(self, request: CompletionRequest) -> Completion:
        """Sample a completion. Parallel requests of an agent take turns."""
        async with self._turn:
            return await self._wave.ask(self._place, request)

    def leave(self) -> None:
        self._wave.leave()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn the ValueError for messages that the template refuses into EnvironmentFailedError."""
    try:
        yield
    except ValueError as error:
        raise EnvironmentFailedError(str(error)) from error


async def _to_its_end(
    sampling: Coroutine[Any, Any, Completion], withdraw: Callable[[], None] = lambda: None
) -> Completion:
    """Wait for a completion; once the engine has it, even where it is cancelled: it would be in the next batches."""
    task = asyncio.create_task(sampling)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        withdraw()
        await asyncio.wait([task])
        raise


async def _group(request: GroupRequest, episodes: Sequence[Awaitable[Episode]]) -> GroupSamples:
    """Play the episodes of a group; where one raises, end the others."""
    playing = [asyncio.ensure_future(episode) for episode in episodes]
    try:
        return GroupSamples(request.ordinal, tuple(await asyncio.gather(*playing)), request.images)
    finally:
        for episode in playing:
            episode.cancel()


def _completion_request(
    request: GroupRequest, index: int, prompt: Sequence[int], turn: int = 0, most: int | None = None
) -> CompletionRequest:
    """Make the request of a turn, of at most so many tokens. Each turn of an episode has a seed of its own."""
    sampling, seed = request.sampling, request.seeds[index]
    if most is not None and most < sampling.max_new_tokens:
        sampling = replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))
    if turn:
        seed = sampling_seed(seed, request.ordinal, index, turn)
    return CompletionRequest(request.ordinal, prompt, seed, sampling, request.is_urgent, request.images)


def _turn(
    context_ids: Sequence[int] | Int32Array, completion: Completion, reward: float = 0.0, *, starts_anew: bool
) -> Turn:
    import numpy as np

    return Turn(np.asarray(context_ids, dtype=np.int32), completion, starts_anew, reward)
