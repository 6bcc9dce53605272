"""Reading checkpoints: refusals before anything is read, the one owner of a tensor, ranks, engram tables."""

from __future__ import annotations

import json
import shutil
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mini_deepinfer.checkpoint import Checkpoint, CheckpointError, check_checkpoint, memory_plan
from mini_deepinfer.config import ModelConfig
from mini_deepinfer.tensor_table import expert_range, tensor_table
from mini_deepinfer.tiny_checkpoint import preset_config, write_tiny_checkpoint
from mini_deepinfer.weights import EngramTable, load_weights
from tests.golden import TINY_A


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tiny_checkpoint(folder, preset_config("cases"), num_shards=2)
    return folder


@pytest.fixture
def folder(source, tmp_path):
    """A private copy to damage."""
    return shutil.copytree(source, tmp_path / "copy")


@pytest.fixture(scope="module")
def config(source):
    return ModelConfig.from_folder(source)


def weight_map(folder) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def set_weight_map(folder, mapping) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))


def rewrite(folder, name, change) -> None:
    """Load the shard that owns `name`, apply `change(tensors)`, save it again."""
    path = folder / weight_map(folder)[name]
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refuse(folder, config, *messages, reads=0) -> CheckpointError:
    """Loading must fail with every message and without having read a weight."""
    count = []
    original = Checkpoint.read_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "read_into", lambda *args: (count.append(1), original(*args)))
        with pytest.raises(CheckpointError) as caught:
            load_weights(folder, config, progress=False)
    assert len(count) == reads
    for message in messages:
        assert message in str(caught.value)
    assert check_checkpoint(folder, config).problems == caught.value.problems
    return caught.value


def test_loads_every_byte_of_the_golden_checkpoint():
    config = ModelConfig.from_folder(TINY_A)
    weights = load_weights(TINY_A, config, progress=False)
    inner, seen = config.moe_intermediate_size, 0
    for path in sorted(TINY_A.glob("model-*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                stored = file.get_tensor(name)
                if ".experts." in name and "shared" not in name:
                    base, expert, matrix, kind = name.rsplit(".", 3)
                    stack = weights.tensors[f"{base}.{'w2' if matrix == 'w2' else 'w13'}"
                                            f"{'_scale' if kind == 'scale' else ''}"]
                    got = stack[int(expert)]
                    got = got if matrix == "w2" else got[:inner] if matrix == "w1" else got[inner:]
                elif name.endswith("bias_vl"):
                    assert name not in weights.tensors
                    continue
                elif ".engram.embed." in name:
                    table = weights.engram[int(name.split(".")[1])]
                    got = table.gather(torch.arange(table.num_rows))[name.endswith("scale")]
                else:
                    got = weights.tensors[name]
                    if stored.dtype not in (torch.float8_e8m0fnu,):
                        assert got.dtype == stored.dtype
                assert torch.equal(got.view(torch.uint8), stored.view(torch.uint8)), name
                seen += 1
    assert seen == len(tensor_table(config)) - config.num_hidden_layers  # all but bias_vl
    assert weights.experts == range(16)


def test_stacks_have_the_documented_shapes():
    config = ModelConfig.from_folder(TINY_A)
    tensors = load_weights(TINY_A, config, rank=1, world=3, progress=False).tensors
    held, inner, hidden = len(expert_range(16, 3, 1)), config.moe_intermediate_size, config.hidden_size
    prefix = "layers.4.ffn.experts"
    assert tensors[f"{prefix}.w13"].shape == (held, 2 * inner, hidden // 2)
    assert tensors[f"{prefix}.w13_scale"].shape == (held, 2 * inner, hidden // 32)
    assert tensors[f"{prefix}.w2"].shape == (held, hidden, inner // 2)
    assert tensors[f"{prefix}.w2_scale"].shape == (held, hidden, inner // 32)
    assert all(tensors[f"{prefix}.{k}"].dtype == torch.uint8 for k in ("w13", "w13_scale", "w2", "w2_scale"))
    assert tensors["layers.0.attn.wq_a.scale"].dtype == torch.uint8


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ranks_read_their_own_experts_only(source, config, monkeypatch, world):
    names: list[str] = []
    original = Checkpoint.read_into
    monkeypatch.setattr(Checkpoint, "read_into",
                        lambda self, name, *args: (names.append(name), original(self, name, *args))[1])
    whole = load_weights(source, config, progress=False)
    for rank in range(world):
        names.clear()
        part = load_weights(source, config, rank=rank, world=world, progress=False)
        experts = [name for name in names if ".experts." in name and "shared" not in name]
        assert len(experts) == 6 * config.num_hidden_layers * len(expert_range(8, world, rank))
        assert {int(name.split(".")[4]) for name in experts} == set(part.experts)
        assert not any("bias_vl" in name or ".engram.embed." in name for name in names)
        assert len(names) == len(set(names))
        for name, tensor in part.tensors.items():
            expected = whole.tensors[name]
            expected = expected[part.experts.start:part.experts.stop] if ".ffn.experts." in name else expected
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


def test_missing_tensor(folder, config):
    mapping = weight_map(folder)
    del mapping["layers.2.attn.wq_b.scale"]
    set_weight_map(folder, mapping)
    error = refuse(folder, config, "layers.2.attn.wq_b.scale is missing: wanted F8_E8M0 [8, 2]")
    assert len(error.problems) == 1


def test_index_points_at_a_file_without_the_tensor(folder, config):
    rewrite(folder, "norm.weight", lambda tensors: tensors.pop("norm.weight"))
    refuse(folder, config, "norm.weight is missing: the index places it in model-00001-of-00002.safetensors")


def test_a_copy_in_another_shard_is_never_read(folder, config):
    """The other shard's copy has another shape and NaN in it; the index does not name it."""
    mapping = weight_map(folder)
    name = "layers.0.attn_norm.weight"
    other = next(file for file in mapping.values() if file != mapping[name])
    tensors = load_file(folder / other)
    tensors[name] = torch.full((7,), float("nan"))
    save_file(tensors, folder / other)
    weights = load_weights(folder, config, progress=False)
    assert torch.equal(weights.tensors[name], load_file(folder / mapping[name])[name])


def test_the_index_decides_between_two_copies(folder, config):
    mapping = weight_map(folder)
    name = "norm.weight"
    other = next(file for file in mapping.values() if file != mapping[name])
    tensors = load_file(folder / other)
    tensors[name] = torch.full((config.hidden_size,), 3.0, dtype=torch.bfloat16)
    save_file(tensors, folder / other)
    set_weight_map(folder, {**mapping, name: other})
    assert load_weights(folder, config, progress=False).tensors[name].eq(3.0).all()


def test_truncated_file(folder, config):
    path = folder / "model-00002-of-00002.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 1)
    error = refuse(folder, config, "model-00002-of-00002.safetensors is truncated", f"the file has {size - 1}")
    assert len(error.problems) == 1


@pytest.mark.parametrize("length", [0, 4, 8, 100])
def test_file_cut_inside_its_header(folder, config, length):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    refuse(folder, config, "model-00002-of-00002.safetensors is truncated or not safetensors")


def test_header_that_is_not_json(folder, config):
    (folder / "model-00001-of-00002.safetensors").write_bytes(struct.pack("<Q", 4) + b"oops" + b"\0" * 64)
    refuse(folder, config, "header that is not JSON")


def test_missing_file(folder, config):
    (folder / "model-00001-of-00002.safetensors").unlink()
    refuse(folder, config, "model-00001-of-00002.safetensors is missing")


@pytest.mark.parametrize(("name", "replacement", "message"), [
    ("norm.weight", torch.ones(128), "norm.weight in {file}: wanted BF16 [128], got F32 [128]"),
    ("norm.weight", torch.ones(64, dtype=torch.bfloat16), "wanted BF16 [128], got BF16 [64]"),
    ("layers.0.attn.wq_a.scale", torch.ones(2, 4), "wanted F8_E8M0 [2, 4], got F32 [2, 4]"),
    ("layers.0.ffn.experts.0.w1.weight", torch.zeros(64, 64, dtype=torch.uint8), "wanted I8 [64, 64], got U8 [64, 64]"),
    ("layers.0.ffn.experts.3.w1.weight", torch.zeros(64, 128, dtype=torch.int8), "wanted I8 [64, 64], got I8 [64, 128]"),
    ("layers.6.ffn.gate.bias_vl", torch.zeros(8, dtype=torch.bfloat16), "wanted F32 [8], got BF16 [8]"),
])
def test_wrong_dtype_or_shape(folder, config, name, replacement, message):
    file = weight_map(folder)[name]
    rewrite(folder, name, lambda tensors: tensors.update({name: replacement}))
    refuse(folder, config, name, message.format(file=file))


def test_unknown_tensor_in_the_index_or_only_in_a_file(folder, config):
    rewrite(folder, "norm.weight", lambda tensors: tensors.update({"layers.0.attn.q_head_norm.weight": torch.ones(4)}))
    refuse(folder, config, "layers.0.attn.q_head_norm.weight is unknown")
    set_weight_map(folder, {**weight_map(folder), "layers.9.ape": "model-00001-of-00002.safetensors"})
    refuse(folder, config, "layers.0.attn.q_head_norm.weight is unknown", "layers.9.ape is unknown")


def test_gate_of_a_ratio_one_compressor_is_refused(folder, config):
    """Layer 4 has ratio 1: it loads without wgate, and a checkpoint that has one is of another model."""
    assert "layers.1.attn.compressor.wgate.weight" in weight_map(folder)
    name = "layers.4.attn.compressor.wgate.weight"
    assert name not in weight_map(folder)
    rewrite(folder, "layers.4.attn.compressor.wkv.weight", lambda tensors: tensors.update({name: torch.ones(64, 128)}))
    refuse(folder, config, f"{name} is unknown")


def test_skipped_tensors_are_accepted(folder, config):
    extra = {"mtp.0.main_norm": torch.ones(3), "vision.blocks.0.w1": torch.ones(2), "image_start": torch.ones(1),
             "aligner.w1": torch.ones(1)}
    save_file(extra, folder / "extra.safetensors")
    set_weight_map(folder, {**weight_map(folder), **dict.fromkeys(extra, "extra.safetensors")})
    load_weights(folder, config, progress=False)
    assert check_checkpoint(folder, config).skipped == 4
    (folder / "extra.safetensors").unlink()  # never opened, so it may be left out of a download
    load_weights(folder, config, progress=False)


def test_image_router_bias_may_be_absent(folder, config):
    mapping = weight_map(folder)
    gone = [name for name in mapping if name.endswith("bias_vl")]
    for name in gone:
        rewrite(folder, name, lambda tensors, name=name: tensors.pop(name))
    set_weight_map(folder, {name: file for name, file in mapping.items() if name not in gone})
    load_weights(folder, config, progress=False)


def patch_bytes(folder, name, at, value) -> None:
    path = folder / weight_map(folder)[name]
    blob = bytearray(path.read_bytes())
    header = struct.unpack("<Q", blob[:8])[0]
    begin = json.loads(blob[8:8 + header])[name]["data_offsets"][0]
    blob[8 + header + begin + at] = value
    path.write_bytes(blob)


@pytest.mark.parametrize("name", ["layers.3.attn.wo_a.scale", "layers.6.ffn.experts.7.w2.scale"])
def test_nan_scale_is_refused_by_name(folder, config, name):
    patch_bytes(folder, name, 3, 255)
    with pytest.raises(ValueError, match=rf"{name} in model-.*255"):
        load_weights(folder, config, progress=False)


def test_scale_bytes_0_and_254_are_numbers(folder, config):
    patch_bytes(folder, "layers.3.attn.wo_a.scale", 0, 0)
    patch_bytes(folder, "layers.3.attn.wo_a.scale", 1, 254)
    scale = load_weights(folder, config, progress=False).tensors["layers.3.attn.wo_a.scale"]
    assert scale.flatten()[:2].tolist() == [0, 254]


def test_nan_scale_of_an_engram_row_is_found_when_the_row_is_read(folder, config):
    patch_bytes(folder, "layers.1.engram.embed.scale", 5, 255)
    table = load_weights(folder, config, progress=False).engram[1]
    table.gather(torch.arange(5))
    with pytest.raises(ValueError, match=r"layers\.1\.engram\.embed: row 5 has scale byte 255"):
        table.gather(torch.tensor([2, 5]))


def test_engram_table(source, config):
    weights = load_weights(source, config, progress=False)
    assert list(weights.engram) == [1]
    table = weights.engram[1]
    assert (table.num_rows, table.head_dim, table.dummy_rows) == (config.engram_num_embeddings[0], 32, None)
    ids = torch.tensor([table.num_rows - 1, 0, 3, 3])
    codes, scales = table.gather(ids)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.uint8, (4, 32), torch.uint8, (4, 1))
    whole = table.gather(np.arange(table.num_rows))
    assert torch.equal(codes, whole[0][ids]) and torch.equal(scales, whole[1][ids])
    assert table.gather(torch.empty(0, dtype=torch.int64))[0].shape == (0, 32)
    for wrong in (-1, table.num_rows):
        with pytest.raises(ValueError, match=f"table of {table.num_rows} rows"):
            table.gather(torch.tensor([0, wrong]))
    for wrong in (torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int64)):
        with pytest.raises(TypeError, match="int64"):
            table.gather(wrong)


def test_engram_row_past_32_bits():
    """Row 8,388,608 of a 256-byte row starts at byte 2^31; the table is a view of one row, so nothing is allocated."""
    rows = 2**23 + 5
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8), (rows, 256))
    scales = np.broadcast_to(np.full(8, 127, np.uint8), (rows, 8))
    table = EngramTable("t", codes, scales, rows)
    assert torch.equal(table.gather(torch.tensor([2**23 + 4]))[0][0], torch.arange(256, dtype=torch.uint8))


def test_single_file_checkpoint(tmp_path):
    config = write_tiny_checkpoint(tmp_path / "one", preset_config("cases"), num_shards=1)
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    write_tiny_checkpoint(tmp_path / "two", preset_config("cases"), num_shards=3)
    one = load_weights(tmp_path / "one", config, progress=False).tensors
    two = load_weights(tmp_path / "two", config, progress=False).tensors
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in two)


def test_no_checkpoint(tmp_path, config):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_weights(tmp_path, config, progress=False)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": []}'])
def test_damaged_index(folder, config, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(folder, config, progress=False)


def test_index_must_stay_in_the_folder(folder, config):
    set_weight_map(folder, {**weight_map(folder), "norm.weight": "../other.safetensors"})
    with pytest.raises(CheckpointError, match="outside the folder"):
        load_weights(folder, config, progress=False)


def test_many_problems_are_counted(folder, config):
    set_weight_map(folder, {"norm.weight": "model-00001-of-00002.safetensors"})
    error = refuse(folder, config, "... and ")
    assert len(error.problems) > 100 and len(str(error).splitlines()) == 12


def test_report(source, config):
    report = check_checkpoint(source, config)
    assert report.ok and report.found == report.expected
    text = "\n".join(report.lines())
    assert "routed experts" in text and "PROBLEM" not in text


def test_memory_plan_of_the_released_model():
    plan = memory_plan(ModelConfig.released())
    assert plan.cache_per_token == 890
    assert plan.window_per_request == 40 * 128 * 528
    assert plan.host_tables == 202_758_032_400
    dense = 501_382_611_408 - 202_758_032_400 - 288_777_830_400 - 61_440
    assert plan.weights_per_rank == {1: dense + 288_777_830_400, 4: dense + 288_777_830_400 // 4}
