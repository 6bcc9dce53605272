"""The whole engine over several ranks gives the bits of one rank: uneven experts, ranks without tokens, experts without tokens.

All fresh memory is filled with NaN patterns, so that a row nobody wrote cannot pass for zero.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.launch import read_outputs, run_ranks

RUN = """
import json, sys
from mini_deepinfer.engine import LLM
from tests.dist.answers import answer, poison_memory
folder, out, world, prompts, unused = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]), json.loads(sys.argv[5])
llm = LLM(folder, device="cpu", page_size=8, num_pages=64, max_num_batched_tokens=8, max_num_seqs=4, ep_size=world,
          enable_prefix_caching=False)
for block in llm.model.blocks:  # weights of experts nobody picks must not matter
    for at, expert in enumerate(block.ffn.experts):
        if expert in unused:
            block.ffn.w13_scale[at] = 255
            block.ffn.w2_scale[at] = 255
poison_memory(llm)
answer(llm, prompts, out)
"""

UNEVEN = [1, 40, 7, 3, 12]  # lengths: uneven chunk counts, and 4 + 1 prompts on 4 ranks
FEW = [1, 40]  # fewer prompts than ranks


def run(folder, out, world, lengths, unused=()):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(4, 100, (length,), generator=generator).tolist() for length in lengths]
    arguments = [str(folder), str(out), str(world), json.dumps(prompts), json.dumps(list(unused))]
    results = run_ranks(RUN, world, arguments=arguments, limit_s=240)
    return read_outputs(results, out)


def check_equal(one, many):
    assert one.keys() == many.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, many[name]), f"{name} differs"
        assert bool(torch.isfinite(tensor).all()), name


def with_gate_bias(source, target, experts):
    """A copy of a checkpoint whose router picks only these experts."""
    shutil.copytree(source, target)
    for path in target.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith("ffn.gate.bias"):
                tensor.fill_(-100.0)
                tensor[list(experts)] = 100.0
        save_file(tensors, path)
    return target


@pytest.fixture(scope="module")
def one_rank(cases_folder, tmp_path_factory):
    return run(cases_folder, tmp_path_factory.mktemp("one") / "one.safetensors", 1, UNEVEN)


def test_four_ranks(cases_folder, one_rank, tmp_path):
    check_equal(one_rank, run(cases_folder, tmp_path / "four", 4, UNEVEN))


def test_fewer_prompts_than_ranks(cases_folder, one_rank, tmp_path):
    few = run(cases_folder, tmp_path / "few", 4, FEW)
    check_equal({name: tensor for name, tensor in one_rank.items() if int(name.split(".")[1]) < len(FEW)}, few)


def test_experts_do_not_divide_by_ranks(six_experts_folder, tmp_path):
    one = run(six_experts_folder, tmp_path / "one", 1, UNEVEN)
    check_equal(one, run(six_experts_folder, tmp_path / "four", 4, UNEVEN))


@pytest.mark.parametrize("experts", [(0, 1), (6, 7)], ids=["first rank", "last rank"])
def test_only_two_experts_are_used(cases_folder, tmp_path, experts):
    folder = with_gate_bias(cases_folder, tmp_path / "biased", experts)
    one = run(folder, tmp_path / "one", 1, FEW)
    unused = [expert for expert in range(8) if expert not in experts]
    check_equal(one, run(folder, tmp_path / "four", 4, FEW, unused))
