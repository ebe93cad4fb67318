"""``python -m tests.tosa.conformance``: judges the compiler by the tests of the TOSA conformance generator.

Prints every disagreement that is not written down, those that are with their counts, and a table.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.runtime.ethosu_emulator import Emulator, build
from tests.tosa.conformance.campaign import Campaign, Table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.tosa.conformance", description=__doc__)
    parser.add_argument("--operators", nargs="*", default=(), help="as the generator names them, for example conv2d")
    parser.add_argument("--tests", type=int, help="of each batch of the generator; without it all")
    parser.add_argument("--seed", type=int, default=0, help="which they are")
    parser.add_argument("--record", type=Path, default=Path("build/conformance"), help="a run takes up what is there")
    parser.add_argument("--no-npu", action="store_true", help="leave out Vela and the emulator")
    return parser.parse_args()


def main() -> int:
    """The exit status is 1 where a disagreement is not written down, or one that is was not seen in the whole run."""
    os.environ["OMP_NUM_THREADS"] = "1"
    args = _arguments()
    args.record.mkdir(parents=True, exist_ok=True)
    emulator = None if args.no_npu else Emulator(build(args.record))
    campaign = Campaign(args.record / "outcomes.jsonl", args.seed, args.tests, args.operators, emulator)
    table = Table()
    for outcome in campaign.run():
        before = len(table.unexplained)
        table.add(outcome)
        for _, finding in table.unexplained[before:]:
            print(f"{finding.question} | {outcome.entry} | {outcome.verdict.test} | {finding.detail}", flush=True)
    for expected, count in table.seen.most_common():
        print(f"{count:6,}  {expected.question} {', '.join(expected.kinds)}: {expected.reason}")
    whole = args.tests is None and not args.operators and not args.no_npu
    stale = table.stale if whole else []
    for expected in stale:
        print(f"no longer seen: {expected}")
    print("\n" + "\n".join(table.lines()))
    return 1 if table.unexplained or stale else 0


if __name__ == "__main__":
    sys.exit(main())
