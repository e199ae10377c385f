// Products with 4-bit weights as GGUF's Q4_1 and Q4_0 store them: w = d * (v - 8) + m, v in 0..15, with d and m per
// channel and half group of 32 inputs. v and d are the file's own; m, small beside d, is rounded to half precision.
//
// Per panel and group: [2 halves][4][16 channels][4] bytes, whose low nibbles are inputs 0..15 of the half and whose
// high nibbles are inputs 16..31; and parameters in half precision: d [2][16], m [2][16], and the sum of the group's
// weights [16].
// Sum(w a) = scale * (d Sum((v - 8) q) + m Sum(q)) + centre * Sum(w), d and m half by half.
#pragma once

#include "matmul.h"

namespace fanlight {

constexpr int HALF = GROUP / 2;
constexpr int FOUR_BYTES = GROUP * PANEL / 2;  // of a panel and group
constexpr int FOUR_PARAMS = 5 * PANEL;

inline f32x16 load_half(const uint16_t* p) {
#ifdef __AVX512F__
    return reinterpret_cast<f32x16>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#else
    f32x16 out;
    __m256 parts[2];
    for (int i = 0; i < 2; i++)
        parts[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * 8)));
    std::memcpy(&out, parts, 64);
    return out;
#endif
}

// Low and high nibbles of 64 bytes.
#if defined(__AVX512VNNI__)
struct Nibbles {
    Panel16 low, high;
    explicit Nibbles(const uint8_t* p) : Nibbles(_mm512_loadu_si512(p), _mm512_set1_epi8(15)) {}

private:
    Nibbles(__m512i bytes, __m512i mask)
        : low(_mm512_and_si512(bytes, mask)), high(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)) {}
};
#else
struct Nibbles {
    Panel16 low, high;
    explicit Nibbles(const uint8_t* p) : Nibbles(Panel16(p), _mm256_set1_epi8(15)) {}

private:
    static __m256i upper(__m256i v, __m256i mask) { return _mm256_and_si256(_mm256_srli_epi16(v, 4), mask); }
    Nibbles(Panel16 v, __m256i mask)
        : low(_mm256_and_si256(v.half[0], mask), _mm256_and_si256(v.half[1], mask)),
          high(upper(v.half[0], mask), upper(v.half[1], mask)) {}
};
#endif

// sum[r][p] = Sum((v - 8) q) over half a group. `apart` bytes lie between panels, `k` between rows; sums[r * stride] is
// Sum(q).
template <int R, int P>
inline void four_half(const uint8_t* from, size_t apart, const int8_t* a, int k, const int32_t* sums, int stride,
                      i32x16 (&sum)[R][P]) {
    // Two chains of additions where there are few: one would wait for itself.
    constexpr bool TWO = R * P <= 6;
    i32x16 other[R][P] = {};
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) sum[r][p] = splat_i(-8 * sums[r * stride]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        int32_t low[R], high[R];
        for (int r = 0; r < R; r++) {
            low[r] = four_bytes(a + size_t(r) * k + i * 4);
            high[r] = four_bytes(a + size_t(r) * k + HALF / 2 + i * 4);
        }
        for (int p = 0; p < P; p++) {
            const Nibbles v(from + p * apart + i * 64);
            for (int r = 0; r < R; r++) {
                dot4_small(sum[r][p], v.low, low[r]);
                dot4_small(TWO ? other[r][p] : sum[r][p], v.high, high[r]);
            }
        }
    }
    if (TWO)
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) sum[r][p] += other[r][p];
}

// See tile(); here `ahead` covers the nibbles and `params_ahead` the parameters.
template <int R, int P>
inline void four_tile(const Weights& w, int first, const Rows& x, const uint8_t*& ahead, const uint8_t*& params_ahead,
                      float share, f32x16 (&out)[R][P]) {
    const int groups = x.k / GROUP;
    const int lines = static_cast<int>(FOUR_BYTES / 64 * P * share);
    const size_t panel = size_t(groups) * FOUR_BYTES, panel_params = size_t(groups) * FOUR_PARAMS;
    const uint8_t* from = w.data + first * panel;
    const uint16_t* params = w.four + first * panel_params;
    const int8_t* a = x.q;
    for (int g = 0; g < groups; g++, from += FOUR_BYTES, params += FOUR_PARAMS, a += GROUP) {
        for (int i = 0; i < lines; i++, ahead += 64) prefetch(ahead);
        for (int i = 0; i < (lines + 3) / 4; i++, params_ahead += 64) prefetch(params_ahead);
        f32x16 scaled[R][P];
        for (int h = 0; h < 2; h++) {
            i32x16 sum[R][P];
            four_half<R, P>(from + h * FOUR_BYTES / 2, panel, a + h * HALF, x.k, x.sum + g * 2 + h, groups * 2, sum);
            for (int p = 0; p < P; p++) {
                const f32x16 d = load_half(params + p * panel_params + h * PANEL);
                for (int r = 0; r < R; r++) {
                    const f32x16 v = __builtin_convertvector(sum[r][p], f32x16);
                    scaled[r][p] = h == 0 ? v * d : fma16(v, d, scaled[r][p]);
                }
            }
        }
        for (int p = 0; p < P; p++) {
            const uint16_t* own = params + p * panel_params;
            const f32x16 m[2] = {load_half(own + 2 * PANEL), load_half(own + 3 * PANEL)};
            const f32x16 all = load_half(own + 4 * PANEL);
            for (int r = 0; r < R; r++) {
                const int at = r * groups + g;
                out[r][p] = fma16(scaled[r][p], splat(x.scale[at]), out[r][p]);
                out[r][p] = fma16(all, splat(x.centre[at]), out[r][p]);
                for (int h = 0; h < 2; h++) out[r][p] = fma16(m[h], splat(x.scaled[at * 2 + h]), out[r][p]);
            }
        }
    }
}

}  // namespace fanlight
