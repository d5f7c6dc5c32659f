"""Built-in rewards for the text of a completion: its words, its length, its form."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import after_thoughts, answer_blocks, given_answer, is_same_text, plain_characters
from hpc_grpo.rewards.builtin import ScoredHere
from hpc_grpo.section import Section


@reward("exact", ScoredHere)
def exact(group: Group, settings: Section) -> Iterator[float]:
    """Compare texts: the marked or announced answer, else the whole completion, with the column `answer`.

    Case, punctuation and notation count: 0.5 is not 1/2. Digits of other scripts and line ends are converted to ASCII.
    Marks around the answer, such as bold and quotes, and a final dot do not count.
    """
    wanted = plain_characters(str(group.answer())).strip()
    for completion in group.completions:
        whole = plain_characters(answer_blocks(completion, ())[-1]).strip()
        given = given_answer(completion)
        yield float(wanted == whole != "" or is_same_text(whole if given is None else given, wanted))


_PUNCTUATION = str.maketrans("", "", string.punctuation)


@reward("string_f1", ScoredHere)
def string_f1(group: Group, settings: Section) -> Iterator[float]:
    """Return the F1 of words like SQuAD's evaluation (arXiv:1606.05250), the best over several references.

    Case, punctuation and English articles do not count. Compares the marked or announced answer, else the whole
    completion after its thoughts. `answer` is a text, or a list of texts of which one suffices.
    """
    references = group.answer(list)
    accepted = [_words(str(each)) for each in (references if isinstance(references, list) else [references])]
    for completion in group.completions:
        given = _words(given_answer(completion) or after_thoughts(completion))
        yield max((_f1(given, wanted) for wanted in accepted), default=0.0)


def _words(text: str) -> list[str]:
    return re.sub(r"\b(?:a|an|the)\b", " ", plain_characters(text).lower().translate(_PUNCTUATION)).split()


def _f1(given: list[str], wanted: list[str]) -> float:
    if not given or not wanted:
        return float(given == wanted)
    common = (Counter(given) & Counter(wanted)).total()
    return 2.0 * common / (len(given) + len(wanted))


class RegexSettings(ScoredHere):
    pattern: str | None = Field(None, description="Pattern of Python. Default: the row's pattern.")
    pattern_field: str = Field("pattern", description="Column with the pattern of each row.")
    mode: Literal["search", "fullmatch"] = Field("search", description="Match anywhere, or the whole completion.")
    ignore_case: bool = Field(False, description="Upper and lower case are equal.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"must be a pattern of Python's module re: {error}") from error
        return pattern


@reward("regex", RegexSettings)
def regex(group: Group, settings: RegexSettings) -> Iterator[float]:
    """Match `pattern`, else the column `pattern_field`: anywhere (`search`) or the whole text (`fullmatch`).

    A dot also matches a newline, because completions have several lines.
    """
    wanted = group.column_of(settings, "pattern_field", str) if settings.pattern is None else settings.pattern
    try:
        compiled = re.compile(wanted, re.DOTALL | (re.IGNORECASE if settings.ignore_case else 0))
    except re.error as error:
        raise ConfigError(f"the pattern {wanted!r} is not one of Python's: {error}.") from error
    match = compiled.search if settings.mode == "search" else compiled.fullmatch
    for completion in group.completions:
        yield float(match(completion) is not None)


class KeywordMatchSettings(ScoredHere):
    keyword_list: list[str] | None = Field(None, description="Keywords. Default: the row's keywords.")
    keyword_field: str = Field("keywords", description="Column with the keywords of each row.")
    case_sensitive: bool = Field(False, description="Upper and lower case differ.")


@reward("keyword_match", KeywordMatchSettings)
def keyword_match(group: Group, settings: KeywordMatchSettings) -> Iterator[float]:
    """Return the share of keywords that occur as whole words. `keyword_list` has the keywords, else the column
    `keyword_field`: a list of texts or one text with commas. An item without keywords scores 1.0.
    """
    own = settings.keyword_list
    wanted = group.column_of(settings, "keyword_field", str, list, NoneType) if own is None else own
    flags = 0 if settings.case_sensitive else re.IGNORECASE
    values = wanted.split(",") if isinstance(wanted, str) else wanted or []
    keywords = [keyword for value in values if (keyword := str(value).strip())]
    # Match whole words, also in Markdown's _italics_ and across lines.
    phrases = [r"\s+".join(map(re.escape, keyword.split())) for keyword in keywords]
    patterns = [re.compile(rf"(?<!\w)_{{0,2}}{phrase}_{{0,2}}(?!\w)", flags) for phrase in phrases]
    for completion in group.completions:
        found = sum(pattern.search(completion) is not None for pattern in patterns)
        yield found / len(patterns) if patterns else 1.0


class JsonSchemaSettings(ScoredHere):
    # Not named `schema`: pydantic's models have a method of that name.
    wanted: dict[str, Any] | bool | str | None = Field(
        None, alias="schema", description="The schema, or its text as JSON. Default: the row's schema."
    )
    schema_field: str = Field("schema", description="Column with the schema of each row.")
    partial: float = Field(0.0, description="Score of JSON that does not follow the schema.")


def load_json_schema() -> None:
    import jsonschema  # noqa: F401
    import referencing  # noqa: F401


@reward("json_schema", JsonSchemaSettings, load=load_json_schema)
def json_schema(group: Group, settings: JsonSchemaSettings) -> Iterator[float]:
    """Check the last of the completion's `answer_blocks` for JSON against `schema`, else against the row's schema.

    A schema is an object, or its JSON text. Its `$schema` names the draft, by default 2020-12. `partial` is the score
    of JSON that does not follow the schema. References to other documents are not fetched.
    """
    import jsonschema
    from referencing import Registry

    own = settings.wanted
    wanted: Any = group.column_of(settings, "schema_field", dict, bool, str) if own is None else own
    try:
        wanted = json.loads(wanted) if isinstance(wanted, str) else wanted
        of_draft = jsonschema.validators.validator_for(wanted, jsonschema.Draft202012Validator)
        of_draft.check_schema(wanted)
    except (ValueError, jsonschema.SchemaError) as error:
        raise ConfigError(f"this is no JSON schema: {str(error).splitlines()[0]}: {wanted!r}") from error
    validator = of_draft(wanted, registry=Registry())

    def refuse(constant: str) -> None:
        """Refuse NaN and Infinity, which Python reads and JSON does not have."""
        raise ValueError(constant)

    for completion in group.completions:
        try:
            value = json.loads(answer_blocks(completion, ("json",))[-1], parse_constant=refuse)
        except (ValueError, RecursionError):
            yield 0.0
            continue
        yield 1.0 if validator.is_valid(value) else settings.partial


class LengthSettings(ScoredHere):
    most: PositiveInt | None = Field(None, description="Longest completion without a penalty.")
    over: PositiveInt | None = Field(None, description="Length beyond `most` that gets -1. Default: `most`.")
    target: PositiveInt | None = Field(None, description="Length that scores 1.")
    unit: Literal["words", "characters"] = Field("words", description="What is counted.")

    @model_validator(mode="after")
    def _one_of_both(self) -> LengthSettings:
        if (self.most is None) == (self.target is None):
            raise ValueError(f"must have one of most and target; got most={self.most}, target={self.target}. Set one")
        return self


@reward("length", LengthSettings, least=-1.0)
def length(group: Group, settings: LengthSettings) -> Iterator[float]:
    """Return a soft penalty above `most`, or the closeness to `target`, in words or characters.

    With `most`: 0 up to it, then falling linearly to -1 over the next `over` (DAPO's overlong penalty,
    arXiv:2503.14476, equation 13, which counts tokens), -1 beyond. With `target`: 1 - |length - target| / target, and 0
    from twice the target on.
    """
    for text in group.completions:
        size = len(text.split()) if settings.unit == "words" else len(text)
        if settings.target is not None:
            yield max(0.0, 1.0 - abs(size - settings.target) / settings.target)
        elif settings.most is not None:
            yield -min(1.0, max(0, size - settings.most) / (settings.over or settings.most))


class RepetitionSettings(ScoredHere):
    ngram: PositiveInt = Field(3, description="Words in a row that count as a repetition.")


@reward("repetition", RepetitionSettings, least=-1.0)
def repetition(group: Group, settings: RepetitionSettings) -> Iterator[float]:
    """Return minus the share of word n-grams that occurred before (arXiv:2502.03373, appendix C.2).

    A text with fewer words than `ngram` scores 0.
    """
    for text in group.completions:
        words = text.lower().split()
        ngrams = list(zip(*(words[start:] for start in range(settings.ngram)), strict=False))
        yield len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0


class StrictFormatSettings(ScoredHere):
    reasoning_tag: str = Field("reasoning", description="Name of the first element.")
    answer_tag: str = Field("answer", description="Name of the second element.")


@reward("strict_format", StrictFormatSettings)
def strict_format(group: Group, settings: StrictFormatSettings) -> Iterator[float]:
    """Match `<reasoning>…</reasoning><answer>…</answer>`: each once, not empty, with only white space around."""
    first, second = re.escape(settings.reasoning_tag), re.escape(settings.answer_tag)
    # No tag inside an element: "<answer>1</answer><answer>2</answer>" would let a model hedge.
    body = rf"\s*(?=\S)(?:(?!</?(?:{first}|{second})>).)+"
    pattern = re.compile(rf"\s*<{first}>{body}</{first}>\s*<{second}>{body}</{second}>\s*", re.DOTALL)
    for completion in group.completions:
        yield float(pattern.fullmatch(completion) is not None)
