"""A small model that trains by chance: named bf16 tensors, and steps of them."""

from __future__ import annotations

import itertools
import logging
import urllib.request
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stretto.weights.store import Store

Tensors = dict[str, np.ndarray]


def make_model(seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    shapes = {f"layers.{i}.experts.{e}.up.weight": (16, 24) for i in range(2) for e in range(3)}
    shapes |= {"embed.weight": (50, 16), "norm.weight": (16,), "scale": (), "nothing": (0, 4)}
    return {name: rng.integers(0x3C00, 0x3F80, shape, dtype=np.uint16) for name, shape in shapes.items()}


def next_model(tensors: Tensors, seed: int, share: float = 0.05) -> Tensors:
    """Some values one ulp up or down, a few somewhere else."""
    rng = np.random.default_rng(seed)
    moved = {}
    for name, old in tensors.items():
        step = np.where(rng.random(old.shape) < share, rng.choice([-1, 1], old.shape), 0)
        moved[name] = np.asarray((old.astype(np.int64) + step).clip(0, 0x7F7F), np.uint16)
    return moved


@pytest.fixture
def model() -> Tensors:
    return make_model()


@pytest.fixture
def step() -> Callable[..., Tensors]:
    return next_model


@pytest.fixture(scope="session")
def s3() -> Iterator[Callable[[], Store]]:
    """Stores in new buckets of a real S3 API: moto's server (Apache-2.0), which knows conditional writes, in a thread.

    It is the most used one on the registries, needs no binary, and answers If-None-Match and If-Match as S3 does.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
    count = itertools.count()

    def store() -> Store:
        bucket = f"bucket-{next(count)}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=30)
        return Store(f"s3://{bucket}/runs", endpoint=endpoint, client_options={"allow_http": True}, **keys)

    yield store
    server.stop()
