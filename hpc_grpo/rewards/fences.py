"""Finds the fenced code blocks of a Markdown text, by the rules of CommonMark 0.31 (section 4.5).

Pairs fences line by line, in one pass, so a closing fence never opens a block. A regular expression for two fences
would pair the end of one block with the start of the next. In addition to CommonMark, an opening fence may follow prose
or `<answer>`, and `</answer>` may follow a closing one: models write them there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPENING = re.compile(r"(?:[^`]*+(?=`+[\w+-]*$))?(`{3,}(?=[^`]*$)|~{3,})[{.\s]*([\w+-]*).*")
_CLOSING = re.compile(r"(`{3,}|~{3,})\s*(?:</\w+>)?")


@dataclass(frozen=True)
class Block:
    """A code block. `tag` is the first word after the opening fence in lower case, such as `python`, or ""."""

    tag: str
    content: str


def fenced_blocks(text: str) -> list[Block]:
    r"""Return the blocks of a text. An unclosed block ends with the text, or at a fence within a line.

    An opening fence may have any indentation, as in a list. The block's lines lose this indentation.

    >>> fenced_blocks("Run:\n```sh\nls\n```\nand\n~~~Python title=x\nprint(1)\n~~~")
    [Block(tag='sh', content='ls\n'), Block(tag='python', content='print(1)\n')]
    >>> fenced_blocks("So: ```py\nprint(1)```\nDone.")
    [Block(tag='py', content='print(1)')]
    """
    blocks: list[Block] = []
    fence, tag, depth = "", "", 0
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").removesuffix("\n").split("\n"):
        margin = len(line) - len(line.lstrip())
        if not fence:
            if opening := _OPENING.fullmatch(line.strip()):
                fence, tag, depth, lines = opening[1], opening[2].lower(), margin, []
        elif margin <= depth + 3 and (closing := _CLOSING.fullmatch(line.strip())) and closing[1].startswith(fence):
            blocks.append(Block(tag, "".join(lines)))
            fence = ""
        else:
            lines.append(line[min(margin, depth) :] + "\n")
    if fence:
        blocks.append(Block(tag, "".join(lines).partition(fence)[0]))
    return blocks
