"""DeepSpeed's CPU Adam on the master store, and runs from DeepSpeed's JSON configs, on two ranks."""

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hf_hotspa.checkpoint.tensors import CPU_ADAM
from hf_hotspa.trainer.cpu_adam import load_cpu_adam
from tests.harness import run_ranks
from tests.training_runs import contents, make_trainer, newest, one_run, same_bits, several_runs, train, whole_state

pytestmark = pytest.mark.gloo

STEPS = 10
RUN = {"max_steps": STEPS, "save_steps": 5, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}


@pytest.fixture(scope="module")
def kernel():
    """Compiled here if it never was, which takes a minute: ranks find it in torch's cache."""
    assert load_cpu_adam() is None


def cpu_adam_world(rank, world_size, folder):
    """Ten steps of each, and the second half of the one from the checkpoint of either."""
    found = {}
    for name, options, resume in [
        ("torch", {}, None),
        ("cpu", {"hotspa_offload": "master"}, None),
        ("cpu again", {"hotspa_offload": "master"}, f"{folder}/cpu/checkpoint-5"),
        ("cpu from torch", {"hotspa_offload": "master"}, f"{folder}/torch/checkpoint-5"),
        ("torch from cpu", {}, f"{folder}/cpu/checkpoint-5"),
    ]:
        trainer = make_trainer(f"{folder}/{name}", world_size, **RUN, **options)
        found[name] = train(trainer, resume)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("kernel")
def test_cpu_adam_steps_as_torchs_adamw_and_resumes_to_the_bit(tmp_path):
    losses = run_ranks(2, cpu_adam_world, str(tmp_path))
    assert losses[0] == losses[1]
    paths = {name: newest(tmp_path / name) for name in losses[0]}
    states = {name: whole_state(path) for name, path in paths.items()}
    classes = {
        name: json.loads((path / "hotspa" / "state.json").read_text())["optimizer"] for name, path in paths.items()
    }
    assert {name: found["class"] for name, found in classes.items()} == {
        "torch": "AdamW", "cpu": CPU_ADAM, "cpu again": CPU_ADAM, "cpu from torch": CPU_ADAM, "torch from cpu": "AdamW",
    }  # fmt: skip
    start = whole_state(tmp_path / "torch" / "checkpoint-5")
    moved, largest = False, 0.0
    for name, expected in states["torch"].items():
        for other in ("cpu", "cpu from torch", "torch from cpu"):
            found = states[other][name]
            difference = (found.double() - expected.double()).abs().max()
            assert difference <= 1e-6 * max(1.0, float(expected.double().abs().max())), (name, other)
            largest = max(largest, float(difference))
        moved |= name.startswith("weight/") and not torch.allclose(start[name], expected, atol=1e-4)
    assert moved
    print(f"largest difference of a weight or a state after {STEPS} steps: {largest:.1e}")
    assert not same_bits(states["cpu"], states["torch"])  # it was another kernel
    assert same_bits(states["cpu again"], states["cpu"])
    assert contents(paths["cpu again"])["trainer_state"] == contents(paths["cpu"])["trainer_state"]


def without_on_one_rank(rank, world_size, folder, lacking):
    """Two runs, in the first of which one rank has no DeepSpeed; returns what was logged."""
    import logging

    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("hf_hotspa.trainer.master_optimizer").addHandler(handler)
    missing = dict.fromkeys(("deepspeed", "deepspeed.ops.op_builder.cpu")) if rank == lacking else {}
    with patch.dict(sys.modules, missing):
        one_run(rank, world_size, f"{folder}/without", None, RUN | {"max_steps": 2, "hotspa_offload": "master"})
    one_run(rank, world_size, f"{folder}/torch", None, RUN | {"max_steps": 2})
    return texts


@pytest.mark.parametrize("lacking", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_where_a_rank_does_not_have_it_all_use_torchs(lacking, tmp_path, request):
    if lacking == 1:
        request.getfixturevalue("kernel")  # rank 0 has it
    texts = run_ranks(2, without_on_one_rank, str(tmp_path), lacking)
    [text] = texts[0]
    assert "the optimizer is torch's AdamW" in text
    assert ("DeepSpeed cannot be imported" if lacking == 0 else "another rank does not have it") in text
    assert texts[1] == []
    assert same_bits(whole_state(newest(tmp_path / "without")), whole_state(newest(tmp_path / "torch")))


# -- runs from a config -----------------------------------------------------------------------------------------------

PLAIN = {
    "max_grad_norm": 0.25, "learning_rate": 2e-3, "weight_decay": 0.2, "adam_beta2": 0.98, "hotspa_mini_batch_size": 4,
}  # fmt: skip


def config(stage, **more):
    return {
        "train_batch_size": 4,
        "gradient_clipping": 0.25,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "contiguous_gradients": True},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-3, "betas": [0.9, 0.98], "eps": "auto", "weight_decay": 0.2},
        },
        **more,
    }


UNSET = {"learning_rate": 5e-5, "weight_decay": 0.0, "hotspa_mini_batch_size": None}
"""The defaults, instead of what `make_trainer` gives."""


def config_world(rank, world_size, folder, stages):
    common = {"max_steps": 2, "save_steps": 2, "warmup_steps": 0}
    runs = [(f"{folder}/plain", None, common | PLAIN)]
    for stage in stages:
        path = Path(folder) / f"ds{stage}-{rank}.json"
        path.write_text(json.dumps(config(stage)))
        runs.append((f"{folder}/stage{stage}", None, common | UNSET | {"deepspeed": str(path)}))
    scheduler = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}}
    scheduled = config(2, scheduler=scheduler, bf16={"enabled": "auto"})
    scheduled["optimizer"]["params"]["lr"] = "auto"
    scheduled["scheduler"]["params"] |= {"warmup_max_lr": 4e-3, "warmup_min_lr": 1e-3}
    options = UNSET | {"warmup_steps": 0, "deepspeed": scheduled, "max_steps": 5, "save_steps": 3}
    with redirect_stdout(io.StringIO()) as printed:
        losses = several_runs(rank, world_size, runs)
    trainer = make_trainer(f"{folder}/scheduled", world_size, **options)
    train(trainer)
    again = make_trainer(f"{folder}/again", world_size, **options)
    train(again, f"{folder}/scheduled/checkpoint-3")
    rates = [[log["learning_rate"] for log in t.state.log_history if "learning_rate" in log] for t in (trainer, again)]
    return losses, rates, printed.getvalue().count("the DeepSpeed config:")


@pytest.mark.parametrize("stages", [(3,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=["3", "1, 2"])
def test_runs_from_a_config_are_those_of_the_plain_flags(tmp_path, stages):
    (losses, rates, tables), other = run_ranks(2, config_world, str(tmp_path), stages)
    assert other == (losses, rates, 0)
    assert tables == len(stages)
    assert all(found == losses[0] for found in losses)
    expected = whole_state(newest(tmp_path / "plain"))
    for stage in stages:
        assert same_bits(whole_state(newest(tmp_path / f"stage{stage}")), expected), stage
    # iterations 0 and 1 of the warm-up from the second step on, then down towards iteration 5
    assert rates[0] == pytest.approx([1e-3, 1e-3, 4e-3, 4e-3, 3e-3], rel=1e-12)
    assert rates[1] == rates[0]  # its history is that of the first three steps and its own
    assert same_bits(whole_state(newest(tmp_path / "again")), whole_state(newest(tmp_path / "scheduled")))
