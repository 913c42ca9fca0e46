# SPDX-License-Identifier: Apache-2.0
"""The limits of a process that reads a client's file: time, memory, and the system calls that computing takes.

The filter is a program of the kernel's classic BPF (seccomp(2)). A call that is not on the list fails with EPERM. So the process opens
no file and no socket, and starts no process. The filter needs no privilege of the container, and it cannot be removed again.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Sequence
from pathlib import Path

# From linux/prctl.h, linux/seccomp.h, linux/audit.h and linux/bpf_common.h.
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
CALL_AT, ARCHITECTURE_AT = 0, 4


# Allowed calls, with their numbers on x86_64 and aarch64: open files, memory, time, signals, and the end.
CALLS = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "fstat": (5, 80),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "writev": (20, 66),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "sched_yield": (24, 124),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "futex": (202, 98),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "getrandom": (318, 278),
    "restart_syscall": (219, 128),
    "fcntl": (72, 25),
    "getrusage": (98, 165),
    "ppoll": (271, 73),
}
# The kernel's numbers of the architectures, in the order of the numbers above.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def limit(*, cpu_s: int, memory_bytes: int) -> None:
    """Let the kernel end this process after `cpu_s` of CPU time, and refuse it more than `memory_bytes` beyond its current memory."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (has + memory_bytes, has + memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def filter_calls() -> None:
    """Allow this process only the system calls of CALLS from now on, for good; any other fails with EPERM.

    Raises:
        OSError: the kernel has no such filter, or the architecture has no list.
    """
    if (machine := platform.machine()) not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"system calls can be filtered on {', '.join(ARCHITECTURES)}, found {machine}")
    column = list(ARCHITECTURES).index(machine)
    instructions = _instructions(ARCHITECTURES[machine], [numbers[column] for numbers in CALLS.values()])
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = _Program(len(instructions), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({arguments[0]}): {os.strerror(ctypes.get_errno())}")


def _instructions(architecture: int, calls: Sequence[int]) -> list[bytes]:
    """Return the filter's encoded instructions: calls with these numbers are allowed, others and those of another architecture refused."""
    checks = [_instruction(JUMP_IF_EQUAL, call, where_true=len(calls) - index) for index, call in enumerate(calls)]
    return [
        _instruction(LOAD_WORD, ARCHITECTURE_AT),
        _instruction(JUMP_IF_EQUAL, architecture, where_true=1),
        _instruction(RETURN, REFUSE),
        _instruction(LOAD_WORD, CALL_AT),
        *checks,
        _instruction(RETURN, REFUSE),
        _instruction(RETURN, ALLOW),
    ]


def _instruction(code: int, value: int, *, where_true: int = 0) -> bytes:
    return struct.pack("=HBBI", code, where_true, 0, value)
