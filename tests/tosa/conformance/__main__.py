"""``python -m tests.tosa.conformance``: runs the tests of the TOSA conformance generator on the compiler.

It prints every unknown disagreement, the count of each known disagreement, and a table of outcomes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.runtime.ethosu_emulator import Emulator
from tests.tosa.conformance.campaign import Campaign, OutcomeTable
from tests.verify import describe_revision


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.tosa.conformance", description=__doc__)
    parser.add_argument(
        "--operators", nargs="*", default=(), help="operators by the generator's names, for example conv2d"
    )
    parser.add_argument("--tests", type=int, help="number of tests of each batch of the generator; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the selection of tests")
    parser.add_argument(
        "--record",
        type=Path,
        help="folder of the results; an interrupted run continues. Default: build/conformance/<revision>",
    )
    parser.add_argument("--no-npu", action="store_true", help="skip Vela and the emulator")
    return parser.parse_args()


def prepare_outcomes_file(record: Path | None) -> Path:
    """Create the folder of the results and return the path of ``outcomes.jsonl`` in it.

    A run at the same commit continues from this file. Outcomes of a working tree with changes are deleted.
    """
    folder = record or Path("build/conformance") / describe_revision()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "outcomes.jsonl"
    if folder.name.endswith("-dirty"):
        path.unlink(missing_ok=True)
    return path


def main() -> int:
    """Run the tests. The exit status is 1 if a disagreement is unknown, or if a full run lacks a known one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    args = _arguments()
    emulator = None if args.no_npu else Emulator()
    campaign = Campaign(prepare_outcomes_file(args.record), args.seed, args.tests, args.operators, emulator)
    table = OutcomeTable()
    for outcome in campaign.run():
        before = len(table.unexplained)
        table.add(outcome)
        for _, finding in table.unexplained[before:]:
            print(f"{finding.check} | {outcome.entry} | {outcome.verdict.test} | {finding.detail}", flush=True)
    for expected, count in table.seen.most_common():
        print(f"{count:6,}  {expected.check} {', '.join(expected.kinds)}: {expected.reason}")
    is_full_run = args.tests is None and not args.operators and not args.no_npu
    stale = table.stale if is_full_run else []
    for expected in stale:
        print(f"no longer seen: {expected}")
    print("\n" + "\n".join(table.lines()))
    return 1 if table.unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
