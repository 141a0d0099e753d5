"""TRL's GRPOTrainer on the CPU, for `stretto bench loop`: samples per second on the first turn of our tasks.

GRPOTrainer samples one answer to one prompt, so the tasks are reduced to that: the prompt is what our harness sends
first, the answer ends where a turn ends, and the reward asks whether the turn is a well-formed tool call. That is less
than a sample of ours does (several turns, a sandbox, hidden tests), and it gets as many threads as make it fastest.

    python -m stretto.bench.grpo_trl --help
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from stretto.config import HarnessConfig
from stretto.harness.chat import Chat
from stretto.harness.parse import parse
from stretto.records import CallStatus
from stretto.tasks.repair import generate


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args(argv)
    torch.set_num_threads(a.threads)
    a.out.write_text(json.dumps(measure(a.model, a.steps, a.groups, a.group), indent=2) + "\n")


def measure(folder: Path, steps: int, groups: int, group: int) -> dict[str, Any]:
    """Train for a step to warm up and `steps` more, which are timed."""
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    chat = Chat(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    stop = tokenizer.convert_ids_to_tokens(chat.stop[0])
    tokenizer.eos_token = tokenizer.pad_token = stop
    tokenizer.padding_side = "left"
    tasks = [repair.task for repair in islice(generate("train", 0), groups * (steps + 1))]
    prompts = [tokenizer.decode(chat.start(task.instruction, "")) for task in tasks]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="grouped_mm")
    model.generation_config.eos_token_id = chat.stop[0]
    sampled: list[int] = []
    ends: list[float] = []

    def well_formed(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        sampled.extend(len(ids) for ids in completion_ids)
        return [float(any(call.status is CallStatus.OK for call in parse(text))) for text in completions]

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory(prefix="stretto-trl-") as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            gradient_checkpointing=False,
            learning_rate=5e-4,
            warmup_steps=2,
            max_steps=steps + 1,
            per_device_train_batch_size=groups * group,
            num_generations=group,
            max_completion_length=HarnessConfig().max_turn_tokens,
            temperature=1.0,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=well_formed,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    seconds = ends[-1] - ends[0]
    return {
        "version": trl.__version__,
        "samples": steps * groups * group,
        "seconds": round(seconds, 2),
        "samples_per_s": steps * groups * group / seconds,
        "sampled_mean": sum(sampled) / len(sampled),
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
