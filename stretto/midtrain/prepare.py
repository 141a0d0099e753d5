"""What a run needs before its first step: the network, its tokenizer, and packed rows.

Each is made once and kept in the run's folder. Shards are made anew when the corpora, the tokenizer or the settings
they depend on have changed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import xxhash

from stretto.config import ConfigError
from stretto.midtrain import tokenizer
from stretto.midtrain.corpus import read
from stretto.midtrain.corpus.build import MANIFEST
from stretto.midtrain.corpus.document import Document
from stretto.midtrain.recipe import Phase, Recipe
from stretto.midtrain.tokens import shards
from stretto.midtrain.tokens.documents import token_documents
from stretto.midtrain.tokens.marks import Encoder
from stretto.midtrain.tokens.shards import Shards
from stretto.model import checkpoint
from stretto.model.mtp import Heads
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.spec import ModelSpec, load_spec
from stretto.model.transformer import Transformer

TRAINED_ON = 20_000
"""Documents that a tokenizer is trained on."""


def tokenizer_folder(recipe: Recipe, base: Path, out: Path) -> Path:
    """Where the tokenizer is: the model's own, or one trained on the corpora."""
    model = base / recipe.midtrain.model
    if (model / "tokenizer.json").is_file():
        return model
    folder = out / "tokenizer"
    if not (folder / "tokenizer_config.json").is_file():
        texts = (document.text for document in itertools.islice(_documents(recipe, base), TRAINED_ON))
        tokenizer.train_for_code(texts, load_spec(model).vocab_size, folder)
    return folder


def network(recipe: Recipe, base: Path) -> Transformer:
    """The weights to begin with: the checkpoint's, or random ones where it has none."""
    folder = base / recipe.midtrain.model
    spec, numerics = load_spec(folder), _numerics(recipe)
    if any(folder.glob("*.safetensors")):
        return checkpoint.load(folder, numerics=numerics)
    return checkpoint.random_init(spec, recipe.midtrain.seed, numerics=numerics)


def loaded(folder: Path, recipe: Recipe) -> tuple[Transformer, Heads | None]:
    """A checkpoint of this run, and its heads for multi-token prediction."""
    numerics = _numerics(recipe)
    return checkpoint.load(folder, numerics=numerics), checkpoint.load_heads(folder, numerics=numerics)


def heads(recipe: Recipe, base: Path) -> Heads | None:
    """The heads of the checkpoint to begin with, where there are any and the recipe teaches them."""
    folder = base / recipe.midtrain.model
    if recipe.mtp is None or not any(folder.glob("*.safetensors")):
        return None
    found = checkpoint.load_heads(folder, numerics=_numerics(recipe))
    if found is not None and found.spec.mtp_layers != recipe.mtp.depth:
        raise ConfigError(
            f"mtp.depth is {recipe.mtp.depth}, but {folder} has {found.spec.mtp_layers} heads: write that"
        )
    return found


def stretched(model: Transformer, phase: Phase, recipe: Recipe) -> Transformer:
    """The network with the phase's rotary base and context, same weights."""
    row = phase.row or recipe.midtrain.row
    theta = phase.rope_theta or model.spec.rope_theta
    if theta != model.spec.rope_theta and model.spec.yarn is not None:
        raise ConfigError(f"phase {phase.name} sets rope_theta, but this network stretches its context by YaRN")
    wanted: ModelSpec = replace(model.spec, rope_theta=theta, max_positions=max(row, model.spec.max_positions))
    if wanted == model.spec:
        return model
    other = checkpoint.empty(wanted, numerics=_numerics(recipe))
    other.load_state_dict(model.state_dict())
    return other


def rows(recipe: Recipe, base: Path, out: Path, folder: Path, row: int) -> Shards:
    """Packed rows of `row` tokens, made when they are not there. Raises ConfigError or ValueError with a sentence."""
    settings = recipe.midtrain
    encoder = Encoder(folder)
    spec = load_spec(base / settings.model)
    if encoder.size > spec.vocab_size:
        raise ConfigError(
            f"{folder} has {encoder.size} tokens, the network only {spec.vocab_size}: they don't belong together"
        )
    key = {
        "corpora": [
            xxhash.xxh3_128_hexdigest((base / name / MANIFEST).read_bytes()) for name in _complete(recipe, base)
        ],
        "tokenizer": shards.fingerprint(encoder),
        "row": row,
        "fim": settings.fim,
        "seed": settings.seed,
    }
    place = out / "shards" / str(row)
    made = place / "key.json"
    if not made.is_file() or json.loads(made.read_text()) != key:
        documents = token_documents(
            _documents(recipe, base), encoder, encoder.marks(settings.fim > 0), row, settings.fim, settings.seed
        )
        shards.write(documents, encoder, row, place)
        made.write_text(json.dumps(key))
    return Shards.open(place)


def _complete(recipe: Recipe, base: Path) -> tuple[str, ...]:
    for name in recipe.midtrain.corpus:
        read.manifest(base / name)
    return recipe.midtrain.corpus


def _documents(recipe: Recipe, base: Path) -> Iterator[Document]:
    for name in _complete(recipe, base):
        yield from read.documents(base / name)


def _numerics(recipe: Recipe) -> Numerics:
    if recipe.midtrain.numerics == "exact":
        return Numerics(exact=True)
    return Numerics(fused=True) if recipe.midtrain.threads == 1 else PLAIN
