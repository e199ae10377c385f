// Paged attention over bf16 keys and values, the same arithmetic for one row or a tile of them.
//
// A cache tile holds sixteen tokens of one KV head: keys as [d / 2][16 tokens][2] so that a score of sixteen
// tokens is one vector, then values as [8 token pairs][d][2]. Rows walk the keys in steps of 64
// aligned positions with a running maximum. What a row computes depends on its own keys only:
// masked scores add exact zeros, and a maximum that stands changes nothing.
#pragma once

#include <cmath>

#include "simd.h"

namespace fanlight {

constexpr int TILE = 16;      // tokens of a cache tile
constexpr int SPAN = 4;       // cache tiles of one step over the keys
constexpr int KEYS = TILE * SPAN;
constexpr int BLOCK_ROWS = 6; // rows that share loads of keys and values

inline size_t cache_tile_size(int d) { return size_t(2) * TILE * d; }  // in bf16 elements

// Writes one token's key and value (d floats each) of one head into its cache tile.
inline void store_token(bf16* tile, int lane, int d, const float* key, const float* value) {
    bf16* values = tile + size_t(TILE) * d + size_t(lane / 2) * d * 2 + lane % 2;
    for (int i = 0; i < d; i += 16) {
        bf16 narrowed[16];
        store_bf16(narrowed, load16(key + i));
        for (int j = 0; j < 16; j += 2) std::memcpy(tile + size_t(i + j) * TILE + lane * 2, narrowed + j, 4);
        store_bf16_apart(values + i * 2, load16(value + i));
    }
}

// One query head of one token, and its running softmax.
struct QueryRow {
    const uint32_t* query;  // d / 2 pairs of bf16, already scaled by log2(e) / sqrt(d)
    int position;           // the last key it may see
    float peak;
    f32x16 weight;          // lanes of the sum of exponentials
    float* out;             // d floats
};

struct Span {
    const bf16* tile[SPAN] = {};
};

// Fetches a span a few lines at a time, as all at once would stall the core.
class Ahead {
public:
    Ahead(const Span& span, int lines) : span_(span), lines_(lines) {}

    void fetch() {
        if (tile_ >= SPAN) return;
        const char* bytes = reinterpret_cast<const char*>(span_.tile[tile_]);
        if (bytes)
            for (int i = 0; i < 4; i++) _mm_prefetch(bytes + (line_ + i) * 64, _MM_HINT_T0);
        line_ += 4;
        if (!bytes || line_ >= lines_) {
            line_ = 0;
            tile_++;
        }
    }

private:
    const Span& span_;
    int lines_, line_ = 0, tile_ = 0;
};

template <int D>
struct Attention {
    static constexpr int LANES = D / 16;

    // Scores of R rows against SPAN tiles.
    template <int R>
    static void score(const QueryRow* rows, const bf16* const* tiles, Ahead& ahead, f32x16 (&s)[R][SPAN]) {
        for (int r = 0; r < R; r++)
            for (int t = 0; t < SPAN; t++) s[r][t] = f32x16{};
        for (int i = 0; i < D / 2; i++) {
            ahead.fetch();
            for (int t = 0; t < SPAN; t++) {
                i32x16 keys = *reinterpret_cast<const i32x16u*>(tiles[t] + i * TILE * 2);
                for (int r = 0; r < R; r++) dot2(s[r][t], keys, rows[r].query[i]);
            }
        }
    }

    // Turns scores into bf16 weights [KEYS / 2 pairs], rescaling what the row has gathered so far.
    static void soften(QueryRow& row, f32x16 (&s)[SPAN], int first_key, uint32_t* pairs) {
        static const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        if (first_key + KEYS - 1 > row.position)
            for (int t = 0; t < SPAN; t++)
                s[t] = lane + (first_key + t * TILE) > splat_i(row.position) ? splat(-INFINITY) : s[t];
        float peak = max_lanes(max16(max16(s[0], s[1]), max16(s[2], s[3])));
        if (peak > row.peak) {
            float shrink = row.peak == -INFINITY ? 0.0f : exp2_1(row.peak - peak);
            row.peak = peak;
            row.weight *= shrink;
            for (int i = 0; i < LANES; i++) store16(row.out + i * 16, load16(row.out + i * 16) * shrink);
        }
        for (int t = 0; t < SPAN; t++) {
            f32x16 p = exp2_16(s[t] - row.peak);
            p = s[t] == splat(-INFINITY) ? f32x16{} : p;
            row.weight += p;
            store_bf16(reinterpret_cast<bf16*>(pairs + t * TILE / 2), p);
        }
    }

    // out += weights times values of `tiles`, 64 dimensions at a time.
    template <int R>
    static void gather(QueryRow* rows, const bf16* const* tiles, const uint32_t (*pairs)[KEYS / 2], Ahead& ahead) {
        for (int at = 0; at < LANES; at += 4) {
            f32x16 o[R][4];
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 4; i++) o[r][i] = load16(rows[r].out + (at + i) * 16);
            for (int j = 0; j < KEYS / 2; j++) {
                ahead.fetch();
                const bf16* values = tiles[j / 8] + TILE * D + size_t(j % 8) * D * 2 + at * 32;
                for (int i = 0; i < 4; i++) {
                    i32x16 v = *reinterpret_cast<const i32x16u*>(values + i * 32);
                    for (int r = 0; r < R; r++) dot2(o[r][i], v, pairs[r][j]);
                }
            }
            for (int r = 0; r < R; r++)
                for (int i = 0; i < 4; i++) store16(rows[r].out + (at + i) * 16, o[r][i]);
        }
    }

    template <int R>
    static void step(QueryRow* rows, const bf16* const* tiles, int first_key, Ahead& ahead) {
        f32x16 s[R][SPAN];
        alignas(64) uint32_t pairs[R][KEYS / 2];
        score<R>(rows, tiles, ahead, s);
        for (int r = 0; r < R; r++) soften(rows[r], s[r], first_key, pairs[r]);
        gather<R>(rows, tiles, pairs, ahead);
    }

    static void step_rows(QueryRow* rows, int count, const bf16* const* tiles, int first_key, Ahead& ahead) {
        while (count >= BLOCK_ROWS) {
            step<BLOCK_ROWS>(rows, tiles, first_key, ahead);
            rows += BLOCK_ROWS;
            count -= BLOCK_ROWS;
        }
        switch (count) {
            case 1: return step<1>(rows, tiles, first_key, ahead);
            case 2: return step<2>(rows, tiles, first_key, ahead);
            case 3: return step<3>(rows, tiles, first_key, ahead);
            case 4: return step<4>(rows, tiles, first_key, ahead);
            case 5: return step<5>(rows, tiles, first_key, ahead);
        }
    }

    // Rows share one sequence; `tile_at(i)` is cache tile i of their KV head, and `then` the first span of what
    // is attended next, to be fetched meanwhile (null tiles are not). `zeros` stands in for tiles past the last one:
    // their keys are masked anyway.
    template <class TileAt>
    static void run(QueryRow* rows, int count, int last_key, const TileAt& tile_at, const bf16* zeros,
                    const Span& then) {
        for (int r = 0; r < count; r++) {
            rows[r].peak = -INFINITY;
            rows[r].weight = f32x16{};
            std::memset(rows[r].out, 0, D * sizeof(float));
        }
        const int tiles_used = last_key / TILE + 1;
        for (int first = 0; first < tiles_used; first += SPAN) {
            const bf16* tiles[SPAN];
            const int after = first + SPAN;
            Span next = then;
            for (int t = 0; t < SPAN; t++) tiles[t] = first + t < tiles_used ? tile_at(first + t) : zeros;
            if (after < tiles_used)
                for (int t = 0; t < SPAN; t++) next.tile[t] = after + t < tiles_used ? tile_at(after + t) : nullptr;
            Ahead ahead(next, cache_tile_size(D) * 2 / 64);
            step_rows(rows, count, tiles, first * TILE, ahead);
        }
        for (int r = 0; r < count; r++) {
            float inverse = 1.0f / sum_lanes(rows[r].weight);
            for (int i = 0; i < LANES; i++) store16(rows[r].out + i * 16, load16(rows[r].out + i * 16) * inverse);
        }
    }
};

}  // namespace fanlight
