"""A tokenizer without transformers, with which the light installation counts tokens.

Owns `LightTokenizer`, which reads `tokenizer.json`, `tokenizer_config.json` and the chat template that transformers
saves beside them, and has the methods of a fast tokenizer that `data/prepare.py` and `chat_text.py` use. If
transformers is installed, its class is used instead, as in training. Imports `tokenizers` and `jinja2` only inside
functions; no torch.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

_REASONING = ("reasoning_content", "thinking", "reasoning")
_BEGIN, _END = "\ue0f0", "\ue0f1"  # private characters around text that a template marks as generated
_NAMED = re.compile(r"(bos|eos|unk|sep|pad|cls|mask)_token")


class LightTokenizer:
    """The tokenizer of a folder. As in transformers, `tokenizer.json` decides on special tokens at both ends of a text.
    Raises `OSError`: there is no `tokenizer.json`. Raises `Exception`: from `tokenizers`, if the file is damaged.
    `folder`: holds `tokenizer.json`; `tokenizer_config.json`, `chat_template.jinja` and
    `additional_chat_templates/*.jinja` are optional."""

    is_fast = True
    padding_side = "right"

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        self.backend = Tokenizer.from_str(text)
        self.backend.no_truncation()
        self.backend.no_padding()
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        self.special_tokens_map = {
            name: token if isinstance(token, str) else token["content"]
            for name, token in config.items()
            if _NAMED.fullmatch(name) and token
        }
        self.chat_template = _chat_templates(folder, config)
        missing = [t for t in self.special_tokens_map.values() if self.backend.token_to_id(t) is None]
        self.backend.add_special_tokens(missing)

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.backend.token_to_id(self.eos_token)

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Number -> token, for tokens added to the model's vocabulary; `str` of a token is its text."""
        return {number: token.content for number, token in self.backend.get_added_tokens_decoder().items()}

    @property
    def all_special_tokens(self) -> list[str]:
        special = [t.content for t in self.backend.get_added_tokens_decoder().values() if t.special]
        return list(dict.fromkeys([*self.special_tokens_map.values(), *special]))

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Returns the `input_ids` of one text or of several, and `offset_mapping` if asked for."""
        texts = [text] if isinstance(text, str) else list(text)
        codes = self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)
        columns: dict[str, list[Any]] = {"input_ids": [code.ids for code in codes]}
        if return_offsets_mapping:
            columns["offset_mapping"] = [code.offsets for code in codes]
        return {name: values[0] for name, values in columns.items()} if isinstance(text, str) else columns

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, special tokens included."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def get_chat_template(self, tools: object = None) -> str:
        """Returns the source of the template for these tools. Raises `ValueError`: there is none."""
        if isinstance(self.chat_template, str):
            return self.chat_template
        templates = self.chat_template or {}
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        if name not in templates:
            raise ValueError(f"it has {sorted(templates)} and no default" if templates else "it has no chat template")
        return templates[name]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: object = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: object = None,
        **options: object,
    ) -> Any:
        """Renders a conversation as text, or as `input_ids` and `assistant_masks` of the text marked as generated."""
        template = self._environment.from_string(self.get_chat_template(tools))
        context = {"tools": tools, "documents": None, **self.special_tokens_map, **options}
        marked = template.render(
            messages=list(map(_message, messages)), add_generation_prompt=add_generation_prompt, **context
        )
        text, spans = _without_marks(marked)
        if not tokenize:
            return text
        code = self(text, add_special_tokens=False, return_offsets_mapping=True)
        learned = [any(end > start and begin < stop for start, stop in spans) for begin, end in code["offset_mapping"]]
        return {"input_ids": code["input_ids"], "assistant_masks": list(map(int, learned))}

    @cached_property
    def _environment(self) -> Any:
        """A sandbox without access to Python, as templates from the hub are not trusted."""
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` puts marks around its content."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

            def marked(self, caller: Any) -> str:
                return f"{_BEGIN}{caller()}{_END}"

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        return environment

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the environment, which cannot be copied. `datasets` caches results by this state."""
        return {name: value for name, value in vars(self).items() if name != "_environment"}


def _json(value: object, ensure_ascii: bool = False, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Removes None, and gives the thinking all names that templates use."""
    own = {key: value for key, value in message.items() if value is not None}
    thought = next((own[key] for key in _REASONING if key in own), None)
    return own if thought is None else {"thinking": thought, **own, "reasoning_content": thought}


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans, start = "", list[tuple[int, int]](), 0
    for piece in re.split(f"([{_BEGIN}{_END}])", marked):
        if piece == _BEGIN:
            start = len(text)
        elif piece == _END:
            spans.append((start, len(text)))
        else:
            text += piece
    return text, spans


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> Any:
    """The template, or a table of templates by name, if any."""
    known = config.get("chat_template")
    if isinstance(known, list):
        known = {entry["name"]: entry["template"] for entry in known}
    file = folder / "chat_template.jinja"
    if file.is_file():
        known = file.read_text(encoding="utf-8")
    more = {
        path.stem: path.read_text(encoding="utf-8") for path in (folder / "additional_chat_templates").glob("*.jinja")
    }
    return {**({"default": known} if isinstance(known, str) else known or {}), **more} if more else known
