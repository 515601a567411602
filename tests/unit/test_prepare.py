"""Preparing data: the tokens a user would write by hand, labels exactly where they belong, and clear refusals."""

import json

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from hf_hotspa.data import prepare as module
from hf_hotspa.data.prepare import load_source, prepare_dataset, tokenize_rows
from hf_hotspa.errors import DataError, UnsupportedError

SPECIALS = ["<eos>", "<bos>", "<user>", "<assistant>", "<end>"]
EOS = 256

# Roles and ends as tokens of their own; the assistant's turn is content and <end>.
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<end>{% endgeneration %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)
# Like templates that take the reasoning out of all turns but the last.
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.role == 'assistant' %}think {% endif %}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "so"},
    {"role": "assistant", "content": "no"},
]


def byte_tokenizer(template=None, eos=True, adds_bos_and_eos=False, merges=()):
    """One token a byte (and for each merge), so that expected tokens can be written down."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    specials = {name: 256 + i for i, name in enumerate(SPECIALS)}
    vocab |= {a + b: 300 + i for i, (a, b) in enumerate(merges)}
    core = Tokenizer(models.BPE(vocab=vocab | specials, merges=list(merges)))
    core.add_special_tokens(SPECIALS)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if adds_bos_and_eos:
        core.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", 257), ("<eos>", 256)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<eos>" if eos else None, bos_token="<bos>", chat_template=template
    )


class SlowCharacters(PreTrainedTokenizer):
    """A tokenizer in Python: no offsets."""

    def __init__(self, **kwargs):
        super().__init__(eos_token="<eos>", **kwargs)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)


@pytest.fixture(autouse=True)
def _quiet(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(module, "_shown", set())
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def prepare(rows, tokenizer, **kwargs):
    dataset = prepare_dataset(rows, tokenizer, **kwargs)
    return [{k: list(v) for k, v in row.items()} for row in dataset]


def trained(tokenizer, row):
    """The text of the tokens that carry labels; labels equal the ids there."""
    assert all(label in (-100, i) for i, label in zip(row["input_ids"], row["labels"], strict=True))
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_text_gets_one_eos_and_no_labels():
    tokenizer = byte_tokenizer()
    rows = prepare([{"text": "ab", "id": 1}, {"text": "c<eos>", "id": 2}, {"text": "", "id": 3}], tokenizer)
    assert [tokenizer.decode(row["input_ids"]) for row in rows] == ["ab<eos>", "c<eos>", "<eos>"]
    assert {tuple(row) for row in rows} == {("input_ids",)}
    without = byte_tokenizer(eos=False)
    assert without.decode(prepare([{"text": "ab"}], without)[0]["input_ids"]) == "ab"
    adding = byte_tokenizer(adds_bos_and_eos=True)
    assert adding.decode(prepare([{"text": "ab"}], adding)[0]["input_ids"]) == "<bos>ab<eos>"


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("text", ["<bos>ab<eos>", "<bos>ab", "ab<eos>", "ab", "<bos>ab<eos>\n", "<bos>a<eos>b<bos>"])
def test_special_tokens_that_a_text_has_are_not_doubled(adds, text, caplog):
    tokenizer = byte_tokenizer(adds_bos_and_eos=adds)
    expected = "<bos>" * (adds and not text.startswith("<bos>")) + text
    expected += "" if "<eos>" in text[-6:] else "<eos>"
    for stream in (False, True):
        [row] = tokenize_rows([{"text": text}], tokenizer) if stream else prepare([{"text": text}], tokenizer)
        assert tokenizer.decode(row["input_ids"]) == expected
        prompt, separator, completion = text.partition("a")
        [row] = prepare([{"prompt": prompt + separator, "completion": completion}], tokenizer)
        assert tokenizer.decode(row["input_ids"]) == expected
        assert trained(tokenizer, row) == expected.partition("a")[2]
    doubles = adds and (text.startswith("<bos>") or "<eos>" in text[-6:])
    assert caplog.text.count("special tokens already") == doubles


def test_a_prefix_of_several_special_tokens_is_not_doubled():
    """As GLM's `[gMASK]<sop>`, and a text with one of its own twice."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> <user> $A", special_tokens=[("<bos>", 257), ("<user>", 258)]
    )
    for text, expected in (("<bos><user>a", "<bos><user>a"), ("a", "<bos><user>a"), ("<bos><user><bos><user>a",) * 2):
        [row] = prepare([{"text": text}], tokenizer)
        assert tokenizer.decode(row["input_ids"]) == f"{expected}<eos>"


def test_nothing_is_truncated():
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 8
    tokenizer("warm", truncation=True, max_length=2)  # leaves its mark on the tokenizer
    assert len(prepare([{"text": "x" * 5000}], tokenizer)[0]["input_ids"]) == 5001


def test_input_ids_are_kept():
    rows = [{"input_ids": [1, 2], "labels": [-100, 2], "text": "ignored"}]
    assert prepare(rows, None) == [{"input_ids": [1, 2], "labels": [-100, 2]}]
    assert prepare([{"input_ids": [1, 2], "source": "x"}], None) == [{"input_ids": [1, 2]}]
    with pytest.raises(DataError, match=r"\['completion_mask'\], but no 'labels'"):
        prepare([{"input_ids": [1], "completion_mask": [1]}], None)


def test_messages_with_a_slow_tokenizer_go_by_prefixes():
    tokenizer = SlowCharacters(chat_template=MARKED + "{% if add_generation_prompt %}<assistant>{% endif %}")
    (row,) = prepare([{"messages": TALK}], tokenizer)
    assert "".join(map(chr, (label for label in row["labels"] if label != -100))) == "yes<end>no<end>"


def test_a_template_that_rewrites_earlier_turns_is_trained_turn_by_turn(caplog):
    tokenizer = byte_tokenizer(REWRITING)
    one, two = prepare([{"messages": TALK[:2]}, {"messages": TALK}], tokenizer)
    assert trained(tokenizer, one) == "think yes<end>"
    assert trained(tokenizer, two) == "think yes<end>think no<end>"
    assert tokenizer.decode(two["input_ids"]).startswith("<user>hi<end><assistant>think yes<end><user>so<end>")
    assert "rewrites answers" in caplog.text
    stream = tokenize_rows([{"messages": TALK[:2]}, {"messages": TALK}], tokenizer)
    assert stream == [one, two]


def test_what_is_said_is_said_once_and_on_rank_0(caplog, monkeypatch):
    for rank, count in (("1", 0), ("0", 1), ("0", 0)):
        caplog.clear()
        monkeypatch.setenv("RANK", rank)
        prepare([{"text": "ab"}], byte_tokenizer(eos=False))
        assert caplog.text.count("no end-of-sequence token") == count


def test_columns_that_are_not_used_are_named(caplog):
    prepare([{"messages": TALK, "prompt": "hi", "prompt_id": "7"}], byte_tokenizer(PLAIN))
    assert "columns ['messages']; ['prompt'] are not used" in caplog.text


def test_a_token_across_the_border_belongs_to_the_completion():
    tokenizer = byte_tokenizer(merges=[("b", "c")])
    (row,) = prepare([{"prompt": "ab", "completion": "cd"}], tokenizer)
    assert len(row["input_ids"]) == 4  # a bc d <eos>
    assert trained(tokenizer, row) == "bcd<eos>"


def test_prompt_and_completion_with_a_slow_tokenizer():
    (row,) = prepare([{"prompt": "ab", "completion": "cd"}], SlowCharacters())
    assert row["labels"][:4] == [-100, -100, ord("c"), ord("d")]
    assert row["labels"][4:] == row["input_ids"][4:] == [SlowCharacters().eos_token_id]


class EndsItself(SlowCharacters):
    """Puts EOS behind each text, also where one is."""

    def build_inputs_with_special_tokens(self, token_ids_0, token_ids_1=None):
        return [*token_ids_0, self.eos_token_id]


@pytest.mark.parametrize(
    ("prompt", "completion"), [("ab", "cd"), ("ab", "cd<eos>"), ("ab<eos>", "cd"), ("a<eos>\n", "c")]
)
def test_a_slow_tokenizer_that_ends_texts(prompt, completion):
    tokenizer = EndsItself()
    (row,) = prepare([{"prompt": prompt, "completion": completion}], tokenizer)
    whole = prompt + completion.removesuffix("<eos>")
    assert row["input_ids"] == [*tokenizer(whole, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    learned = [label for label in row["labels"] if label != -100]
    assert learned == [*map(ord, completion.removesuffix("<eos>")), tokenizer.eos_token_id]


def test_prompt_and_completion_messages():
    tokenizer = byte_tokenizer(PLAIN)
    (row,) = prepare([{"prompt": TALK[:3], "completion": TALK[3:]}], tokenizer)
    assert trained(tokenizer, row) == "no<end>"
    for template in (PLAIN, MARKED):  # of a completion, too, only what the assistant says
        tokenizer = byte_tokenizer(template)
        (row,) = prepare([{"prompt": TALK[:2], "completion": TALK[2:]}], tokenizer)
        assert trained(tokenizer, row) == "no<end>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": None}, "text is a NoneType.*row 0"),
        ({"prompt": "a", "completion": TALK}, "completion is a list.*row 0"),
        ({"prompt": TALK, "completion": "a"}, "completion is not a conversation.*row 0"),
        ({"messages": TALK}, "no chat template"),
    ],
)
def test_what_cannot_be_prepared_is_named(row, message):
    with pytest.raises(DataError, match=message):
        prepare([row], byte_tokenizer(None if "chat" in message else PLAIN))


def test_streams_splits_and_empty_datasets_are_refused():
    dataset = datasets.Dataset.from_list([{"text": "a"}])
    with pytest.raises(UnsupportedError, match="IterableDataset"):
        prepare_dataset(dataset.to_iterable_dataset(), byte_tokenizer())
    with pytest.raises(DataError, match=r"\['train'\]"):
        prepare_dataset(datasets.DatasetDict(train=dataset), byte_tokenizer())
    with pytest.raises(DataError, match="empty"):
        prepare_dataset([], byte_tokenizer())


def test_rows_are_named_across_batches_and_results_are_cached(tmp_path):
    rows = [{"prompt": "a", "completion": "b"}] * 300
    with pytest.raises(DataError, match="dataset row 300"):
        prepare([*rows, {"prompt": "a", "completion": None}], byte_tokenizer())
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = load_source(str(tmp_path / "a.jsonl"))
    first, second = (prepare_dataset(source, byte_tokenizer()) for _ in range(2))
    assert first.cache_files == second.cache_files != []
    assert first._fingerprint == second._fingerprint


def test_sources_on_disk(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"text": "two"}]')
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    dataset = datasets.Dataset.from_dict({"text": ["one", "two"]})
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(test=dataset).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / "folder" / name).write_text(json.dumps({"text": name}))
    for name in ("a.jsonl", "a.json", "a.csv", "a.txt", "a.parquet", "saved"):
        assert list(load_source(str(tmp_path / name))["text"]) == ["one", "two"], name
    assert list(load_source(str(tmp_path / "splits"), split="test")["text"]) == ["one", "two"]
    assert list(load_source(str(tmp_path / "folder"))["text"]) == ["a.jsonl", "b.jsonl"]
    assert list(load_source(str(tmp_path / "a.jsonl"), split="train[:1]")["text"]) == ["one"]
    for name in ("splits", "saved"):
        with pytest.raises(DataError, match="no split 'validation'"):
            load_source(str(tmp_path / name), split="validation")


def test_sources_that_are_not_there(tmp_path, monkeypatch):
    for name in (str(tmp_path / "no.jsonl"), "no.parquet", "./no", "a/b/c"):
        with pytest.raises(DataError, match="no file or directory"):
            load_source(name)
    with pytest.raises(DataError, match="no file that can be read"):
        load_source(str(tmp_path))
    (tmp_path / "a.bin").write_text("")
    with pytest.raises(DataError, match=r"\['\.bin'\]"):
        load_source(str(tmp_path / "a.bin"))
    for name in ("a.txt", "a.csv"):
        (tmp_path / name).write_text("text\n")
    with pytest.raises(DataError, match=r"\['\.csv', '\.txt'\]"):
        load_source(str(tmp_path))

    def offline(*args, **kwargs):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match="'someone/corpus' is not a local path.*ConnectionError: offline"):
        load_source("someone/corpus")


@pytest.mark.parametrize(
    ("cells", "quoted"),
    [(["3", "007"], False), (["True", "false"], False), (["None", "NA"], False), (["1.50", "2."], False), (["", "null"], True)],
)  # fmt: skip
def test_cells_of_a_csv_are_the_texts_that_stand_there(tmp_path, cells, quoted):
    tmp_path = folder(tmp_path)
    for name in ("a.csv", "b.csv"):
        rows = "".join(f'1e3,"{cell}"\n' if quoted else f"1e3,{cell}\n" for cell in cells)
        (tmp_path / name).write_text(f"question,answer\n{rows}")
    for source, times in ((tmp_path / "a.csv", 1), (tmp_path, 2)):
        assert list(load_source(str(source))) == [{"question": "1e3", "answer": cell} for cell in cells] * times
    rows = prepare_dataset(load_source(str(tmp_path / "a.csv")), byte_tokenizer(PLAIN))
    assert [trained(byte_tokenizer(), row) for row in rows] == [f"{cell}<end>" for cell in cells]


def test_what_another_reader_made_of_the_cells_of_a_csv_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("question,input,answer,id\nx,,007,1\ny,,3,2\n")
    source = {"path": "csv", "data_files": str(tmp_path / "a.csv"), "split": "train"}
    dataset = datasets.load_dataset(**source).remove_columns("input")
    stream = datasets.load_dataset(**source, streaming=True).remove_columns("input")
    for given in (dataset, dataset.select([1]), stream, stream.map(lambda row: row)):
        with pytest.raises(DataError, match=r"\['answer'\] come from a csv.*int64.*load_source"):
            module.refuse_guessed(given)
    with pytest.raises(DataError, match="come from a csv"):
        prepare(dataset, byte_tokenizer(PLAIN))
    as_text = dataset.cast_column("answer", datasets.Value("string"))
    prepare(as_text, byte_tokenizer(PLAIN))  # he has said what is learned
    module.refuse_guessed(dataset.map(lambda row: {"input_ids": [1]}))


def test_integers_of_other_rows_are_their_digits():
    tokenizer = byte_tokenizer()
    for row in ({"prompt": 2, "completion": 40}, {"prompt": "2", "completion": "40"}):
        (found,) = prepare([row], tokenizer)
        assert (tokenizer.decode(found["input_ids"]), trained(tokenizer, found)) == ("240<eos>", "40<eos>")
    for value in (True, 1.5):
        with pytest.raises(DataError, match=f"completion is a {type(value).__name__} instead of a string"):
            prepare([{"prompt": "2", "completion": value}], tokenizer)


def folder(path):
    """A new one, beside the cache of `datasets`."""
    (path / "rows").mkdir()
    return path / "rows"


GOOD = '{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("a.jsonl", GOOD + '{"text": "b\n' + GOOD, r"a\.jsonl, line 2, is not JSON: Unterminated string"),
        ("a.jsonl", GOOD + "\n" + '{"text": "b"', r"a\.jsonl, line 3, is not JSON: Expecting"),
        ("a.jsonl", GOOD + "[1]\n", r"a\.jsonl, line 2, is not a JSON object: \[1\]"),
        ("a.json", '[{"text": "a"},\n{"text": "b"\n]', r"a\.json, line 3, is not JSON"),
        ("a.json", '[{"text": "a"}, 3]', r"a\.json: element 1 of the list is not a JSON object"),
        ("a.json", "[]", r"a\.json: the file is empty"),
        ("a.jsonl", "", r"a\.jsonl: the file is empty"),
        ("a.csv", "text,id\n", r"a\.csv: the file is empty"),
        ("a.txt", "", r"a\.txt: the file is empty"),
        ("a.parquet", "", r"a\.parquet: the file is empty"),
        ("a.csv", "text,id\na,1\nb,c,2\n", r"a\.csv is not a csv file:.*in line 3, saw 3.*double quotes"),
        ("a.csv", "text,id\na,b,1\nb,c,2\n", r"a\.csv: a row has more cells than the header has names, \['text', 'id'\]"),
    ],
)  # fmt: skip
def test_a_broken_or_empty_file_is_named_with_the_line(tmp_path, name, contents, message):
    tmp_path = folder(tmp_path)
    (tmp_path / name).write_text(contents)
    with pytest.raises(DataError, match=message):
        load_source(str(tmp_path / name))
    good = {"json": "[" + GOOD + "]", "jsonl": GOOD, "csv": "text,id\na,1\n"}.get(name.split(".")[1])
    if good and "empty" not in message:  # of several files, the one that is broken
        (tmp_path / f"0.{name.split('.')[1]}").write_text(good)
        with pytest.raises(DataError, match=message):
            load_source(str(tmp_path))


def test_csv_files_of_a_folder_have_the_same_columns(tmp_path):
    tmp_path = folder(tmp_path)
    (tmp_path / "a.csv").write_text("text,id\na,1\n")
    (tmp_path / "b.csv").write_text("text,source\nb,x\n")
    with pytest.raises(DataError, match=r"b\.csv has the columns \['text', 'source'\], and .*a\.csv \['text', 'id'\]"):
        load_source(str(tmp_path))
    with pytest.raises(DataError, match="cannot be read as split 'test'.*Unknown split"):
        load_source(str(tmp_path / "a.csv"), split="test")
