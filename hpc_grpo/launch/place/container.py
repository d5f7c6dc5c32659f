"""A container around the programs of training on a node: Ray, the driver, the probe and the doctor's program.

The supervisor and the node agents stay on the host, which has the scheduler's commands and the processes to watch. A
program shares the node's processes, network, host name and shared memory, runs as the same user and finds the run, the
model and the data under the same paths. The engine's client forwards signals and exits with the program's exit code.
A program may outlive its client. So it writes its process id to a file, and its container has labels for `end`.

`python -m hpc_grpo.launch.place.container CONTAINER MODULE` runs a module of hpc-grpo in a container on this node.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from hpc_grpo.config import Config, LaunchConfig
from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.launch.environment import expand
from hpc_grpo.run.frozen_config import flat
from hpc_grpo.run.source import own_command
from hpc_grpo.system.commands import run_command
from hpc_grpo.system.disk import existing
from hpc_grpo.system.say import say

Engine = Literal["docker", "podman", "podman-hpc", "apptainer", "enroot"]

GPU_OPTIONS: dict[Engine, tuple[str, ...]] = {
    "docker": ("--gpus=all",),
    "podman": ("--device=nvidia.com/gpu=all",),  # CDI
    "podman-hpc": ("--gpu",),
    "apptainer": ("--nv",),
    "enroot": ("--env=NVIDIA_VISIBLE_DEVICES=all", "--env=NVIDIA_DRIVER_CAPABILITIES=compute,utility"),  # its hook
}
"""Options that give a container all GPUs of the node. CUDA_VISIBLE_DEVICES selects among them."""

OF_THE_HOST = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "CC", "CXX", "SHELL", "VIRTUAL_ENV", "CONDA_PREFIX"),
        *("CUDA_HOME", "CUDA_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HOSTNAME", "_"),
    )
)
"""Variables of the host's software. A container gets them only if launch.env or launch.pass_env names them."""

_OF_THE_CLIENT = frozenset(("PATH", "LD_LIBRARY_PATH", "TMPDIR", "HOME"))
"""Variables to set only inside the container: the engine's client needs its own values. None is a secret."""

_DEVICES = ("infiniband", "cxi*")  # in /dev: networks that bypass the kernel
_LIMITS = ("nofile", "nproc", "memlock", "core")
"""Limits to pass on. An engine's own limits allow too few open files for Ray, or allow core dumps with secrets."""

_NOT_MOUNTED = tuple(map(Path, ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")))
_RECORD_PID = 'echo $$ > "$0" && exec "$@"'
_ENROOT_RC = Path(__file__).with_name("enroot_rc.sh")
_ASK_S = 20.0


@dataclass(frozen=True)
class Container:
    """The container of a run's programs. `paths` are mounted on nodes that have them, `mounts` everywhere.

    `named` are variables that the user named: they reach the program even if they describe the host.
    """

    image: str
    engine: Engine
    python: str
    args: list[str] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)

    def refuse_absent(self) -> None:
        """Raise ConfigError if this node lacks the engine or the image."""
        node = socket.gethostname()
        if shutil.which(self.engine) is None:
            there = [engine for engine in GPU_OPTIONS if shutil.which(engine)]
            raise ConfigError(
                f"launch.container.engine = {self.engine}: {node} has no such program on PATH. Install it, load its "
                f"module (launch.modules), or choose one that is there: {', '.join(there) or 'none'}."
            )
        if self.image.startswith("/") or self.engine == "apptainer":
            path = self.image.removesuffix(":O")
            why = "" if "://" in path or Path(path).exists() else "no such file or folder"
        else:
            why = run_command([self.engine, "image", "inspect", "--format={{.Id}}", self.image], _ASK_S).error
        if why:
            raise ConfigError(
                f"launch.container.image = {self.image}: {node} does not have it ({why}). Put it there, for example "
                f"with `{self.engine} pull` on every node: a job pulls no image."
            )

    def wrap(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        cwd: Path,
        labels: Sequence[str],
        pid_file: Path | None = None,
    ) -> tuple[list[str], dict[str, str]]:
        """Return argv and environment of the engine's client for one of our programs (`own_command`), run in `cwd`.

        `environ` is the program's environment. Its values are not in argv, which every user of a node can read. Only
        the values of `_OF_THE_CLIENT`, which are no secrets, may be in argv.
        """
        kept = [name for name in environ if name in self.named or name not in OF_THE_HOST]
        passed = {name: environ[name] for name in kept if name.isidentifier()}  # leaves out functions of a shell
        passed["PYTHONNOUSERSITE"] = "1"  # packages in the user's home are for another Python
        inner = [self.python, *command[1:]]
        if pid_file is not None:
            inner = ["sh", "-c", _RECORD_PID, str(pid_file), *inner]
        of_variables = [value for name, value in passed.items() if name != "XDG_RUNTIME_DIR"]
        mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in map(expand, self.mounts)]
        taken = {mount.split(":")[1] for mount in mounts}  # podman refuses two mounts of one folder
        folders = _folders([*map(expand, self.paths), *of_variables])
        mounts += [f"{folder}:{folder}" for folder in folders if folder not in taken]
        gpus = GPU_OPTIONS[self.engine] if Path("/dev/nvidiactl").exists() else ()
        program = shutil.which(self.engine) or self.engine
        if self.engine == "apptainer":
            told = {f"APPTAINERENV_{name}": value for name, value in passed.items() if name != "HOME"}
            told["APPTAINER_NO_EVAL"] = "1"  # else a shell in the container evaluates the values
            options = ["--cleanenv", f"--pwd={cwd}", *(f"--bind={mount}" for mount in mounts), *gpus]
            return [program, "exec", *options, *self.args, self.image, *inner], {**os.environ, **told}
        by_name = {name: value for name, value in passed.items() if name not in _OF_THE_CLIENT}
        told = {**os.environ, **by_name}
        variables = [f"--env={name}" if name in by_name else f"--env={name}={value}" for name, value in passed.items()]
        if self.engine == "enroot":
            parts = [f"{mount}:rw".split(":")[:3] for mount in mounts]
            mounts = ["--mount={}:{}:none:x-create=auto,rbind,{}".format(*part) for part in parts]
            options = [*mounts, *gpus, *variables, *self.args]
            start = [program, "start", "--rw", f"--rc={_ENROOT_RC}"]  # what programs write stays in memory
            return [*start, *options, self.image, str(cwd), *inner], told
        options = [
            *_run_options(self.engine, labels),
            f"--workdir={cwd}",
            *(f"--volume={mount}" for mount in mounts),
            *(f"--device={path}" for pattern in _DEVICES for path in sorted(Path("/dev").glob(pattern))),
            *gpus,
            *variables,
            *self.args,
            *(["--rootfs"] if self.image.startswith("/") else []),
        ]
        return [program, "run", *options, self.image, *inner], told

    def end(self, labels: Sequence[str]) -> None:
        """End the containers that have all of `labels`, even if their clients have ended. Prints failures."""
        if self.engine in ("apptainer", "enroot"):  # their programs are processes like any others
            return
        filters = [f"--filter=label={label}" for label in labels]
        listed = run_command([self.engine, "ps", "--all", "--quiet", *filters], _ASK_S)
        error = listed.error
        if found := listed.text.split():
            error = run_command([self.engine, "rm", "--force", *found], _ASK_S).error
        if error and "no such container" not in error.lower():  # a container that has just ended removes itself
            say(f"Containers with the labels {', '.join(labels)} may be left: {error}", sys.stderr)


def container_of(launch: LaunchConfig, config: Config | None, paths: Iterable[Path]) -> Container | None:
    """Return the container of the run's programs, None for no container. Mounts `paths` and the config's paths."""
    if (asked := launch.container) is None:
        return None
    values = {} if config is None else flat(config.model_dump(mode="json", exclude={"launch"}))
    texts = [text for value in values.values() for text in (value if isinstance(value, list) else [value])]
    named = [text for text in texts if isinstance(text, str) and text.startswith("/")]
    return Container(
        **asked.model_dump(),
        paths=[*map(str, paths), *filter(None, [launch.local_dir]), "/tmp", *named],
        named=[*launch.env, *launch.pass_env],
    )


def labels_of(tag: str, program: str = "") -> list[str]:
    """Return the labels of a node's containers in an attempt: of all, or of one program."""
    return [f"hpc-grpo.node={tag}", *([f"hpc-grpo.program={program}"] if program else [])]


def exit_code(code: int | None) -> int | None:
    """Convert a client's exit code to its program's, such as 137 to -9: engines report 137 after SIGKILL."""
    # A code above the last signal's is the client's own, such as podman's 255.
    return 128 - code if code is not None and 128 < code < 128 + signal.NSIG else code


def node_command(container: Container | None, module: str) -> list[str]:
    """Return the command that runs a module of hpc-grpo on a node, in `container` if it is not None."""
    if container is None:
        return own_command("-m", module, flags=["-E"])
    return own_command("-m", __name__, json.dumps(asdict(container)), module, flags=["-E"])


def _run_options(engine: Engine, labels: Sequence[str]) -> list[str]:
    cpus = sorted(os.sched_getaffinity(0))
    options = [
        "--rm",
        "--interactive",
        "--pull=never",
        "--entrypoint=",
        *(f"--label={label}" for label in labels),
        *(f"--{space}=host" for space in ("pid", "network", "ipc", "uts")),
        "--security-opt=label=disable",
        "--log-driver=none",
        "--pids-limit=-1",
        "--stop-timeout=1",
        *(f"--ulimit={name}={_limit(name)}" for name in _LIMITS),
    ]
    if engine == "docker":  # docker's daemon starts the container, without this process's user and cores
        groups = [f"--group-add={group}" for group in os.getgroups()]
        bound = [f"--cpuset-cpus={','.join(map(str, cpus))}"] if len(cpus) < (os.cpu_count() or 1) else []
        return [*options, f"--user={os.getuid()}:{os.getgid()}", *groups, *bound]
    return [*options, "--http-proxy=false", *(["--userns=keep-id", "--group-add=keep-groups"] if os.getuid() else [])]


def _limit(name: str) -> str:
    """Return this process's soft and hard limit; -1 stands for no limit."""
    limits = list(resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}")))
    if name == "nproc":  # podman lowers its own limit to this value, and may not raise it again.
        most = int(Path("/proc/sys/kernel/pid_max").read_text())
        limits = [most if limit < 0 else min(limit, most) for limit in limits]
    return ":".join(map(str, limits))


def _folders(texts: Iterable[str]) -> list[str]:
    """Return the folders to mount for the paths in `texts`: existing and outermost, without folders of the system."""
    folders: list[Path] = []
    for text in texts:
        with suppress(OSError, ValueError):  # text that is no path, or too long for one
            folder = existing(Path("/", text if text.startswith("/") else ""))
            if folder != Path("/") and not any(map(folder.is_relative_to, _NOT_MOUNTED)):
                folders.append(folder)
    shortest = sorted(set(folders), key=lambda folder: len(folder.parts))
    outer = [folder for at, folder in enumerate(shortest) if not any(map(folder.is_relative_to, shortest[:at]))]
    return [str(folder) for folder in outer]


def main() -> None:
    """Replace this process by the module in a container, or exit with an error."""
    container, module = Container(**json.loads(sys.argv[1])), sys.argv[2]
    try:
        container.refuse_absent()
        command = own_command("-m", module, flags=["-E"])
        argv, environ = container.wrap(command, os.environ, Path.cwd(), labels_of(f"doctor-{os.getpid()}"))
    except HpcGrpoError as error:
        say(str(error), sys.stderr)
        sys.exit(error.exit_code)
    os.execvpe(argv[0], argv, environ)


if __name__ == "__main__":
    main()
