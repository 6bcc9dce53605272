// wgmma of e4m3 for sm_90a with A from registers, for many N; layouts and the order of calls as in wgmma_sm90.cuh.
// It accumulates with reduced precision inside the tensor core: promote to fp32 registers every 128 of K.
#pragma once
#include <cstdint>

#include "common/math.h"

namespace mdi {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// clang-format off
#define MDI_E4M3_TEXT_4 "%0, %1, %2, %3"
#define MDI_E4M3_TEXT_8 MDI_E4M3_TEXT_4 ", %4, %5, %6, %7"
#define MDI_E4M3_TEXT_12 MDI_E4M3_TEXT_8 ", %8, %9, %10, %11"
#define MDI_E4M3_TEXT_16 MDI_E4M3_TEXT_12 ", %12, %13, %14, %15"
#define MDI_E4M3_TEXT_20 MDI_E4M3_TEXT_16 ", %16, %17, %18, %19"
#define MDI_E4M3_TEXT_24 MDI_E4M3_TEXT_20 ", %20, %21, %22, %23"
#define MDI_E4M3_TEXT_28 MDI_E4M3_TEXT_24 ", %24, %25, %26, %27"
#define MDI_E4M3_TEXT_32 MDI_E4M3_TEXT_28 ", %28, %29, %30, %31"
#define MDI_E4M3_TEXT_36 MDI_E4M3_TEXT_32 ", %32, %33, %34, %35"
#define MDI_E4M3_TEXT_40 MDI_E4M3_TEXT_36 ", %36, %37, %38, %39"
#define MDI_E4M3_TEXT_44 MDI_E4M3_TEXT_40 ", %40, %41, %42, %43"
#define MDI_E4M3_TEXT_48 MDI_E4M3_TEXT_44 ", %44, %45, %46, %47"
#define MDI_E4M3_TEXT_52 MDI_E4M3_TEXT_48 ", %48, %49, %50, %51"
#define MDI_E4M3_TEXT_56 MDI_E4M3_TEXT_52 ", %52, %53, %54, %55"
#define MDI_E4M3_TEXT_60 MDI_E4M3_TEXT_56 ", %56, %57, %58, %59"
#define MDI_E4M3_TEXT_64 MDI_E4M3_TEXT_60 ", %60, %61, %62, %63"
#define MDI_E4M3_TEXT_68 MDI_E4M3_TEXT_64 ", %64, %65, %66, %67"
#define MDI_E4M3_TEXT_72 MDI_E4M3_TEXT_68 ", %68, %69, %70, %71"
#define MDI_E4M3_TEXT_76 MDI_E4M3_TEXT_72 ", %72, %73, %74, %75"
#define MDI_E4M3_TEXT_80 MDI_E4M3_TEXT_76 ", %76, %77, %78, %79"
#define MDI_E4M3_TEXT_84 MDI_E4M3_TEXT_80 ", %80, %81, %82, %83"
#define MDI_E4M3_TEXT_88 MDI_E4M3_TEXT_84 ", %84, %85, %86, %87"
#define MDI_E4M3_D_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define MDI_E4M3_D_8 MDI_E4M3_D_4, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define MDI_E4M3_D_12 MDI_E4M3_D_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define MDI_E4M3_D_16 MDI_E4M3_D_12, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define MDI_E4M3_D_20 MDI_E4M3_D_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define MDI_E4M3_D_24 MDI_E4M3_D_20, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define MDI_E4M3_D_28 MDI_E4M3_D_24, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define MDI_E4M3_D_32 MDI_E4M3_D_28, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define MDI_E4M3_D_36 MDI_E4M3_D_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define MDI_E4M3_D_40 MDI_E4M3_D_36, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define MDI_E4M3_D_44 MDI_E4M3_D_40, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define MDI_E4M3_D_48 MDI_E4M3_D_44, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define MDI_E4M3_D_52 MDI_E4M3_D_48, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define MDI_E4M3_D_56 MDI_E4M3_D_52, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define MDI_E4M3_D_60 MDI_E4M3_D_56, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define MDI_E4M3_D_64 MDI_E4M3_D_60, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define MDI_E4M3_D_68 MDI_E4M3_D_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define MDI_E4M3_D_72 MDI_E4M3_D_68, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define MDI_E4M3_D_76 MDI_E4M3_D_72, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define MDI_E4M3_D_80 MDI_E4M3_D_76, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define MDI_E4M3_D_84 MDI_E4M3_D_80, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define MDI_E4M3_D_88 MDI_E4M3_D_84, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
// clang-format on
#define MDI_E4M3_RS(N, C, A0, A1, A2, A3, B, P)                                                                                \
    if constexpr (kN == N)                                                                                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N                          \
                 "k32.f32.e4m3.e4m3 {" MDI_E4M3_TEXT_##C "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1;\n}\n" \
                 : MDI_E4M3_D_##C                                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor), "r"(static_cast<uint32_t>(accumulate)))
#endif

// wgmma.mma_async.sync.aligned.m64nNk32.f32.e4m3.e4m3: d = a * b (+ d when `accumulate`), d the first kN / 2 registers. B K-major.
template <int kN, int kSize>
MDI_DEVICE void wgmma_e4m3_rs(float (&d)[kSize], const uint32_t (&a)[4], uint64_t descriptor, bool accumulate) {
    static_assert(kN == 16 || kN == 32 || (kN >= 48 && kN <= 176 && kN % 8 == 0), "wgmma: N is 16, 32 or 48, 56 .. 176 here");
    static_assert(kN / 2 <= kSize, "wgmma: d is too short");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    MDI_E4M3_RS(16, 8, 8, 9, 10, 11, 12, 13);
    MDI_E4M3_RS(32, 16, 16, 17, 18, 19, 20, 21);
    MDI_E4M3_RS(48, 24, 24, 25, 26, 27, 28, 29);
    MDI_E4M3_RS(56, 28, 28, 29, 30, 31, 32, 33);
    MDI_E4M3_RS(64, 32, 32, 33, 34, 35, 36, 37);
    MDI_E4M3_RS(72, 36, 36, 37, 38, 39, 40, 41);
    MDI_E4M3_RS(80, 40, 40, 41, 42, 43, 44, 45);
    MDI_E4M3_RS(88, 44, 44, 45, 46, 47, 48, 49);
    MDI_E4M3_RS(96, 48, 48, 49, 50, 51, 52, 53);
    MDI_E4M3_RS(104, 52, 52, 53, 54, 55, 56, 57);
    MDI_E4M3_RS(112, 56, 56, 57, 58, 59, 60, 61);
    MDI_E4M3_RS(120, 60, 60, 61, 62, 63, 64, 65);
    MDI_E4M3_RS(128, 64, 64, 65, 66, 67, 68, 69);
    MDI_E4M3_RS(136, 68, 68, 69, 70, 71, 72, 73);
    MDI_E4M3_RS(144, 72, 72, 73, 74, 75, 76, 77);
    MDI_E4M3_RS(152, 76, 76, 77, 78, 79, 80, 81);
    MDI_E4M3_RS(160, 80, 80, 81, 82, 83, 84, 85);
    MDI_E4M3_RS(168, 84, 84, 85, 86, 87, 88, 89);
    MDI_E4M3_RS(176, 88, 88, 89, 90, 91, 92, 93);
#elif defined(__CUDA_ARCH__)
    __trap();  // compiled for another architecture: name the file *_sm90.cu
#endif
}

}  // namespace mdi
