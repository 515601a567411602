"""`hf-hotspa inspect | verify | export`: lists a checkpoint, checks it, and exports its model.

`inspect` and `verify` do not import torch.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from hf_hotspa.checkpoint.format.disk import DTYPES
from hf_hotspa.checkpoint.format.folder import check_step, checkpoints
from hf_hotspa.checkpoint.format.manifest import (
    MANIFEST,
    WEIGHT,
    Manifest,
    num_values,
    read_manifest,
    stored_as,
    verify,
)
from hf_hotspa.commands.inputs import add_flags
from hf_hotspa.commands.parser import Commands
from hf_hotspa.costs.hardware import parse_bytes
from hf_hotspa.costs.terms import form_names
from hf_hotspa.errors import DamagedCheckpointError, HotspaConfigError, printable
from hf_hotspa.reporting.terminal import text_table

DAMAGED = 1  # exit code of `verify` when a checkpoint is damaged


def add_parsers(commands: Commands) -> None:
    where = "a checkpoint-<step> directory, or the output_dir of a run for all of its checkpoints"
    inspect = commands.add_parser("inspect", help="list the contents of a checkpoint")
    inspect.set_defaults(answer=_inspect)
    inspect.add_argument("path", help=where)
    add_flags(inspect, {"--json": "print JSON instead of tables"})
    check = commands.add_parser("verify", help="compare every file of a checkpoint with its manifest")
    check.set_defaults(answer=_verify)
    check.add_argument("path", help=where)
    export = commands.add_parser("export", help="write the model of a checkpoint for from_pretrained")
    export.set_defaults(answer=_export)
    export.add_argument("checkpoint", help="a checkpoint-<step> directory")
    export.add_argument("output", nargs="?", help="a new directory (default: model-<step> beside the checkpoint)")
    texts = {
        "--max-shard-size SIZE": "of each file of weights (default: %(default)s)",
        "--dtype DTYPE": "of the weights, such as bfloat16 (default: the trained model's)",
        "--merge": "for an adapter: write the base model with the adapter merged in",
    }
    add_flags(export, texts, max_shard_size={"default": "5GB"})
    of_base = {
        "--base NAME": "the base model (default: as in the adapter's config)",
        "--quantization": "the quantization it was loaded with; not if its folder is already quantized",
        "--double-quantization": "it was loaded with bnb_4bit_use_double_quant",
    }
    add_flags(export.add_argument_group("with --merge"), of_base, quantization={"choices": form_names()})


def _targets(path: Path) -> list[Path]:
    targets = [path] if (path / MANIFEST).exists() else checkpoints(path)[::-1]
    if not targets:
        raise HotspaConfigError(f"{str(path)!r} holds no checkpoint", fix="name a checkpoint-<step> directory")
    return targets


def _inspect(args: argparse.Namespace) -> None:
    path = Path(args.path)
    manifests = [(target, read_manifest(target)) for target in _targets(path)]
    if args.json:
        print(json.dumps([{"path": str(target), **json.loads(m.text())} for target, m in manifests], indent=1))
        return
    rows = [["checkpoint", "step", "ranks", "strategies", "resumable", "GB", "parameters"]]
    for target, m in manifests:
        cells = [target.name, str(m.step), str(m.world_size), m.strategies, "yes" if m.resumable else "no"]
        rows.append([*cells, f"{m.num_bytes / 1e9:.3f}", f"{sum(p.numel for p in m.parameters):,}"])
    print(text_table("", rows))
    if len(manifests) == 1:
        manifest = manifests[0][1]
        files = [["file", "bytes", "sha256"], *([f.name, f"{f.size:,}", f.sha256[:16]] for f in manifest.files)]
        written = ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))
        print(f"\n{text_table('', files)}\n\n{_states(manifest)}\nwritten by: {written}")


def _states(manifest: Manifest) -> str:
    elements, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for parameter in manifest.parameters:
        for state, stored in parameter.states.items():
            dtype, each = stored_as(stored)
            elements[state, stored] += parameter.numel
            sizes[state, stored] += num_values(0, parameter.numel, each) * DTYPES[dtype][1]
    rows = []
    for state, stored in sorted(key for key in elements if key[0] != WEIGHT):
        dtype, each = stored_as(stored)
        name = dtype if each == 1 else f"{dtype} for {each}"
        rows.append([state, name, f"{elements[state, stored]:,}", f"{sizes[state, stored]:,}"])
    if not rows or not manifest.has_masters:
        return "optimizer states: none"
    return text_table("", [["optimizer state", "stored as", "elements", "bytes"], *rows]) + "\n"


def _verify(args: argparse.Namespace) -> int:
    code = 0
    for target in _targets(Path(args.path)):
        try:
            manifest = verify(target)
            check_step(target, manifest)
        except DamagedCheckpointError as error:
            print(f"{printable(str(target))}: {error}", file=sys.stderr)
            code = DAMAGED
        else:
            print(f"{target}: {len(manifest.files)} files, {manifest.num_bytes:,} bytes, as they were written")
    return code


def _export(args: argparse.Namespace) -> None:
    limit = parse_bytes(args.max_shard_size, "--max-shard-size")
    checkpoint = Path(args.checkpoint)
    kind = "merged" if args.merge else "model"
    output = Path(args.output or checkpoint.with_name(f"{kind}-{checkpoint.resolve().name.rpartition('-')[2]}"))
    if args.merge:
        from hf_hotspa.checkpoint.model_files import merge  # imports torch

        files = merge(
            checkpoint, output, max_shard_bytes=limit, dtype=args.dtype, base=args.base, quantization=args.quantization,
            double=args.double_quantization,
        )  # fmt: skip
    elif args.base or args.quantization or args.double_quantization:
        raise HotspaConfigError("--base and --quantization go with --merge", fix="add --merge, or leave them out")
    else:
        from hf_hotspa.checkpoint.model_files import export  # imports torch

        files = export(checkpoint, output, max_shard_bytes=limit, dtype=args.dtype)
    size = sum(file.stat().st_size for file in files)
    print(f"{output}: {len(files)} files of weights, {size:,} bytes")
