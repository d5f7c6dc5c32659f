"""How `pytest -n 2 --dist loadgroup` shares the tests out: by file, but what shares a cluster stays together."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("cluster" if "cluster" in fixtures else item.path.stem))
