"""The command lines of containers, what is mounted and passed, and what is refused before a start."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import EXIT_CONFIG, ConfigError
from hpc_grpo.launch.place import container as module
from hpc_grpo.launch.place.container import Container, Engine, container_of, exit_code, labels_of, node_command
from hpc_grpo.run.source import own_command
from tests.support.configs import minimal_config

PODMAN = Container("me/image:1", "podman", "python3")
PROGRAM = own_command("-m", "a.module", "argument")
CWD = Path("/work")
ENVIRON = {"HOME": "/home/me", "PATH": "/host/bin", "HF_TOKEN": "a-secret", "LD_LIBRARY_PATH": "/host/lib"}


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH; its `podman` has the image me/image:1 alone."""
    program = tmp_path / "bin" / "podman"
    program.parent.mkdir()
    has = '[ "$4" = me/image:1 ] || { echo "$4: image not known" >&2; exit 125; }'
    program.write_text(f"#!/bin/sh\n{has}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return program.parent


def test_a_program_of_podman_has_the_nodes_spaces_and_the_images_python(engines: Path) -> None:
    argv, _ = PODMAN.wrap(PROGRAM, ENVIRON, CWD, labels_of("tag", "ray"), Path("/dev/shm/x/pid"))
    assert argv[:2] == [str(engines / "podman"), "run"]
    for space in ("pid", "network", "ipc", "uts"):
        assert f"--{space}=host" in argv
    assert {"--pull=never", "--http-proxy=false", "--log-driver=none", "--pids-limit=-1"} <= {*argv}
    assert [word for word in argv if word.startswith("--label")] == [
        "--label=hpc-grpo.node=tag",
        "--label=hpc-grpo.program=ray",
    ]
    assert "--workdir=/work" in argv
    at = argv.index("me/image:1")
    assert argv[at + 1 : at + 3] == ["sh", "-c"]
    assert argv[at + 4 :] == ["/dev/shm/x/pid", "python3", *PROGRAM[1:]]


def test_values_of_variables_are_in_no_argument(engines: Path) -> None:
    for engine in get_args(Engine):
        argv, environ = replace(PODMAN, engine=engine).wrap(PROGRAM, ENVIRON, CWD, [])
        assert not any("a-secret" in word for word in argv)
        assert "a-secret" in environ.values()
        assert environ["PATH"] == os.environ["PATH"]  # the client's own


def test_variables_of_the_hosts_software_stay_behind_unless_they_are_named(engines: Path) -> None:
    argv, _ = PODMAN.wrap(PROGRAM, ENVIRON, CWD, [])
    assert "--env=HF_TOKEN" in argv
    assert not any(word.startswith(("--env=PATH", "--env=LD_LIBRARY_PATH")) for word in argv)
    argv, environ = replace(PODMAN, named=["PATH"]).wrap(PROGRAM, ENVIRON, CWD, [])
    assert "--env=PATH=/host/bin" in argv
    assert environ["PATH"] != "/host/bin"


def test_apptainer_gets_variables_by_its_own_names_and_none_of_the_hosts(engines: Path) -> None:
    argv, environ = replace(PODMAN, engine="apptainer", image="/images/x.sif").wrap(PROGRAM, ENVIRON, CWD, [])
    assert argv[1:3] == ["exec", "--cleanenv"]
    assert environ["APPTAINERENV_HF_TOKEN"] == "a-secret"
    assert environ["APPTAINER_NO_EVAL"] == "1", "no shell evaluates a value"
    assert "APPTAINERENV_LD_LIBRARY_PATH" not in environ
    assert argv[argv.index("/images/x.sif") + 1 :] == ["python3", *PROGRAM[1:]]


def test_a_folder_that_the_user_mounts_is_mounted_once(engines: Path, tmp_path: Path) -> None:
    """podman refuses a second mount of a folder."""
    box = replace(PODMAN, mounts=[f"{tmp_path}:{tmp_path}:ro"])
    argv, _ = box.wrap(PROGRAM, ENVIRON | {"HF_HOME": str(tmp_path)}, CWD, [])
    assert [word for word in argv if word.startswith(f"--volume={tmp_path}:")] == [f"--volume={tmp_path}:{tmp_path}:ro"]


def test_enroot_starts_the_file_in_the_folder_of_the_run_and_mounts_by_its_own_options(engines: Path) -> None:
    box = replace(PODMAN, engine="enroot", image="/images/x.sqsh", mounts=["/opt/x:/y:ro", "/z"])
    argv, environ = box.wrap(PROGRAM, ENVIRON, CWD, labels_of("tag", "ray"), Path("/dev/shm/x/pid"))
    assert argv[1:3] == ["start", "--rw"]
    assert [word for word in argv if word.startswith("--mount=")][:2] == [
        "--mount=/opt/x:/y:none:x-create=auto,rbind,ro",
        "--mount=/z:/z:none:x-create=auto,rbind,rw",
    ]
    assert {"--env=HF_TOKEN", "--env=HOME=/home/me"} <= {*argv}
    assert environ["HF_TOKEN"] == "a-secret"
    assert argv[argv.index("/images/x.sqsh") + 1 :][:3] == ["/work", "sh", "-c"]


def test_folders_of_the_run_and_of_its_variables_are_mounted_and_those_of_the_system_are_not(
    engines: Path, tmp_path: Path
) -> None:
    for name in ("run", "run/inner", "data", "hub"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "train.jsonl").touch()
    paths = [str(tmp_path / name) for name in ("run/inner", "run", "data/train.jsonl")]
    box = replace(PODMAN, paths=[*paths, "/usr/bin/python3", "/", "a word"], mounts=["/opt/x:/y:ro", "/z"])
    argv, _ = box.wrap(PROGRAM, {"HF_HOME": str(tmp_path / "hub")}, CWD, [])
    own = [f"--volume={tmp_path / name}:{tmp_path / name}" for name in ("data", "hub", "run")]
    mounted = [word for word in argv if word.startswith("--volume=")]
    assert mounted[:2] == ["--volume=/opt/x:/y:ro", "--volume=/z:/z"]
    assert sorted(mounted[2:]) == own


def test_what_is_to_be_made_has_the_folder_around_it_and_texts_that_are_no_paths_have_none(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL", str(tmp_path))
    box = replace(PODMAN, paths=["$LOCAL/runs/new", "$UNSET/x", "/" + "long " * 2000, "/nul\0"], mounts=["$LOCAL:/x"])
    argv, _ = box.wrap(PROGRAM, {}, CWD, [])
    mounted = [word for word in argv if word.startswith("--volume=")]
    assert mounted == [f"--volume={tmp_path}:/x", f"--volume={tmp_path}:{tmp_path}"]


def test_users_options_come_last_so_that_they_win(engines: Path) -> None:
    argv, _ = replace(PODMAN, args=["--pull=missing"]).wrap(PROGRAM, {}, CWD, [])
    assert argv.index("--pull=missing") > argv.index("--pull=never")
    assert argv[argv.index("--pull=missing") + 1] == "me/image:1"


def test_docker_gets_user_groups_and_cores_which_its_daemon_does_not_inherit(engines: Path) -> None:
    argv, _ = replace(PODMAN, engine="docker").wrap(PROGRAM, {}, CWD, [])
    assert f"--user={os.getuid()}:{os.getgid()}" in argv
    assert "--http-proxy=false" not in argv


def test_a_root_file_system_is_podmans_alone(engines: Path) -> None:
    argv, _ = replace(PODMAN, image="/images/root:O").wrap(PROGRAM, {}, CWD, [])
    assert argv[argv.index("/images/root:O") - 1] == "--rootfs"


@pytest.mark.parametrize(
    ("box", "words"),
    [
        (replace(PODMAN, engine="docker"), ["launch.container.engine = docker", "PATH", "there: podman"]),
        (replace(PODMAN, image="me/other"), ["launch.container.image = me/other", "image not known", "podman pull"]),
        (replace(PODMAN, image="/no/such/root:O"), ["/no/such/root:O", "no such file"]),
    ],
)
def test_a_missing_engine_or_image_is_refused_with_what_to_do(engines: Path, box: Container, words: list[str]) -> None:
    PODMAN.refuse_absent()
    with pytest.raises(ConfigError) as refused:
        box.refuse_absent()
    assert refused.value.exit_code == EXIT_CONFIG
    assert all(word in str(refused.value) for word in words)


def test_containers_with_the_labels_are_ended_and_others_are_not(engines: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    (engines / "podman").write_text(f'#!/bin/sh\necho "$@" >> {asked}\n[ $1 = ps ] && echo c1 c2; true\n')
    PODMAN.end(labels_of("tag", "driver"))
    assert asked.read_text().splitlines() == [
        "ps --all --quiet --filter=label=hpc-grpo.node=tag --filter=label=hpc-grpo.program=driver",
        "rm --force c1 c2",
    ]


def test_an_engine_that_cannot_end_containers_is_told_of(engines: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (engines / "podman").write_text("#!/bin/sh\necho no daemon >&2; exit 1\n")
    PODMAN.end(["hpc-grpo.node=tag"])
    assert "hpc-grpo.node=tag may be left: podman ended with 1: no daemon" in capfd.readouterr().err


@pytest.mark.parametrize(("code", "expected"), [(None, None), (0, 0), (75, 75), (137, -9), (-9, -9), (255, 255)])
def test_an_exit_code_is_told_as_without_a_container(code: int | None, expected: int | None) -> None:
    assert exit_code(code) == expected


def test_paths_and_variables_of_a_config_reach_its_container(tmp_path: Path) -> None:
    launch = {"container": {"image": "x"}, "env": {"PATH": "/a"}, "pass_env": ["MINE"], "local_dir": "/scratch"}
    config = minimal_config(launch=launch, model={"path": "/models/m"})
    box = container_of(config.launch, config, [tmp_path])
    assert box is not None
    assert {str(tmp_path), "/scratch", "/models/m"} <= {*box.paths}
    assert box.named == ["PATH", "MINE"]
    assert (box.engine, box.python) == ("docker", "python3")
    assert container_of(LaunchConfig(), config, []) is None


@pytest.mark.parametrize(
    ("image", "engine", "words"),
    [("/a/b", "docker", "takes the name of an image, not a path"), ("nvcr.io#a/b", "enroot", "enroot import -o")],
)
def test_an_image_that_its_engine_cannot_start_is_refused(image: str, engine: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        minimal_config(launch={"container": {"image": image, "engine": engine}})


def test_without_a_container_a_node_runs_the_module_itself() -> None:
    assert node_command(None, "a.module") == [sys.executable, "-E", "-m", "a.module"]
    assert node_command(PODMAN, "a.module")[:4] == [sys.executable, "-E", "-m", module.__name__]
