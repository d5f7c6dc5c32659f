"""The docs build as a site without a warning, and the site needs no other host."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

from mkdocs.commands.build import build
from mkdocs.config import load_config

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(REPOSITORY / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def test_a_page_stands_for_each_document_and_none_loads_from_another_host(site: Path) -> None:
    documents = [*(REPOSITORY / "docs").rglob("*.md")]
    pages = {page.relative_to(site).with_suffix("") for page in site.rglob("*.html")}
    assert {path.relative_to(REPOSITORY / "docs").with_suffix("") for path in documents} <= pages
    loading = re.compile(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//[^>]*")
    assert [found for page in site.rglob("*.html") for found in loading.findall(page.read_text())] == []


def test_the_readme_is_the_first_page_with_links_that_lead_into_the_site(site: Path) -> None:
    front = (site / "index.html").read_text()
    assert 'href="slurm.html"' in front and 'href="docs/' not in front
    assert "LICENSE" not in re.findall(r'href="([^"]+)"', front)


def test_formulas_are_drawn_by_the_browser(site: Path) -> None:
    text = (site / "evaluation.html").read_text()
    assert "<mfrac>" in text and "\\frac" not in text
