"""`stretto bench parity [MODEL_DIR]`: our network against transformers, on a checkpoint and on one of each family.

    folder ──▶ ours, float32 ──┬─▶ logits of a few prompts ──▶ largest difference
      └──────▶ theirs, float32 ┘   our greedy tokens      ──▶ are they theirs too?
    folder ──▶ ours ──▶ A ──▶ theirs ──▶ B ──▶ ours ──▶ C    has each the weights of the one before, byte for byte?

Theirs are greedy over our tokens exactly when, given the sequence, each token is their first choice: one forward pass
shows it. A and B are written in several shards, in the dtype of the folder; C is one file. Both networks are in memory
at once, so MODEL_DIR has to fit twice. Needs transformers (the `dev` extra).
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.deepseek import FAMILY, Grouping, Latent, Yarn
from stretto.model.spec import CONFIG, ModelSpec, load_spec
from stretto.model.transformer import Transformer

LIMIT = 1e-4
"""Largest difference of a logit, over the largest logit if that is above 1, that float32 rounding explains."""

PROMPTS = (5, 24, 61)
NEW_TOKENS = 16
SHARDS = 3

_SIZES: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "max_positions": 256,
}
_EXPERTS: dict[str, Any] = {"experts": 8, "experts_per_token": 3, "expert_size": 24, "norm_topk_prob": True}
_TWELVE: dict[str, Any] = _EXPERTS | {"experts": 12}
_LATENT = Latent(q_rank=20, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=16)
_YARN = Yarn(factor=8.0, original_positions=32, mscale=1.0, mscale_all_dim=1.0)

RANDOM: dict[str, ModelSpec] = {
    "qwen3_moe": ModelSpec(model_type="qwen3_moe", **_SIZES, **_EXPERTS, dense_layers=(1,)),
    "qwen3": ModelSpec(model_type="qwen3", **_SIZES, tie_embeddings=True),
    "llama": ModelSpec(model_type="llama", **_SIZES, attention_bias=True),
    "kimi_k2": ModelSpec(
        model_type="kimi_k2",
        **_SIZES | {"kv_heads": 4, "head_dim": 20},
        **_TWELVE,
        latent=_LATENT,
        yarn=_YARN,
        rope_theta=50_000.0,
        grouping=Grouping(groups=1, kept=1, scale=2.827),
        shared_experts=1,
        dense_layers=(0,),
    ),
    "deepseek_v3": ModelSpec(
        model_type="deepseek_v3",
        **_SIZES | {"kv_heads": 4, "head_dim": 20},
        **_EXPERTS,
        latent=_LATENT,
        yarn=_YARN,
        grouping=Grouping(groups=4, kept=2, scale=2.5),
        shared_experts=1,
        dense_layers=(0,),
    ),
}


@dataclass(frozen=True)
class Row:
    """What one network gave. `max_abs_dlogit` is over all positions of all prompts, `max_abs_logit` is theirs."""

    network: str
    family: str
    parameters: int
    max_abs_dlogit: float
    max_abs_logit: float
    greedy_equal: bool
    saved_equal: bool  # loaded and saved by us
    to_theirs_equal: bool  # that, loaded and saved by transformers
    from_theirs_equal: bool  # that, loaded and saved by us: as the first

    @property
    def roundtrip_equal(self) -> bool:
        return self.saved_equal and self.to_theirs_equal and self.from_theirs_equal

    @property
    def holds(self) -> bool:
        close = self.max_abs_dlogit <= LIMIT * max(1.0, self.max_abs_logit)
        return close and self.greedy_equal and self.roundtrip_equal


def parity(folder: Path | None, json_file: Path | None, console: Console) -> bool:
    """Measure, print the table, write the JSON; whether everything held. Raises ValueError without transformers."""
    _transformers()
    rows = []
    with tempfile.TemporaryDirectory(prefix="stretto-parity-") as scratch:
        if folder is not None:
            rows.append(compare(folder, folder.resolve().name, Path(scratch) / "given"))
        for family, spec in RANDOM.items():
            checkpoint.save(random_network(spec, seed=0), Path(scratch) / family)
            rows.append(compare(Path(scratch) / family, f"random {family}", Path(scratch) / f"{family}-written"))
    console.print(_table(rows))
    held = all(row.holds for row in rows)
    console.print(f"Limit: {LIMIT:g} of the largest logit; greedy tokens and files must be equal. ", end="")
    console.print("All hold." if held else "Not all hold.")
    if json_file is not None:
        json_file.write_text(json.dumps(summary(rows), indent=2) + "\n", encoding="utf-8")
    return held


def summary(rows: list[Row]) -> dict[str, Any]:
    """The JSON: one object per network, and the worst of each measure."""
    return {
        "benchmark": "parity",
        "limit": LIMIT,
        "rows": [asdict(row) for row in rows],
        "checks": {
            "max_abs_dlogit": max(row.max_abs_dlogit for row in rows),
            "greedy_equal": all(row.greedy_equal for row in rows),
            "roundtrip_equal": all(row.roundtrip_equal for row in rows),
        },
    }


@torch.no_grad()
def compare(folder: Path, network: str, scratch: Path) -> Row:
    """One checkpoint against transformers; `scratch` is a folder for what both write. Raises CheckpointError."""
    model = checkpoint.load(folder)
    theirs = _theirs(folder, torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.spec.vocab_size, (n,), generator=generator) for n in PROMPTS]
    expected = [theirs(ids_T[None]).logits[0].float() for ids_T in prompts]
    found = [_logits(model, ids_T) for ids_T in prompts]
    greedy = True
    for prompt_T in prompts:
        ids_T = _greedy(model, prompt_T)
        own_T = theirs(ids_T[None]).logits[0].argmax(-1)
        greedy = greedy and torch.equal(own_T[len(prompt_T) - 1 : -1], ids_T[len(prompt_T) :])
    del theirs
    a, b, c = (scratch / name for name in "abc")
    given = _weights(folder, model)
    dtype = _dtype(given)
    shard_bytes = sum(weight.nbytes for weight in given.values()) // SHARDS + 1
    checkpoint.save(model, a, shard_bytes=shard_bytes, dtype=dtype)
    with _quiet():
        _theirs(a, dtype).save_pretrained(b, max_shard_size=shard_bytes)
    checkpoint.save(checkpoint.load(b), c, dtype=dtype)
    saved, theirs, ours = (_weights(path, model) for path in (a, b, c))
    return Row(
        network=network,
        family=model.spec.model_type,
        parameters=sum(weight.numel() for weight in model.parameters()),
        max_abs_dlogit=max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)),
        max_abs_logit=max(float(logits.abs().max()) for logits in expected),
        greedy_equal=greedy,
        saved_equal=_same(given, saved),
        to_theirs_equal=_same(_wide(saved), _wide(theirs)),
        from_theirs_equal=_same(saved, ours),
    )


def random_network(spec: ModelSpec, seed: int) -> Transformer:
    """Weights large enough that every part of the network matters, norms and biases included; bf16 holds them."""
    model = checkpoint.empty(spec)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in checkpoint.named_tensors(model).items():
        tensor.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
        tensor.copy_(checkpoint.stored(name, tensor))
    return model


def _logits(model: Transformer, ids_T: Tensor) -> Tensor:
    """Of one sequence by itself, so that each matrix product has as many rows as theirs."""
    out = model(ids_T, torch.arange(len(ids_T)), PackedCausal([len(ids_T)]))
    return model.logits(out.hidden_TD)


def _greedy(model: Transformer, ids_T: Tensor) -> Tensor:
    for _ in range(NEW_TOKENS):
        ids_T = torch.cat((ids_T, _logits(model, ids_T)[-1:].argmax(-1)))
    return ids_T


def _weights(folder: Path, model: Transformer) -> dict[str, Tensor]:
    """Those that belong to the network, as they are in the files."""
    where = checkpoint.sources(folder, model.spec)
    files = [load_file(path) for path in sorted(set(where.values()))]
    names = checkpoint.named_tensors(model).keys()
    return {name: tensor for file in files for name, tensor in file.items() if name in names}


def _dtype(weights: dict[str, Tensor]) -> torch.dtype:
    """The one that holds all of them; correction biases are float32 in any checkpoint."""
    found = {weight.dtype for name, weight in weights.items() if not name.endswith(checkpoint.CORRECTION)}
    return found.pop() if len(found) == 1 else torch.float32


def _wide(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As float32, which holds any of them: transformers writes some in another dtype (DeepSeek-V3's routers)."""
    return {name: weight.float() for name, weight in weights.items()}


def _same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    """Equal names, dtypes, shapes and bytes."""
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype
        and one[name].shape == two[name].shape
        and torch.equal(one[name].contiguous().view(torch.uint8), two[name].contiguous().view(torch.uint8))
        for name in one
    )


def _theirs(folder: Path, dtype: torch.dtype) -> Any:
    """The network as transformers has it, which knows Kimi-K2 under the name of its family."""
    transformers = _transformers()
    options: dict[str, Any] = {}
    if load_spec(folder).model_type in FAMILY:
        fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        options["config"] = transformers.DeepseekV3Config.from_dict(fields | {"model_type": "deepseek_v3"})
    with _quiet():
        network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return network.eval()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "it compares with transformers, which is not installed: pip install -e '.[dev]', or `make test` once"
        ) from None
    return transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of transformers, which write to stderr."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _table(rows: list[Row]) -> Table:
    table = Table(title="Stretto against transformers, float32")
    table.add_column("network", no_wrap=True)
    for name in ("max |Δ logit|", "max |logit|", "greedy", "saved", "to theirs", "from theirs"):
        table.add_column(name, justify="right")
    for row in rows:
        equal = (row.greedy_equal, row.saved_equal, row.to_theirs_equal, row.from_theirs_equal)
        words = ["equal" if fact else "DIFFERENT" for fact in equal]
        table.add_row(row.network, f"{row.max_abs_dlogit:.1e}", f"{row.max_abs_logit:.1f}", *words)
    return table
