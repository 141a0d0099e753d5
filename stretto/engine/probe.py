"""One token asked of an engine before anything depends on it: does it return routed experts, of the right shape?

With router replay on, an engine that returns none (a server flag that is off, a proxy that strips the field) would
leave training to route freely, which looks like a slightly worse run. So it is found at the start, or nothing starts.
"""

from __future__ import annotations

import aiohttp
import numpy as np

from stretto.engine.client import EngineClient
from stretto.records import GenerateRequest, GenerateResponse, Sampling, unknown_expert

PROBE = [0, 1, 0]
"""Any ids do; each but the last sampled token has a row."""
SECONDS = 30.0


class RoutesMissing(RuntimeError):
    """Replay cannot work with this engine; the sentence says what its answer lacks."""


async def probe(url: str, shape: tuple[int, int], experts: int) -> None:
    """`shape` is (MoE layers, experts per token) of the network that is trained.

    Raises RoutesMissing; EngineError when the engine does not answer at all.
    """
    request = GenerateRequest(ids=PROBE, max_tokens=1, stop=[], sampling=Sampling())
    async with aiohttp.ClientSession() as session:
        response = await EngineClient(url, session).generate(request, SECONDS)
    problem = lacking(response, shape, experts)
    if problem:
        raise RoutesMissing(
            f"{url} {problem}: router replay needs the experts of every token. Have the engine return them, or set "
            "trainer.replay = false to train without"
        )


def lacking(response: GenerateResponse, shape: tuple[int, int], experts: int) -> str:
    """What is wrong with the routes of an answer to the probe, as words after the engine's name; empty if nothing."""
    if response.routes is None or response.route_shape == (0, 0):
        return "returns no routed experts"
    if tuple(response.route_shape) != shape:
        return f"returns routes of (MoE layers, experts per token) {tuple(response.route_shape)}, the model has {shape}"
    try:
        routes_TLK = response.routes.open(np.array(PROBE, "<i4"), shape, response.route_bits)
    except ValueError as error:
        return f"returns routes that cannot be read ({error})"
    unknown = int((routes_TLK == unknown_expert(response.route_bits)).any((1, 2)).sum())
    if unknown:
        return f"does not know the experts of {unknown} of {len(PROBE)} tokens it has just computed"
    if int(routes_TLK.max()) >= experts:
        return f"names expert {int(routes_TLK.max())}, the model has {experts}"
    return ""
