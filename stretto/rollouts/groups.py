"""A group: all attempts at one task, compared with each other. Pure state, rebuilt from the ledger after a restart.

    slot:   waiting --lease--> leased --receipt--> closed
               ^------lapse------'                         the first receipt of a slot counts, any later one is a repeat
    group:  open (some slot is not closed) -> finished -> batched | dropped | evaluated
               '-- cut short at its deadline --^              with the members that have answered

Every lease has a rollout id of its own, so that a late worker cannot overwrite the payload of another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.records import Outcome, Receipt
from stretto.rollouts.advantages import has_signal

TRAIN = "train"

INFRA = "infra"
UNANSWERED = ("deadline", "silent")
"""Reasons of a lapse that count against its slot: late, or nothing heard of the worker."""
MAX_UNANSWERED = 3
"""A slot whose leases went unanswered this often is closed as `infra`, so that its group ends."""
MAX_FAILED = 8
"""A member of a training group that ended as `infra` this often is not replaced again."""


@dataclass(slots=True)
class Grant:
    """A lease as the ledger keeps it (the task and the sampling follow from the group)."""

    rollout: str
    group: str
    member: int
    attempt: int
    worker: str
    engine: str
    version: int
    deadline: float


@dataclass(frozen=True)
class Evaluation:
    """Attempts at a fixed list of tasks, each task a group; its groups are never trained."""

    id: str
    name: str  # the purpose of its rollouts
    split: str
    version: int  # an engine must serve this version or a later one
    attempts: int
    temperature: float
    tasks: list[str]  # ids


@dataclass(slots=True)
class Slot:
    """One member of a group."""

    attempts: int = 0  # leases granted
    unanswered: int = 0  # of these, lost because a worker did not answer
    failed: int = 0  # of these, ended as infra and tried again
    lease: str | None = None  # rollout id of the lease that is out
    worker: str = ""  # who had it last
    version: int | None = None  # lowest version any lease of this slot was pinned to
    receipt: Receipt | None = None


@dataclass
class Group:
    id: str
    ordinal: int  # of the prompt stream; place in the list of tasks for an evaluation
    task: str
    purpose: str
    evaluation: str | None = None  # id
    slots: list[Slot] = field(default_factory=list)
    engine: str = ""  # members share one engine as long as it is fit
    waits: int = 0  # members that need a lease
    missing: int = 0  # members without a receipt
    opened: float = 0.0  # unix seconds
    short: bool = False  # cut short at its deadline: nobody waits for the members without a receipt
    _oldest: int | None = None  # what `oldest_version` found, until something changes
    _known: bool = False

    def __post_init__(self) -> None:
        self.waits = self.missing = len(self.slots)

    @property
    def waiting(self) -> list[int]:
        """Members that need a lease."""
        if self.short:
            return []
        return [member for member, slot in enumerate(self.slots) if slot.lease is None and slot.receipt is None]

    @property
    def finished(self) -> bool:
        return self.missing == 0 or self.short

    @property
    def receipts(self) -> list[Receipt]:
        return [slot.receipt for slot in self.slots if slot.receipt is not None]

    @property
    def survivors(self) -> list[Receipt]:
        """Receipts that count; `infra` leaves the batch and the statistics."""
        return [receipt for receipt in self.receipts if receipt.outcome is not Outcome.INFRA]

    @property
    def oldest_version(self) -> int | None:
        """Lower bound of the version of any token this group may train; None before anything was leased."""
        if not self._known:
            self._oldest, self._known = self._lowest_version(), True
        return self._oldest

    def _lowest_version(self) -> int | None:
        versions = [receipt.oldest_version for receipt in self.survivors]
        if not self.short:
            versions += [slot.version for slot in self.slots if slot.receipt is None and slot.version is not None]
        return min(versions, default=None)

    @property
    def signal(self) -> bool:
        return has_signal([receipt.reward for receipt in self.survivors])

    def next_rollout(self, member: int) -> tuple[str, int]:
        """Id and attempt number of the next lease of a member."""
        attempt = self.slots[member].attempts
        return f"{self.id}-{member:02d}" + (f"r{attempt}" if attempt else ""), attempt

    def leased(self, grant: Grant) -> None:
        slot = self.slots[grant.member]
        self.waits -= slot.lease is None
        self._known = False
        slot.attempts += 1
        slot.lease, slot.worker = grant.rollout, grant.worker
        slot.version = grant.version if slot.version is None else min(slot.version, grant.version)
        self.engine = grant.engine

    def lapsed(self, member: int, reason: str) -> None:
        """The lease that was out will not be answered, as far as we know, or ended as infra; its slot waits again."""
        slot = self.slots[member]
        slot.lease = None
        slot.unanswered += reason in UNANSWERED
        slot.failed += reason == INFRA
        self._known = False
        self.waits += 1

    def cut_short(self) -> None:
        """Its deadline is over: it is finished with the members that have answered."""
        self.short, self._known = True, False
        self.waits = 0

    def closed(self, member: int, receipt: Receipt) -> None:
        slot = self.slots[member]
        assert slot.receipt is None, f"{receipt.rollout}: its slot has a receipt already"
        self.waits -= slot.lease is None
        self.missing -= 1
        self._known = False
        slot.lease, slot.receipt = None, receipt

    def hopeless(self, member: int) -> bool:
        """Has this slot been given out in vain often enough?"""
        slot = self.slots[member]
        return slot.unanswered >= MAX_UNANSWERED or slot.failed >= self._tries

    def last_try(self, member: int) -> bool:
        """Is the lease that is out the last one, whatever comes of it?"""
        return self.slots[member].failed + 1 >= self._tries

    @property
    def _tries(self) -> int:
        return MAX_UNANSWERED if self.evaluation is not None else MAX_FAILED


def training_group(ordinal: int, task: str, size: int, opened: float = 0.0) -> Group:
    return Group(f"g{ordinal:07d}", ordinal, task, TRAIN, slots=[Slot() for _ in range(size)], opened=opened)


def evaluation_group(asked: Evaluation, place: int) -> Group:
    slots = [Slot() for _ in range(asked.attempts)]
    return Group(f"{asked.id}.{place:04d}", place, asked.tasks[place], asked.name, asked.id, slots)
