// X Wt by whichever kernel suits the number of rows.
#pragma once

#include "amx.h"
#include "matmul.h"

namespace fanlight {

// Calls use(row, panel, value) for panels [first, first + 2) of a matrix whose task ends at `end`.
template <class Use>
inline void multiply_pair(const Weights& w, int first, int end, const Rows& x, int rows, const Use& use) {
#ifdef __AMX_INT8__
    if (rows >= AMX_WORTH) return amx_panels(w, first, end, x, rows, use);
#endif
    panels<2>(w, first, end, x, rows, use);
}

// Calls use(row, panel, value) for panels [first, end).
template <class Use>
inline void multiply(const Weights& w, int first, int end, const Rows& x, int rows, const Use& use) {
    if (rows <= 2)
        for (; first + 4 <= end; first += 4) panels<4>(w, first, end, x, rows, use);
    for (; first + 2 <= end; first += 2) multiply_pair(w, first, end, x, rows, use);
    for (; first < end; first++) panels<1>(w, first, end, x, rows, use);
}

}  // namespace fanlight
