r"""Finds the answer in a completion, and compares answers that need no algebra: plain numbers and words.

Everything is one linear pass, and every number has a length limit: a model in training sooner or later writes ten
thousand nines. The library math-verify 0.9 judges mathematical notation (`symbolic`), better than any parser of ours.

Two things are done here. *Finding the answer*: math-verify's patterns take 7 s for a completion of 20,000 blanks, and
use an answer elsewhere in the text if the box is empty. *Plain numbers and words*: this file is exact, 40 times as
fast, and right where math-verify is wrong. math-verify reads 1.5e3 as 1.5·e·3, `1 000` as 0, 42e9999 as 42, and
0.333333 as 1/3. In a text, math-verify judges +7 and a plain `Paris` wrong.

The answer of a completion is the first of these that exists after its thoughts:

    \boxed{…}  >  <answer>…</answer>  >  #### …  >  "the answer is …", "Answer: …"  >  its last number, or last line
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection
from fractions import Fraction

from hpc_grpo.rewards.fences import fenced_blocks

_MAX_NUMBER_CHARACTERS = 400
"""A longer number is no answer. Python refuses to parse integers of more than 4300 digits."""

_MAX_BETWEEN_BOXES = 40
"""Characters between two boxes of one list: `\\quad \\text{and} \\quad`."""

_UNSIGNED = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
_MIXED = r"\d+\s{1,9}(?=\d+\s?/\s?\d)"
_NUMBER = re.compile(rf"([-+]?)({_MIXED})?({_UNSIGNED})(?:\s*/\s*([-+]?{_UNSIGNED}))?")
# A sign counts only if it cannot be the minus between two operands: "5-3" ends in 3. A part of a name, a power or a
# product is no number: not the 2 in H2, x^2 or 2x, and not the 10 in 10^3. A letter may be a unit: 5m.
_NUMBER_IN_TEXT = re.compile(
    rf"(?<![\w^.])(?:(?<![)\]}}])[-+])?(?:{_MIXED})?{_UNSIGNED}(?:\s*/\s*{_UNSIGNED})?"
    r"(?!\s*\^|\.?\d|[eE][-+]?\d|[^\W\d_mgshlLCFKNJWVA](?!\w))"
)
_SUPERSCRIPT = re.compile("(?<!m)(?<!ft)[\u207a\u207b]?[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")  # m\u00b2 is a unit
_UNIT_POWER = re.compile(r"(?<=\d)(\s?(?:[cdkm]m|ft|in|yd))\^(?:\{([23])\}|([23])(?!\d))")
_POWER_OF_TEN = re.compile(
    r"(?<=\d)\s*(?:\\times|\\cdot|[x*\u00d7\u00b7])\s*10\s*\^\s*(?:\{\s*([-+]?\d{1,3})\s*\}|([-+]?\d{1,3}))(?!\d)"
)
_FRACTION = re.compile(r"(\d)?\\[dtc]?frac(?:\{(-?\d+)\}\{(\d+)\}|(\d)(\d))")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,|,\\!)(?=\d{3}(?!\d))")
_GROUPS = re.compile(r"\d{1,3}(?: \d{3})+")
_ROW = re.compile(r"[-+]?\d+(?:\.\d+)?(?: [-+]?\d+(?:\.\d+)?)+")
_TIME = re.compile(r"0?(\d|1[0-2])(?::00|(:\d\d))?\s*(?:\\text\{\s*)?([ap])\.?\s?m\.?\}?")
_LOOSE_SPACE = re.compile(r"(?<!\d)\s|\s(?!\d)")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s,.'-]+[^\W\d_]+)*[.!]?")

_THOUGHTS_END = re.compile(r"</think(?:ing)?>")
_HASHES = re.compile(r"(?<!#)####(?!#)")
_HEADING = re.compile(r"\d+[.):]\s+\D|(?i:step|part|case)\b")
_SAID = re.compile(
    r"(?i)(?<!if the )\banswers?\b[*_\"' ]{0,9}(?:(?:to|of|for)\b[^.\n:=]{0,100}?)?"
    r"(?:(\b(?:is|are|was|(?:must|should|would|will) be|equals?)\b(?!\s*(?:not|wrong|incorrect)\b):?)|[:=])"
    r"\s*(?:\*\*|__|\})?\s*|\u7b54\u6848(\u662f|\u4e3a|:)\s*"
)
# A dot after an initial or a title ends no sentence: J. K. Rowling, the U.S. Navy, 5 p.m. today, St. Louis.
_STATEMENT_END = re.compile(
    r"(?<!\b[A-Z](?=\.\s?[A-Z]\.))(?<!\w\s[A-Z])(?<!\.[A-Za-z])(?<!\.\s[A-Z])(?<!\b(?:Dr|Ft|Mr|Ms|Mt|St))(?<!\bMrs)[.!?](?=\s+[^\s=]|\s*$)"
    r"|,?\s(?:because|since|as|so)\b|,\s(?:not|and not|which)\b|(?<=[a-z]{2}),\sor\s(?=\d)|\n"
)
_DISPLAYED = re.compile(r"(?:\$\$.{1,1000}?\$\$|\\\[.{1,1000}?\\\])(?=[ .]*(?:\n|\Z))", re.DOTALL)
_VERB = re.compile(r"(?:\b(?:is|are|was|were|be|equals?)\b|:(?=\s))\s*")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;(){}\[\]]|\\[()\[\],;]|\\?(?:q?quad|text|and|or))*")
_MARKS = re.compile(r"(__|[_`\"']|\$\$?|\\\(|\\\[)(.+)(\1|\\\)|\\\])", re.DOTALL)
LATEX_TEXT = re.compile(r"\\(?:text|math)(?:bf|rm|it)?\s*\{([^{}]*)\}")
_HEAD = re.compile(r"\A[^\n]*:\n+")
_ITEM = re.compile(r"\A(?:[-*+\u2022>]|\d+[.)])\s+")
_NOTATION = re.compile(r"\\(?!%|,|!|\$|text|mathrm|boxed)|[\^\u221a\u03c0\u00b1]")
_RELATION = re.compile(r"[<>|\[\]{}]|(?<!\s)\(|\d!")
_OR = re.compile(r"\d\W{0,9}\bor\b\W{0,9}(?:\w+\s?=\s?)?\Z")
_AND_MORE = re.compile(r"\W*(?:(?:or|and|to)\W+)?\d|.*\bor\b")

_POWERS = {"2": "\u00b2", "3": "\u00b3"}


class _Characters(dict[int, str]):
    """Maps a character to its ASCII equivalent: digits of any script, full width, fractions, spaces."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        self[code] = char
        if char.isdecimal():
            self[code] = str(unicodedata.decimal(char))
        elif 0xFF01 <= code <= 0xFF5E:
            self[code] = chr(code - 0xFEE0)
        elif unicodedata.decomposition(char).startswith("<fraction>"):
            self[code] = " " + unicodedata.normalize("NFKC", char).replace("\u2044", "/")
        elif (category := unicodedata.category(char)) in ("Zs", "Cf"):
            self[code] = " " if category == "Zs" else ""
        return self[code]


_CHARACTERS = _Characters(
    str.maketrans("\u2212\u2044\u066b\u066c\u3002\u201c\u201d\u2018\u2019", "-/.,.\"\"''")  # type: ignore[arg-type]
)


def after_thoughts(completion: str) -> str:
    """Return the text after the last `</think>`, or all text. An answer inside thoughts does not count.

    >>> after_thoughts("<think>Is it 3?</think>It is 4.")
    'It is 4.'
    """
    return _THOUGHTS_END.split(completion)[-1]


def plain_characters(text: str) -> str:
    r"""Write digits of any script, full-width signs, spaces and line ends as in ASCII.

    >>> plain_characters("\uff14\uff12 \u0664\u0662 2\u00bd \u22125\r\n")
    '42 42 2 1/2 -5\n'
    """
    text = _UNIT_POWER.sub(lambda found: found[1] + _POWERS[found[2] or found[3]], text.replace("\r\n", "\n"))
    if text.isascii():
        return text
    text = _SUPERSCRIPT.sub(lambda found: "^{" + unicodedata.normalize("NFKC", found[0]) + "}", text)
    return text.translate(_CHARACTERS)


def reference_answer(reference: str) -> str:
    r"""Return the answer in a reference: the text after GSM8K's last `####`, else the last box, else the whole text.

    >>> reference_answer("She has 40 + 2 = 42 eggs.\n#### 42")
    '42'
    """
    reference = plain_characters(reference)
    return after_hashes(reference) or last_boxed(reference) or reference.strip()


def marked_answer(completion: str) -> str | None:
    r"""Return the last complete `\boxed{}`, else the last `<answer>` element, else the text after `####`, else None.

    >>> marked_answer("So #### **42**"), marked_answer("It is 4.")
    ('42', None)
    """
    text = plain_characters(after_thoughts(completion))
    for find in (last_boxed, _last_answer_element, after_hashes):
        if (found := find(text)) is not None:
            return bare(found)
    return None


def given_answer(completion: str) -> str | None:
    r"""Return the marked answer, else the text after the last "the answer is" or "Answer:"; None without both.

    >>> given_answer("#### Step 2: add\nSo the answer is **42**. Is 43 near?"), given_answer("It is 4.")
    ('42', None)
    """
    marked = marked_answer(completion)
    if marked is None:
        return announced_answer(plain_characters(after_thoughts(completion)))
    return announced_answer(marked) or marked


def final_answer(completion: str, reference: str) -> str:
    r"""Return the answer of a completion, in the form of `reference`: a number, several lines, or one line.

    >>> final_answer("The GCD of 8 and 12 is **4**.", "6"), final_answer("So it is Paris.", "Rome")
    ('4', 'Paris')
    """
    marked = marked_answer(completion)
    text = plain_characters(after_thoughts(completion)).strip() if marked is None else marked
    if "\n" in reference.strip() or not reference.strip():
        found = _text_of_lines(text, reference.strip().count("\n\n") + 1, is_marked=marked is not None)
        return reference if is_same_text(found, reference) else found
    given = announced_answer(text) or marked
    text = text if given is None else given
    if parse_number(reference) is not None:
        return _last_number(text) if given is None else _stated_number(text)
    line = bare(_ITEM.sub("", last_line(text)))
    if is_same_text(line, reference):
        return reference
    if plain_verdict(line, reference) or "$" in line or (given is not None and not _WORDS.fullmatch(line)):
        return line
    return bare(_VERB.split(_statement(line))[-1])


def _text_of_lines(text: str, num_paragraphs: int, is_marked: bool) -> str:
    """Return an answer of several lines: the last fenced block, else all marked text, else `num_paragraphs` paragraphs.

    The paragraphs are the first ones after "the answer is", or the last ones of the text.
    """
    if blocks := fenced_blocks(text):
        return blocks[-1].content.strip("\n")
    if is_marked:
        return text
    *_, start = 0, *(found.end() for found in _SAID.finditer(text))
    paragraphs = text[start:].strip("\n").split("\n\n")
    found = "\n\n".join(paragraphs[:num_paragraphs] if start else paragraphs[-num_paragraphs:])
    return _HEAD.sub("", found)


def answer_blocks(completion: str, tags: Collection[str]) -> list[str]:
    """Return the code blocks with one of `tags`, else the untagged blocks, else the last `<answer>`, else all text.

    A block in another language is no answer: it may hold commands or output.
    """
    text = after_thoughts(completion)
    blocks = fenced_blocks(text)
    for accepted in (tags, ("",)):
        if fitting := [block.content for block in blocks if block.tag in accepted]:
            return fitting
    return [_last_answer_element(text) or text]


def announced_answer(text: str) -> str | None:
    """Return the text after the last "the answer is" or "Answer:"; None without one.

    "Answer:" may introduce a solution. So it counts only if a number follows it directly, or none follows at all.

    >>> announced_answer("Answer: Each has 3. 3 + 4 = 7"), announced_answer("Answer: 7 eggs, not 8")
    (None, '7 eggs')
    """
    for found in reversed(list(_SAID.finditer(text))):
        rest = text[found.end() :]
        if blocks := fenced_blocks(rest) if rest.startswith(("```", "~~~")) else []:
            return blocks[0].content.strip()
        displayed = _DISPLAYED.match(rest)
        statement = displayed[0] if displayed else _statement(rest)
        if rest[len(statement) :].startswith("? "):
            continue
        is_label = not (found[1] or found[2])
        opens = _NUMBER_IN_TEXT.match(bare(statement).lstrip("$")) and "=" not in statement
        if statement and not (is_label and not opens and re.search(r"\d", rest[len(statement) :])):
            return bare(statement)
    return None


def last_line(text: str) -> str:
    """Return the last line that is not blank; "" if there is none."""
    return text.strip().rpartition("\n")[2].strip()


def bare(text: str) -> str:
    """Return a text without surrounding marks: bold, quotes, code, dollars, a final dot.

    >>> bare("**$42$**."), bare("`x`"), bare("$1$ and $2$")
    ('42', 'x', '$1$ and $2$')
    """
    text = text.lstrip("* \t\n").rstrip("*. \t\n")
    if found := LATEX_TEXT.fullmatch(text):
        return bare(found[1])
    found = _MARKS.fullmatch(text)
    return text if found is None or found[1] in found[2] else bare(found[2])


def is_same_text(given: str, reference: str) -> bool:
    """Return whether two texts are equal without surrounding marks. An empty text equals no text.

    >>> is_same_text("**Yes**.", "Yes"), is_same_text("yes", "Yes"), is_same_text("", "...")
    (True, False, False)
    """
    return bool(given) and (given == reference or bare(given) == bare(reference) != "")


def _statement(text: str) -> str:
    """Return a text up to the end of its first sentence, or up to an explanation: "5, since …", "5, not 6"."""
    end = _STATEMENT_END.search(text)
    return text[: end.start()] if end else text


def _stated_number(text: str) -> str:
    """Return the number in a marked text, or the text if it has no single number: "5 or 6", "(5, 6)"."""
    plain = _without_marks(text)
    stated = plain if re.search(r"\d\s*[,;]|\bor\b", plain) else plain.rpartition("=")[2].strip()
    if parse_number(stated) is not None:
        return stated
    found = _NUMBER_IN_TEXT.findall(stated)
    if not found or _NOTATION.search(plain) or _RELATION.search(plain):
        return text
    opens = stated.startswith(found[0]) and not _AND_MORE.match(stated[len(found[0]) :])
    return found[0] if opens or len(set(found)) == 1 else text


def _last_number(text: str) -> str:
    """Return the last number of a text, with the notation around it; the last line of a text without numbers."""
    marked = _without_marks(re.sub(r"\\[()\[\]]|(?<!\\)\$", "\u00a6", text))  # marks delimiters of notation
    numbers = list(_NUMBER_IN_TEXT.finditer(marked))
    line = bare(_VERB.split(last_line(text))[-1])
    if not numbers or parse_number(line) is not None:
        return line
    found = numbers[-1]
    before, after = marked[: found.start()], marked[found.end() :]
    if _OR.search(before[-30:]):
        return ""
    if before.count("\u00a6") % 2 and "\u00a6" in after:
        return _stated_number(before.rpartition("\u00a6")[2] + found[0] + after.partition("\u00a6")[0])
    around = (before.split() or [""])[-1] if not before[-1:].isspace() else ""
    around += found[0] + ("" if after[:1].isspace() else after.split(maxsplit=1)[0] if after else "")
    return bare(around) if _NOTATION.search(around.rpartition("=")[2]) else found[0]


def plain_verdict(given: str, answer: str) -> bool | None:
    r"""Return whether two answers are equal; None if that takes algebra.

    >>> plain_verdict("3.0", "3"), plain_verdict("Paris.", "London"), plain_verdict(r"\sqrt{8}", r"2\sqrt2")
    (True, False, None)
    >>> plain_verdict("PARIS", "Paris"), plain_verdict("X", "x"), plain_verdict("1 2 3", "123")
    (True, False, False)
    """
    if not (given.strip() and answer.strip()):
        return False
    if _plain(given) == _plain(answer):
        return True
    ours, theirs = parse_number(given), parse_number(answer)
    if ours is not None and theirs is not None:
        # 0.5 is 50 % too
        return ours == theirs or (None if "%" in given + answer else False)
    if _WORDS.fullmatch(given.strip()) and (theirs is not None or _WORDS.fullmatch(answer.strip())):
        return False
    if any(_ROW.fullmatch(text.strip()) for text in (given, answer)):  # math-verify would multiply 1 2 3
        rows = [[parse_number(number) for number in text.split()] for text in (given, answer)]
        return rows[0] == rows[1]
    if (our_time := _TIME.fullmatch(given.casefold())) and (their_time := _TIME.fullmatch(answer.casefold())):
        return our_time.groups() == their_time.groups()  # to math-verify, p.m. is a unit
    are_letters = all(len(text.strip()) == 1 and text.strip().isalpha() for text in (given, answer))
    return False if are_letters else None  # x is another variable than X


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact value of a text that is one number, else None. A percent sign is dropped, like in GSM8K.

    >>> parse_number("$1,200.50"), parse_number("-3 / 4"), parse_number("50%"), parse_number("5 or 6")
    (Fraction(2401, 2), Fraction(-3, 4), Fraction(50, 1), None)
    >>> parse_number("2 1/2"), parse_number(r"-2\frac{1}{2}"), parse_number("1 000"), parse_number("1 2")
    (Fraction(5, 2), Fraction(-5, 2), Fraction(1000, 1), None)
    """
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    text = _without_marks(text).strip().rstrip(".").removesuffix("%").strip()
    match = _NUMBER.fullmatch(text.replace(" ", "") if _GROUPS.fullmatch(text) else text)
    if match is None:
        return None
    sign, whole, numerator, denominator = match[1], match[2] or 0, Fraction(match[3]), Fraction(match[4] or 1)
    if denominator == 0:
        return None
    size = Fraction(whole) + numerator / denominator
    return -size if sign == "-" else size


def stated_number(text: str) -> Fraction | None:
    """Return a marked answer's number: the one after `=`, at its start, or the only one. None if this is not clear.

    >>> stated_number("42 eggs"), stated_number("x = 5"), stated_number("5 or 6")
    (Fraction(42, 1), Fraction(5, 1), None)
    """
    return parse_number(_stated_number(text))


def last_number(text: str) -> Fraction | None:
    r"""Return the last number in `text`; None without one, or if it is too long for an answer.

    >>> last_number(r"3 apples and $\frac{4}{6}$ of a pear")
    Fraction(2, 3)
    """
    found = _NUMBER_IN_TEXT.findall(_without_marks(plain_characters(text)))
    return parse_number(found[-1]) if found else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{}`, and of the boxes in a list with it; None without a box.

    >>> last_boxed(r"\boxed{1}, so \boxed{\frac{1}{2}} and \boxed{3"), last_boxed(r"It is $\boxed{1}$ and $\boxed{2}$.")
    ('\\frac{1}{2}', '1, 2')
    """
    open_braces: list[tuple[int, int, bool]] = []
    boxes: list[tuple[int, int, str]] = []
    for match in _BRACE.finditer(text):
        token = match[0]
        if token == "}" and open_braces:
            begin, start, boxed = open_braces.pop()
            if boxed:
                boxes.append((begin, match.end(), text[start : match.start()].strip()))
        elif token[-1] == "{" and token != "\\{":
            open_braces.append((match.start(), match.end(), token != "{"))
    if not boxes:
        return None
    begin, _, content = max(boxes)
    listed = [content]
    for earlier_begin, end, earlier in reversed(boxes):
        if end <= begin <= end + _MAX_BETWEEN_BOXES and _BETWEEN_BOXES.fullmatch(text[end:begin]):
            begin, listed = earlier_begin, listed if earlier in listed else [*listed, earlier]
    return ", ".join(reversed(listed))


def after_hashes(text: str) -> str | None:
    """Return the answer after GSM8K's `####`; None without one.

    Uses the last `####` line that begins with a number, else a `####` line at the end of the text. Other lines may be
    Markdown headings.

    >>> after_hashes("#### **42**"), after_hashes("#### Step 2: add\\nIt is 42."), after_hashes("#### 2. Add\\n3")
    ('42', None, None)
    """
    tails = [tail.strip() for tail in _HASHES.split(text)[1:]]
    for tail in reversed(tails):
        line = bare(tail.partition("\n")[0])
        line = last_boxed(line) or line
        if _NUMBER_IN_TEXT.match(_without_marks(line)) and not _HEADING.match(line):
            return line
    last = bare(tails[-1]) if tails else ""
    return last if last and "\n" not in last and not _HEADING.match(last) else None


def _last_answer_element(text: str) -> str | None:
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    return content.strip("\r\n") if closing and opening else None


def _without_marks(text: str) -> str:
    """Rewrite a number as plain text: without dollars and thousands separators, and with a/b for a fraction."""
    text = text.replace("\\$", "").replace("$", "").replace("\\%", "%")
    text = _POWER_OF_TEN.sub(lambda found: f"e{found[1] or found[2]}", text)
    return _FRACTION.sub(_as_in_prose, _THOUSANDS.sub("", text))


def _as_in_prose(found: re.Match[str]) -> str:
    whole, *parts = found.groups(default="")
    return f"{whole and whole + ' '}{parts[0] or parts[2]}/{parts[1] or parts[3]}"


def _plain(text: str) -> str:
    """Normalize a text for a comparison: single spaces between digits and no others, words in lower case."""
    text = _LOOSE_SPACE.sub("", " ".join(_without_marks(text).split())).rstrip(".")
    return text.rstrip("!").casefold() if _WORDS.fullmatch(text) else text
