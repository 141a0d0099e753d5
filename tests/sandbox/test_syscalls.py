"""The filter decides as its table says, on both architectures: its instructions are run here as the kernel would."""

from __future__ import annotations

import errno
import struct
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.sandbox.syscalls import ABSENT, ALLOW, ARCHITECTURES, KILL, REFUSED, TERMINAL, seccomp_program

EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
MACHINES = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


def decide(machine: str, number: int, first: int = 0, second: int = 0, architecture: int | None = None) -> int:
    """The answer to one call: a machine with one register, as in bpf(4)."""
    program = instructions(machine)
    about = struct.pack("=iIQ6Q", number, architecture or ARCHITECTURES[machine][1], 0, first, second, 0, 0, 0, 0)
    at = register = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("=I", about, operand)
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: register == operand, 0x35: register >= operand, 0x45: bool(register & operand)}[code]
            at += if_true if holds else if_false


@cache
def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("=HBBI", seccomp_program(machine)))


@MACHINES
def test_SBX_9_every_call_of_the_table_is_refused(machine: str):
    column = ARCHITECTURES[machine][0]
    for table, answer in ((REFUSED, EPERM), (ABSENT, ENOSYS)):
        for numbers in table.values():
            if numbers[column] is not None:
                assert decide(machine, numbers[column]) == answer


@pytest.mark.parametrize(
    ("machine", "clone", "ioctl", "prlimit", "sockets", "plain"),
    [
        ("x86_64", 56, 16, 302, (41, 53), (0, 1, 2, 57, 59, 61)),
        ("aarch64", 220, 29, 261, (198, 199), (63, 64, 221, 260)),
    ],
)
def test_calls_that_an_argument_decides(machine, clone, ioctl, prlimit, sockets, plain):
    assert decide(machine, clone, 0x11) == decide(machine, clone, 0x3D0F00) == ALLOW  # fork, a thread
    for bit in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, bit | 0x11) == EPERM
    assert all(decide(machine, ioctl, 0, request) == EPERM for request in TERMINAL)
    assert decide(machine, ioctl, 0, 0x5401) == ALLOW
    assert decide(machine, prlimit, 0) == ALLOW and decide(machine, prlimit, 1) == EPERM
    for call in sockets:
        assert {family for family in range(50) if decide(machine, call, family) == ALLOW} == {1, 2, 10}
    assert all(decide(machine, number) == ALLOW for number in plain)


@MACHINES
def test_another_architecture_is_killed_and_another_table_refused(machine: str):
    assert decide(machine, 0, architecture=0x40000003) == KILL  # 32-bit x86
    assert decide(machine, 0x40000000 + 1) == EPERM


@given(st.integers(0, 600), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
@settings(max_examples=60, deadline=None)
def test_every_call_gets_an_answer(number: int, first: int, second: int):
    for machine in ARCHITECTURES:
        assert decide(machine, number, first, second) in (ALLOW, EPERM, ENOSYS)


def test_other_machines_have_no_filter():
    assert seccomp_program("riscv64") == b""
