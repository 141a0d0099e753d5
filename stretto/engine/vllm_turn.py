"""One turn in vLLM's words and back in ours: sampling parameters out, per-token streams in.

A turn's streams are checked against each other here: ids, log-probs, versions and routes have the lengths that the
contract says, or the turn fails.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from stretto.engine.contract import BadRequest, Fault
from stretto.model.spec import ModelSpec
from stretto.records import GenerateRequest, GenerateResponse, RouteChunk, Sampling, route_bits, unknown_expert

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput, WeightVersionSpan
    from vllm.sampling_params import SamplingParams

COLDEST, HOTTEST = 0.01, 2.0
"""vLLM silently raises temperatures between 0 and the first to it, and refuses those above the second."""

FINISH = {"stop": "stop", "length": "length", "abort": "aborted"}


@dataclass
class Output:
    """What has come of an attempt so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightVersionSpan] = field(default_factory=list)
    routes: np.ndarray | None = None
    cached: int = 0
    finish: str = ""

    def add(self, output: RequestOutput) -> list[tuple[int, float]]:
        """Take a piece; returns its tokens with their log-probs."""
        piece = output.outputs[0]
        ids = list(piece.token_ids)
        logprobs = [each[token].logprob for token, each in zip(ids, piece.logprobs or [], strict=True)]
        self.ids += ids
        self.logprobs += logprobs
        self.cached = output.num_cached_tokens or 0
        if piece.finish_reason is not None:
            self.finish, self.routes = piece.finish_reason, piece.routed_experts
            self.spans = piece.weight_versions or []
        return list(zip(ids, logprobs, strict=True))


def check(sampling: Sampling) -> None:
    """Raise BadRequest for distributions that vLLM can't draw from, or not in a way that can be trained on."""
    if sampling.truncated:
        raise BadRequest(
            "top_p and top_k are not honoured by the vLLM engine: it does not tell which tokens were kept, so that no "
            "one could normalise over them; leave them out"
        )
    if 0 < sampling.temperature < COLDEST or sampling.temperature > HOTTEST:
        raise BadRequest(
            f"temperature is {sampling.temperature}; the vLLM engine takes 0 (greedy) and {COLDEST} to {HOTTEST}"
        )


def parameters(request: GenerateRequest, seed: int | None) -> SamplingParams:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=request.sampling.temperature,
        max_tokens=request.max_tokens,
        stop_token_ids=request.stop,
        ignore_eos=True,  # only the request says what ends a turn
        seed=seed,
        logprobs=0,  # the sampled token's alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        routed_experts_prompt_start=request.routes_from,
    )


def response(request: GenerateRequest, output: Output, spec: ModelSpec, routes: bool) -> GenerateResponse:
    """Raises Fault when vLLM's streams do not fit each other."""
    if output.finish not in FINISH:
        raise Fault(f"vLLM ended the request with {output.finish or 'no reason'}")
    if not np.isfinite(output.logprobs).all():
        raise Fault("a log-probability is not finite: the weights give NaN")
    bits = route_bits(spec.experts)
    return GenerateResponse(
        ids=output.ids,
        logprobs=np.asarray(output.logprobs, "<f4").tobytes(),
        versions=_versions(output).tobytes(),
        support=None,
        routes=_routes(request, output, spec, bits, routes) if spec.experts else None,
        route_shape=spec.route_shape,
        route_bits=bits,
        finish=FINISH[output.finish],
        cached=output.cached,
    )


def _versions(output: Output) -> np.ndarray:
    """int32 [T]. Spans cover the tokens without overlap or hole."""
    versions_T = np.empty(len(output.ids), "<i4")
    end = 0
    for span in output.spans:
        if span.start != end:
            raise Fault(f"vLLM's weight versions leave out tokens {end} to {span.start}")
        versions_T[span.start : span.end] = int(span.version) if span.version.isdecimal() else -1
        end = span.end
    if end != len(versions_T):
        raise Fault(f"vLLM has weight versions for {end} of {len(versions_T)} tokens")
    return versions_T


def _routes(request: GenerateRequest, output: Output, spec: ModelSpec, bits: int, wanted: bool) -> RouteChunk:
    """vLLM returns rows of all layers from `routes_from` to the token before the last; ours are the MoE layers'."""
    start = request.routes_from
    ids = np.asarray([*request.ids, *output.ids], np.int32)
    ids_T = ids[start : max(len(ids) - 1, start)]
    routes_TLK = np.full((len(ids_T), *spec.route_shape), unknown_expert(bits), f"<u{bits // 8}")
    if wanted:
        found = output.routes
        rows = 0 if found is None else len(found)
        if rows > len(ids_T) or (rows < len(ids_T) and output.finish != "abort"):
            raise Fault(f"vLLM returned routes of {rows} tokens, where {len(ids_T)} were due")
        if found is not None and rows:
            if found.shape[1:] != (spec.layers, spec.experts_per_token) or int(found.max()) >= spec.experts:
                raise Fault(f"vLLM returned routes of shape {found.shape}, which are not this network's")
            routes_TLK[:rows] = found[:, list(spec.moe_layers)]
    return RouteChunk.seal(start, ids_T, routes_TLK)
