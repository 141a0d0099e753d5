"""The system call filter of a box, as a seccomp program for bubblewrap.

Namespaces decide what a box can name; this decides which parts of the kernel it can reach at all: no tracing, no
mounting, no keyrings, no io_uring, no sockets but unix and internet ones (virtual machines have a socket family that
no network namespace covers), no new namespaces by whatever call, no pushing of characters into a terminal, no System V
or POSIX queues (they outlive processes, so that one grading candidate could leave word for the next), no priorities (a
candidate that made PID 1 idle would starve the candidates after it), and no limits set on another process: a child
could otherwise have PID 1 killed by RLIMIT_CPU, and its box would look lost.

A refused call fails with EPERM; clone3, whose flags lie in memory a filter can't read, with ENOSYS, so that libraries
fall back to clone.

Linux seccomp(2), bpf(4). Only x86-64 and aarch64 have a table; elsewhere there is no filter.
"""

from __future__ import annotations

import errno
import platform
import struct

# name: (x86-64, aarch64); None where there is no such call
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
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
    "open_tree_attr": (467, 467),
    "listmount": (458, 458),
    "statmount": (457, 457),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
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
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "personality": (135, 92),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "vhangup": (153, 58),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_secret": (447, 447),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
}
ABSENT = {"clone3": (435, 435)}
PRLIMIT = (302, 261)
CLONE = (56, 220)
NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
IOCTL = (16, 29)
TERMINAL = (0x5412, 0x541C, 0x541D, 0x5423)
"""TIOCSTI and TIOCLINUX put characters into a terminal; TIOCCONS and TIOCSETD take over a console and a line."""
SOCKETS = ((41, 198), (53, 199))
"""socket, socketpair."""
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6: none else, hence no AF_VSOCK, AF_ALG, AF_PACKET, AF_NETLINK."""
X32 = 0x40000000
"""x86-64 also accepts calls of another table from this number on."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
LOAD, EQUAL, GREATER_OR_EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|…|K, BPF_RET|K
NUMBER, ARCHITECTURE, FIRST_ARGUMENT, SECOND_ARGUMENT = 0, 4, 16, 24  # in struct seccomp_data; low half of 64 bits
ALLOW, KILL, REFUSE, NO_SUCH_CALL = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

Instruction = tuple[int, int, int, int]  # code, to skip if true, to skip if false, operand


def seccomp_program(machine: str = platform.machine()) -> bytes:
    """The program in the kernel's format; empty where no table exists."""
    if machine not in ARCHITECTURES:
        return b""
    column, architecture = ARCHITECTURES[machine]
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (GREATER_OR_EQUAL, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
    ]
    program += judged(CLONE[column], FIRST_ARGUMENT, [(ANY_BIT, NEW_NAMESPACES, REFUSE)], otherwise=ALLOW)
    program += judged(IOCTL[column], SECOND_ARGUMENT, [(EQUAL, call, REFUSE) for call in TERMINAL], otherwise=ALLOW)
    program += judged(PRLIMIT[column], FIRST_ARGUMENT, [(EQUAL, 0, ALLOW)], otherwise=REFUSE)
    for numbers in SOCKETS:
        families = [(EQUAL, family, ALLOW) for family in FAMILIES]
        program += judged(numbers[column], FIRST_ARGUMENT, families, otherwise=REFUSE)
    for table, answer in ((REFUSED, REFUSE), (ABSENT, NO_SUCH_CALL)):
        for numbers in table.values():
            if numbers[column] is not None:
                program += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, answer)]
    program += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def judged(number: int, argument: int, tests: list[tuple[int, int, int]], otherwise: int) -> list[Instruction]:
    """A call that an argument decides: by the first test (comparison, operand, answer) that holds, or `otherwise`."""
    body: list[Instruction] = [(LOAD, 0, 0, argument)]
    for comparison, operand, answer in tests:
        body += [(comparison, 0, 1, operand), (RETURN, 0, 0, answer)]
    body += [(RETURN, 0, 0, otherwise)]
    return [(EQUAL, 0, len(body), number), *body]
