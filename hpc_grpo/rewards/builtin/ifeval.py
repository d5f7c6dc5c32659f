"""Built-in reward: whether a completion follows the verifiable instructions of IFEval (arXiv:2311.07911, table 1).

The checks are ours: packages with these checks load data over the network, which compute nodes do not have. As in the
authors' code, Punkt splits sentences and langdetect finds languages. There are three differences. A keyword is literal
text, not a pattern. A missing argument is an error, not a random choice. Counting words in capitals needs no tokenizer.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError, validate_call

from hpc_grpo.config.checked import in_plain_words
from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import after_thoughts
from hpc_grpo.rewards.builtin import ScoredHere

Check = Callable[..., bool]
Relation = Literal["less than", "at least"]
_CHECKS: dict[str, Check] = {}
_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


class IfevalSettings(ScoredHere):
    mode: Literal["strict", "loose"] = Field(
        "strict", description="loose: forgive a first or last line, and asterisks."
    )
    partial: bool = Field(False, description="Score the share of instructions that are followed.")
    ids_field: str = Field("instruction_id_list", description="Column with the names of a row's instructions.")
    kwargs_field: str = Field("kwargs", description="Column with the arguments of each instruction.")


def load() -> None:
    import langdetect

    langdetect.DetectorFactory.seed = 0  # it draws samples: a text must have the same language in every worker
    _language("The first call reads the profiles of languages.")
    _sentence_tokenizer()


@reward("ifeval", IfevalSettings, load=load)
def ifeval(group: Group, settings: IfevalSettings) -> Iterator[float]:
    """Return 1.0 if all instructions of the item are followed, else 0.0. With `partial`, return the followed share.

    The columns are those of google/IFEval: names of instructions, and for each a mapping of its arguments. Text before
    `</think>` is not judged. With `loose`, an instruction also counts as followed by the text without its first line,
    its last line, or both, each with and without asterisks.
    """
    names, arguments = group.column_of(settings, "ids_field", list), group.column_of(settings, "kwargs_field", list)
    if not names or len(names) != len(arguments) or not all(isinstance(each, dict | None) for each in arguments):
        raise ConfigError(f"the instructions {names!r} need a mapping of arguments each, not {arguments!r}.")
    checks = [_check(name, given or {}) for name, given in zip(names, arguments, strict=True)]
    for completion in group.completions:
        said = after_thoughts(completion).strip()
        texts = [text for text in (_variants(said) if settings.mode == "loose" else [said]) if text.strip()]
        followed = [any(check(text) for text in texts) for check in checks]
        yield sum(followed) / len(followed) if settings.partial else float(all(followed))


def _check(name: str, arguments: Mapping[str, Any]) -> Check:
    """Return a check with its arguments. Raises ConfigError for an unknown check, or missing or wrong arguments."""
    if name not in _CHECKS:
        raise ConfigError(f"there is no instruction {name!r}. There are: {', '.join(sorted(_CHECKS))}.")
    given = {key: value for key, value in arguments.items() if value is not None}
    check = functools.partial(_CHECKS[name], **given)
    try:
        check("")  # This call refuses missing, unknown and mistyped arguments.
    except ValidationError as error:
        wrong = "; ".join(f"{each['loc'][0]}: {in_plain_words(each)}" for each in error.errors())
        raise ConfigError(f"the arguments of {name} are {given!r}. {wrong}.") from error
    return check


def _variants(text: str) -> list[str]:
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return [*cut, *(part.replace("*", "") for part in cut)]


def _instruction(name: str) -> Callable[[Check], Check]:
    return lambda check: _CHECKS.setdefault(name, validate_call(check))


def _compare(number: int, relation: Relation, threshold: int) -> bool:
    return number < threshold if relation == "less than" else number >= threshold


@_instruction("keywords:existence")
def _existence(text: str, keywords: Sequence[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


@_instruction("keywords:frequency")
def _frequency(text: str, keyword: str, frequency: int, relation: Relation) -> bool:
    return _compare(text.lower().count(keyword.strip().lower()), relation, frequency)


@_instruction("keywords:forbidden_words")
def _forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


@_instruction("keywords:letter_frequency")
def _letter_frequency(text: str, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


@_instruction("language:response_language")
def _response_language(text: str, language: str) -> bool:
    return _language(text) in (language, None)


def _language(text: str) -> str | None:
    """Return the language as an ISO 639-1 code; None if it cannot be detected: then any language counts as right."""
    import langdetect

    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return None


@_instruction("length_constraints:number_sentences")
def _number_sentences(text: str, num_sentences: int, relation: Relation) -> bool:
    return _compare(len(_sentence_tokenizer().tokenize(text)), relation, num_sentences)


@functools.cache
def _sentence_tokenizer() -> Any:
    import punkt

    return punkt.PunktSentenceTokenizer(punkt.load_model("english"))


@_instruction("length_constraints:number_paragraphs")
def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Count the parts between `***`. No part may be empty except the first and the last, which then do not count."""
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(paragraphs[1:-1]) and sum(map(bool, paragraphs)) == num_paragraphs


@_instruction("length_constraints:number_words")
def _number_words(text: str, num_words: int, relation: Relation) -> bool:
    return _compare(len(re.findall(r"\w+", text)), relation, num_words)


@_instruction("length_constraints:nth_paragraph_first_word")
def _nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = text.split("\n\n")
    num_filled = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if num_filled != num_paragraphs or not 1 <= nth_paragraph <= num_filled:
        return False
    words = paragraphs[nth_paragraph - 1].split()
    return bool(words) and re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'))[0].lower() == first_word.lower()


@_instruction("detectable_content:number_placeholders")
def _number_placeholders(text: str, num_placeholders: int) -> bool:
    # An unclosed bracket takes the rest of its line. Otherwise each of many brackets would scan the line again.
    return sum(map(bool, re.findall(r"\[[^\]\n]*(\]?)", text))) >= num_placeholders


@_instruction("detectable_content:postscript")
def _postscript(text: str, postscript_marker: str) -> bool:
    pattern = _POSTSCRIPTS.get(postscript_marker.strip(), re.escape(postscript_marker.strip().lower()))
    return re.search(pattern, text.lower()) is not None


@_instruction("detectable_format:number_bullet_lists")
def _number_bullet_lists(text: str, num_bullets: int) -> bool:
    patterns = (r"^[^\S\n]*\*[^\*].*$", r"^[^\S\n]*-.*$")  # with \s*, many empty lines would take seconds
    return sum(len(re.findall(pattern, text, re.MULTILINE)) for pattern in patterns) == num_bullets


@_instruction("detectable_format:constrained_response")
def _constrained_response(text: str) -> bool:
    return any(option in text for option in _OPTIONS)


@_instruction("detectable_format:number_highlighted_sections")
def _number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Count `*text*` and `**text**`; the first pattern also finds parts of the second, as the authors' does."""
    found = re.findall(r"\*[^\n\*]*\*", text) + re.findall(r"\*\*[^\n\*]*\*\*", text)
    return sum(bool(part.strip("*").strip()) for part in found) >= num_highlights


@_instruction("detectable_format:multiple_sections")
def _multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


@_instruction("detectable_format:json_format")
def _json_format(text: str) -> bool:
    try:
        json.loads(re.sub(r"^```(?:json|Json|JSON)?|```$", "", text.strip()).strip())
    except (ValueError, RecursionError):
        return False
    return True


@_instruction("detectable_format:title")
def _title(text: str) -> bool:
    """Return whether a line has text between its first `<<` and its last `>>`."""
    return any(
        line[line.find("<<") : line.rfind(">>")].lstrip("<").rstrip(">").strip()
        for line in text.split("\n")
        if 0 <= line.find("<<") < line.rfind(">>")
    )


@_instruction("combination:two_responses")
def _two_responses(text: str) -> bool:
    responses = [part.strip() for part in text.split("******")]
    filled = [response for response in responses if response]
    return all(responses[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


@_instruction("combination:repeat_prompt")
def _repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


@_instruction("startend:end_checker")
def _end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@_instruction("startend:quotation")
def _quotation(text: str) -> bool:
    return len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"'


@_instruction("change_case:capital_word_frequency")
def _capital_word_frequency(text: str, capital_frequency: int, capital_relation: Relation) -> bool:
    words = re.findall(r"[\w.'\u2019/-]+", text)
    return _compare(sum(word.isupper() for word in words), capital_relation, capital_frequency)


@_instruction("change_case:english_capital")
def _english_capital(text: str) -> bool:
    return text.isupper() and _language(text) in ("en", None)


@_instruction("change_case:english_lowercase")
def _english_lowercase(text: str) -> bool:
    return text.islower() and _language(text) in ("en", None)


@_instruction("punctuation:no_comma")
def _no_comma(text: str) -> bool:
    return "," not in text
