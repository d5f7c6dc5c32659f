"""Finds the code blocks in fences of a Markdown text, by the rules of CommonMark 0.31 (section 4.5).

Fences are paired line by line, in one pass: a closing fence never opens a block. A regular expression that looks for
two fences pairs the end of one block with the beginning of the next.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_OPENING = re.compile(r"(\s*)(`{3,}(?=[^`]*$)|~{3,})[{.\s]*([\w+-]*).*")
_BESIDE_ELEMENT = re.compile(r"(?m)^([ \t]*<\w+>)[ \t]*(?=```|~~~)|^([ \t]*(?:`{3,}|~{3,}))[ \t]*(?=</\w+>)")


@dataclass(frozen=True)
class Block:
    """A code block. `tag` is the first word behind the opening fence, in lower case: `python`, or empty."""

    tag: str
    content: str


def fenced_blocks(text: str) -> list[Block]:
    r"""Return the blocks of a text. A block that is never closed ends with the text.

    An opening fence may stand at any depth, as in a list. Its indentation is taken off the lines of its block.

    >>> fenced_blocks("Run:\n```sh\nls\n```\nand\n~~~Python title=x\nprint(1)\n~~~")
    [Block(tag='sh', content='ls\n'), Block(tag='python', content='print(1)\n')]
    """
    blocks: list[Block] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in [*text.replace("\r\n", "\n").removesuffix("\n").split("\n"), None]:
        if opening is None:
            opening, lines = _OPENING.fullmatch(line or ""), []
        elif line is None or _closes(line, opening):
            blocks.append(Block(opening[3].lower(), "".join(lines)))
            opening = None
        else:
            margin = len(line) - len(line.lstrip())
            lines.append(line[min(margin, len(opening[1])) :] + "\n")
    return blocks


def _closes(line: str, opening: re.Match[str]) -> bool:
    """Tell whether a line is a fence of the opening's kind, at least as long, and not as deep as code is."""
    fence, margin = line.strip(), len(line) - len(line.lstrip())
    return fence == opening[2][0] * len(fence) and len(fence) >= len(opening[2]) and margin <= len(opening[1]) + 3


def last_block(text: str, tags: Collection[str]) -> str:
    """Return the last block with one of `tags`, else the last block without a tag, else the whole text.

    A block of another language is no answer: the commands before a program, or the output after it.
    """
    # A fence is a line, also where `<answer>` stands beside it.
    blocks = fenced_blocks(_BESIDE_ELEMENT.sub(lambda found: f"{found[0]}\n", text))
    for accepted in (tags, ("",)):
        if fitting := [block.content for block in blocks if block.tag in accepted]:
            return fitting[-1]
    return text
