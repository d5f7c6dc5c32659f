"""Code blocks in fences, as models write them."""

from __future__ import annotations

import time

import pytest

from hpc_grpo.rewards.answers import answer_blocks
from hpc_grpo.rewards.fences import fenced_blocks

PROGRAM = "def one():\n    return 1\n"
PYTHON = ("python", "py", "python3")


@pytest.mark.parametrize(
    "text",
    [
        "```python\n{}```",
        "Install it:\n```bash\npip install one\n```\nThen:\n```python\n{}```\nDone.",
        "```python\n{}```\nIt prints:\n```text\n1\n```",
        "```python\n{}```\nOutput:\n```\n1\n```",
        "```python title=one.py\n{}```",
        "```Python\n{}```",
        "```{{.python .numberLines}}\n{}```",
        "~~~py\n{}~~~",
        "````python\n{}````",
        "```\n{}```",
        "```sh\nls\n```\n```\n{}```",
        "```python\n{}",
        "Like this: ```python\n{}```\nDone.",
        "<answer>\n{}</answer>",
        "```python\n{}```python\nDone.",
        "<answer>```python\n{}```</answer>",
        "<answer>\n```python\n{}```\n</answer>",
        "{}",
    ],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_the_program_is_found_whatever_stands_around_it(text: str, line_end: str) -> None:
    found = answer_blocks(text.format(PROGRAM).replace("\n", line_end), PYTHON)[-1]
    assert found.replace("\r\n", "\n").rstrip("\n") == PROGRAM.rstrip("\n")


def test_a_block_in_a_list_loses_the_indentation_of_its_fence() -> None:
    indented = "".join(f"    {line}\n" for line in PROGRAM.splitlines())
    assert answer_blocks(f"1. Do:\n\n    ```python\n{indented}    ```\n2. Run it.", PYTHON)[-1] == PROGRAM


def test_a_fence_ends_with_one_of_its_own_kind_and_length() -> None:
    """By CommonMark 0.31, section 4.5."""
    assert [block.content for block in fenced_blocks("````\n```\na\n```\n````\n")] == ["```\na\n```\n"]
    assert [block.content for block in fenced_blocks("```\n~~~\n```\n~~~\nb\n~~~")] == ["~~~\n", "b\n"]
    assert [block.content for block in fenced_blocks("```\na\n``` b\n```")] == ["a\n``` b\n"]
    assert [block.content for block in fenced_blocks('```py\n"""\n    ```\n"""\n```')] == ['"""\n    ```\n"""\n']
    assert fenced_blocks("``` a`b\nc") == []
    assert fenced_blocks("Write ``` and no more") == []


@pytest.mark.parametrize(
    "text", ["```" + "\n" * 30_000, "`" * 30_000, "```x`\n" * 5_000, " " * 30_000 + "```", "~~~ ```" * 4_000]
)
def test_degenerate_fences_take_no_time(text: str) -> None:
    begun = time.process_time()
    answer_blocks(text, PYTHON)[-1]
    assert time.process_time() - begun < 0.5
