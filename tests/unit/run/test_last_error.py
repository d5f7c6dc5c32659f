from __future__ import annotations

import pytest

from hpc_grpo.run.last_error import last_error, last_error_in_a_line, reason_to_stop


def test_the_last_traceback_with_its_whole_message() -> None:
    log = (
        "Traceback (most recent call last):\n  File a\nKeyError: 1\n\nstep 2\n"
        "Traceback (most recent call last):\n  File b\n    ray.get(x)\n"
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::train()\n  File c\ntorch.OutOfMemoryError: CUDA\n\nbye\n"
    )
    shown = last_error(log)
    assert shown.startswith("Traceback (most recent call last):\n  File b\n")
    assert shown.endswith("\ntorch.OutOfMemoryError: CUDA")


def test_a_prefix_of_every_line_is_taken_off() -> None:
    log = "(pid=3) Traceback (most recent call last):\n(pid=3)   File a\n(pid=3) ValueError: no\n"
    assert last_error(log) == "Traceback (most recent call last):\n  File a\nValueError: no"


def test_a_long_traceback_keeps_its_end() -> None:
    frames = "".join(f"  File {number}\n" for number in range(50))
    shown = last_error(f"Traceback (most recent call last):\n{frames}ValueError: no\n").splitlines()
    assert (shown[0], shown[-1], len(shown)) == ("…", "ValueError: no", 13)


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        ("", ""),
        ("all is well\n", ""),
        ("error: first\nerror: second\nstep\n", "error: second"),
        ("terminate called after throwing an instance of\n  what():  NCCL\n", "terminate called after throwing an"),
        ("Traceback (most recent call last):\n  File cut", "Traceback (most recent call last):\n  File cut"),
    ],
)
def test_last_errors(log: str, shown: str) -> None:
    assert last_error(log).startswith(shown)
    assert bool(last_error(log)) == bool(shown)


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("all is well\n", ""),
        ("Traceback (most recent call last):\n  File cut", ""),
        ("Traceback (most recent call last):\n  File a\nKeyError: 1\n\nbye\n", "KeyError: 1"),
        ("Traceback (most recent call last):\n  File a\nboom.Bang: one\ntwo\n", "boom.Bang: one two"),
        ("(pid=3) Traceback (most recent call last):\n(pid=3)   File a\n(pid=3) ValueError: no\n", "ValueError: no"),
        (
            "Traceback (most recent call last):\n  File b\nray.exceptions.RayTaskError(OutOfMemoryError): ray::f()\n"
            "  File c\ntorch.OutOfMemoryError: CUDA\n",
            "torch.OutOfMemoryError: CUDA",
        ),
        ("error: No\x00 data.\n  in:\x1b d.jsonl.\nbye\n", "No data. in: d.jsonl"),
        ("terminate called after throwing 'E'\n  what():  NCCL\n", "terminate called after throwing 'E' what(): NCCL"),
    ],
)
def test_a_last_error_in_a_line(log: str, line: str) -> None:
    assert last_error_in_a_line(log) == line


def test_a_long_message_is_cut_and_keeps_its_beginning() -> None:
    further = "".join(f"and {number}\n" for number in range(500))
    line = last_error_in_a_line(f"Traceback (most recent call last):\n  File a\nValueError: no {'x' * 300}\n{further}")
    assert (line[:14], line[-1], len(line)) == ("ValueError: no", "…", 300)
    assert last_error_in_a_line(f"Traceback (most recent call last):\nValueError: no\n{further}").startswith(
        "ValueError"
    )


def test_why_a_driver_stopped() -> None:
    assert reason_to_stop("step\nStopping after step 3: signal SIGTERM.\n") == "Stopping after step 3: signal SIGTERM."
    assert reason_to_stop("step\n") == ""
