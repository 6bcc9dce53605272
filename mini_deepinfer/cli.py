"""The command line: ``python -m mini_deepinfer generate | score | check | env`` (also installed as ``mini-deepinfer``).

Exit status: 0 done (requests may have errors of their own in the output), 1 the engine failed or a check found problems,
2 wrong usage: unknown flag, unfit option, unreadable input or checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from mini_deepinfer.config import EngineConfig, ModelConfig, check_environment, read_env
from mini_deepinfer.report import build_line, memory_table, show, table

if TYPE_CHECKING:
    from mini_deepinfer.engine import LLM

EXIT_FAILED, EXIT_USAGE = 1, 2

# Keys of an output line of `generate`, in this order.
OUTPUT_KEYS = ("index", "prompt_tokens", "cached_tokens", "token_ids", "text", "finish_reason", "error")


class UsageError(Exception):
    """The command cannot be carried out as it was given."""


def build_parser() -> argparse.ArgumentParser:
    """All subcommands; engine flags are made from the fields of EngineConfig."""
    parser = argparse.ArgumentParser(prog="mini_deepinfer", description="Prefill-first engine for DeepSeek-V4.1-Flash.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", allow_abbrev=False, help="continue the prompts of a JSONL file")
    _add_files(generate, "JSONL: one object per input line, in order")
    generate.add_argument("--max-tokens", type=int, default=16, help="most tokens to generate (default 16)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0, help="sample from the most likely tokens of this mass")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-text tokens")
    _add_engine(generate)

    score = commands.add_parser("score", allow_abbrev=False, help="logits after every token of the prompts of a JSONL file")
    _add_files(score, "safetensors: logits.{i} float32 [length, vocab] for input line i")
    _add_engine(score)

    check = commands.add_parser("check", allow_abbrev=False, help="check a checkpoint folder without reading a weight, and plan its memory")
    _add_engine(check)

    env = commands.add_parser("env", allow_abbrev=False, help="what this machine has: versions, GPUs, kernels and which of them are used")
    env.add_argument("--self-test", action="store_true", help="run every kernel on a small input against the reference or the portable one")
    return parser


def _add_files(parser: argparse.ArgumentParser, output: str) -> None:
    text = 'JSONL: {"prompt": "text"} or {"prompt_token_ids": [0, 17, 4]} per line'
    parser.add_argument("--input", type=Path, required=True, help=text)
    parser.add_argument("--output", type=Path, required=True, help=output)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    EngineConfig.add_arguments(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (argparse itself exits with 2)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(_on_off(arguments))
    try:
        return _run(args, arguments)
    except UsageError as error:
        show(f"mini_deepinfer {args.command}: error: {error}")
        return EXIT_USAGE


def _run(args: argparse.Namespace, arguments: list[str]) -> int:
    with _as_usage_error():
        check_environment()
        logging.basicConfig(level=read_env("MDI_LOG"), format="%(levelname)s %(name)s: %(message)s")
    if args.command == "env":
        return _env(args)
    with _as_usage_error():
        options = EngineConfig.from_args(args)
    if not options.model and options.load_format != "dummy":
        raise UsageError("--model DIR is needed (only --load-format dummy can do without)")
    if args.command == "check":
        with _as_usage_error():
            return _check(options)
    if options.ep_size > 1 and "RANK" not in os.environ:
        _start_ranks(options.ep_size, arguments)
    return _generate(args, options) if args.command == "generate" else _score(args, options)


@contextmanager
def _as_usage_error() -> Iterator[None]:
    """What is refused before anything runs is the caller's to correct: a message instead of a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise UsageError(str(error)) from error


def _on_off(arguments: list[str]) -> list[str]:
    """Accept `--flag on|off` for the boolean engine flags, besides `--flag` and `--no-flag`."""
    flags = {"--" + f.name.replace("_", "-") for f in dataclasses.fields(EngineConfig) if isinstance(f.default, bool)}
    out: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if equals and flag in flags and value in ("on", "off"):
            out.append(flag if value == "on" else "--no-" + flag[2:])
        elif out and out[-1] in flags and argument in ("on", "off"):
            if argument == "off":
                out[-1] = "--no-" + out[-1][2:]
        else:
            out.append(argument)
    return out


def _start_ranks(world: int, arguments: list[str]) -> NoReturn:
    """Become torchrun with `world` ranks of this command, on a free port."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    sys.stdout.flush()
    os.execve(sys.executable, [*launcher, "-m", "mini_deepinfer", *arguments], environment)


# -------------------------------------------------------------------- generate and score


def read_requests(path: Path) -> list[dict[str, Any] | str]:
    """The lines of an input file as prompts for the engine: {"prompt": text or ids, ...}; text = what is wrong with the line.

    Raises OSError if the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")
    if lines and not lines[-1]:
        lines.pop()  # the file ends with a newline
    return [_parse_request(line) for line in lines]


def _parse_request(line: bytes) -> dict[str, Any] | str:
    try:
        item = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"malformed line: {error}"
    if not isinstance(item, dict):
        return f"malformed line: wanted a JSON object, got {type(item).__name__}"
    if ("prompt" in item) == ("prompt_token_ids" in item):
        return "malformed line: wanted exactly one of the keys prompt and prompt_token_ids"
    if "prompt" in item:
        wrong = not isinstance(item["prompt"], str)
        return "prompt must be text; give token ids as prompt_token_ids" if wrong else item
    ids = item.pop("prompt_token_ids")
    if not isinstance(ids, list):
        return f"prompt_token_ids must be a list of integers, got {type(ids).__name__}"
    return {"prompt": ids, **item}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _open_engine(options: EngineConfig) -> LLM:
    from mini_deepinfer.engine import LLM

    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name != "model"}
    return LLM(options.model, **fields)


def _generate(args: argparse.Namespace, options: EngineConfig) -> int:
    from mini_deepinfer.sampler import SamplingParams

    with _as_usage_error():
        requests = read_requests(args.input)
        _check_output(args.output)
        params = SamplingParams(temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
        engine = _open_engine(options)
    with engine.parallel:
        good = [index for index, request in enumerate(requests) if not isinstance(request, str)]
        outputs = engine.generate([requests[index] for index in good], params)
        rows: list[dict[str, Any]] = [
            dict(zip(OUTPUT_KEYS, (index, 0, 0, [], None, "error", request))) for index, request in enumerate(requests)
        ]
        for output in outputs:
            index = good[output.index]
            rows[index] = {key: getattr(output, key) for key in OUTPUT_KEYS} | {"index": index}
        if engine.parallel.rank == 0:
            text = "".join(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows)
            _write(args.output, text.encode("utf-8"))
            _say_how_many(rows)
    return 0


def _say_how_many(rows: list[dict[str, Any]]) -> None:
    failed = [row for row in rows if row["error"]]
    show(f"generate: {len(rows) - len(failed)} of {len(rows)} requests done")
    for row in failed[:10]:
        show(f"generate: request {row['index']}: {row['error']}")


def _score(args: argparse.Namespace, options: EngineConfig) -> int:
    from safetensors.torch import save

    with _as_usage_error():
        requests = read_requests(args.input)
        _check_output(args.output)
        engine = _open_engine(options)
    with engine.parallel:
        errors = {index: request for index, request in enumerate(requests) if isinstance(request, str)}
        tensors = _score_each(engine, requests, errors)
        if engine.parallel.rank == 0:
            metadata = {f"error.{index}": text for index, text in sorted(errors.items())}
            _write(args.output, save(tensors, metadata=metadata))
            show(f"score: {len(tensors)} of {len(requests)} requests done")
            for index, text in sorted(errors.items())[:10]:
                show(f"score: request {index}: {text}")
    return 0


def _score_each(engine: LLM, requests: list[dict[str, Any] | str], errors: dict[int, str]) -> dict[str, torch.Tensor]:
    """Logits by tensor name. Requests that the engine refuses go to `errors`; the others run all the same."""
    good = [index for index in range(len(requests)) if index not in errors]
    try:  # all together; the engine refuses before it runs anything
        return {f"logits.{i}": logits for i, logits in zip(good, engine.score([requests[i] for i in good]))}
    except (TypeError, ValueError):
        tensors = {}
    for index in good:
        try:
            tensors[f"logits.{index}"] = engine.score([requests[index]])[0]
        except (TypeError, ValueError) as error:
            errors[index] = str(error).removeprefix("score: prompt 0: ")
    return tensors


def _check_output(path: Path) -> None:
    """Find out before the work, not after it, that the output cannot be written."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--output {path}: must be a file in a folder that exists and can be written")


def _write(path: Path, data: bytes) -> None:
    """All or nothing: a run that fails leaves no half-written result."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)


# -------------------------------------------------------------------- check and env


def _check(options: EngineConfig) -> int:
    from mini_deepinfer.weights import check_checkpoint

    config = ModelConfig.from_folder(options.model) if options.model else ModelConfig.released()
    options.check_model(config)
    for field in dataclasses.fields(config):
        print(f"{field.name:<30} {getattr(config, field.name)}")
    problems = []
    if options.load_format != "dummy":
        report = check_checkpoint(options.model, config)
        print("\n".join(report.lines()))
        problems = [*report.problems, *_tokenizer_problems(config, Path(options.model))]
        for problem in problems[len(report.problems) :]:
            print(f"PROBLEM {problem}")
    print(_describe_memory(config, options))
    print(f"{len(problems)} problem(s)" if problems else "the checkpoint is complete")
    return EXIT_FAILED if problems else 0


def _tokenizer_problems(config: ModelConfig, folder: Path) -> list[str]:
    from mini_deepinfer.engram import EngramHasher, token_map_from_folder
    from mini_deepinfer.tokenizer import Tokenizer

    try:
        if (folder / "tokenizer.json").is_file():
            Tokenizer.from_folder(folder, config)
        if config.engram_layer_ids:
            EngramHasher(config, token_map_from_folder(folder, config))
    except (ValueError, OSError) as error:
        return [str(error)]
    return []


def _describe_memory(config: ModelConfig, options: EngineConfig) -> str:
    from mini_deepinfer.engine_parts import plan_memory

    use_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if use_gpu else "cpu")
    world = options.ep_loopback if options.ep_loopback > 1 else options.ep_size
    try:
        plan = plan_memory(config, options, device, world)
    except ValueError as error:
        return f"NOTE this machine cannot run it with these options: {error}"
    parts = memory_table(plan.parts, total_bytes=plan.free_bytes)
    pages = f"{plan.num_pages} pages of {options.page_size} tokens, max_model_len {plan.max_model_len}"
    return f"memory of one of {world} rank(s) on this machine's {device}\n{parts}\n{pages}"


def _env(args: argparse.Namespace) -> int:
    from mini_deepinfer import environment

    print(build_line("cuda" if torch.cuda.is_available() else "cpu"))
    print("\n".join(_env_lines(environment.report())))
    if not args.self_test:
        return 0
    rows = environment.self_test()
    columns = ("op", "impl", "status", "against", "difference", "bound", "detail")
    print(table(columns, [["" if row[key] is None else str(row[key]) for key in columns] for row in rows]))
    return EXIT_FAILED if any(row["status"] in ("differs", "failed") for row in rows) else 0


def _env_lines(report: dict[str, Any]) -> list[str]:
    extension = report["extension"]
    lines = [f"platform    {report['platform']}", f"extension   {extension['path'] or 'not built'}"]
    lines += [f"built with  {key} {value}" for key, value in (extension["record"] or {}).items()]
    lines += [f"PROBLEM     {problem}" for problem in (extension["problem"], report["host_problem"]) if problem]
    for gpu in report["gpus"]:
        lines.append(f"GPU {gpu['index']}       {gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB")
        if gpu["problem"]:
            lines.append(f"PROBLEM     {gpu['problem']}")
    if not report["gpus"]:
        lines.append("GPU         none: the reference ops run on the CPU")
    lines += [f"{name}={value}" for name, value in report["env"].items()]
    return [*lines, table(("op", "runs as"), list(report["ops"].items()))]
