"""What of a rollout's end is ours, proven from outside: the engine, the box or the clock of the lease failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from stretto.engine.client import EngineError
from stretto.harness.ending import Ending
from stretto.harness.history import StreamError
from stretto.harness.speaker import Speaker
from stretto.harness.toolset import ToolSetError
from stretto.sandbox.box import BoxLost

SHARE = 0.9
"""Of the lease's time; the rest is for grading."""


async def ended(
    played: Coroutine[Any, Any, tuple[Ending, str]], speaker: Speaker, seconds: float
) -> tuple[Ending, str]:
    """What `played` came to within its share of the lease's `seconds`: its own ending, or `infra` with a sentence."""
    try:
        async with asyncio.timeout(seconds * SHARE):
            return await played
    except TimeoutError:
        return Ending.INFRA, f"the lease ran out after {seconds * SHARE:.0f} s, waiting for {speaker.waiting_for}"
    except StreamError as error:
        return Ending.INFRA, f"{speaker.lease.engine}: {error}"
    except (EngineError, BoxLost, OSError, ToolSetError) as error:
        return Ending.INFRA, str(error) or type(error).__name__
