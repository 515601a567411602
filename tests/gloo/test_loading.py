"""A model given as a folder, on several ranks: the same run as with the model itself, in a share of the memory."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from hf_hotspa.checkpoint.model_files import export
from hf_hotspa.engine.loading import load_weights, open_model
from hf_hotspa.engine.master import MasterStore
from hf_hotspa.errors import HotspaError
from hf_hotspa.model.specs import describe_model
from hf_hotspa.parallel.agreement import Agreement
from hf_hotspa.trainer.arguments import HotSPaTrainingArguments
from hf_hotspa.trainer.trainer import HotSPaTrainer
from tests.families import FAMILIES, tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import MINI_BATCH, ROWS, STRATEGIES, contents, newest
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

MOST_OF_THE_BOUND = 1.2
KINDS = ("model", "folder")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> folder; the odd ones in bf16 and in several files."""
    root = tmp_path_factory.mktemp("models")
    for index, family in enumerate(FAMILIES):
        odd = index % 2
        model = tiny_model(family, torch.bfloat16 if odd else torch.float32)
        model.save_pretrained(root / family, max_shard_size="20kB" if odd else "50GB")
    return root


# -- the engine -------------------------------------------------------------------------------------------------------


def first_step(engine, vocab_size):
    """The shares of the weights, and the loss of a first mini-batch."""
    shares = {name: p.detach().clone() for name, p in engine.named_parameters()}
    batch = make_mini_batch(engine, random_rows(10, vocab_size, longest=60, seed=1))
    loss = engine.forward_backward(batch).loss
    engine.close()
    return shares, loss


def both_ways(rank, world_size, root, buckets, families):
    for family in families:
        folder = Path(root) / family
        model = AutoModelForCausalLM.from_pretrained(folder)
        shares, loss = first_step(make_engine(model, buckets), model.config.vocab_size)
        found, found_loss = first_step(
            make_engine(open_model(folder), buckets, weights=folder), model.config.vocab_size
        )
        assert found_loss == loss, family
        assert found.keys() == shares.keys()
        for name, share in shares.items():
            assert found[name].dtype == share.dtype
            assert torch.equal(found[name], share), f"{family}: {name}"


@pytest.mark.parametrize(
    ("world_size", "families"),
    [
        (1, FAMILIES[:1]),
        (4, FAMILIES[1:2]),
        pytest.param(4, FAMILIES, marks=pytest.mark.slow),
        pytest.param(1, FAMILIES, marks=pytest.mark.slow),
        pytest.param(2, FAMILIES, marks=pytest.mark.slow),
    ],
    ids=["1", "4", "4 all", "1 all", "2 all"],
)
def test_weights_and_first_loss_are_those_of_the_model_itself(world_size, families, folders):
    run_ranks(world_size, both_ways, str(folders), STRATEGIES[world_size], families)


def damaged_on_one_rank(rank, world_size, good, bad):
    folder = Path(bad) if rank == 1 else Path(good)
    make_engine(open_model(Path(good)), "dp2:60", weights=folder)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (None, "HSP-010 .*there is no folder .*rank 1"),
        ("olmo2", "HSP-040 .*has no place in OlmoForCausalLM .*rank 1"),
        ("same", "differ in the files of weights"),
    ],
    ids=["no folder", "another model", "other files"],
)
def test_what_one_rank_finds_wrong_all_raise(family, text, folders, tmp_path):
    bad = tmp_path / "bad"
    if family == "same":
        tiny_model("olmo").save_pretrained(bad, max_shard_size="20kB")
    elif family is not None:
        bad = folders / family
    outcomes = run_ranks(2, damaged_on_one_rank, str(folders / "olmo"), str(bad), expect_failure=True)
    for outcome in outcomes:
        assert outcome.error is not None, f"rank {outcome.rank} went on"
        assert re.search(text, outcome.error), outcome.error


# -- the trainer ------------------------------------------------------------------------------------------------------


def make_trainer(model, output, world_size, vocab_size, **options):
    common = {
        "output_dir": output, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 3,
        "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "weight_decay": 0.1, "seed": 7,
        "hotspa_mini_batch_size": MINI_BATCH, "hotspa_strategies": STRATEGIES[world_size], "hotspa_report": False,
    }  # fmt: skip
    rows = random_rows(ROWS, vocab_size, longest=60, seed=3)
    args = HotSPaTrainingArguments(**{**common, **options})
    return HotSPaTrainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:5])


def losses(trainer):
    return [
        {k: v for k, v in log.items() if k in ("loss", "grad_norm", "eval_loss")} for log in trainer.state.log_history
    ]


def both_runs(rank, world_size, folder, output):
    return {kind: whole_run(rank, world_size, folder, f"{output}/{kind}", kind == "folder") for kind in KINDS}


def whole_run(rank, world_size, folder, output, as_folder):
    """Evaluates, trains, evaluates, saves, then trains on from the checkpoint in a second trainer."""
    model = folder if as_folder else AutoModelForCausalLM.from_pretrained(folder)
    vocab_size = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    trainer = make_trainer(model, f"{output}/run", world_size, vocab_size)
    before = trainer.evaluate()["eval_loss"]
    with patch("os.fsync"):
        trainer.train()
    trainer.evaluate()
    trainer.save_model(f"{output}/saved")
    assert as_folder == all(p.is_meta for p in trainer.model.parameters())
    trainer.close_engine()
    again = make_trainer(Path(folder) if as_folder else model, f"{output}/run", world_size, vocab_size, max_steps=4)
    with patch("os.fsync"):
        again.train(resume_from_checkpoint=True)
    again.save_model(f"{output}/resumed")
    again.close_engine()
    return before, losses(trainer), losses(again)


def state_of(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return dict(model.state_dict()), model.dtype


def assert_equal_models(found, expected):
    (found, found_dtype), (expected, dtype) = state_of(found), state_of(expected)
    assert found_dtype == dtype
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("world_size", "family"), [(2, "qwen3_qk_norm_tied"), pytest.param(4, "llama_uneven", marks=pytest.mark.slow)]
)
def test_a_run_is_the_same_to_the_last_bit(world_size, family, folders, tmp_path):
    results = run_ranks(world_size, both_runs, str(folders / family), str(tmp_path))
    assert all(result == results[0] for result in results)
    assert results[0]["folder"] == results[0]["model"]
    for name in ("saved", "resumed"):
        assert_equal_models(tmp_path / "folder" / name, tmp_path / "model" / name)
        configs = [json.loads((tmp_path / kind / name / "config.json").read_text()) for kind in ("folder", "model")]
        assert configs[0] == configs[1]
    found, expected = newest(tmp_path / "folder" / "run"), newest(tmp_path / "model" / "run")
    assert {k: v for k, v in contents(found).items() if "master" in k} == {
        k: v for k, v in contents(expected).items() if "master" in k
    }
    export(found, tmp_path / "exported")
    assert_equal_models(tmp_path / "exported", tmp_path / "model" / "resumed")


def odd_ends(rank, world_size, folder, output):
    """What happens around a model without weights."""
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    options = {"save_strategy": "no", "max_steps": 1}
    trainer = make_trainer(None, output, world_size, vocab_size, hotspa_model_path=folder, **options)
    trainer.save_model(f"{output}/before")
    with pytest.raises(HotspaError, match="the model is on the meta device"):
        trainer.engine.write_back(trainer.model)
    trainer.train()
    stale = Path(output, "after", "model-00001-of-00002.safetensors")
    if rank == 0:
        stale.parent.mkdir()
        stale.write_bytes(b"")
    trainer.save_model(f"{output}/after")
    assert not stale.exists()
    trainer.close_engine()
    trainer.save_model(f"{output}/again")  # of what was saved last
    model = trainer.materialize()
    assert model is trainer.model
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert not any(p.is_meta for p in model.parameters())
    trainer.close_engine()
    trainer.save_model(f"{output}/model")  # like any other now
    trainer.evaluate()
    trainer.close_engine()

    lost = make_trainer(folder, output, world_size, vocab_size, **options)
    lost.train()
    lost.close_engine()
    with pytest.raises(HotspaError, match="the trained weights are gone"):
        lost.save_model(f"{output}/lost")
    return weights


def test_before_and_after_training(folders, tmp_path):
    folder = folders / "qwen3_qk_norm_tied"
    per_rank = run_ranks(2, odd_ends, str(folder), str(tmp_path))
    assert_equal_models(tmp_path / "before", folder)
    for name in ("again", "model"):
        assert_equal_models(tmp_path / name, tmp_path / "after")
    assert not (tmp_path / "lost").exists()
    after = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "after").named_parameters())
    for weights in per_rank:
        assert weights.keys() == after.keys()
        assert all(torch.equal(weights[name], after[name]) for name in after)


def given_twice(rank, world_size, folder, output):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    for given, path, text in [
        (model, folder, "another model is given: LlamaForCausalLM"),
        (folder, folder, "another model is given"),
        (config, None, "set hotspa_model_path"),
        ("no/such-model", None, "hf download"),
    ]:
        with pytest.raises(HotspaError, match=text):
            make_trainer(given, output, world_size, config.vocab_size, hotspa_model_path=path)
    config.dtype = torch.bfloat16
    trainer = make_trainer(config, output, world_size, config.vocab_size, hotspa_model_path=folder)
    assert trainer.model.dtype == torch.bfloat16


def test_models_that_are_given_twice_or_not_at_all(folders, tmp_path):
    run_ranks(2, given_twice, str(folders / "llama_gqa_bias"), str(tmp_path))


def unwritable(rank, world_size, folder, output):
    trainer = make_trainer(folder, output, world_size, 163, save_strategy="no", max_steps=1)
    trainer.train()
    Path(output, "file").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(HotspaError, match=r"HSP-210 .*rank 0.*the weights are still there"):
            trainer.save_model(f"{output}/file")
    trainer.save_model(f"{output}/other")
    trainer.close_engine()


def test_a_save_that_fails_is_raised_by_all_and_loses_nothing(folders, tmp_path):
    run_ranks(2, unwritable, str(folders / "qwen3_qk_norm_tied"), str(tmp_path))
    assert state_of(tmp_path / "other")
    assert not list((tmp_path / "other").glob(".model.*"))


# -- memory -----------------------------------------------------------------------------------------------------------


def random_files(folder, config):
    """bf16 files of a model of that config, one for each layer, written without building it."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        shapes = {n: p.shape for n, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    folder.mkdir()
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    files = {}
    for name in shapes:
        files.setdefault(name.split(".")[2] if name.startswith("model.layers.") else name, []).append(name)
    weight_map = {}
    for index, names in enumerate(files.values()):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        save_file({n: torch.empty(shapes[n], dtype=torch.bfloat16).normal_(std=0.02) for n in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return shapes


def resident(field):
    """A size of this process in bytes, as Linux counts it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_of_loading(rank, world_size, folder, small):
    """How far the resident size grows while a share of a model is loaded, and what it may hold.

    The rule: the highest resident size (VmHWM, reset before) less the resident size of the interpreter with everything
    imported and a small model loaded. It counts pages of the mapped files as long as they are mapped, though the kernel
    could take them back. Left out are the gradients, which are as large as the weights: they belong to the store.
    A rank may hold its share, which is the fp32 weights that it owns (4 bytes * parameters / ranks), and the largest
    tensor as the files have it (2 bytes * its elements, in bf16).
    """
    import torch.distributed as dist

    def load(path):
        model = open_model(Path(path))
        master = MasterStore(describe_model(model).vector, rank, world_size, torch.device("cpu"))
        load_weights(Path(path), model, master, Agreement(dist.group.WORLD, rank))
        return master

    load(small)  # imports the family, and all else that is there once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    master = load(folder)
    grown = resident("VmHWM") - before
    specs = master.vector.specs
    share = sum(p.numel() * p.element_size() for p in master.parameters.values())
    assert all(p.dtype == torch.float32 for p in master.parameters.values())
    grown -= sum(gradient.nbytes for gradient in master.gradients if gradient is not None)  # written, hence resident
    return grown, share + 2 * max(spec.numel for spec in specs), sum(spec.numel for spec in specs)


SMALL = {
    "vocab_size": 16000,
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 10,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
}
BILLION = {
    "vocab_size": 64000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts peaks")
@pytest.mark.parametrize("sizes", [SMALL, pytest.param(BILLION, marks=pytest.mark.slow)], ids=["small", "billion"])
def test_a_rank_holds_its_share_and_a_tensor(sizes, tmp_path, folders):
    """In bf16 on four ranks: at most 1.2 times a fp32 share (1.1 GB of a billion parameters) and the largest tensor."""
    try:
        random_files(tmp_path / "large", LlamaConfig(**sizes, tie_word_embeddings=False))
        peaks = run_ranks(4, peak_of_loading, str(tmp_path / "large"), str(folders / "llama_uneven"), timeout=600)
    finally:
        shutil.rmtree(tmp_path / "large")  # gigabytes, which pytest would keep
    for grown, allowed, numel in peaks:
        print(f"{numel / 1e6:.0f}M parameters: grew by {grown / 2**20:.0f} MiB of {allowed / 2**20:.0f}")
        assert grown <= MOST_OF_THE_BOUND * allowed
        assert grown > numel / 2  # something was measured
