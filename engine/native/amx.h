// Products of many rows on AMX: a tile of sixteen rows times a panel per instruction. Sums within a group are the same
// integers as VNNI's and groups are added in the same order, so the results are the same to the bit.
#pragma once

#include "matmul.h"

#ifdef __AMX_INT8__

#include <sys/syscall.h>
#include <unistd.h>

namespace fanlight {

constexpr int AMX_ROWS = 16;
constexpr int AMX_WORTH = 4;  // fewer rows are quicker on VNNI

// The kernel hands out the tile registers on request, once per process and before threads start.
inline bool amx_permitted() {
#ifdef FANLIGHT_AMX_EMULATED
    return true;
#endif
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// Tiles 0, 1: sums of two panels [rows][16] int32. Tile 2: activations [rows][64]. Tiles 3, 4: weights [16][64].
inline void amx_shape(int rows) {
    thread_local int shaped = 0;
    if (shaped == rows) return;
    alignas(64) uint8_t config[64] = {};
    config[0] = 1;
    const int tile_rows[5] = {rows, rows, rows, 16, 16};
    for (int t = 0; t < 5; t++) {
        config[16 + t * 2] = 64;
        config[48 + t] = static_cast<uint8_t>(tile_rows[t]);
    }
    asm volatile("" ::: "memory");  // the compiler must not move the stores above past the load of the configuration
    _tile_loadconfig(config);
    shaped = rows;
}

// use(row, panel, value) for every row and panels `first` and `first + 1`.
template <class Use>
inline void amx_panels(const Weights& w, int first, int end, const Rows& x, int rows, const Use& use) {
    const int groups = x.k / GROUP;
    const uint8_t* ahead = w.data + (first + 2) * w.panel_bytes();
    for (int row = 0; row < rows; row += AMX_ROWS) {
        const int count = rows - row < AMX_ROWS ? rows - row : AMX_ROWS;
        const int lines = first + 2 < end ? 2 * PANEL * count / rows : 0;
        const Rows part = x.from(row);
        f32x16 out[AMX_ROWS][2] = {};
        amx_shape(count);
        for (int g = 0; g < groups; g++) {
            alignas(64) int32_t sum[2][AMX_ROWS][PANEL];
            const uint8_t* from = w.data + first * w.panel_bytes() + size_t(g) * GROUP * PANEL;
            for (int i = 0; i < lines; i++, ahead += 64) prefetch(ahead);
            _tile_loadd(2, part.q + g * GROUP, x.k);
            _tile_loadd(3, from, 64);
            _tile_loadd(4, from + w.panel_bytes(), 64);
            _tile_zero(0);
            _tile_zero(1);
            _tile_dpbsud(0, 2, 3);
            _tile_dpbsud(1, 2, 4);
            _tile_stored(0, sum[0], 64);
            _tile_stored(1, sum[1], 64);
            asm volatile("" ::: "memory");
            for (int p = 0; p < 2; p++) {
                const f32x16 all = load_sums(w.sum + (first + p) * w.panel_sums() + g * PANEL);
                for (int r = 0; r < count; r++) {
                    const int at = r * groups + g;
                    add_group(out[r][p], sum_at(sum[p][r]) + part.offset(at), all, part, at);
                }
            }
        }
        for (int r = 0; r < count; r++)
            for (int p = 0; p < 2; p++) use(row + r, first + p, out[r][p] * load16(w.scale + (first + p) * PANEL));
    }
}

}  // namespace fanlight

#endif
