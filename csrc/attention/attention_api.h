// Tensors -> checks -> Params -> launch for the attention ops. Included by binding.cpp only.
#pragma once
#include <optional>

#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "attention/attention.h"
#endif

namespace mdi::attention {

inline void define_attention(Library& m) {
    m.def("attention_write_window(Tensor kv, Tensor(a!) rows, Tensor slots) -> ()");
    m.def("attention_write_normed_window(Tensor x, Tensor weight, float eps, Tensor positions, Tensor table, "
          "Tensor(a!) rows, Tensor slots) -> ()");
    m.def("attention_write_compressed(Tensor latent, Tensor(a!) rows, Tensor slots) -> ()");
    m.def(
        "attention_compress(Tensor kv, Tensor? score, Tensor? tail_kv, Tensor? tail_score, Tensor group_rows, "
        "Tensor(a!) out) -> ()");
    m.def("attention_expand_rows(Tensor packed, Tensor? pages, int page_rows, Tensor(a!) out) -> ()");
    m.def(
        "attention_sparse(Tensor q, Tensor window, Tensor window_idx, Tensor? compressed, Tensor? compressed_idx, "
        "Tensor? compressed_len, Tensor sink, float softmax_scale, Tensor(a!) out) -> ()");
#ifdef MDI_WITH_SM90
    m.def(
        "attention_sparse_sm90(Tensor q, Tensor window, Tensor window_idx, Tensor? compressed, Tensor? compressed_idx, "
        "Tensor? compressed_len, Tensor sink, float softmax_scale, Tensor(a!) out) -> ()");
    m.def(
        "attention_sparse_rope_sm90(Tensor q, Tensor window, Tensor window_idx, Tensor? compressed, Tensor? compressed_idx, "
        "Tensor? compressed_len, Tensor sink, float softmax_scale, Tensor positions, Tensor table, Tensor(a!) out) -> ()");
    m.def(
        "attention_sparse_rope_quant_sm90(Tensor q, Tensor window, Tensor window_idx, Tensor? compressed, Tensor? compressed_idx, "
        "Tensor? compressed_len, Tensor sink, float softmax_scale, Tensor positions, Tensor table, Tensor(a!) codes, "
        "Tensor(b!) row_scale) -> ()");
#endif
}

#ifdef MDI_WITH_CUDA

using OptionalTensor = std::optional<Tensor>;

inline WriteRowsParams write_rows_params(const char* op, const char* name, const Tensor& in, const Tensor& rows,
                                         const Tensor& slots, int64_t bytes_per_32, const DeviceScope& scope) {
    check_cuda_tensor(op, name, in, scope.device);
    check_dtype(op, name, in, {ScalarType::BFloat16});
    if (in.dim() != 2) fail(op, name, "must have two dimensions, got ", list_string(in.sizes()));
    const int64_t num_rows = in.size(0), dim = in.size(1);
    if (dim == 0 || dim % 32 != 0) fail(op, name, "must have D a positive multiple of 32, got D=", dim);
    check_stride(op, name, in, 1, 1);
    check_align(op, name, in, 16);
    const int64_t in_stride = num_rows > 1 ? in.stride(0) : dim;
    if (in_stride % 8 != 0) fail(op, name, "must have a row stride that is a multiple of 8, got ", in_stride);
    MDI_CHECK_DEVICE(op, rows, scope.device);
    MDI_CHECK_DTYPE(op, rows, ScalarType::Byte);
    MDI_CHECK(op, rows, rows.dim() == 2, "must have two dimensions, got ", list_string(rows.sizes()));
    MDI_CHECK_SHAPE(op, rows, {"S", rows.size(0)}, {"row bytes", dim / 32 * bytes_per_32});
    MDI_CHECK_CONTIGUOUS(op, rows);
    MDI_CHECK_DEVICE(op, slots, scope.device);
    MDI_CHECK_DTYPE(op, slots, ScalarType::Int);
    MDI_CHECK_SHAPE(op, slots, {"rows", num_rows});
    MDI_CHECK_CONTIGUOUS(op, slots);
    MDI_CHECK_INT32(op, num_rows);
    MDI_CHECK_INT32(op, dim);
    return {static_cast<int>(num_rows), static_cast<int>(dim), data<const __nv_bfloat16>(in), in_stride,
            data<uint8_t>(rows), data<const int32_t>(slots), scope.stream};
}

inline void write_window(const Tensor& kv, const Tensor& rows, const Tensor& slots) {
    const DeviceScope scope(kv);
    launch_write_window(write_rows_params("attention.write_window", "kv", kv, rows, slots, 33, scope));
}

inline void write_normed_window(const Tensor& x, const Tensor& weight, double eps, const Tensor& positions, const Tensor& table,
                                const Tensor& rows, const Tensor& slots) {
    constexpr const char* op = "attention.write_normed_window";
    const DeviceScope scope(x);
    const WriteRowsParams params = write_rows_params(op, "x", x, rows, slots, 33, scope);
    MDI_CHECK(op, x, params.dim <= kMaxNormDim, "must have D of at most ", kMaxNormDim, ", got D=", params.dim);
    MDI_CHECK_DEVICE(op, weight, scope.device);
    check_dtype(op, "weight", weight, {ScalarType::BFloat16, ScalarType::Float});
    MDI_CHECK_SHAPE(op, weight, {"D", params.dim});
    MDI_CHECK_CONTIGUOUS(op, weight);
    MDI_CHECK_ALIGN(op, weight, 16);
    const int rope_dim = check_rotary(op, positions, table, params.num_rows, params.dim, scope.device);
    launch_write_normed_window(params, {weight.data_ptr(), weight.scalar_type() == ScalarType::Float, static_cast<float>(eps),
                                        rope_dim, data<const int32_t>(positions), data<const float>(table)});
}

inline void write_compressed(const Tensor& latent, const Tensor& rows, const Tensor& slots) {
    const DeviceScope scope(latent);
    launch_write_compressed(write_rows_params("attention.write_compressed", "latent", latent, rows, slots, 18, scope));
}

inline void compress(const Tensor& kv, const OptionalTensor& score, const OptionalTensor& tail_kv,
                     const OptionalTensor& tail_score, const Tensor& group_rows, const Tensor& out) {
    constexpr const char* op = "attention.compress";
    const DeviceScope scope(kv);
    MDI_CHECK(op, kv, kv.dim() == 2, "must have two dimensions, got ", list_string(kv.sizes()));
    MDI_CHECK(op, group_rows, group_rows.dim() == 2, "must have two dimensions, got ", list_string(group_rows.sizes()));
    const int64_t num_tokens = kv.size(0), dim = kv.size(1), num_groups = group_rows.size(0), ratio = group_rows.size(1);
    MDI_CHECK(op, kv, dim > 0 && dim % 4 == 0, "must have D a positive multiple of 4, got D=", dim);
    MDI_CHECK(op, group_rows, ratio >= 1, "must have r >= 1, got r=", ratio);
    const auto check_float_rows = [&](const char* name, const Tensor& tensor, int64_t rows) {
        check_cuda_tensor(op, name, tensor, scope.device);
        check_dtype(op, name, tensor, {ScalarType::Float});
        check_shape(op, name, tensor, {{"rows", rows}, {"D", dim}});
        check_contiguous(op, name, tensor);
        check_align(op, name, tensor, 16);
    };
    check_float_rows("kv", kv, num_tokens);
    if (score) check_float_rows("score", *score, num_tokens);
    if (!score && ratio != 1) fail(op, "score", "must be given when r > 1, got none with r=", ratio);
    if (tail_kv) check_float_rows("tail_kv", *tail_kv, tail_kv->size(0));
    if (tail_score) check_float_rows("tail_score", *tail_score, tail_kv ? tail_kv->size(0) : tail_score->size(0));
    if (score && tail_kv.has_value() != tail_score.has_value())
        fail(op, "tail_score", "must be given together with tail_kv");
    MDI_CHECK_DEVICE(op, group_rows, scope.device);
    MDI_CHECK_DTYPE(op, group_rows, ScalarType::Int);
    MDI_CHECK_CONTIGUOUS(op, group_rows);
    MDI_CHECK_DEVICE(op, out, scope.device);
    MDI_CHECK_DTYPE(op, out, ScalarType::BFloat16);
    MDI_CHECK_SHAPE(op, out, {"G", num_groups}, {"D", dim});
    MDI_CHECK_CONTIGUOUS(op, out);
    MDI_CHECK_ALIGN(op, out, 8);
    MDI_CHECK_INT32(op, num_groups);
    MDI_CHECK_INT32(op, num_tokens);
    MDI_CHECK_INT32(op, ratio * dim);
    launch_compress({static_cast<int>(num_groups), static_cast<int>(ratio), static_cast<int>(dim),
                     static_cast<int>(num_tokens), data<const float>(kv), data<const float>(score),
                     data<const float>(tail_kv), data<const float>(tail_score), data<const int32_t>(group_rows),
                     data<__nv_bfloat16>(out), scope.stream});
}

inline void expand_rows(const Tensor& packed, const OptionalTensor& pages, int64_t page_rows, const Tensor& out) {
    constexpr const char* op = "attention.expand_rows";
    const DeviceScope scope(packed);
    MDI_CHECK(op, packed, packed.dim() == 2, "must have two dimensions, got ", list_string(packed.sizes()));
    MDI_CHECK_DTYPE(op, packed, ScalarType::Byte);
    const int64_t row_bytes = packed.size(1);
    MDI_CHECK(op, packed, row_bytes == kWindowRowBytes || row_bytes == kCompressedRowBytes, "must have rows of ", kWindowRowBytes, " or ",
              kCompressedRowBytes, " bytes, got ", row_bytes);
    MDI_CHECK_CONTIGUOUS(op, packed);
    MDI_CHECK_ALIGN(op, packed, 16);
    MDI_CHECK_INT32(op, packed.size(0));
    MDI_CHECK_DEVICE(op, out, scope.device);
    MDI_CHECK_DTYPE(op, out, ScalarType::BFloat16);
    MDI_CHECK(op, out, out.dim() == 2, "must have two dimensions, got ", list_string(out.sizes()));
    const int64_t num_rows = out.size(0);
    MDI_CHECK_SHAPE(op, out, {"R", pages ? num_rows : packed.size(0)}, {"D", kHeadDim});
    MDI_CHECK_CONTIGUOUS(op, out);
    MDI_CHECK_ALIGN(op, out, 16);
    MDI_CHECK_INT32(op, num_rows);
    MDI_CHECK_INT32(op, page_rows);
    if (pages) {
        if (page_rows < 1) fail(op, "page_rows", "must be at least 1, got ", page_rows);
        check_cuda_tensor(op, "pages", *pages, scope.device);
        check_dtype(op, "pages", *pages, {ScalarType::Int});
        check_shape(op, "pages", *pages, {{"rows / page_rows", (num_rows + page_rows - 1) / page_rows}});
        check_contiguous(op, "pages", *pages);
    }
    launch_expand_rows({static_cast<int>(num_rows), static_cast<int>(packed.size(0)), row_bytes == kWindowRowBytes,
                        data<const uint8_t>(packed), data<const int32_t>(pages), static_cast<int>(page_rows), data<uint8_t>(out),
                        scope.stream});
}

// kTakesExpanded: both pools may hold expanded rows
template <bool kTakesExpanded>
inline SparseParams sparse_params(const Tensor& q, const Tensor& window, const Tensor& window_idx,
                                  const OptionalTensor& compressed, const OptionalTensor& compressed_idx,
                                  const OptionalTensor& compressed_len, const Tensor& sink, double softmax_scale,
                                  const DeviceScope& scope) {
    constexpr const char* op = "attention.sparse";
    MDI_CHECK(op, q, q.dim() == 3, "must have three dimensions, got ", list_string(q.sizes()));
    const int64_t num_tokens = q.size(0), num_heads = q.size(1);
    MDI_CHECK_DTYPE(op, q, ScalarType::BFloat16);
    MDI_CHECK_SHAPE(op, q, {"T", num_tokens}, {"H", num_heads}, {"D", kHeadDim});
    MDI_CHECK(op, q, num_heads % 4 == 0 && num_heads >= 4 && num_heads <= kMaxHeads,
              "must have H a multiple of 4 from 4 to ", kMaxHeads, ", got H=", num_heads);
    MDI_CHECK_STRIDE(op, q, 2, 1);
    MDI_CHECK_STRIDE(op, q, 1, kHeadDim);
    MDI_CHECK_ALIGN(op, q, 16);
    const int64_t q_stride = num_tokens > 1 ? q.stride(0) : num_heads * kHeadDim;
    MDI_CHECK(op, q, q_stride % 8 == 0, "must have a token stride that is a multiple of 8, got ", q_stride);

    const bool expanded = kTakesExpanded && window.scalar_type() == ScalarType::BFloat16;
    const auto check_pool = [&](const char* name, const Tensor& pool, int64_t row_bytes) {
        check_cuda_tensor(op, name, pool, scope.device);
        check_dtype(op, name, pool, {expanded ? ScalarType::BFloat16 : ScalarType::Byte});
        if (pool.dim() != 2) fail(op, name, "must have two dimensions, got ", list_string(pool.sizes()));
        if (expanded) {
            check_shape(op, name, pool, {{"S", pool.size(0)}, {"D", kHeadDim}});
        } else {
            check_shape(op, name, pool, {{"S", pool.size(0)}, {"row bytes", row_bytes}});
        }
        check_contiguous(op, name, pool);
        check_align(op, name, pool, 16);
        check_int32(op, name, pool.size(0));
    };
    const auto check_lanes = [&](const char* name, const Tensor& lanes) {
        check_cuda_tensor(op, name, lanes, scope.device);
        check_dtype(op, name, lanes, {ScalarType::Int});
        if (lanes.dim() != 2) fail(op, name, "must have two dimensions, got ", list_string(lanes.sizes()));
        check_shape(op, name, lanes, {{"T", num_tokens}, {"lanes", lanes.size(1)}});
        check_contiguous(op, name, lanes);
        if (lanes.size(1) > (1 << 29)) fail(op, name, "has too many lanes: ", lanes.size(1));
    };
    check_pool("window", window, kWindowRowBytes);
    check_lanes("window_idx", window_idx);
    int64_t num_picks = 0;
    if (compressed_idx && compressed) {
        check_pool("compressed", *compressed, kCompressedRowBytes);
        check_lanes("compressed_idx", *compressed_idx);
        num_picks = compressed_idx->size(1);
        if (compressed_len) {
            check_cuda_tensor(op, "compressed_len", *compressed_len, scope.device);
            check_dtype(op, "compressed_len", *compressed_len, {ScalarType::Int});
            check_shape(op, "compressed_len", *compressed_len, {{"T", num_tokens}});
            check_contiguous(op, "compressed_len", *compressed_len);
        }
    }
    MDI_CHECK_DEVICE(op, sink, scope.device);
    MDI_CHECK_DTYPE(op, sink, ScalarType::Float);
    MDI_CHECK_SHAPE(op, sink, {"H", num_heads});
    MDI_CHECK_CONTIGUOUS(op, sink);
    MDI_CHECK_INT32(op, num_tokens);

    SparseParams params = {};
    params.num_tokens = static_cast<int>(num_tokens);
    params.num_heads = static_cast<int>(num_heads);
    params.num_window = static_cast<int>(window_idx.size(1));
    params.num_picks = static_cast<int>(num_picks);
    params.num_window_rows = static_cast<int>(window.size(0));
    params.num_compressed_rows = num_picks > 0 ? static_cast<int>(compressed->size(0)) : 0;
    params.softmax_scale = static_cast<float>(softmax_scale);
    params.q = data<const __nv_bfloat16>(q);
    params.q_stride_token = q_stride;
    params.expanded = expanded;
    params.window = data<const uint8_t>(window);
    params.window_idx = data<const int32_t>(window_idx);
    params.compressed = num_picks > 0 ? data<const uint8_t>(compressed) : nullptr;
    params.compressed_idx = num_picks > 0 ? data<const int32_t>(compressed_idx) : nullptr;
    params.compressed_len = num_picks > 0 ? data<const int32_t>(compressed_len) : nullptr;
    params.sink = data<const float>(sink);
    params.stream = scope.stream;
    return params;
}

inline void set_sparse_output(SparseParams& params, const Tensor& out, const DeviceScope& scope) {
    constexpr const char* op = "attention.sparse";
    MDI_CHECK_DEVICE(op, out, scope.device);
    MDI_CHECK_DTYPE(op, out, ScalarType::BFloat16);
    MDI_CHECK_SHAPE(op, out, {"T", params.num_tokens}, {"H", params.num_heads}, {"D", kHeadDim});
    MDI_CHECK_CONTIGUOUS(op, out);
    MDI_CHECK_ALIGN(op, out, 16);
    params.out = data<__nv_bfloat16>(out);
}

template <bool kHopper>
inline void sparse(const Tensor& q, const Tensor& window, const Tensor& window_idx, const OptionalTensor& compressed,
                   const OptionalTensor& compressed_idx, const OptionalTensor& compressed_len, const Tensor& sink,
                   double softmax_scale, const Tensor& out) {
    const DeviceScope scope(q);
    SparseParams params =
        sparse_params<kHopper>(q, window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale, scope);
    set_sparse_output(params, out, scope);
    if constexpr (kHopper) {
        launch_sparse_sm90(params);
    } else {
        launch_sparse(params);
    }
}

#ifdef MDI_WITH_SM90
inline void set_sparse_rotary(SparseParams& params, const Tensor& positions, const Tensor& table, const DeviceScope& scope) {
    const int rope_dim = check_rotary("attention.sparse_rope", positions, table, params.num_tokens, kMaxRopeDim, scope.device);
    params.rotary = {data<const int32_t>(positions), data<const float>(table), rope_dim};
}

inline void sparse_rope(const Tensor& q, const Tensor& window, const Tensor& window_idx, const OptionalTensor& compressed,
                        const OptionalTensor& compressed_idx, const OptionalTensor& compressed_len, const Tensor& sink,
                        double softmax_scale, const Tensor& positions, const Tensor& table, const Tensor& out) {
    const DeviceScope scope(q);
    SparseParams params = sparse_params<true>(q, window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale, scope);
    set_sparse_rotary(params, positions, table, scope);
    set_sparse_output(params, out, scope);
    launch_sparse_sm90(params);
}

inline void sparse_rope_quant(const Tensor& q, const Tensor& window, const Tensor& window_idx, const OptionalTensor& compressed,
                              const OptionalTensor& compressed_idx, const OptionalTensor& compressed_len, const Tensor& sink,
                              double softmax_scale, const Tensor& positions, const Tensor& table, const Tensor& codes,
                              const Tensor& row_scale) {
    constexpr const char* op = "attention.sparse_rope_quant";
    const DeviceScope scope(q);
    SparseParams params = sparse_params<true>(q, window, window_idx, compressed, compressed_idx, compressed_len, sink, softmax_scale, scope);
    set_sparse_rotary(params, positions, table, scope);
    MDI_CHECK(op, q, params.num_heads % kCodeHeads == 0, "must have H a multiple of ", kCodeHeads, ", got H=", params.num_heads);
    const int64_t groups = params.num_heads / kCodeHeads;
    MDI_CHECK_DEVICE(op, codes, scope.device);
    MDI_CHECK_DTYPE(op, codes, ScalarType::Float8_e4m3fn);
    MDI_CHECK_SHAPE(op, codes, {"T", params.num_tokens}, {"g", groups}, {"K", kCodeHeads * kHeadDim});
    MDI_CHECK_CONTIGUOUS(op, codes);
    MDI_CHECK_ALIGN(op, codes, 8);
    MDI_CHECK_DEVICE(op, row_scale, scope.device);
    MDI_CHECK_DTYPE(op, row_scale, ScalarType::Float);
    MDI_CHECK_SHAPE(op, row_scale, {"T", params.num_tokens}, {"g", groups});
    MDI_CHECK_CONTIGUOUS(op, row_scale);
    params.codes = data<uint8_t>(codes);
    params.row_scale = data<float>(row_scale);
    launch_sparse_sm90(params);
}
#endif

inline void implement_attention(Library& m) {
    m.impl("attention_write_window", TORCH_BOX(&write_window));
    m.impl("attention_write_normed_window", TORCH_BOX(&write_normed_window));
    m.impl("attention_write_compressed", TORCH_BOX(&write_compressed));
    m.impl("attention_compress", TORCH_BOX(&compress));
    m.impl("attention_expand_rows", TORCH_BOX(&expand_rows));
    m.impl("attention_sparse", TORCH_BOX(&sparse<false>));
#ifdef MDI_WITH_SM90
    m.impl("attention_sparse_sm90", TORCH_BOX(&sparse<true>));
    m.impl("attention_sparse_rope_sm90", TORCH_BOX(&sparse_rope));
    m.impl("attention_sparse_rope_quant_sm90", TORCH_BOX(&sparse_rope_quant));
#endif
}
#endif

}  // namespace mdi::attention
