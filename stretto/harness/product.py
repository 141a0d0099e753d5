"""A rollout played by a product's own agent, in the box, instead of by our loop (`client.py` declares it).

    box:  client ⇄ 127.0.0.1 ⇄ tunnel  ─▶  gateway.py ─▶ engine
          └ works on /workspace             └ conversations.py: segments

OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL are set for it. When it ends with 0, the workspace is handed in as it
is then. It shares the box with whatever the policy runs, so nothing it does is proof against the policy: when it ends
otherwise, and the policy has spoken, that is the policy's fault. Before that it is ours (`infra`).

`harness.max_tokens` bounds each conversation: the client is told that its context is full, as any endpoint would, and
may go on with a shorter one. `harness.max_turns` bounds the requests of all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator

from stretto.config import HarnessConfig
from stretto.engine.client import EngineClient
from stretto.harness.blame import ended
from stretto.harness.chat import Chat
from stretto.harness.client import Client, load
from stretto.harness.conversations import Conversations
from stretto.harness.ending import Ending
from stretto.harness.gateway import MODEL, Gateway
from stretto.harness.loop import TOOL_SHARE, TRAIN, Played
from stretto.harness.session import Session
from stretto.harness.spans import Spans
from stretto.harness.speaker import Elsewhere, Speaker
from stretto.records import Lease
from stretto.sandbox.box import Box, BoxError, BoxLost
from stretto.sandbox.libraries import LIBRARIES
from stretto.sandbox.output import Kept
from stretto.sandbox.pool import BoxPool
from stretto.sandbox.process import Process
from stretto.sandbox.tunnel import Tunnel

LOOK_SECONDS = 0.2
"""How often the client's own time is looked at."""
KEEP = 600
"""Bytes of its output that a reason quotes."""
FLOOD = 16 << 20
"""Bytes of output, beyond which it is ended: nobody sees them, and reading costs the worker."""


async def play(
    lease: Lease,
    engine: EngineClient,
    chat: Chat,
    pool: BoxPool,
    config: HarnessConfig,
    spans: Spans | None = None,
    elsewhere: Elsewhere | None = None,
    turn_seconds: float = math.inf,
    latency: Iterator[float] | None = None,
) -> Played:
    """`loop.play`, with the client that `config.client` names in place of the loop. The client's own time, while the
    policy isn't asked to speak, is bounded as tools' time is there. `latency` is not for it: its calls are its own."""
    assert latency is None, "refused with the configuration"
    left = lease.deadline - time.time()
    speaker = Speaker(lease, engine, chat, elsewhere, turn_seconds)
    conversations = Conversations(chat, spans or Spans(chat), config.max_tokens, lease.sampling.truncated)
    gateway = Gateway(speaker, conversations, config)
    files: dict[str, bytes] = {}
    version = ""
    session: Session | None = None

    async def played() -> tuple[Ending, str]:
        nonlocal files, version, session
        client = load(config.client)
        conversations.does, version = client.does, client.version
        session = Session(lease.task, pool, client.toolset)
        ending, reason = await _run(client, session, gateway, lease.task.instruction, left * TOOL_SHARE)
        if ending is Ending.SUBMITTED:
            speaker.waiting_for = "the box to hand over the workspace"
            try:
                files = await session.collect()
            except BoxError as error:
                ending, reason = Ending.FAULT, f"the workspace cannot be collected: {error}"
        elif lease.purpose != TRAIN:
            with contextlib.suppress(BoxError, BoxLost):
                files = await session.collect()
        return ending, reason

    try:
        ending, reason = await ended(played(), speaker, left)
    finally:
        await gateway.close()
        await asyncio.gather(speaker.release(), *([session.close()] if session else []))
    segments, calls = conversations.segments()
    return Played(
        segments=segments,
        calls=calls,
        messages=conversations.messages,
        turns=conversations.turns,
        ending=ending,
        files=files,
        reason=reason,
        engine=speaker.engine.url,
        tools=version,
        effort=conversations.effort,
    )


async def _run(
    client: Client, session: Session, gateway: Gateway, instruction: str, seconds: float
) -> tuple[Ending, str]:
    """Let the client work until it ends, or is ended; its processes are gone then. `seconds` are for itself."""
    box = await session.open()
    await gateway.start()
    try:
        tunnel = await Tunnel.open(box, gateway.connect)
    except BoxError as error:  # the policy has not touched the box yet
        raise BoxLost(str(error)) from error
    try:
        process = await _start(box, client, tunnel.port)
        try:
            return await _watch(process, gateway, tunnel, instruction, seconds)
        finally:
            await process.close()
    finally:
        await tunnel.close()


async def _start(box: Box, client: Client, port: int) -> Process:
    given = {
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": "stretto",
        "OPENAI_MODEL": MODEL,
        "PYTHONPATH": LIBRARIES,
        **client.environment,
    }
    variables = [f"{name}={value}" for name, value in given.items()]
    try:
        return await box.open(["env", *variables, "bash", "-c", f'PATH="$PATH:{LIBRARIES}/bin"\n{client.command}'])
    except BoxError as error:
        raise BoxLost(str(error)) from error


async def _watch(
    process: Process, gateway: Gateway, tunnel: Tunnel, instruction: str, seconds: float
) -> tuple[Ending, str]:
    gateway.speaker.waiting_for = "the client"
    told = Kept(KEEP)
    for stream in (process.stdout, process.stderr):
        told.add(bytes(stream.held))
        stream.hear = told.add
    reading = asyncio.create_task(_instruct(process, instruction))
    ended = asyncio.create_task(process.wait())
    begun = time.monotonic()
    try:
        while True:
            await asyncio.wait((ended, gateway.over), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if gateway.over.done():
                return gateway.over.result()
            if tunnel.failed:
                raise BoxLost(f"no connection to the policy could be made: {tunnel.failed}")
            if ended.done():
                if ended.result() < 0:
                    await _ask_after(process.box)
                return _judge(ended.result(), gateway, told)
            if told.seen > FLOOD:
                return Ending.FAULT, f"the client wrote more than {FLOOD >> 20} MiB to its terminal"
            if time.monotonic() - begun - gateway.speaking_seconds > seconds:
                silent = f"the client worked for longer than {seconds:.0f} s without asking the policy"
                if gateway.conversations.turns == 0:
                    raise BoxLost(f"{silent}{_quoted(told)}")
                return Ending.TIME, silent
    finally:
        for task in (reading, ended):
            task.cancel()
        await asyncio.gather(reading, ended, return_exceptions=True)


async def _instruct(process: Process, instruction: str) -> None:
    with contextlib.suppress(OSError):  # it need not read it
        await process.write(instruction.encode(errors="replace"), math.inf)
    process.close_stdin()


async def _ask_after(box: Box) -> None:
    """The client went with its box: raises BoxLost when that is ours."""
    with contextlib.suppress(BoxError):
        await box.stats()


def _quoted(told: Kept) -> str:
    said = told.take()[0].decode(errors="replace").strip()
    return f": {said}" if said else ""


def _judge(code: int, gateway: Gateway, told: Kept) -> tuple[Ending, str]:
    """What a client's exit means. Raises BoxLost when the policy has had no part in it."""
    quoted = _quoted(told)
    if code and gateway.too_long:
        return Ending.TOKENS, gateway.too_long
    if gateway.conversations.turns == 0:
        raise BoxLost(f"the client ended with {code} before the policy had said anything{quoted}")
    return (Ending.FAULT, f"the client ended with {code}{quoted}") if code else (Ending.SUBMITTED, "")
