"""TRL's GRPOTrainer on the CPU, for `stretto bench loop`: the same rollouts, sampled and trained in turns.

The rollouts are those our workers play, made by the same code: `harness.play` with the same tools in the same boxes,
the same slow tools, the same grader and reward. TRL takes them through its `rollout_func`. What is TRL's: the network
of transformers, sampling with its `generate` (`lockstep.py`: all rollouts of a batch speak at once, then all their
tools run at once), log-probs, loss, optimizer; and that a step begins when the one before has ended.

Same as ours: weights, tasks and their order, group, batch, learning rate, warm-up, AdamW's moments, clipping, loss
(`dr_grpo`, rewards not scaled, no KL). Left out: replayed experts, which TRL doesn't know.

    python -m stretto.bench.grpo_trl --help
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch

from stretto.bench.lockstep import Lockstep
from stretto.config import Config, load
from stretto.engine.client import EngineClient
from stretto.grading.grader import Grader
from stretto.harness.chat import Chat
from stretto.harness.ending import Ending
from stretto.harness.loop import play
from stretto.records import Lease, Rollout, Sampling, Task
from stretto.rollouts.desk import GradingDesk
from stretto.rollouts.record import payload
from stretto.rollouts.seeds import derive
from stretto.rollouts.source import Prompts
from stretto.sandbox.latency import latency
from stretto.sandbox.pool import BoxPool
from stretto.tasks.repair import generate

PAD = 0
"""Any token does: padding is masked."""
SECONDS = 600.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="a.b=c", help="overrides, as of `stretto train quickstart`")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args(argv)
    torch.set_num_threads(a.threads)
    a.out.write_text(json.dumps(measure(load("quickstart", a.words)), indent=2) + "\n")


async def rollouts(model: Any, chat: Chat, tasks: Sequence[Task], config: Config, seed: int) -> list[Rollout]:
    """One attempt at each task, all at the same time; equal tasks lie side by side and are a group. The streams of
    log-probs and versions hold nothing."""
    engine = Lockstep(model, PAD, len(tasks))
    pool = BoxPool(config.sandbox)
    await pool.start()
    grader = Grader(config.grading, pool)
    desk = GradingDesk(grader, draw=lambda group: derive(seed, "grading", group))

    async def attempt(index: int, task: Task) -> Rollout:
        sampling = Sampling(temperature=config.rollouts.temperature, seed=derive(seed, "sampling", index))
        started = time.time()
        lease = Lease(
            rollout=f"r{index}",
            group=task.id,
            purpose="train",
            task=task,
            sampling=sampling,
            engine=engine.url,
            version=0,
            deadline=started + SECONDS,
        )
        slow = latency(config.sandbox, sampling.seed)
        desk.expect(lease)
        played = await play(lease, cast(EngineClient, engine), chat, pool, config.harness, latency=slow)
        engine.left()
        grade = None
        if played.ending is Ending.SUBMITTED:
            grade = await desk.grade(lease, played.files)
        else:
            desk.absent(lease)
        return payload(lease, played, grade, config.grading, worker="trl", started=started, ended=time.time())

    try:
        return list(await asyncio.gather(*(attempt(*indexed) for indexed in enumerate(tasks))))
    finally:
        await grader.close()
        await pool.close()


def measure(config: Config) -> dict[str, Any]:
    """Train for `trainer.steps` steps. Times count from the start of the first one; `samples_per_s` leaves that out."""
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig  # pyright: ignore[reportMissingImports]
    from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]

    folder, steps, seed = config.model.folder, config.trainer.steps, config.run.seed
    groups, group = config.rollouts.groups_per_step, config.rollouts.group_size
    chat = Chat(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(chat.stop[0])
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD)
    prompts = Prompts([made.task for made in islice(generate("train", seed), config.tasks.train)], seed)
    tasks = [prompts.task(ordinal) for ordinal in range(groups * steps)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="grouped_mm")
    started, ends, solved, sampled = [0.0], [], [], []

    def roll_out(ids: list[str], trainer: Any) -> dict[str, Any]:
        """TRL gives each prompt as often as its group is large; here a prompt is the id of a task."""
        asked = [prompts.by_id[id] for id in ids]
        made = asyncio.run(rollouts(trainer.model, chat, asked, config, derive(seed, "step", len(ends))))
        solved.append(sum(rollout.solved for rollout in made) / len(made))
        segments = [rollout.segments[0] for rollout in made]
        sampled.extend(int(segment.sampled_T.sum()) for segment in segments)
        starts = [int(segment.sampled_T.argmax()) for segment in segments]
        both = list(zip(segments, starts, strict=True))
        return {
            "prompt_ids": [segment.ids_T[:start].tolist() for segment, start in both],
            "completion_ids": [segment.ids_T[start:].tolist() for segment, start in both],
            "env_mask": [segment.sampled_T[start:].astype(int).tolist() for segment, start in both],
            "logprobs": None,
            "worth": [rollout.reward for rollout in made],
        }

    def reward(worth: list[float], **_: Any) -> list[float | None]:
        return list(worth)

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            started[0] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter() - started[0])

    with tempfile.TemporaryDirectory(prefix="stretto-trl-") as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            learning_rate=config.trainer.lr,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=config.trainer.warmup_steps,
            adam_beta1=config.trainer.betas[0],
            adam_beta2=config.trainer.betas[1],
            weight_decay=config.trainer.weight_decay,
            max_grad_norm=config.trainer.max_grad_norm,
            max_steps=steps,
            per_device_train_batch_size=groups * group,
            num_generations=group,
            max_completion_length=config.harness.max_tokens,
            temperature=config.rollouts.temperature,
            beta=0.0,
            loss_type="dr_grpo",
            scale_rewards="none",
            router_aux_loss_coef=0.0,
            seed=seed,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [task.id for task in tasks]}),
            processing_class=tokenizer,
            rollout_func=roll_out,
            callbacks=[Clock()],
        )
        trainer.train()
    size = groups * group
    return {
        "version": trl.__version__,
        "samples": steps * size,
        "samples_per_s": (steps - 1) * size / (ends[-1] - ends[0]) if steps > 1 else size / ends[0],
        "sampled_mean": sum(sampled) / len(sampled),
        "threads": torch.get_num_threads(),
        "ends": [round(end, 3) for end in ends],
        "solved": solved,
    }


if __name__ == "__main__":
    main()
