// Vectors of sixteen lanes. GCC and clang lower them to whatever the target has, so that the same
// source serves AVX-512 and AVX2; only dot products need instructions by name.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace fanlight {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef f32x16 f32x16u __attribute__((aligned(4)));
typedef i32x16 i32x16u __attribute__((aligned(4)));
typedef uint16_t bf16;

inline f32x16 load16(const float* p) { return *reinterpret_cast<const f32x16u*>(p); }
inline void store16(float* p, f32x16 v) { *reinterpret_cast<f32x16u*>(p) = v; }
inline f32x16 splat(float v) { return f32x16{} + v; }
inline i32x16 splat_i(int32_t v) { return i32x16{} + v; }
inline f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

// a * b + c, rounded once. The library is built without contraction of its own, since whether a compiler fuses an
// expression can differ between copies of the same code, and results must not.
inline f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#ifdef __AVX512F__
    return reinterpret_cast<f32x16>(
        _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#else
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, 64);
    std::memcpy(y, &b, 64);
    std::memcpy(z, &c, 64);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    std::memcpy(&c, z, 64);
    return c;
#endif
}

// A fixed tree, so that the sum of a row never depends on how it was tiled.
inline float sum_lanes(f32x16 v) {
    float lane[16];
    store16(lane, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

inline int32_t sum_lanes(i32x16 v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_epi32(reinterpret_cast<__m512i>(v));
#else
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += v[i];
    return sum;
#endif
}

inline float max_lanes(f32x16 v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps(reinterpret_cast<__m512>(v));
#else
    float lane[16];
    store16(lane, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
#endif
}

inline float widen(bf16 v) {
    uint32_t bits = static_cast<uint32_t>(v) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

// Round to nearest even, lane by lane; the upper half of each lane of the result is the bf16.
inline u32x16 round_bf16(f32x16 v) {
    u32x16 bits = reinterpret_cast<u32x16>(v);
    return bits + 0x7fff + ((bits >> 16) & 1);
}

// Sixteen floats to sixteen bf16, in order.
inline void store_bf16(bf16* to, f32x16 v) {
    u32x16 bits = round_bf16(v) >> 16;
#ifdef __AVX512F__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(bits)));
#else
    for (int i = 0; i < 16; i++) to[i] = static_cast<bf16>(bits[i]);
#endif
}

// Sixteen floats to every other bf16 from `to` on. Those between belong to somebody else and are not touched.
inline void store_bf16_apart(bf16* to, f32x16 v) {
    u32x16 bits = round_bf16(v) >> 16;
#ifdef __AVX512BW__
    _mm512_mask_storeu_epi16(to, 0x55555555, reinterpret_cast<__m512i>(bits));
#else
    for (int i = 0; i < 16; i++) to[i * 2] = static_cast<bf16>(bits[i]);
#endif
}

// 2^x for x in [-126, 127]; below that 2^-126, which is nothing beside a softmax's own maximum.
// Relative error below 2e-7 (degree 6 around 0).
inline f32x16 exp2_16(f32x16 x) {
    x = max16(x, splat(-126.0f));
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    f32x16 whole = (x + magic) - magic;
    f32x16 f = x - whole;
    f32x16 p = splat(1.5353362e-4f);
    for (float next : {1.3398874e-3f, 9.6184373e-3f, 5.5503324e-2f, 2.4022648e-1f, 6.9314720e-1f, 1.0f})
        p = fma16(p, f, splat(next));
    i32x16 power = __builtin_convertvector(whole, i32x16) << 23;
    return reinterpret_cast<f32x16>(reinterpret_cast<i32x16>(p) + power);
}

inline float exp2_1(float x) { return exp2_16(splat(x))[0]; }

// sum += x.even * y.even + x.odd * y.odd per lane; both hold pairs of bf16.
inline void dot2(f32x16& sum, i32x16 pairs, uint32_t pair) {
#ifdef __AVX512BF16__
    sum = reinterpret_cast<f32x16>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(pairs),
                                                    reinterpret_cast<__m512bh>(splat_i(static_cast<int32_t>(pair)))));
#else
    f32x16 even = reinterpret_cast<f32x16>(pairs << 16);
    f32x16 odd = reinterpret_cast<f32x16>(pairs & static_cast<int32_t>(0xffff0000));
    sum = fma16(even, splat(widen(static_cast<bf16>(pair))), sum);
    sum = fma16(odd, splat(widen(static_cast<bf16>(pair >> 16))), sum);
#endif
}

constexpr float LOG2E = 1.44269504f;

inline f32x16 silu16(f32x16 x) {
    f32x16 power = max16(x * -LOG2E, splat(-126.0f));
    return x / (exp2_16(power < 126.0f ? power : splat(126.0f)) + 1.0f);
}

}  // namespace fanlight
