// X Wt by whichever kernel suits the weights and the number of rows.
#pragma once

#include <type_traits>

#include "amx.h"
#include "four_bit.h"
#include "matmul.h"

namespace fanlight {

constexpr int FEW = 2;          // rows up to which a product waits for memory
constexpr int DISTANCE = 2048;  // bytes fetched ahead then

template <int N>
using Count = std::integral_constant<int, N>;

// Calls run(Count<n>) for n = `count` up to 6.
template <class Run>
inline void with_count(int count, const Run& run) {
    switch (count) {
        case 1: return run(Count<1>{});
        case 2: return run(Count<2>{});
        case 3: return run(Count<3>{});
        case 4: return run(Count<4>{});
        case 5: return run(Count<5>{});
        default: return run(Count<6>{});
    }
}

// Calls use(row, panel, value) for every row and each of P panels from `first`. Panels up to `end` follow.
template <int P, class Use>
inline void panels(const Weights& w, int first, int end, const Rows& x, int rows, const Use& use) {
    constexpr int MOST = 6;
    const size_t bytes = w.four ? w.panel_bytes() / 2 : w.panel_bytes(), params = size_t(w.k) / GROUP * FOUR_PARAMS;
    const uint8_t* ahead = w.data + (first + P) * bytes;
    const uint8_t* params_ahead = reinterpret_cast<const uint8_t*>(w.four + (first + P) * params);
    if (rows <= FEW) {
        // So few rows that weights arrive more slowly than they are used: one stream, fetched a fixed way ahead.
        ahead = w.data + first * bytes + DISTANCE;
        params_ahead = reinterpret_cast<const uint8_t*>(w.four + first * params) + DISTANCE / 2;
    }
    for (int row = 0; row < rows;) {
        // Even pieces: 8 rows are 4 + 4, not 6 + 2.
        const int left = rows - row, pieces = (left + MOST - 1) / MOST, count = (left + pieces - 1) / pieces;
        const bool fetch = rows <= FEW ? row == 0 : first + P < end;
        const float share = !fetch ? 0.0f : rows <= FEW ? 1.0f : static_cast<float>(count) / rows;
        auto run = [&](auto size) {
            constexpr int R = decltype(size)::value;
            f32x16 out[R][P] = {};
            if (w.four) four_tile<R, P>(w, first, x.from(row), ahead, params_ahead, share, out);
            else tile<R, P>(w, first, x.from(row), ahead, share, out);
            for (int r = 0; r < R; r++)
                for (int p = 0; p < P; p++) use(row + r, first + p, out[r][p]);
        };
        with_count(count, run);
        row += count;
    }
}

// Calls use(row, panel, value) for panels [first, first + 2) of a matrix whose task ends at `end`.
template <class Use>
inline void multiply_pair(const Weights& w, int first, int end, const Rows& x, int rows, const Use& use) {
#ifdef __AMX_INT8__
    if (rows >= AMX_WORTH && !w.four) return amx_panels(w, first, end, x, rows, use);
#endif
    panels<2>(w, first, end, x, rows, use);
}

// Calls use(row, panel, value) for panels [first, end).
template <class Use>
inline void multiply(const Weights& w, int first, int end, const Rows& x, int rows, const Use& use) {
    if (rows > FEW)
        for (; first + 2 <= end; first += 2) multiply_pair(w, first, end, x, rows, use);
    for (; first < end; first++) panels<1>(w, first, end, x, rows, use);
}

}  // namespace fanlight
