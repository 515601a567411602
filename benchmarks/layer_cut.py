"""The cut of a model with one heavy layer into stages, beside all other cuts: seconds of the slowest stage, measured.

    python benchmarks/layer_cut.py
    python benchmarks/layer_cut.py --heavy 6 --width 8192 --json out/layer_cut.json

A Qwen2-MoE with experts in all layers but one, which is dense and wide (`mlp_only_layers`). Parameters say little of what
its layers take: of the experts' few are computed. Two processes measure a calibration, which times a layer of each kind by
itself, and cut the model by it. Then every cut into two stages trains the same packs, in turn, in one run; the seconds of
each pass of each stage are recorded. Printed is the slowest stage of every cut, ours and that by parameters marked.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from result_file import command_line, given_options, timed_calls, write_json
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

from hf_hotspa.calibrate.model_calibration import calibrate
from hf_hotspa.commands.rank_world import run_world
from hf_hotspa.data.collator import PackedBucketCollator
from hf_hotspa.engine.engine import HotSPaEngine
from hf_hotspa.layout.stages import StageCosts
from hf_hotspa.model.options import EngineOptions
from hf_hotspa.parallel.pipeline import Pack
from hf_hotspa.strategy import Bucket, Strategy

STAGES = 2


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heavy", type=int, default=1, help="which layer is dense")
    parser.add_argument("--width", type=int, default=6144, help="of the dense layer's MLP")
    parser.add_argument("--tokens", type=int, default=1024, help="of each pack")
    parser.add_argument("--packs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.hidden, options.width, options.tokens, options.repeats = 4, 64, 512, 64, 1
    return options


def make_config(options: argparse.Namespace) -> Qwen2MoeConfig:
    """Experts everywhere but in one layer."""
    return Qwen2MoeConfig(
        vocab_size=512,
        hidden_size=options.hidden,
        intermediate_size=options.width,
        moe_intermediate_size=options.hidden,
        shared_expert_intermediate_size=options.hidden,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        mlp_only_layers=[options.heavy],
        max_position_embeddings=2 * options.tokens,
        use_cache=False,
    )


def cut_after(first: int, layers: int) -> StageCosts:
    """Costs whose best cut into two stages has so many layers in the first one."""
    return StageCosts((layers - first,) * first + (first,) * (layers - first))


def run_cuts(rank: int, world_size: int, options: argparse.Namespace, cache: str) -> dict[str, Any] | None:
    """Layers in the first stage of our cut and of that by parameters; seconds of a pack on both stages, by the same."""
    config, strategy = make_config(options), Strategy(pp=STAGES)
    calibration = calibrate(config, strategies=[strategy], cache=Path(cache))
    torch.manual_seed(0)
    model = Qwen2MoeForCausalLM(config).train()
    bucket = Bucket(strategy, options.tokens, options.tokens)
    log: list[float] = []
    for name in ("forward", "backward"):
        setattr(Pack, name, timed_calls(getattr(Pack, name), lambda begin, end, *_: log.append(end - begin)))
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (options.packs, options.tokens), generator=draw).tolist()
    mini_batch = PackedBucketCollator([bucket], rank=rank, vocab_size=config.vocab_size)(
        [{"input_ids": row, "labels": row} for row in ids]
    )
    cuts = range(1, options.layers)
    engines = {
        first: HotSPaEngine(model, [bucket], EngineOptions(stage_costs=cut_after(first, options.layers)))
        for first in cuts
    }
    fastest: dict[int, list[float]] = {}
    for turn in range(options.repeats + 1):
        for first, engine in engines.items():
            log.clear()
            dist.barrier()
            engine.forward_backward(mini_batch)
            both: list[Any] = [None] * world_size
            dist.all_gather_object(both, sum(log) / options.packs)
            if turn:
                known = fastest.get(first, both)
                fastest[first] = [min(pair) for pair in zip(known, both, strict=True)]
    vector = engines[1].description.vector
    for engine in engines.values():
        engine.close()
    by_count = StageCosts(vector.layer_costs, vector.head_cost)
    return {
        "ours": len(calibration.stage_costs(vector.layer_costs).stages(STAGES)[0]),
        "by parameters": len(by_count.stages(STAGES)[0]),
        "layers": [[list(sample.layers), sample.seconds] for sample in calibration.layers],
        "stages": [fastest[first] for first in cuts],
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measures, prints and writes."""
    options = parse_options(arguments)
    with tempfile.TemporaryDirectory() as cache:
        result: dict[str, Any] = run_world(STAGES, run_cuts, options, cache)
    slowest = [max(stages) for stages in result["stages"]]
    result["options"] = given_options(options)
    result["ours / best"] = slowest[result["ours"] - 1] / min(slowest)
    result["by parameters / best"] = slowest[result["by parameters"] - 1] / min(slowest)
    for layers, seconds in result["layers"]:
        print(f"{len(layers)} like layer {layers[0]}: {seconds * 1e3:.1f} ms")
    for first, stages in enumerate(result["stages"], start=1):
        marks = [name for name in ("ours", "by parameters") if result[name] == first]
        print(
            f"{first} + {options.layers - first} layers: slowest stage {max(stages):.3f} s a pack"
            f" ({stages[0]:.3f} and {stages[1]:.3f}){'  ' + ', '.join(marks) if marks else ''}"
        )
    print(
        f"slowest stage of our partition over the slowest of the best one: {result['ours / best']:.3f}; of the cut by parameters"
        f" {result['by parameters / best']:.3f}; spread of all {statistics.fmean(slowest) / min(slowest):.2f} in the mean"
    )
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
