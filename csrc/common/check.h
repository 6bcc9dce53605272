// Tensor checks for the *_api.h files (host only, torch's stable ABI). A failed check throws; Python sees RuntimeError.
// Message order: op, tensor, what was wanted, what was found. Of an op called by itself the Python wrapper has already
// raised TypeError or ValueError for most of these; in a step of the model the checks here are the only ones.
#pragma once
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace mdi {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Library = torch::stable::detail::StableLibrary;

struct Dim {
    const char* name;  // the letter of the docstring
    int64_t size;
};

inline const char* dtype_name(ScalarType type) {
    switch (type) {
        case ScalarType::Byte: return "uint8";
        case ScalarType::Int: return "int32";
        case ScalarType::Long: return "int64";
        case ScalarType::Half: return "float16";
        case ScalarType::BFloat16: return "bfloat16";
        case ScalarType::Float: return "float32";
        case ScalarType::Double: return "float64";
        case ScalarType::Float8_e4m3fn: return "float8_e4m3fn";
        case ScalarType::Float8_e8m0fnu: return "float8_e8m0fnu";
        case ScalarType::Bool: return "bool";
        default: return "another dtype";
    }
}

// Messages are put together with std::string alone: iostreams of a statically linked libstdc++ crash when the process has
// another copy of it.
inline std::string text(const std::string& value) { return value; }
inline std::string text(const char* value) { return value; }
inline std::string text(const void* value) {
    char buffer[2 + 2 * sizeof value + 1];
    std::snprintf(buffer, sizeof buffer, "0x%llx", static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(value)));
    return buffer;
}
template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
std::string text(Number value) {
    return std::to_string(value);
}

template <class Sizes>
std::string list_string(const Sizes& sizes) {
    std::string out = "[";
    for (size_t i = 0; i < sizes.size(); ++i) out += (i ? ", " : "") + std::to_string(sizes[i]);
    return out + "]";
}

template <class... Parts>
[[noreturn]] void fail(const char* op, const char* tensor, const Parts&... parts) {
    throw std::runtime_error(std::string(op) + ": " + tensor + ' ' + (text(parts) + ...));
}

inline void check_shape(const char* op, const char* name, const Tensor& tensor, std::initializer_list<Dim> wanted) {
    const auto sizes = tensor.sizes();
    bool ok = sizes.size() == wanted.size();
    size_t i = 0;
    for (const Dim& dim : wanted) ok = ok && sizes[i++] == dim.size;
    if (ok) return;
    std::string shape;
    for (const Dim& dim : wanted) shape += (shape.empty() ? "" : ", ") + std::string(dim.name) + "=" + std::to_string(dim.size);
    fail(op, name, "must be [", shape, "], got ", list_string(sizes));
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, std::initializer_list<ScalarType> wanted) {
    for (ScalarType type : wanted)
        if (tensor.scalar_type() == type) return;
    std::string names;
    for (ScalarType type : wanted) names += (names.empty() ? "" : " or ") + std::string(dtype_name(type));
    fail(op, name, "must be ", names, ", got ", dtype_name(tensor.scalar_type()));
}

inline void check_contiguous(const char* op, const char* name, const Tensor& tensor) {
    if (!tensor.is_contiguous())
        fail(op, name, "must be contiguous, got shape ", list_string(tensor.sizes()), " with strides ",
             list_string(tensor.strides()));
}

// stride in elements of one dimension
inline void check_stride(const char* op, const char* name, const Tensor& tensor, int64_t dim, int64_t wanted) {
    if (tensor.stride(dim) != wanted)
        fail(op, name, "must have stride ", wanted, " in dimension ", dim, ", got strides ", list_string(tensor.strides()));
}

inline void check_align(const char* op, const char* name, const Tensor& tensor, int64_t bytes) {
    if (reinterpret_cast<uintptr_t>(tensor.data_ptr()) % static_cast<uintptr_t>(bytes) != 0)
        fail(op, name, "must start at a multiple of ", bytes, " bytes, got address ", tensor.data_ptr());
}

inline void check_cuda_tensor(const char* op, const char* name, const Tensor& tensor, int32_t device) {
    if (!tensor.is_cuda()) fail(op, name, "must be a CUDA tensor, got a tensor on another device");
    if (tensor.get_device_index() != device)
        fail(op, name, "must be on CUDA device ", device, " like the first operand, got device ", tensor.get_device_index());
}

inline void check_int32(const char* op, const char* name, int64_t value) {
    if (value < 0 || value > std::numeric_limits<int32_t>::max())
        fail(op, name, "must be in 0..2147483647, got ", value);
}

#define MDI_CHECK_SHAPE(op, tensor, ...) ::mdi::check_shape(op, #tensor, tensor, {__VA_ARGS__})
#define MDI_CHECK_DTYPE(op, tensor, ...) ::mdi::check_dtype(op, #tensor, tensor, {__VA_ARGS__})
#define MDI_CHECK_CONTIGUOUS(op, tensor) ::mdi::check_contiguous(op, #tensor, tensor)
#define MDI_CHECK_STRIDE(op, tensor, dim, wanted) ::mdi::check_stride(op, #tensor, tensor, dim, wanted)
#define MDI_CHECK_ALIGN(op, tensor, bytes) ::mdi::check_align(op, #tensor, tensor, bytes)
#define MDI_CHECK_DEVICE(op, tensor, device) ::mdi::check_cuda_tensor(op, #tensor, tensor, device)
#define MDI_CHECK_INT32(op, value) ::mdi::check_int32(op, #value, value)
// MDI_CHECK(op, tensor, condition, "must be a multiple of 32, got ", k)
#define MDI_CHECK(op, tensor, condition, ...) \
    do {                                      \
        if (!(condition)) ::mdi::fail(op, #tensor, __VA_ARGS__); \
    } while (0)

// The operands of a rotation by chunks of eight columns: positions [T] int32 and table [P, R/2, 2] float32 (cosine, sine), contiguous.
// Returns R, a multiple of eight up to `widest`.
inline int check_rotary(const char* op, const Tensor& positions, const Tensor& table, int64_t num_tokens, int64_t widest, int32_t device) {
    MDI_CHECK_DEVICE(op, positions, device);
    MDI_CHECK_DTYPE(op, positions, ScalarType::Int);
    MDI_CHECK_SHAPE(op, positions, {"T", num_tokens});
    MDI_CHECK_CONTIGUOUS(op, positions);
    MDI_CHECK(op, table, table.dim() == 3, "must be [P, R/2, 2], got ", list_string(table.sizes()));
    MDI_CHECK_DEVICE(op, table, device);
    MDI_CHECK_DTYPE(op, table, ScalarType::Float);
    MDI_CHECK_SHAPE(op, table, {"P", table.size(0)}, {"R/2", table.size(1)}, {"2", 2});
    MDI_CHECK_CONTIGUOUS(op, table);
    MDI_CHECK_ALIGN(op, table, 16);
    const int64_t rope_dim = 2 * table.size(1);
    MDI_CHECK(op, table, rope_dim % 8 == 0 && rope_dim <= widest, "must have R a multiple of 8 up to ", widest, ", got R=", rope_dim);
    return static_cast<int>(rope_dim);
}

template <class T>
T* data(const Tensor& tensor) {
    return static_cast<T*>(tensor.data_ptr());
}

template <class T>
T* data(const std::optional<Tensor>& tensor) {
    return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

#ifdef MDI_WITH_CUDA
// The current CUDA stream of a device. The look-up function lives in libtorch_cuda.so, which a CPU-only torch does not
// have: it is found at run time so that this library also loads beside a CPU torch.
inline cudaStream_t current_stream(int32_t device) {
    using GetStream = int32_t (*)(int32_t, void**);
    static const GetStream get_stream = [] {
        void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        return library ? reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
    }();
    if (get_stream == nullptr) throw std::runtime_error("mini_deepinfer: this torch has no CUDA");
    void* stream = nullptr;
    if (get_stream(device, &stream) != 0) throw std::runtime_error("mini_deepinfer: no current CUDA stream");
    return static_cast<cudaStream_t>(stream);
}

// Makes a tensor's device current for the scope; `stream` is torch's current stream there.
struct DeviceScope {
    explicit DeviceScope(const Tensor& tensor)
        : device(tensor.get_device_index()), guard(device), stream(current_stream(device)) {}
    int32_t device;
    torch::stable::accelerator::DeviceGuard guard;
    cudaStream_t stream;
};
#endif

}  // namespace mdi
