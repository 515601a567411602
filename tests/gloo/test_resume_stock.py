"""Going on from a checkpoint of the stock Trainer: the end is that of one stock run, and what cannot be mapped is refused.

The moves in tests/moves/checkpoints.py show the usual cases on one process and two (written with DDP); here are exact
numbers, odd checkpoints, and the other direction.
"""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_hotspa.checkpoint import model_files
from hf_hotspa.checkpoint.format.manifest import read_manifest, verify
from hf_hotspa.checkpoint.model_files import export
from hf_hotspa.checkpoint.stock import StockCheckpoint, _epochs, is_stock
from hf_hotspa.errors import DamagedCheckpointError, HotspaError, ResumeError
from tests.checkpoints import memory_folder
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.moves import padded
from tests.oracle import exact_in_double, random_rows
from tests.training_runs import MINI_BATCH, ROWS, make_trainer, train

pytestmark = pytest.mark.gloo

STEPS, FAMILY = 6, "qwen3_qk_norm_tied"


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


def stock_trainer(folder, dtype=torch.float32, seed=0, **options):
    model = tiny_model(FAMILY, dtype, seed=seed)
    common = {
        "output_dir": str(folder), "use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": STEPS,
        "save_steps": 1, "logging_steps": 1, "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "seed": 7,
        "per_device_train_batch_size": MINI_BATCH,
    }  # fmt: skip
    args = TrainingArguments(**{**common, **options})
    rows = random_rows(ROWS, model.config.vocab_size, longest=60, seed=3)
    return Trainer(model=model, args=args, train_dataset=rows, data_collator=padded)


def stock_run(rank, world, folder, dtype):
    with exact_in_double(dtype):
        trainer = stock_trainer(folder, dtype)
        trainer.train()
    return losses_and_weights(trainer)


def losses_and_weights(trainer):
    logs = {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}
    return logs, torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def goes_on(rank, world, folder, output, dtype):
    """From the third step; and, where a save in the middle is gone on from, the end is the same once more."""
    found = []
    for name, checkpoint in ((f"{output}/a", f"{folder}/checkpoint-3"), (f"{output}/b", f"{output}/a/checkpoint-5")):
        options = {"model_seed": 5, "model": {"dtype": dtype}, "max_steps": STEPS}
        with exact_in_double(dtype):
            trainer = make_trainer(name, world, family=FAMILY, **options)
            losses = train(trainer, checkpoint)
        found.append((list(losses), *losses_and_weights(trainer)))
    return found


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 2e-6, marks=pytest.mark.slow, id="fp32"),
        pytest.param(torch.float64, 1e-11, id="fp64"),
    ],
)
def test_three_steps_of_stock_and_three_of_ours_are_six_of_stock(dtype, tolerance, tmp_path):
    [(losses, weights)] = run_ranks(1, stock_run, str(tmp_path / "stock"), dtype)
    for world in (1, 2):
        for first, second in run_ranks(world, goes_on, str(tmp_path / "stock"), str(tmp_path / f"w{world}"), dtype):
            for steps, found, end in (first, second):
                assert steps[-1] == STEPS
                assert found == pytest.approx(losses, rel=1e-4)  # the log rounds
                assert (end.double() - weights.double()).norm() <= tolerance * weights.double().norm()
            assert first[0] == [4, 5, 6]
            assert second[0] == [6]


# ------------------------------------------------------------------------------------------------ what cannot be mapped


@pytest.fixture(scope="module")
def stock():
    with memory_folder() as folder:
        stock_trainer(folder).train()
        yield folder


def cut(path, name, keep):
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: int(len(data) * keep)])


def rewrite(name, change):
    def action(path):
        state = torch.load(path / name, weights_only=True)
        torch.save(change(state) or state, path / name)

    return action


REFUSED = {
    "FSDP": (lambda path: (path / "pytorch_model_fsdp_0").mkdir(), "written with FSDP"),
    "cut optimizer": (lambda path: cut(path, "optimizer.pt", 0.5), "'optimizer.pt' cannot be read"),
    "cut weights": (lambda path: cut(path, "model.safetensors", 0.5), "model.safetensors"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "there is no .model.safetensors"),
    "other groups": (rewrite("optimizer.pt", lambda s: s["param_groups"][0]["params"].pop() and None), "parameter groups"),
    "empty state": (rewrite("optimizer.pt", lambda s: s["state"].clear()), "holds no state of AdamW"),
    "adafactor": (rewrite("optimizer.pt", lambda s: s["param_groups"][0].update(clip_threshold=1.0)), "another optimizer"),
    "factored": (rewrite("optimizer.pt", lambda s: s["state"][0].update(exp_avg=torch.zeros(3))), "exp_avg of"),
    "another scheduler": (rewrite("scheduler.pt", lambda s: {"best": 1.0}), "another scheduler"),
    "no state": (rewrite("optimizer.pt", lambda s: [1]), "holds no state"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped_is_refused(case, stock, tmp_path):
    damage, message = REFUSED[case]
    path = tmp_path / "checkpoint-3"
    shutil.copytree(stock / "checkpoint-3", path)
    damage(path)
    trainer = make_trainer(str(tmp_path / "out"), 1, max_steps=STEPS)
    with pytest.raises(HotspaError, match=message):
        train(trainer, str(path))
    assert trainer.state.global_step in (0, 3)
    assert not list((tmp_path / "out").glob("checkpoint-*"))


class Harmful:
    def __reduce__(self):
        return print, ("this ran",)


def test_a_pickle_that_runs_code_is_refused(stock, tmp_path, capsys):
    path = tmp_path / "checkpoint-3"
    shutil.copytree(stock / "checkpoint-3", path)
    torch.save({"state": Harmful(), "param_groups": []}, path / "optimizer.pt")
    torch.save(Harmful(), path / "training_args.bin")
    with pytest.raises(DamagedCheckpointError, match=r"optimizer\.pt"):
        train(make_trainer(str(tmp_path / "out"), 1), str(path))
    assert "this ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [{"hotspa_mini_batch_size": 5}, {"hotspa_mini_batch_size": 8}, {"rows": 10}], ids=str
)
def test_other_mini_batches_are_refused(options, stock, tmp_path):
    if "rows" in options:
        options = {"rows": random_rows(options["rows"], 163, longest=60, seed=3)}
    with pytest.raises(ResumeError, match="sequences would be trained twice or not at all"):
        train(make_trainer(str(tmp_path), 1, **options), str(stock / "checkpoint-3"))
    if "rows" not in options:
        allowed = make_trainer(str(tmp_path), 1, hotspa_allow_data_order_change=True, max_steps=4, **options)
        assert list(train(allowed, str(stock / "checkpoint-3"))) == [4]


def test_the_epoch_of_every_split_of_a_mini_batch():
    # 20 rows, 6 in a step: on one process; 2 a device, 3 accumulated; 3 processes; with 7 steps in all epochs short ones
    assert _epochs(5, 20, 4, 6, 6, False) == {1.25}
    assert _epochs(2, 20, 4, 2, 6, False) == {0.6, 0.5}  # 6 of 10 micro-batches, or 2 of 4 with three processes
    assert _epochs(4, 20, 4, 2, 6, False) == {1.0}
    assert _epochs(4, 20, 3, 6, 6, True) == {4 / 3}
    assert _epochs(4, 20, 4, 4, 6, False) == set()
    assert _epochs(4, 20, 5, 6, 6, False) == set()


def test_true_takes_the_newest_that_can_be_gone_on_from(stock, tmp_path, caplog):
    shutil.copytree(stock, tmp_path / "out")
    cut(tmp_path / "out" / "checkpoint-6", "optimizer.pt", 0.9)
    assert list(train(make_trainer(str(tmp_path / "out"), 1, max_steps=7), True)) == [6, 7]
    assert "checkpoint-6 is skipped" in caplog.text
    assert is_stock(tmp_path / "out" / "checkpoint-3")
    assert not is_stock(tmp_path / "out" / "checkpoint-7")
    assert StockCheckpoint.open(stock / "checkpoint-6").trainer_state["global_step"] == 6


# ------------------------------------------------------------------------------------------------ the other direction


def test_the_stock_trainer_goes_on_from_weights_and_step_of_ours(tmp_path):
    trainer = make_trainer(str(tmp_path / "ours"), 1, family=FAMILY, max_steps=3, save_steps=3)
    train(trainer)
    again = stock_trainer(tmp_path / "stock", seed=5, max_steps=4, learning_rate=0.0, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert again.state.global_step == 4
    for name, weight in trainer.model.named_parameters():
        assert torch.equal(again.model.get_parameter(name), weight), name


STOCK_FILES = {"optimizer.pt", "scheduler.pt", "training_args.bin"}


def writes_for_stock(rank, world, folder, dtype):
    # every step is saved; each is written in the background while the next one is trained
    options = {"hotspa_stock_checkpoints": True, "hotspa_async_save": True, "model": {"dtype": dtype}}
    with exact_in_double(dtype):
        train(make_trainer(folder, world, family=FAMILY, max_steps=STEPS, **options))


@pytest.mark.parametrize(
    ("world", "dtype", "tolerance"),
    [pytest.param(1, torch.float64, 1e-11, marks=pytest.mark.slow), (2, torch.float32, 2e-6)],
)
def test_three_steps_of_ours_and_three_of_stock_are_six_of_stock(world, dtype, tolerance, tmp_path):
    """With its optimizer, scheduler and random states: nothing begins anew; the end is that of one stock run."""
    [(losses, weights)] = run_ranks(1, stock_run, str(tmp_path / "stock"), dtype)
    run_ranks(world, writes_for_stock, str(tmp_path / "ours"), dtype)
    path = tmp_path / "ours" / "checkpoint-3"
    files = {file.name for file in verify(path).files}
    random = {"rng_state.pth"} if world == 1 else {"rng_state_0.pth", "rng_state_1.pth"}
    assert files >= STOCK_FILES | random
    assert torch.load(path / "training_args.bin", weights_only=False).learning_rate == 1e-2
    for name in files & {"optimizer.pt", "scheduler.pt"}:  # as the stock Trainer loads them
        torch.load(path / name, weights_only=True)
    ((found, end),) = run_ranks(1, stock_goes_on, str(path), str(tmp_path / "again"), dtype)
    assert found == pytest.approx({step: loss for step, loss in losses.items() if step > 3}, rel=1e-4)
    assert (end.double() - weights.double()).norm() <= tolerance * weights.double().norm()


def stock_goes_on(rank, world, checkpoint, folder, dtype):
    with exact_in_double(dtype):
        trainer = stock_trainer(folder, dtype, seed=5, save_strategy="no")
        trainer.train(resume_from_checkpoint=checkpoint)
    logs, weights = losses_and_weights(trainer)
    return {step: loss for step, loss in logs.items() if step > 3}, weights


def test_without_the_flag_and_with_the_model_alone_nothing_is_left_for_stock(tmp_path):
    options = {"max_steps": 1, "save_only_model": True, "hotspa_stock_checkpoints": True}
    trainer = make_trainer(str(tmp_path / "only"), 1, **options)
    train(trainer)
    names = {file.name for file in verify(tmp_path / "only" / "checkpoint-1").files}
    assert names & {*STOCK_FILES, "rng_state.pth"} == {"training_args.bin"}
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "training_args.bin").exists()


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_in_bf16_is_saved_in_bf16(background, tmp_path):
    """In several files, written by two ranks; the model alone is exported, too."""
    options = {"family": FAMILY, "max_steps": 1, "hotspa_async_save": background, "model": {"dtype": torch.bfloat16}}
    for kind in ("all", "only"):
        run_ranks(2, small_files, str(tmp_path / kind), {**options, "save_only_model": kind == "only"})
        path = tmp_path / kind / "checkpoint-1"
        model = AutoModelForCausalLM.from_pretrained(path)
        assert model.dtype == torch.bfloat16
        assert len(list(path.glob("model-*.safetensors"))) > 2
        manifest = verify(path)
        assert manifest == read_manifest(path)
        assert (path / "hotspa").exists() == manifest.has_masters == (kind == "all")
        files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
        assert files == {"MANIFEST.json", *(file.name for file in manifest.files)}
        for dtype in ("bfloat16", "float32"):
            export(path, tmp_path / f"{kind}-{dtype}", dtype=dtype)
            exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}-{dtype}")
            assert exported.dtype == getattr(torch, dtype)
            for name, weight in model.named_parameters():
                assert torch.equal(exported.get_parameter(name).to(torch.bfloat16), weight), name


def small_files(rank, world, folder, options):
    original = model_files.named_shards

    def smaller(entries, limit, adapted=False):
        return original(entries, 20_000, adapted)

    model_files.named_shards = smaller
    train(make_trainer(folder, world, **options))
