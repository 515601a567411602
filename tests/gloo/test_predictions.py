"""Predicted seconds with strategies of one's own: from a file, from the cache, or not at all; they decide nothing."""

import dataclasses
import logging
import os
from pathlib import Path

import pytest

from hf_hotspa.reporting.run_log import read_run_log
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import random_rows
from tests.training_runs import make_trainer

pytestmark = pytest.mark.gloo


def calibration_for(world_size):
    from hf_hotspa.costs.terms import Cost
    from tests.calibrations import made_calibration

    costs = {1: Cost(1e-9, 4e-6, 1e-5), 2: Cost(1e-9, 2.5e-6, 2e-5)}
    return made_calibration(tiny_model("llama_gqa_bias"), world_size, costs)


def train(folder, **options):
    rows = random_rows(24, 163, longest=60, seed=3)
    settings = {"max_steps": 2, "hotspa_mini_batch_size": 8, "save_strategy": "no", "hotspa_report": True}
    trainer = make_trainer(folder, 2, family="llama_gqa_bias", rows=rows, **settings, **options)
    trainer.train()
    predicted = [phase.predicted_s for phase in trainer.last_report.phases]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    config, device = trainer.model.config, trainer.args.device
    trainer.close_engine()
    return (
        [log["loss"] for log in logs],
        predicted,
        [log.get("hotspa/prediction_error") for log in logs],
        config,
        device,
    )


def four_runs(rank, world_size, folder, file):
    """Without anything, with a file, with a cache, with a broken cache."""
    import torch
    import torch.distributed as dist

    from hf_hotspa.calibrate.model_calibration import calibration_key

    said, handler = list[str](), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hf_hotspa.trainer.run_plan").addHandler(handler)
    os.environ["HF_HOTSPA_CACHE"] = folder
    *none, config, device = train(f"{folder}/none")
    *given, _, _ = train(f"{folder}/file", hotspa_calibration=file)
    key = calibration_key(
        config, torch.float32, device, world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    )
    path = Path(folder) / "calibration" / f"{key.digest()}.json"
    if rank == 0:
        dataclasses.replace(calibration_for(world_size), key=key).save(path)
    dist.barrier()
    *cached, _, _ = train(f"{folder}/cached")
    assert not any("no predictions" in text for text in said)
    if rank == 0:
        path.write_text(path.read_text()[:100])
    dist.barrier()
    *broken, _, _ = train(f"{folder}/broken")
    return none, given, cached, broken, [text for text in said if "no predictions" in text]


def test_predictions_come_from_a_file_or_the_cache_and_change_nothing(tmp_path):
    file = tmp_path / "calibration.json"
    calibration_for(2).save(file)
    both = run_ranks(2, four_runs, str(tmp_path), str(file))
    for none, given, cached, broken, _ in both:
        assert none[1] == broken[1] == [None, None]
        assert set(none[2]) == set(broken[2]) == {None}
        assert given[1] == cached[1]
        assert all(seconds > 0 for seconds in given[1])
        assert len(given[1]) == 2
        assert all(error >= 0 for error in given[2])
        assert none[0] == given[0] == cached[0] == broken[0]  # the losses
    assert both[0][1][1] == both[1][1][1]
    without, compared = (read_run_log(tmp_path / name) for name in ("none", "file"))
    assert without.facts.single is None
    assert {r.report.single_s for r in without.steps} == {None}
    # what switching is compared with: the best strategy that fits the memory, given or not
    assert compared.facts.single in ("dp2", "tp2", "pp2")
    assert all(r.report.single_s > 0 for r in compared.steps)
    assert "not valid JSON" in both[0][4][0]
    assert both[1][4] == []  # rank 0 reads, rank 0 warns


def limited_run(rank, world_size, folder):
    """With packs as long as the limit allows, and with longer ones."""
    from hf_hotspa.errors import DeviceMemoryError

    os.environ["HF_HOTSPA_CACHE"] = folder  # bytes that another test has measured would decide, instead of the formula
    options = {"hotspa_memory_limit_mb": 2, "hotspa_staging_mb": 1}
    losses = train(folder, **options)[0]
    with pytest.raises(DeviceMemoryError) as caught:
        train(folder, hotspa_strategies="dp2:16@32,tp2:240@400", **options)
    return losses, str(caught.value)


def test_a_limit_counts_the_activations_of_strategies_that_were_given(tmp_path):
    (losses, first), (_, second) = run_ranks(2, limited_run, str(tmp_path))
    assert len(losses) == 2
    assert first == second
    assert "tp2 with packs of 400 tokens needs" in first
    assert "its activations do not fit" in first
    assert "hotspa_memory_limit_mb=2" in first
