"""The engines that `stretto bench engine` compares, each in a process of its own that takes orders on stdin.

    bench ── one JSON order a line ──▶ python contenders.py NAME FOLDER '{"threads": 1, …}'
          ◀── one JSON answer a line ──  (its stdout; whatever the libraries print goes to stderr)

Run as a file, not as a module, so that vLLM's can run in vLLM's environment, which need not have Stretto. All sample at
temperature 1 from the whole vocabulary, in float32 and in-process, and none stops before it has all its tokens. Ours
gives log-probs, versions and routes with them; of the others only ids are asked.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

Prompts = list[list[int]]


class Contender(Protocol):
    """One loaded engine. `sessions` names the conversations that the prompts go on with, for those who keep KV."""

    def generate(self, prompts: Prompts, new: int, sessions: list[str]) -> Prompts:
        """Exactly `new` token ids for each prompt."""
        ...


class Ours:
    """The engine's loop itself: scheduler, slots, cache, sampler."""

    def __init__(self, folder: str, threads: int, slots: int, max_tokens: int):
        import torch

        from stretto.config import EngineConfig
        from stretto.engine.runner import Runner, Serving
        from stretto.model import checkpoint

        torch.set_num_threads(threads)
        config = EngineConfig(slots=slots, max_tokens=max_tokens, threads=threads)
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._runner = Runner(
            checkpoint.load(folder),
            config,
            serving=Serving(0, ""),
            seed=0,
            deliver=self._events.put,
            failed=self._events.put,
        )
        self._runner.start()

    def generate(self, prompts: Prompts, new: int, sessions: list[str]) -> Prompts:
        from stretto.engine.scheduler import Ended
        from stretto.records import GenerateRequest, Sampling

        keys = [
            self._runner.submit(GenerateRequest(ids=ids, max_tokens=new, stop=[], sampling=Sampling(), session=session))
            for ids, session in zip(prompts, sessions, strict=True)
        ]
        found: dict[int, list[int]] = {}
        while len(found) < len(keys):
            events = self._events.get()
            if isinstance(events, BaseException):
                raise events
            for event in events:
                if isinstance(event, Ended):
                    if event.response is None:
                        raise RuntimeError(event.error)
                    found[event.job.key] = event.response.ids
        return [found[key] for key in keys]


class Generate:
    """transformers `generate`. The histories of a batch are equally long here, so that nothing is padding."""

    def __init__(self, folder: str, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        transformers.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def generate(self, prompts: Prompts, new: int, sessions: list[str]) -> Prompts:
        import torch

        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        out = self.model.generate(ids, attention_mask=mask, generation_config=self._settings(new))  # pyright: ignore
        return out[:, ids.shape[1] :].tolist()

    def _settings(self, new: int) -> Any:
        from transformers import GenerationConfig

        return GenerationConfig(
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
            eos_token_id=None,
        )


class ContinuousBatching(Generate):
    """transformers `generate_batch`, with a cache as large as the batch needs: left alone it takes most of the memory,
    and on a CPU each pass goes over all of it."""

    PAGE = 64

    def generate(self, prompts: Prompts, new: int, sessions: list[str]) -> Prompts:
        from transformers import ContinuousBatchingConfig

        longest = max(len(ids) for ids in prompts) + new
        config = ContinuousBatchingConfig(
            page_size=self.PAGE, num_blocks=len(prompts) * -(-longest // self.PAGE) + 1, max_batch_tokens=2048
        )
        results = self.model.generate_batch(
            prompts, generation_config=self._settings(new), continuous_batching_config=config, warmup=False
        )
        for result in results.values():
            if result.error is not None:
                raise RuntimeError(result.error)
        return [list(result.generated_tokens) for result in results.values()]


class Vllm:
    """vLLM's CPU build, with prefix caching, in eager mode: compiling takes minutes and a C++ compiler."""

    def __init__(self, folder: str, threads: int, slots: int, max_tokens: int):
        os.environ.update(
            OMP_NUM_THREADS=str(threads),
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_CPU_OMP_THREADS_BIND="nobind",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_LOGGING_LEVEL="ERROR",
            VLLM_NO_USAGE_STATS="1",
        )
        import torch

        torch.set_num_threads(threads)
        from vllm import LLM  # pyright: ignore[reportMissingImports]

        self._llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            enable_prefix_caching=True,
            max_model_len=max_tokens,
            max_num_batched_tokens=2048,
            max_num_seqs=slots,
            skip_tokenizer_init=True,
            generation_config="vllm",
            disable_log_stats=True,
            seed=0,
        )

    def generate(self, prompts: Prompts, new: int, sessions: list[str]) -> Prompts:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        settings = SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        return [list(out.outputs[0].token_ids) for out in self._llm.generate(inputs, settings, use_tqdm=False)]


CONTENDERS: dict[str, Callable[..., Contender]] = {
    "stretto": Ours,
    "generate": Generate,
    "generate_batch": ContinuousBatching,
    "vllm": Vllm,
}


def rollouts(contender: Contender, name: str, prompts: Prompts, new: int, observations: list[Prompts]) -> int:
    """Conversations: a turn of `new` tokens each, then what the tools said, and so on; the number of tokens sampled.

    `observations` has, for each turn but the last, the ids that every conversation gets before the next one.
    """
    sessions = [f"{name}/{attempt}" for attempt in range(len(prompts))]
    histories, sampled = [list(ids) for ids in prompts], 0
    for turn in range(len(observations) + 1):
        said = contender.generate(histories, new, sessions)
        sampled += checked(said, new)
        if turn < len(observations):
            histories = [h + s + o for h, s, o in zip(histories, said, observations[turn], strict=True)]
    return sampled


def checked(said: Prompts, new: int) -> int:
    """How many tokens these are. An engine that stops early would be measured at less work than the others."""
    if any(len(ids) != new for ids in said):
        raise RuntimeError(f"it made {sorted({len(ids) for ids in said})} tokens a prompt instead of {new}")
    return len(said) * new


def obey(contender: Contender, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order: {"seconds": wall time, "tokens": number sampled}."""
    start = time.perf_counter()
    if order["do"] == "rollouts":
        tokens = rollouts(contender, order["name"], order["prompts"], order["new"], order["observations"])
    else:
        said = contender.generate(order["prompts"], order["new"], [""] * len(order["prompts"]))
        tokens = checked(said, order["new"])
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def serve(name: str, folder: str, options: dict[str, Any], orders: TextIO, answers: TextIO) -> None:
    """Load, say {"ready": true}, then answer orders until there are no more. An error is an answer too."""

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        contender = CONTENDERS[name](folder, **options)
    except Exception as error:  # whatever a library raises is an answer: the others go on
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    for line in orders:
        try:
            say(obey(contender, json.loads(line)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    own_stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.stdin, own_stdout)
    os._exit(0)  # threads of the engines have nothing more to do
