// mini_deepinfer._host: what Python needs from C++ on the CPU, without torch and without CUDA.
//   gather_rows   threaded row gather from a (memory-mapped) table, outside the GIL
//   encode_*, decode_*, *_scale   the host side of common/number_formats.cuh, for the CPU tests
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/number_formats.cuh"

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

std::vector<py::ssize_t> shape_of(const py::array& x) { return {x.shape(), x.shape() + x.ndim()}; }

// out[i] = f(x[i]), same shape
template <class To, class From, class F>
py::array_t<To> map(const Array<From>& x, F f) {
    py::array_t<To> out(shape_of(x));
    const From* source = x.data();
    To* target = out.mutable_data();
    for (py::ssize_t i = 0; i < x.size(); ++i) target[i] = f(source[i]);
    return out;
}

// packed uint8 [n] -> bf16 bits [2n], a byte at a time
py::array_t<uint16_t> fp4_to_bf16(const Array<uint8_t>& packed) {
    py::array_t<uint16_t> out(packed.size() * 2);
    for (py::ssize_t i = 0; i < packed.size(); ++i) {
        const uint32_t pair = mdi::fp4x2_to_bf16x2(packed.data()[i]);
        std::memcpy(out.mutable_data() + 2 * i, &pair, 4);
    }
    return out;
}

// the same a word at a time, n % 4 == 0
py::array_t<uint16_t> fp4_words_to_bf16(const Array<uint8_t>& packed) {
    if (packed.size() % 4) throw py::value_error("fp4_words_to_bf16_bits: packed must hold a multiple of 4 bytes");
    py::array_t<uint16_t> out(packed.size() * 2);
    for (py::ssize_t i = 0; i < packed.size(); i += 4) {
        uint32_t word, pairs[4];
        std::memcpy(&word, packed.data() + i, 4);
        mdi::fp4x8_to_bf16x8(word, pairs);
        std::memcpy(out.mutable_data() + 2 * i, pairs, 16);
    }
    return out;
}

py::array_t<uint16_t> fp8_to_bf16(const Array<uint8_t>& codes) {
    if (codes.size() % 2) throw py::value_error("fp8_to_bf16: codes must hold an even number of bytes");
    py::array_t<uint16_t> out(codes.size());
    for (py::ssize_t i = 0; i < codes.size(); i += 2) {
        const uint32_t pair = mdi::fp8x2_to_bf16x2(codes.data()[i] | codes.data()[i + 1] << 8);
        std::memcpy(out.mutable_data() + i, &pair, 4);
    }
    return out;
}

// Rows of a 2-D byte table by number. Ids outside the table raise before a byte is read; the copy runs without the GIL.
py::array_t<uint8_t> gather_rows(const py::array_t<uint8_t>& table, const Array<int64_t>& row_ids, int num_threads) {
    if (table.ndim() != 2 || table.strides(1) != 1) throw py::value_error("gather_rows: table must be uint8 [R, bytes], rows contiguous");
    if (row_ids.ndim() != 1) throw py::value_error("gather_rows: row_ids must be int64 [M]");
    if (num_threads < 1) throw py::value_error("gather_rows: num_threads must be >= 1, got " + std::to_string(num_threads));
    const int64_t num_rows = table.shape(0), row_bytes = table.shape(1), row_stride = table.strides(0), m = row_ids.size();
    const int64_t* ids = row_ids.data();
    for (int64_t i = 0; i < m; ++i)
        if (ids[i] < 0 || ids[i] >= num_rows)
            throw py::index_error("gather_rows: row_ids[" + std::to_string(i) + "] must be in 0.." + std::to_string(num_rows - 1) +
                                  ", got " + std::to_string(ids[i]));
    py::array_t<uint8_t> out({static_cast<py::ssize_t>(m), static_cast<py::ssize_t>(row_bytes)});
    const uint8_t* source = table.data();
    uint8_t* target = out.mutable_data();
    {
        py::gil_scoped_release nogil;  // page faults of the mapped file overlap across threads
        const auto copy = [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) std::memcpy(target + i * row_bytes, source + ids[i] * row_stride, row_bytes);
        };
        const int64_t threads = std::min<int64_t>(num_threads, m / 64 + 1), share = (m + threads - 1) / threads;
        std::vector<std::thread> pool;
        for (int64_t t = 1; t < threads; ++t) pool.emplace_back(copy, std::min(t * share, m), std::min((t + 1) * share, m));
        copy(0, std::min(share, m));
        for (std::thread& thread : pool) thread.join();
    }
    return out;
}

}  // namespace

PYBIND11_MODULE(_host, m) {
    m.doc() = "Host-only helpers: threaded row gather, and the number-format codecs of csrc/common/number_formats.cuh.";
    m.def("gather_rows", &gather_rows, py::arg("table").noconvert(), py::arg("row_ids"), py::arg("num_threads") = 4,
          "table uint8 [R, bytes], row_ids int64 [M] -> uint8 [M, bytes]; IndexError for an id outside the table");
    m.def("encode_e2m1", [](const Array<float>& x) { return map<uint8_t>(x, mdi::e2m1_encode); });
    m.def("decode_e2m1", [](const Array<uint8_t>& x) { return map<float>(x, mdi::e2m1_decode); });
    m.def("encode_e4m3", [](const Array<float>& x) { return map<uint8_t>(x, mdi::e4m3_encode); });
    m.def("decode_e4m3", [](const Array<uint8_t>& x) { return map<float>(x, mdi::e4m3_decode); });
    m.def("decode_e8m0", [](const Array<uint8_t>& x) { return map<float>(x, mdi::e8m0_decode); });
    m.def("inverse_e8m0", [](const Array<uint8_t>& x) { return map<float>(x, mdi::e8m0_inverse); });
    m.def("e8m0_to_bf16_bits", [](const Array<uint8_t>& x) { return map<uint16_t>(x, mdi::e8m0_to_bf16_bits); });
    m.def("float_to_bf16_bits", [](const Array<float>& x) { return map<uint16_t>(x, mdi::float_to_bf16_bits); });
    m.def("act_quant_scale", [](const Array<float>& x) { return map<uint8_t>(x, mdi::act_quant_scale); });
    m.def("mxfp4_scale", [](const Array<float>& x) { return map<uint8_t>(x, mdi::mxfp4_scale); });
    m.def("nvfp4_scale", [](const Array<float>& x) { return map<uint8_t>(x, mdi::nvfp4_scale); });
    m.def("fp4_to_bf16_bits", &fp4_to_bf16, "packed uint8 [n] -> bf16 bits uint16 [2n], low nibble first");
    m.def("fp4_words_to_bf16_bits", &fp4_words_to_bf16, "the same through the four-byte decoder; n a multiple of 4");
    m.def("fp8_to_bf16_bits", &fp8_to_bf16, "codes uint8 [n], n even -> bf16 bits uint16 [n]");
}
