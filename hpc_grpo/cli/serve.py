"""The command `serve`: an OpenAI-compatible server with an engine in this process, without Ray."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

import click

from hpc_grpo.cli.evaluate import as_overrides, find_subject, with_options
from hpc_grpo.cli.options import SET, echo
from hpc_grpo.config import Config, with_overrides
from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.errors import ConfigError, LaunchError, PromptError, described
from hpc_grpo.run.evals import sample_config
from hpc_grpo.run.paths import RunDir


@click.command()
@with_options
@SET
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Default: any free port.")
def serve(target: str, sets: tuple[str, ...], host: str, port: int, folder: Any, **options: Any) -> None:
    """Serve a run's export, or any model, to OpenAI clients.

    Prints OPENAI_BASE_URL and OPENAI_API_KEY, and serves until Ctrl+C, or until the engine fails. Does not encrypt:
    to use it from another machine, forward the port by ssh.
    """
    subject = find_subject(target, options, data=("-",))
    os.chdir(subject.working_dir)
    config = sample_config(subject.config, RunDir((folder or subject.folder) / "serve"), subject.first_model, "-", None)
    config = with_overrides(config, [*as_overrides(config, options), *sets])
    try:
        asyncio.run(_serve(config, host, port))
    except KeyboardInterrupt:
        sys.exit(130)


async def _serve(config: Config, host: str, port: int) -> None:
    from hpc_grpo.data.stream import sampling_seed
    from hpc_grpo.data.templates import prompt_style
    from hpc_grpo.data.tokenizer import load_tokenizer, stop_token_ids
    from hpc_grpo.engine.vllm import engine_environment
    from hpc_grpo.template.environment import uses_cuda

    on_gpu = uses_cuda(config)
    os.environ |= engine_environment(config, on_gpu=on_gpu)  # before vLLM is imported
    from hpc_grpo.engine.actor import StepLoop
    from hpc_grpo.engine.endpoint import Chats, Endpoint, RefusedError
    from hpc_grpo.engine.sampler import Sampler
    from hpc_grpo.engine.vllm import start_vllm
    from hpc_grpo.episodes.dialogue import Dialogue
    from hpc_grpo.types import Completion, GroupRequest

    tokenizer = load_tokenizer(config)
    stop_ids, numbers = stop_token_ids(config, tokenizer), itertools.count()
    (_, source), *_ = config.data.sources(for_eval=True)
    dialogue = Dialogue(tokenizer, prompt_style(config.data, source))
    settings, longest = config.eval_settings(""), config.rollout.max_new_tokens
    assert settings.top_p is not None, "eval_settings resolves it"
    sampling = config.rollout.sampling(settings.temperature, settings.top_p)
    limits = EnvironmentConfig(name="serve", max_turns=1, max_tokens=longest)
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    endpoint = Endpoint(config.model.path, config.max_model_len)
    try:
        await endpoint.start(host, port)
    except OSError as error:
        raise ConfigError(f"--host = {host}, --port = {port}: {error.strerror}. Give others.") from error
    with redirect_stdout(sys.stderr):  # vLLM prints to stdout
        adapter = config.model.adapter
        loop = StepLoop(lambda: Sampler(start_vllm(config, on_gpu=on_gpu, reads_weights=True), stop_ids, adapter))
        await asyncio.to_thread(loop.wait_ready)

    async def ask(prompt: Sequence[int], turn: int, most: int) -> Completion:
        number = next(numbers)
        own = replace(sampling, max_new_tokens=most, min_new_tokens=min(most, sampling.min_new_tokens))
        request = GroupRequest(number, prompt, (sampling_seed(config.run.seed, number, 0, turn),), own)
        try:
            [future] = await asyncio.wrap_future(loop.call(lambda sampler: sampler.add([request]), drains=False))
            return await asyncio.wrap_future(future)
        except PromptError as error:
            raise RefusedError(str(error)) from error

    def chats() -> Chats:
        own = Chats(dialogue, limits, config.data.max_prompt_tokens, ask)
        own.broken = broken  # each request has new Chats; all report to one future
        return own

    key = await endpoint.open(chats)
    echo(f"OPENAI_BASE_URL={endpoint.base_url}\nOPENAI_API_KEY={key}")
    try:
        await broken
    except Exception as error:  # whatever the engine raised
        raise LaunchError(
            f"The engine has failed, and no request can be answered: {described(error)}. The lines above are the "
            f"engine's. Start the server again by the same command."
        ) from error
