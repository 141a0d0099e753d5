"""Pins: transcripts are what the harness would have written, observations included, and wrong edits are not taught."""

import asyncio
import itertools
import random
import sys

import pytest

from stretto.config import ModelConfig, SandboxConfig
from stretto.harness.chat import Chat, call_text
from stretto.harness.parse import Attempt
from stretto.harness.toolbox.workspace import Workspace
from stretto.harness.tools import run_call
from stretto.midtrain.demonstrator import CONTEXT, Endless, careful, transcripts, visible
from stretto.records import CallStatus
from stretto.sandbox.pool import BoxPool
from stretto.tasks.repair import generate, mutants


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(ModelConfig().folder)


@pytest.mark.parametrize("kind", ["careful", "hasty"])
def test_weights_follow_the_speaker(chat: Chat, kind: str) -> None:
    for document in itertools.islice(transcripts(chat, 0, kind), 50):
        assert len(document.ids) == len(document.weights)
        assert set(document.weights) <= {0.0, CONTEXT, 1.0}
        assert document.ids[-1] in chat.stop or document.weights[-1] == CONTEXT


def test_wrong_edits_of_the_careful_one_are_context_only(chat: Chat) -> None:
    rng = random.Random(0)
    masked = fixed = 0
    for repair in itertools.islice(generate("train", 0), 100):
        document = careful(repair, chat, rng)
        masked += 0.0 in document.weights
        taught = chat.decode([i for i, w in zip(document.ids, document.weights, strict=True) if w == 1.0])
        fixed += call_text("edit_file", {"path": "solution.py", "line": repair.line, "text": repair.fix}) in taught
    assert masked > 10
    assert fixed > 90  # the others passed the visible tests by another way


def test_its_observations_are_those_of_the_real_tools() -> None:
    asyncio.run(_compare_with_a_box())


async def _compare_with_a_box() -> None:
    pool = BoxPool(SandboxConfig())
    await pool.start()
    rng = random.Random(1)
    try:
        for repair in itertools.islice(generate("train", 3), 12):
            box = await pool.box(repair.task.files)
            work = Workspace(box, repair.task.files)
            for text in [repair.fix, *mutants(repair.fixed, repair.line, rng)[:4]]:
                edit = {"path": "solution.py", "line": repair.line, "text": text}
                assert await run_call(Attempt(CallStatus.OK, "edit_file", edit), work) == ("ok", CallStatus.OK)
                program = (*repair.broken[: repair.line - 1], text, *repair.broken[repair.line :])
                observed, _ = await run_call(Attempt(CallStatus.OK, "run_tests"), work)
                assert observed == visible(repair, program)
            await box.stop()
    finally:
        await pool.close()


def test_an_edit_that_makes_an_endless_program_leaves_no_document() -> None:
    repair = next(generate("train", 0))
    before = sys.gettrace()
    endless = (repair.fixed[0], "    grown = [0]", "    for one in grown: grown.append(one)")
    with pytest.raises(Endless):
        visible(repair, endless)
    assert sys.gettrace() is before
