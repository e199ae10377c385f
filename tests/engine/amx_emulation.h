// Tile registers in plain C++, so that the AMX kernel's logic runs on CPUs without them. Included before everything.
#pragma once

#include <cstdint>
#include <cstring>
#include <immintrin.h>

#define __AMX_INT8__ 1
#define FANLIGHT_AMX_EMULATED 1

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define _tile_loadconfig emulated_loadconfig
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbsud emulated_dpbsud

struct EmulatedTile {
    int rows, bytes;
    uint8_t data[16][64];
};

inline thread_local EmulatedTile emulated_tiles[8];

inline void emulated_loadconfig(const void* config) {
    const uint8_t* at = static_cast<const uint8_t*>(config);
    for (int t = 0; t < 8; t++) emulated_tiles[t] = {at[48 + t], at[16 + t * 2], {}};
}

inline void emulated_loadd(int tile, const void* base, size_t stride) {
    EmulatedTile& t = emulated_tiles[tile];
    for (int r = 0; r < t.rows; r++) std::memcpy(t.data[r], static_cast<const uint8_t*>(base) + r * stride, t.bytes);
}

inline void emulated_stored(int tile, void* base, size_t stride) {
    EmulatedTile& t = emulated_tiles[tile];
    for (int r = 0; r < t.rows; r++) std::memcpy(static_cast<uint8_t*>(base) + r * stride, t.data[r], t.bytes);
}

inline void emulated_zero(int tile) { std::memset(emulated_tiles[tile].data, 0, sizeof(emulated_tiles[tile].data)); }

// Signed bytes of `a` times unsigned bytes of `b`, four at a time, as the instruction does it.
inline void emulated_dpbsud(int sum, int a, int b) {
    EmulatedTile &s = emulated_tiles[sum], &x = emulated_tiles[a], &w = emulated_tiles[b];
    for (int m = 0; m < s.rows; m++)
        for (int n = 0; n < s.bytes / 4; n++) {
            int32_t total;
            std::memcpy(&total, &s.data[m][n * 4], 4);
            for (int k = 0; k < x.bytes / 4; k++)
                for (int i = 0; i < 4; i++)
                    total += int32_t(static_cast<int8_t>(x.data[m][k * 4 + i])) * int32_t(w.data[k][n * 4 + i]);
            std::memcpy(&s.data[m][n * 4], &total, 4);
        }
}
