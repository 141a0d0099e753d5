"""How fast a network could sample on this machine at best: the matrix products alone, at the speed of large ones.

    time of one pass >= max(2 x multiplied weights x rows / multiply-add speed, bytes of weights / memory speed)

Attention, norms, sampling and all overheads are left out, so that no engine can reach it; few rows are bound by memory,
many by arithmetic. (The roofline model, doi 10.1145/1498765.1498785.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stretto.model import checkpoint
from stretto.model.spec import ModelSpec

WIDTH, MEGABYTES = 1024, 256


@dataclass(frozen=True)
class Ceiling:
    """What this machine does with `threads` threads in float32."""

    threads: int
    gflops: float
    gigabytes_per_second: float

    @classmethod
    def measure(cls, threads: int) -> Ceiling:
        """The best of several products of large matrices, and of several passes over memory no cache holds."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        a, b = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        memory = torch.ones(MEGABYTES << 18)
        product, read = _best(lambda: a @ b), _best(lambda: memory.sum())
        torch.set_num_threads(before)
        return cls(threads, 2e-9 * WIDTH**3 / product, memory.nbytes * 1e-9 / read)

    def sampled(self, spec: ModelSpec, batch: int, prompt: int, new: int) -> float:
        """Sampled tokens per second of a call that samples `new` tokens after each of `batch` prompts.

        Of a prompt only the last row needs the head, and the first sampled token needs no pass of its own."""
        per_row, head = multiplied(spec, 1), spec.vocab_size * spec.hidden_size
        prefill = 2e-9 * batch * (prompt * (per_row - head) + head) / self.gflops
        one_pass = max(2e-9 * per_row * batch / self.gflops, 4e-9 * multiplied(spec, batch) / self.gigabytes_per_second)
        return batch * new / (prefill + (new - 1) * one_pass)

    @property
    def sentence(self) -> str:
        return (
            f"Limit: matrix products alone at {self.gflops:.0f} GFLOP/s and {self.gigabytes_per_second:.0f} GB/s, "
            f"as measured here with {self.threads} thread{'s' * (self.threads > 1)}."
        )


def multiplied(spec: ModelSpec, rows: int) -> int:
    """Weights that `rows` rows are multiplied by; of the experts, those that so many rows can choose at most."""
    matrices = {name: math.prod(shape) for name, shape in checkpoint.shapes(spec).items() if len(shape) == 2}
    embedding = matrices.pop("model.embed_tokens.weight")
    experts = sum(count for name, count in matrices.items() if ".mlp.experts." in name)
    used = min(spec.experts, spec.experts_per_token * rows)
    always = sum(matrices.values()) - experts + embedding * spec.tie_embeddings
    return always + (experts * used // spec.experts if experts else 0)


def _best(work: Callable[[], object], times: int = 5) -> float:
    work()
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
