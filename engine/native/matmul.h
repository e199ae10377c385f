// Y = X Wt with int8 weights per output channel and 8-bit activations per row and group of 64 inputs.
//
// Weights lie in panels of sixteen channels, [n / 16][k / 4][16][4] bytes, which is the operand order of
// VNNI and of AMX alike. Activations are a = scale * q + centre with their own centre per group, which
// halves the error of a symmetric range. Sum(w a) = scale * Sum(w q) + centre * Sum(w); the last sum is stored per channel
// and group. Sums within a group are exact integers and groups are added in order, so a row's result does not
// depend on the rows beside it, nor on the instructions used.
#pragma once

#include <type_traits>

#include "simd.h"

namespace fanlight {

constexpr int GROUP = 64;
constexpr int PANEL = 16;

struct Weights {
    const int8_t* data;   // panels
    const int16_t* sum;   // [n / 16][k / 64][16] sums of a channel's weights in a group
    const float* scale;   // per channel
    int n, k;             // n is a multiple of 16, k of 64

    size_t panel_bytes() const { return size_t(k) * PANEL; }
    size_t panel_sums() const { return size_t(k) / GROUP * PANEL; }
};

// Quantised rows: value[row][k], and scale and centre [row][k / 64]. What is stored is q + SHIFT, and `centre`
// makes up for the shift.
struct Rows {
    uint8_t* value;
    float* scale;
    float* centre;
    int k;

    Rows from(int row) const {
        int groups = k / GROUP;
        return {value + size_t(row) * k, scale + size_t(row) * groups, centre + size_t(row) * groups, k};
    }
};

// sum += dot of four bytes per lane: weights with the same four activations in every lane. Instructions that
// want one operand unsigned get the activations shifted by 128.
#if defined(__AVX512VNNI__)
constexpr int SHIFT = 128;
struct Panel16 {
    __m512i bytes;
    explicit Panel16(const int8_t* p) : bytes(_mm512_loadu_si512(p)) {}
};
inline void dot4(i32x16& sum, const Panel16& w, int32_t a) {
    sum = reinterpret_cast<i32x16>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), _mm512_set1_epi32(a), w.bytes));
}
#else
struct Panel16 {
    __m256i half[2];
    explicit Panel16(const int8_t* p) {
        for (int i = 0; i < 2; i++) half[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i * 32));
    }
};
#if defined(__AVXVNNI__)
constexpr int SHIFT = 128;
inline __m256i dot4_half(__m256i sum, __m256i w, __m256i a) { return _mm256_dpbusd_avx_epi32(sum, a, w); }
#else
constexpr int SHIFT = 0;
// |w| a' with the sign of w moved to a: 127 * 127 * 2 fits sixteen bits, 255 * 127 * 2 would saturate.
inline __m256i dot4_half(__m256i sum, __m256i w, __m256i a) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
inline void dot4(i32x16& sum, const Panel16& w, int32_t a) {
    __m256i parts[2];
    std::memcpy(parts, &sum, 64);
    for (int i = 0; i < 2; i++) parts[i] = dot4_half(parts[i], w.half[i], _mm256_set1_epi32(a));
    std::memcpy(&sum, parts, 64);
}
#endif

// Quantises one group of 64 floats.
inline void quantise_group(const f32x16* v, uint8_t* value, float* scale, float* centre) {
    const float high = max_lanes(max16(max16(v[0], v[1]), max16(v[2], v[3])));
    const float low = -max_lanes(max16(max16(-v[0], -v[1]), max16(-v[2], -v[3])));
    const float middle = (high + low) * 0.5f, step = (high - low) / 254.0f;
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    const f32x16 magic = splat(12582912.0f + SHIFT);  // 1.5 * 2^23: adding it rounds to an integer
    for (int i = 0; i < 4; i++) {
        // The low byte of the rounded float is q + SHIFT: no conversion is needed.
        u32x16 bits = reinterpret_cast<u32x16>((v[i] - middle) * inverse + magic);
#ifdef __AVX512F__
        _mm_storeu_si128(reinterpret_cast<__m128i*>(value + i * 16), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(bits)));
#else
        for (int j = 0; j < 16; j++) value[i * 16 + j] = static_cast<uint8_t>(bits[j]);
#endif
    }
    *scale = step;
    *centre = middle - SHIFT * step;
}

inline void quantise_row(const float* x, const Rows& out) {
    for (int g = 0; g < out.k / GROUP; g++) {
        f32x16 v[4];
        for (int i = 0; i < 4; i++) v[i] = load16(x + g * GROUP + i * 16);
        quantise_group(v, out.value + g * GROUP, out.scale + g, out.centre + g);
    }
}

inline f32x16 load_sums(const int16_t* p) {
#ifdef __AVX512F__
    return reinterpret_cast<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
#else
    typedef int16_t i16x16u __attribute__((vector_size(32), aligned(2)));
    return __builtin_convertvector(*reinterpret_cast<const i16x16u*>(p), f32x16);
#endif
}

inline i32x16 sum_at(const int32_t* p) { return *reinterpret_cast<const i32x16u*>(p); }

// Adds one group's integer sums of sixteen channels to a row's floats.
inline void add_group(f32x16& out, i32x16 sum, f32x16 all, const Rows& x, int at) {
    out += __builtin_convertvector(sum, f32x16) * x.scale[at];
    out += all * x.centre[at];
}

// out[r][p] = R rows times P panels from `first`, without the channels' scales.
// Meanwhile `lines` cache lines per group are fetched from `ahead`: the weights of the panels to come.
template <int R, int P>
inline void tile(const Weights& w, int first, const Rows& x, const int8_t* ahead, int lines, f32x16 (&out)[R][P]) {
    const int groups = x.k / GROUP;
    const int8_t* base = w.data + first * w.panel_bytes();
    const int16_t* sums = w.sum + first * w.panel_sums();
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) out[r][p] = f32x16{};
    for (int g = 0; g < groups; g++) {
        i32x16 sum[R][P];
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) sum[r][p] = i32x16{};
        const int8_t* from = base + size_t(g) * GROUP * PANEL;
        const uint8_t* a = x.value + g * GROUP;
        for (int i = 0; i < lines; i++, ahead += 64) _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP / 4; i++) {
            int32_t four[R];
            for (int r = 0; r < R; r++) std::memcpy(&four[r], a + size_t(r) * x.k + i * 4, 4);
            for (int p = 0; p < P; p++) {
                Panel16 bytes(from + p * w.panel_bytes() + i * 64);
                for (int r = 0; r < R; r++) dot4(sum[r][p], bytes, four[r]);
            }
        }
        for (int p = 0; p < P; p++) {
            const f32x16 all = load_sums(sums + p * w.panel_sums() + g * PANEL);
            for (int r = 0; r < R; r++) add_group(out[r][p], sum[r][p], all, x, r * groups + g);
        }
    }
}

// Calls use(row, panel, value) for every row and each of P panels from `first`. Panels up to `end` follow.
template <int P, class Use>
inline void panels(const Weights& w, int first, int end, const Rows& x, int rows, const Use& use) {
    const int8_t* ahead = w.data + (first + P) * w.panel_bytes();
    constexpr int MOST = P <= 2 ? 6 : 2;
    for (int row = 0; row < rows;) {
        // Even pieces: 8 rows are 4 + 4, not 6 + 2.
        int left = rows - row, pieces = (left + MOST - 1) / MOST, count = (left + pieces - 1) / pieces;
        auto run = [&](auto size) {
            constexpr int R = decltype(size)::value;
            f32x16 out[R][P];
            const int lines = rows > 2 && first + P < end ? PANEL * P * R / rows : 0;
            tile<R, P>(w, first, x.from(row), ahead, lines, out);
            ahead += size_t(lines) * x.k / GROUP * 64;
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++) use(row + r, first + p, out[r][p] * load16(w.scale + (first + p) * PANEL));
        };
        if constexpr (P <= 2) {
            switch (count) {
                case 1: run(std::integral_constant<int, 1>{}); break;
                case 2: run(std::integral_constant<int, 2>{}); break;
                case 3: run(std::integral_constant<int, 3>{}); break;
                case 4: run(std::integral_constant<int, 4>{}); break;
                case 5: run(std::integral_constant<int, 5>{}); break;
                default: run(std::integral_constant<int, 6>{}); break;
            }
        } else {
            count == 1 ? run(std::integral_constant<int, 1>{}) : run(std::integral_constant<int, 2>{});
        }
        row += count;
    }
}

}  // namespace fanlight
