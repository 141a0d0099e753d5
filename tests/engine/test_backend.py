"""Options that only one of the two engines honours are refused when parsed, and vLLM is missed before a run begins."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from stretto.config import ConfigError, EngineConfig, ModelConfig, load
from stretto.engine.fit import fitting

REFUSED = [
    (["engine.routes=unknown"], "engine.routes is unknown, but the native engine knows them"),
    (["engine.tensor_parallel=2"], "engine.tensor_parallel is 2, but the native engine runs in one process"),
    (["engine.backend=vllm", "model.numerics=exact"], "model.numerics is exact, which vLLM does not hold"),
    (["engine.backend=vllm", "rollouts.top_p=0.9"], "vLLM does not tell which tokens it kept"),
    (["engine.backend=vllm", "engine.routes=unknown"], "nothing to replay: set trainer.replay = false as well"),
    (["engine.backend=sglang"], "engine.backend"),
]


@pytest.mark.parametrize(("overrides", "sentence"), REFUSED)
def test_what_a_backend_cannot_honour_is_refused_when_parsed(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load("quickstart", overrides)


def test_what_vllm_honours_is_taken() -> None:
    config = load("quickstart", ["engine.backend=vllm", "engine.tensor_parallel=4"])
    assert (config.engine.backend, config.engine.routes) == ("vllm", "required")
    assert load("quickstart", ["engine.backend=vllm", "engine.routes=unknown", "trainer.replay=false"])


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_that_is_not_installed_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="vLLM is not installed here: pip install"):
        fitting(ModelConfig().folder, EngineConfig(backend="vllm"))
