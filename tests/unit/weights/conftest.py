from __future__ import annotations

import pytest

from hpc_grpo.weights.store import BucketLayout, bucket_layout
from tests.support.parameters import SPECS


@pytest.fixture
def layout() -> BucketLayout:
    """Two buckets of two parameters each."""
    return bucket_layout(SPECS, bucket_bytes=320)
