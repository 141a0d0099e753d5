"""A client's messages as segments: appended to where they only go on, begun anew where they don't. Pure."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.harness.chat import Chat, call_text
from stretto.harness.conversations import Conversations, TooLong
from stretto.harness.spans import Spans
from stretto.records import CallStatus, GenerateResponse, encode

TOOLS = [{"type": "function", "function": {"name": "grep", "parameters": {"type": "object", "properties": {}}}}]
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix it."}
GREP = {"pattern": "x", "path": "a.py"}


@pytest.fixture
def conversations(chat) -> Conversations:
    return Conversations(chat, Spans(chat), 4000, truncated=False)


def answer(conversations: Conversations, conversation, text: str, closed: bool = True) -> list[int]:
    """The policy says `text`."""
    ids = conversations.chat.encode(text) + (conversations.chat.stop if closed else [])
    sample(conversation, ids)
    conversations.hear(conversation, ids)
    return ids


def sample(conversation, ids: list[int]) -> None:
    conversation.history.take(
        GenerateResponse(
            ids=ids,
            logprobs=np.zeros(len(ids), "<f4").tobytes(),
            versions=np.ones(len(ids), "<i4").tobytes(),
            support=None,
            routes=None,
            route_shape=(0, 0),
            route_bits=8,
            finish="stop",
            cached=0,
        )
    )


def told(*calls: tuple[str, str], content: str | None = None, arguments: str = "") -> dict:
    entries = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or json.dumps(GREP)}}
        for id, name in calls
    ]
    return {"role": "assistant", "content": content, **({"tool_calls": entries} if entries else {})}


def test_ENG_1_what_goes_on_is_appended_and_never_tokenised_again(conversations, chat):
    first = conversations.take([SYSTEM, USER], TOOLS)
    spoken = answer(conversations, first, f"Let me see.\n{call_text('grep', GREP)}")
    before = list(first.history.ids)
    conversations.told(first, told(("c1", "grep"), content="Let me see."))
    echo = {
        **told(("c1", "grep"), content=" Let me see.\n", arguments='{"path":"a.py","pattern":"x"}'),
        "refusal": None,
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "a.py:1:x"}
    second = conversations.take([SYSTEM, USER, echo, result, {"role": "user", "content": "And?"}], TOOLS)
    assert second is first and spoken == before[-len(spoken) :]
    new = chat.decode(second.history.ids[len(before) :])
    assert second.history.ids[: len(before)] == before and new.count("a.py:1:x") == 1 and "And?" in new
    assert conversations.calls[0].observation == "a.py:1:x" and conversations.calls[0].status is CallStatus.OK


@pytest.mark.parametrize(
    "change",
    [
        lambda messages, tools: (messages[1:], tools),  # another system message
        lambda messages, tools: ([*messages[:2], {**messages[2], "content": "other"}, *messages[3:]], tools),
        lambda messages, tools: ([*messages[:2], messages[3]], tools),  # our answer left out
        lambda messages, tools: (messages[:2], tools),  # asked again
        lambda messages, tools: (messages, None),
        lambda messages, tools: ([*messages, {"role": "assistant", "content": "put in"}, USER], tools),
        lambda messages, tools: ([*messages, {"role": "system", "content": "put in"}], tools),
    ],
)
def test_what_does_not_go_on_begins_anew(conversations, change):
    first = conversations.take([SYSTEM, USER], TOOLS)
    answer(conversations, first, call_text("grep", GREP))
    message = told(("c1", "grep"))
    conversations.told(first, message)
    held = list(first.history.ids)
    messages, tools = change([SYSTEM, USER, message, {"role": "tool", "tool_call_id": "c1", "content": "x"}], TOOLS)
    second = conversations.take(messages, tools)
    assert second is not first and first.history.ids == held
    assert second.history.ids == conversations.chat.messages(messages, tools)
    answer(conversations, second, "Done.")
    segments, _ = conversations.segments()
    done = conversations.chat.encode("Done.") + conversations.chat.stop
    assert len(segments) == 2 and segments[1].ids_T[segments[1].sampled_T].tolist() == done


def test_two_conversations_at_once_keep_apart(conversations):
    one, two = conversations.take([USER], TOOLS), conversations.take([USER], TOOLS)
    assert one is not two
    answer(conversations, two, "Two.")
    conversations.told(two, told(content="Two."))
    assert conversations.take([USER, told(content="Two."), USER], TOOLS) is two
    heard = len(two.history)
    answer(conversations, one, "One.")
    lengths = [len(segment.ids_T) for segment in conversations.segments()[0]]
    assert lengths == [len(one.history), heard - len(conversations.chat.follow([USER]))], "up to what was said last"


def test_results_without_an_id_or_with_one_id_for_two_go_to_the_calls_in_order(conversations):
    for ids in (("c1", "c1"), (None, None)):
        first = conversations.take([{**USER, "content": str(ids)}], TOOLS)
        answer(conversations, first, call_text("grep", GREP) + call_text("grep", {"pattern": "y"}))
        message = told(("c1", "grep"), ("c1", "grep"))
        conversations.told(first, message)
        results = [
            {"role": "tool", "content": text, **({"tool_call_id": id} if id else {})} for text, id in zip("AB", ids)
        ]
        assert conversations.take([{**USER, "content": str(ids)}, message, *results], TOOLS) is first
    assert [call.observation for call in conversations.calls] == ["A", "B", "A", "B"]


def test_a_turn_that_broke_off_is_no_part_of_its_segment(conversations, chat):
    first = conversations.take([USER], None)
    answer(conversations, first, "Yes.")
    conversations.told(first, told(content="Yes."))
    held = len(first.history)
    conversations.take([USER, told(content="Yes."), USER], None)
    sample(first, chat.encode("half of a turn"))
    (segment,) = conversations.segments()[0]
    assert len(segment.ids_T) == held


def test_the_tokenizer_is_spared_whatever_is_long(conversations):
    long = "x" * 50_000_000
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": long}}],
    }
    for messages, tools in (([USER], [tool]), ([USER, call], None), ([USER] * 5000, None)):
        with pytest.raises(TooLong):
            conversations.take(messages, tools)


def test_an_answer_that_failed_is_gone_on_from_by_nobody(conversations):
    first = conversations.take([USER], None)
    second = conversations.take([USER], None)  # asked again
    answer(conversations, second, "Yes.")
    assert first is not second and len(conversations.segments()[0]) == 1


def test_a_turn_cut_at_its_limit_is_closed_before_the_next(conversations, chat):
    first = conversations.take([USER], None)
    spoken = answer(conversations, first, "It is", closed=False)
    conversations.told(first, told(content="It is"))
    held = len(first.history)
    conversations.take([USER, told(content="It is"), USER], None)
    assert first.history.ids[held - len(spoken) : held + 1] == spoken + chat.stop
    assert not first.history.segment().sampled_T[held]


def test_too_long_changes_nothing_and_long_texts_are_not_tokenised(conversations):
    first = conversations.take([USER], None)
    answer(conversations, first, "Yes.")
    conversations.told(first, told(content="Yes."))
    held = list(first.history.ids)
    for text in ("word " * 5000, "x" * 50_000_000):
        with pytest.raises(TooLong, match="4000 in all"):
            conversations.take([USER, told(content="Yes."), {"role": "user", "content": text}], None)
    assert first.history.ids == held
    assert conversations.take([USER, told(content="Yes."), USER], None) is first


def test_calls_of_no_tool_offered_are_noted(conversations):
    first = conversations.take([USER], TOOLS)
    answer(conversations, first, call_text("rm", {}) + "<tool_call>\n{broken\n</tool_call>")
    assert [call.status for call in conversations.calls] == [CallStatus.UNKNOWN_TOOL, CallStatus.BAD_JSON]


@pytest.mark.parametrize("arguments", ['{"a": "\\ud800"}', '{"a": 1' + "0" * 400 + "}"])
def test_what_no_record_can_hold_is_a_broken_call(conversations, arguments):
    first = conversations.take([USER], TOOLS)
    answer(conversations, first, f'<tool_call>\n{{"name": "grep", "arguments": {arguments}}}\n</tool_call>')
    conversations.told(first, told(("c1", "grep"), arguments=arguments))
    assert encode(conversations.calls[0]) and conversations.calls[0].status is CallStatus.BAD_ARGUMENTS


@pytest.mark.parametrize(
    "messages, tools",
    [
        ([{"role": "user", "content": [{"type": "text"}]}], None),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None),
        ([{"role": "robot", "content": "x"}], None),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, USER],
            None,
        ),
        ([USER], [{"type": "function"}]),
        ([USER], [{"type": "function", "function": "f"}]),
    ],
)
def test_garbage_is_a_sentence_and_changes_nothing(conversations, messages, tools):
    with pytest.raises(ValueError):
        conversations.take(messages, tools)
    assert not conversations.all and not conversations.messages


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["append", "compact", "edit"]), st.text("ab <|\n", max_size=8)), max_size=8))
def test_every_sampled_token_is_in_one_segment_once(turns):
    conversations = Conversations(_chat(), Spans(_chat()), 4000, truncated=False)
    messages, sampled = [USER], 0
    for what, text in turns:
        conversation = conversations.take(messages, None)
        sampled += len(answer(conversations, conversation, text))
        message = told(content=text)
        conversations.told(conversation, message)
        messages = {
            "append": [*messages, message, USER],
            "compact": [{"role": "user", "content": f"so far: {text}"}],
            "edit": [*messages, {**message, "content": text + "!"}, USER],
        }[what]
    segments, _ = conversations.segments()
    assert sum(int(segment.sampled_T.sum()) for segment in segments) == sampled
    for segment in segments:
        segment.validate()


def _chat() -> Chat:
    from stretto.config import ModelConfig

    return Chat(ModelConfig().folder)
