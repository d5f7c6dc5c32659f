from __future__ import annotations

import pytest

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.weights.refusal import refusing, unrefused


class Worker:
    @refusing
    def receive(self, version: int) -> int:
        if version == 3:
            raise WeightSyncError("checksum mismatch in bucket 0")
        if version == 4:
            raise RuntimeError("CUDA out of memory")
        return version


def test_weight_sync_error_is_raised_where_the_results_arrive() -> None:
    with pytest.raises(WeightSyncError, match=r"^checksum mismatch in bucket 0$"):
        unrefused([Worker().receive(2), Worker().receive(3)])


def test_results_and_other_errors_pass() -> None:
    assert unrefused([Worker().receive(1), Worker().receive(2)]) == [1, 2]
    with pytest.raises(RuntimeError, match="out of memory"):
        Worker().receive(4)
