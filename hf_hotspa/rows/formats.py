"""Converts the columns of raw rows to conversations, prompts with completions, or texts.

Owns the table of `docs/data.md`: the supported columns, their precedence, the names of roles, and how message fields
are made uniform. No tokenizer, no torch.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from hf_hotspa.errors import DataError

UNDERSTOOD = (
    "'input_ids' (and 'labels'); 'messages' or 'conversations'; 'prompt' and 'completion'; 'instruction' (and 'input') and "
    "'output'; 'question' and 'answer'; or 'text'"
)
_CHATS = ("messages", "conversations", "conversation")
_ANSWERS = {"instruction": ("output", "response"), "question": ("answer", "response"), "query": ("response",)}
_CONTEXTS = ("input", "context")
_SYSTEMS = ("system", "system_prompt")
# Columns allowed beside a bare question and its answer; an answer might need any other column.
_BESIDE_A_QUESTION = {
    *("id", "idx", "index", "uuid", "row_id", "question_id", "prompt_id", "conversation_id", "__index_level_0__"),
    *("source", "dataset", "split", "subset", "category", "topic", "subject", "difficulty", "level", "tags", "type"),
    *("language", "lang", "license", "url", "model", "score", "quality", "num_tokens", "created", "timestamp", "metadata"),
}  # fmt: skip
_ROLES = {
    **dict.fromkeys(("human", "user", "prompter", "User", "Human"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model", "ai", "Assistant"), "assistant"),
    **dict.fromkeys(("system", "System"), "system"),
    **dict.fromkeys(("tool", "observation", "function_response", "tool_response", "function"), "tool"),
    "function_call": "function_call",
}
_FLAGS = {"weight": True, "train": True, "training": True, "trainable": True, "loss": True, "masked": False}
"""Keys of messages -> the value with which an answer is learned: of OpenAI, axolotl, tinker, ms-swift, torchtune."""
_COUNTS = {  # words in other keys that may say what is learned
    "train", "trained", "training", "trainable", "untrained", "learn", "learned", "learnable", "loss", "losses", "grad",
    "mask", "masks", "masked", "masking", "unmask", "unmasked", "weight", "weights", "supervise", "supervised",
    "ignore", "ignored", "exclude", "excluded", "skip", "skipped",
}  # fmt: skip
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_YES_OR_NO = ("true", "false", "yes", "no", "0", "1")
_REASONING = ("reasoning_content", "reasoning", "thinking")

SKIPPED = "remove the row, or have rows that are empty skipped and counted: hotspa_empty_rows=skip"
"""The fix for an empty row."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Strings:
    """A prompt and the completion that is learned, without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """A conversation."""

    # with `role` and `content`, optionally `tool_calls`, `reasoning_content` and others; no value is None
    messages: Messages
    trained: tuple[int, ...]  # the assistant's turns that are learned, as indices into `messages`
    tools: list[Any] = field(default_factory=list)
    # further variables of the chat template, such as `enable_thinking`
    options: dict[str, Any] = field(default_factory=dict)
    # replaces the conversation if a tokenizer has no chat template; None if a template is required
    plain: Strings | None = None


Reading = str | Strings | Chat


@dataclass(frozen=True)
class Format:
    """How rows with certain columns are read."""

    columns: tuple[str, ...]  # the columns that are read, if a row has them
    kind: str  # `chat`, `completion` (after a prompt), `answer` (to a question; strings), or `text`
    read: Callable[[Mapping[str, Any], int], Reading]  # a row and its number -> its contents. Raises `DataError`.
    required: tuple[str, ...]  # the columns that every row needs; the last one holds what is learned
    unused: tuple[str, ...] = ()  # other supported columns, which are ignored

    @property
    def masked(self) -> bool:
        """Whether a part of a row may be unlabelled."""
        return self.kind != "text"

    def is_empty(self, row: Mapping[str, Any]) -> bool:
        """Whether a required column is null, or the learned text or conversation is empty."""
        learned = row[self.required[-1]]
        if self.kind == "chat" and isinstance(learned, str) and learned.strip() in ("", "[]", "null"):
            return True
        return any(row[name] is None for name in self.required) or (isinstance(learned, str | list) and not learned)


def format_of(names: Sequence[str]) -> Format:
    """Returns how rows with these columns are read; of several formats, the one with the most information on roles.
    Raises `DataError`: no format matches, or the question and the answer are ambiguous."""
    chat = _one_of(_CHATS, names)
    extras = tuple(name for name in (*_SYSTEMS, "tools", "chat_template_kwargs") if name in names)
    format_: Format | None = None
    if chat:
        format_ = Format((chat, *extras), "chat", lambda row, number: _read_chat(row, chat, number), (chat,))
    elif "prompt" in names and "completion" in names:
        both = ("prompt", "completion")
        format_ = Format((*both, *extras), "completion", _read_completion, both)
    else:
        question = _one_of([asked for asked, answers in _ANSWERS.items() if set(answers) & set(names)], names)
        if question:
            format_ = _pair(question, names, extras)
        elif "text" in names:
            format_ = Format(("text",), "text", lambda row, number: text_of(row["text"], "text", number), ("text",))
    if format_ is None:
        raise _not_understood(names)
    unused = [*_CHATS, "prompt", "completion", *_ANSWERS, "output", "answer", "response", "text"]
    return replace(format_, unused=tuple(n for n in unused if n in names and n not in format_.columns))


def _pair(question: str, names: Sequence[str], extras: tuple[str, ...]) -> Format:
    answer, context = str(_one_of(_ANSWERS[question], names)), None
    columns = [question]
    if question == "instruction":
        context = _one_of(_CONTEXTS, names)
        columns += [name for name in (*_CONTEXTS, "history") if name in names]
    else:
        known = {question, answer, *extras} | _BESIDE_A_QUESTION
        others = sorted(set(names) - known)
        if others:
            raise DataError(
                f"the dataset has the columns {list(names)}; {question!r} and {answer!r} are a question and its answer, and "
                f"nothing says whether the answer needs {others}",
                fix=f"remove those columns, or merge what is asked into one column; supported are: {UNDERSTOOD}",
            )

    def read(row: Mapping[str, Any], number: int) -> Chat:
        return _read_pair(row, number, question, answer, context)

    return Format((*columns, answer, *extras), "answer", read, (question, answer))


def _one_of(candidates: Sequence[str], names: Sequence[str]) -> str | None:
    there = [name for name in candidates if name in names]
    if len(there) > 1:
        raise DataError(
            f"the dataset has the columns {list(names)}, and {there} could each be meant",
            fix=f"keep one of {there} and remove the others",
        )
    return there[0] if there else None


def _not_understood(names: Sequence[str]) -> DataError:
    if {"chosen", "rejected"} <= set(names):
        return DataError(
            f"the dataset has the columns {list(names)}: pairs of a preferred and a rejected answer",
            why="this trainer learns from answers, not from comparisons",
            fix="rename 'chosen' to 'messages' (or 'completion', beside a 'prompt') to train on the preferred answers",
        )
    return DataError(f"the dataset has the columns {list(names)}", fix=f"give it one of: {UNDERSTOOD}")


def _read_chat(row: Mapping[str, Any], key: str, number: int) -> Chat:
    messages = _with_system(read_messages(row[key], key, number), row, number)
    return Chat(messages, _learned(messages, 0, f"dataset row {number}, column {key!r}"), **_rendering(row, number))


def _read_completion(row: Mapping[str, Any], number: int) -> Strings | Chat:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str | Integral):
        return Strings(text_of(prompt, "prompt", number), text_of(completion, "completion", number))
    before = _with_system(read_messages(prompt, "prompt", number), row, number)
    messages = [*before, *read_messages(completion, "completion", number)]
    learned = _learned(messages, len(before), f"dataset row {number}, columns 'prompt' and 'completion'")
    return Chat(messages, learned, **_rendering(row, number))


def _read_pair(row: Mapping[str, Any], number: int, question: str, answer: str, context: str | None) -> Chat:
    ask, answer_text = text_of(row[question], question, number), text_of(row[answer], answer, number)
    given = row[context] if context is not None else None
    if given is not None:
        given = text_of(given, str(context), number)
    asked = f"{ask}\n\n{given}" if given else ask
    messages: Messages = []
    for pair in row.get("history") or ():
        if not (isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise DataError(
                "'history' holds something other than pairs of a question and its answer", where=f"dataset row {number}"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer_text}]
    plain = None
    if len(messages) == 2:
        parts = [_system(row) or "", f"### Instruction:\n{ask}", f"### Input:\n{given}" if given else ""]
        plain = Strings("\n\n".join([*filter(None, parts), "### Response:\n"]), answer_text)
    messages = _with_system(messages, row, number)
    learned = _learned(messages, 0, f"dataset row {number}")
    return Chat(messages, learned, plain=plain, **_rendering(row, number))


def _system(row: Mapping[str, Any]) -> str | None:
    return next((str(row[name]) for name in _SYSTEMS if row.get(name)), None)


def _with_system(messages: Messages, row: Mapping[str, Any], number: int) -> Messages:
    system = _system(row)
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        if messages[0]["content"] == system:
            return messages
        raise DataError(
            "the row has a column 'system' and a conversation that begins with another system message",
            where=f"dataset row {number}",
            fix="remove one of them",
        )
    return [{"role": "system", "content": system}, *messages]


def _rendering(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    tools = _parsed(row.get("tools"), "tools", number) or []
    options = _parsed(row.get("chat_template_kwargs"), "chat_template_kwargs", number) or {}
    for name, value, kind, words in (
        ("tools", tools, list, "a list"),
        ("chat_template_kwargs", options, Mapping, "a mapping"),
    ):
        if not isinstance(value, kind):
            where = f"dataset row {number}"
            raise DataError(f"{name!r} is a {type(value).__name__} instead of {words}", where=where)
    tools = [_without_none(_parsed(tool, "tools", number)) for tool in tools]
    return {"tools": tools, "options": _without_none(dict(options))}


def read_messages(value: object, key: str, number: int) -> Messages:
    """Returns the messages of a conversation, with `role` and `content`. `value`: a list of mappings with `role` (or
    `author.role`) and `content`, or `from` and `value`; or its JSON text. Raises `DataError`: it is not a
    conversation."""
    where = f"dataset row {number}, column {key!r}"
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value, key, number)
    messages = [_message(message, where) for message in value] if isinstance(value, list) else []
    if not messages or None in messages:
        raise DataError(
            f"{key} is not a conversation",
            where=where,
            fix=f"give {key} as a list of messages such as {{'role': 'user', 'content': 'Hello'}} or "
            "{'from': 'human', 'value': 'Hello'}" + ("" if value else f"; or {SKIPPED}"),
        )
    return [message for message in messages if message is not None]


def _message(message: object, where: str) -> dict[str, Any] | None:
    if not isinstance(message, Mapping):
        return None
    fields = _named_alike(message, where)
    role = fields.get("role")
    if not isinstance(role, str) or not role:
        return None
    fields["role"] = _ROLES.get(role, role)
    fields["content"] = _content(fields.get("content"), where)
    if fields["role"] == "function_call":
        fields = {"role": "assistant", "content": "", "tool_calls": _calls(fields["content"], where)}
    elif "tool_calls" in fields:
        fields["tool_calls"] = _without_none(fields["tool_calls"])
        if not fields["tool_calls"]:
            del fields["tool_calls"]
    reasoning = next((fields[name] for name in _REASONING if fields.get(name)), None)
    if reasoning is not None:  # model families use different names
        fields |= dict.fromkeys(_REASONING, reasoning)
    return fields


def _named_alike(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A message's fields that are not null, with `role` and `content` in the place of other names."""
    fields = {name: value for name, value in message.items() if value is not None}
    if isinstance(fields.get("author"), Mapping):
        fields.setdefault("role", fields.pop("author").get("role"))
    if "role" not in fields and "from" in fields:
        fields["role"] = fields.pop("from")
        if fields["role"] not in _ROLES:
            raise DataError(f"a message is from {fields['role']!r}", where=where, fix=f"use one of {sorted(_ROLES)}")
    if "content" not in fields and "value" in fields:
        fields["content"] = fields.pop("value")
    return fields


def _content(content: object, where: str) -> str:
    if content is None:  # as with tool calls
        return ""
    if isinstance(content, Mapping) and isinstance(content.get("parts"), list):
        content = content["parts"]
    if isinstance(content, list):
        for part in content:
            _refuse_other_flags(part if isinstance(part, Mapping) else {}, "a part of a message", where)
        parts = [part if isinstance(part, str) else _text_of_part(part) for part in content]
        if None in parts:
            kinds = sorted({str(part.get("type")) for part in content if isinstance(part, Mapping)} - {"text"})
            raise DataError(
                f"a message has parts of the kinds {kinds}", where=where, fix="only text is trained: remove the others"
            )
        return "".join(filter(None, parts))
    if not isinstance(content, str):
        raise DataError(f"the content of a message is a {type(content).__name__} instead of a text", where=where)
    return content


def _text_of_part(part: object) -> str | None:
    return part["text"] if isinstance(part, Mapping) and isinstance(part.get("text"), str) else None


def _calls(content: str, where: str) -> list[dict[str, Any]]:
    try:
        calls = json.loads(content)
    except ValueError as error:
        raise DataError(f"a message from 'function_call' is not JSON: {error}", where=where) from None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise DataError("a message from 'function_call' has no 'name' and 'arguments'", where=where)
    return [{"type": "function", "function": {"name": c["name"], "arguments": c.get("arguments") or {}}} for c in calls]


def _learned(messages: Messages, first: int, where: str) -> tuple[int, ...]:
    """The learned turns of the assistant, from message `first` on. Removes the flags from the messages. Raises
    `DataError`: a key may say what is learned, and cannot be honoured; names it."""
    turns = []
    for at, message in enumerate(messages):
        flags = {name: message.pop(name) for name in _FLAGS if name in message}
        _refuse_other_flags(message, f"message {at}", where)
        for name, value in flags.items():
            if isinstance(value, str | Sequence | Mapping) or value not in (0, 1):
                raise DataError(
                    f"message {at} has the {name} {value!r}",
                    where=where,
                    why="the key says whether an answer is learned",
                    fix=f"use {int(_FLAGS[name])} (learned, the default) or {int(not _FLAGS[name])} (not learned)",
                )
        counts = {name: bool(value) == _FLAGS[name] for name, value in flags.items()}
        if len(set(counts.values())) > 1:
            raise DataError(
                f"message {at} has {flags}, which contradict each other", where=where, fix="keep one of them"
            )
        may_be = message["role"] == "assistant" and at >= first
        asked = next((name for name, counted in counts.items() if counted and name != "weight"), None)
        if asked is not None and not may_be:
            raise DataError(
                f"message {at}, of {message['role']!r}, has {asked}={flags[asked]!r}",
                where=where,
                why="only answers of the assistant are learned, and of a completion only those in it",
                fix=f"remove {asked!r} from the message, or set it to {not _FLAGS[asked]}",
            )
        if may_be and all(counts.values()):
            turns.append(at)
    return tuple(turns)


def _refuse_other_flags(keys: Mapping[str, Any], what: str, where: str) -> None:
    """Checks that no key of a message, or of a part of one, seems to say what is learned. A text does not. Raises
    `DataError`: naming the key."""
    for name, value in keys.items():
        flag = value if not isinstance(value, str) else value.strip().lower() in _YES_OR_NO or None
        if flag is not None and _COUNTS.intersection(word.lower() for word in _WORD.findall(str(name))):
            raise DataError(
                f"{what} has the key {name!r}, which may say whether it is learned",
                where=where,
                why="what it means is not known, and it would be ignored",
                fix=f"give whole messages one of {list(_FLAGS)}, such as 'weight': 0 for an answer that is not learned, or remove it",
            )


def _parsed(value: object, key: str, number: int) -> Any:
    """Parses JSON text, in which `datasets` stores values whose schemas differ between rows."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError as error:
        raise DataError(f"{key!r} is not JSON: {error}", where=f"dataset row {number}") from None


def _without_none(value: object) -> Any:
    """Removes the keys that Arrow adds to a mapping because other rows' mappings have them."""
    if isinstance(value, Mapping):
        return {name: _without_none(inner) for name, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def text_of(value: object, key: str, number: int) -> str:
    """Returns the text of a column; for an integer its digits, which are exact. Raises `DataError`: it holds another
    type: the original text of a decimal number, a boolean or a null is unknown."""
    if isinstance(value, str):
        return value
    if not isinstance(value, bool) and isinstance(value, Integral):
        return str(int(value))
    if value is None:
        raise DataError(f"{key} is a NoneType instead of a string", where=f"dataset row {number}", fix=SKIPPED)
    raise DataError(
        f"{key} is a {type(value).__name__} instead of a string",
        where=f"dataset row {number}",
        fix=f"give {key} as a string, prompt and completion both as strings or both as lists of messages; load_source reads "
        "the cells of a csv file as text",
    )
