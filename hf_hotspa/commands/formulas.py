"""`hf-hotspa formulas`: the textbook's numbers of 3D parallelism for a model and a cluster. Imports no torch."""

import argparse
import json
from dataclasses import replace
from typing import Any

from hf_hotspa.commands.inputs import whole
from hf_hotspa.costs.memory import UNLIMITED_TOKENS
from hf_hotspa.search.formula_table import formulas_text, make_table, pipedream
from hf_hotspa.search.planning import DTYPE, Setup


def add_parsers(commands: Any) -> None:
    """Adds the command to the sub-parsers of `hf-hotspa`."""
    parser = commands.add_parser(
        "formulas",
        help="the textbook's numbers of 3D parallelism, a row for each (p, t, d)",
        description="Bubble, C_inter, C_intra, T_tp, T_dp, T_pp, bytes by ZeRO stage, activations and arithmetic intensity "
        "of every division of the devices in stages p, tensor-parallel ranks t and replicas d, beside what our time and "
        "memory models say.",
    )
    parser.set_defaults(answer=_formulas)
    parser.add_argument(
        "model", metavar="CONFIG", help="a config.json, its folder, a bundled model or a name on the hub"
    )
    parser.add_argument("--nodes", required=True, metavar="NODESxDEVICES", help="the cluster, such as 4x8")
    parser.add_argument("--hardware", default="h100-80g", help="`hf-hotspa hardware` lists them (default: %(default)s)")
    parser.add_argument(
        "--batch", type=whole(), default=512, metavar="SEQUENCES", help="of one optimizer step (default: %(default)s)"
    )
    parser.add_argument(
        "--micro-batch", type=whole(), default=1, metavar="SEQUENCES", help="of one micro-batch (default: %(default)s)"
    )
    parser.add_argument(
        "--sequence",
        type=whole(UNLIMITED_TOKENS - 1),
        default=2048,
        metavar="TOKENS",
        help="of each (default: %(default)s)",
    )
    parser.add_argument(
        "--partition",
        action="store_true",
        help="also PipeDream's partition, stages replicated unequally, beside the best that layouts can run",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _formulas(args: argparse.Namespace) -> None:
    setup = Setup.read(args.model, args.nodes, args.hardware, dtype=DTYPE)
    result = make_table(setup, args.batch, args.micro_batch, args.sequence)
    if args.partition:
        result = replace(result, pipedream=pipedream(setup, args.micro_batch, args.sequence))
    print(json.dumps(result.to_dict(), indent=1) if args.json else formulas_text(result))
