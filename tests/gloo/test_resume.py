"""Resuming: bit for bit in the same layout, from the same bits in another, with the same data in the same order."""

import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_hotspa.checkpoint.format.manifest import MANIFEST, WEIGHT, read_manifest, verify
from hf_hotspa.checkpoint.model_files import export
from hf_hotspa.errors import DamagedCheckpointError, HotspaError, ResumeError
from hf_hotspa.layout import vector as vector_module
from hf_hotspa.trainer.resuming import Resumption, load_scheduler
from tests.checkpoints import memory_folder
from tests.families import MIXTURE
from tests.harness import run_ranks
from tests.oracle import random_rows, relative_error
from tests.training_runs import (
    STEPS,
    STRATEGIES,
    contents,
    make_trainer,
    newest,
    one_run,
    same_bits,
    several_runs,
    train,
    whole_state,
)

pytestmark = pytest.mark.gloo


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


def weighted(base):
    """A multiple of the model's own loss, which a first step cannot know."""

    class Weighted(base):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            return (1.7 * loss, outputs) if return_outputs else 1.7 * loss

    return Weighted


ACCUMULATED = {"hotspa_mini_batch_size": None, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
CASES = {
    "three strategies": (
        2, {"family": "phi3_fused", "hotspa_strategies": "dp2:16@32,tp2:32,pp2:60", "max_steps": 6}, [3, 4],
    ),
    "token chunks, in the background": (
        2, {"hotspa_strategies": "dp2+ck7:16@32,tp2+ck13:60", "hotspa_async_save": True, "max_steps": 5}, [3],
    ),
}  # fmt: skip
SLOW = {
    "four ranks": (4, {"family": "phi3_fused"}, [3]),
    "workers": (2, {"dataloader_num_workers": 2}, [2]),
    "momentum": (2, {"optim": "sgd", "optim_args": "momentum=0.9", "family": "llama_uneven"}, [5]),
    "rmsprop": (1, {"optim": "rmsprop", "lr_scheduler_type": "cosine", "dataloader_drop_last": True}, [2, 3, 4]),
    "epochs": (1, {"max_steps": -1, "num_train_epochs": 1.75, "save_strategy": "epoch"}, [4]),
    "uneven accumulation": (2, {"hotspa_mini_batch_size": 5, "gradient_accumulation_steps": 2}, [2, 3]),
    "label smoothing": (2, {"label_smoothing_factor": 0.1, **ACCUMULATED}, [3]),
    "another factor": (2, {"cls": weighted}, [1, 3]),
    "factors of ranks": (2, {"average_tokens_across_devices": False, **ACCUMULATED}, [1, 3]),
}


@pytest.mark.parametrize(
    ("world", "options", "points"),
    [
        *(pytest.param(*case, id=name) for name, case in CASES.items()),
        *(pytest.param(*case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    ],
)
def test_the_same_layout_goes_on_bit_for_bit(world, options, points, tmp_path):
    """In the middle of an epoch, and at its edge (4, or 3 with drop_last)."""
    steps = STEPS if options.get("max_steps", -1) < 0 else options["max_steps"]
    first = (str(tmp_path / "a"), None, options)
    others = [(str(tmp_path / f"b{p}"), str(tmp_path / "a" / f"checkpoint-{p}"), options) for p in points]
    per_rank = run_ranks(world, several_runs, [first, *others])
    for losses, *resumed in per_rank:
        assert list(losses) == list(range(1, steps + 1))
        for point, found in zip(points, resumed, strict=True):
            assert found == {step: loss for step, loss in losses.items() if step > point}
    last = contents(newest(tmp_path / "a"))
    for point in points:
        assert contents(newest(tmp_path / f"b{point}")) == last, point


def resume_and_save(rank, world, output, checkpoint, options):
    """Goes on from a checkpoint without a step, and writes what was loaded; then goes on."""
    step = read_manifest(Path(checkpoint)).step
    trainer = make_trainer(output, world, max_steps=step, model_seed=5, **options)
    assert train_without_steps(trainer, checkpoint) == {}
    return one_run(rank, world, output + "-on", checkpoint, options)


def train_without_steps(trainer, checkpoint):
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.state.global_step == trainer.state.max_steps
    trainer._save_checkpoint(None, None)
    trainer._hotspa.checkpoints.close()
    return train_losses(trainer)


def train_losses(trainer):
    losses = next(c.losses for c in trainer.callback_handler.callbacks if hasattr(c, "losses"))
    trainer.close_engine()
    return losses


def resume_in_turn(rank, world, checkpoint, runs):
    return [resume_and_save(rank, world, output, checkpoint, options) for output, options in runs]


def check_other_layouts(tmp_path, checkpoint, losses, world, pools, family="qwen3_qk_norm_tied"):
    """All of them in one world, one after the other."""
    outputs = [tmp_path / f"{world}-{pool.replace(':', '_')}" for pool in pools]
    runs = [(str(o), {"hotspa_strategies": p, "family": family}) for o, p in zip(outputs, pools, strict=True)]
    per_rank = run_ranks(world, resume_in_turn, str(checkpoint), runs, timeout=600)
    whole, step = whole_state(checkpoint.parent / f"checkpoint-{STEPS}"), read_manifest(checkpoint).step
    weights = [key for key in whole if key.startswith(WEIGHT)]
    for index, output in enumerate(outputs):
        assert same_bits(whole_state(newest(output)), whole_state(checkpoint)), output.name
        for per_run in per_rank:
            found = per_run[index]
            assert list(found) == list(range(step + 1, STEPS + 1))
            for at, loss in found.items():
                assert math.isclose(loss, losses[at], rel_tol=1e-6), (output.name, at)
        end = whole_state(newest(output.with_name(f"{output.name}-on")))
        ends = [torch.cat([state[key].flatten() for key in weights]) for state in (end, whole)]
        assert relative_error(*ends) <= 1e-5, output.name


def test_another_layout_goes_on_from_the_same_bits(tmp_path):
    [losses, _] = run_ranks(2, one_run, str(tmp_path / "a"), None, {})
    check_other_layouts(tmp_path, tmp_path / "a" / "checkpoint-3", losses, 1, [STRATEGIES[1]])


MATRIX = {
    1: ["dp1:60@64"],
    2: ["dp2:60@64", "tp2:60", "pp2+v2:60", STRATEGIES[2]],
    3: ["dp3:60@64", "pp3:60", STRATEGIES[3]],
    4: ["dp4:60@64", "dp2tp2:60", "tp4:60", "pp4:60", "tp2pp2:60", STRATEGIES[4]],
    8: ["dp8:60@64", "dp2tp2pp2:60", "tp4pp2:60", "dp2pp4:60", STRATEGIES[8]],
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("saved", MATRIX)
@pytest.mark.parametrize("family", ["qwen3_qk_norm_tied", "phi3_fused"])
def test_every_layout_goes_on_from_every_other(saved, family, tmp_path):
    options = {"hotspa_strategies": MATRIX[saved][-1], "family": family}
    [losses, *_] = run_ranks(saved, one_run, str(tmp_path / "a"), None, options)
    for world, pools in MATRIX.items():
        check_other_layouts(tmp_path, tmp_path / "a" / "checkpoint-3", losses, world, pools, family)


def test_another_storage_order_is_read(tmp_path, monkeypatch):
    """The plan of transformers, which says what dim is outermost, may change: the whole parameter is turned around."""
    losses = train(make_trainer(str(tmp_path / "a"), 1))
    original = vector_module.build_vector

    def turned(specs, layer_costs, head_cost):
        from dataclasses import replace

        plain = [replace(s, shard_dim=None, parts=()) if s.shard_dim else s for s in specs]
        return original(plain, layer_costs, head_cost)

    monkeypatch.setattr("hf_hotspa.model.specs.build_vector", turned)
    checkpoint = tmp_path / "a" / "checkpoint-3"
    trainer = make_trainer(str(tmp_path / "b"), 1, max_steps=3, model_seed=5)
    assert train_without_steps(trainer, str(checkpoint)) == {}
    saved, written = read_manifest(checkpoint), read_manifest(newest(tmp_path / "b"))
    assert {p.shard_dim for p in saved.parameters} > {p.shard_dim for p in written.parameters}
    assert same_bits(whole_state(newest(tmp_path / "b")), whole_state(checkpoint))
    assert len(losses) == STEPS


# ------------------------------------------------------------------------------------------------ what is resumed from


def test_a_finished_run_stays_as_it_is(tmp_path):
    trainer = make_trainer(str(tmp_path), 1)
    train(trainer)
    weights = {n: p.clone() for n, p in trainer.model.named_parameters()}
    before = contents(newest(tmp_path))
    again = make_trainer(str(tmp_path), 1, model_seed=9)
    assert train(again, True) == {}
    assert again.state.global_step == STEPS
    assert all(torch.equal(p, weights[n]) for n, p in again.model.named_parameters())
    assert contents(newest(tmp_path)) == before
    longer = make_trainer(str(tmp_path), 1, model_seed=9, max_steps=STEPS + 2)
    assert list(train(longer, True)) == [STEPS + 1, STEPS + 2]


def damage(path, name="master-rank-00000"):
    file = next(file for file in path.rglob("*") if file.name.startswith(name))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def walk_back(rank, world, folder):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hf_hotspa").addHandler(handler)
    losses = one_run(rank, world, folder, True, {"save_strategy": "no", "max_steps": 4})
    try:
        one_run(rank, world, folder, str(Path(folder, "checkpoint-4")), {})
    except HotspaError as error:
        return losses, messages, error
    return losses, messages, None


def test_the_newest_one_that_verifies_is_taken(tmp_path):
    [reference, _] = run_ranks(2, one_run, str(tmp_path), None, {"max_steps": 4})
    damage(tmp_path / "checkpoint-4", "master-rank-00001")
    (tmp_path / "checkpoint-3" / "hotspa" / "state.json").unlink()
    (tmp_path / "checkpoint-900").mkdir()
    for rank, (losses, messages, error) in enumerate(run_ranks(2, walk_back, str(tmp_path))):
        assert losses == {3: reference[3], 4: reference[4]}
        skipped = [m for m in messages if "is skipped" in m]
        assert len(skipped) == (3 if rank == 0 else 0), messages
        # the one that the user names is not replaced by another one
        assert isinstance(error, DamagedCheckpointError)
        assert "checkpoint-4" in str(error)
        assert "master-rank-00001-of-00002.safetensors" in str(error)
        assert "Fix: take another checkpoint" in str(error)


def test_nothing_to_resume_from(tmp_path):
    with pytest.raises(ResumeError, match="No valid checkpoint found in output directory") as caught:
        train(make_trainer(str(tmp_path), 1), True)
    assert isinstance(caught.value, ValueError)  # as stock Trainer
    train(make_trainer(str(tmp_path), 1, max_steps=2))
    damage(tmp_path / "checkpoint-1")
    damage(tmp_path / "checkpoint-2")
    with pytest.raises(ResumeError, match="none of 2 can be used"):
        train(make_trainer(str(tmp_path), 1), True)
    with pytest.raises(DamagedCheckpointError, match="MANIFEST"):
        train(make_trainer(str(tmp_path), 1), str(tmp_path))


def test_the_argument_resumes_too(tmp_path):
    train(make_trainer(str(tmp_path), 1, max_steps=3))
    assert list(train(make_trainer(str(tmp_path), 1, resume_from_checkpoint="True", max_steps=4))) == [4]
    path = str(tmp_path / "checkpoint-2")
    assert list(train(make_trainer(str(tmp_path), 1, resume_from_checkpoint=path, max_steps=4))) == [3, 4]
    assert len(train(make_trainer(str(tmp_path), 1, resume_from_checkpoint="False", max_steps=2))) == 2


# ------------------------------------------------------------------------------------------------ what may change


@pytest.fixture(scope="module")
def saved():
    with memory_folder() as folder:
        train(make_trainer(str(folder / "a"), 1, max_steps=3))
        train(make_trainer(str(folder / "model"), 1, max_steps=1, save_only_model=True))
        yield folder


def other_rows(vocab_size, change):
    rows = random_rows(14, vocab_size, longest=60, seed=3)
    return change(rows)


REFUSED = {
    "seed": ({"seed": 8}, "seed is 8, and was 7"),
    "data seed": ({"data_seed": 8}, "seed is 8, and was 7"),
    "mini-batch": ({"hotspa_mini_batch_size": 5}, "mini_batch_size is 5, and was 4"),
    "shuffle": ({"train_sampling_strategy": "sequential"}, "train_sampling_strategy is 'sequential'"),
    "drop last": ({"dataloader_drop_last": True}, "dataloader_drop_last is True"),
    "policy": ({"hotspa_overlong": "drop"}, "hotspa_overlong is 'drop'"),
    "fewer rows": ({"rows": lambda rows: rows[:-1]}, "rows of the dataset"),
    "other lengths": ({"rows": lambda rows: [*rows[1:], rows[0]]}, "lengths and labels of the rows"),
    "optimizer": ({"optim": "sgd"}, "AdamW"),
    "more layers": ({"model": {"num_hidden_layers": 5}}, "model.layers.4"),
    "wider": ({"model": {"intermediate_size": 56}}, "[56, 32] in the model"),
    "another family": ({"family": "llama_gqa_bias"}, "in the model"),
}


@pytest.mark.parametrize(("options", "fragment"), REFUSED.values(), ids=REFUSED)
def test_what_would_not_be_the_same_run_is_refused(saved, tmp_path, options, fragment):
    options = dict(options)
    if "rows" in options:
        options["rows"] = other_rows(163, options["rows"])
    with pytest.raises((ResumeError, HotspaError)) as caught:
        train(make_trainer(str(tmp_path), 1, max_steps=5, **options), str(saved / "a" / "checkpoint-3"))
    assert fragment in str(caught.value)
    assert caught.value.code == "HSP-220"
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({"scheduler": {"class": "OneCycleLR", "state": {}}}, ResumeError),
        ({"scheduler": {"class": "LambdaLR"}}, DamagedCheckpointError),
        ({}, DamagedCheckpointError),
    ],
)
def test_another_scheduler_is_refused(saved, tmp_path, state, error):
    trainer = make_trainer(str(tmp_path), 1)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)]), lambda step: 1.0)
    path = saved / "a" / "checkpoint-3"
    with pytest.raises(error):
        load_scheduler(Resumption(path, read_manifest(path), state), trainer.lr_scheduler)


def rows_of_a_step(rank, world, folder, resume, options):
    """The tokens of the rows of each step, of all ranks; and the losses."""
    import torch.distributed as dist

    seen = {}

    def noting(base):
        class Noting(base):
            def training_step(self, model, inputs, num_items_in_batch=None):
                real = inputs["attention_mask"] > 0
                rows = [ids[real[row]].tolist() for row, ids in enumerate(inputs["input_ids"])]
                everybody = [None] * world
                dist.all_gather_object(everybody, rows)
                seen.setdefault(self.state.global_step + 1, []).extend(row for of_rank in everybody for row in of_rank)
                return super().training_step(model, inputs, num_items_in_batch)

        return Noting

    losses = train(make_trainer(folder, world, cls=noting, **options), resume)
    return {step: sorted(rows) for step, rows in seen.items()}, losses


def test_another_number_of_ranks_and_batches_trains_the_same_rows(tmp_path):
    """Mini-batches of 5 rows, in batches that hold different numbers of them; over the edge of an epoch."""
    options = {"hotspa_mini_batch_size": 5, "max_steps": 5, "save_steps": 2}
    [(whole, _), _] = run_ranks(2, rows_of_a_step, str(tmp_path / "a"), None, options)
    assert [len(rows) for rows in whole.values()] == [5, 5, 4, 5, 5]
    options |= {"gradient_accumulation_steps": 3, "save_strategy": "no"}
    for world in (1, 4):
        resumed = run_ranks(world, rows_of_a_step, str(tmp_path / "b"), str(tmp_path / "a" / "checkpoint-2"), options)
        for found, _ in resumed:
            assert found == {step: rows for step, rows in whole.items() if step > 2}


def unchanged(**options):
    """The arguments of a script that does not know `hotspa_mini_batch_size`."""
    rows = random_rows(16, 163, longest=60, seed=3)
    return {"hotspa_mini_batch_size": None, "max_steps": 6, "save_steps": 3, "rows": rows, **options}


@pytest.mark.parametrize(
    ("before", "accumulated", "now"),
    [
        (2, 1, 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 2, 2), (4, 1, 2), (2, 2, 4), (4, 3, 1))),
    ],
)
def test_an_unchanged_script_keeps_the_rows_of_a_step(before, accumulated, now, tmp_path):
    """Over the edge of an epoch, which is after 16 rows."""
    of_batch = 1 if before * accumulated == 12 else 4 // (before * accumulated)
    options = unchanged(per_device_train_batch_size=of_batch, gradient_accumulation_steps=accumulated)
    if before * accumulated == 12:
        options["rows"] = random_rows(24, 163, longest=60, seed=3)
    [(whole, losses), *_] = run_ranks(before, rows_of_a_step, str(tmp_path / "a"), None, options)
    resumed = run_ranks(now, rows_of_a_step, str(tmp_path / "b"), str(tmp_path / "a" / "checkpoint-3"), options)
    for found, of_resumed in resumed:
        assert found == {step: rows for step, rows in whole.items() if step > 3}
        assert of_resumed == pytest.approx({step: loss for step, loss in losses.items() if step > 3}, rel=1e-4)


def test_where_rows_cannot_be_kept_the_error_names_the_value(tmp_path, saved):
    ours = saved / "a" / "checkpoint-3"  # 4 rows, of one process or two
    for of_batch in (3, 8):
        options = unchanged(per_device_train_batch_size=of_batch, rows=random_rows(14, 163, longest=60, seed=3))
        said = f"mini_batch_size is {of_batch}, and was 4 .*set per_device_train_batch_size=4, or set hotspa_allow"
        with pytest.raises(ResumeError, match=said):
            train(make_trainer(str(tmp_path), 1, **options), str(ours))


def test_another_data_order_can_be_allowed(saved, tmp_path):
    options = {"hotspa_mini_batch_size": 5, "hotspa_allow_data_order_change": True, "max_steps": 5}
    assert list(train(make_trainer(str(tmp_path), 1, **options), str(saved / "a" / "checkpoint-3"))) == [4, 5]


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.0},
        {"max_grad_norm": 0.1},
        {"save_steps": 3},
        {"hotspa_strategies": "dp1:60@128"},
    ],
    ids=str,
)
def test_what_may_change(saved, tmp_path, options):
    trainer = make_trainer(str(tmp_path), 1, **{"max_steps": 5, **options})
    found = train(trainer, str(saved / "a" / "checkpoint-3"))
    assert list(found) == [4, 5]


def test_optimizer_settings_of_the_checkpoint_go_on_with_a_warning(saved, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_hotspa"):
        train(make_trainer(str(tmp_path), 1, max_steps=5, learning_rate=1e-3), str(saved / "a" / "checkpoint-3"))
    assert "initial_lr 0.01 (not 0.001)" in caplog.text


@pytest.mark.parametrize("asked", [True, "checkpoint-1"])
def test_a_checkpoint_of_the_model_only_resumes_with_a_new_optimizer(asked, saved, tmp_path, caplog):
    path = tmp_path / "checkpoint-1"
    shutil.copytree(saved / "model" / "checkpoint-1", path)
    assert not (path / "hotspa").exists()
    trainer = make_trainer(str(tmp_path), 1, max_steps=2, learning_rate=0.0)
    assert list(train(trainer, asked if asked is True else str(path))) == [2]
    assert "optimizer and scheduler start anew" in caplog.text
    weights = AutoModelForCausalLM.from_pretrained(path)
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(weights.get_parameter(name), weight), name


def as_format_1(path):
    """The same checkpoint as earlier versions wrote it: our files at the root, configs in `model/`, no model files."""
    from dataclasses import replace

    manifest, files = read_manifest(path), []
    configs = dict(manifest.model_files())
    (path / "model").mkdir()
    for file in manifest.files:
        name = file.name.removeprefix("hotspa/")
        name = f"model/{name}" if file.name in configs else name
        if name.startswith("model.safe"):
            (path / name).unlink()
            continue
        (path / file.name).rename(path / name)
        files.append(replace(file, name=name))
    (path / "hotspa").rmdir()
    (path / MANIFEST).write_text(replace(manifest, files=tuple(files), schema_version=1).text())


def test_checkpoints_of_earlier_versions_go_on_and_are_exported(tmp_path):
    losses = train(make_trainer(str(tmp_path / "a"), 1, max_steps=4))
    expected = whole_state(tmp_path / "a" / "checkpoint-2")
    as_format_1(tmp_path / "a" / "checkpoint-2")
    assert verify(tmp_path / "a" / "checkpoint-2").schema_version == 1
    assert same_bits(whole_state(tmp_path / "a" / "checkpoint-2"), expected)
    found = train(make_trainer(str(tmp_path / "b"), 1, max_steps=4, model_seed=5), str(tmp_path / "a" / "checkpoint-2"))
    assert found == {3: losses[3], 4: losses[4]}
    export(tmp_path / "a" / "checkpoint-2", tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert torch.equal(model.get_parameter("model.norm.weight"), expected["weight/model.norm.weight"])


def refusals(rank, world, folder, checkpoint):
    codes = []
    for options in ({"seed": 1}, {"family": "llama_gqa_bias"}, {"optim": "sgd"}):
        with pytest.raises(HotspaError) as caught:
            one_run(rank, world, folder, checkpoint, options)
        codes.append(caught.value.code)
    return codes


def test_every_rank_raises(saved, tmp_path):
    found = run_ranks(2, refusals, str(tmp_path), str(saved / "a" / "checkpoint-3"))
    assert found == [["HSP-220"] * 3] * 2


# ------------------------------------------------------------------------------------------------ files of weights of others


def written_anew(checkpoint, folder):
    """A copy of a checkpoint whose weights `save_pretrained` has cut into small files."""
    path = folder / checkpoint.name
    shutil.copytree(checkpoint, path)
    AutoModelForCausalLM.from_pretrained(checkpoint).save_pretrained(folder / "other", max_shard_size=20_000)
    for file in path.glob("model*"):
        file.unlink()
    for file in (folder / "other").glob("model*"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="module")
def fused():
    with memory_folder() as folder:
        trainer = make_trainer(str(folder), 1, family=MIXTURE, max_steps=4)
        yield train(trainer), folder / "checkpoint-2"


def test_a_checkpoint_whose_weights_lie_in_other_files_is_resumed(fused, saved, tmp_path):
    losses, checkpoint = fused
    path = written_anew(checkpoint, tmp_path)
    assert len(list(path.glob("model-*"))) > 5
    assert train(make_trainer(str(tmp_path / "b"), 1, family=MIXTURE, max_steps=4, model_seed=5), str(path)) == {
        step: losses[step] for step in (3, 4)
    }
    with pytest.raises(DamagedCheckpointError):
        verify(path)
    path = written_anew(saved / "a" / "checkpoint-3", tmp_path)  # of two ranks each looks at its own files
    [first, *others] = run_ranks(2, one_run, str(tmp_path / "c"), str(path), {"max_steps": 4})
    assert list(first) == [4]
    assert all(other == first for other in others)


def spoil(path, how):
    """Changes what a checkpoint holds beside its manifest."""
    file = sorted(path.glob("model-*"))[3]
    tensors = load_file(file)
    changed = {
        "other values": {name: tensor + 1 for name, tensor in tensors.items()},
        "other dtype": {name: tensor.bfloat16() for name, tensor in tensors.items()},
        "one more": {**tensors, "more": torch.ones(2)},
        "one less": dict([*tensors.items()][1:]),
    }
    if how in changed:
        save_file(changed[how], file, {"format": "pt"})
    elif how in ("other bit", "other share"):
        damage(path, file.name if how == "other bit" else "master-rank-")
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:-4])
    elif how == "other state":
        state = path / "hotspa" / "state.json"
        state.write_text(state.read_text() + " ")
    else:
        for each in [file] if how == "without one" else path.glob("model*"):
            each.unlink()


SPOILT = (
    "other bit", "other values", "other dtype", "one more", "one less", "cut short", "without one", "without any",
    "other state", "other share",
)  # fmt: skip


@pytest.mark.parametrize("how", SPOILT)
def test_other_files_of_weights_that_do_not_hold_the_same_are_damage(fused, tmp_path, how):
    path = written_anew(fused[1], tmp_path)
    spoil(path, how)
    for asked in (str(path), True):  # passed over, and there is no other
        with pytest.raises(HotspaError) as caught:
            train(make_trainer(str(tmp_path), 1, family=MIXTURE, max_steps=4), asked)
        assert caught.value.code == ("HSP-220" if asked is True else "HSP-211")
