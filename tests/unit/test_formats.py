"""What columns mean: conversations, prompts with completions, or texts; or an error that says what is understood."""

import json

import pytest

from hf_hotspa.errors import DataError
from hf_hotspa.rows.formats import Chat, Strings, format_of, read_messages

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def read(row):
    return format_of(list(row)).read(row, 7)


@pytest.mark.parametrize(
    "value",
    [
        TALK,
        json.dumps(TALK),
        [{"role": "human", "content": "hi"}, {"role": "model", "content": "yes"}],
        [
            {"author": {"role": "user"}, "content": {"parts": ["hi"]}},
            {"author": {"role": "assistant"}, "content": ["yes"]},
        ],
        [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, TALK[1]],
        [{"role": "user", "content": "hi", "value": None}, {"role": "assistant", "content": "yes", "tool_calls": None}],
    ],
    ids=["roles", "JSON", "names of roles", "nested roles", "parts", "None of Arrow"],
)
def test_conversations(value):
    found = read({"messages": value, "id": 3})
    assert (found.trained, found.tools, found.plain) == ((1,), [], None)
    assert [(m["role"], m["content"]) for m in found.messages] == [("user", "hi"), ("assistant", "yes")]
    assert not any(None in m.values() or "tool_calls" in m for m in found.messages)


@pytest.mark.parametrize("key", ["messages", "conversations"])
@pytest.mark.parametrize(
    ("flag", "no", "yes"),
    [("weight", 0, 1), ("weight", 0.0, None), ("train", False, True), ("training", 0, None), ("trainable", False, True),
     ("loss", False, True), ("masked", True, False)],
)  # fmt: skip
def test_flags_of_messages_say_which_answers_are_learned(key, flag, no, yes):
    value = [{**message, flag: no} for message in (*TALK, TALK[0])] + [{**TALK[1], flag: yes, "name": "Bo", "id": 3}]
    found = read({key: value})
    assert found.trained == (3,)
    assert not any(flag in message for message in found.messages)
    assert (found.messages[3]["name"], found.messages[3]["id"]) == ("Bo", 3)
    split = read({"prompt": value[:1], "completion": value[1:]})
    assert (split.trained, split.messages) == ((3,), found.messages)
    answers = [{**TALK[1], "mask": None, "training_stage": "sft", "name": "train", "weather": 1}]
    assert read({key: answers}).trained == (0,)  # none of these is a flag


def test_a_conversation_with_system_tools_and_options():
    tool = {"name": "clock", "strict": None}
    row = {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "clock", "arguments": {"zone": "UTC"}}'},
            {"from": "observation", "value": "noon"},
            {"from": "gpt", "value": "yes", "weight": 0},
            {"from": "human", "value": "so"},
            {"from": "gpt", "value": "no", "weight": None},
        ],
        "system": "Short!",
        "tools": json.dumps([tool]),
        "chat_template_kwargs": {"enable_thinking": False, "other": None},
    }
    found = read(row)
    assert " ".join(m["role"] for m in found.messages) == "system user assistant tool assistant user assistant"
    assert found.messages[2]["tool_calls"][0]["function"] == {"name": "clock", "arguments": {"zone": "UTC"}}
    assert found.trained == (2, 6)
    assert (found.tools, found.options) == ([{"name": "clock"}], {"enable_thinking": False})
    with pytest.raises(DataError, match=r"column 'system' and a conversation that begins with another.*row 7"):
        read({**row, "conversations": [{"from": "system", "value": "Long!"}, *row["conversations"]]})


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_is_there_under_every_name(name):
    [message] = read_messages([{"role": "assistant", "content": "yes", name: "Hm"}], "messages", 0)
    assert message["reasoning_content"] == message["reasoning"] == message["thinking"] == "Hm"


@pytest.mark.parametrize(
    ("row", "asked", "plain"),
    [
        (
            {"instruction": "Add", "input": "1 2", "output": "3"},
            "Add\n\n1 2",
            "### Instruction:\nAdd\n\n### Input:\n1 2\n\n",
        ),
        ({"instruction": "Add", "input": None, "output": "3", "text": "Add 3"}, "Add", "### Instruction:\nAdd\n\n"),
        ({"question": "Add", "answer": "3", "id": 7}, "Add", "### Instruction:\nAdd\n\n"),
    ],
)
def test_questions_and_answers(row, asked, plain):
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "3"}]
    assert read(row) == Chat(messages, (1,), plain=Strings(plain + "### Response:\n", "3"))
    told = read({**row, "system": "Short!"})
    assert told.messages == [{"role": "system", "content": "Short!"}, *messages]
    assert told.plain.prompt == "Short!\n\n" + plain + "### Response:\n"


def test_earlier_turns_of_an_instruction():
    found = read({"instruction": "so", "input": "", "output": "no", "history": [["hi", "yes"]]})
    assert [m["content"] for m in found.messages] == ["hi", "yes", "so", "no"]
    assert (found.trained, found.plain) == ((1, 3), None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"content": "a"}, r"columns \['content'\].*'input_ids'.*'messages'.*'prompt'.*'instruction'.*'question'.*'text'"),
        ({"chosen": "a", "rejected": "b"}, "preferred and a rejected answer.*rename 'chosen'"),
        ({"messages": TALK, "conversations": TALK}, r"\['messages', 'conversations'\] could each be meant"),
        ({"instruction": "a", "output": "b", "response": "c"}, r"\['output', 'response'\] could each be meant"),
        ({"instruction": "a", "output": "b", "question": "c", "answer": "d"}, r"\['instruction', 'question'\] could each"),
        ({"question": "a", "answer": "b", "choices": ["c"]}, r"nothing says whether the answer needs \['choices'\]"),
        ({"question": "a", "answer": None}, "answer is a NoneType.*row 7"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "from 'narrator'.*row 7.*'gpt'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]}, r"kinds \['image'\]"),
        ({"messages": [{"role": "user", "content": 3}]}, "is a int instead of a text"),
        ({"messages": [{**TALK[1], "weight": 0.5}]}, "weight 0.5.*row 7"),
        ({"messages": [{**TALK[1], "masked": "no"}]}, "masked 'no'.*row 7.*use 0 .learned, the default. or 1"),
        ({"messages": [{**TALK[1], "train": True, "loss": 0}]}, "'train': True, 'loss': 0.*contradict.*row 7"),
        ({"messages": [{**TALK[0], "trainable": True}, TALK[1]]}, "message 0, of 'user', has trainable=True.*row 7"),
        ({"prompt": [TALK[1] | {"masked": False}], "completion": TALK}, "message 0, of 'assistant', has masked=False"),
        ({"messages": [{**TALK[1], "mask": True}]}, "message 0 has the key 'mask'.*row 7.*weight"),
        ({"messages": [{**TALK[1], "train_detail": [{"begin_offset": 0}]}]}, "the key 'train_detail'"),
        ({"messages": [{"role": "user", "content": [{"text": "a", "train": 0}]}]}, "a part of a message has the key 'train'"),
        ({"messages": [{"text": "a"}]}, "messages is not a conversation.*row 7.*'from': 'human'"),
        ({"messages": TALK, "tools": "clock"}, "'tools' is not JSON.*row 7"),
        ({"messages": TALK, "tools": {"name": "clock"}}, "'tools' is a dict instead of a list"),
        ({"messages": TALK, "chat_template_kwargs": [1]}, "'chat_template_kwargs' is a list"),
        ({"conversations": [{"from": "function_call", "value": "clock"}]}, "'function_call' is not JSON"),
        ({"instruction": "a", "output": "b", "history": ["c"]}, "'history' holds something other"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(row, message):
    with pytest.raises(DataError, match=message):
        read(row)
