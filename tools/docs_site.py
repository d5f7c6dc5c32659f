"""Hooks of mkdocs: README and changelog become pages of the site, and links out of `docs/` become plain text.

Formulas become MathML, which browsers draw without a script.
"""

from __future__ import annotations

import html
import re
from functools import partial
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_REPOSITORY = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")

_FORMULA = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files that lie above `docs/`."""
    for name in ("README.md", "CHANGELOG.md"):
        text = re.sub(r"\]\((?!docs/|https?:)", "](../", (_REPOSITORY / name).read_text()).replace("](docs/", "](")
        files.append(File.generated(config, name, content=text.replace("](../CHANGELOG.md", "](CHANGELOG.md")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the text alone of a link to a file of the repository that the site does not have."""
    return _LINK.sub(partial(_of_site, (_REPOSITORY / "docs" / page.file.src_uri).parent), markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    kinds = {"div": "block", "span": "inline"}
    return _FORMULA.sub(lambda found: convert(html.unescape(found[2]), display=kinds[found[1]]), content)


def _of_site(folder: Path, link: re.Match[str]) -> str:
    target = (folder / link[2].partition("#")[0]).resolve()
    is_outside = target.exists() and not target.is_relative_to(_REPOSITORY / "docs")
    return link[1] if is_outside else link[0]
