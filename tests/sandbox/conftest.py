from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from stretto.config import SandboxConfig
from stretto.sandbox.box import Box
from stretto.sandbox.pool import BoxPool


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[BoxPool]:
    """One pool of real boxes per test file."""
    pool = BoxPool(SandboxConfig(seconds=2.0, memory_mib=128, workspace_mib=8, warm=0))
    await pool.start()
    yield pool
    await pool.close()


@pytest_asyncio.fixture(loop_scope="module")
async def box(pool: BoxPool) -> AsyncIterator[Box]:
    box = await pool.box()
    yield box
    await box.stop()
