// Products with 4-bit weights as GGUF's Q4_1 and Q4_0 store them: w = d * v + m, v in 0..15, with d and m per channel and
// half group of 32 inputs. Nothing is rounded on the way from the file.
//
// Per panel and group: [2 halves][4][16 channels][4] bytes, whose low nibbles are inputs 0..15 of the half and whose high
// nibbles are inputs 16..31; and parameters [d, d, m, m, sum][16] in half precision, sum being that of the group's weights.
// Sum(w a) = scale * (d Sum(v q) + m Sum(q)) + centre * Sum(w), half by half.
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
    for (int i = 0; i < 2; i++) parts[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * 8)));
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
        : low(_mm256_and_si256(v.half[0], mask), _mm256_and_si256(v.half[1], mask)), high(upper(v.half[0], mask), upper(v.half[1], mask)) {}
};
#endif

// See tile(); here `ahead` covers the nibbles and `params_ahead` the parameters.
template <int R, int P>
inline void four_tile(const Weights& w, int first, const Rows& x, const uint8_t*& ahead, const uint8_t*& params_ahead, float share,
                      f32x16 (&out)[R][P]) {
    const int groups = x.k / GROUP;
    const int lines = static_cast<int>(FOUR_BYTES / 64 * P * share);
    const size_t panel = size_t(groups) * FOUR_BYTES, panel_params = size_t(groups) * FOUR_PARAMS;
    const uint8_t* from = w.data + first * panel;
    const uint16_t* params = w.four + first * panel_params;
    const int8_t* a = x.q;
    for (int g = 0; g < groups; g++, from += FOUR_BYTES, params += FOUR_PARAMS, a += GROUP) {
        for (int i = 0; i < lines; i++, ahead += 64) prefetch(ahead);
        for (int i = 0; i < (lines + 3) / 4; i++, params_ahead += 64) prefetch(params_ahead);
        for (int h = 0; h < 2; h++) {
            // Two chains of additions where there are few: one would wait for itself.
            i32x16 sum[R][P] = {}, other[R][P] = {};
            constexpr bool TWO = R * P <= 6;
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                int32_t low[R], high[R];
                for (int r = 0; r < R; r++) {
                    low[r] = four_bytes(a + size_t(r) * x.k + h * HALF + i * 4);
                    high[r] = four_bytes(a + size_t(r) * x.k + h * HALF + HALF / 2 + i * 4);
                }
                for (int p = 0; p < P; p++) {
                    const Nibbles v(from + p * panel + (h * 4 + i) * 64);
                    for (int r = 0; r < R; r++) {
                        dot4_small(sum[r][p], v.low, low[r]);
                        dot4_small(TWO ? other[r][p] : sum[r][p], v.high, high[r]);
                    }
                }
            }
            for (int p = 0; p < P; p++) {
                const f32x16 d = load_half(params + p * panel_params + h * PANEL);
                const f32x16 m = load_half(params + p * panel_params + (2 + h) * PANEL);
                for (int r = 0; r < R; r++) {
                    const i32x16 both = TWO ? sum[r][p] + other[r][p] : sum[r][p];
                    out[r][p] = fma16(__builtin_convertvector(both, f32x16) * d, splat(x.scale[r * groups + g]), out[r][p]);
                    out[r][p] = fma16(m, splat(x.part[(r * groups + g) * 2 + h]), out[r][p]);
                }
            }
        }
        for (int p = 0; p < P; p++) {
            const f32x16 all = load_half(params + p * panel_params + 4 * PANEL);
            for (int r = 0; r < R; r++) out[r][p] = fma16(all, splat(x.centre[r * groups + g]), out[r][p]);
        }
    }
}

}  // namespace fanlight
