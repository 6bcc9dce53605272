// Tensors -> checks -> Params -> launch for the moe ops. Included by binding.cpp only.
#pragma once
#include "common/check.h"
#ifdef MDI_WITH_CUDA
#include "moe/moe.h"
#endif

namespace mdi::moe {

inline void define_moe(Library& m) {
    m.def("moe_route(Tensor x, Tensor weight, Tensor bias, float scaling, Tensor(a!) ids, Tensor(b!) weights) -> ()");
#ifdef MDI_WITH_SM90
    m.def("moe_route_sm90(Tensor x, Tensor weight, Tensor bias, float scaling, Tensor(a!) ids, Tensor(b!) weights) -> ()");
#endif
    m.def(
        "moe_permute(Tensor ids, int first_expert, int num_local, Tensor(a!) row_of_slot, Tensor(b!) slot_of_row, "
        "Tensor(c!) offsets, Tensor(d!) counts) -> ()");
    m.def(
        "moe_dispatch(Tensor ids, Tensor weights, int first_expert, int num_local, Tensor(a!) row_of_slot, "
        "Tensor(b!) slot_of_row, Tensor(c!) offsets, Tensor(d!) token_of_row, Tensor(e!) row_weight, Tensor(f!) counts) -> ()");
    m.def(
        "moe_grouped_gemm(Tensor a, Tensor a_scale, Tensor weight, Tensor weight_scale, Tensor offsets, Tensor? a_rows, "
        "Tensor(a!) out) -> ()");
#ifdef MDI_WITH_SM90
    m.def(
        "moe_grouped_gemm_sm90(Tensor a, Tensor a_scale, Tensor words, Tensor shifts, Tensor largest, Tensor offsets, "
        "Tensor? a_rows, Tensor(a!) out, Tensor(b!) folded, Tensor(c!) row_scale) -> ()");
    m.def(
        "moe_folded_gemm_sm90(Tensor folded, Tensor row_scale, Tensor words, Tensor shifts, Tensor largest, Tensor offsets, "
        "Tensor(a!) out) -> ()");
#endif
    m.def("moe_place_rows(Tensor codes, Tensor code_scale, Tensor row_of_slot, Tensor(a!) folded, Tensor(b!) row_scale) -> ()");
    m.def(
        "moe_swiglu_quant(Tensor gu, Tensor? row_weight, float limit, Tensor? num_rows, Tensor(a!)? codes, "
        "Tensor(b!)? scale, Tensor(c!)? h) -> ()");
    m.def(
        "moe_swiglu_fold(Tensor gu, Tensor? row_weight, float limit, Tensor? num_rows, Tensor(a!) folded, "
        "Tensor(b!) row_scale) -> ()");
    m.def("moe_swiglu_quant_folded(Tensor gu, float limit, Tensor(a!) codes, Tensor(b!) row_scale) -> ()");
    m.def("moe_combine(Tensor y, Tensor row_of_slot, Tensor? shared, Tensor(a!) out) -> ()");
    m.def("moe_combine_parts(Tensor y, Tensor row_of_slot, Tensor parts, int own_part, Tensor? shared, Tensor(a!) out) -> ()");
}

#ifdef MDI_WITH_CUDA
// CUDA device of the op, contiguous, shape and dtype: what every operand of these ops must be.
inline void check_operand(const char* op, const char* name, const Tensor& tensor, int32_t device, ScalarType type,
                          std::initializer_list<Dim> shape) {
    check_cuda_tensor(op, name, tensor, device);
    check_dtype(op, name, tensor, {type});
    check_shape(op, name, tensor, shape);
    check_contiguous(op, name, tensor);
}

inline RouteParams route_params(const Tensor& x, const Tensor& weight, const Tensor& bias, double scaling, const Tensor& ids,
                                const Tensor& weights, const DeviceScope& scope) {
    const char* op = "moe.route";
    MDI_CHECK(op, x, x.dim() == 2, "must be [T, N], got ", list_string(x.sizes()));
    MDI_CHECK(op, ids, ids.dim() == 2, "must be [T, k], got ", list_string(ids.sizes()));
    MDI_CHECK(op, bias, bias.dim() == 1, "must be [E], got ", list_string(bias.sizes()));
    const int64_t t = x.size(0), n = x.size(1), e = bias.size(0), k = ids.size(1);
    check_operand(op, "x", x, scope.device, ScalarType::BFloat16, {{"T", t}, {"N", n}});
    check_operand(op, "weight", weight, scope.device, ScalarType::BFloat16, {{"E", e}, {"N", n}});
    check_operand(op, "bias", bias, scope.device, ScalarType::Float, {{"E", e}});
    check_operand(op, "ids", ids, scope.device, ScalarType::Int, {{"T", t}, {"k", k}});
    check_operand(op, "weights", weights, scope.device, ScalarType::Float, {{"T", t}, {"k", k}});
    MDI_CHECK(op, x, n % 32 == 0 && n > 0, "must have a multiple of 32 columns, got N=", n);
    MDI_CHECK(op, weight, e >= 1 && e <= 512, "must have 1..512 rows, got E=", e);
    MDI_CHECK(op, ids, k >= 1 && k <= 32 && k <= e, "must have 1..min(32, E=", e, ") columns, got k=", k);
    MDI_CHECK(op, x, t < (int64_t{1} << 31), "must have fewer than 2^31 rows, got T=", t);
    MDI_CHECK_ALIGN(op, x, 16);
    MDI_CHECK_ALIGN(op, weight, 16);
    return {t, static_cast<int>(n), static_cast<int>(e), static_cast<int>(k), static_cast<float>(scaling),
            data<const uint16_t>(x), data<const uint16_t>(weight), data<const float>(bias), data<int32_t>(ids),
            data<float>(weights), scope.stream};
}

inline void route(const Tensor& x, const Tensor& weight, const Tensor& bias, double scaling, const Tensor& ids,
                  const Tensor& weights) {
    const DeviceScope scope(x);
    launch_route(route_params(x, weight, bias, scaling, ids, weights, scope));
}

#ifdef MDI_WITH_SM90
inline void route_sm90(const Tensor& x, const Tensor& weight, const Tensor& bias, double scaling, const Tensor& ids,
                       const Tensor& weights) {
    const DeviceScope scope(x);
    launch_route_sm90(route_params(x, weight, bias, scaling, ids, weights, scope));
}
#endif

inline PermuteParams permute_params(const char* op, const Tensor& ids, int64_t first_expert, int64_t num_local,
                                    const Tensor& row_of_slot, const Tensor& slot_of_row, const Tensor& offsets,
                                    const Tensor& counts, const DeviceScope& scope) {
    MDI_CHECK(op, ids, ids.dim() == 2, "must be [T, k], got ", list_string(ids.sizes()));
    const int64_t t = ids.size(0), k = ids.size(1), m = t * k;
    MDI_CHECK_INT32(op, first_expert);
    MDI_CHECK(op, num_local, num_local >= 0 && num_local <= kMaxExperts, "must be 0..", kMaxExperts, ", got ", num_local);
    MDI_CHECK(op, ids, m < (int64_t{1} << 31), "must have fewer than 2^31 slots, got T*k=", m);
    check_operand(op, "ids", ids, scope.device, ScalarType::Int, {{"T", t}, {"k", k}});
    check_operand(op, "row_of_slot", row_of_slot, scope.device, ScalarType::Int, {{"T", t}, {"k", k}});
    check_operand(op, "slot_of_row", slot_of_row, scope.device, ScalarType::Int, {{"T*k", m}});
    check_operand(op, "offsets", offsets, scope.device, ScalarType::Int, {{"num_local+1", num_local + 1}});
    check_operand(op, "counts", counts, scope.device, ScalarType::Int,
                  {{"blocks", permute_num_blocks(m)}, {"num_local", num_local}});
    return {m, static_cast<int>(first_expert), static_cast<int>(num_local), data<const int32_t>(ids),
            data<int32_t>(row_of_slot), data<int32_t>(slot_of_row), data<int32_t>(offsets), data<int32_t>(counts),
            static_cast<int>(k), nullptr, nullptr, nullptr, scope.stream};
}

inline void permute(const Tensor& ids, int64_t first_expert, int64_t num_local, const Tensor& row_of_slot,
                    const Tensor& slot_of_row, const Tensor& offsets, const Tensor& counts) {
    const DeviceScope scope(ids);
    launch_permute(permute_params("moe.permute", ids, first_expert, num_local, row_of_slot, slot_of_row, offsets, counts, scope));
}

inline void dispatch(const Tensor& ids, const Tensor& weights, int64_t first_expert, int64_t num_local,
                     const Tensor& row_of_slot, const Tensor& slot_of_row, const Tensor& offsets, const Tensor& token_of_row,
                     const Tensor& row_weight, const Tensor& counts) {
    const char* op = "moe.dispatch";
    const DeviceScope scope(ids);
    PermuteParams p = permute_params(op, ids, first_expert, num_local, row_of_slot, slot_of_row, offsets, counts, scope);
    check_operand(op, "weights", weights, scope.device, ScalarType::Float, {{"T", ids.size(0)}, {"k", ids.size(1)}});
    check_operand(op, "token_of_row", token_of_row, scope.device, ScalarType::Int, {{"T*k", p.num_slots}});
    check_operand(op, "row_weight", row_weight, scope.device, ScalarType::Float, {{"T*k", p.num_slots}});
    p.weights = data<const float>(weights);
    p.token_of_row = data<int32_t>(token_of_row);
    p.row_weight = data<float>(row_weight);
    launch_permute(p);
}

inline GroupedGemmParams grouped_gemm_params(const char* op, const Tensor& a, const Tensor& a_scale, const Tensor& weight,
                                             const Tensor& weight_scale, const Tensor& offsets,
                                             const std::optional<Tensor>& a_rows, const Tensor& out,
                                             const DeviceScope& scope) {
    MDI_CHECK(op, a, a.dim() == 2, "must be [rows, K], got ", list_string(a.sizes()));
    MDI_CHECK(op, weight, weight.dim() == 3, "must be [E, O, K/2], got ", list_string(weight.sizes()));
    MDI_CHECK(op, out, out.dim() == 2, "must be [M, O], got ", list_string(out.sizes()));
    const int64_t rows = a.size(0), k = a.size(1), e = weight.size(0), o = weight.size(1), m = out.size(0);
    MDI_CHECK_DTYPE(op, a, ScalarType::Float8_e4m3fn, ScalarType::Byte);
    check_operand(op, "a", a, scope.device, a.scalar_type(), {{"rows", rows}, {"K", k}});
    check_operand(op, "a_scale", a_scale, scope.device, ScalarType::Byte, {{"rows", rows}, {"K/32", k / 32}});
    check_operand(op, "weight", weight, scope.device, ScalarType::Byte, {{"E", e}, {"O", o}, {"K/2", k / 2}});
    check_operand(op, "weight_scale", weight_scale, scope.device, ScalarType::Byte, {{"E", e}, {"O", o}, {"K/32", k / 32}});
    check_operand(op, "offsets", offsets, scope.device, ScalarType::Int, {{"E+1", e + 1}});
    check_operand(op, "out", out, scope.device, ScalarType::BFloat16, {{"M", m}, {"O", o}});
    if (a_rows) check_operand(op, "a_rows", *a_rows, scope.device, ScalarType::Int, {{"M", m}});
    else MDI_CHECK(op, a, rows == m, "must have M=", m, " rows like out when a_rows is None, got ", rows);
    MDI_CHECK(op, a, k % 32 == 0 && k > 0 && k <= (1 << 20), "must have a multiple of 32 columns up to 2^20, got K=", k);
    MDI_CHECK(op, weight, o % 32 == 0 && o <= (1 << 20), "must have a multiple of 32 rows up to 2^20, got O=", o);
    MDI_CHECK(op, weight, e <= kMaxExperts, "must have at most ", kMaxExperts, " experts, got E=", e);
    MDI_CHECK(op, out, m < (int64_t{1} << 31), "must have fewer than 2^31 rows, got M=", m);
    MDI_CHECK(op, a, rows < (int64_t{1} << 31), "must have fewer than 2^31 rows, got ", rows);
    MDI_CHECK(op, out, ((m + 127) / 128 + e) * ((o + 127) / 128) < (int64_t{1} << 31),
              "is too large: row tiles times column tiles must be below 2^31, got M=", m, ", O=", o, ", E=", e);
    MDI_CHECK_ALIGN(op, a, 16);
    MDI_CHECK_ALIGN(op, weight, 16);
    MDI_CHECK_ALIGN(op, out, 16);
    return {m, rows, static_cast<int>(e), static_cast<int>(k), static_cast<int>(o), data<const uint8_t>(a),
            data<const uint8_t>(a_scale), data<const int32_t>(a_rows), data<const uint8_t>(weight),
            data<const uint8_t>(weight_scale), data<const int32_t>(offsets), data<uint16_t>(out), scope.stream};
}

inline void grouped_gemm(const Tensor& a, const Tensor& a_scale, const Tensor& weight, const Tensor& weight_scale,
                         const Tensor& offsets, std::optional<Tensor> a_rows, const Tensor& out) {
    const DeviceScope scope(a);
    launch_grouped_gemm(
        grouped_gemm_params("moe.grouped_gemm", a, a_scale, weight, weight_scale, offsets, a_rows, out, scope));
}

#ifdef MDI_WITH_SM90
// words, shifts, largest: a packed weight (mini_deepinfer/ops/packed_weight.py)
inline GroupedGemmSm90Params folded_gemm_params(const char* op, const Tensor& folded, const Tensor& row_scale, const Tensor& words,
                                                const Tensor& shifts, const Tensor& largest, const Tensor& offsets,
                                                const Tensor& out, const DeviceScope& scope) {
    MDI_CHECK(op, words, words.dim() == 3, "must be [E, O, K/8], got ", list_string(words.sizes()));
    MDI_CHECK(op, out, out.dim() == 2, "must be [M, O], got ", list_string(out.sizes()));
    const int64_t e = words.size(0), o = words.size(1), k = words.size(2) * 8, steps = (k + 127) / 128, m = out.size(0);
    check_operand(op, "folded", folded, scope.device, ScalarType::Byte, {{"M", m}, {"K'", 128 * steps}});
    check_operand(op, "row_scale", row_scale, scope.device, ScalarType::Float, {{"M", m}});
    check_operand(op, "words", words, scope.device, ScalarType::Int, {{"E", e}, {"O", o}, {"K/8", k / 8}});
    check_operand(op, "shifts", shifts, scope.device, ScalarType::Byte, {{"E", e}, {"K'/128", steps}, {"O", o}, {"groups", 4}});
    check_operand(op, "largest", largest, scope.device, ScalarType::Byte, {{"E", e}, {"O", o}});
    check_operand(op, "offsets", offsets, scope.device, ScalarType::Int, {{"E+1", e + 1}});
    check_operand(op, "out", out, scope.device, ScalarType::BFloat16, {{"M", m}, {"O", o}});
    MDI_CHECK(op, words, k % 32 == 0 && k > 0 && k <= (1 << 20), "must have a multiple of 32 columns up to 2^20, got K=", k);
    MDI_CHECK(op, words, o % 32 == 0 && o <= (1 << 20), "must have a multiple of 32 rows up to 2^20, got O=", o);
    MDI_CHECK(op, words, e <= kMaxExperts, "must have at most ", kMaxExperts, " experts, got E=", e);
    MDI_CHECK(op, out, m < (int64_t{1} << 31), "must have fewer than 2^31 rows, got M=", m);
    MDI_CHECK(op, out, ((m + 127) / 128 + e) * ((o + 127) / 128) < (int64_t{1} << 31),
              "is too large: row tiles times column tiles must be below 2^31, got M=", m, ", O=", o, ", E=", e);
    MDI_CHECK_ALIGN(op, words, 16);
    MDI_CHECK_ALIGN(op, shifts, 16);
    MDI_CHECK_ALIGN(op, out, 16);
    MDI_CHECK_ALIGN(op, folded, 128);
    return {m, static_cast<int>(e), static_cast<int>(k), static_cast<int>(o), data<const uint8_t>(folded),
            data<const float>(row_scale), data<const int32_t>(words), data<const uint8_t>(shifts), data<const uint8_t>(largest),
            data<const int32_t>(offsets), data<uint16_t>(out), scope.stream};
}

inline void folded_gemm_sm90(const Tensor& folded, const Tensor& row_scale, const Tensor& words, const Tensor& shifts,
                             const Tensor& largest, const Tensor& offsets, const Tensor& out) {
    const DeviceScope scope(folded);
    launch_grouped_gemm_sm90(
        folded_gemm_params("moe.folded_gemm_sm90", folded, row_scale, words, shifts, largest, offsets, out, scope));
}

// Two launches: the rows of a folded and gathered into the workspace, then the product.
inline void grouped_gemm_sm90(const Tensor& a, const Tensor& a_scale, const Tensor& words, const Tensor& shifts,
                              const Tensor& largest, const Tensor& offsets, std::optional<Tensor> a_rows, const Tensor& out,
                              const Tensor& folded, const Tensor& row_scale) {
    const char* op = "moe.grouped_gemm_sm90";
    const DeviceScope scope(a);
    const GroupedGemmSm90Params p = folded_gemm_params(op, folded, row_scale, words, shifts, largest, offsets, out, scope);
    MDI_CHECK(op, a, a.dim() == 2, "must be [rows, K], got ", list_string(a.sizes()));
    const int64_t rows = a.size(0);
    MDI_CHECK_DTYPE(op, a, ScalarType::Float8_e4m3fn, ScalarType::Byte);
    check_operand(op, "a", a, scope.device, a.scalar_type(), {{"rows", rows}, {"K", p.k}});
    check_operand(op, "a_scale", a_scale, scope.device, ScalarType::Byte, {{"rows", rows}, {"K/32", p.k / 32}});
    if (a_rows) check_operand(op, "a_rows", *a_rows, scope.device, ScalarType::Int, {{"M", p.num_rows}});
    else MDI_CHECK(op, a, rows == p.num_rows, "must have M=", p.num_rows, " rows like out when a_rows is None, got ", rows);
    MDI_CHECK(op, a, rows < (int64_t{1} << 31), "must have fewer than 2^31 rows, got ", rows);
    MDI_CHECK_ALIGN(op, a, 16);
    launch_fold_rows({p.num_rows, p.k, p.num_experts, data<const uint8_t>(a), data<const uint8_t>(a_scale),
                      data<const int32_t>(a_rows), p.offsets, data<uint8_t>(folded), data<float>(row_scale), scope.stream});
    launch_grouped_gemm_sm90(p);
}
#endif

inline void place_rows(const Tensor& codes, const Tensor& code_scale, const Tensor& row_of_slot, const Tensor& folded,
                       const Tensor& row_scale) {
    const char* op = "moe.place_rows";
    const DeviceScope scope(codes);
    MDI_CHECK(op, codes, codes.dim() == 2, "must be [T, K], got ", list_string(codes.sizes()));
    MDI_CHECK(op, row_of_slot, row_of_slot.dim() == 2, "must be [T, k], got ", list_string(row_of_slot.sizes()));
    MDI_CHECK(op, row_scale, row_scale.dim() == 1, "must be [M], got ", list_string(row_scale.sizes()));
    const int64_t t = codes.size(0), k = codes.size(1), picks = row_of_slot.size(1), m = row_scale.size(0);
    check_operand(op, "codes", codes, scope.device, ScalarType::Float8_e4m3fn, {{"T", t}, {"K", k}});
    check_operand(op, "code_scale", code_scale, scope.device, ScalarType::Float, {{"T", t}});
    check_operand(op, "row_of_slot", row_of_slot, scope.device, ScalarType::Int, {{"T", t}, {"k", picks}});
    check_operand(op, "folded", folded, scope.device, ScalarType::Byte, {{"M", m}, {"K'", (k + 127) / 128 * 128}});
    check_operand(op, "row_scale", row_scale, scope.device, ScalarType::Float, {{"M", m}});
    MDI_CHECK(op, codes, k % 32 == 0 && k > 0 && k <= (1 << 20), "must have a multiple of 32 columns up to 2^20, got K=", k);
    MDI_CHECK(op, row_of_slot, picks <= 32, "must have at most 32 columns, got k=", picks);
    MDI_CHECK(op, codes, t < (int64_t{1} << 31), "must have fewer than 2^31 rows, got T=", t);
    MDI_CHECK_ALIGN(op, codes, 4);
    MDI_CHECK_ALIGN(op, folded, 16);
    launch_place_rows({t, static_cast<int>(k), static_cast<int>(picks), data<const uint8_t>(codes), data<const float>(code_scale),
                       data<const int32_t>(row_of_slot), data<uint8_t>(folded), data<float>(row_scale), scope.stream});
}

inline SwigluQuantParams swiglu_fold_params(const char* op, const Tensor& gu, double limit, const Tensor& row_scale,
                                            const DeviceScope& scope) {
    MDI_CHECK(op, gu, gu.dim() == 2, "must be [M, 2F], got ", list_string(gu.sizes()));
    const int64_t m = gu.size(0), f = gu.size(1) / 2;
    check_operand(op, "gu", gu, scope.device, ScalarType::BFloat16, {{"M", m}, {"2F", 2 * f}});
    MDI_CHECK(op, gu, f % 32 == 0 && f > 0 && f <= 8192, "must have 2F columns, F a multiple of 32 up to 8192, got F=", f);
    MDI_CHECK(op, gu, m < (int64_t{1} << 31), "must have fewer than 2^31 rows, got M=", m);
    check_operand(op, "row_scale", row_scale, scope.device, ScalarType::Float, {{"M", m}});
    MDI_CHECK_ALIGN(op, gu, 16);
    return {m, static_cast<int>(f), static_cast<float>(limit), data<const uint16_t>(gu), nullptr, nullptr, nullptr, nullptr,
            nullptr, scope.stream};
}

inline void swiglu_quant_folded(const Tensor& gu, double limit, const Tensor& codes, const Tensor& row_scale) {
    const char* op = "moe.swiglu_quant_folded";
    const DeviceScope scope(gu);
    const SwigluQuantParams p = swiglu_fold_params(op, gu, limit, row_scale, scope);
    check_operand(op, "codes", codes, scope.device, ScalarType::Float8_e4m3fn, {{"M", p.num_rows}, {"F", p.hidden}});
    MDI_CHECK_ALIGN(op, codes, 4);
    launch_swiglu_fold({p, false, data<uint8_t>(codes), data<float>(row_scale)});
}

inline void swiglu_fold(const Tensor& gu, std::optional<Tensor> row_weight, double limit, std::optional<Tensor> num_rows,
                        const Tensor& folded, const Tensor& row_scale) {
    const char* op = "moe.swiglu_fold";
    const DeviceScope scope(gu);
    SwigluQuantParams p = swiglu_fold_params(op, gu, limit, row_scale, scope);
    const int64_t m = p.num_rows, f = p.hidden;
    if (row_weight) check_operand(op, "row_weight", *row_weight, scope.device, ScalarType::Float, {{"M", m}});
    if (num_rows) check_operand(op, "num_rows", *num_rows, scope.device, ScalarType::Int, {{"one", 1}});
    check_operand(op, "folded", folded, scope.device, ScalarType::Byte, {{"M", m}, {"F'", (f + 127) / 128 * 128}});
    MDI_CHECK_ALIGN(op, folded, 4);
    p.row_weight = data<const float>(row_weight);
    p.num_rows_bound = data<const int32_t>(num_rows);
    launch_swiglu_fold({p, true, data<uint8_t>(folded), data<float>(row_scale)});
}

inline void swiglu_quant(const Tensor& gu, std::optional<Tensor> row_weight, double limit, std::optional<Tensor> num_rows,
                         std::optional<Tensor> codes, std::optional<Tensor> scale, std::optional<Tensor> h) {
    const char* op = "moe.swiglu_quant";
    const DeviceScope scope(gu);
    MDI_CHECK(op, gu, gu.dim() == 2, "must be [M, 2F], got ", list_string(gu.sizes()));
    const int64_t m = gu.size(0), f = gu.size(1) / 2;
    check_operand(op, "gu", gu, scope.device, ScalarType::BFloat16, {{"M", m}, {"2F", 2 * f}});
    MDI_CHECK(op, gu, f % 32 == 0 && f > 0 && f <= (1 << 20), "must have 2F columns, F a multiple of 32 up to 2^20, got F=", f);
    MDI_CHECK(op, gu, m < (int64_t{1} << 31), "must have fewer than 2^31 rows, got M=", m);
    MDI_CHECK(op, codes, codes.has_value() == scale.has_value() && codes.has_value() != h.has_value(),
              "and scale, or h: exactly one of the two outputs must be given");
    if (row_weight) check_operand(op, "row_weight", *row_weight, scope.device, ScalarType::Float, {{"M", m}});
    if (num_rows) check_operand(op, "num_rows", *num_rows, scope.device, ScalarType::Int, {{"one", 1}});
    if (codes) {
        check_operand(op, "codes", *codes, scope.device, ScalarType::Float8_e4m3fn, {{"M", m}, {"F", f}});
        check_operand(op, "scale", *scale, scope.device, ScalarType::Byte, {{"M", m}, {"F/32", f / 32}});
        check_align(op, "codes", *codes, 8);
    } else {
        check_operand(op, "h", *h, scope.device, ScalarType::BFloat16, {{"M", m}, {"F", f}});
        check_align(op, "h", *h, 16);
    }
    MDI_CHECK_ALIGN(op, gu, 16);
    launch_swiglu_quant({m, static_cast<int>(f), static_cast<float>(limit), data<const uint16_t>(gu),
                         data<const float>(row_weight), data<const int32_t>(num_rows), data<uint8_t>(codes),
                         data<uint8_t>(scale), data<uint16_t>(h), scope.stream});
}

inline CombineParams combine_params(const char* op, const Tensor& y, const Tensor& row_of_slot, const std::optional<Tensor>& shared,
                                    const Tensor& out, const DeviceScope& scope) {
    MDI_CHECK(op, y, y.dim() == 2, "must be [M, N], got ", list_string(y.sizes()));
    MDI_CHECK(op, row_of_slot, row_of_slot.dim() == 2, "must be [T, k], got ", list_string(row_of_slot.sizes()));
    const int64_t m = y.size(0), n = y.size(1), t = row_of_slot.size(0), k = row_of_slot.size(1);
    check_operand(op, "y", y, scope.device, ScalarType::BFloat16, {{"M", m}, {"N", n}});
    check_operand(op, "row_of_slot", row_of_slot, scope.device, ScalarType::Int, {{"T", t}, {"k", k}});
    if (shared) {
        check_operand(op, "shared", *shared, scope.device, ScalarType::BFloat16, {{"T", t}, {"N", n}});
        check_align(op, "shared", *shared, 16);
    }
    MDI_CHECK_DTYPE(op, out, ScalarType::BFloat16, ScalarType::Float);
    check_operand(op, "out", out, scope.device, out.scalar_type(), {{"T", t}, {"N", n}});
    MDI_CHECK(op, y, n % 8 == 0 && n < (1 << 24), "must have a multiple of 8 columns, got N=", n);
    MDI_CHECK(op, row_of_slot, k <= 32, "must have at most 32 columns, got k=", k);
    MDI_CHECK(op, row_of_slot, t < (int64_t{1} << 31), "must have fewer than 2^31 rows, got T=", t);
    MDI_CHECK_ALIGN(op, y, 16);
    MDI_CHECK_ALIGN(op, out, 16);
    return {t, static_cast<int>(n), static_cast<int>(k), out.scalar_type() == ScalarType::Float, data<const uint16_t>(y),
            data<const int32_t>(row_of_slot), data<const uint16_t>(shared), out.data_ptr(), scope.stream};
}

inline void combine(const Tensor& y, const Tensor& row_of_slot, std::optional<Tensor> shared, const Tensor& out) {
    const DeviceScope scope(out);
    launch_combine(combine_params("moe.combine", y, row_of_slot, shared, out, scope));
}

inline void combine_parts(const Tensor& y, const Tensor& row_of_slot, const Tensor& parts, int64_t own_part,
                          std::optional<Tensor> shared, const Tensor& out) {
    const char* op = "moe.combine_parts";
    const DeviceScope scope(out);
    CombineParams p = combine_params(op, y, row_of_slot, shared, out, scope);
    MDI_CHECK(op, parts, parts.dim() == 3, "must be [P, T, N], got ", list_string(parts.sizes()));
    const int64_t num_parts = parts.size(0);
    check_operand(op, "parts", parts, scope.device, ScalarType::BFloat16, {{"P", num_parts}, {"T", p.num_tokens}, {"N", p.hidden}});
    MDI_CHECK_DTYPE(op, out, ScalarType::BFloat16);
    MDI_CHECK(op, parts, num_parts < (1 << 20), "must have fewer than 2^20 parts, got P=", num_parts);
    MDI_CHECK(op, own_part, own_part >= 0 && own_part <= num_parts, "must be 0..P=", num_parts, ", got ", own_part);
    MDI_CHECK_ALIGN(op, parts, 16);
    p.has_parts = true;
    p.num_parts = static_cast<int>(num_parts);
    p.own_part = static_cast<int>(own_part);
    p.parts = data<const uint16_t>(parts);
    launch_combine(p);
}

inline void implement_moe(Library& m) {
    m.impl("moe_route", TORCH_BOX(&route));
#ifdef MDI_WITH_SM90
    m.impl("moe_route_sm90", TORCH_BOX(&route_sm90));
#endif
    m.impl("moe_permute", TORCH_BOX(&permute));
    m.impl("moe_dispatch", TORCH_BOX(&dispatch));
    m.impl("moe_grouped_gemm", TORCH_BOX(&grouped_gemm));
#ifdef MDI_WITH_SM90
    m.impl("moe_grouped_gemm_sm90", TORCH_BOX(&grouped_gemm_sm90));
    m.impl("moe_folded_gemm_sm90", TORCH_BOX(&folded_gemm_sm90));
#endif
    m.impl("moe_place_rows", TORCH_BOX(&place_rows));
    m.impl("moe_swiglu_fold", TORCH_BOX(&swiglu_fold));
    m.impl("moe_swiglu_quant_folded", TORCH_BOX(&swiglu_quant_folded));
    m.impl("moe_swiglu_quant", TORCH_BOX(&swiglu_quant));
    m.impl("moe_combine", TORCH_BOX(&combine));
    m.impl("moe_combine_parts", TORCH_BOX(&combine_parts));
}
#endif

}  // namespace mdi::moe
