"""Section `environment`: what the model acts in, turn by turn."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from hpc_grpo.section import PathText, Section, as_section


class EnvironmentConfig(Section):
    name: PathText = Field(description="An environment of episodes/builtin, or a class of yours: module:Class.")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the class.")
    tools: list[PathText] = Field(
        default_factory=list,
        description="Tools of the environment tools: python, calculator, or a function of yours, module:function.",
    )
    max_turns: PositiveInt = Field(8, description="Completions of an episode, at most.")
    max_tokens: PositiveInt = Field(
        2048, description="Tokens of an episode after its first prompt, those of the environment among them."
    )
    timeout_s: PositiveFloat = Field(30.0, description="Deadline of each call of the environment.")
    num_workers: PositiveInt = Field(2, description="Processes of each engine that hold environments.")
    memory_gib: PositiveFloat = Field(4.0, description="Memory that such a process may allocate.")
    pass_env: list[str] = Field(
        default_factory=list, description="Environment variables with secrets that the environment reads."
    )


Environment = Annotated[EnvironmentConfig, BeforeValidator(as_section)]
