"""`ds-autoplan verify`."""

from __future__ import annotations

import argparse
import json
import sys

from ds_autoplan.cli.jobs import add_json, positive
from ds_autoplan.errors import BadInputError
from ds_autoplan.strategy import CHECKPOINTING
from ds_autoplan.verify import Case, Result, read_grid, verify

EPILOG = """example:
  ds-autoplan verify --model llama-3-8b --tp 2 --pp 2 --dp 1 --sequence-parallel
  ds-autoplan verify --grid cases.jsonl --json

Each line of a grid is a JSON object with the options as keys ("model", "tp", "zero_stage", ...);
"config" may hold keys of the small model's config. Exit status 0: all agree; 1: one does not."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--model", metavar="M", help="config.json, model folder, bundled name, or a model type"
    )
    for name in ("tp", "pp", "dp"):
        parser.add_argument(f"--{name}", type=positive, default=1, metavar="N")
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=0)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--activation-checkpointing", choices=CHECKPOINTING, default="none")
    parser.add_argument("--gradient-accumulation-steps", type=positive, default=1, metavar="G")
    parser.add_argument("--micro-batch-size", type=positive, metavar="B")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=positive, default=5, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", metavar="PLAN.json", help="a plan in place of the degrees")
    parser.add_argument("--grid", metavar="CASES.jsonl", help="many cases, one JSON object a line")
    parser.add_argument(
        "--timeout",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="after which a case is ended",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Verify one case or a grid; print; say by the exit status whether all agree."""
    if (args.grid is None) == (args.model is None):
        raise BadInputError("verify takes either --model or --grid.", "", "Give one of them.")
    if args.timeout <= 0:
        raise BadInputError(f"--timeout is {args.timeout}.", "It must be positive.")
    if args.grid is not None:
        return _grid(args)
    result = verify([_case(args)], limit_s=args.timeout)[0]
    if args.json:
        print(json.dumps(result.to_json()))
    else:
        print(_text(result), flush=True)
    return 0 if result.ok else 1


def _case(args: argparse.Namespace) -> Case:
    return Case(
        model=args.model,
        tp=args.tp,
        pp=args.pp,
        dp=args.dp,
        zero_stage=args.zero_stage,
        sequence_parallel=args.sequence_parallel,
        activation_checkpointing=args.activation_checkpointing,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        steps=args.steps,
        plan=args.plan,
        precision=args.precision,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
    )


def _grid(args: argparse.Namespace) -> int:
    cases = read_grid(args.grid)

    def report(result: Result) -> None:
        lines = [_line(result), *([result.details] if result.details else [])]
        print("\n".join(lines), file=sys.stderr if args.json else sys.stdout, flush=True)

    results = verify(cases, report, limit_s=args.timeout)
    passed = sum(result.ok for result in results)
    if args.json:
        print(
            json.dumps(
                {
                    "results": [result.to_json() for result in results],
                    "cases": len(results),
                    "passed": passed,
                    "ok": passed == len(results),
                }
            )
        )
    else:
        print(f"{passed} of {len(results)} cases agree")
    return 0 if passed == len(results) else 1


def _line(result: Result) -> str:
    verdict = "ok  " if result.ok else "FAIL"
    return f"{verdict} {result.seconds:6.1f} s  {result.case.words()}: {_differences(result)}"


def _differences(result: Result) -> str:
    if result.error:
        return result.error
    return (
        f"loss {result.max_loss_rel_diff:.1e}, gradient norm {result.max_grad_norm_rel_diff:.1e}, "
        f"weights {result.max_weight_rel_diff:.1e}"
    )


def _text(result: Result) -> str:
    lines = [_line(result)]
    lines += [
        f"  call {index + 1}: loss {found:.6f}, reference {wanted:.6f}"
        for index, (found, wanted) in enumerate(
            zip(result.loss, result.reference_loss, strict=True)
        )
    ]
    if not result.ok and result.worst_tensor:
        lines.append(f"  worst weight: {result.worst_tensor}")
    if result.details:
        lines.append(result.details)
    return "\n".join(lines)
