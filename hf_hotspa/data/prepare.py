"""From whatever users have to a dataset of token rows: `input_ids`, and `labels` where part of a row does not count.

Owns the accepted shapes of raw data, tried in this order:

* ``input_ids`` (and perhaps ``labels`` and the other columns of `rows.py`): kept as it is;
* ``messages``: a conversation, put through the tokenizer's chat template; only what the assistant says carries labels;
* ``prompt`` and ``completion``: two strings or two lists of messages; only the completion carries labels;
* ``text``: every token counts.

Text (and a string completion) ends with the EOS token where the tokenizer has one and has not put it there; a
chat template ends conversations itself. Nothing is ever truncated: over-long rows are the business of `bucketing.py`.
Which tokens carry labels is either known exactly or refused: a chat template without ``{% generation %}`` markers must
render each beginning of a conversation as a beginning of the whole, token by token.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_hotspa.data.rows import IGNORED_LABEL, LABEL_COLUMNS, TOKEN_COLUMNS
from hf_hotspa.errors import DataError, HotspaError, UnsupportedError

_GENERATION = re.compile(r"\{%-?\s*generation\b")
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_ACCEPTED = "'input_ids' (and 'labels'), 'messages', 'prompt' and 'completion', or 'text'"
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")

_Columns = dict[str, list[list[int]]]


def prepare_dataset(dataset: Any, tokenizer: Any, *, num_proc: int | None = None, keep: Collection[str] = ()) -> Any:
    """Tokenises a dataset; cached by `datasets`, with a progress bar.

    Args:
        dataset: A `datasets.Dataset` or a list of dictionaries, with columns as described above.
        tokenizer: The model's tokenizer. Not used for rows of `input_ids`.
        num_proc: Processes that tokenise.
        keep: Other columns to keep, where they are there.

    Returns:
        A `datasets.Dataset` with the columns `input_ids` and, where part of it is masked, `labels`.

    Raises:
        UnsupportedError: the dataset is a stream.
        DataError: it is empty, has none of the accepted columns, or a row cannot be turned into labels exactly.
    """
    from datasets import Dataset, Features, List, Value

    if isinstance(dataset, list):
        dataset = Dataset.from_list(dataset)
    if isinstance(dataset, Mapping):
        raise DataError(f"a dictionary of splits is no dataset; it holds {sorted(dataset)}", fix="pass one of them")
    if not isinstance(dataset, Dataset):
        raise UnsupportedError(
            f"a {type(dataset).__name__} cannot be prepared",
            fix="pass a datasets.Dataset (not a streaming one) or a list of dictionaries",
        )
    if len(dataset) == 0:
        raise DataError("the dataset is empty", fix="check the split and the filters that were applied to it")
    names = dataset.column_names
    if "input_ids" in names:
        check_masks(names)
        return dataset.select_columns([name for name in (*TOKEN_COLUMNS, *keep) if name in names])
    function = _tokenizing(names)
    features = {"input_ids": List(Value("int32"))}
    if function is not _tokenize_texts:
        features["labels"] = List(Value("int32"))
    kept = {name: dataset.features[name] for name in names if name in keep}
    return dataset.map(
        function,
        batched=True,
        batch_size=256,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=[name for name in names if name not in kept],
        features=Features({**features, **kept}),
        num_proc=num_proc,
        desc="Tokenising",
    )


def tokenize_rows(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> list[Mapping[str, Any]]:
    """Tokenises some rows, such as those of a mini-batch from a stream; rows with `input_ids` stay as they are.

    Raises:
        DataError: a row has none of the accepted columns, rows differ in them, or labels cannot be exact.
    """
    if not rows or all("input_ids" in row for row in rows):
        return list(rows)
    names = list(rows[0])
    function = _tokenizing(names)
    for number, row in enumerate(rows):
        if set(row) != set(names):
            raise DataError(
                f"a row has the columns {sorted(row)}, and the first one {sorted(names)}", where=f"dataset row {number}"
            )
    columns = function({name: [row[name] for row in rows] for name in names}, list(range(len(rows))), tokenizer)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def check_masks(names: Collection[str]) -> None:
    """Refuses columns that say which tokens count in a way that nobody reads here.

    Raises:
        DataError: there is a mask and no `labels`.
    """
    masks = sorted(set(_MASKS) & set(names))
    if masks and not set(LABEL_COLUMNS) & set(names):
        raise DataError(
            f"the dataset has 'input_ids' and {masks}, but no 'labels'",
            why="the mask would be ignored and every token trained",
            fix=f"turn it into 'labels': input_ids, with {IGNORED_LABEL} where a token does not count",
        )


def _tokenizing(names: Sequence[str]) -> Callable[..., _Columns]:
    """What tokenises rows of these columns."""
    if "messages" in names:
        return _tokenize_messages
    if "prompt" in names and "completion" in names:
        return _tokenize_completions
    if "text" in names:
        return _tokenize_texts
    raise DataError(f"the dataset has the columns {list(names)}", fix=f"give it one of: {_ACCEPTED}")


def load_source(path_or_name: str, split: str = "train") -> Any:
    """Loads a dataset by what the name says.

    Args:
        path_or_name: A .json, .jsonl, .parquet, .csv or .txt file (.txt: one row a line); a directory of such files of
            one kind; a directory written by `save_to_disk`; or else a name on the hub.
        split: The split; slices such as ``train[:1000]`` are understood, but not for `save_to_disk` directories.
            Local files are all of the split `train`.

    Raises:
        DataError: there is no such file, a directory holds nothing that can be read or several kinds of files, or the
            hub does not have it.
    """
    import datasets

    path = Path(path_or_name).expanduser()
    if path.is_dir() and ((path / "state.json").is_file() or (path / "dataset_dict.json").is_file()):
        saved = datasets.load_from_disk(str(path))
        splits = saved if isinstance(saved, Mapping) else {str(saved.split or "train"): saved}
        if split not in splits:
            raise DataError(f"{path} has no split {split!r}", fix=f"use one of {sorted(map(str, splits))}")
        return splits[split]
    if path.exists():
        files = sorted(p for p in path.rglob("*") if p.suffix in _BUILDERS) if path.is_dir() else [path]
        builders = sorted({_BUILDERS.get(p.suffix, "") for p in files})
        if len(builders) != 1 or not builders[0]:
            kinds = sorted({p.suffix for p in files})
            found = f"files of the kinds {kinds}" if files else "no file that can be read"
            raise DataError(f"{path} holds {found}", fix=f"give files of one kind of {', '.join(_BUILDERS)}")
        return datasets.load_dataset(builders[0], data_files={"train": list(map(str, files))}, split=split)
    if path.suffix in _BUILDERS or path_or_name.startswith(("/", ".", "~")) or path_or_name.count("/") > 1:
        raise DataError(f"there is no file or directory {path}", fix="check the path")
    try:
        return datasets.load_dataset(path_or_name, split=split)
    except Exception as error:  # the hub client has many ways to say no
        raise DataError(
            f"{path_or_name!r} is no local path, and the hub did not give it: {type(error).__name__}: {error}",
            fix="check the name, the split and the network; a local file needs one of the endings "
            + ", ".join(_BUILDERS),
        ) from error


def _tokenize_texts(batch: Mapping[str, Any], rows: list[int], tokenizer: Any) -> _Columns:
    for text, row in zip(batch["text"], rows, strict=True):
        _check_string(text, "text", row)
    ids = tokenizer(list(batch["text"]), verbose=False)["input_ids"]
    return {"input_ids": [_with_eos(list(i), tokenizer) for i in ids]}


def _tokenize_messages(batch: Mapping[str, Any], rows: list[int], tokenizer: Any) -> _Columns:
    # A template may be one text or a table of them; asking for the one in use also covers tokenizers without any.
    template = _chat_template(tokenizer)
    marked = bool(_GENERATION.search(template)) and getattr(tokenizer, "is_fast", False)
    columns: _Columns = {"input_ids": [], "labels": []}
    tools = batch.get("tools", [None] * len(rows))
    for messages, own_tools, row in zip(batch["messages"], tools, rows, strict=True):
        _check_messages(messages, "messages", row)
        render = _renderer(tokenizer, own_tools, row)
        if marked:
            out = render(messages, return_assistant_tokens_mask=True)
            ids, counts = list(out["input_ids"]), out["assistant_masks"]
        else:
            ids = list(render(messages)["input_ids"])
            counts = _assistant_mask(messages, ids, render, row)
        columns["input_ids"].append(ids)
        columns["labels"].append([i if count else IGNORED_LABEL for i, count in zip(ids, counts, strict=True)])
    return columns


def _assistant_mask(messages: Sequence[Any], ids: list[int], render: Callable[..., Any], row: int) -> list[int]:
    """1 for each token of an assistant's turn, from what the template renders for the beginnings of a conversation."""
    mask = [0] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = list(render(messages[:turn], add_generation_prompt=True)["input_ids"])
        after = list(render(messages[: turn + 1])["input_ids"])
        if after[: len(before)] != before or ids[: len(after)] != after:
            raise DataError(
                f"the chat template does not show which tokens turn {turn} of the conversation consists of",
                where=f"dataset row {row}",
                why="what it renders for the turns up to there is not the beginning of what it renders for all "
                "(templates that rewrite earlier turns do this)",
                fix="use a chat template with {% generation %} ... {% endgeneration %} around what the assistant says, "
                "or give 'prompt' and 'completion', or 'input_ids' and 'labels'",
            )
        mask[len(before) : len(after)] = [1] * (len(after) - len(before))
    return mask


def _tokenize_completions(batch: Mapping[str, Any], rows: list[int], tokenizer: Any) -> _Columns:
    columns: _Columns = {"input_ids": [], "labels": []}
    tools = batch.get("tools", [None] * len(rows))
    for prompt, completion, own_tools, row in zip(batch["prompt"], batch["completion"], tools, rows, strict=True):
        if isinstance(prompt, str):
            _check_string(completion, "completion", row)
            ids, counts = _completion_of_strings(prompt, completion, tokenizer, row)
        else:
            _check_messages(prompt, "prompt", row)
            _check_messages(completion, "completion", row)
            _chat_template(tokenizer)
            render = _renderer(tokenizer, own_tools, row)
            ids = list(render([*prompt, *completion])["input_ids"])
            begin = list(render(prompt, add_generation_prompt=True)["input_ids"])
            _check_prefix(begin, ids, row, "render the messages yourself and give 'prompt' and 'completion' as strings")
            counts = [i >= len(begin) for i in range(len(ids))]
        columns["input_ids"].append(ids)
        columns["labels"].append([i if count else IGNORED_LABEL for i, count in zip(ids, counts, strict=True)])
    return columns


def _completion_of_strings(prompt: str, completion: str, tokenizer: Any, row: int) -> tuple[list[int], list[bool]]:
    """Tokens of prompt and completion as one text, and which of them hold part of the completion.

    One text, because a tokenizer may treat the beginning of a text in its own way (a leading space, a BOS token).
    """
    if getattr(tokenizer, "is_fast", False):
        out = tokenizer(prompt + completion, return_offsets_mapping=True, verbose=False)
        ids = list(out["input_ids"])
        counts = [end > max(begin, len(prompt)) for begin, end in out["offset_mapping"]]
    else:
        ids = list(tokenizer(prompt + completion, verbose=False)["input_ids"])
        begin = list(tokenizer(prompt, verbose=False)["input_ids"])
        if begin and begin[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
            begin.pop()  # the tokenizer ends each text with EOS
        _check_prefix(begin, ids, row, "use a fast tokenizer, or put the space between them into the prompt")
        counts = [i >= len(begin) for i in range(len(ids))]
    ended = _with_eos(ids, tokenizer)
    counts += [True] * (len(ended) - len(counts))
    if ended and ended[-1] == tokenizer.eos_token_id:  # also where the tokenizer put it: it belongs to no character
        counts[-1] = True
    return ended, counts


def _check_prefix(begin: list[int], ids: list[int], row: int, fix: str) -> None:
    if ids[: len(begin)] != begin:
        raise DataError(
            "the tokens of the prompt are not the beginning of the tokens of prompt and completion",
            where=f"dataset row {row}",
            why="a token at the border belongs to both, so labels would be wrong",
            fix=fix,
        )


def _renderer(tokenizer: Any, tools: Any, row: int) -> Callable[..., Any]:
    """`apply_chat_template` for one row; what a template raises names the row."""
    if isinstance(tools, str):  # datasets keep them as JSON text where their schemas differ from row to row
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"'tools' is no JSON: {error}", where=f"dataset row {row}") from None

    def render(messages: Sequence[Any], **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(
                list(messages), tools=tools or None, return_dict=True, tokenizer_kwargs={"verbose": False}, **options
            )
        except HotspaError:
            raise
        except Exception as error:  # templates raise what they like
            raise DataError(
                f"the chat template failed on {len(messages)} messages: {type(error).__name__}: {error}",
                where=f"dataset row {row}",
                fix="check the roles and their order; to train a first message of the assistant, the template needs "
                "{% generation %} markers",
            ) from error

    return render


def _chat_template(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except Exception as error:
        raise DataError(
            f"the tokenizer has no chat template that can be used: {error}",
            fix="set tokenizer.chat_template, or give 'text' or string 'prompt' and 'completion' columns",
        ) from error


def _with_eos(ids: list[int], tokenizer: Any) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]


def _check_string(value: Any, key: str, row: int) -> None:
    if not isinstance(value, str):
        raise DataError(
            f"{key} is a {type(value).__name__} instead of a string",
            where=f"dataset row {row}",
            fix=f"give {key} as a string, prompt and completion both as strings or both as lists of messages",
        )


def _check_messages(value: Any, key: str, row: int) -> None:
    good = isinstance(value, list) and value and all(isinstance(m, Mapping) and m.get("role") for m in value)
    if not good:
        raise DataError(
            f"{key} is no conversation",
            where=f"dataset row {row}",
            fix=f"give {key} as a list of messages such as {{'role': 'user', 'content': 'Hello'}}",
        )
