"""The `openai` package against the engine: answers, tools, streams, and parameters that can't be honoured.

The network here is a chain: what follows a token depends on that token alone, so that a "policy" that says a word,
calls a tool and stops is made of a few weights.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import openai
import pytest
import torch
from tokenizers import Tokenizer

from stretto.engine.speech import Speech
from stretto.harness.chat import Chat
from stretto.model import checkpoint

from .conftest import SPEC, engine, write_tokenizer

PIECES = ["Let me see. ", '<tool_call>\n{"name": "add", "argu', 'ments": {"a": 1, "b": "é"}}\n</tool_call>']
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
USER = [{"role": "user", "content": "Add them."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After the assistant's prefix: the three pieces, then the stop token."""
    folder = tmp_path_factory.mktemp("models") / "caller"
    folder.mkdir()
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(PIECES)
    prefix = tokenizer.encode("assistant\n").ids[-1]
    chain = [prefix, *(tokenizer.token_to_id(piece) for piece in PIECES), tokenizer.token_to_id("<|im_end|>")]
    network = checkpoint.random_init(replace(SPEC, layers=1, dense_layers=()), seed=0)
    named = checkpoint.named_tensors(network)
    with torch.no_grad():
        for name, tensor in named.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        for token, following in pairwise(chain):
            named["lm_head.weight"][following] += named["model.embed_tokens.weight"][token] * 20
    checkpoint.save(network, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def client(model: Path):
    with engine(model, max_tokens=1024) as address:
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **options):
    return client.chat.completions.create(
        **{"model": "caller", "messages": USER, "temperature": 0, "max_tokens": 20, **options}
    )


def test_the_model_is_listed(client):
    assert [model.id for model in client.models.list()] == ["caller"]


def test_a_tool_is_called(client):
    answer = ask(client, tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [c.function.name for c in choice.message.tool_calls] == ["add"]
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1, "b": "é"}'
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.system_fingerprint == "version-0"


def test_the_conversation_goes_on_after_a_tool_result(client):
    first = ask(client, tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "2"}
    answer = ask(client, messages=[*USER, first.model_dump(), result], tools=TOOLS)
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    assert answer.usage.prompt_tokens_details.cached_tokens > 100  # the first turn's rows


def test_without_tools_the_call_is_text(client):
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = ask(client, **options).choices[0]
        assert choice.message.content == "".join(PIECES)
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_a_stream_gives_text_first_and_the_call_whole(client):
    chunks = list(ask(client, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas).strip() == "Let me see."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [(0, "add", '{"a": 1, "b": "é"}')]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == 4


def test_logprobs_come_with_each_token(client):
    for stream in (False, True):
        answer = ask(client, logprobs=True, temperature=1, seed=1, stream=stream)
        choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
        assert [entry.token for entry in entries] == [*PIECES, "<|im_end|>"]
        assert all(-0.5 < entry.logprob <= 0 for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_not_said(client, stream):
    answer = ask(client, stop=["me"], stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert text == "Let "


def test_the_token_limit_is_told(client):
    assert ask(client, max_completion_tokens=1).choices[0].finish_reason == "length"


WRONG = [
    ({"n": 2}, "n = 2 is not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"tool_choice": "required", "tools": TOOLS}, "tool_choice = 'required' can't be honoured"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"extra_body": {"best_of": 2}}, "best_of"),
    ({"temperature": -1}, "temperature is -1"),
    ({"messages": [{"role": "user", "content": "x" * 1100}]}, "tokens, but a slot of this engine holds 1024"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
    ({"max_tokens": 1020}, "do not fit a slot of 1024 tokens"),
    ({"max_tokens": 1020, "stream": True}, "do not fit a slot of 1024 tokens"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG)
def test_what_cannot_be_honoured_is_refused(client, options, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence):
        ask(client, **options)


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="this engine serves 'caller'"):
        ask(client, model="gpt")


def test_a_stream_that_is_left_frees_its_slot(client):
    with ask(client, stream=True, max_tokens=400, temperature=2, extra_body={"top_k": 3}) as stream:
        next(iter(stream))
    assert ask(client).choices[0].finish_reason == "stop"


@pytest.fixture(scope="module")
def chat(nano: Path) -> Chat:
    return Chat(nano)


class TestSpeech:
    """What is shown when, on bytes as tokens."""

    def test_half_characters_wait(self, chat):
        speech = Speech(chat, stops=[], hide="")
        shown = [speech.push(token) for token in chat.encode("a€b")]
        assert shown == ["a", "", "", "€", "b"]

    def test_what_may_become_a_mark_waits(self, chat):
        speech = Speech(chat, stops=[], hide="<tool_call>")
        shown = "".join(speech.push(token) for token in chat.encode("1 <tool 2 <tool_ca"))
        assert shown == "1 <tool 2 "
        assert speech.close() == ("1 <tool 2 <tool_ca", [])

    def test_a_broken_call_stays_text(self, chat):
        speech = Speech(chat, stops=[], hide="<tool_call>")
        for token in chat.encode("x<tool_call>{</tool_call>"):
            speech.push(token)
        assert speech.shown == 1
        assert speech.close() == ("x<tool_call>{</tool_call>", [])

    def test_bytes_that_are_no_character_come_at_the_end(self, chat):
        speech = Speech(chat, stops=[], hide="")
        assert speech.push(chat.encode("é")[0]) == ""
        assert speech.close()[0] == "\N{REPLACEMENT CHARACTER}"
