// Tensors -> checks -> Params -> launch for the indexer ops. Included by binding.cpp only.
#pragma once
#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "indexer/indexer.h"
#endif

namespace mdi::indexer {

inline void define_indexer(Library& m) {
    m.def("indexer_write_keys(Tensor k, Tensor(a!) rows, Tensor slots) -> ()");
    m.def("indexer_quant_query(Tensor q, Tensor(a!) codes, Tensor(b!) scale) -> ()");
    m.def("indexer_rope_quant_query(Tensor q, Tensor positions, Tensor table, Tensor(a!) codes, Tensor(b!) scale) -> ()");
    m.def(
        "indexer_logits(Tensor q_codes, Tensor q_scale, Tensor weights, Tensor keys, Tensor page_table, Tensor seq_of_token, "
        "Tensor visible, int entries_per_page, Tensor(a!) out) -> ()");
#ifdef MDI_WITH_SM90
    m.def(
        "indexer_logits_sm90(Tensor q_codes, Tensor q_scale, Tensor weights, Tensor keys, Tensor page_table, Tensor seq_of_token, "
        "Tensor visible, int entries_per_page, Tensor(a!) workspace, Tensor(b!) out) -> ()");
    m.def(
        "indexer_candidate_logits_sm90(Tensor q_codes, Tensor q_scale, Tensor weights, Tensor keys, Tensor page_table, "
        "Tensor seq_of_token, Tensor visible, int entries_per_page, Tensor candidates, int block_size, Tensor(a!) workspace, "
        "Tensor(b!) out) -> ()");
#endif
    m.def(
        "indexer_candidate_logits(Tensor q_codes, Tensor q_scale, Tensor weights, Tensor keys, Tensor page_table, "
        "Tensor seq_of_token, Tensor visible, int entries_per_page, Tensor candidates, int block_size, Tensor(a!) out) -> ()");
    m.def("indexer_candidate_blocks(Tensor logits, Tensor visible, int block_size, Tensor(a!) blocks) -> ()");
    m.def(
        "indexer_topk(Tensor logits, Tensor? visible, Tensor? candidates, int block_size, Tensor(a!) ids, Tensor(b!) count) "
        "-> ()");
    m.def(
        "indexer_topk_blocks(Tensor logits, Tensor visible, int block_size, Tensor(a!) ids, Tensor(b!) count, Tensor(c!) blocks) "
        "-> ()");
    m.def("indexer_cache_rows(Tensor ids, Tensor page_table, Tensor seq_of_token, int entries_per_page, Tensor(a!) rows) -> ()");
}

#ifdef MDI_WITH_CUDA
struct NamedTensor {
    const char* name;
    const Tensor& tensor;
};

inline void check_all(const char* op, const DeviceScope& scope, std::initializer_list<NamedTensor> tensors) {
    for (const auto& [name, tensor] : tensors) {
        check_cuda_tensor(op, name, tensor, scope.device);
        check_contiguous(op, name, tensor);
    }
}

inline int32_t as_int32(const char* op, const char* name, int64_t value) {
    check_int32(op, name, value);
    return static_cast<int32_t>(value);
}

inline void check_head_dim(const char* op, const Tensor& tensor, int64_t head_dim) {
    MDI_CHECK(op, tensor, head_dim == 64 || head_dim == 128, "must have head dim 64 or 128, got Di=", head_dim);
}

inline void write_keys(const Tensor& k, const Tensor& rows, const Tensor& slots) {
    constexpr const char* op = "indexer.write_keys";
    const DeviceScope scope(k);
    check_all(op, scope, {{"k", k}, {"rows", rows}, {"slots", slots}});
    MDI_CHECK(op, k, k.dim() == 2, "must have two dimensions, got ", list_string(k.sizes()));
    const int64_t g = k.size(0), di = k.size(1);
    check_head_dim(op, k, di);
    MDI_CHECK_DTYPE(op, k, ScalarType::BFloat16);
    MDI_CHECK_DTYPE(op, rows, ScalarType::Byte);
    MDI_CHECK_DTYPE(op, slots, ScalarType::Int);
    MDI_CHECK(op, rows, rows.dim() == 2, "must have two dimensions, got ", list_string(rows.sizes()));
    MDI_CHECK_SHAPE(op, rows, {"S", rows.size(0)}, {"Di/2+Di/32", di / 2 + di / 32});
    MDI_CHECK_SHAPE(op, slots, {"G", g});
    MDI_CHECK_ALIGN(op, k, 16);
    MDI_CHECK_ALIGN(op, rows, 2);
    MDI_CHECK_INT32(op, g);
    uint8_t* base = data<uint8_t>(rows);
    launch_quantise(op, {g, static_cast<int>(di), data<const uint16_t>(k), base, base + di / 2, rows.size(1), rows.size(1),
                         data<const int32_t>(slots), rows.size(0), scope.stream});
}

inline QuantParams query_params(const char* op, const Tensor& q, const Tensor& codes, const Tensor& scale, const DeviceScope& scope) {
    check_all(op, scope, {{"q", q}, {"codes", codes}, {"scale", scale}});
    MDI_CHECK(op, q, q.dim() == 3, "must have three dimensions, got ", list_string(q.sizes()));
    const int64_t t = q.size(0), hi = q.size(1), di = q.size(2);
    check_head_dim(op, q, di);
    MDI_CHECK_DTYPE(op, q, ScalarType::BFloat16);
    MDI_CHECK_DTYPE(op, codes, ScalarType::Byte);
    MDI_CHECK_DTYPE(op, scale, ScalarType::Byte);
    MDI_CHECK_SHAPE(op, codes, {"T", t}, {"Hi", hi}, {"Di/2", di / 2});
    MDI_CHECK_SHAPE(op, scale, {"T", t}, {"Hi", hi}, {"Di/32", di / 32});
    MDI_CHECK_ALIGN(op, q, 16);
    MDI_CHECK_ALIGN(op, codes, 4);
    MDI_CHECK_INT32(op, t * hi);
    return {t * hi, static_cast<int>(di), data<const uint16_t>(q), data<uint8_t>(codes), data<uint8_t>(scale), di / 2, di / 32,
            nullptr, t * hi, scope.stream};
}

inline void quant_query(const Tensor& q, const Tensor& codes, const Tensor& scale) {
    constexpr const char* op = "indexer.quant_query";
    const DeviceScope scope(q);
    launch_quantise(op, query_params(op, q, codes, scale, scope));
}

inline void rope_quant_query(const Tensor& q, const Tensor& positions, const Tensor& table, const Tensor& codes,
                             const Tensor& scale) {
    constexpr const char* op = "indexer.rope_quant_query";
    const DeviceScope scope(q);
    const QuantParams params = query_params(op, q, codes, scale, scope);
    const int rope_dim = check_rotary(op, positions, table, q.size(0), q.size(2), scope.device);
    launch_rope_quant_query(params, {static_cast<int>(q.size(1)), rope_dim, data<const int32_t>(positions), data<const float>(table)});
}

inline LogitsParams logits_params(const char* op, const Tensor& q_codes, const Tensor& q_scale, const Tensor& weights,
                                  const Tensor& keys, const Tensor& page_table, const Tensor& seq_of_token, const Tensor& visible,
                                  int64_t entries_per_page, const Tensor& out, const DeviceScope& scope) {
    check_all(op, scope, {{"q_codes", q_codes}, {"q_scale", q_scale}, {"weights", weights}, {"keys", keys},
                          {"page_table", page_table}, {"seq_of_token", seq_of_token}, {"visible", visible}});
    check_cuda_tensor(op, "out", out, scope.device);
    MDI_CHECK(op, q_codes, q_codes.dim() == 3, "must have three dimensions, got ", list_string(q_codes.sizes()));
    MDI_CHECK(op, keys, keys.dim() == 2, "must have two dimensions, got ", list_string(keys.sizes()));
    MDI_CHECK(op, page_table, page_table.dim() == 2, "must have two dimensions, got ", list_string(page_table.sizes()));
    MDI_CHECK(op, out, out.dim() == 2, "must have two dimensions, got ", list_string(out.sizes()));
    const int64_t t = q_codes.size(0), hi = q_codes.size(1), di = q_codes.size(2) * 2;
    check_head_dim(op, q_codes, di);
    MDI_CHECK(op, q_codes, hi >= 1 && hi <= 64, "must have 1 to 64 heads, got Hi=", hi);
    for (const auto& [name, tensor] : {NamedTensor{"q_codes", q_codes}, {"q_scale", q_scale}, {"keys", keys}})
        check_dtype(op, name, tensor, {ScalarType::Byte});
    for (const auto& [name, tensor] : {NamedTensor{"page_table", page_table}, {"seq_of_token", seq_of_token}, {"visible", visible}})
        check_dtype(op, name, tensor, {ScalarType::Int});
    MDI_CHECK_DTYPE(op, weights, ScalarType::BFloat16);
    MDI_CHECK_DTYPE(op, out, ScalarType::BFloat16);
    MDI_CHECK_SHAPE(op, q_scale, {"T", t}, {"Hi", hi}, {"Di/32", di / 32});
    MDI_CHECK_SHAPE(op, weights, {"T", t}, {"Hi", hi});
    MDI_CHECK_SHAPE(op, keys, {"S", keys.size(0)}, {"Di/2+Di/32", di / 2 + di / 32});
    MDI_CHECK_SHAPE(op, seq_of_token, {"T", t});
    MDI_CHECK_SHAPE(op, visible, {"T", t});
    MDI_CHECK_SHAPE(op, out, {"T", t}, {"n", out.size(1)});
    if (out.size(1) > 1) MDI_CHECK_STRIDE(op, out, 1, 1);
    MDI_CHECK(op, keys, entries_per_page >= 1 && keys.size(0) % entries_per_page == 0,
              "must hold whole pages of entries_per_page=", entries_per_page, " rows, got S=", keys.size(0));
    MDI_CHECK_ALIGN(op, q_codes, 16);
    MDI_CHECK_ALIGN(op, keys, 4);
    LogitsParams p = {};
    p.num_tokens = as_int32(op, "T", t);
    p.num_heads = static_cast<int>(hi);
    p.head_dim = static_cast<int>(di);
    p.num_cols = as_int32(op, "num_cols", out.size(1) < (int64_t{1} << 31) - 4096 ? out.size(1) : -1);
    p.entries_per_page = as_int32(op, "entries_per_page", entries_per_page);
    p.pages_per_seq = as_int32(op, "pages per sequence", page_table.size(1));
    p.num_seqs = as_int32(op, "B", page_table.size(0));
    p.q_codes = data<const uint8_t>(q_codes);
    p.q_scale = data<const uint8_t>(q_scale);
    p.weights = data<const uint16_t>(weights);
    p.keys = data<const uint8_t>(keys);
    p.page_table = data<const int32_t>(page_table);
    p.seq_of_token = data<const int32_t>(seq_of_token);
    p.visible = data<const int32_t>(visible);
    p.out = data<uint16_t>(out);
    p.out_stride = out.stride(0);
    p.stream = scope.stream;
    return p;
}

inline void logits(const Tensor& q_codes, const Tensor& q_scale, const Tensor& weights, const Tensor& keys,
                   const Tensor& page_table, const Tensor& seq_of_token, const Tensor& visible, int64_t entries_per_page,
                   const Tensor& out) {
    const DeviceScope scope(q_codes);
    launch_logits(logits_params("indexer.logits", q_codes, q_scale, weights, keys, page_table, seq_of_token, visible,
                                entries_per_page, out, scope));
}

#ifdef MDI_WITH_SM90
inline void check_folds(const char* op, const LogitsParams& p, const Tensor& q_codes) {
    MDI_CHECK(op, q_codes, p.num_heads <= kFoldedHeads && p.head_dim == kFoldedHeadDim, "must have at most ", kFoldedHeads,
              " heads of ", kFoldedHeadDim, " to be folded, got ", list_string(q_codes.sizes()));
}

inline void logits_sm90(const Tensor& q_codes, const Tensor& q_scale, const Tensor& weights, const Tensor& keys,
                        const Tensor& page_table, const Tensor& seq_of_token, const Tensor& visible, int64_t entries_per_page,
                        const Tensor& workspace, const Tensor& out) {
    constexpr const char* op = "indexer.logits";
    const DeviceScope scope(q_codes);
    LogitsParams p = logits_params(op, q_codes, q_scale, weights, keys, page_table, seq_of_token, visible, entries_per_page, out,
                                   scope);
    check_all(op, scope, {{"workspace", workspace}});
    MDI_CHECK_DTYPE(op, workspace, ScalarType::Byte);
    check_folds(op, p, q_codes);
    MDI_CHECK(op, out, p.out_stride <= kMaxFoldedStride, "must have rows at most ", kMaxFoldedStride, " apart, got ", p.out_stride);
    const int64_t needed = logits_workspace_bytes(p.num_tokens, p.num_seqs, p.num_cols);
    MDI_CHECK(op, workspace, workspace.numel() >= needed, "must hold ", needed, " bytes, got ", workspace.numel());
    MDI_CHECK_ALIGN(op, workspace, 16);
    p.workspace = data<uint8_t>(workspace);
    launch_logits_sm90(p);
}
#endif

inline LogitsParams candidate_params(const char* op, const Tensor& q_codes, const Tensor& q_scale, const Tensor& weights,
                                     const Tensor& keys, const Tensor& page_table, const Tensor& seq_of_token,
                                     const Tensor& visible, int64_t entries_per_page, const Tensor& candidates,
                                     int64_t block_size, const Tensor& out, const DeviceScope& scope) {
    LogitsParams p = logits_params(op, q_codes, q_scale, weights, keys, page_table, seq_of_token, visible, entries_per_page, out,
                                   scope);
    check_all(op, scope, {{"candidates", candidates}});
    MDI_CHECK_DTYPE(op, candidates, ScalarType::Int);
    MDI_CHECK(op, candidates, candidates.dim() == 2 && block_size >= 1, "must have two dimensions and block_size >= 1, got ",
              list_string(candidates.sizes()), " and block_size=", block_size);
    MDI_CHECK_SHAPE(op, candidates, {"T", q_codes.size(0)}, {"C", candidates.size(1)});
    MDI_CHECK_SHAPE(op, out, {"T", q_codes.size(0)}, {"C*block_size", candidates.size(1) * block_size});
    p.candidates = data<const int32_t>(candidates);
    p.num_candidates = as_int32(op, "C", candidates.size(1));
    p.block_size = as_int32(op, "block_size", block_size);
    return p;
}

inline void candidate_logits(const Tensor& q_codes, const Tensor& q_scale, const Tensor& weights, const Tensor& keys,
                             const Tensor& page_table, const Tensor& seq_of_token, const Tensor& visible,
                             int64_t entries_per_page, const Tensor& candidates, int64_t block_size, const Tensor& out) {
    const DeviceScope scope(q_codes);
    launch_candidate_logits(candidate_params("indexer.candidate_logits", q_codes, q_scale, weights, keys, page_table, seq_of_token,
                                             visible, entries_per_page, candidates, block_size, out, scope));
}

#ifdef MDI_WITH_SM90
inline void candidate_logits_sm90(const Tensor& q_codes, const Tensor& q_scale, const Tensor& weights, const Tensor& keys,
                                  const Tensor& page_table, const Tensor& seq_of_token, const Tensor& visible,
                                  int64_t entries_per_page, const Tensor& candidates, int64_t block_size, const Tensor& workspace,
                                  const Tensor& out) {
    constexpr const char* op = "indexer.candidate_logits";
    const DeviceScope scope(q_codes);
    LogitsParams p = candidate_params(op, q_codes, q_scale, weights, keys, page_table, seq_of_token, visible, entries_per_page,
                                      candidates, block_size, out, scope);
    check_all(op, scope, {{"workspace", workspace}});
    MDI_CHECK_DTYPE(op, workspace, ScalarType::Byte);
    check_folds(op, p, q_codes);
    MDI_CHECK(op, candidates, p.block_size == kFoldedBlock && entries_per_page % kFoldedBlock == 0,
              "must be blocks of ", kFoldedBlock, " in pages of whole blocks, got block_size=", block_size,
              " and entries_per_page=", entries_per_page);
    MDI_CHECK(op, candidates, p.num_candidates <= kMaxFoldedCandidates, "must have at most ", kMaxFoldedCandidates,
              " columns, got ", p.num_candidates);
    const int64_t entries = static_cast<int64_t>(p.pages_per_seq) * p.entries_per_page;
    MDI_CHECK(op, page_table, p.num_seqs * entries <= kMaxFoldedEntries, "must hold at most ", kMaxFoldedEntries, " entries, got ",
              p.num_seqs * entries);
    MDI_CHECK_ALIGN(op, keys, 16);
    MDI_CHECK_ALIGN(op, out, 16);
    const int64_t needed = candidate_workspace_bytes(p.num_tokens, p.num_seqs, entries, p.num_candidates);
    MDI_CHECK(op, workspace, workspace.numel() >= needed, "must hold ", needed, " bytes, got ", workspace.numel());
    MDI_CHECK_ALIGN(op, workspace, 16);
    p.workspace = data<uint8_t>(workspace);
    launch_candidate_logits_sm90(p);
}
#endif

inline TopkParams select_params(const char* op, const Tensor& logits, const std::optional<Tensor>& visible,
                                const DeviceScope& scope) {
    check_cuda_tensor(op, "logits", logits, scope.device);
    MDI_CHECK(op, logits, logits.dim() == 2, "must have two dimensions, got ", list_string(logits.sizes()));
    MDI_CHECK_DTYPE(op, logits, ScalarType::BFloat16, ScalarType::Float);
    if (logits.size(1) > 1) MDI_CHECK_STRIDE(op, logits, 1, 1);
    if (visible) {
        check_all(op, scope, {{"visible", *visible}});
        check_dtype(op, "visible", *visible, {ScalarType::Int});
        check_shape(op, "visible", *visible, {{"T", logits.size(0)}});
    }
    TopkParams p = {};
    p.num_tokens = as_int32(op, "T", logits.size(0));
    p.num_cols = as_int32(op, "n", logits.size(1) < (int64_t{1} << 31) - 4096 * 8 ? logits.size(1) : -1);
    p.is_float = logits.scalar_type() == ScalarType::Float;
    p.scores = logits.data_ptr();
    p.stride = logits.stride(0);
    p.visible = data<const int32_t>(visible);
    p.stream = scope.stream;
    return p;
}

// Where the picks of topk go.
inline void set_picks(const char* op, TopkParams& p, const Tensor& ids, const Tensor& count, const DeviceScope& scope) {
    check_all(op, scope, {{"ids", ids}, {"count", count}});
    MDI_CHECK_DTYPE(op, ids, ScalarType::Int);
    MDI_CHECK_DTYPE(op, count, ScalarType::Int);
    MDI_CHECK(op, ids, ids.dim() == 2 && ids.size(1) >= 1, "must be [T, k] with k >= 1, got ", list_string(ids.sizes()));
    MDI_CHECK_SHAPE(op, ids, {"T", p.num_tokens}, {"k", ids.size(1)});
    MDI_CHECK_SHAPE(op, count, {"T", p.num_tokens});
    p.k = as_int32(op, "k", ids.size(1));
    p.ids = data<int32_t>(ids);
    p.count = data<int32_t>(count);
}

// Where the blocks of candidate_blocks go.
inline void set_blocks(const char* op, TopkParams& p, int64_t block_size, const Tensor& blocks, const DeviceScope& scope) {
    check_all(op, scope, {{"blocks", blocks}});
    MDI_CHECK_DTYPE(op, blocks, ScalarType::Int);
    MDI_CHECK(op, blocks, blocks.dim() == 2 && blocks.size(1) >= 1, "must be [T, num_blocks] with num_blocks >= 1, got ",
              list_string(blocks.sizes()));
    MDI_CHECK_SHAPE(op, blocks, {"T", p.num_tokens}, {"num_blocks", blocks.size(1)});
    MDI_CHECK(op, blocks, block_size >= 1, "needs block_size >= 1, got block_size=", block_size);
    p.block_size = as_int32(op, "block_size", block_size);
    p.num_blocks = as_int32(op, "num_blocks", blocks.size(1));
    p.blocks = data<int32_t>(blocks);
}

inline void candidate_blocks(const Tensor& logits, const Tensor& visible, int64_t block_size, const Tensor& blocks) {
    constexpr const char* op = "indexer.candidate_blocks";
    const DeviceScope scope(logits);
    TopkParams p = select_params(op, logits, visible, scope);
    set_blocks(op, p, block_size, blocks, scope);
    launch_candidate_blocks(p);
}

inline void topk(const Tensor& logits, const std::optional<Tensor>& visible, const std::optional<Tensor>& candidates,
                 int64_t block_size, const Tensor& ids, const Tensor& count) {
    constexpr const char* op = "indexer.topk";
    const DeviceScope scope(logits);
    TopkParams p = select_params(op, logits, visible, scope);
    set_picks(op, p, ids, count, scope);
    if (candidates) {
        check_all(op, scope, {{"candidates", *candidates}});
        check_dtype(op, "candidates", *candidates, {ScalarType::Int});
        MDI_CHECK(op, logits, candidates->dim() == 2 && block_size >= 1 && candidates->size(0) == logits.size(0) &&
                                  candidates->size(1) * block_size == logits.size(1),
                  "must be [T, C*block_size] for candidates ", list_string(candidates->sizes()), " and block_size=", block_size,
                  ", got ", list_string(logits.sizes()));
        p.candidates = data<const int32_t>(*candidates);
        p.num_candidates = as_int32(op, "C", candidates->size(1));
        p.block_size = as_int32(op, "block_size", block_size);
    }
    launch_topk(p);
}

inline void topk_blocks(const Tensor& logits, const Tensor& visible, int64_t block_size, const Tensor& ids, const Tensor& count,
                        const Tensor& blocks) {
    constexpr const char* op = "indexer.topk_blocks";
    const DeviceScope scope(logits);
    TopkParams p = select_params(op, logits, visible, scope);
    set_picks(op, p, ids, count, scope);
    set_blocks(op, p, block_size, blocks, scope);
    launch_topk_blocks(p);
}

inline void cache_rows(const Tensor& ids, const Tensor& page_table, const Tensor& seq_of_token, int64_t entries_per_page,
                       const Tensor& rows) {
    constexpr const char* op = "indexer.cache_rows";
    const DeviceScope scope(ids);
    check_all(op, scope, {{"ids", ids}, {"page_table", page_table}, {"seq_of_token", seq_of_token}, {"rows", rows}});
    for (const auto& [name, tensor] :
         {NamedTensor{"ids", ids}, {"page_table", page_table}, {"seq_of_token", seq_of_token}, {"rows", rows}})
        check_dtype(op, name, tensor, {ScalarType::Int});
    MDI_CHECK(op, ids, ids.dim() == 2, "must have two dimensions, got ", list_string(ids.sizes()));
    MDI_CHECK(op, page_table, page_table.dim() == 2 && entries_per_page >= 1,
              "must have two dimensions and entries_per_page >= 1, got ", list_string(page_table.sizes()),
              " and entries_per_page=", entries_per_page);
    MDI_CHECK_SHAPE(op, rows, {"T", ids.size(0)}, {"k", ids.size(1)});
    MDI_CHECK_SHAPE(op, seq_of_token, {"T", ids.size(0)});
    launch_cache_rows({as_int32(op, "T", ids.size(0)), as_int32(op, "k", ids.size(1)),
                       as_int32(op, "entries_per_page", entries_per_page), as_int32(op, "pages per sequence", page_table.size(1)),
                       data<const int32_t>(ids), data<const int32_t>(page_table), data<const int32_t>(seq_of_token),
                       data<int32_t>(rows), scope.stream});
}

inline void implement_indexer(Library& m) {
    m.impl("indexer_write_keys", TORCH_BOX(&write_keys));
    m.impl("indexer_quant_query", TORCH_BOX(&quant_query));
    m.impl("indexer_rope_quant_query", TORCH_BOX(&rope_quant_query));
    m.impl("indexer_logits", TORCH_BOX(&logits));
#ifdef MDI_WITH_SM90
    m.impl("indexer_logits_sm90", TORCH_BOX(&logits_sm90));
    m.impl("indexer_candidate_logits_sm90", TORCH_BOX(&candidate_logits_sm90));
#endif
    m.impl("indexer_candidate_logits", TORCH_BOX(&candidate_logits));
    m.impl("indexer_candidate_blocks", TORCH_BOX(&candidate_blocks));
    m.impl("indexer_topk", TORCH_BOX(&topk));
    m.impl("indexer_topk_blocks", TORCH_BOX(&topk_blocks));
    m.impl("indexer_cache_rows", TORCH_BOX(&cache_rows));
}
#endif

}  // namespace mdi::indexer
