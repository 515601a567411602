"""How published chat templates are trained: `python -m tests.chat_templates FOLDER` on a folder of `*.jinja` files.

The templates are not in this repository. Such folders come with other packages, TRL's wheel among them.
"""

import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_hotspa.errors import HotspaError
from hf_hotspa.rows.chat_text import ChatTemplate, Layout
from hf_hotspa.rows.formats import Chat, read_messages

_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|?>|<\uff5c[^\uff5c<>]+\uff5c>|<(?:start|end)_of_\w+>|\[/?[A-Z_]+\]|</s>|<s>|<[|]?\w+[|]>|<\w+_of_\w+>"
)
_USER, _AGAIN = {"role": "user", "content": "What is it?"}, {"role": "user", "content": "And then?"}
_ANSWER, _OTHER = {"role": "assistant", "content": "A thing."}, {"role": "assistant", "content": "Nothing."}
_CALL = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}, "id": "abcdefghi"}
_TOOL = {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {
    "type": "object", "properties": {"zone": {"type": "string", "description": "where"}}, "required": ["zone"]}}}  # fmt: skip
CASES: dict[str, list[dict[str, Any]]] = {
    "one turn": [_USER, _ANSWER],
    "two turns": [_USER, _ANSWER, _AGAIN, _OTHER],
    "thinking": [_USER, _ANSWER | {"reasoning_content": "Hm."}, _AGAIN, _OTHER | {"reasoning_content": "Well."}],
    "system": [{"role": "system", "content": "Be short."}, _USER, _ANSWER, _AGAIN, _OTHER],
    "tools": [
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "name": "clock", "content": "noon", "tool_call_id": "abcdefghi"},
        _ANSWER,
        _AGAIN,
        _OTHER,
    ],
}


def tokenizer_for(template: str, merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """One token a byte and for each merge, and one for each special token that a template writes."""
    names = {match.group() for match in _SPECIAL.finditer(template)}
    specials = sorted({"<eos>", "<bos>"} | names)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges), *specials])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.add_special_tokens(specials)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token="<bos>", chat_template=template)


def bracketed(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], learned: Sequence[bool]) -> str:
    """The text of tokens, with brackets around what is learned."""
    parts = []
    for is_learned, group in groupby(zip(ids, learned, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in group], clean_up_tokenization_spaces=False)
        parts.append(f"[{text}]" if is_learned else text)
    return "".join(parts)


def chat_of(name: str) -> Chat:
    """One of `CASES`, all answers learned."""
    messages = read_messages(CASES[name], "messages", 0)
    turns = tuple(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return Chat(messages, turns, tools=[_TOOL] if name == "tools" else [])


def outcome(template: str, name: str) -> str:
    """`markers`, `as it is`, `turn by turn`, or `refused: ...`."""
    found = ChatTemplate(tokenizer_for(template))
    try:
        layout = Layout(found, chat_of(name), 0)
        found.tokens([chat_of(name)], [0])
        if layout.marked:
            return "markers"
        return "as it is" if layout.turn_by_turn()[0] == layout.render(len(CASES[name])) else "turn by turn"
    except HotspaError as error:
        return f"refused: {str(error).split(' | ')[0]}"


def main(folder: str) -> None:
    """Prints a line for each template."""
    for path in sorted(Path(folder).glob("*.jinja")):
        print(path.stem, *(f"{name}: {outcome(path.read_text(), name)}" for name in CASES), sep="\n    ")


if __name__ == "__main__":
    main(sys.argv[1])
