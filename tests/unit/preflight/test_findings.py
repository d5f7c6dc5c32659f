"""Running checks, merging findings of many nodes, and printing them."""

from __future__ import annotations

import threading

from hpc_grpo.preflight.findings import GROUPS, Finding, failure, guarded, merged, ok, report_text


def test_a_check_that_breaks_is_a_failure_that_names_the_error() -> None:
    def broken() -> Finding:
        raise PermissionError(13, "Permission denied", "/secret/place")

    found = guarded(broken)
    assert found.status == "failure"
    assert "PermissionError" in found.says
    assert "/secret/place" in found.says
    assert found.fix
    assert guarded(lambda: ok("fine")).status == "ok"
    assert guarded(lambda: failure("gone", "fetch it")).fix == "fetch it"


def test_a_check_that_hangs_is_a_failure_after_its_deadline() -> None:
    go_on = threading.Event()

    def hanging() -> Finding:
        go_on.wait()
        return ok("too late")

    found = guarded(hanging, deadline_s=0.2)
    go_on.set()
    assert (found.status, "did not end within" in found.says) == ("failure", True)
    assert found.fix


def test_many_different_nodes_stay_one_short_line() -> None:
    found = merged({f"n{i}": ok(f"eth0 has 10.0.0.{i}") for i in range(9)})
    assert found.says.startswith("n0: eth0 has 10.0.0.0; n1: ")
    assert found.says.endswith("; and 5 more")


def test_the_table_and_json_hold_every_finding() -> None:
    gpus, cuda = Finding("failure", "one line\nand another", "end them"), Finding("ok", "fine")
    groups: dict[str, dict[str, Finding]] = {"nodes": {"gpus": gpus, "cuda": cuda}, "empty": {}}
    assert GROUPS.validate_json(GROUPS.dump_json(groups)) == groups
    assert report_text(groups, 12.4) == (
        "nodes:\n"
        "  failure gpus  one line\n"
        "                and another\n"
        "          fix: end them\n"
        "  ok      cuda  fine\n"
        "\n"
        "1 ok, 0 warnings, 1 failure, 0 skipped in 12 s\n"
    )
