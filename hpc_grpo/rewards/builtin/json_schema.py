"""Built-in reward: 1.0 when the completion is JSON that follows a schema, else 0.0."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
from referencing import Registry

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


@reward("json_schema")
def json_schema(
    prompts: Sequence[str],
    completions: Sequence[str],
    schema: dict[str, Any] | bool | None = None,
    schema_field: str = "schema",
    partial: float = 0.0,
    **fields: Any,
) -> list[float]:
    """Check the last block in code fences, else the whole completion, against `schema` or the column `schema_field`.

    A schema is an object, or its text as JSON, by the draft that its `$schema` names, else 2020-12. `partial` is the
    score of JSON that does not follow it. References to other documents are not fetched.
    """
    if schema is None and schema_field not in fields:
        raise ConfigError(
            f"json_schema needs a schema: set rewards.N.args.schema, or schema_field to a column. There is no column "
            f"{schema_field!r}; columns: {', '.join(sorted(fields)) or 'none'}."
        )
    schemas = [schema] * len(completions) if schema is not None else fields[schema_field]
    scores = []
    for completion, wanted in zip(completions, schemas, strict=True):
        validator = _validator(wanted)
        try:
            value = json.loads(_json_text(completion), parse_constant=_refuse)
        except (ValueError, RecursionError):
            scores.append(0.0)
            continue
        scores.append(1.0 if validator.is_valid(value) else partial)
    return scores


def _validator(schema: Any) -> Any:
    """Return a validator. Raises ConfigError for what is no schema."""
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        of_draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        of_draft.check_schema(schema)
    except (ValueError, jsonschema.SchemaError) as error:
        raise ConfigError(f"json_schema: this is no JSON schema: {str(error).splitlines()[0]}: {schema!r}") from error
    return of_draft(schema, registry=Registry())


def _json_text(completion: str) -> str:
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def _refuse(constant: str) -> None:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(constant)
