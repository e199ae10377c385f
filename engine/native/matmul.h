// Y = X Wt with int8 weights per output channel and 8-bit activations per row and group of 64 inputs.
//
// Weights lie in panels of sixteen channels, [n / 16][k / 4][16][4] bytes of w + 128, which is the operand order of
// VNNI and of AMX alike. Activations are a = scale * q + centre with their own centre per group, which halves the error
// of a symmetric range. Sum(w a) = scale * (Sum((w + 128) q) - 128 Sum(q)) + centre * Sum(w): the last sum is stored
// per channel and group, that of q per row. Sums within a group are exact integers and groups are added in order, so a
// row's result does not depend on the rows beside it, nor on the instructions used.
#pragma once

#include "simd.h"

namespace fanlight {

constexpr int GROUP = 64;
constexpr int PANEL = 16;

struct Weights {
    const uint8_t* data;  // panels
    const int16_t* sum;   // [n / 16][k / 64][16] sums of a channel's weights in a group
    const float* scale;   // per channel
    const uint16_t* four; // parameters of 4-bit weights, see four_bit.h, or null
    int n, k;             // n is a multiple of 16, k of 64

    size_t panel_bytes() const { return size_t(k) * PANEL; }
    size_t panel_sums() const { return size_t(k) / GROUP * PANEL; }
};

// Quantised rows: q[row][k]; scale and centre [row][k / 64]; the sums of q over each half of a group [row][k / 64][2],
// and the same times the scale.
struct Rows {
    int8_t* q;
    float* scale;
    float* centre;
    int32_t* sum;
    float* scaled;
    int k;

    // What makes up for weights stored as w + 128.
    int32_t offset(int at) const { return -128 * (sum[at * 2] + sum[at * 2 + 1]); }

    Rows from(int row) const {
        size_t groups = size_t(row) * (k / GROUP);
        return {q + size_t(row) * k, scale + groups, centre + groups, sum + groups * 2, scaled + groups * 2, k};
    }
};

// sum += dot of four bytes per lane: unsigned weights with the same four activations in every lane. Where the target
// lacks the instruction, weights are made signed again and need no offset.
#if defined(__AVX512VNNI__)
constexpr bool NEEDS_OFFSET = true;
struct Panel16 {
    __m512i bytes;
    explicit Panel16(__m512i bytes) : bytes(bytes) {}
    explicit Panel16(const uint8_t* p) : bytes(_mm512_loadu_si512(p)) {}
};
inline void dot4(i32x16& sum, const Panel16& w, int32_t a) {
    sum = reinterpret_cast<i32x16>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), w.bytes, _mm512_set1_epi32(a)));
}
inline void dot4_small(i32x16& sum, const Panel16& w, int32_t a) { dot4(sum, w, a); }
#else
struct Panel16 {
    __m256i half[2];
    Panel16(__m256i low, __m256i high) : half{low, high} {}
    explicit Panel16(const uint8_t* p) {
        for (int i = 0; i < 2; i++) half[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i * 32));
    }
};
template <class Half>
inline void dot4_halves(i32x16& sum, const Panel16& w, int32_t a, const Half& add) {
    __m256i parts[2];
    std::memcpy(parts, &sum, 64);
    for (int i = 0; i < 2; i++) parts[i] = add(parts[i], w.half[i], _mm256_set1_epi32(a));
    std::memcpy(&sum, parts, 64);
}
#if defined(__AVXVNNI__)
constexpr bool NEEDS_OFFSET = true;
inline void dot4(i32x16& sum, const Panel16& w, int32_t a) {
    dot4_halves(sum, w, a, [](__m256i s, __m256i w, __m256i a) { return _mm256_dpbusd_avx_epi32(s, w, a); });
}
inline void dot4_small(i32x16& sum, const Panel16& w, int32_t a) { dot4(sum, w, a); }
#else
constexpr bool NEEDS_OFFSET = false;
inline __m256i add_pairs(__m256i sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
// |w| a' with the sign of w moved to a: 127 * 127 * 2 fits sixteen bits, 255 * 127 * 2 would saturate.
inline void dot4(i32x16& sum, const Panel16& w, int32_t a) {
    dot4_halves(sum, w, a, [](__m256i s, __m256i w, __m256i a) {
        w = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
        return add_pairs(s, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w)));
    });
}
// For weights up to 15, whose sums of two fit as they are.
inline void dot4_small(i32x16& sum, const Panel16& w, int32_t a) {
    dot4_halves(sum, w, a, [](__m256i s, __m256i w, __m256i a) { return add_pairs(s, _mm256_maddubs_epi16(w, a)); });
}
#endif
#endif

// Quantises group `g` of a row: 64 floats.
inline void quantise_group(const f32x16* v, const Rows& row, int g) {
    const float high = max_lanes(max16(max16(v[0], v[1]), max16(v[2], v[3])));
    const float low = -max_lanes(max16(max16(-v[0], -v[1]), max16(-v[2], -v[3])));
    const float middle = (high + low) * 0.5f, step = (high - low) / 254.0f;
    const float inverse = step > 0.0f ? 1.0f / step : 0.0f;
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    i32x16 q[4];
    for (int i = 0; i < 4; i++) {
        q[i] = reinterpret_cast<i32x16>((v[i] - middle) * inverse + magic) - reinterpret_cast<i32x16>(magic);
        int8_t* to = row.q + g * GROUP + i * 16;
#ifdef __AVX512F__
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(q[i])));
#else
        for (int j = 0; j < 16; j++) to[j] = static_cast<int8_t>(q[i][j]);
#endif
    }
    const int32_t first = sum_lanes(q[0] + q[1]), second = sum_lanes(q[2] + q[3]);
    row.scale[g] = step;
    row.centre[g] = middle;
    row.sum[g * 2] = first;
    row.sum[g * 2 + 1] = second;
    row.scaled[g * 2] = step * static_cast<float>(first);
    row.scaled[g * 2 + 1] = step * static_cast<float>(second);
}

inline void quantise_row(const float* x, const Rows& row) {
    for (int g = 0; g < row.k / GROUP; g++) {
        f32x16 v[4];
        for (int i = 0; i < 4; i++) v[i] = load16(x + g * GROUP + i * 16);
        quantise_group(v, row, g);
    }
}

inline f32x16 load_sums(const int16_t* p) {
#ifdef __AVX512F__
    const __m256i sums = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return reinterpret_cast<f32x16>(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(sums)));
#else
    typedef int16_t i16x16u __attribute__((vector_size(32), aligned(2)));
    return __builtin_convertvector(*reinterpret_cast<const i16x16u*>(p), f32x16);
#endif
}

inline i32x16 sum_at(const int32_t* p) { return *reinterpret_cast<const i32x16u*>(p); }

inline int32_t four_bytes(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return four;
}

inline void prefetch(const void* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// Adds one group's integer sums of sixteen channels to a row's floats.
inline void add_group(f32x16& out, i32x16 sum, f32x16 all, const Rows& x, int at) {
    out = fma16(__builtin_convertvector(sum, f32x16), splat(x.scale[at]), out);
    out = fma16(all, splat(x.centre[at]), out);
}

// out[r][p] = R rows times P panels from `first`. Meanwhile a `share` of the next P panels is fetched from `ahead` on.
template <int R, int P>
inline void tile(const Weights& w, int first, const Rows& x, const uint8_t*& ahead, float share, f32x16 (&out)[R][P]) {
    const int groups = x.k / GROUP, lines = static_cast<int>(PANEL * P * share);
    const uint8_t* base = w.data + first * w.panel_bytes();
    const int16_t* sums = w.sum + first * w.panel_sums();
    for (int g = 0; g < groups; g++) {
        i32x16 sum[R][P];
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++) sum[r][p] = splat_i(NEEDS_OFFSET ? x.offset(r * groups + g) : 0);
        const uint8_t* from = base + size_t(g) * GROUP * PANEL;
        const int8_t* a = x.q + g * GROUP;
        for (int i = 0; i < lines; i++, ahead += 64) prefetch(ahead);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP / 4; i++) {
            int32_t four[R];
            for (int r = 0; r < R; r++) four[r] = four_bytes(a + size_t(r) * x.k + i * 4);
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
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) out[r][p] *= load16(w.scale + (first + p) * PANEL);
}

}  // namespace fanlight
