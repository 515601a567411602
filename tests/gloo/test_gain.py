"""What switching gains, measured on the rows of a run: on all sides the same rows, and nothing of the trainer changes."""

from pathlib import Path

import pytest
import torch

from hf_hotspa.costs.terms import Cost, Hop
from hf_hotspa.errors import HotspaError
from hf_hotspa.reporting.run_log import read_run_log
from hf_hotspa.reporting.summary import verdict
from hf_hotspa.trainer import gain as module
from hf_hotspa.trainer.gain import measure_gain
from tests import training_runs
from tests.calibrations import made_calibration
from tests.families import tiny_model
from tests.gloo.test_auto import LIMITED, data_of
from tests.harness import run_ranks
from tests.oracle import random_rows

pytestmark = pytest.mark.gloo

FAMILY = "llama_gqa_bias"


def make_trainer(folder, strategies, rows=None, dtype=torch.float32, **options):
    rows = random_rows(24, 163, longest=60, seed=3) if rows is None else rows
    settings = {"max_steps": 2, "hotspa_mini_batch_size": 8, "save_strategy": "no", "hotspa_report": True, **options}
    given = tiny_model(FAMILY, dtype)
    return training_runs.make_trainer(folder, 2, given=given, rows=rows, hotspa_strategies=strategies, **settings)


def train_twice(folder, measured, **options):
    """Weights, optimizer state, random state and state of the strategies after two trainings, with a measurement between."""
    rows = data_of(2, tiny_model(FAMILY).config.vocab_size)
    trainer = make_trainer(folder, "auto", rows, torch.float64, **options)
    trainer.train()
    gain = measure_gain(trainer, steps=2) if measured else None
    generator = torch.random.get_rng_state()
    trainer.train()
    state = [value.clone() for slots in trainer.optimizer.state.values() for value in slots.values()]
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    chosen = trainer._hotspa.watchers.plan.choices.state_dict()["chooser"]
    trainer.close_engine()
    return gain, weights, state, generator, {name: chosen[name] for name in ("num_trained", "previous", "seen")}


def both(rank, world_size, folder):
    cache = Path(folder) / "calibration.json"
    if rank == 0:
        costs = {1: Cost(1e-9, 4e-6, 1e-5), 2: Cost(1e-9, 2.5e-6, 2e-5)}
        made_calibration(tiny_model(FAMILY, torch.float64), world_size, costs, hop=Hop(1e-2, 1e-5)).save(cache)
    torch.distributed.barrier()
    # fully sharded, too, one replica does not hold the longest rows: auto switches
    options = {"hotspa_calibration": str(cache), **LIMITED, "hotspa_memory_limit_mb": 2}
    plain = train_twice(f"{folder}/plain", False, **options)
    return plain[1:], train_twice(f"{folder}/measured", True, **options)


def same(mine, other):
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, other)
    if isinstance(mine, list):
        return len(mine) == len(other) and all(map(same, mine, other))
    return mine == other


@pytest.mark.timeout(600)
def test_training_goes_on_bit_by_bit_as_if_nothing_had_been_measured(tmp_path):
    for plain, (gain, *measured) in run_ranks(2, both, str(tmp_path)):
        assert [same(a, b) for a, b in zip(plain, measured, strict=True)] == [True] * 4
        assert len(gain.switching) == 2
        assert list(gain.singles) == ["tp2+sp+z3", "dp2+rc+z3", "pp2+rc"]
        assert gain.left_out["dp2"] == "does not fit in 2 MiB"


def of_given_strategies(rank, world_size, folder):
    trainer = make_trainer(folder, "dp2:16@32,tp2:48", hotspa_overlong="truncate")
    trainer.train()
    trainer.save_model(folder)  # by the main process alone: its config has fields now that the others' have not
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.close_engine()
    seen, forward_backward = [], module.HotSPaEngine.forward_backward

    def spied(engine, mini_batch, *rest):
        plan = mini_batch.plan
        assert max(s.stop - s.start for s in plan.sequences()) <= 48
        seen.append(
            (sorted((s.row, s.start, s.stop) for s in plan.sequences()), [str(p.bucket.strategy) for p in plan.phases])
        )
        return forward_backward(engine, mini_batch, *rest)

    module.HotSPaEngine.forward_backward = spied
    gain = module.measure_gain(trainer, steps=3)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert trainer.engine is None
    return gain, seen


@pytest.mark.timeout(600)
def test_sides_take_turns_on_the_same_rows_and_the_report_has_the_answer(tmp_path):
    (gain, seen), (other, _) = run_ranks(2, of_given_strategies, str(tmp_path))
    assert gain == other
    assert list(gain.singles) == ["tp2"]
    assert gain.left_out == dict.fromkeys(
        ("dp2", "dp2+z3", "pp2"), "without a calibration nobody knows whether it fits"
    )
    assert len(gain.switching) == len(gain.singles["tp2"]) == 3
    assert gain.loss_difference < 1e-5
    rows, ran = [rows for rows, _ in seen], [strategies for _, strategies in seen]
    assert len(seen) == 8
    for first in range(0, 8, 2):
        assert rows[first] == rows[first + 1]
    assert rows[0] == rows[2] != rows[4] != rows[6]
    switching = ["dp2" in strategies for strategies in ran]
    assert switching == [False, True, True, False, False, True, True, False]
    assert all(strategies == ["tp2"] for strategies, hot in zip(ran, switching, strict=True) if not hot)
    assert ["dp2", "tp2"] in ran
    run = read_run_log(tmp_path)
    assert run.gain == gain
    assert run.ended
    assert verdict(run)[0] == gain.sentence
    page = Path(tmp_path, "hotspa_report", "report.html").read_text()
    assert all(sentence in page for sentence in gain.sentences)


def refused(rank, world_size, folder):
    said = []
    for strategies, steps in (("dp2:16@32,tp2:60", 0), ("auto", 1)):
        try:
            measure_gain(make_trainer(folder, strategies), steps=steps)
        except HotspaError as error:
            said.append(str(error))
    trainer = make_trainer(folder, "dp2:16@32,cp2:60")  # the single strategy is one with context parallelism
    trainer.train()
    return said, measure_gain(make_trainer(folder, "tp2:60")), measure_gain(trainer, steps=1)


def test_what_cannot_be_measured_and_what_can_beside_cp(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOTSPA_CACHE", str(tmp_path / "cache"))
    found = run_ranks(2, refused, str(tmp_path))
    assert found[0] == found[1]
    (none, untrained), one, of_cp = found[0]
    assert "0 mini-batches" in none
    assert "nothing was trained" in untrained
    assert one is None
    assert list(of_cp.singles) == ["cp2"]
    assert of_cp.loss_difference < 1e-5
