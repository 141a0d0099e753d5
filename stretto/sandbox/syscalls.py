"""The system call filter of a box, as a seccomp program for bubblewrap.

Namespaces decide what a box can name; this decides which parts of the kernel it can reach at all: no tracing, no
mounting, no keyrings, no io_uring, no sockets but unix and internet ones (virtual machines have a socket family that
no network namespace covers), no System V or POSIX queues (they outlive processes, so that one grading candidate could
leave word for the next), no priorities (a candidate that made PID 1 idle would starve the candidates after it), and no
limits set on another process: a child could otherwise have PID 1 killed by RLIMIT_CPU, and its box would look lost. A
refused call fails with EPERM.

Linux seccomp(2), bpf(4). Only x86-64 and aarch64 have a table; elsewhere there is no filter.
"""

from __future__ import annotations

import errno
import platform
import struct

# name: (x86-64, aarch64)
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "syslog": (103, 116),
    "personality": (135, 92),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
}
PRLIMIT = (302, 261)
SOCKET = (41, 198)
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
X32 = 0x40000000
"""x86-64 also accepts calls of another table from this number on."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
LOAD, EQUAL, GREATER_OR_EQUAL, RETURN = 0x20, 0x15, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|…|K, BPF_RET|K
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; the low half of a 64-bit argument
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM


def seccomp_program(machine: str = platform.machine()) -> bytes:
    """The program in the kernel's format; empty where no table exists."""
    if machine not in ARCHITECTURES:
        return b""
    column, architecture = ARCHITECTURES[machine]
    program = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),  # jumps are (if true, if false), in instructions to skip
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (GREATER_OR_EQUAL, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
    ]
    for numbers in REFUSED.values():
        program += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE)]
    program += [(EQUAL, 0, 4, PRLIMIT[column]), (LOAD, 0, 0, FIRST_ARGUMENT), (EQUAL, 0, 1, 0)]
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    program += [(EQUAL, 1, 0, SOCKET[column]), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT)]
    for family in FAMILIES:
        program += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    program += [(RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
