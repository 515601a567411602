"""Stages that update by themselves: PipeDream's rule in one process is the reference."""

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_hotspa.data.collator import MiniBatch
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.errors import HotspaError
from hf_hotspa.features.pipedream.mode import PipeDream
from hf_hotspa.features.pipedream.stage_updates import PipeDreamRunner
from hf_hotspa.packing.pipeline_order import choose_passes
from tests.checkpoints import memory_folder
from tests.families import tiny_model
from tests.gloo.test_preemption import evaluate_every
from tests.gloo.test_resume import train_without_steps
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows, reference_step, relative_error
from tests.training_runs import contents, make_trainer, newest, one_run, same_bits, train, whole_state
from tests.worlds import make_engine, make_mini_batch

pytestmark = pytest.mark.gloo

FAMILY = "llama_gqa_bias"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def start(model: PreTrainedModel, buckets: str, mode: PipeDream, optimizer: str = "adamw") -> HotSPaEngine:
    """An engine whose stages update by themselves."""
    engine = make_engine(model, buckets, features=(mode,))
    assert engine.updates is not None
    engine.updates.step = OPTIMIZERS[optimizer]([p for _, p in engine.named_parameters()]).step
    return engine


@dataclass
class Simulation:
    """PipeDream's rule in one process: every stage has the weights of its own, older or newer, version.

    Args:
        stages: By parameter, its stage.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    stages: dict[str, int]
    mode: PipeDream

    def train(self, mini_batch: MiniBatch, rows: list[dict[str, Any]]) -> tuple[float, float]:
        """The loss of a mini-batch and its norm of gradients, as the engine reports them."""
        phase, depth = mini_batch.plan.phases[0], 1 + max(self.stages.values())
        longest = [pack.num_tokens for pack in max(phase.replicas, key=len)]
        passes = choose_passes("own", longest, depth, phase.bucket.most_tokens)
        versions = [self.mode.pack_versions(passes, stage) for stage in range(depth)]
        parameters = dict(self.model.named_parameters())
        history = [{name: p.detach().clone() for name, p in parameters.items()}]
        loss, squares = 0.0, list[float]()
        for k in range(len(longest)):
            packs = [packs[k] for packs in phase.replicas if k < len(packs)]
            for name, p in parameters.items():
                p.data = history[versions[self.stages[name]][k]][name].clone()
            of_pack, _ = reference_step(self.model, [rows[s.row] for pack in packs for s in pack.sequences])
            labels = sum(pack.num_labels for pack in packs)
            loss += of_pack * labels / mini_batch.num_labels
            norms = dict.fromkeys(self.stages.values(), 0.0)
            for name, p in parameters.items():
                p.data = history[k][name].clone()
                norms[self.stages[name]] += float(p.grad.square().sum()) if p.grad is not None else 0.0
            squares.append(sum(norms.values()))
            if self.mode.max_norm is not None:
                for name, p in parameters.items():
                    p.grad *= min(1.0, self.mode.max_norm / (norms[self.stages[name]] ** 0.5 + 1e-6))
            self.optimizer.step()
            history.append({name: p.detach().clone() for name, p in parameters.items()})
        return loss, (sum(squares) / len(squares)) ** 0.5


def stages_of(engine: HotSPaEngine) -> dict[str, int]:
    """By parameter, the stage whose ranks own it."""
    vector, layout = engine.description.vector, engine.master.layout
    size = engine.buckets[0].strategy.stage_size
    owner = {
        index: next(rank for rank in range(engine.world_size) if layout.sizes[rank][index]) // size
        for index in range(len(vector.segments))
    }
    return {spec.name: owner[vector.segment_of(spec).index] for spec in vector.specs}


def against_simulation(rank: int, world_size: int, cases: list[tuple[str, PipeDream, str, int]]) -> list[list[float]]:
    """The worst relative errors of loss, norm and weights after three mini-batches, for each case."""
    found = []
    for buckets, mode, optimizer, num_rows in cases:
        model = tiny_model(FAMILY, torch.float64)
        engine = start(model, buckets, mode, optimizer)
        reference = tiny_model(FAMILY, torch.float64)
        simulation = Simulation(reference, OPTIMIZERS[optimizer](reference.parameters()), stages_of(engine), mode)
        errors = []
        for seed in range(3):
            rows = random_rows(num_rows, model.config.vocab_size, longest=40, seed=seed)
            mini_batch = make_mini_batch(engine, rows)
            with exact_in_double(torch.float64):
                report = engine.forward_backward(mini_batch)
            loss, norm = simulation.train(mini_batch, rows)
            errors += [abs(report.loss - loss) / loss, abs(engine.grad_norm - norm) / norm]
        weights = dict(reference.named_parameters())
        errors += [relative_error(whole, weights[name].detach()) for name, whole in engine.weights()]
        found.append(errors)
        (runner,) = engine.phases.values()
        assert isinstance(runner, PipeDreamRunner)
        assert runner.most_held <= mode.most_versions(runner.mesh.strategy.pp, runner.mesh.coord.pp)
        engine.close()
    return found


TWO = [
    ("pp2:40@44", PipeDream(), "adamw", 9),
    ("pp2+rc:40@44", PipeDream(vertical_sync=True, max_norm=0.5), "momentum", 9),
]
FOUR = [
    ("pp4:40@44", PipeDream(), "momentum", 17),
    ("dp2pp2:40@44", PipeDream(vertical_sync=True, max_norm=0.5), "adamw", 13),
]
MORE = [
    ("pp4:40@44", PipeDream(vertical_sync=True), "adamw", 17),
    ("pp4:40@9", PipeDream(), "adamw", 17),  # long packs wait
    ("dp2pp2:40@44", PipeDream(max_norm=0.5), "adamw", 13),
    ("tp2pp2+sp:40@44", PipeDream(), "momentum", 7),
]


def one_in_flight(rank: int, world_size: int) -> bool:
    """Whether mini-batches of one pack, trained in both modes, leave the same bits of losses and weights."""
    ends = []
    for mode in ((), (PipeDream(),)):
        model, losses = tiny_model(FAMILY), list[torch.Tensor]()
        engine = make_engine(model, "pp2:40@400", features=mode)
        optimizer = OPTIMIZERS["adamw"]([p for _, p in engine.named_parameters()])
        if engine.updates is not None:
            engine.updates.step = optimizer.step
        for seed in range(4):
            mini_batch = make_mini_batch(engine, random_rows(6, model.config.vocab_size, longest=40, seed=seed))
            assert mini_batch.plan.phases[0].num_packs == 1
            losses.append(torch.tensor(engine.forward_backward(mini_batch).loss))
            optimizer.step()  # with stages that update by themselves, of no effect
        ends.append([*losses, *(whole.clone() for _, whole in engine.weights())])
        engine.close()
    return all(map(torch.equal, *ends))


def refusals(rank: int, world_size: int) -> list[str]:
    """The messages of what cannot be, and of a loss that is not finite."""
    model, messages = tiny_model(FAMILY), []

    def note(run: Callable[[], Any]) -> None:
        with pytest.raises(HotspaError) as caught:
            run()
        messages.append(str(caught.value))

    note(lambda: make_engine(model, "dp2:40", features=(PipeDream(),)))
    tied = tiny_model("qwen3_qk_norm_tied")
    note(lambda: make_engine(tied, "pp2:40", features=(PipeDream(),)))
    note(lambda: make_engine(model, "pp2:40", features=(PipeDream(),), overlap_load=True))
    note(lambda: make_engine(model, "pp2:40", features=(PipeDream(vertical_sync=rank == 0),)))
    note(lambda: PipeDream(max_norm=0.0))
    engine = make_engine(model, "pp2:40@44", features=(PipeDream(),))
    mini_batch = make_mini_batch(engine, random_rows(9, model.config.vocab_size, longest=40))
    note(lambda: engine.forward_backward(mini_batch))  # without an optimizer
    note(lambda: engine.clip_grad_norm_(1.0))
    engine.close()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    engine = start(model, "pp2:40@44", PipeDream())
    note(lambda: engine.forward_backward(mini_batch))
    assert torch.isfinite(torch.cat([w for w in engine.master.weights if w is not None])).all() == (rank == 0)
    engine.close()
    return messages


REFUSED = [
    ("strategy dp2", "nothing is in flight"),
    ("tied weight", "tie_word_embeddings=False"),
    ("beside the computation", "leave overlap_load"),
    ("engine option pipedream", "rank"),
    ("norm 0.0", "use for example 1.0"),
    ("no optimizer", "engine.updates.step"),
    ("global norm", "max_norm"),
    ("is not finite", "have already changed the weights"),
]


def on_two_ranks(rank: int, world_size: int) -> tuple[list[list[float]], bool, list[str]]:
    return against_simulation(rank, world_size, TWO), one_in_flight(rank, world_size), refusals(rank, world_size)


@pytest.mark.slow
def test_two_stages() -> None:
    """Equal to PipeDream's rule in one process; with one pack in flight to synchronous training; refusals on all ranks."""
    for simulated, same, messages in run_ranks(2, on_two_ranks):
        for case, errors in zip(TWO, simulated, strict=True):
            assert max(errors) <= 1e-11, case
        assert same
        for (what, fix), message in zip(REFUSED, messages, strict=True):
            assert what in message, message
            assert fix in message, message


@pytest.mark.parametrize("cases", [FOUR, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_weights_are_those_of_pipedreams_rule_in_one_process(cases: list[tuple[str, PipeDream, str, int]]) -> None:
    for found in run_ranks(4, against_simulation, cases):
        for case, errors in zip(cases, found, strict=True):
            assert max(errors) <= 1e-11, case


RUN: dict[str, Any] = {
    "family": FAMILY, "hotspa_strategies": "pp2:60@48", "hotspa_pipeline_mode": "pipedream", "hotspa_clip_per_stage": True,
    "max_grad_norm": 0.5, "hotspa_mini_batch_size": 6, "save_steps": 3,
}  # fmt: skip


SYNCHRONOUS: dict[str, Any] = {"family": FAMILY, "hotspa_strategies": "dp2:60", "save_steps": 3}


def trainer_runs(rank: int, world_size: int, folder: str) -> list[Any]:
    """A run, the same resumed, and its checkpoint taken over by a synchronous run and given back."""
    found: list[Any] = []
    runs: tuple[tuple[str, str | None, dict[str, Any]], ...] = (
        ("whole", None, RUN),
        ("resumed", f"{folder}/whole/checkpoint-3", RUN),
        ("synchronous", f"{folder}/whole/checkpoint-3", {**SYNCHRONOUS, "max_steps": 3}),
        ("back", f"{folder}/synchronous/checkpoint-3", {**RUN, "hotspa_mini_batch_size": 4, "max_steps": 3}),
    )
    for name, resume, options in runs:
        trainer = make_trainer(f"{folder}/{name}", world_size, model_seed=5, **{"max_steps": 5, **options})
        evaluate_every(trainer, 2)
        trainer.args.hotspa_allow_data_order_change = True
        with redirect_stdout(StringIO()) as printed:
            losses = train(trainer, resume) if "max_steps" not in options else train_without_steps(trainer, resume)
        rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
        evaluated = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        found.append(((losses, rates, evaluated), printed.getvalue()))
    return found


def test_the_trainer_saves_resumes_and_evaluates_between_mini_batches() -> None:
    with memory_folder() as folder:
        ranks = run_ranks(2, trainer_runs, str(folder))
        for (whole, _), (resumed, _), _, _ in ranks:
            assert list(whole[0]) == [1, 2, 3, 4, 5]
            assert resumed[0] == {step: loss for step, loss in whole[0].items() if step > 3}
            assert resumed[1:] == whole[1:]  # learning rates change once a mini-batch; evaluations see all updates
            assert len(set(whole[1])) == 5
            assert len(whole[2]) == 3  # and at the end
        ends = [contents(newest(folder / name)) for name in ("whole", "resumed")]
        for end in ends:
            del end["trainer_state"]  # it has the seconds of evaluations
        assert ends[0] == ends[1]
        saved = whole_state(folder / "whole" / "checkpoint-3")
        for name in ("synchronous", "back"):
            assert same_bits(whole_state(newest(folder / name)), saved)
    (_, printed), _, (_, of_synchronous), _ = ranks[0]
    assert "not the synchronous update" in printed
    assert "behind by 1, 0 packs on stages 0 to 1" in printed
    assert "not the synchronous update" not in of_synchronous


@pytest.mark.slow
def test_a_run_goes_on_on_another_number_of_ranks() -> None:
    """Stages update at once by the gradients of a loss that the Trainer multiplies by the number of ranks."""
    with memory_folder() as folder:
        run_ranks(2, one_run, str(folder / "two"), None, {**RUN, "max_steps": 3})
        options = {**RUN, "hotspa_strategies": "dp2pp2:60@48", "max_steps": 5}
        checkpoint = str(folder / "two" / "checkpoint-3")
        first, *others = run_ranks(4, one_run, str(folder / "four"), checkpoint, options)
        assert list(first) == [4, 5]
        assert all(found == first for found in others)
