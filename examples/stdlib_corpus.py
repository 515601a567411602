"""Real text with a long tail of lengths that is on every machine: the source code of Python's standard library.

Owns a tokenizer (byte-level BPE, trained on the spot) and a dataset of one row a file, or one row a function (most have
less than 100 tokens, and one in a hundred more than 1,000), all made offline in seconds and kept in a directory that is named after the Python version and the options. Everything is written beside its place and
renamed, so several processes may ask at once; it is cheaper to let rank 0 go first.

    python examples/stdlib_corpus.py --vocab_size 4096      # prints the histogram of lengths
"""

import argparse
import ast
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

EOS, PAD = "<|endoftext|>", "<|pad|>"
# For conversations, where a tokenizer has no template; what stands between the marks carries the labels: thinking, answers
# and calls of tools.
CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['reasoning_content'] %}<think>\n{{ message['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{% set function = call['function'] or call %}"
    '<tool_call>{"name": {{ function.name | tojson }}, "arguments": {{ function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
HISTOGRAM_EDGES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "lib-dynload"}
_TESTS = {"test", "tests", "idle_test"}


def stdlib_files(*, tests: bool = False, max_files: int | None = None) -> list[Path]:
    """The .py files of the running Python's standard library, in an order that depends on their names only.

    Args:
        tests: Also the test directories (three times as much text).
        max_files: Only so many, spread evenly over the list.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = _NOT_SOURCE if tests else _NOT_SOURCE | _TESTS
    files = [p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts[:-1])]
    files.sort(key=lambda p: p.relative_to(root).as_posix())
    if max_files is not None and max_files < len(files):
        files = [files[i * len(files) // max_files] for i in range(max_files)]
    return files


def texts(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(name, text) of each file that is UTF-8 and not empty; some test files are made to be neither."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield path.relative_to(root).as_posix(), text


def functions(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(file, text) of each function and method, decorators included, in the order of the files; of a function inside
    another one the text of the outer one only."""
    for name, text in texts(files):
        lines = text.splitlines(keepends=True)
        try:
            found = list(_outer_functions(ast.parse(text)))
        except (SyntaxError, ValueError):  # files that are made to be invalid
            continue
        for node in found:
            begin = min(part.lineno for part in (node, *node.decorator_list))
            yield name, textwrap.dedent("".join(lines[begin - 1 : node.end_lineno]))


def _outer_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        else:
            yield from _outer_functions(child)


def default_cache_dir() -> Path:
    """`HF_HOME/hf_hotspa/stdlib`, where HF_HOME is what the Hugging Face libraries use."""
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "hf_hotspa" / "stdlib"


def build_tokenizer(
    vocab_size: int = 4096, *, cache_dir: str | os.PathLike[str] | None = None, max_files: int | None = None
) -> Any:
    """A byte-level BPE tokenizer trained on the standard library, without its tests.

    Args:
        vocab_size: Tokens of the vocabulary, special ones included; at least 258 (256 bytes, EOS and PAD).
        cache_dir: Where it is kept; `default_cache_dir` when None.
        max_files: Train on so many files only.

    Returns:
        A `PreTrainedTokenizerFast` with `eos_token` and `pad_token`.
    """
    if vocab_size < 258:
        raise ValueError(f"a vocabulary of {vocab_size} cannot hold 256 bytes, {EOS} and {PAD}: use at least 258")
    from transformers import PreTrainedTokenizerFast

    def make(folder: Path) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[EOS, PAD],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator((text for _, text in texts(stdlib_files(max_files=max_files))), trainer)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD).save_pretrained(folder)

    return PreTrainedTokenizerFast.from_pretrained(_cached(cache_dir, f"tokenizer-v{vocab_size}", max_files, make))


def build_corpus(
    *,
    tests: bool = False,
    by_function: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    max_files: int | None = None,
) -> Any:
    """The files as a `datasets.Dataset` with the columns `name` and `text`, one row a file.

    Args:
        tests: Also the test directories.
        by_function: One row a function instead.
        cache_dir: Where it is kept; `default_cache_dir` when None.
        max_files: Only so many files.
    """
    from datasets import Dataset, load_from_disk

    def make(folder: Path) -> None:
        files = stdlib_files(tests=tests, max_files=max_files)
        rows = list(functions(files) if by_function else texts(files))
        columns = {"name": [name for name, _ in rows], "text": [text for _, text in rows]}
        Dataset.from_dict(columns).save_to_disk(folder)

    name = ("functions" if by_function else "corpus") + ("-with-tests" if tests else "")
    return load_from_disk(_cached(cache_dir, name, max_files, make))


def length_histogram(lengths: Sequence[int], edges: Sequence[int] = HISTOGRAM_EDGES) -> list[tuple[str, int, float]]:
    """How many lengths fall between the edges: (range, count, share) for each, above the last edge included."""
    rows = []
    low = 0
    for high in [*edges, sys.maxsize]:
        count = sum(low < length <= high for length in lengths)
        name = f"{low + 1}-{high}" if high != sys.maxsize else f"over {low}"
        rows.append((name, count, count / max(len(lengths), 1)))
        low = high
    return rows


def print_length_histogram(lengths: Sequence[int], edges: Sequence[int] = HISTOGRAM_EDGES) -> None:
    """Prints the histogram, one bar a range."""
    for name, count, share in length_histogram(lengths, edges):
        print(f"{name:>14} {count:6d} {share:6.1%} {'#' * round(50 * share)}")
    ordered = sorted(lengths)
    print(
        f"{len(ordered)} sequences, {sum(ordered)} tokens, median {ordered[len(ordered) // 2]}, longest {ordered[-1]}"
    )


def _cached(
    cache_dir: str | os.PathLike[str] | None, name: str, max_files: int | None, make: Callable[[Path], None]
) -> str:
    """The directory of a result, made if it is not there yet: in a temporary place, then renamed."""
    parent = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    subset = f"-{max_files}files" if max_files is not None else ""
    target = parent / f"python{platform.python_version()}-{name}{subset}"
    if not target.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=parent, prefix=".making-"))
        try:
            make(temporary)
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, and its result is the same
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(target)


def main() -> None:
    """Builds tokenizer and corpus and prints how long the files are in tokens."""
    parser = argparse.ArgumentParser(
        description="Lengths of the files or functions of Python's standard library, in tokens."
    )
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--tests", action="store_true", help="also the test directories")
    parser.add_argument("--by_function", action="store_true", help="one row a function instead of one a file")
    parser.add_argument("--cache_dir", default=None)
    options = parser.parse_args()

    from hf_hotspa.data.prepare import prepare_dataset
    from hf_hotspa.rows.scan import scan_dataset

    tokenizer = build_tokenizer(options.vocab_size, cache_dir=options.cache_dir)
    corpus = build_corpus(tests=options.tests, by_function=options.by_function, cache_dir=options.cache_dir)
    lengths = scan_dataset(prepare_dataset(corpus, tokenizer)).lengths.tolist()
    print_length_histogram(lengths)


if __name__ == "__main__":
    main()
