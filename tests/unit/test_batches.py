"""Rows as batches of the Trainer's loaders: what the collator makes of them, and how mini-batches of a given size are dealt out."""

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
)

from hf_hotspa.data.collator import (
    COUNTS,
    DROP,
    SPLIT,
    TRUNCATE,
    MiniBatchSampler,
    RowCollator,
    is_loss_mask,
    is_stock,
    is_stream,
    kept_columns,
    say_left_out,
    seeded,
    with_masks,
    without_padded_from,
)
from hf_hotspa.errors import DataError, TokenRangeError, UnsupportedError
from hf_hotspa.rows.read_row import RowRules
from hf_hotspa.rows.scan import scan_dataset
from hf_hotspa.trainer.batches import DispatchedShard
from tests.training_runs import make_trainer
from tests.unit.test_prepare import EOS, PLAIN, TALK, byte_tokenizer

NO = -100


def collated(examples, **options):
    return {name: value.tolist() for name, value in RowCollator(**options)(examples).items()}


# -- padding, labels, documents ----------------------------------------------------------------------------------------


def test_rows_are_padded_on_the_right():
    rows = [{"input_ids": [1, 2, 3], "labels": [NO, 2, 3]}, {"input_ids": [4]}]
    assert collated(rows) == {
        "input_ids": [[1, 2, 3], [4, 0, 0]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[NO, 2, 3], [4, NO, NO]],
    }
    assert all(value.dtype == torch.int64 for value in RowCollator()(rows).values())
    tokenizer = byte_tokenizer()
    tokenizer.pad_token_id = EOS
    assert collated(rows, tokenizer=tokenizer)["input_ids"] == [[1, 2, 3], [4, EOS, EOS]]


@pytest.mark.parametrize(
    "column", [{"seq_lengths": [2, 3]}, {"position_ids": [0, 1, 0, 1, 2]}, {"cu_seqlens": [0, 2, 5]}]
)
def test_documents_of_a_row_are_told_apart_by_positions(column):
    """The first token of a document is predicted by nothing."""
    batch = collated([{"input_ids": [1, 2, 3, 4, 5], **column}, {"input_ids": [6, 7]}])
    assert batch["position_ids"] == [[0, 1, 0, 1, 2], [0, 1, 0, 0, 0]]
    assert batch["labels"] == [[1, 2, NO, 4, 5], [6, 7, NO, NO, NO]]
    assert batch["attention_mask"] == [[1] * 5, [1, 1, 0, 0, 0]]


@pytest.mark.parametrize("kind", ["list", "numpy", "datasets", "datasets with gaps", "torch format", "transform"])
def test_kinds_of_datasets(kind):
    ids = [[row] * (1 + row * 7 % 40) for row in range(1, 24)]
    rows = [{"input_ids": i, "labels": [NO, *i[1:]] if len(i) % 2 else i} for i in ids]
    if kind == "datasets with gaps":  # None: every token
        rows = [row if row["labels"][0] == NO else {**row, "labels": None} for row in rows]
    expected = collated(rows)
    dataset = rows
    if kind == "numpy":
        dataset = [{name: np.array(value) for name, value in row.items()} for row in rows]
    elif kind != "list":
        dataset = datasets.Dataset.from_list([{"other": "x", **row} for row in rows])
    if kind == "torch format":
        dataset = dataset.with_format("torch")
    if kind == "transform":
        dataset = dataset.with_transform(lambda batch: {k: batch[k] for k in ("input_ids", "labels")})
    assert collated([dataset[i] for i in range(len(rows))]) == expected
    assert [row[:1] for row in expected["labels"]] == [[NO] if len(i) % 2 else i[:1] for i in ids]


def test_a_batch_without_rows():
    batch = RowCollator()([])
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "input_ids": (0, 1), "labels": (0, 1), "attention_mask": (0, 1),
    }  # fmt: skip
    assert collated([{"input_ids": []}]) == {"input_ids": [[0]], "attention_mask": [[0]], "labels": [[NO]]}


def test_columns_of_a_token_loss():
    rows = [{"input_ids": [1, 2, 3], "weight": [0.5, 1.0, 2.0], "domain": 7}]
    rows.append({"input_ids": [4], "weight": [3.0], "domain": 8})
    batch = collated(rows, loss_columns=("weight", "domain"))
    assert batch["weight"] == [[0.5, 1.0, 2.0], [3.0, 0.0, 0.0]]
    assert batch["domain"] == [7, 8]
    rows[1]["weight"] = 3.0
    with pytest.raises(DataError, match="'weight' has a number for each token in some rows and one number in others"):
        collated(rows, loss_columns=("weight",))
    with pytest.raises(DataError, match=r"has no 'missing'.*row 0, column 'missing', counted within the batch"):
        collated(rows, loss_columns=("missing",))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([{"input_ids": [1]}, {"text": "a"}], DataError, "row 1, counted within the batch"),
        ([{"text": "a"}], DataError, r"a row has no 'input_ids', only \['text'\].*pass the tokenizer"),
        ([[1, 2]], DataError, "a row is a list instead of a mapping"),
        ([{"input_ids": [1], "inputs_embeds": [1]}], UnsupportedError, "'inputs_embeds'"),
        ([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], UnsupportedError, "between tokens.*row 0.*, counted"),
    ],
)
def test_what_cannot_be_read_is_named(rows, error, message):
    with pytest.raises(error, match=message):
        RowCollator(unsupported=frozenset(["inputs_embeds"]))(rows)


# -- masks in other columns --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask", "mask"])
@pytest.mark.parametrize("kind", ["own", "stock"])
def test_a_loss_mask_in_another_column_is_honoured(name, kind):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token_id = EOS
    collator = DataCollatorForSeq2Seq(tokenizer, label_pad_token_id=NO) if kind == "stock" else None
    rows = [{"input_ids": [1, 2, 3], name: [0, 1, 0]}, {"input_ids": [4, 5, 6], name: [False, True, True]}]
    assert is_loss_mask(name)
    found = collated(rows, collator=collator, columns=("input_ids", "attention_mask", "labels"))
    assert found["labels"] == [[NO, 2, NO], [NO, 5, 6]]
    assert name not in found


def test_masks_beside_each_other_and_beside_labels():
    both = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1], "assistant_masks": [1, 1, 0]}
    assert with_masks(both, 0)["labels"] == [NO, 2, NO]
    labelled = {"input_ids": [1, 2], "labels": [1, NO], "loss_mask": [0, 1]}  # labels have said it
    assert with_masks(labelled, 0) is labelled
    unused = {"input_ids": [1, 2], "loss_mask": None, "attention_mask": [1, 1], "special_tokens_mask": [1, 0]}
    assert with_masks(unused, 0) is unused


@pytest.mark.parametrize("mask", [[0, 1], [0, 2, 1], [0.5, 1, 1], 1, [[0, 1, 1]]])
def test_what_is_no_mask_is_refused(mask):
    with pytest.raises(UnsupportedError, match="'loss_mask' is not a mask of 0 and 1.*row 1 of a batch"):
        RowCollator()([{"input_ids": [1]}, {"input_ids": [1, 2, 3], "loss_mask": mask}])


@pytest.mark.parametrize(("label", "what"), [(1, "one for the row"), ([1, 2], "one for each token")])
def test_a_label_in_the_singular_is_refused(label, what):
    with pytest.raises(UnsupportedError, match=rf"a row has 'label' \({what}\), and no 'labels'"):
        RowCollator()([{"input_ids": [1, 2], "label": label}])


def test_which_columns_are_kept():
    names = ["input_ids", "labels", "loss_mask", "weight", "source", "label", "seq_lengths"]
    assert kept_columns(names, ["weight"]) == ["input_ids", "labels", "loss_mask", "weight", "label", "seq_lengths"]
    assert kept_columns(["text", "source"], []) == ["text", "source"]  # the tokenizer reads them


# -- text --------------------------------------------------------------------------------------------------------------


def test_text_is_rendered_with_the_tokenizer():
    tokenizer = byte_tokenizer(template=PLAIN)
    batch = collated(
        [{"text": "ab", "share": 0.5}, {"text": "c", "share": 2.0}], tokenizer=tokenizer, loss_columns=["share"]
    )
    ids = [tokenizer("ab")["input_ids"] + [EOS], tokenizer("c")["input_ids"] + [EOS]]
    assert batch["input_ids"][0] == ids[0]
    assert batch["input_ids"][1][:2] == ids[1]
    assert batch["labels"] == [ids[0], [*ids[1], NO]]
    assert batch["share"] == [0.5, 2.0]
    for row, text in (({"messages": TALK}, "yes<end>no<end>"), ({"prompt": "hi", "completion": " you"}, " you<eos>")):
        [labels] = RowCollator(tokenizer=tokenizer)([row])["labels"]
        assert tokenizer.decode(labels[labels != NO]) == text
    with pytest.raises(DataError, match=r"\['story'\].*row 1, counted within the batch"):
        RowCollator(tokenizer=tokenizer)([{"text": "a"}, {"story": "b"}])


def test_a_collator_of_the_users_gets_rendered_rows():
    seen = []

    def collate(examples):
        seen.extend(examples)
        return {"input_ids": torch.tensor([e["input_ids"] for e in examples])}

    RowCollator(collate, byte_tokenizer())([{"text": "ab"}, {"text": "cd"}])
    assert [byte_tokenizer().decode(row["input_ids"]) for row in seen] == ["ab<eos>", "cd<eos>"]
    masks = DataCollatorForLanguageModeling(byte_tokenizer(), mlm=False)
    with pytest.raises(UnsupportedError, match="conversations or completions"):
        RowCollator(masks, byte_tokenizer(template=PLAIN))([{"messages": TALK}])


def test_a_collator_of_the_users_gets_what_the_stock_one_would():
    seen = []
    rows = [{"input_ids": [1, 2], "source": "a", "loss_mask": [0, 1]}]
    RowCollator(lambda examples: seen.extend(examples) or {}, columns=("input_ids", "labels"))(rows)
    assert seen == [{"input_ids": [1, 2]}]  # its own business: no mask is read for it
    RowCollator(lambda examples: seen.extend(examples) or {})(rows)
    assert seen[1] == rows[0]
    batch = RowCollator(lambda examples: torch.tensor(examples))([1, 2])  # rows of any kind
    assert batch.tolist() == [1, 2]
    assert is_stock(None)
    assert is_stock(DataCollatorWithFlattening())
    assert not is_stock(lambda examples: {})


# -- padding on the left ------------------------------------------------------------------------------------------------


def test_first_labels_behind_padding_on_the_left_are_left_out(caplog):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token_id, tokenizer.padding_side = EOS, "left"
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}, {"input_ids": [6]}]
    batch = DataCollatorForLanguageModeling(tokenizer, mlm=False)(rows)
    found = without_padded_from(batch)
    assert batch["labels"].tolist() == [[1, 2, 3], [NO, 4, 5], [NO, NO, 6]]
    assert found["labels"].tolist() == [[1, 2, 3], [NO, NO, 5], [NO, NO, NO]]
    assert type(found) is type(batch)
    assert without_padded_from(found) is found
    for other in (
        [1],
        {"labels": torch.ones(3)},
        {"labels": batch["labels"]},
        {**batch, "shift_labels": batch["labels"]},
    ):
        assert without_padded_from(other) is other
    empty = RowCollator()([])
    assert without_padded_from(empty) is empty
    caplog.clear()
    say_left_out.cache_clear()
    padded = [{"input_ids": [0, 1, 2], "attention_mask": [0, 1, 1], "labels": [NO, 1, 2]}] * 2
    assert collated(padded)["labels"] == [[1, 2]] * 2  # the first column counts for nothing
    assert caplog.text.count("padded on the left") == 1


# -- what is longer than the longest bucket ----------------------------------------------------------------------------

LONG = [{"input_ids": [1, 2, 3, 4, 5], "labels": [NO, 2, 3, 4, 5]}, {"input_ids": [6, 7]}, {"input_ids": [8, 9, 10]}]


def cut(rows, policy, longest=2, **options):
    collator = RowCollator(policy=policy, counts=True, **options)
    collator.longest = longest
    return {name: value.tolist() for name, value in collator(rows).items()}


def test_policies_cut_rows_and_count_them():
    assert cut(LONG, TRUNCATE) == {
        "input_ids": [[1, 2], [6, 7], [8, 9]], "attention_mask": [[1, 1]] * 3, "labels": [[NO, 2], [6, 7], [8, 9]],
        COUNTS: [2, 0, 0, 0],
    }  # fmt: skip
    assert cut(LONG, SPLIT) == {
        "input_ids": [[1, 2], [3, 4], [5, 0], [6, 7], [8, 9], [10, 0]],
        "attention_mask": [[1, 1], [1, 1], [1, 0], [1, 1], [1, 1], [1, 0]],
        "labels": [[NO, 2], [3, 4], [5, NO], [6, 7], [8, 9], [10, NO]],
        COUNTS: [0, 2, 0, 0],
    }  # fmt: skip
    assert cut(LONG, DROP) == {
        "input_ids": [[6, 7]], "attention_mask": [[1, 1]], "labels": [[6, 7]], COUNTS: [0, 0, 2, 0],
    }  # fmt: skip
    assert cut(LONG, DROP, longest=5)[COUNTS] == [0, 0, 0, 0]
    for longest in (5, None):  # not known yet
        assert cut(LONG, DROP, longest=longest)["input_ids"] == collated(LONG)["input_ids"]


def test_a_batch_of_which_nothing_is_left():
    batch = cut([LONG[0]], DROP)
    assert (batch["input_ids"], batch["labels"], batch[COUNTS]) == ([], [], [0, 0, 1, 0])
    collator = RowCollator(policy=DROP, longest=2)
    assert {name: tuple(value.shape) for name, value in collator([LONG[0]]).items()} == {
        "input_ids": (0, 1), "attention_mask": (0, 1), "labels": (0, 1),
    }  # fmt: skip


def test_columns_of_rows_and_of_tokens_are_cut_with_them():
    rows = [{**row, "weight": [float(i) for i in row["input_ids"]], "domain": i} for i, row in enumerate(LONG)]
    batch = cut(rows, SPLIT, loss_columns=("weight", "domain"))
    assert batch["domain"] == [0, 0, 0, 1, 2, 2]
    assert batch["weight"] == [[1, 2], [3, 4], [5, 0], [6, 7], [8, 9], [10, 0]]


def test_batches_of_the_users_are_cut_too():
    """Padded on the left, with positions."""
    batch = {
        "input_ids": torch.tensor([[1, 2, 3, 4], [0, 0, 5, 6]]), "attention_mask": torch.tensor([[1] * 4, [0, 0, 1, 1]]),
        "position_ids": torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]]), "labels": torch.tensor([[1, 2, 3, 4], [NO, NO, 5, 6]]),
        "reward": torch.tensor([0.5, 1.5]),
    }  # fmt: skip
    collator = RowCollator(lambda examples: batch, policy=SPLIT, longest=3)
    found = {name: value.tolist() for name, value in collator([{"x": 1}]).items()}
    assert found == {
        "input_ids": [[1, 2, 3, 0], [4, 0, 0, 0], [0, 0, 5, 6]],
        "attention_mask": [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 1, 1]],
        "position_ids": [[0, 1, 2, 0], [0, 0, 0, 0], [0, 0, 0, 1]],
        "labels": [[1, 2, 3, NO], [4, NO, NO, NO], [NO, NO, 5, 6]],
        "reward": [0.5, 0.5, 1.5],
    }


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (9, 12)])
def test_rows_with_images_are_not_cut(shape):
    """Even where there are as many images as rows."""
    ids = torch.ones(2, 4, dtype=torch.int64)
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids, "pixel_values": torch.zeros(shape)}
    assert RowCollator(lambda examples: batch, policy=TRUNCATE, longest=4)([{"x": 1}])["input_ids"].shape == (2, 4)
    with pytest.raises(UnsupportedError, match="hotspa_overlong=truncate with pixel_values"):
        RowCollator(lambda examples: batch, policy=TRUNCATE, longest=3)([{"x": 1}])


def test_rows_of_several_documents_are_not_cut():
    rows = [{"input_ids": [1, 2, 3, 4], "seq_lengths": [2, 2]}]
    assert cut(rows, SPLIT, longest=4)[COUNTS] == [0, 0, 0, 0]
    with pytest.raises(UnsupportedError, match="hotspa_overlong=split with rows of several documents"):
        cut(rows, SPLIT, longest=3)


EMPTY = [
    ({"text": None}, {"text": ""}, {"text": "ab"}),
    ({"messages": None}, {"messages": []}, {"messages": TALK}),
    ({"messages": "[]"}, {"messages": None}, {"messages": TALK}),
    ({"prompt": None, "completion": "a"}, {"prompt": "a", "completion": ""}, {"prompt": "a", "completion": "b"}),
    ({"question": "a", "answer": None}, {"question": "a", "answer": ""}, {"question": "a", "answer": "b"}),
    ({"input_ids": None}, {"input_ids": []}, {"input_ids": [5, 6]}),
]


@pytest.mark.parametrize("rows", EMPTY, ids=lambda rows: "-".join(rows[0]))
def test_rows_that_are_empty_are_an_error_or_skipped_and_counted(rows):
    tokenizer = byte_tokenizer(template=PLAIN)
    tokenizer.pad_token_id = EOS
    for some in (rows, rows[:2]):
        found = RowCollator(tokenizer=tokenizer, skips_empty=True, counts=True)(some)
        assert found[COUNTS].tolist() == [0, 0, 0, 2]
        assert len(found["input_ids"]) == len(some) - 2
    alone = RowCollator(tokenizer=tokenizer)([rows[2]])
    found = RowCollator(tokenizer=tokenizer, skips_empty=True)(rows)
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in alone.items()
    }
    null = next(row for row in rows if None in row.values())
    with pytest.raises(DataError, match=r"row 0.*hotspa_empty_rows=skip"):
        RowCollator(tokenizer=tokenizer)([null])
    collator = DataCollatorForSeq2Seq(tokenizer)
    assert len(RowCollator(collator, tokenizer, skips_empty=True)(rows)["input_ids"]) == 1
    if "input_ids" in rows[0]:
        table = scan_dataset(
            datasets.Dataset.from_list(list(rows)), rules=RowRules(skips_empty=True), disable_progress=True
        )
        assert table.lengths.tolist() == [0, 0, 2]
        with pytest.raises(DataError, match="input_ids is missing.*row 0.*hotspa_empty_rows"):
            scan_dataset(datasets.Dataset.from_list(list(rows)), disable_progress=True)


# -- mini-batches of a given size --------------------------------------------------------------------------------------


def dealt(order, size, parts, world, drop_last=False):
    """By mini-batch the rows of each rank's batches, [mini-batch][part][rank]."""
    samplers = [MiniBatchSampler(order, size, parts, rank, world, drop_last) for rank in range(world)]
    ranks = [list(sampler) for sampler in samplers]
    assert {len(sampler) for sampler in samplers} == {len(batches) for batches in ranks}
    steps = -(-len(ranks[0]) // parts)
    return [
        [[batches[s * parts + p] for batches in ranks] for p in range(min(parts, len(ranks[0]) - s * parts))]
        for s in range(steps)
    ]


@given(st.integers(1, 40), st.integers(1, 13), st.integers(1, 4), st.integers(1, 5), st.booleans())
@settings(deadline=None, max_examples=80)
def test_any_number_of_ranks_and_parts_gives_the_same_mini_batches(rows, size, parts, world, drop_last):
    order = [row * 7 % 41 for row in range(rows)]
    expected = [order[at : at + size] for at in range(0, rows, size)]
    if drop_last and (rest := rows % size):
        del expected[-1][max(end for part in range(parts + 1) if (end := size * part // parts) <= rest) :]
    found = dealt(order, size, parts, world, drop_last)
    assert [[row for part in step for share in part for row in share] for step in found] == [*filter(None, expected)]
    for step in found:
        lengths = [len(share) for part in (step if len(step) == parts else step[:-1]) for share in part]
        complete = rows % size == 0 or step is not found[-1]
        assert not complete or max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rows", [18, 19, 20, 21, 22, 23])
def test_the_last_batches_are_the_stock_trainers(rows, drop_last):
    stock = list(BatchSampler(range(rows), 2, drop_last))
    assert [batch for step in dealt(range(rows), 6, 3, 1, drop_last) for part in step for batch in part] == stock


def test_a_size_that_ranks_do_not_divide():
    assert dealt(range(12), 5, 1, 2) == [[[[0, 1], [2, 3, 4]]], [[[5, 6], [7, 8, 9]]], [[[10], [11]]]]
    assert dealt(range(5), 3, 2, 2) == [[[[], [0]], [[1], [2]]], [[[], [3]], [[], [4]]]]
    assert dealt(range(5), 3, 2, 2, drop_last=True) == [[[[], [0]], [[1], [2]]], [[[], [3]]]]


def test_orders():
    rows = range(23)
    sequential = SequentialSampler(rows)
    assert seeded(sequential, None) is sequential
    first = seeded(RandomSampler(rows, generator=torch.Generator().manual_seed(3)), None)
    assert isinstance(first, SeedableRandomSampler)
    assert seeded(first, None) is first
    sampler = MiniBatchSampler(first, 5, 1, 0, 1)
    epochs = []
    for epoch in (0, 1, 1):
        sampler.set_epoch(epoch)
        assert sampler.epoch == epoch
        epochs.append(list(sampler))
        assert sorted(row for batch in epochs[-1] for row in batch) == list(rows)
    assert epochs[1] == epochs[2] != epochs[0]


class ByRow(torch.utils.data.Dataset):
    """Rows whose tokens all name them."""

    def __init__(self, fails=None):
        self.fails = fails

    def __len__(self):
        return 23

    def __getitem__(self, row):
        if row == self.fails:
            raise OSError("disk on fire")
        return {"input_ids": [row] * (1 + row * 7 % 40)}


def test_a_stream_is_dealt_out_in_batches_of_one_size(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([{"input_ids": [row] * 3} for row in range(12)])

    options = {"hotspa_mini_batch_size": 6, "gradient_accumulation_steps": 3}
    loader = make_trainer(str(tmp_path), 1, rows=Stream(), **options).get_train_dataloader()
    assert [batch["input_ids"][:, 0].tolist() for batch in loader] == [[i, i + 1] for i in range(0, 12, 2)]
    options["hotspa_mini_batch_size"] = 7
    with pytest.raises(UnsupportedError, match=r"hotspa_mini_batch_size=7 with a stream.*use a multiple of 3"):
        make_trainer(str(tmp_path), 1, rows=Stream(), **options).get_train_dataloader()
    assert is_stream(Stream())
    assert is_stream(iter([1]))
    assert not is_stream([1])
    assert not is_stream(ByRow())


# -- what goes wrong while rows are read -------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 1])
def test_whatever_a_dataset_raises_is_one_of_our_errors(tmp_path, num_workers):
    dataset = ByRow()
    trainer = make_trainer(str(tmp_path), 1, rows=dataset, dataloader_num_workers=num_workers, save_strategy="no")
    trainer.get_train_dataloader()  # the lengths are known
    dataset.fails = 4
    with pytest.raises(DataError, match="OSError: disk on fire") as caught:
        trainer.train()
    assert "rank 0" in str(caught.value)
    trainer.close_engine()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_token_outside_the_vocabulary_ends_the_run_also_from_workers(tmp_path, num_workers):
    rows = [*[{"input_ids": [3, 4, 5]}] * 6, {"input_ids": [1, 10_000, 2]}, *[{"input_ids": [3, 4, 5]}] * 5]
    trainer = make_trainer(
        str(tmp_path), 1, rows=rows, dataloader_num_workers=num_workers, train_sampling_strategy="sequential",
        save_strategy="no",
    )  # fmt: skip
    with pytest.raises(TokenRangeError, match="vocabulary has the ids 0 to"):
        trainer.train()
    assert trainer.state.global_step == 1
    trainer.close_engine()


@pytest.mark.parametrize(
    ("rows", "split", "drop", "parts", "last"),
    [
        (13, False, False, ([0, 1, 2, 6, 7, 8, 12], [3, 4, 5, 9, 10, 11, 0]), 1),  # completed to one row each
        (10, False, False, ([0, 1, 2, 6, 7], [3, 4, 5, 8, 9]), 4),  # two rows each: nothing is repeated
        (12, False, False, ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]), 6),
        (13, False, True, ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]), 6),
        (1, False, False, ([0], [0]), 1),
        (5, True, False, ([0, 2, 4], [1, 3, 0]), 1),
    ],
)
def test_a_rank_that_reads_itself_has_the_rows_that_it_would_be_sent(rows, split, drop, parts, last):
    for rank, part in enumerate(parts):
        size = 2 if split else 3
        options = {"num_processes": 2, "process_index": rank, "split_batches": split, "drop_last": drop}
        shard, ends = DispatchedShard(range(rows), batch_size=size, **options), []
        shard.on_end = ends.append
        assert list(shard) == part
        assert ends == [last]
