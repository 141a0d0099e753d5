"""The shipped model with wider experts: the same function, more arithmetic.

The shipped model is so small that, on a laptop, sandboxes take several times the CPU time of its training, which is not
what asynchrony is about. Each expert gets more neurons, whose outputs weigh nothing at first, so that it computes what
it did (after Net2Net, arXiv 1511.05641) and costs what a larger one costs, in the trainer and in the engine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from stretto.model.checkpoint import BESIDE
from stretto.model.spec import CONFIG

WEIGHTS = "model.safetensors"
SCALE = 0.02
"""Standard deviation of the new neurons' inputs."""


def widen(folder: Path, target: Path, size: int, seed: int = 0) -> Path:
    """Write the checkpoint of `folder` (a Qwen3-MoE in one file) to `target`, its experts `size` neurons wide."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(BESIDE))  # heads fit the network they were taught to
    fields = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    extra = size - fields["moe_intermediate_size"]
    if extra < 0:
        raise ValueError(f"experts of {folder} are {fields['moe_intermediate_size']} wide, more than {size}")
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            continue
        if name.endswith("down_proj.weight"):
            tensors[name] = torch.cat((tensor, tensor.new_zeros(len(tensor), extra)), dim=1)
        else:
            new = torch.empty(extra, tensor.shape[1]).normal_(0.0, SCALE, generator=generator)
            tensors[name] = torch.cat((tensor, new.to(tensor.dtype)))
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / CONFIG).write_text(
        json.dumps(fields | {"moe_intermediate_size": size}, indent=2) + "\n", encoding="utf-8"
    )
    return target
