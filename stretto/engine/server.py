"""The engine's HTTP face: tokens for workers, chat for people, switches for the follower.

    POST /generate               msgpack GenerateRequest -> GenerateResponse          (workers)
    POST /v1/chat/completions    OpenAI chat, streaming or not; GET /v1/models        (anyone; `openai.py`)
    POST /update_weights         JSON WeightsOrder -> WeightsTaken, or no change: 409 refused, 412 patch of others
    POST /pause, /resume         no pass runs between them
    POST /release                {"session"}: its slot may go to others
    GET  /health, /metrics       JSON; Prometheus text

A closed connection takes its request out of the engine. There is no authentication: bind it where only friends are.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from aiohttp import web

from stretto.config import EngineConfig
from stretto.engine import completions
from stretto.engine.contract import BadRequest, Engine, Fault, Gauge, Log, Unavailable, WeightsRefused, WrongBase
from stretto.engine.fit import fitting
from stretto.engine.openai import ChatEndpoint, NoSuchModel
from stretto.engine.service import Service
from stretto.harness.chat import Chat
from stretto.model import checkpoint, selftest
from stretto.model.numerics import Level, Numerics, engine_numerics
from stretto.model.transformer import Transformer
from stretto.records import GenerateRequest, WeightsOrder, decode, encode

MAX_BODY = 64 << 20
"""Bytes of a request's body; a prompt of a million tokens takes 5 MB."""

CLOSE_SECONDS = 2.0
"""How long a server that goes down waits for answers on their way out."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of /release."""

    session: str


def serve(
    model: Path,
    name: str,
    host: str,
    port: int,
    config: EngineConfig,
    version: int,
    metrics: Log | None,
    seed: int,
    level: str = Level.ORDERED,
) -> None:
    """Serve the checkpoint folder `model` until SIGTERM or SIGINT; port 0 takes any free one.

    With `version` -1 only its architecture and tokenizer are used, and /generate answers 503 until the first
    /update_weights. Ends with SystemExit and a sentence when the checkpoint or the address can't be used, or when
    this machine can't hold the `level` of `model.numerics`.
    """
    torch.set_num_threads(config.threads)
    try:  # before any weights are read: they may take minutes
        listener = socket.create_server((host, port))
    except OSError as error:
        reason = "is in use: stop what listens there, or choose another" if error.errno == errno.EADDRINUSE else error
        raise SystemExit(f"{name}: port {port} on {host} {reason}") from None
    try:
        spec, chat = fitting(model, config)
        if config.backend == "vllm":
            from stretto.engine import vllm

            start = vllm.start(model, spec, config, version=version, seed=seed, name=name, metrics=metrics)
        else:
            numerics = engine_numerics(level, config.dtype)
            if numerics.exact:
                selftest.check(spec, numerics)
            network = _load(model, numerics) if version >= 0 else checkpoint.empty(spec, numerics=numerics)
            heads = checkpoint.load_heads(model) if config.speculate else None
            start = _native(network, config, version=version, seed=seed, name=name, metrics=metrics, heads=heads)
    except ValueError as error:
        raise SystemExit(f"{name}: {error}") from None

    async def run() -> None:
        try:
            service = await start
        except ValueError as error:
            raise SystemExit(f"{name}: {error}") from None
        await _run(service, build_app(service, chat, name, model.resolve().name), listener)
        if service.broken.done():
            raise SystemExit(f"{name}: its loop failed: {service.broken.exception()!r}")

    asyncio.run(run())


async def _native(network: Transformer, config: EngineConfig, **options: Any) -> Engine:
    return Service(network, config, **options)


def build_app(service: Engine, chat: Chat, name: str, model: str) -> web.Application:
    """The routes above on one service. `model` is the id that OpenAI clients ask for."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_sentences])

    async def generate(request: web.Request) -> web.Response:
        response = await service.generate(decode(await request.read(), GenerateRequest))
        return web.Response(body=encode(response), content_type="application/msgpack")

    async def update_weights(request: web.Request) -> web.Response:
        order = msgspec.json.decode(await request.read(), type=WeightsOrder)
        # a follower that hangs up must not leave a load half done
        taken = await asyncio.shield(service.update(order))
        return web.Response(body=msgspec.json.encode(taken), content_type="application/json")

    async def pause(_: web.Request) -> web.Response:
        await service.pause()
        return web.json_response({"paused": True})

    async def resume(_: web.Request) -> web.Response:
        await service.resume()
        return web.json_response({"paused": False})

    async def release(request: web.Request) -> web.Response:
        await service.release(msgspec.json.decode(await request.read(), type=Release).session)
        return web.json_response({})

    async def health(_: web.Request) -> web.Response:
        status = service.status()
        return web.json_response(
            {"role": "engine", "name": name, "model": model, "ready": status.version is not None, **asdict(status)}
        )

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=_prometheus(service, name), content_type="text/plain")

    app.router.add_post("/generate", generate)
    app.router.add_post("/update_weights", update_weights)
    app.router.add_post("/pause", pause)
    app.router.add_post("/resume", resume)
    app.router.add_post("/release", release)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    endpoint = ChatEndpoint(service, chat, model)
    app.router.add_post("/v1/chat/completions", endpoint.completions)
    app.router.add_get("/v1/models", endpoint.models)
    return app


async def _run(service: Engine, app: web.Application, listener: socket.socket) -> None:
    """Serve until a signal comes or the engine's loop fails."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    service.broken.add_done_callback(lambda _: ended.set())
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        host, port = listener.getsockname()[:2]
        print(f"serving on http://{host}:{port}", flush=True)
        await ended.wait()
    finally:
        await service.close()
        await runner.cleanup()


def _load(folder: Path, numerics: Numerics) -> Transformer:
    """The checkpoint with weights rounded to bf16: what is served is what a published version would hold."""
    model = checkpoint.load(folder, numerics=numerics)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


@web.middleware
async def _sentences(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as JSON with one sentence, and the status that tells whose they are."""
    try:
        return await handler(request)
    except (BadRequest, msgspec.MsgspecError) as error:
        status, sentence = 400, str(error)
    except NoSuchModel as error:
        status, sentence = 404, str(error)
    except WeightsRefused as error:
        status, sentence = 409, str(error)
    except WrongBase as error:
        status, sentence = 412, str(error)
    except Fault as error:
        status, sentence = 500, str(error)
    except Unavailable as error:
        status, sentence = 503, str(error)
    except web.HTTPException as error:
        status, sentence = error.status, f"{request.method} {request.path}: {error.reason}"
    body = completions.error(sentence, status) if request.path.startswith("/v1/") else {"error": sentence}
    return web.json_response(body, status=status)


def _prometheus(service: Engine, name: str) -> str:
    status = service.status()
    version = -1 if status.version is None else status.version
    values = [
        Gauge("version", "gauge", "Policy version that samples now; -1 without weights", version),
        Gauge("slots", "gauge", "KV slots", status.slots),
        Gauge("active", "gauge", "Requests that hold a slot", status.active),
        Gauge("waiting", "gauge", "Requests without a slot", status.waiting),
        Gauge("sessions", "gauge", "Sessions whose KV is held", status.sessions),
        *service.gauges(),
    ]
    lines = []
    for key, kind, text, value in values:
        metric = f"stretto_engine_{key}"
        lines += [f"# HELP {metric} {text}.", f"# TYPE {metric} {kind}", f'{metric}{{engine="{name}"}} {value}']
    return "\n".join(lines) + "\n"
