"""Pipelines with several stages on each rank (`+v2`): exact against the plain model, whatever packs there are."""

from functools import partialmethod
from typing import Any

import pytest
import torch

from hf_hotspa.errors import HotspaError
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.model.pass_through import PassThrough
from hf_hotspa.packing.pipeline_order import Turn, interleaved_order
from hf_hotspa.parallel.pipeline import Pack
from hf_hotspa.strategy import parse_buckets
from tests.families import tiny_model
from tests.harness import run_ranks
from tests.oracle import exact_in_double, random_rows
from tests.worlds import make_engine, make_mini_batch, shared_reference, worst_error, worst_error_with_logits

pytestmark = pytest.mark.gloo

TIED, GQA, CAPS = "qwen3_qk_norm_tied", "llama_gqa_bias", "gemma2_soft_caps"

Case = tuple[str, int, dict[str, Any]]
"""Strategies, rows of a mini-batch, engine options."""

ON_TWO: dict[tuple[str, int], list[Case]] = {
    (TIED, 5): [
        ("pp2+v2:60", 1, {}),  # one pack, which fills no round
        ("pp2+v2+ck7:60", 9, {}),  # chunks of packs
        ("tp2:12@24,pp2+v2:60", 9, {"overlap_load": True, "overlap_return": True}),
    ],
    (GQA, 7): [
        ("pp2+v2:60@20", 9, {}),  # uneven stages, and sequences longer than packs
        ("pp2+v3+rc2:60", 9, {}),
    ],
}
ON_FOUR: dict[tuple[str, int], list[Case]] = {
    (TIED, 9): [
        ("pp4+v2:60", 9, {}),
        ("dp2pp2+v2:60", 3, {}),  # replicas with different numbers of packs
    ],
    (CAPS, 5): [("cp2pp2+v2:60@30", 9, {})],
}
WITH_EVALUATION = "dp2:12@24,pp2+v2:60@30"
"""Switched inside of one mini-batch."""


def errors(rank: int, world_size: int, cases: dict[tuple[str, int], list[Case]]) -> dict[str, float]:
    """The worst relative error of loss and gradients, by case."""
    found = {}
    for (family, layers), settings in cases.items():
        model = tiny_model(family, torch.float64, num_hidden_layers=layers)
        for num_rows in sorted({num_rows for _, num_rows, _ in settings}):
            rows = random_rows(num_rows, model.config.vocab_size, longest=60, seed=2)
            loss, gradients = shared_reference(model, rows)
            for buckets, own_rows, options in settings:
                if own_rows == num_rows:
                    engine = make_engine(model, buckets, **options)
                    error, _ = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)
                    found[f"{family} {buckets} {num_rows}"] = error
                    engine.close()
    if world_size == 2:
        model = tiny_model(GQA, torch.float64)
        found["evaluated"] = worst_error_with_logits(model, WITH_EVALUATION, 6)
    return found


@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.slow)],
    ids=["2", "4"],
)
def test_it_is_exact(world: int, cases: dict[tuple[str, int], list[Case]]) -> None:
    for found in run_ranks(world, errors, cases, timeout=280):
        assert len(found) == sum(map(len, cases.values())) + (world == 2)
        assert {name: error for name, error in found.items() if not error <= 1e-11} == {}


BY_TORCH: dict[tuple[str, int], list[tuple[str, list[int], list[int]]]] = {
    (TIED, 9): [
        ("pp4+v2:60", [60, 58, 51, 60, 55, 52, 57, 59], [8]),
        ("pp4+v2:200@30", [30] * 10, [10]),  # two groups of five
        ("pp4+v2:200@30", [30] * 9, []),  # no equal groups
        ("dp4:12@12,dp2pp2+v2:60", [12] * 8 + [60, 55] * 4, [4]),  # switched inside of one mini-batch
    ],
    (GQA, 7): [("tp2pp2+v2+sp:60", [60, 54, 58, 52], [4]), ("tp2pp2+v3+rc2:60", [60] * 4, [4])],
}
"""Strategies, lengths of the rows, and of how many packs each run of torch's schedule is."""


def by_torch(rank: int, world_size: int) -> list[tuple[str, float, list[int], list[int]]]:
    """The worst relative error of each case, and the runs of torch's schedule that were expected and that there were."""
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    ran: list[int] = []
    found = []
    step = ScheduleInterleaved1F1B.step

    def counted(schedule: Any, *args: Any, **options: Any) -> Any:
        ran.append(schedule._n_microbatches)
        return step(schedule, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScheduleInterleaved1F1B, "step", counted)
        for (family, layers), cases in BY_TORCH.items():
            model = tiny_model(family, torch.float64, num_hidden_layers=layers)
            generator = torch.Generator().manual_seed(4)
            for buckets, lengths, expected in cases:
                drawn = [torch.randint(3, 160, (length,), generator=generator).tolist() for length in lengths]
                rows = [{"input_ids": ids, "labels": ids} for ids in drawn]
                engine = make_engine(model, buckets, pipeline_schedule="1f1b")
                error, _ = worst_error(engine, make_mini_batch(engine, rows), *shared_reference(model, rows))
                found.append((f"{family} {buckets}", error, expected, list(ran)))
                ran.clear()
                engine.close()
    model = tiny_model(TIED, torch.float64, num_hidden_layers=5)
    error = worst_error_with_logits(model, "dp4:12@24,dp2pp2+v2:60@30", 9, pipeline_schedule="1f1b")
    found.append(("evaluated", error, [], []))
    return found


@pytest.mark.slow
def test_torchs_interleaved_schedule_is_exact_and_runs_where_it_can() -> None:
    for found in run_ranks(4, by_torch, timeout=280):
        for name, error, expected, ran in found:
            assert error <= 1e-11, name
            assert ran == expected, name


ONE_ORDER = "pp2+v2:16"


def turns_of(rank: int, world_size: int, counts: tuple[int, ...]) -> list[list[Turn]]:
    """The passes that this rank ran, for each number of equal packs."""
    model = tiny_model(GQA, torch.float64, num_hidden_layers=8)
    engine = make_engine(model, ONE_ORDER)
    (runner,) = engine.phases.values()
    stages = {id(part): index * world_size + rank for index, part in enumerate(runner.parts)}
    log, found = list[Turn](), []
    with pytest.MonkeyPatch.context() as patch:
        for is_backward, name in ((False, "forward"), (True, "backward")):

            def recorded(chunk: Pack, stage: Any, *args: Any, run: Any, back: bool, **options: Any) -> Any:
                log.append(Turn(stages[id(stage)], chunk.pack, back))
                return run(chunk, stage, *args, **options)

            patch.setattr(Pack, name, partialmethod(recorded, run=getattr(Pack, name), back=is_backward))
        for count in counts:
            log.clear()
            rows = [{"input_ids": [*range(1, 17)], "labels": [*range(1, 17)]}] * count
            engine.forward_backward(make_mini_batch(engine, rows))
            found.append(list(log))
    engine.close()
    return found


def test_ranks_run_the_order_of_the_schedule() -> None:
    """How long they are idle in it: `tests/unit/test_interleaved_order.py`."""
    counts = (2, 4, 8)
    for rank, found in enumerate(run_ranks(2, turns_of, counts)):
        for count, turns in zip(counts, found, strict=True):
            order = interleaved_order([16] * count, 2, 2, parse_buckets(ONE_ORDER)[0].most_tokens)
            assert turns == [turn for turn in order if turn.stage % 2 == rank]


def on_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank holds, whether the same mini-batch gives the same bits again, and what is refused."""
    found: dict[str, Any] = {}
    model = tiny_model(TIED, torch.float64, num_hidden_layers=5)
    rows = random_rows(9, model.config.vocab_size, longest=40, seed=3)
    engine = make_engine(model, "pp2+v2:40")
    found["error"], _ = worst_error(engine, make_mini_batch(engine, rows), *shared_reference(model, rows))
    (runner,) = engine.phases.values()
    found["layers"] = [
        [i for i, layer in enumerate(part.layers) if not isinstance(layer, PassThrough)] for part in runner.parts
    ]
    gradients = [g.clone() for g in engine.master.gradients if g is not None]
    with exact_in_double(torch.float64):
        engine.forward_backward(make_mini_batch(engine, rows))
    again = [g for g in engine.master.gradients if g is not None]
    found["same bits"] = all(map(torch.equal, gradients, again))
    engine.close()
    for buckets, options, parts in REFUSED:
        with pytest.raises(HotspaError) as caught:
            make_engine(tiny_model(TIED), buckets, **options)
        assert all(part in str(caught.value) for part in parts), caught.value
    return found


REFUSED: list[tuple[str, dict[str, Any], tuple[str, str]]] = [
    ("pp2+v2:40", {"pipeline_schedule": "gpipe"}, ("gpipe", "use the schedule own or 1f1b")),
    ("pp2+v3:40", {}, ("pp2+v3 has 6 stages, more than the 4 layers", "legal with 2 processes")),
    ("pp2+v2:40", {"features": (HandOver(),)}, ("hotspa_stragglers", "leave +v2 out")),
]


def test_a_rank_holds_every_second_stage_and_runs_repeat_and_refusals_are_alike() -> None:
    first, second = run_ranks(2, on_one_rank)
    for found in (first, second):
        assert found["error"] <= 1e-11
        assert found["same bits"]
    # the embedding is free and the head is not: the last stage has least
    layers = [first["layers"][0], second["layers"][0], first["layers"][1], second["layers"][1]]
    assert [layer for stage in layers for layer in stage] == list(range(5))
    assert all(layers)
