"""Conversations as tokens: ids, and which of them are learned.

Owns the step from the text of a conversation (`chat_text.py`) to tokens, and what a user is told of a chat template. A token
at the border of an answer that also holds a part of what stands before it is learned. Imports no torch.
"""

from collections.abc import Sequence

from hf_hotspa.errors import DataError, HotspaError
from hf_hotspa.rows.chat_text import Layout, Template, Tokens, num_same, said_by
from hf_hotspa.rows.formats import Chat


class ChatTemplate(Template):
    """The chat template of a tokenizer, with which conversations become tokens.

    Raises:
        DataError: it has none.
    """

    def tokens(self, chats: Sequence[Chat], rows: Sequence[int]) -> list[Tokens]:
        """The tokens of conversations.

        Args:
            rows: Their numbers, for messages.

        Raises:
            DataError: the template fails on one, leaves something out, or does not show what the assistant says.
        """
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
        """Ids of each text, and where in it each token ends; None for a tokenizer that cannot say."""
        fast = bool(getattr(self.tokenizer, "is_fast", False))
        options = {"return_offsets_mapping": True} if fast else {}
        out = self.tokenizer(texts, add_special_tokens=False, verbose=False, **options)
        ends = [[end for _, end in offsets] for offsets in out["offset_mapping"]] if fast else [None] * len(texts)
        return [(list(ids), end) for ids, end in zip(out["input_ids"], ends, strict=True)]

    def _learned(
        self, text: str, spans: list[tuple[int, int]], ids: list[int], ends: list[int] | None, row: int
    ) -> list[bool]:
        """Whether each token holds a part of one of the spans."""
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
                    "a token at the border of an answer also belongs to what stands beside it",
                    where=f"dataset row {row}",
                    fix="use a fast tokenizer, which says where tokens begin and end",
                )
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
        return learned

    def statement(self) -> str | None:
        """What a user should know of how this template is trained; None where it is as it would be expected."""
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
            except HotspaError:  # it may well not take such conversations; what rows hold is checked row by row
                continue
            if not sentences and not self.is_ended(text[: spans[-1][1]]):
                sentences.append(
                    "The chat template ends an answer with no special token, so that the model does not learn to stop: put "
                    "eos_token behind what the assistant says."
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

    def _on_markers(self, layout: Layout) -> str | None:
        ids, learned = layout.by_markers() or ([], [])
        last = max(i for i, counts in enumerate(learned) if counts)
        tail = self.pieces_of(self.tokenizer.decode(ids[: last + 1]).rstrip())[-1]
        follows = self.pieces_of(self.tokenizer.decode(ids[last + 1 :]).lstrip())
        if tail in self.added or not follows or follows[0] not in self.added:
            return None
        return (
            f"The {{% generation %}} markers of the chat template leave the token {follows[0]!r} behind an answer out, so that "
            "the model does not learn to stop: put {% endgeneration %} behind it."
        )
