"""One rank of an engine job: generate and score on a checkpoint, then write what this rank saw.

Usage: engine_rank.py FOLDER OUT_FOLDER JOB, started by torchrun. JOB is JSON: prompts, new (tokens per prompt).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from mini_deepinfer.engine import LLM
from mini_deepinfer.sampler import SamplingParams


def main() -> None:
    torch.set_num_threads(1)
    folder, out, job = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    llm = LLM(
        folder, dtype="float32", device="cpu", page_size=4, max_num_seqs=2, max_num_batched_tokens=8,
        ep_size=job["world"], num_pages=24, max_model_len=64,
    )  # fmt: skip
    with llm.parallel:
        params = [SamplingParams(max_tokens=new, ignore_eos=True) for new in job["new"]]
        outputs = llm.generate(job["prompts"], params)
        scores = llm.score(job["prompts"][:2])
        result = {
            "token_ids": [output.token_ids for output in outputs],
            "indices": [output.index for output in outputs],
            "collectives": dict(llm.parallel.collectives),
            "steps": llm.stats()["steps"],
        }
        (out / f"rank{llm.parallel.rank}.json").write_text(json.dumps(result))
        torch.save(scores, out / f"rank{llm.parallel.rank}.pt")


if __name__ == "__main__":
    main()
