"""The engine's own work: options, prompts, outputs, refusals, stop conditions, sampling, memory plan.

Mostly on the index-only model; what needs text or a loaded checkpoint uses the tiny one.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch

from mini_deepinfer import engine
from mini_deepinfer.cache_plan import plan_caches, workspace_bytes
from mini_deepinfer.config import EngineConfig, ModelConfig
from mini_deepinfer.engine import LLM
from mini_deepinfer.kv_cache import Caches
from mini_deepinfer.sampler import SamplingParams
from tests.cpu.fake_model import VOCAB, FakeModel, fake_config
from tests.cpu.tiny_engine import assert_all_returned, checkpoint, greedy, make_llm, prompt


def fake_llm(*, known_ids: np.ndarray | None = None, num_pages: int = 64, **options: Any) -> LLM:
    config = fake_config()
    chosen = EngineConfig(
        **({"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "device": "cpu", "num_pages": num_pages} | options)
    )
    caches = Caches(
        config, num_pages=num_pages, page_size=chosen.page_size, num_slots=chosen.max_num_seqs,
        max_tokens=chosen.max_num_batched_tokens, device="cpu",
    )  # fmt: skip
    return LLM.from_parts(config, chosen, caches, FakeModel(config, caches), known_ids=known_ids)  # type: ignore[arg-type]


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 90, length).tolist()


# ------------------------------------------------------------------ options


def test_unknown_options_are_named_beside_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"unknown option\(s\) max_seqs; known options: .*max_num_seqs"):
        LLM(checkpoint(), max_seqs=3)


def test_wrong_options_are_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("mini_deepinfer.engine_parts.load_weights", never)
    for options, message in (
        ({"page_size": 3}, "page_size"),
        ({"max_model_len": 257}, "max_model_len must be at most the model's 256"),
        ({"num_pages": 3, "max_model_len": 100}, "3 possible"),
        ({"dtype": "int8"}, "dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            make_llm(**options)


def test_the_hit_unit_and_the_memory_table_are_shown(capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_llm(enable_prefix_caching=True)
    shown = capsys.readouterr().err
    assert "hit unit 4 tokens" in shown
    assert "window snapshots" in shown
    assert "hit unit 4 tokens" in caplog.text


# ------------------------------------------------------------------ prompts and outputs


def test_outputs_in_order_with_their_fields() -> None:
    llm = fake_llm()
    outputs = llm.generate([text(5, 1), {"prompt": text(3, 2), "max_tokens": 2}, np.array(text(4, 3))], greedy(3))
    assert [o.index for o in outputs] == [0, 1, 2]
    assert [o.prompt_tokens for o in outputs] == [5, 3, 4]
    assert [len(o.token_ids) for o in outputs] == [3, 2, 3]
    assert all(o.finish_reason == "length" and o.error is None and o.text is None for o in outputs)
    assert_all_returned(llm)


def test_params_per_prompt() -> None:
    llm = fake_llm()
    outputs = llm.generate([text(5, 1)] * 3, [greedy(n) for n in (1, 2, 3)])
    assert [len(o.token_ids) for o in outputs] == [1, 2, 3]
    with pytest.raises(ValueError, match="one per prompt"):
        llm.generate([text(5)] * 3, [greedy(1)] * 2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "at least one token"),
        ([1, VOCAB], "outside the vocabulary"),
        ([1, -1], "outside the vocabulary"),
        ([1, 2.5], "must be an integer"),
        ([1, 95], "image token"),
        (text(300), "max_model_len=256"),
        (text(256), "one place is for the first new token"),
        ("some text", "tokenizer"),
        ({"prompt": [1], "max_new": 3}, "keys prompt"),
        ({"prompt": [1], "max_tokens": 0}, "max_tokens"),
        (7, "must be text, token ids or a mapping"),
    ],
)
def test_a_bad_prompt_fails_alone(bad: Any, message: str) -> None:
    llm = fake_llm()
    good = llm.generate([text(6)], greedy(3))[0].token_ids
    outputs = llm.generate([text(6), bad, text(6)], greedy(3))
    assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
    assert message in (outputs[1].error or "")
    assert outputs[0].token_ids == outputs[2].token_ids == good
    assert_all_returned(llm)


def test_a_request_that_never_fits_says_so_at_once() -> None:
    llm = fake_llm(num_pages=8, max_model_len=200)
    outputs = llm.generate([text(30), text(6)], [greedy(10), greedy(2)])
    assert outputs[0].finish_reason == "error"
    assert "needs 10 pages of 4 tokens; the cache has 8" in (outputs[0].error or "")
    assert outputs[1].finish_reason == "length"


def test_prompts_must_be_a_list() -> None:
    llm = fake_llm()
    for wrong in ("text", [1, 2, 3], {"prompt": [1]}):
        with pytest.raises(TypeError, match="single prompt in a list"):
            llm.generate(wrong)  # type: ignore[arg-type]
    assert llm.generate([]) == []


def test_the_longest_request_ends_with_length() -> None:
    llm = fake_llm(max_model_len=20)
    output = llm.generate([text(15)], greedy(100))[0]
    assert (len(output.token_ids), output.finish_reason) == (5, "length")


# ------------------------------------------------------------------ ends


def test_stop_tokens_and_end_of_text() -> None:
    llm = fake_llm()
    plain = llm.generate([text(6)], greedy(8))[0].token_ids
    params = dataclasses.replace(greedy(8), stop_token_ids=(plain[3],))
    output = llm.generate([text(6)], params)[0]
    assert output.token_ids == plain[: plain.index(plain[3]) + 1]
    assert output.finish_reason == "stop"
    llm.config.eos_token_id = (plain[2],)
    assert llm.generate([text(6)], SamplingParams(max_tokens=8))[0].token_ids == plain[: plain.index(plain[2]) + 1]
    assert llm.generate([text(6)], greedy(8))[0].token_ids == plain


def test_stop_strings() -> None:
    llm = make_llm()
    tokens = prompt(12)
    plain = llm.generate([tokens], greedy(12))[0]
    assert plain.text is not None
    piece = plain.text[len(plain.text) // 2 :][:2]
    output = llm.generate([tokens], dataclasses.replace(greedy(12), stop=(piece,)))[0]
    assert output.finish_reason == "stop"
    assert output.text == plain.text[: plain.text.index(piece)]
    assert len(output.token_ids) < 12
    assert_all_returned(llm)


def test_text_prompts_are_the_tokenizer_s_ids() -> None:
    llm = make_llm()
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("hello world")
    by_text, by_ids = llm.generate(["hello world", ids], greedy(4))
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == llm.tokenizer.decode(by_text.token_ids)


def test_logits_that_are_not_finite_end_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm()
    forward = llm.model.forward

    def broken(batch):
        logits = forward(batch)
        logits[batch.seq_of_token[batch.output_rows].long() == 0] = float("nan")
        return logits

    good = llm.generate([text(5, 2)], greedy(1))[0].token_ids
    monkeypatch.setattr(llm.model, "forward", broken)
    outputs = llm.generate([text(5, 1), text(5, 2)], greedy(1))
    assert [o.finish_reason for o in outputs] == ["error", "length"]
    assert "not finite" in (outputs[0].error or "")
    assert outputs[1].token_ids == good
    assert_all_returned(llm)


def test_an_id_without_a_token_ends_the_request() -> None:
    llm = fake_llm()
    first = llm.generate([text(6)], greedy(4))[0].token_ids
    known = np.ones(VOCAB, dtype=bool)
    known[first[1]] = False
    llm = fake_llm(known_ids=known)
    output = llm.generate([text(6)], greedy(4))[0]
    assert (output.finish_reason, output.token_ids) == ("error", first[:1])
    assert "no token in the tokenizer" in (output.error or "")
    assert "no token" in (llm.generate([[first[1]]], greedy(4))[0].error or "")


def test_a_failed_step_returns_everything() -> None:
    llm = fake_llm()

    def fail(batch):
        raise RuntimeError("out of memory")

    llm.model.forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate([text(5)], greedy(2))
    assert not llm.has_work
    assert_all_returned(llm)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.score([text(5)])
    assert not llm.has_work and not llm._scores


def test_a_step_that_cannot_be_built_is_not_left_over(monkeypatch) -> None:
    llm = fake_llm()

    def fail(*args):
        raise ValueError("no such page")

    monkeypatch.setattr(engine, "build_batch", fail)
    with pytest.raises(ValueError, match="no such page"):
        llm.generate([text(5)], greedy(2))
    assert not llm.has_work
    assert_all_returned(llm)


# ------------------------------------------------------------------ steps


def test_step_interface_and_abort() -> None:
    llm = fake_llm(max_num_batched_tokens=8, max_num_seqs=2)
    ids = [llm.add_request(text(n, n), greedy(3)) for n in (20, 4, 6)]
    assert llm.has_work
    assert llm.step() == []
    with pytest.raises(RuntimeError, match="unfinished"):
        llm.generate([text(3)])
    aborted = llm.abort(ids[0])
    assert aborted is not None
    assert (aborted.index, aborted.finish_reason, aborted.token_ids) == (ids[0], "abort", [])
    assert llm.abort(ids[0]) is None
    assert llm.abort(12345) is None
    outputs = []
    while llm.has_work:
        outputs += llm.step()
    assert sorted(o.index for o in outputs) == ids[1:]
    assert llm.step() == []
    assert_all_returned(llm)


def test_a_request_may_join_at_any_step() -> None:
    llm = fake_llm()
    alone = [llm.generate([text(9, seed)], greedy(6))[0].token_ids for seed in range(4)]
    outputs, ids = {}, []
    for seed in range(4):
        ids.append(llm.add_request(text(9, seed), greedy(6)))
        outputs |= {o.index: o for o in llm.step()}
    while llm.has_work:
        outputs |= {o.index: o for o in llm.step()}
    assert [outputs[i].token_ids for i in ids] == alone


def test_stats() -> None:
    llm = fake_llm(num_pages=13)
    llm.generate([text(20, i) for i in range(4)], greedy(20))
    stats = llm.stats()
    assert stats["preemptions"] >= 3
    assert stats["generated_tokens"] == 80
    assert stats["finished"] == {"length": 4}
    assert stats["free_pages"] == stats["num_pages"] == 13
    llm.generate([text(20, 3)], greedy(1))
    assert llm.stats()["prefix_hits"] > 0


# ------------------------------------------------------------------ sampling through the engine


def test_sampled_tokens_do_not_depend_on_neighbours() -> None:
    params = [SamplingParams(temperature=1.5, top_p=0.9, seed=i, max_tokens=6, ignore_eos=True) for i in range(4)]
    texts = [text(5 + i, i) for i in range(4)]
    llm = fake_llm()
    alone = [llm.generate([t], p)[0].token_ids for t, p in zip(texts, params)]
    order = [2, 0, 3, 1]
    together = fake_llm(max_num_batched_tokens=7).generate([texts[i] for i in order], [params[i] for i in order])
    assert [o.token_ids for o in together] == [alone[i] for i in order]
    tight = fake_llm(num_pages=6, max_num_seqs=4).generate(texts, params)
    assert [o.token_ids for o in tight] == alone


def test_the_engine_seed_is_the_default() -> None:
    hot = SamplingParams(temperature=3.0, max_tokens=8, ignore_eos=True)
    one, two, other = (fake_llm(seed=seed).generate([text(5)], hot)[0].token_ids for seed in (1, 1, 2))
    assert one == two != other


# ------------------------------------------------------------------ score


def test_score_gives_the_logits_of_every_token() -> None:
    texts = [text(n, n) for n in (1, 7, 33)]
    whole = fake_llm(max_num_batched_tokens=64).score(texts)
    assert [tuple(s.shape) for s in whole] == [(1, VOCAB), (7, VOCAB), (33, VOCAB)]
    assert all(s.dtype == torch.float32 for s in whole)
    llm = fake_llm(max_num_batched_tokens=5)
    for _ in range(2):  # the second time the pages are cached, and must not be used
        for got, wanted in zip(llm.score(texts), whole):
            assert torch.equal(got, wanted)
    assert llm.generate([texts[2]], greedy(1))[0].token_ids == [int(whole[2][-1].argmax())]
    with pytest.raises(ValueError, match="prompt 1: prompt: must hold at least one token"):
        llm.score([[1], []])
    assert_all_returned(llm)


def test_score_reaches_the_longest_length() -> None:
    llm = fake_llm(max_model_len=20)
    assert llm.score([text(20)])[0].shape == (20, VOCAB)
    with pytest.raises(ValueError, match="allows 20"):
        llm.score([text(21)])


# ------------------------------------------------------------------ memory plan


def released_plan(free_gib: float, **options: Any):
    return plan_caches(
        ModelConfig.released(), EngineConfig(**options), torch.device("cuda"), weight_bytes=80 * 2**30,
        free_bytes=int(free_gib * 2**30), world=4,
    )  # fmt: skip


def test_plan_for_the_released_model() -> None:
    plan = released_plan(139, max_model_len=131072, max_num_batched_tokens=4096)
    assert plan.num_pages == 16 * 512
    assert plan.max_model_len == 131072
    assert abs(plan.parts["pages"] / (16 * 131072 * 890) - 1) < 1e-6
    assert sum(plan.parts.values()) < plan.free_bytes


def test_plan_shrinks_to_what_fits() -> None:
    roomy, tight = released_plan(139), released_plan(94)
    assert roomy.max_model_len >= tight.max_model_len >= 256
    assert sum(tight.parts.values()) <= tight.free_bytes
    assert tight.num_pages * 256 >= tight.max_model_len


def test_plan_has_room_for_the_decode_graphs() -> None:
    """They hold the steps of all captured shapes; without graphs the room is for pages."""
    loopback = {"ep_loopback": 4, "max_model_len": 131072}
    plan = released_plan(139, **loopback)
    part = plan.parts["decode graphs (at most)"]
    logits = sum((1, 2, 4, 8, 16)) * len((2048, 8192, 32_768, 131_072)) * 129_280 * 4
    assert logits + workspace_bytes(ModelConfig.released(), 16, 131072, 4) < part < 2 * 2**30
    assert sum(plan.parts.values()) < plan.free_bytes
    for change in ({"max_num_seqs": 32}, {"max_model_len": 2**20}, {"batch_invariant": True}):
        assert released_plan(500, **(loopback | change)).parts["decode graphs (at most)"] > part
    for without in ({"cuda_graph": False}, {"dtype": "float32"}, {"activation_quant": False}, {"ep_loopback": 1}):  # 1: four processes
        assert "decode graphs (at most)" not in released_plan(139, **(loopback | without)).parts
    tight = {"ep_loopback": 4, "num_pages": 1024, "max_model_len": 131072}
    least = sum(released_plan(139, **tight).parts.values())
    with pytest.raises(ValueError, match="turn cuda_graph off"):
        released_plan((least - 2**20) / 2**30, **tight)
    assert released_plan((least - 2**20) / 2**30, cuda_graph=False, **tight).num_pages == 1024


def test_plan_refuses_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=1048576.*does not fit.*82.000 GiB free"):
        released_plan(82, max_model_len=1048576)
    with pytest.raises(ValueError, match="does not fit"):
        released_plan(70)


def test_explicit_pages_bound_the_automatic_length() -> None:
    plan = released_plan(139, num_pages=10)
    assert (plan.num_pages, plan.max_model_len) == (10, 2560)


def test_the_package_offers_the_front_end() -> None:
    import mini_deepinfer

    assert mini_deepinfer.LLM is LLM
    assert mini_deepinfer.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        mini_deepinfer.Llm  # noqa: B018
