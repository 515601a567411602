"""`make check-wire`: records what the package says on a wire, and proves for each strategy that NCCL would get through it.

`python -m tests.wire_proofs --ranks 4 --only ring` runs a part. Prints a table of proofs, or the shortest counter-example;
`--write` puts the table of everything into docs/data/wire-proofs.csv.
"""

import argparse
import csv
import io
import time
from collections.abc import Sequence

from tests.gpu_machine import NO_GPU, Machine, announcement, best_setup
from tests.harness import Device
from tests.wire_recorder import ROOT
from tests.wire_rules import Fault, Proof, check
from tests.wire_runs import CASES, Case, traces_of

PAGE = ROOT / "docs" / "data" / "wire-proofs.csv"
HEADER = ("what", "strategies", "ranks", "messages", "collectives", "communicators", "longest queue", "beside")


def line(case: Case, proof: Proof) -> tuple[str, ...]:
    """A row of the table of proofs."""
    messages = proof.operations["send"]
    others = sum(n for kind, n in proof.operations.items() if kind not in ("send", "recv"))
    strategies = ", ".join(bucket.partition(":")[0] for bucket in case.buckets.split(","))
    made = f"{proof.communicators}, {proof.most_communicators}" + (f", and {proof.pairs} pairs" if proof.pairs else "")
    numbers = (case.world_size, messages, others, made, proof.depth, proof.beside)
    return (case.name, strategies, *map(str, numbers))


def prove(cases: Sequence[Case], timeout: float, device: Device = "cpu") -> tuple[list[tuple[str, ...]], bool]:
    """Prints a line for each case; the lines, and whether all are proven."""
    lines, proven = list[tuple[str, ...]](), True
    for case, traces, _ in traces_of(cases, timeout, device):
        found = check(traces)
        if isinstance(found, Fault):
            proven = False
            print(f"NOT PROVEN: {case}: {found}", flush=True)
        else:
            lines.append(line(case, found))
            print(" | ".join(lines[-1]), flush=True)
    return lines, proven


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--quick", action="store_true", help="what the fast tests run")
    parser.add_argument("--write", action="store_true", help="write the table into docs/data/wire-proofs.csv")
    parser.add_argument("--on", choices=("cpu", "gpu"), default="cpu", help="gpu: the same over NCCL; writes no table")
    given = parser.parse_args()
    if given.on == "gpu":
        machine = Machine.found()
        if not best_setup(machine).over_nccl:
            print(f"nothing was run: {'NCCL wants a GPU for every rank' if machine.gpus else NO_GPU}")
            return 2
        print(announcement(machine, best_setup(machine)), flush=True)
    cases = [
        c for c in CASES if c.world_size in given.ranks and given.only in c.name and (c.is_quick or not given.quick)
    ]
    begin = time.perf_counter()
    print(" | ".join(HEADER))
    lines, proven = prove(cases, timeout=1500.0, device="cuda" if given.on == "gpu" else "cpu")
    if given.write and given.on == "cpu" and proven and len(lines) == len(CASES):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([HEADER, *lines])
        PAGE.write_text(text.getvalue())
    print(f"\n{len(cases)} runs, {time.perf_counter() - begin:.0f} s: {'all proven' if proven else 'NOT all proven'}")
    return 0 if proven else 1


if __name__ == "__main__":
    raise SystemExit(main())
