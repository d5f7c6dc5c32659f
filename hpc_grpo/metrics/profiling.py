"""Profiles of a process over some steps: a trace of torch's operations, and the time in Python functions.

Both record the thread that starts them. Start and stop both in the working thread.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

_SAMPLE_EVERY_S = 0.001
_NO_NETWORK = (
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'unsafe-inline' 'unsafe-eval' data:\">"
)


class StackProfile:
    """Samples the Python stack of the thread that creates it, by pyinstrument."""

    def __init__(self) -> None:
        from pyinstrument import Profiler

        self._profiler = Profiler(interval=_SAMPLE_EVERY_S, async_mode="disabled")
        self._profiler.start()

    def stop(self) -> bytes:
        """Stop. Return a self-contained HTML page."""
        self._profiler.stop()
        # Forbid network access: the page would load a font.
        return str(self._profiler.output_html()).replace("<head>", f"<head>{_NO_NETWORK}", 1).encode()


class TorchTrace:
    """Records every torch operation of this thread and of its backward passes; on a GPU also kernels."""

    def __init__(self) -> None:
        import torch

        self._profile: Any = torch.profiler.profile()  # by default all devices of this machine: CPU, CUDA
        self._profile.start()

    def stop(self) -> bytes:
        """Stop. Return the trace as Chrome's JSON, compressed by gzip, for Perfetto."""
        self._profile.stop()
        with tempfile.NamedTemporaryFile(suffix=".json.gz") as file:
            self._profile.export_chrome_trace(file.name)
            return Path(file.name).read_bytes()
