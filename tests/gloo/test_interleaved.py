"""Pipelines with several stages on each rank (`+v2`): exact against the plain model, whatever packs there are."""

from functools import partialmethod
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_hotspa.errors import HotspaError
from hf_hotspa.features.slow_devices.mode import HandOver
from hf_hotspa.model.pass_through import PassThrough
from hf_hotspa.parallel.pipeline import Pack
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
MORE_ON_TWO: dict[tuple[str, int], list[Case]] = {
    (TIED, 5): [("pp2+v2:60", 9, {}), ("pp2+v2:12@24,pp2:60@30", 9, {"second_source": True})],
}
ON_FOUR: dict[tuple[str, int], list[Case]] = {
    (TIED, 9): [
        ("pp4+v2:60", 9, {}),
        ("dp4:12@24,tp2pp2+v2+sp:60", 9, {}),
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
    [(2, ON_TWO), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((4, ON_FOUR), (2, MORE_ON_TWO)))],
    ids=["2", "4", "2-more"],
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


Events = list[tuple[int, int, bool]]
"""Stage, pack and whether it is backward of each pass of a rank, in order."""


def events_of(rank: int, world_size: int, rounds: int, counts: tuple[int, ...]) -> list[Events]:
    """The passes that this rank ran, for each number of equal packs."""
    model = tiny_model(GQA, torch.float64, num_hidden_layers=8)
    engine = make_engine(model, f"pp2{f'+v{rounds}' if rounds > 1 else ''}:16")
    (runner,) = engine.phases.values()
    stages = {id(part): index * world_size + rank for index, part in enumerate(runner.parts)}
    log: Events = []
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for is_backward, name in ((False, "forward"), (True, "backward")):

            def recorded(chunk: Pack, stage: Any, *args: Any, run: Any, back: bool, **options: Any) -> Any:
                log.append((stages[id(stage)], chunk.pack, back))
                return run(chunk, stage, *args, **options)

            patch.setattr(Pack, name, partialmethod(recorded, run=getattr(Pack, name), back=is_backward))
        for count in counts:
            log.clear()
            rows = [{"input_ids": [*range(1, 17)], "labels": [*range(1, 17)]}] * count
            engine.forward_backward(make_mini_batch(engine, rows))
            found.append(list(log))
    engine.close()
    return found


def idle_over_busy(ranks: list[Events]) -> float:
    """Of a timeline in which each rank runs its passes in its order as soon as it can; a backward takes twice a forward."""
    num_stages = 1 + max(stage for events in ranks for stage, _, _ in events)
    ends: dict[tuple[int, int, bool], int] = {}
    clocks, left, busy = [0] * len(ranks), [list(events) for events in ranks], 0
    while any(left):
        progress = False
        for rank, events in enumerate(left):
            while events:
                stage, pack, is_backward = events[0]
                before = (stage + 1, pack, True) if is_backward else (stage - 1, pack, False)
                is_end = stage == num_stages - 1 if is_backward else stage == 0
                if not is_end and before not in ends:
                    break
                seconds = 2 if is_backward else 1
                clocks[rank] = max(clocks[rank], 0 if is_end else ends[before]) + seconds
                ends[events.pop(0)] = clocks[rank]
                busy, progress = busy + seconds, True
        assert progress, "each rank waits for another"
    return (len(ranks) * max(clocks) - busy) / busy


@pytest.mark.parametrize("rounds", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_are_idle_as_the_formula_says_in_the_order_that_the_engine_runs(rounds: int) -> None:
    """(p - 1) / (v m), with stages that take equally long."""
    counts = (2, 4, 8)
    ranks = run_ranks(2, events_of, rounds, counts)
    for index, count in enumerate(counts):
        of_count = [events[index] for events in ranks]
        assert all(len(events) == 2 * rounds * count for events in of_count)
        assert idle_over_busy(of_count) == pytest.approx(1 / (rounds * count), rel=0.1)


def _trained(model: PreTrainedModel, buckets: str) -> tuple[float, Any]:
    rows = random_rows(9, model.config.vocab_size, longest=40, seed=3)
    loss, gradients = shared_reference(model, rows)
    engine = make_engine(model, buckets)
    error, _ = worst_error(engine, make_mini_batch(engine, rows), loss, gradients)
    return error, engine


def on_one_rank(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank holds, and whether the same mini-batch gives the same bits again."""
    found: dict[str, Any] = {}
    model = tiny_model(TIED, torch.float64, num_hidden_layers=5)
    error, engine = _trained(model, "pp2+v2:40")
    (runner,) = engine.phases.values()
    found["layers"] = [
        [i for i, layer in enumerate(part.layers) if not isinstance(layer, PassThrough)] for part in runner.parts
    ]
    rows = random_rows(9, model.config.vocab_size, longest=40, seed=3)
    gradients = [g.clone() for g in engine.master.gradients if g is not None]
    with exact_in_double(torch.float64):
        engine.forward_backward(make_mini_batch(engine, rows))
    again = [g for g in engine.master.gradients if g is not None]
    found["same bits"] = all(map(torch.equal, gradients, again))
    found["error"] = error
    engine.close()
    return found


def test_a_rank_holds_every_second_stage_and_runs_repeat() -> None:
    first, second = run_ranks(2, on_one_rank)
    for found in (first, second):
        assert found["error"] <= 1e-11
        assert found["same bits"]
    # the embedding is free and the head is not: the last stage has least
    layers = [first["layers"][0], second["layers"][0], first["layers"][1], second["layers"][1]]
    assert [layer for stage in layers for layer in stage] == list(range(5))
    assert all(layers)


def refusals(rank: int, world_size: int) -> list[str]:
    model, said = tiny_model(TIED), []
    for buckets, options in (
        ("pp2+v2:40", {"pipeline_schedule": "gpipe"}),
        ("pp2+v3:40", {}),
        ("pp2+v2:40", {"features": (HandOver(),)}),
    ):
        with pytest.raises(HotspaError) as caught:
            make_engine(model, buckets, **options)
        said.append(str(caught.value))
    return said


def test_what_does_not_go_with_it_is_refused_on_every_rank() -> None:
    for said in run_ranks(2, refusals):
        for message, *parts in zip(
            said,
            ("gpipe", "pp2+v3 has 6 stages, more than the 4 layers", "hotspa_stragglers"),
            ("use the schedule own or 1f1b", "legal with 2 processes", "leave +v2 out"),
            strict=True,
        ):
            assert all(part in message for part in parts), message
