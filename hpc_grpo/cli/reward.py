"""The commands that test or serve a reward without training, with the worker pool of training."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_grpo.cli.options import JSON, PlainGroup, echo, echo_json, together
from hpc_grpo.cli.request import load_request
from hpc_grpo.config import RewardConfig
from hpc_grpo.config.yaml_text import read_value
from hpc_grpo.data.stream import reward_fields
from hpc_grpo.errors import ConfigError, RewardError
from hpc_grpo.registry import REWARDS
from hpc_grpo.system.proof import LEAST_TOKEN_LENGTH
from hpc_grpo.system.readable import table

if TYPE_CHECKING:
    from hpc_grpo.grading.pool import RewardOutcome, RewardPool

_SETTINGS = together(
    click.option(
        "--arg", "args", multiple=True, metavar="KEY=VALUE",
        help="An argument of the reward, as in rewards.N.args; YAML.",
    ),
    click.option(
        "--pass-env", "pass_env", multiple=True, metavar="VARIABLE",
        help="A secret environment variable that the reward reads. The reward gets no other secrets.",
    ),
    click.option(
        "--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True, metavar="S",
        help="Deadline of one call, in seconds.",
    ),
)  # fmt: skip


@click.group(cls=PlainGroup)
def reward() -> None:
    """Try a reward without training, or host it."""


@reward.command()
@click.argument("name")
@click.option("--prompt", required=True, metavar="TEXT")
@click.option("--completion", "completions", multiple=True, required=True, metavar="TEXT", help="Several form a group.")
@click.option("--answer", metavar="TEXT", help="The column `answer`, as text.")
@click.option("--field", "fields", multiple=True, metavar="NAME=VALUE", help="Another column, as YAML: 76 is a number.")
@_SETTINGS
@JSON
def test(
    name: str,
    prompt: str,
    completions: tuple[str, ...],
    answer: str | None,
    fields: tuple[str, ...],
    as_json: bool,
    **settings: Any,
) -> None:
    """Score completions of one prompt by the reward NAME: a built-in, module:function or path/to/file.py:function.

    If the reward fails or breaks its contract, prints the error and exits with 78.
    """
    columns = _pairs("--field", fields) | ({} if answer is None else {"answer": answer})
    with _opened(_rewards(name, None, **settings)[0], num_workers=1) as pool:
        outcome = pool.submit(prompt, completions, columns).result()
    if outcome.errors:
        raise RewardError("\n".join(outcome.errors))
    if as_json:
        echo_json(_facts(outcome))
        return
    for reason in filter(None, outcome.over_budget):
        echo(f"Over its budget: {reason}.", err=True)
    for score, completion in zip(outcome.rewards, completions, strict=True):
        echo(f"{score:10.6g}  {completion.strip().splitlines()[-1] if completion.strip() else '(empty)'}")


@reward.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--reward", "name", metavar="NAME", help="Score by this reward.")
@click.option("--config", "rewards_of", metavar="CONFIG", help="Score by the rewards of data.train in this config.")
@_SETTINGS
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True, metavar="N")
@JSON
def score(file: Path, name: str | None, rewards_of: str | None, workers: int, as_json: bool, **settings: Any) -> None:
    """Score the lines of FILE: JSON with `prompt`, `completion` (or a list `completions`) and the data's columns.

    A line is a group, as in training. Counts and shows failures. Exits with 78 if a reward breaks its contract.
    """
    rewards, answer_fields = _rewards(name, rewards_of, **settings)
    if not (rows := list(_rows(file, answer_fields))):
        raise ConfigError(f"{file} is empty. It must hold one line or more, with prompt and completion.")
    with _opened(rewards, workers) as pool:
        outcomes = [pool.submit(prompt, completions, columns) for prompt, completions, columns in rows]
        scored = [outcome.result() for outcome in outcomes]
    if as_json:
        echo_json([_facts(outcome) for outcome in scored])
    else:
        _show_summary(scored)


@reward.command()
@click.option("--reward", "name", metavar="NAME", help="Host this reward.")
@click.option("--config", "rewards_of", metavar="CONFIG", help="Host the rewards of data.train, as their sum.")
@_SETTINGS
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: every interface.")
@click.option("--port", type=click.IntRange(0, 65535), default=8200, show_default=True, help="0: any free port.")
@click.option("--workers", type=click.IntRange(1), default=4, show_default=True, metavar="N")
@click.option("--token-env", default="HPC_GRPO_REWARD_TOKEN", show_default=True, metavar="VARIABLE")
def serve(
    name: str | None, rewards_of: str | None, host: str, port: int, workers: int, token_env: str, **settings: Any
) -> None:
    """Host rewards over HTTP, for the reward `remote` of runs elsewhere. Ends on SIGTERM and SIGINT.

    --token-env names the environment variable with the token. Callers need the same token (`args.token_env`).
    """
    from hpc_grpo.grading.server import RewardServer

    rewards, _ = _rewards(name, rewards_of, **settings)
    if len(token := os.environ.get(token_env, "")) < LEAST_TOKEN_LENGTH:
        found = f"has {len(token)} characters" if token else "is not set"
        raise ConfigError(
            f"{token_env} {found}; it must have at least {LEAST_TOKEN_LENGTH} characters: a reward server executes "
            f"code for everybody who reaches {host}. Set it to the token of the runs, for example to the output of "
            f"openssl rand -hex 16."
        )
    with _opened(rewards, workers) as pool:
        try:
            server = RewardServer((host, port), pool, token)
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: {error.strerror}. Take another port.") from error
        with server:
            for number in (signal.SIGTERM, signal.SIGINT):
                # In a thread: shutdown waits for serve_forever, which the main thread runs.
                signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
            echo(f"Serving on http://{host}:{server.server_address[1]}")
            server.serve_forever(poll_interval=0.1)


def _facts(outcome: RewardOutcome) -> dict[str, Any]:
    return {name: getattr(outcome, name) for name in ("rewards", "parts", "errors", "over_budget")}


def _show_summary(scored: Sequence[RewardOutcome]) -> None:
    """Print the mean of each reward over the scored lines, and the errors of the other lines."""
    good = [outcome for outcome in scored if not outcome.errors]
    parts = scored[0].parts
    rows = [(label, *_statistics([value for outcome in good for value in outcome.parts[label]])) for label in parts]
    rows.append(("all, weighted", *_statistics([value for outcome in good for value in outcome.rewards])))
    echo(table(("REWARD", "COMPLETIONS", "MEAN", "LEAST", "MOST"), rows))
    failed = [(line, error) for line, outcome in enumerate(scored, 1) for error in outcome.errors]
    if failed:
        echo(f"{len(scored) - len(good)} of {len(scored)} lines could not be scored; in training they are masked:")
        for line, error in failed[:5]:
            echo(f"  line {line}: {error}")


def _statistics(values: Sequence[float]) -> tuple[str, ...]:
    if not values:
        return "0", "", "", ""
    return str(len(values)), f"{sum(values) / len(values):.6g}", f"{min(values):.6g}", f"{max(values):.6g}"


@contextmanager
def _opened(rewards: Sequence[RewardConfig], num_workers: int) -> Iterator[RewardPool]:
    """Start a pool, import and prepare its rewards like training, and print the rewards' notes."""
    from hpc_grpo.grading.pool import RewardPool

    with closing(RewardPool(rewards, num_workers)) as pool:
        for note in pool.check():
            echo(note, err=True)
        yield pool


def _rewards(
    name: str | None, rewards_of: str | None, args: Sequence[str], pass_env: Sequence[str], timeout_s: float
) -> tuple[Sequence[RewardConfig], Sequence[str | None]]:
    """Return the rewards, and the answer fields of the config's training data."""
    if (name is None) == (rewards_of is None) or (rewards_of and (args or pass_env)):
        raise click.UsageError("Give either --reward NAME, with --arg KEY=VALUE, or --config CONFIG.")
    if name is None:
        config = load_request(str(rewards_of), []).config
        sources = [source for _, source in config.data.sources(for_eval=False)]
        first, *others = map(config.rewards_of, sources)
        if any(rewards != first for rewards in others):
            raise ConfigError(f"{rewards_of}: sources of data.train differ in rewards. Choose one: --reward NAME.")
        return first, [source.answer_field for source in sources]
    REWARDS.check(name)
    return [RewardConfig(name=name, timeout_s=timeout_s, pass_env=list(pass_env), args=_pairs("--arg", args))], []


def _pairs(option: str, pairs: Sequence[str]) -> dict[str, Any]:
    found = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"{option} {pair!r} must be KEY=VALUE, such as {option} letters=ABCD.")
        found[key] = read_value(value, f"{option} {pair!r}")
    return found


def _rows(file: Path, answer_fields: Sequence[str | None]) -> Iterator[tuple[str, tuple[str, ...], Mapping[str, Any]]]:
    """Read prompt, completions and the other columns of each line. Raises ConfigError with a bad line's number."""
    # In bytes: texts may hold characters that Python takes for ends of lines, such as U+2028.
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row.pop("prompt")
            completions = row.pop("completions") if "completions" in row else [row.pop("completion")]
            if not isinstance(completions, list) or not all(isinstance(text, str) for text in (prompt, *completions)):
                raise TypeError("prompt and completions are texts")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file}:{number} must be a JSON object with the texts prompt and completion, or a list completions "
                f"({type(error).__name__}: {error})."
            ) from error
        for field in filter(None, answer_fields):  # `answer` is the first that the line has
            with suppress(KeyError):
                row = reward_fields(row, field)
                break
        yield prompt, tuple(completions), row
