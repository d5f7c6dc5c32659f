"""The user's function `train.on_step`: called after each step of the driver's loop, in a thread of the driver.

The loop waits for the answer, at most `deadlines.silent_s`. The function is switched off for this attempt if it raises,
is too slow, or returns anything but None or a text. The run continues without the function.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from hpc_grpo.config.train import CallbackConfig
from hpc_grpo.errors import described
from hpc_grpo.registry import CALLBACKS
from hpc_grpo.system.readable import one_line
from hpc_grpo.system.secret import without_secrets

_LONGEST_TEXT = 300
_OFF = "and is off until the run starts again"


class StepCallback:
    """Calls the function with the step, its metrics, and the metrics of all evals so far by step.

    The evals of earlier attempts are included, so a resumed run makes the same decisions as an uninterrupted run.
    """

    def __init__(self, settings: CallbackConfig, timeout_s: float) -> None:
        """Import the function. Raises ConfigError if the function does not exist or does not take its args."""
        self._settings, self._timeout_s = settings, timeout_s
        self._function = CALLBACKS.with_args(settings.name, settings.args, 3)
        self._evals: dict[int, dict[str, float]] = {}
        self._trouble = ""
        self.end_reason = ""

    def resume(self, metrics: Mapping[int, Mapping[str, Any]], step: int) -> None:
        """Note the evals of all steps up to `step`. `metrics` are the recorded metrics by step."""
        for number, values in metrics.items():
            if number <= step:
                self.note(number, values)

    def note(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the eval of a step, if its metrics have one."""
        if found := {name: value for name, value in metrics.items() if name.startswith("eval/")}:
            self._evals[step] = found

    def ask(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return why the run ends (`end_reason`), or why the function is off; else ''. Prints each once."""
        self.note(step, metrics)
        if self._trouble:
            return self._trouble
        answer, trouble = self._answer(step, dict(metrics))
        if trouble:
            self._trouble = _shown(f"train.on_step.name = {self._settings.name} {trouble} after step {step}, {_OFF}.")
            print(self._trouble, flush=True)
            return self._trouble
        self.end_reason = answer
        if answer:
            print(f"Stopping after step {step}: {answer}", flush=True)
        return answer

    def _answer(self, step: int, metrics: dict[str, float]) -> tuple[str, str]:
        """Return the function's reason to end the run, and what is wrong with the function; "" for none."""
        evals = {number: dict(values) for number, values in self._evals.items()}
        answers: list[Any] = []
        errors: list[BaseException] = []

        def call() -> None:
            try:
                answers.append(self._function(step, metrics, evals))
            except BaseException as error:  # noqa: BLE001 - `ask` prints it; even SystemExit must not end the driver
                errors.append(error)

        # A daemon thread: the driver can end while the function hangs.
        thread = threading.Thread(target=call, name="train.on_step", daemon=True)
        thread.start()
        thread.join(min(self._timeout_s, threading.TIMEOUT_MAX))
        if errors:
            return "", f"raised {described(errors[0])}"
        if not answers:
            return "", f"gave no answer for {self._timeout_s:g} s (deadlines.silent_s)"
        answer = answers[0]
        if answer is not None and not (isinstance(answer, str) and answer.strip()):
            return "", f"returned {answer!r} instead of None, or a text that says why the run is complete,"
        return _shown(answer) if answer else "", ""


def _shown(text: str) -> str:
    return one_line(without_secrets(text), _LONGEST_TEXT)
