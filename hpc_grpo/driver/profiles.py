"""Profile the driver, the first learner and the first engine over the steps of `metrics.profile_steps`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.profiling import StackProfile
from hpc_grpo.run.files import when_there_is_space, write_atomic
from hpc_grpo.run.paths import RunDir


class Profiles:
    """Starts profiles before the first of the steps and writes them after the last one, or when the driver ends."""

    def __init__(self, run_dir: RunDir, steps: tuple[int, int], learner: Any, engine: Any = None) -> None:
        """`learner` is an actor, `engine` a RemoteEngine; SFT has none. Raises ConfigError without pyinstrument."""
        if find_spec("pyinstrument") is None:
            raise ConfigError(
                "metrics.profile_steps needs pyinstrument, which is not installed. Install hpc-grpo[train] anew, or "
                "set metrics.profile_steps=null."
            )
        self._folder = run_dir.profiles(*steps)
        self._steps = steps
        self._learner, self._engine = learner, engine
        self._own: StackProfile | None = None
        self._profiled: dict[str, Any] = {}

    def before(self, step: int) -> None:
        """Start where `step` is the first one to profile, also of an attempt that resumes between them."""
        first, last = self._steps
        if self._own is not None or not first <= step <= last:
            return
        self._profiled = {"learner-0": self._learner}
        if self._engine is not None:
            self._profiled["engine-0"] = self._engine.actor
        self._profiled = {name: self._profiled[name] for name in self._call("start_profile")}
        self._own = StackProfile()

    def after(self, step: int) -> None:
        """Write the profiles where `step` was the last one."""
        if step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """End and write what has begun."""
        if self._own is None:
            return
        files = {"driver-0.stacks.html": self._own.stop()}
        self._own = None
        for name, found in self._call("stop_profile").items():
            files |= {f"{name}.{suffix}": content for suffix, content in found.items()}
        when_there_is_space(lambda: _write(self._folder, files), "the profiles")
        print(f"Profiles of steps {self._steps[0]} to {self._steps[1]}: {self._folder}", flush=True)

    def _call(self, method: str) -> dict[str, Any]:
        """Call all that are profiled at once; one that failed is left out, and found by others where it died."""
        calls = {name: getattr(actor, method).remote() for name, actor in self._profiled.items()}
        answers = {}
        for name, call in calls.items():
            try:
                answers[name] = ray.get(call)
            except RayError as error:
                print(f"{name} could not be profiled: {error}", flush=True)
        return answers


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        write_atomic(folder / name, content)
