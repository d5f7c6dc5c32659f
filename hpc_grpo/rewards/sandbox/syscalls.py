"""Refuse the system calls that take memory past every limit, act on other processes or leave the sandbox.

Runs in the first process of a sandbox, before any program. The filter is inherited and cannot be removed. A refused
call fails with ENOSYS, a refused argument with EPERM. A call of another architecture's table ends the process.

It imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

REFUSED = {
    # Memory that belongs to no process: neither RLIMIT_AS nor the resident set counts this memory.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "io_setup": (206, 0), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "vmsplice": (278, 75), "splice": (275, 76),
    "tee": (276, 77), "sendfile": (40, 71), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241),
    "landlock_create_ruleset": (444, 444),
    # Keys of the user's session.
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # Other processes, and other mounts.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "pidfd_getfd": (438, 438), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "syslog": (103, 116),
    # The filter cannot read the flags of clone3, which lie in memory. The C library then calls clone.
    "clone3": (435, 435),
}  # fmt: skip
"""Name -> numbers on x86_64 and aarch64."""

_EQUAL, _OTHER_THAN, _ANY_BIT, _ALL_BITS = range(4)
_AF_UNIX = 1
_NAMESPACES = 0x7E020000
_MAP_SHARED_ANONYMOUS, _MAP_HUGETLB = 0x21, 0x40000
_MADV_PAGEOUT = 21
_SO_SNDBUF, _SO_RCVBUF = 7, 8
_F_SETPIPE_SZ = 1031
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1

_REFUSED_ARGUMENTS = (
    ((41, 198), 0, _OTHER_THAN, _AF_UNIX),  # socket
    ((53, 199), 0, _OTHER_THAN, _AF_UNIX),  # socketpair
    ((54, 208), 2, _EQUAL, _SO_SNDBUF),  # setsockopt
    ((54, 208), 2, _EQUAL, _SO_RCVBUF),
    ((72, 25), 1, _EQUAL, _F_SETPIPE_SZ),  # fcntl
    # mmap: shared pages survive MADV_DONTNEED, and no limit counts them
    ((9, 222), 3, _ALL_BITS, _MAP_SHARED_ANONYMOUS),
    ((9, 222), 3, _ANY_BIT, _MAP_HUGETLB),
    ((28, 233), 2, _EQUAL, _MADV_PAGEOUT),  # madvise: pages in swap are not resident
    ((56, 220), 0, _ANY_BIT, _NAMESPACES),  # clone
    ((302, 261), 0, _OTHER_THAN, 0),  # prlimit64 of another process
    ((203, 122), 0, _OTHER_THAN, 0),  # sched_setaffinity
    ((144, 119), 0, _OTHER_THAN, 0),  # sched_setscheduler
    ((142, 118), 0, _OTHER_THAN, 0),  # sched_setparam
    ((314, 274), 0, _OTHER_THAN, 0),  # sched_setattr
    ((141, 140), 0, _OTHER_THAN, _PRIO_PROCESS),  # setpriority
    ((141, 140), 1, _OTHER_THAN, 0),
    ((251, 30), 0, _OTHER_THAN, _IOPRIO_WHO_PROCESS),  # ioprio_set
    ((251, 30), 1, _OTHER_THAN, 0),
)
"""Numbers, position of the argument, test, value. Linux reads each of these arguments as 32 bits."""

_LOAD, _RETURN, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _AND = 0x20, 0x06, 0x15, 0x35, 0x45, 0x54
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32 = 0x40000000
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _PR_SET_NO_NEW_PRIVS = 22, 2, 38


def refuse_calls() -> None:
    """Install the filter for this process and all its children. Raises OSError if the kernel has no filters."""
    instructions = program(os.uname().machine)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in instructions))
    # struct sock_fprog: a count and a pointer.
    filter_ = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_void_p(ctypes.addressof(filter_)), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp filter: {os.strerror(ctypes.get_errno())}")


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter: operation, jump if true, jump if false, operand of each instruction."""
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the sandbox has no system call filter for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    refused, no_such_call = (_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
        (_JUMP_AT_LEAST, 0, 1, _X32),
        no_such_call,
    ]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            code += [(_JUMP_EQUAL, 0, 1, number), no_such_call]
    for numbers, position, test, value in _REFUSED_ARGUMENTS:
        checks = [(_LOAD, 0, 0, _ARGUMENTS_OFFSET + 8 * position)]
        if test == _ALL_BITS:
            checks += [(_AND, 0, 0, value)]
        checks += [
            (_JUMP_BITS, 0, 1, value) if test == _ANY_BIT
            else (_JUMP_EQUAL, 1, 0, value) if test == _OTHER_THAN
            else (_JUMP_EQUAL, 0, 1, value),
            refused,
            (_LOAD, 0, 0, _NUMBER_OFFSET),
        ]  # fmt: skip
        code += [(_JUMP_EQUAL, 0, len(checks), numbers[column]), *checks]
    return [*code, (_RETURN, 0, 0, _ALLOW)]
