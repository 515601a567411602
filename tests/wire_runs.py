"""What is recorded for `tests.wire_rules`: one run of each thing that the package says on a wire, on 2, 4 or 8 ranks.

A case names what it is about, and what a rank does. `traces_of` records cases in one world, one after the other.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.engine.executor import _Stamp
from hf_hotspa.features.pipedream.mode import PipeDream
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.parallel import backends
from hf_hotspa.plan import rounds
from hf_hotspa.strategy import parse_buckets
from tests.families import MIXTURE, tiny_model
from tests.harness import Device, run_ranks
from tests.lora import tiny_lora
from tests.oracle import random_rows
from tests.wire_recorder import Recorder, Trace
from tests.worlds import make_engine, make_mini_batch

FAMILY = "llama_gqa_bias"
Run = Callable[["Case", int, int, str], Any]


@dataclass(frozen=True)
class Case:
    """What a rank runs: `run` with buckets in the user's grammar, and options of the engine or the Trainer."""

    name: str
    world_size: int
    buckets: str
    options: dict[str, Any] = field(default_factory=dict)
    run: str = "engine"
    family: str = FAMILY
    layers: int = 4
    num_rows: int = 9
    is_quick: bool = False  # also in the fast tests

    def __str__(self) -> str:
        return f"{self.name} on {self.world_size}"


# -- what a rank does -------------------------------------------------------------------------------------------------------


def start(case: Case) -> HotSPaEngine:
    """The engine of a case."""
    layers = {"num_hidden_layers": case.layers}
    model = tiny_lora(case.family, model=layers) if case.run == "adapters" else tiny_model(case.family, **layers)
    return make_engine(model, case.buckets, **case.options)


def engine(case: Case, rank: int, world_size: int, folder: str) -> Any:
    """Two mini-batches with a step between them, then a third of few rows; an evaluation with logits; what saves gather."""
    made = start(case)
    vocab_size = made.description.shape.vocab_size
    groups = made.parameter_groups()
    optimizer = torch.optim.SGD(groups, lr=0.01)
    reports = []
    for seed, num_rows in enumerate((case.num_rows, case.num_rows, 2)):
        rows = random_rows(num_rows, vocab_size, longest=60, seed=seed)
        reports.append(made.forward_backward(make_mini_batch(made, rows)))
        optimizer.step()
    batch = make_mini_batch(made, random_rows(5, vocab_size, longest=60, seed=9))
    with made.evaluation() as evaluation:
        evaluation.run(batch, with_logits=True)
    made.full_gradients()
    sum(1 for _ in made.stream(lambda spec: torch.float32, to=0))
    sum(1 for _ in made.stream(lambda spec: torch.float32))
    made.close()
    return reports


def step(case: Case, rank: int, world_size: int, folder: str) -> Any:
    """One mini-batch; its report, and the tokens of this replica's packs by bucket."""
    made = start(case)
    rows = random_rows(case.num_rows, made.description.shape.vocab_size, longest=60, seed=0)
    batch = make_mini_batch(made, rows)
    report = made.forward_backward(batch)
    made.close()
    return report, [[pack.num_tokens for pack in phase.micro_batches] for phase in batch.phases]


def long_stretches(case: Case, rank: int, world_size: int, folder: str) -> Any:
    """The same, with messages from buffer to buffer: several between two ranks in a round."""
    with patch.multiple(rounds, DIRECT_BYTES=256, DIRECT_LIMIT=1 << 11):
        return engine(case, rank, world_size, folder)


def stages(case: Case, rank: int, world_size: int, folder: str) -> None:
    """Stages that update by themselves."""
    made = start(case)
    assert made.updates is not None
    optimizer = torch.optim.SGD([p for _, p in made.named_parameters()], lr=0.05, momentum=0.9)
    made.updates.step = optimizer.step
    for seed in range(2):
        rows = random_rows(case.num_rows, made.description.shape.vocab_size, longest=40, seed=seed)
        made.forward_backward(make_mini_batch(made, rows))
    made.close()


def hand_over(case: Case, rank: int, world_size: int, folder: str) -> None:
    """Columns of slow ranks computed by others, in all ways of sending them."""
    from hf_hotspa.features.slow_devices.flexible_linear import Exchange, flexible_works

    made = start(case)
    for exchange in Exchange:
        for work in flexible_works(made).values():
            work.exchange = exchange
            work.give(tuple((0.5, 0.0, 0.3, 0.0)[r % 4] for r in work.ranks))
        rows = random_rows(case.num_rows, made.description.shape.vocab_size, longest=40)
        made.forward_backward(make_mini_batch(made, rows))
    made.close()


def scoring(case: Case, rank: int, world_size: int, folder: str) -> None:
    """Each rank calls a model with its own rows, as trainers of TRL do: scores, their gradients, and logits."""
    from tests.switched import batch_of, logits_of, rows_of, scores, step, switched

    model = tiny_model(case.family, num_hidden_layers=case.layers)
    called = switched(model, case.buckets, **case.options)
    for seed in range(2):
        batch = batch_of(rows_of(rank, model, 3 + rank % 2, seed=seed))
        step(called, lambda model, batch: scores(model, batch)[0].sum() / 10, batch, double=False)
        step(called, lambda model, batch: logits_of(model, batch).float().square().mean(), batch, double=False)
    called.engine.close()


def heads(case: Case, rank: int, world_size: int, folder: str) -> None:
    """A model with a head of single tokens, trained, and asked for its outputs."""
    from hf_hotspa.switched.model import SwitchedModel
    from tests.token_heads import batch_of, headed, rows

    kind = "single_label_classification"
    called = SwitchedModel(headed(case.family, kind, 3, torch.float32), parse_buckets(case.buckets)).train()
    batch = batch_of(rows(6, kind, 3, rank))
    called(**batch)["loss"].backward()
    called.flush()
    with torch.no_grad():
        called.eval()(**batch)
    called.close()


def images(case: Case, rank: int, world_size: int, folder: str) -> None:
    """Rows with images, of sizes that differ by rank: towers that train, asked for outputs between two steps."""
    from hf_hotspa.switched.model import SwitchedModel
    from tests.vision_models import batch_of_images, rows_with_images, vision_model

    model = vision_model(case.family, torch.float32)
    called = SwitchedModel(model, parse_buckets(case.buckets)).train()
    for seed in range(2):
        batch = batch_of_images(case.family, rows_with_images(case.family, rank, seed), torch.float32)
        called(**batch).loss.backward()
        called.flush()
        with torch.no_grad():
            called(**batch).logits.whole()
    called.close()


def distillation(case: Case, rank: int, world_size: int, folder: str) -> None:
    """A student with a teacher of another size, whose rows and weights move with the student's."""
    from hf_hotspa.switched.teacher import Teacher
    from tests.switched import batch_of, rows_of, step, switched

    student = tiny_model(case.family, num_hidden_layers=case.layers, vocab_size=203)
    called = switched(student, case.buckets, **case.options)
    given = tiny_model(case.family, num_hidden_layers=case.layers + 1, vocab_size=203, hidden_size=96).eval()
    teacher = Teacher(given, called.engine)

    def loss(model: Any, batch: Any) -> Any:
        return model(**batch, against=teacher.against(0.5, 1.0)).divergence.sum() / 37

    for seed in range(2):
        step(called, loss, batch_of(rows_of(rank, student, 3 + rank % 2, seed=seed)), double=False)
    teacher.close()
    called.close()


def trainer(case: Case, rank: int, world_size: int, folder: str) -> None:
    """Training with saves, resumed once, and an evaluation."""
    from tests.training_runs import make_trainer, train

    rows = random_rows(14, 64, longest=60, seed=3)
    options = {"hotspa_strategies": case.buckets, **case.options}
    for steps, resume in ((2, None), (3, True)):
        made = make_trainer(folder, world_size, family=case.family, rows=rows, **{**options, "max_steps": steps})
        train(made, resume)
        made.evaluate(rows[:5])
        made.save_model(f"{folder}/saved")


RUNS: dict[str, Run] = {run.__name__.replace("_", " "): run for run in (
    engine, step, long_stretches, stages, hand_over, scoring, trainer, heads, images, distillation,
)} | {"adapters": engine}  # fmt: skip

# -- cases ------------------------------------------------------------------------------------------------------------------

_ALL_PAIRS = "dp4:10@24,tp4:18@32,pp4:26@40,cp4:34@48,dp2tp2:42@56,tp2pp2:50@64,cp2pp2:62@70"
_BESIDE = {"overlap_load": True, "overlap_return": True}


def _case(name: str, world_size: int, buckets: str, is_quick: bool = False, **more: Any) -> Case:
    fields = {key: more.pop(key) for key in ("run", "family", "layers", "num_rows") if key in more}
    return Case(name, world_size, buckets, more, is_quick=is_quick, **fields)


CASES: tuple[Case, ...] = (
    # -- switches
    _case("switches of all pairs", 4, _ALL_PAIRS, second_source=True, num_rows=24),
    _case("switches over relays", 4, _ALL_PAIRS, second_source=True, num_rows=24, devices_per_node=2),
    _case("switches, direct", 4, _ALL_PAIRS, planner="algorithm1", num_rows=24, staging_bytes=1 << 12),
    _case("switches of long stretches", 4, "dp4:30@40,tp4:40@64,tp2pp2:62@70", run="long stretches", second_source=True),
    _case("switches with the master store on the host", 4, "dp4:30@40,tp2pp2:62@70", offload_master=True),
    _case("overlap", 4, "dp4:20@32,tp4:40@48,tp2pp2:62@70", is_quick=True, **_BESIDE),
    _case("overlap over relays", 4, "dp2tp2:20@32,pp4:40@48,cp2tp2:62@70", devices_per_node=2, second_source=True, **_BESIDE),
    # -- pipelines
    _case("pipeline, own schedule", 4, "pp4:62@64", num_rows=14, pipeline_schedule="own"),
    _case("pipeline, 1F1B of torch", 4, "pp4:62@64", num_rows=14, pipeline_schedule="1f1b"),
    _case("pipeline, GPipe of torch", 4, "pp4:62@64", num_rows=14, pipeline_schedule="gpipe"),
    _case("pipeline, automatic", 4, "dp2pp2:62@64", num_rows=14),
    _case("pipeline, interleaved", 4, "pp4+v2:62@64", layers=8, num_rows=14, pipeline_schedule="own"),
    _case("pipeline, interleaved of torch", 4, "pp4+v2:62@64", layers=8, num_rows=14, pipeline_schedule="1f1b"),
    _case("pipeline, interleaved, replicas", 4, "dp2pp2+v2:62@64", num_rows=9),
    _case("pipeline, interleaved, one pack", 4, "pp4+v2:62@64", layers=8, num_rows=1),
    _case("pipeline, interleaved, tp2", 4, "tp2pp2+v2+sp:62@64", num_rows=9),
    _case("PipeDream", 4, "pp4:40@44", run="stages", features=(PipeDream(),), num_rows=13),
    _case("PipeDream, vertical", 4, "dp2pp2:40@44", run="stages", features=(PipeDream(vertical_sync=True, max_norm=0.5),)),
    _case("token pipeline", 4, "pp4+ck9:62@64", is_quick=True),
    _case("token pipeline, tp2", 4, "tp2pp2+ck13:62@64"),
    _case("token pipeline, interleaved", 4, "dp2pp2+v2+ck9:62@64"),
    _case("token chunks", 4, "dp2tp2+ck13+kh:40@64,tp4+ck9+kg1:62@64"),
    # -- shards
    _case("tensor parallel", 4, "tp4:30@64,dp2tp2+sp+rc:62@64"),
    _case("cp, heads exchanged", 4, "cp4:30@64,cp2tp2:62@64", context_parallel="ulysses"),
    _case("cp, keys gathered", 4, "cp4:30@64,cp2pp2:62@64", context_parallel="allgather"),
    _case("cp, ring", 4, "cp4:30@64,cp2tp2:62@64", context_parallel="ring"),
    _case("cp, chunks", 4, "cp2pp2+ck9:62@64", context_parallel="allgather"),
    _case("experts", 4, "dp4ep4:30@64,dp2tp2ep2:62@64", is_quick=True, family=MIXTURE),
    _case("experts in a pipeline", 4, "dp2pp2ep2:40@64,cp2tp2ep4:62@64", family=MIXTURE),
    _case("weights divided (+z2)", 4, "dp4+z2:40@64,dp2pp2+z2:62@64"),
    _case("weights divided (+z3)", 4, "dp4+z3:40@64,tp2pp2+z3:62@64", is_quick=True, **_BESIDE),
    _case("weights divided, chunks", 4, "pp4+ck19+z3:62@64"),
    _case("columns of slow ranks", 4, "tp4:30@64,tp2pp2:40@64", run="hand over", features=(HandOver(),)),
    # -- callers
    _case("scoring", 4, "dp4:14@64,dp2tp2:40@96,tp2pp2:64@128", run="scoring"),
    _case("heads of single tokens", 4, "dp4:16@64,tp2pp2+ck9:40@128,dp2cp2:64@192", run="heads"),
    _case("images", 4, "dp4:24,dp2tp2:60,cp2tp2+sp:200", run="images", family="qwen3_vl"),
    _case("images, weights divided", 4, "dp2pp2+z2:24,cp4+z3+rc:200", run="images", family="gemma3"),
    _case("distillation", 4, "dp4:14@64,dp2tp2+sp:40@96,tp2pp2:64@128", run="distillation"),
    _case("adapters", 4, "dp4:20@32,tp4:40@48,tp2pp2:62@70,dp2cp2:64@80", run="adapters", **_BESIDE),
    _case("trainer: evaluation, saves, resume", 4, "dp4:16@32,dp2tp2:32,tp2pp2:60", run="trainer"),
    # -- two ranks
    _case("switches of all pairs", 2, "dp2:15@24,tp2:30@40,pp2:45@50,cp2:62@64", second_source=True, num_rows=14),
    _case("overlap", 2, "dp2:15@24,tp2:30@40,pp2:62@64", **_BESIDE),
    _case("pipeline, own schedule", 2, "pp2:62@64", is_quick=True, num_rows=9, pipeline_schedule="own"),
    _case("pipeline, interleaved", 2, "pp2+v2:62@64", num_rows=9),
    _case("PipeDream", 2, "pp2:40@44", run="stages", features=(PipeDream(),)),
    _case("cp, ring", 2, "cp2:62@64", context_parallel="ring"),
    _case("experts", 2, "dp2ep2:62@64", family=MIXTURE),
    _case("weights divided (+z3)", 2, "dp2+z3:40@64,pp2+z2:62@64"),
    _case("scoring", 2, "dp2:14@64,tp2+rc+ck7:40@96,pp2:64@128", run="scoring"),
    _case("images", 2, "dp2:24,tp2+sp+ck9:200", run="images", family="qwen3_vl"),
    _case("trainer: evaluation, saves, resume", 2, "dp2:16@32,tp2:60", run="trainer"),
    # -- eight ranks
    _case("pipeline of four stages, tp2", 8, "tp2pp4:62@64", num_rows=14, pipeline_schedule="own"),
    _case("pipeline of four stages, tp2, 1F1B of torch", 8, "tp2pp4:62@64", num_rows=14, pipeline_schedule="1f1b"),
    _case("pipeline of four stages, tp2, interleaved", 8, "tp2pp4+v2:62@64", layers=8, num_rows=14),
    _case("token pipeline of four stages, tp2", 8, "tp2pp4+ck9:62@64"),
    _case("switches and overlap", 8, "dp8:20@32,tp2pp4:40@48,cp2tp4:62@64", devices_per_node=4, **_BESIDE),
)  # fmt: skip


# -- recording --------------------------------------------------------------------------------------------------------------


def recorded(rank: int, world_size: int, case: Case, folder: str, journal: Path | None = None) -> tuple[Trace, Any]:
    """One rank's trace of a case, and what its run returned."""
    with ExitStack() as stack:
        of_host = lambda timeout=None: backends.host_group(timeout=timeout)  # noqa: E731
        stack.enter_context(patch.object(backends, "world_for_host_tensors", of_host))  # as beside NCCL
        recorder = stack.enter_context(Recorder(rank, world_size, _Stamp, journal))
        return recorder.trace, RUNS[case.run](case, rank, world_size, folder)


def _all_of_a_world(rank: int, world_size: int, cases: Sequence[Case], folder: str) -> list[tuple[Trace, Any]]:
    torch.manual_seed(0)
    return [recorded(rank, world_size, case, f"{folder}/{number}") for number, case in enumerate(cases)]


def traces_of(
    cases: Sequence[Case], timeout: float = 300.0, device: Device = "cpu"
) -> Iterator[tuple[Case, list[Trace], list[Any]]]:
    """Each case with the traces of its ranks, and with what they returned; one world for all cases of a size."""
    for size in sorted({case.world_size for case in cases}):
        own = [case for case in cases if case.world_size == size]
        with tempfile.TemporaryDirectory(prefix="hotspa-wire-") as folder:
            ranks = run_ranks(size, _all_of_a_world, own, folder, timeout=timeout, device=device)
        for number, case in enumerate(own):
            yield case, [rank[number][0] for rank in ranks], [rank[number][1] for rank in ranks]
