"""Renders a conversation with a tokenizer's chat template, and finds the characters that are learned.

Owns how a template that was written for inference is trained, by the first of these methods that applies:

* the template has `{% generation %}` markers: they mark what is learned;
* otherwise each answer begins where the template's generation prompt ends, and ends with its end-of-turn token, which
  is learned, too (the line break after it, in many templates, is never generated and not learned);
* if the template rewrites an answer once other messages follow (Qwen3 and others remove its thinking), a row is laid
  out turn by turn: *every answer is written as the template writes it when it is the last*, and stays so in later
  turns. One text trains all answers, each after the template's exact prompt, except for what it would remove from the
  history.

Content that a template drops silently (thinking, tools, unknown roles) is an error, as missing labels go unnoticed in
training. `ChatTemplate` converts the text to tokens; a token at the border of an answer that also holds a part of the
preceding text is learned. No torch.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hf_hotspa.errors import DataError, HotspaError
from hf_hotspa.rows.formats import Chat, Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_OPENED = re.compile(r"<(\w+)>\n\Z")  # the end of a generation prompt that opens the thinking
_ARGUMENTS_ARE_JSON = re.compile(r"arguments\s*\|\s*tojson")

Tokens = tuple[list[int], list[bool]]  # ids, and whether each is learned


class ChatTemplate:
    """The chat template of a tokenizer; converts conversations to tokens. Raises `DataError`: it has none."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        # A template may be a text or a table of texts; this call also covers tokenizers without a template.
        self.source = self.source_for(None)
        added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
        self.added = {token for token in added | set(tokenizer.all_special_tokens) if token.strip()}
        self._sizes = sorted({len(token) for token in self.added}, reverse=True)
        self._firsts = {token[0] for token in self.added}

    def source_for(self, tools: object) -> str:
        """Returns the template for these tools."""
        try:
            return str(self.tokenizer.get_chat_template(tools=tools))
        except Exception as error:
            raise DataError(
                f"the tokenizer has no chat template that can be used: {error}",
                fix="set tokenizer.chat_template, or give 'text' or string 'prompt' and 'completion' columns",
            ) from error

    def pieces_of(self, text: str) -> list[str]:
        """Splits a text into added tokens and the text between them."""
        pieces, start, at = [], 0, 0
        while at < len(text):
            size = 0
            if text[at] in self._firsts:
                size = next((size for size in self._sizes if text[at : at + size] in self.added), 0)
            if size:
                pieces += [text[start:at], text[at : at + size]]
                start = at + size
            at += size or 1
        return [piece for piece in [*pieces, text[start:]] if piece]

    def is_ended(self, text: str) -> bool:
        """Whether a text ends with an added token, apart from white space."""
        text = text.rstrip()
        return any(text[-size:] in self.added for size in self._sizes)

    def tokens(self, chats: Sequence[Chat], rows: Sequence[int]) -> list[Tokens]:
        """Returns the tokens of conversations; `rows` are their numbers, for messages. Raises `DataError`: the template
        fails on a conversation, leaves something out, or does not show the answers."""
        tokens: list[Tokens] = []
        texts: dict[int, tuple[str, list[tuple[int, int]]]] = {}
        for at, (chat, row) in enumerate(zip(chats, rows, strict=True)):
            layout = Layout(self, chat, row)
            marked = layout.by_markers() if layout.marked else None
            if marked is None:
                texts[at] = layout.turn_by_turn()
            tokens.append(marked or ([], []))
        if texts:
            encoded = self.encode([text for text, _ in texts.values()])
            for (at, (text, spans)), (ids, ends) in zip(texts.items(), encoded, strict=True):
                tokens[at] = (ids, self._learned(text, spans, ids, ends, rows[at]))
        return tokens

    def encode(self, texts: list[str]) -> list[tuple[list[int], list[int] | None]]:
        """Returns the ids of each text and the end of each token in it; None as ends for a slow tokenizer."""
        fast = bool(getattr(self.tokenizer, "is_fast", False))
        options = {"return_offsets_mapping": True} if fast else {}
        out = self.tokenizer(texts, add_special_tokens=False, verbose=False, **options)
        ends = [[end for _, end in offsets] for offsets in out["offset_mapping"]] if fast else [None] * len(texts)
        return [(list(ids), end) for ids, end in zip(out["input_ids"], ends, strict=True)]

    def _learned(
        self, text: str, spans: list[tuple[int, int]], ids: list[int], ends: list[int] | None, row: int
    ) -> list[bool]:
        """Whether each token overlaps with one of the spans."""
        if ends is not None:
            learned, begins = [False] * len(ids), [0, *ends]
            for start, stop in spans:
                hits = [i for i, end in enumerate(ends) if end > start and begins[i] < stop]
                if hits:
                    learned[hits[0] : hits[-1] + 1] = [True] * (hits[-1] + 1 - hits[0])
            return learned
        learned = [False] * len(ids)
        for start, stop in spans:
            (before, _), (after, _) = self.encode([text[:start], text[:stop]])
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise DataError(
                    "a token at the border of an answer also belongs to the text beside it",
                    where=f"dataset row {row}",
                    fix="use a fast tokenizer, which knows where tokens begin and end",
                )
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
        return learned

    def statement(self) -> str | None:
        """Returns what a user should know of how this template is trained, if anything."""
        talk = [
            said_by("user", "Hello"),
            said_by("assistant", "Good morning"),
            said_by("user", "Hello"),
            said_by("assistant", "Bye"),
        ]
        thought = [m | {"reasoning_content": "Hm", "reasoning": "Hm", "thinking": "Hm"} for m in talk[1::2]]
        sentences: list[str] = []
        for messages in (talk, [talk[0], thought[0], talk[2], thought[1]]):
            layout = Layout(self, Chat(messages, (1, 3)), 0)
            try:
                if layout.marked:
                    return self._on_markers(layout)
                text, spans = layout.turn_by_turn()
                own = layout.render(len(messages))
            except HotspaError:  # such conversations may be unsupported; rows are checked one by one
                continue
            if not sentences and not self.is_ended(text[: spans[-1][1]]):
                sentences.append(
                    "The chat template ends an answer with no special token, so that the model does not learn to stop: put "
                    "eos_token after the assistant's answer."
                )
            if not text.startswith(own):
                differ = num_same(text, own)
                ours, theirs = (repr(t[max(0, differ - 30) : differ + 50]) for t in (text, own))
                sentences.append(
                    "The chat template rewrites answers once others follow, so each answer is trained as the template writes "
                    f"it when it is the last, and stays so in the turns after it. Trained: ...{ours}...; the template's own "
                    f"text of the same conversation: ...{theirs}..."
                )
                break
        return " ".join(sentences) or None

    def _on_markers(self, layout: "Layout") -> str | None:
        ids, learned = layout.by_markers() or ([], [])
        last = max(i for i, counts in enumerate(learned) if counts)
        tail = self.pieces_of(self.tokenizer.decode(ids[: last + 1]).rstrip())[-1]
        follows = self.pieces_of(self.tokenizer.decode(ids[last + 1 :]).lstrip())
        if tail in self.added or not follows or follows[0] not in self.added:
            return None
        return (
            f"The {{% generation %}} markers of the chat template leave the token {follows[0]!r} after an answer out, "
            "so that the model does not learn to stop: put {% endgeneration %} after it."
        )


class Layout:
    """One conversation as text. Raises `DataError`: the row has tools, and the template does not write them."""

    def __init__(self, template: ChatTemplate, chat: Chat, row: int) -> None:
        source = template.source_for(chat.tools) if chat.tools else template.source
        if chat.tools and not re.search(r"\btools\b", source):
            raise DataError(
                "the row has 'tools', and the chat template has no place for them",
                where=f"dataset row {row}",
                fix="set a chat template that writes tools, or remove the column",
            )
        if _ARGUMENTS_ARE_JSON.search(source) and "arguments is string" not in source:
            chat = replace(chat, messages=[_with_parsed_arguments(message) for message in chat.messages])
        self._template, self._chat, self._row = template, chat, row
        self.marked = bool(getattr(template.tokenizer, "is_fast", False)) and bool(_GENERATION.search(source))
        self._rendered: dict[tuple[int, bool], str] = {}

    def _apply(self, messages: Messages, **options: object) -> Any:
        try:
            return self._template.tokenizer.apply_chat_template(
                messages, tools=self._chat.tools or None, **self._chat.options, **options
            )
        except HotspaError:
            raise
        except Exception as error:  # templates may raise any exception
            raise DataError(
                f"the chat template failed on {len(messages)} messages: {type(error).__name__}: {error}",
                where=f"dataset row {self._row}",
                fix="check the roles and their order (some templates have no system message, or require user and "
                "assistant messages in turn)",
            ) from error

    def render(self, stop: int, prompt: bool = False) -> str:
        """Returns the template's text of the messages before `stop`, with `prompt` also its generation prompt."""
        key = (stop, prompt)
        if key not in self._rendered:
            messages = self._chat.messages[:stop]
            self._rendered[key] = self._apply(messages, tokenize=False, add_generation_prompt=prompt)
        return self._rendered[key]

    def by_markers(self) -> Tokens | None:
        """Returns ids and learned flags by the template's markers; None if these do not match the answers."""
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        out = self._apply(self._chat.messages, tokenizer_kwargs={"verbose": False}, **options)
        learned = [bool(counts) for counts in out["assistant_masks"]]
        with_text = [i for i in self._chat.trained if self._chat.messages[i]["content"].strip()]
        if with_text and not any(learned):
            raise DataError(
                f"the {{% generation %}} markers of the chat template mark nothing of turn {with_text[0]}",
                where=f"dataset row {self._row}",
                fix="put them around the assistant's answer, the end-of-turn token included",
            )
        turns = [i for i, message in enumerate(self._chat.messages) if message["role"] == "assistant"]
        if self._chat.trained != tuple(turns):  # markers also mark answers that are not learned
            starts = [i for i, counts in enumerate(learned) if counts and not (i and learned[i - 1])]
            if len(starts) != len(turns):
                return None
            for start, stop, turn in zip(starts, [*starts[1:], len(learned)], turns, strict=True):
                if turn not in self._chat.trained:
                    learned[start:stop] = [False] * (stop - start)
        self._nothing_left_out(self.render(len(self._chat.messages)), {})
        return list(out["input_ids"]), learned

    def turn_by_turn(self) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text of the conversation, and the spans of learned characters."""
        number, trained = len(self._chat.messages), self._chat.trained
        text, spans, answers = self._prompt(trained[0]) if trained else self.render(number), [], {}
        for turn, stop in zip(trained, [*trained[1:], number][: len(trained)], strict=True):
            begin, answer, rest = len(text), self._last_answer(turn), ""
            if turn + 1 < number:
                answer, rest = self._followed(turn, stop, answer)
            text += answer
            stopper = "" if self._template.is_ended(answer) else self._stopper(turn, rest)
            end = begin + len(answer.rstrip() if self._template.is_ended(answer) else answer + stopper)
            spans.append((begin, end))
            text += rest or stopper
            answers[turn] = answer
        self._nothing_left_out(text, answers)
        return text, spans

    def _stopper(self, turn: int, rest: str) -> str:
        """For templates without an end-of-turn token: the special token that begins the next turn."""
        if not rest:  # the last message: render another user turn
            marker = self._marker()
            history = [*self._chat.messages[:turn], said_by("assistant", marker), said_by("user", "Hello")]
            try:
                rest = self._behind(marker, self._apply(history, tokenize=False), turn)
            except DataError:
                return ""
        token = next(iter(self._template.pieces_of(rest)), "")
        return token if token in self._template.added else ""

    def _prompt(self, turn: int) -> str:
        if turn:
            return self.render(turn, prompt=True)
        marker = self._marker()
        before, separator, _ = self._apply([said_by("assistant", marker)], tokenize=False).partition(marker)
        if not separator:
            raise self._unclear(turn)
        question = [said_by("user", "Hello")]
        opening = self._apply(question, tokenize=False, add_generation_prompt=True)
        opening = opening.removeprefix(self._apply(question, tokenize=False))
        at = before.rfind(opening) if opening else -1
        return before[: at + len(opening)] if at >= 0 else before

    def _last_answer(self, turn: int) -> str:
        """The text after the prompt when the answer is the last message."""
        prompt, whole = self._prompt(turn), self.render(turn + 1)
        if whole.startswith(prompt):
            return whole[len(prompt) :]
        opened = _OPENED.search(prompt)
        if opened is None or not whole.startswith(prompt[: opened.start()]):
            raise self._unclear(turn)
        # The prompt opens the thinking and the template removes it from every answer: restore it as it was generated.
        thought, _ = _thinking(self._chat.messages[turn])
        tag = opened.group(1)
        answer = re.sub(rf"\A\s*<{tag}>\s*</{tag}>", "", whole[opened.start() :]).lstrip("\n")
        if thought and thought in answer:
            raise self._unclear(turn)
        return f"{thought}\n</{tag}>\n\n{answer}"

    def _followed(self, turn: int, stop: int, answer: str) -> tuple[str, str]:
        """An answer that is not the last, and the text between it and the next answer."""
        messages = self._chat.messages
        is_turn = stop < len(messages)
        after, whole = self.render(stop, prompt=is_turn), self.render(turn + 1)
        if whole.startswith(self._prompt(turn)) and after.startswith(whole):
            return answer, after[len(whole) :]
        # The template rewrites the answer once others follow. A placeholder shows what it writes after an answer that
        # is the last (`end`) or is followed by these messages (`rest`), however it rewrites the answer.
        marker = self._marker()
        kept = {"tool_calls": messages[turn]["tool_calls"]} if "tool_calls" in messages[turn] else {}
        history = [*messages[:turn], said_by("assistant", marker) | kept]
        end = self._behind(marker, self._apply(history, tokenize=False), turn)
        others = self._apply([*history, *messages[turn + 1 : stop]], tokenize=False, add_generation_prompt=is_turn)
        rest = self._behind(marker, others, turn)
        if not answer.endswith(end):
            raise self._unclear(turn)
        if rest.startswith(end):
            return answer, rest[len(end) :]
        body, ends, follows = (
            answer[: len(answer) - len(end)],
            self._template.pieces_of(end),
            self._template.pieces_of(rest),
        )
        same = num_same(ends, follows)
        if any(piece in self._template.added for piece in follows[:same]):  # the template also ends the whole text
            common = "".join(follows[:same])
            return body + common, rest[len(common) :]
        if len(ends) == 1 and {ends[0], follows[0]} <= self._template.added:  # only the last answer has this end
            return answer, "".join(follows[1:])
        raise self._unclear(turn)

    def _behind(self, marker: str, text: str, turn: int) -> str:
        if text.count(marker) != 1:
            raise self._unclear(turn)
        return text.partition(marker)[2]

    def _marker(self) -> str:
        marker, text = "Placeholder", str(self._chat.messages)
        while marker in text:
            marker += "X"
        return marker

    def _nothing_left_out(self, text: str, answers: dict[int, str]) -> None:
        """Raises if the template left out a part of the conversation."""
        for turn, message in enumerate(self._chat.messages):
            role, content = message["role"], message["content"]
            if turn not in answers:
                words = set(re.findall(r"\w+", content))  # a template may trim a text, or write it as JSON
                if sum(word not in text for word in words) > len(words) / 2:
                    raise self._left_out(f"what {role!r} says in message {turn}")
                continue
            thought, answer = _thinking(message)
            calls = [call.get("function", call).get("name", "") for call in message.get("tool_calls", [])]
            if answer and answer not in answers[turn]:
                raise self._left_out(f"(a part of) what the assistant says in message {turn}")
            if thought and thought not in answers[turn]:
                raise self._left_out(f"the thinking of the assistant in message {turn}")
            if not all(name in answers[turn] for name in calls):
                raise self._left_out(f"a tool call of message {turn}")

    def _left_out(self, what: str) -> DataError:
        return DataError(
            f"the chat template leaves out {what}",
            where=f"dataset row {self._row}",
            why="it would silently be missing in training",
            fix="set a chat template that writes it (tokenizer.chat_template), or remove it from the row",
        )

    def _unclear(self, turn: int) -> DataError:
        thought, _ = _thinking(self._chat.messages[turn])
        if turn and thought and self.render(turn, prompt=True).rstrip().endswith("</think>"):
            return DataError(
                f"turn {turn} of the conversation has thinking, and the chat template asks for none",
                where=f"dataset row {self._row}",
                fix="remove the thinking, or enable it in a column 'chat_template_kwargs': {'enable_thinking': True}",
            )
        return DataError(
            f"the chat template does not show which tokens turn {turn} of the conversation consists of",
            where=f"dataset row {self._row}",
            why="its text of the answer does not follow its prompt, or it rewrites the answer in an unknown way once "
            "other messages follow",
            fix="use a chat template with {% generation %} ... {% endgeneration %} around the assistant's answer, "
            "or give 'prompt' and 'completion', or 'input_ids' and 'labels'",
        )


def said_by(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _thinking(message: dict[str, Any]) -> tuple[str, str]:
    content = message["content"]
    if thought := message.get("reasoning_content"):
        return str(thought).strip(), content.strip()
    if content.count("</think>") != 1:
        return "", content.strip()
    thought, answer = content.split("</think>")  # as templates do: generated text need not begin with <think>
    return thought.split("<think>")[-1].strip(), answer.strip()


def num_same(one: Sequence[str], other: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Parses the arguments of tool calls, for templates that convert them to JSON themselves."""

    def parsed(call: dict[str, Any]) -> dict[str, Any]:
        inner = call.get("function", call)
        if not isinstance(inner.get("arguments"), str):
            return call
        try:
            inner = inner | {"arguments": json.loads(inner["arguments"])}
        except ValueError:
            return call
        return call | {"function": inner} if "function" in call else inner

    if "tool_calls" not in message:
        return message
    return message | {"tool_calls": [parsed(call) for call in message["tool_calls"]]}
