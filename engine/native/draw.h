// One random token per row: temperature, min-p, top-k, then top-p of what top-k leaves. The same rules as
// engine/sampler.py, which serves what needs more than these.
#pragma once

#include <algorithm>
#include <vector>

#include "abi.h"
#include "simd.h"

namespace fanlight {

struct Candidate {
    float weight;
    int token;
};

// exp((logit - peak) / temperature) over the row, in place and in runs of `CHUNK` whose sums are kept.
class Weighted {
public:
    static constexpr int CHUNK = 256;

    // `row` has room for whole chunks; what lies past the vocabulary weighs nothing.
    Weighted(float* row, int vocab, float peak, const FlDraw& how)
        : row_(row), chunks_((vocab + CHUNK - 1) / CHUNK), sums_(chunks_) {
        const float scale = LOG2E / std::max(how.temperature, 1e-4f);
        std::fill(row + vocab, row + chunks_ * CHUNK, -INFINITY);
        for (int c = 0; c < chunks_; c++) {
            f32x16 sum{};
            for (int i = c * CHUNK; i < (c + 1) * CHUNK; i += 16) {
                f32x16 x = (load16(row + i) - peak) * scale;
                f32x16 w = exp2_16(x);
                w = x < splat(-126.0f) ? f32x16{} : w;
                w = w < splat(how.min_p) ? f32x16{} : w;
                store16(row + i, w);
                sum += w;
            }
            sums_[c] = sum_lanes(sum);
            total_ += sums_[c];
        }
    }

    double total() const { return total_; }

    // The token at which the running sum, in order of tokens, passes the share `uniform` of the total.
    int pick(double uniform) const {
        double left = uniform * total_;
        int c = 0;
        while (c + 1 < chunks_ && left >= sums_[c]) left -= sums_[c++];
        int last = c * CHUNK;
        for (int i = c * CHUNK; i < (c + 1) * CHUNK; i++) {
            if (row_[i] > 0.0f) last = i;
            if (left < row_[i]) return i;
            left -= row_[i];
        }
        return last;  // rounding may carry past the chunk: its last token with any weight
    }

    // Tokens that weigh at least `floor`, heaviest first; of equal ones the lowest first.
    std::vector<Candidate> above(float floor) const {
        std::vector<Candidate> found;
        for (int c = 0; c < chunks_; c++)
            if (sums_[c] >= floor)
                for (int i = c * CHUNK; i < (c + 1) * CHUNK; i++)
                    if (row_[i] >= floor && row_[i] > 0.0f) found.push_back({row_[i], i});
        std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) {
            return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
        });
        return found;
    }

private:
    float* row_;
    int chunks_;
    std::vector<double> sums_;
    double total_ = 0.0;
};

// Few tokens hold nearly all the weight: look at those first, and at more only where they do not settle it.
inline int draw_from_top(const Weighted& weighted, int vocab, const FlDraw& how) {
    const size_t most = how.top_k > 0 ? std::min(how.top_k, vocab) : vocab;
    for (float floor = 1e-2f;; floor = floor > 1e-12f ? floor * 1e-2f : 0.0f) {
        std::vector<Candidate> found = weighted.above(floor);
        double mass = 0.0;
        for (const Candidate& candidate : found) mass += candidate.weight;
        const bool all = floor == 0.0f, enough = found.size() >= most;
        const bool covered = how.top_k <= 0 && mass >= how.top_p * weighted.total();
        if (!(all || enough || covered)) continue;
        if (found.empty()) return 0;  // only logits that are no numbers leave nothing
        if (enough) found.resize(most);
        double share = how.top_k <= 0 ? weighted.total() : 0.0;
        if (how.top_k > 0)
            for (const Candidate& candidate : found) share += candidate.weight;
        double kept = 0.0;
        size_t count = 0;
        while (count < found.size() && (count == 0 || kept < how.top_p * share)) kept += found[count++].weight;
        double left = how.uniform * kept;
        for (size_t i = 0; i < count; i++) {
            if (left < found[i].weight) return found[i].token;
            left -= found[i].weight;
        }
        return found[count - 1].token;
    }
}

inline int draw(float* row, int vocab, float peak, const FlDraw& how) {
    const Weighted weighted(row, vocab, peak, how);
    return how.top_k > 0 || how.top_p < 1.0f ? draw_from_top(weighted, vocab, how) : weighted.pick(how.uniform);
}

}  // namespace fanlight
