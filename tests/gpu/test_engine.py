"""The engine on the GPU: scheduling, prefix cache and preemption must not change a request's tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mini_deepinfer import LLM, SamplingParams
from tests.golden import TINY_A, golden

pytestmark = pytest.mark.gpu

PREEMPTING_PAGES = 28  # the four prompts fit, their answers do not
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def engine(**options) -> LLM:
    defaults = {"page_size": 16, "num_pages": 64, "max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return LLM(str(TINY_A), device="cuda", batch_invariant=True, **{**defaults, **options})


def prompts() -> list[list[int]]:
    return [[int(i) for i in golden()[f"L{length}.input_ids"]] for length in (7, 33, 100, 193)]


def tokens(outputs) -> list[list[int]]:
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return [output.token_ids for output in outputs]


@pytest.fixture
def alone(cuda: torch.device) -> list[list[int]]:
    """Each prompt by itself, in one chunk."""
    llm = engine(max_num_batched_tokens=256, enable_prefix_caching=False)
    return [tokens(llm.generate([prompt], GREEDY))[0] for prompt in prompts()]


def test_together(alone):
    """Continuous batching with chunked prefill, in two orders."""
    llm = engine(enable_prefix_caching=False)
    assert tokens(llm.generate(prompts(), GREEDY)) == alone
    assert tokens(llm.generate(prompts()[::-1], GREEDY)) == alone[::-1]


def test_prefix_hits(alone):
    llm = engine()
    assert tokens(llm.generate(prompts(), GREEDY)) == alone
    again = llm.generate(prompts(), GREEDY)
    assert tokens(again) == alone
    assert [output.cached_tokens > 0 for output in again] == [False, True, True, True]


def test_preemption(cuda):
    """Too few pages for what all four grow to."""
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    roomy = engine(max_num_batched_tokens=256, enable_prefix_caching=False)
    want = [tokens(roomy.generate([prompt], long))[0] for prompt in prompts()]
    llm = engine(num_pages=PREEMPTING_PAGES, enable_prefix_caching=False)
    assert tokens(llm.generate(prompts(), long)) == want
    assert llm.stats()["preemptions"] > 0


def test_score_is_the_golden_model(cuda):
    logits = LLM(str(TINY_A), device="cuda", activation_quant=False, page_size=16, num_pages=32, max_model_len=256).score([prompts()[1]])[0]
    want = golden()["L33.f32.logits"].numpy()
    assert np.abs(logits.cpu().numpy() - want).mean() <= 2 * 0.053
