"""Converts users' data to a dataset of token rows: `input_ids`, and `labels` if a part of a row does not count.

Owns how the Trainer, examples and commands read rows. `formats.py` defines the supported columns, `chat_text.py` how
conversations become tokens. Rows of `input_ids` are unchanged (`features.py`). Text (and a string completion) gets the
tokenizer's EOS token unless it ends with it; a chat template ends conversations itself. Special tokens that a text
already has, as from a chat template, are not added again. Nothing is truncated: `bucketing.py` handles over-long rows.
Rows whose labelled tokens are not exactly known are errors.

The lengths of a file's rows, as in training:

    dataset = prepare_dataset(load_source("chats.jsonl"), tokenizer)
    lengths = scan_dataset(dataset).sequence_lengths  # hf_hotspa.rows.scan; [S] int64, tokens of every sequence

Also checks data files: the header of a csv, and which file is broken, where and why. Imports pandas only inside
functions, no torch.
"""

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hotspa.errors import DataError, UnsupportedError
from hf_hotspa.nearest import meant
from hf_hotspa.rows.chat_text import ChatTemplate, Tokens
from hf_hotspa.rows.formats import Chat, Format, Strings, format_of
from hf_hotspa.rows.read_row import IGNORED_LABEL, LABEL_COLUMNS, TOKEN_COLUMNS

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


_CHECK = "check the split and the file: one JSON object a line, and the same columns in all rows"


def csv_columns(files: Sequence[Path]) -> list[str]:
    """Returns the columns of csv files, which must agree. Raises `DataError`: they differ, or rows have more cells than
    the header."""
    import pandas  # type: ignore[import-untyped]

    first: list[str] = []
    for path in files:
        # readers take cells without a name for row names, and drop them
        head = pandas.read_csv(path, nrows=1, dtype=str, na_filter=False)
        if not isinstance(head.index, pandas.RangeIndex):
            raise DataError(
                f"{path}: a row has more cells than the header has names, {list(head.columns)}",
                where="line 2",
                fix="put cells that hold a comma in double quotes, or name every column",
            )
        columns = list(map(str, head.columns))
        if first and columns != first:
            raise DataError(
                f"{path} has the columns {columns}, and {files[0]} {first}", fix="give all files the same columns"
            )
        first = columns
    return first


def unreadable(files: Sequence[Path], kind: str, split: str, error: Exception) -> DataError:
    """Returns the error for files that a `datasets` builder (json, csv, text or parquet) cannot read, with the broken
    one and the place."""
    if all(path.stat().st_size == 0 or not path.read_bytes().strip() for path in files):
        return no_rows(files)
    for path in files:
        fault = _json_fault(path) if kind == "json" else _csv_fault(path) if kind == "csv" else None
        if fault is not None:
            return fault
    cause = error.__cause__ or error
    folder = files[0] if len(files) == 1 else files[0].parent
    return DataError(f"{folder} cannot be read as split {split!r}: {type(cause).__name__}: {cause}", fix=_CHECK)


def no_rows(files: Sequence[Path]) -> DataError:
    names = ", ".join(map(str, files[:3])) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    return DataError(
        f"{names}: {'the file is' if len(files) == 1 else 'the files are'} empty, without a row of data",
        fix="check how it was written, and that all of it was copied",
    )


def _json_fault(path: Path) -> DataError | None:
    """The first line that is not a JSON object; None if all are, or if the whole file is valid JSON."""
    fix = 'write one JSON object a line, such as {"text": "..."}, or a list of objects in a .json file'
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = data[: error.start].count(b"\n") + 1
        return DataError(f"{path}, line {at}, is not UTF-8: {error.reason}", fix="save the file as UTF-8")
    try:
        rows = json.loads(text)
        if isinstance(rows, list) and not rows:
            return no_rows([path])
        elements = enumerate(rows) if isinstance(rows, list) else ()
        where = next((number for number, row in elements if not isinstance(row, dict)), None)
        return (
            None if where is None else DataError(f"{path}: element {where} of the list is not a JSON object", fix=fix)
        )
    except json.JSONDecodeError as error:
        whole = error
    if text.lstrip().startswith("[") and not _is_list(text):
        return DataError(f"{path}, line {whole.lineno}, is not JSON: {whole.msg} (column {whole.colno})", fix=fix)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            if not isinstance(json.loads(line), dict):
                return DataError(f"{path}, line {number}, is not a JSON object: {line:.80}", fix=fix)
        except json.JSONDecodeError as error:
            return DataError(f"{path}, line {number}, is not JSON: {error.msg} (column {error.colno})", fix=fix)
    return None


def _is_list(line: str) -> bool:
    try:
        return isinstance(json.loads(line.lstrip().split("\n", 1)[0]), list)
    except ValueError:
        return False


def _csv_fault(path: Path) -> DataError | None:
    import pandas

    try:
        return None if len(pandas.read_csv(path, dtype=str, na_filter=False)) else no_rows([path])
    except ValueError as error:  # a parser or decoding error
        return DataError(
            f"{path} is not a csv file: {' '.join(str(error).split())}",
            fix="put cells that hold a comma or a line break in double quotes, give every row as many cells as the header, and "
            "save the file as UTF-8",
        )


_VERSION = 4  # of the tokenised format: cached results of `Dataset.map` with an earlier version are not used
_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
_MASKS = ("completion_mask", "assistant_masks", "loss_mask")
_shown: set[str] = set()

_Columns = dict[str, list[list[int]]]


def prepare_dataset(
    dataset: Any,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    num_proc: int | None = None,
    keep: Collection[str] = (),
    skips_empty: bool = False,
) -> Any:
    """Tokenises a dataset; cached by `datasets`, with a progress bar.

    Args:
        dataset: A `datasets.Dataset` or a list of dictionaries, with columns of `formats.py`.
        tokenizer: The model's. Not used for rows of `input_ids`.
        keep: Other columns to keep, if present.
        skips_empty: A null or empty row has no tokens; otherwise null is an error.

    Returns:
        A `datasets.Dataset` with the columns `input_ids` and, if tokens may be masked, `labels`.

    Raises:
        UnsupportedError: the dataset is a stream.
        DataError: it is empty, has none of the accepted columns, or a row cannot be turned into labels exactly.
    """
    from datasets import Dataset, Features, List, Value

    if isinstance(dataset, list):
        dataset = Dataset.from_list(dataset)
    if isinstance(dataset, Mapping):
        raise DataError(f"a dictionary of splits is not a dataset; it holds {sorted(dataset)}", fix="pass one of them")
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
    format_ = format_of(names)
    refuse_guessed(dataset)
    say_once(format_, tokenizer)
    features = {"input_ids": List(Value("int32"))}
    if format_.masked:
        features["labels"] = List(Value("int32"))
    kept = {name: dataset.features[name] for name in names if name in keep}
    return dataset.map(
        _tokenize_batch,
        batched=True,
        batch_size=256,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer, "skips_empty": skips_empty, "version": _VERSION},
        remove_columns=[name for name in names if name not in kept],
        features=Features({**features, **kept}),
        num_proc=num_proc,
        desc="Tokenising",
    )


def tokenize_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: "PreTrainedTokenizerBase", skips_empty: bool = False
) -> list[Mapping[str, Any]]:
    """Tokenises some rows, such as a mini-batch from a stream; rows with `input_ids` are unchanged. With `skips_empty`
    a null or empty row has no tokens. Raises `DataError`: a row has none of the accepted columns, rows differ in them,
    or labels cannot be exact."""
    if not rows or all("input_ids" in row for row in rows):
        return list(rows)
    names = list(rows[0])
    say_once(format_of(names), tokenizer)
    for number, row in enumerate(rows):
        if set(row) != set(names):
            raise DataError(
                f"a row has the columns {sorted(row)}, and the first one {sorted(names)}", where=f"dataset row {number}"
            )
    batch = {name: [row[name] for row in rows] for name in names}
    columns = _tokenize_batch(batch, list(range(len(rows))), tokenizer, skips_empty)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def say_once(format_: Format, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Warns, once and on rank 0, if rows are read in an unexpected way. Raises `DataError`: the rows need a chat
    template, and the tokenizer has none."""
    key = repr((format_.columns, format_.unused, getattr(tokenizer, "chat_template", None), tokenizer.eos_token_id))
    if os.environ.get("RANK", "0") != "0" or key in _shown:  # a stream comes here in each mini-batch
        return
    _shown.add(key)
    lines = []
    if format_.unused:
        lines.append(f"Rows are read from the columns {list(format_.columns)}; {list(format_.unused)} are not used.")
    templated = _has_template(tokenizer)
    if format_.kind == "answer" and not templated:
        lines.append(
            "The tokenizer has no chat template: questions and answers are written as '### Instruction:', '### Input:' and "
            "'### Response:'."
        )
    if tokenizer.eos_token_id is None and (format_.kind in ("text", "completion") or not templated):
        lines.append(
            "The tokenizer has no end-of-sequence token, so texts are trained without one and the model does not learn "
            "to stop: set tokenizer.eos_token."
        )
    if format_.kind in ("chat", "answer") and templated:
        lines.append(ChatTemplate(tokenizer).statement() or "")
    for line in filter(None, lines):
        _say(line)


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0" and line not in _shown:
        _shown.add(line)
        logger.warning("%s", line)


def check_masks(names: Collection[str]) -> None:
    """Checks that no loss mask would be ignored. Raises `DataError`: there is a mask and no `labels`."""
    masks = sorted(set(_MASKS) & set(names))
    if masks and not set(LABEL_COLUMNS) & set(names):
        raise DataError(
            f"the dataset has 'input_ids' and {masks}, but no 'labels'",
            why="the mask would be ignored and every token trained",
            fix=f"turn it into 'labels': input_ids, with {IGNORED_LABEL} where a token does not count",
        )


def refuse_guessed(dataset: "Dataset") -> None:
    """Checks that `datasets` has not converted a csv's text cells: 007 would be 7, and True may have been true.
    `dataset`: a `datasets.Dataset`, or a stream. Raises `DataError`: naming the columns."""
    if getattr(getattr(dataset, "info", None), "builder_name", None) != "csv":
        return
    features = dataset.features
    if features is None:  # a mapped stream
        from datasets import Dataset

        features = Dataset.from_list(list(dataset.take(64))).features
    if not features or "input_ids" in features:
        return
    kinds = {name: str(getattr(features[name], "dtype", "")) for name in format_of(list(features)).columns}
    guessed = sorted(name for name, kind in kinds.items() if kind.startswith(("int", "uint", "float", "bool")))
    if guessed:
        raise DataError(
            f"the columns {guessed} come from a csv file, and datasets has converted their cells to "
            f"{sorted({kinds[n] for n in guessed})}",
            why="the text in the file should be learned: 007 would be trained as 7",
            fix='read the file with hf_hotspa.data.prepare.load_source("my.csv"), which keeps cells as text, or give '
            'load_dataset features with Value("string")',
        )


def load_source(path_or_name: str, split: str = "train") -> Any:
    """Loads a dataset from files, a directory or the hub.

    Args:
        path_or_name: A .json, .jsonl, .parquet, .csv (cells are text) or .txt file (one row a line); a directory of
            files of one of these kinds; a directory written by `save_to_disk`; or else a name on the hub.
        split: The split, or a slice like ``train[:1000]`` (not for `save_to_disk`). Local files are all `train`.

    Raises:
        DataError: there is no such file, it is empty or unreadable (with file and line), a directory holds no supported
            files or several kinds, or the hub does not have the dataset.
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
            contents = f"files of the kinds {kinds}" if files else "no file that can be read"
            raise DataError(f"{path} holds {contents}", fix=f"give files of one kind of {', '.join(_BUILDERS)}")
        return _read_files(files, builders[0], split, path.name)
    near = _near_files(path)
    is_file = path.suffix in _BUILDERS or bool(path.suffix and near)  # names on the hub may have dots, too
    if is_file or path_or_name.startswith(("/", ".", "~")) or path_or_name.count("/") > 1:
        raise DataError(f"there is no file or directory {path}", fix=f"{near}check the path")
    try:
        return datasets.load_dataset(path_or_name, split=split)
    except Exception as error:  # the hub client raises many kinds
        raise DataError(
            f"{path_or_name!r} is not a local path, and the hub failed to load it: {type(error).__name__}: {error}",
            fix=f"{near}check the name, the split and the network; a local file needs one of the endings "
            + ", ".join(_BUILDERS),
        ) from error


def _near_files(path: Path) -> str:
    try:
        beside = [each for each in path.parent.iterdir() if each.suffix in _BUILDERS or each.is_dir()]
    except OSError:
        return ""
    return meant(str(path), [str(each) for each in beside])


def _read_files(files: list[Path], kind: str, split: str, name: str) -> Any:
    """Reads files of one kind as the data set `name`; keeps csv cells as text."""
    import datasets

    try:
        options: dict[str, Any] = {}
        if kind == "csv":  # else 007 would be read as 7, and None as null
            features = {name: datasets.Value("string") for name in csv_columns(files)}
            options = {"features": datasets.Features(features), "na_filter": False}
        rows: Any = datasets.load_dataset(kind, data_files={"train": list(map(str, files))}, split=split, **options)
        rows.info.dataset_name = name  # for reports; else it is the builder's name
        return rows
    except DataError:
        raise
    except Exception as error:  # from the split, the builder, or the file reader
        raise unreadable(files, kind, split, error) from error


def _tokenize_batch(
    batch: Mapping[str, Any],
    rows: list[int],
    tokenizer: "PreTrainedTokenizerBase",
    skips_empty: bool = False,
    version: int = _VERSION,
) -> _Columns:
    format_ = format_of(list(batch))
    records = [
        dict(zip(format_.columns, values, strict=True))
        for values in zip(*(batch[n] for n in format_.columns), strict=True)
    ]
    if not skips_empty:
        return _tokens(format_, records, rows, tokenizer)
    full = [at for at, record in enumerate(records) if not format_.is_empty(record)]
    columns: _Columns = {name: [[] for _ in rows] for name in ("input_ids", *(["labels"] if format_.masked else []))}
    tokens = _tokens(format_, [records[at] for at in full], [rows[at] for at in full], tokenizer) if full else {}
    for name, values in tokens.items():
        for at, value in zip(full, values, strict=True):
            columns[name][at] = value
    return columns


def _tokens(
    format_: Format, records: Sequence[Mapping[str, Any]], rows: Sequence[int], tokenizer: "PreTrainedTokenizerBase"
) -> _Columns:
    readings = [format_.read(record, row) for record, row in zip(records, rows, strict=True)]
    specials = _Specials(tokenizer)
    if not format_.masked:
        texts = list(map(str, readings))
        ids = tokenizer(texts, verbose=False)["input_ids"]
        return {"input_ids": [specials.ended(specials.once(list(i), t), t) for i, t in zip(ids, texts, strict=True)]}
    if not _has_template(tokenizer):  # a question and its answer become plain strings
        readings = [r.plain if isinstance(r, Chat) and r.plain is not None else r for r in readings]
    chats = {at: reading for at, reading in enumerate(readings) if isinstance(reading, Chat)}
    tokens: dict[int, Tokens] = {}
    if chats:
        laid_out = ChatTemplate(tokenizer).tokens(list(chats.values()), [rows[at] for at in chats])
        tokens = dict(zip(chats, laid_out, strict=True))
    columns: _Columns = {"input_ids": [], "labels": []}
    for at, reading in enumerate(readings):
        if isinstance(reading, Strings):
            ids, counts = _completion_of_strings(reading.prompt, reading.completion, specials, rows[at])
        else:
            ids, counts = tokens[at]
        columns["input_ids"].append(ids)
        columns["labels"].append([i if count else IGNORED_LABEL for i, count in zip(ids, counts, strict=True)])
    return columns


def _has_template(tokenizer: "PreTrainedTokenizerBase") -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


class _Specials:
    """The ids of the special tokens that a tokenizer puts around each text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        whole, bare = (list(tokenizer("a", add_special_tokens=s, verbose=False)["input_ids"]) for s in (True, False))
        places = [at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare]
        begin = places[0] if places else 0
        self.before, self.behind = whole[:begin], whole[begin + len(bare) :] if places else []

    def _has_end(self, ids: list[int], text: str) -> bool:
        """Chat templates may write white space after EOS."""
        eos = self.tokenizer.eos_token
        return eos is not None and text.rstrip().endswith(eos) and self.tokenizer.eos_token_id in ids

    def doubled(self, ids: list[int], text: str) -> tuple[int, int]:
        """Counts the tokens at both ends that the tokenizer added although the text had them."""
        before, eos = len(self.before), self.tokenizer.eos_token_id
        begins = before if ids[:before] == ids[before : 2 * before] == self.before else 0
        ends = self.behind == ids[-1:] == [eos] and self._has_end(ids, text)
        return begins, int(ends and ids[before:].count(eos) > text.count(self.tokenizer.eos_token))

    def once(self, ids: list[int], text: str) -> list[int]:
        begins, ends = self.doubled(ids, text)
        if begins or ends:
            _say(
                "Texts have special tokens already that the tokenizer adds to each text, as after rendering with a "
                "chat template: they are trained with one BOS and one EOS token."
            )
        return ids[begins : len(ids) - ends]

    def ended(self, ids: list[int], text: str) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return ids if eos is None or (ids and ids[-1] == eos) or self._has_end(ids, text) else [*ids, eos]


def _completion_of_strings(prompt: str, completion: str, specials: _Specials, row: int) -> tuple[list[int], list[bool]]:
    """Tokenises prompt and completion as one text, and marks the tokens that hold a part of the completion.

    One text, as a tokenizer may treat the beginning of a text specially (a leading space, a BOS token).
    """
    tokenizer, text = specials.tokenizer, prompt + completion
    if getattr(tokenizer, "is_fast", False):
        out = tokenizer(text, return_offsets_mapping=True, verbose=False)
        ids = list(out["input_ids"])
        first, _ = specials.doubled(ids, text)
        ids = specials.once(ids, text)
        offsets = out["offset_mapping"][first : first + len(ids)]
        counts = [end > max(begin, len(prompt)) for begin, end in offsets]
    else:
        ids = specials.once(list(tokenizer(text, verbose=False)["input_ids"]), text)
        begin = specials.once(list(tokenizer(prompt, verbose=False)["input_ids"]), prompt)
        if begin and begin[-1] == tokenizer.eos_token_id and not prompt.endswith(tokenizer.eos_token):
            begin.pop()  # the tokenizer ends each text with EOS
        if ids[: len(begin)] != begin:
            raise DataError(
                "the tokens of the prompt are not the beginning of the tokens of prompt and completion",
                where=f"dataset row {row}",
                why="a token at the border belongs to both, so labels would be wrong",
                fix="use a fast tokenizer, or put the space between them into the prompt",
            )
        counts = [i >= len(begin) for i in range(len(ids))]
    ended = specials.ended(ids, completion)
    counts += [True] * (len(ended) - len(counts))
    if ended and ended[-1] == tokenizer.eos_token_id:  # the tokenizer's EOS belongs to no character
        counts[-1] = True
    return ended, counts
