"""Built-in reward: 1.0 when the completion is JSON that follows a schema, else 0.0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import answer_blocks
from hpc_grpo.section import Section


class JsonSchemaSettings(Section):
    # Not `schema`: pydantic's models have a method of that name.
    wanted: dict[str, Any] | bool | str | None = Field(
        None, alias="schema", description="The schema, or its text as JSON; null: that of the row."
    )
    schema_field: str = Field("schema", description="Column with the schema of each row.")
    partial: float = Field(0.0, description="Score of JSON that does not follow the schema.")


def load() -> None:
    import jsonschema  # noqa: F401
    import referencing  # noqa: F401


@reward("json_schema", JsonSchemaSettings, load=load)
def json_schema(group: Group, settings: JsonSchemaSettings) -> Iterator[float]:
    """Check the last JSON block in code fences, else the whole completion, against `schema` or the row's.

    A schema is an object, or its text as JSON, by the draft that its `$schema` names, else 2020-12. `partial` is the
    score of JSON that does not follow it. References to other documents are not fetched.
    """
    wanted: Any = settings.wanted
    if wanted is None:
        wanted = group.column_of(settings, "schema_field", dict, bool, str)
    validator = _validator(wanted)
    for completion in group.completions:
        try:
            value = json.loads(answer_blocks(completion, ("json",))[-1], parse_constant=_refuse)
        except (ValueError, RecursionError):
            yield 0.0
            continue
        yield 1.0 if validator.is_valid(value) else settings.partial


def _validator(schema: Any) -> Any:
    """Return a validator. Raises ConfigError for what is no schema."""
    import jsonschema
    from referencing import Registry

    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        of_draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        of_draft.check_schema(schema)
    except (ValueError, jsonschema.SchemaError) as error:
        raise ConfigError(f"this is no JSON schema: {str(error).splitlines()[0]}: {schema!r}") from error
    return of_draft(schema, registry=Registry())


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(constant)
