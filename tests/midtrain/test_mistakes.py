"""Pins: the cached turn equals the plain forward, and recovery documents teach the right edit, never the model's."""

import itertools

import torch

from stretto.config import ModelConfig
from stretto.harness.chat import Chat
from stretto.midtrain.demonstrator import CONTEXT
from stretto.midtrain.mistakes import corrected, sample_turn
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.tasks.repair import generate


def test_a_greedy_turn_is_the_argmax_of_the_plain_forward() -> None:
    chat, model = Chat(ModelConfig().folder), checkpoint.load(ModelConfig().folder)
    prompts = [chat.start(r.task.instruction) for r in itertools.islice(generate("train", 0), 4)]
    turns = sample_turn(model, prompts, chat.stop[0], 12, torch.Generator().manual_seed(0))
    for prompt, turn in list(zip(prompts, turns, strict=True))[::2]:  # the even ones are greedy
        ids = prompt + turn
        with torch.inference_mode():
            out = model(torch.tensor(ids), torch.arange(len(ids)), PackedCausal([len(ids)]))
            best = model.logits(out.hidden_TD[len(prompt) - 1 : -1]).argmax(-1).tolist()
        assert turn == best
        assert turn[-1] in chat.stop or len(turn) == 12


def test_documents_mask_the_mistake_and_are_reproducible() -> None:
    chat, model = Chat(ModelConfig().folder), checkpoint.load(ModelConfig().folder)
    documents = list(itertools.islice(corrected(model, chat, 0), 6))
    for document in documents:
        assert {0.0, CONTEXT, 1.0} == set(document.weights)
        assert chat.decode(document.ids).count('"edit_file"') in (1, 2)
    assert documents == list(itertools.islice(corrected(model, chat, 0), 6))
