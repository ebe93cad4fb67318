"""``python -m tests.fuzz``: draws random programs, checks them, prints each distinct failure shrunk, and a table."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import torch

from tests.fuzz import campaign
from tests.fuzz.campaign import Campaign, Summary
from tests.fuzz.oracle import TARGETS
from tests.fuzz.verify_counts import GRAPHS_PER_TARGET


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", choices=TARGETS, nargs="*")
    parser.add_argument("--seed", type=int, default=0, help="seed of the graphs")
    parser.add_argument("--graphs", type=int, default=10**6)
    parser.add_argument("--only", type=int, help="check only the graph with this number")
    parser.add_argument("--minutes", type=float, default=1e6, help="time limit for all targets together")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--shrink", type=float, default=20, help="limit of processor time for shrinking one failure, in seconds"
    )
    parser.add_argument("--record", type=Path, help="folder of results; an interrupted run continues")
    parser.add_argument(
        "--verify", action="store_true", help=f"numbers of graphs of a release check: {GRAPHS_PER_TARGET}"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _silence_output() -> None:
    """Keep standard output for answers in a child process: redirect what libraries print to standard error."""
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    campaign._ANSWER_STREAM = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def _campaign(args: argparse.Namespace, target: str, folder: Path) -> Summary:
    graphs = GRAPHS_PER_TARGET[target] if args.verify else args.graphs
    summary = Summary(target)
    path = folder / f"{target}-{args.seed}.jsonl"
    for verdict in Campaign(
        target, args.seed, graphs, path, args.workers, args.minutes / len(args.target), args.shrink
    ).run():
        if summary.add(verdict):
            print(
                f"--- {target} {args.seed}/{verdict.index} {verdict.detail or verdict.cause}\n{verdict.small}",
                flush=True,
            )
        if summary.graphs % 500 == 0:
            print(summary, flush=True)
    return summary


def main() -> int:
    """Run the campaign. The exit status is 1 if a graph failed."""
    os.environ["ARM_BACKEND_CORE_STRICT"] = "1"  # a compiler fault raises an exception instead of refusing the operator
    os.environ["OMP_NUM_THREADS"] = "1"
    args = _arguments()
    args.target = args.target or (list(GRAPHS_PER_TARGET) if args.verify else ["TOSA_FP", "TOSA_INT8"])
    if args.serve:
        _silence_output()
        campaign.serve(args.target[0], args.seed, args.shrink)
        return 0
    if args.only is not None:
        for target in args.target:
            verdict = campaign.check_graph(target, args.seed, args.only)
            print(target, verdict.kind, verdict.detail or verdict.cause)
        return 0
    folder = args.record or Path("build/fuzz")
    summaries = [_campaign(args, target, folder) for target in args.target]
    for summary in summaries:
        print(f"\n{summary.target}: why operators stay on the CPU")
        print("\n".join(summary.frequent_refusals()))
        for title, alike in sorted(summary.failures.items(), key=lambda item: -len(item[1])):
            print(f"{len(alike):7d}  {' | '.join(title)}  (graph {alike[0].index})")
    print("\n" + "\n".join([Summary.HEADER, *map(str, summaries)]))
    return 1 if any(summary.failures for summary in summaries) else 0


if __name__ == "__main__":
    sys.exit(main())
