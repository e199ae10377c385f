// One fused forward pass of a Llama-family decoder over a mixed batch of chunks.
#include <chrono>
#include <cstdlib>
#include <exception>
#include <memory>
#include <vector>

#include "abi.h"
#include "attention.h"
#include "draw.h"
#include "product.h"
#include "threads.h"

namespace fanlight {
namespace {

template <class T>
class Buffer {
public:
    explicit Buffer(size_t count) {
        size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
        data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes ? bytes : 64)));
        std::memset(data_.get(), 0, bytes);
    }
    T* get() const { return data_.get(); }

private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> data_;
};

// Quantised activations of up to `rows` rows of `k` inputs.
struct RowBuffer {
    Buffer<int8_t> q;
    Buffer<float> scale, centre, scaled;
    Buffer<int32_t> sum;
    RowBuffer(int rows, int k)
        : q(size_t(rows) * k), scale(size_t(rows) * k / GROUP), centre(size_t(rows) * k / GROUP),
          scaled(size_t(rows) * k / HALF), sum(size_t(rows) * k / HALF) {}
    Rows as(int k) const { return {q.get(), scale.get(), centre.get(), sum.get(), scaled.get(), k}; }
};

Weights weights(const FlMatrix& m) { return {m.data, m.sum, m.scale, m.four, m.n, m.k}; }

class Clock {
public:
    Clock() : last_(now()) {}
    double lap() {
        auto at = now();
        double ms = std::chrono::duration<double, std::milli>(at - last_).count();
        last_ = at;
        return ms;
    }

private:
    static std::chrono::steady_clock::time_point now() { return std::chrono::steady_clock::now(); }
    std::chrono::steady_clock::time_point last_;
};

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    f32x16 squares{};
    for (int i = 0; i < n; i += 16) squares = fma16(load16(x + i), load16(x + i), squares);
    float scale = 1.0f / std::sqrt(sum_lanes(squares) / n + eps);
    for (int i = 0; i < n; i += 16) store16(out + i, load16(x + i) * scale * load16(weight + i));
}

struct Row {
    int token, position, chunk;
};

// Work of the attention phase: rows [first, first + count) of one chunk.
struct Piece {
    int first, count;
};

}  // namespace

class Engine {
public:
    explicit Engine(const FlModel& model)
        : m_(model), layers_(model.layer, model.layer + model.layers), threads_(model.threads),
          group_(model.heads / model.kv_heads), qkv_n_((model.heads + 2 * model.kv_heads) * model.head_dim),
          x_(size_t(model.max_tokens) * model.hidden), qkv_(size_t(model.max_tokens) * qkv_n_),
          query_(size_t(model.max_tokens) * model.heads * model.head_dim),
          narrow_(model.max_tokens, model.hidden), attended_(model.max_tokens, model.heads * model.head_dim),
          wide_(model.max_tokens, model.intermediate), zeros_(cache_tile_size(model.head_dim)) {}

    void run(const FlStep& step) {
        Clock whole, clock;
        std::fill(ms, ms + FL_PARTS, 0.0);
        threads_.wake();
        plan(step);
        embed();
        ms[FL_ROWS] += clock.lap();
        for (int i = 0; i < m_.layers; i++) run_layer(i, step, clock);
        run_head(step, clock);
        ms[FL_TOTAL] = whole.lap();
    }

    double ms[FL_PARTS];

private:
    void run_layer(int index, const FlStep& step, Clock& clock) {
        const FlLayer& layer = layers_[index];
        normalise(layer.attn_norm);
        ms[FL_ROWS] += clock.lap();
        multiply_store(weights(layer.qkv), narrow_.as(m_.hidden), layer.qkv_bias);
        ms[FL_LINEAR] += clock.lap();
        place(index, step, layer.qk_norm);
        ms[FL_ROWS] += clock.lap();
        attend(index, step);
        ms[FL_ATTENTION] += clock.lap();
        multiply_add(weights(layer.out), attended_.as(m_.heads * m_.head_dim));
        ms[FL_LINEAR] += clock.lap();
        normalise(layer.mlp_norm);
        ms[FL_ROWS] += clock.lap();
        gate(weights(layer.gate_up));
        multiply_add(weights(layer.down), wide_.as(m_.intermediate));
        ms[FL_LINEAR] += clock.lap();
    }

    void plan(const FlStep& step) {
        rows_.clear();
        pieces_.clear();
        const int most = std::max(1, 48 / group_);
        int at = 0;
        for (int c = 0; c < step.chunks; c++) {
            const int rows = step.count[c];
            for (int i = 0; i < rows; i++) rows_.push_back({step.tokens[at + i], step.start[c] + i, c});
            for (int i = 0; i < rows; i += most) pieces_.push_back({at + i, std::min(most, rows - i)});
            at += rows;
        }
    }

    int count() const { return static_cast<int>(rows_.size()); }

    // Cuts rows into pieces worth a task; few rows are not worth waking anyone.
    template <class Body>
    void each_row(const Body& body) {
        const int piece = 8, rows = count();
        threads_.loop((rows + piece - 1) / piece, [&](int i) {
            for (int row = i * piece; row < std::min(rows, (i + 1) * piece); row++) body(row);
        });
    }

    void embed() {
        each_row([&](int row) {
            const bf16* from = m_.embedding + size_t(rows_[row].token) * m_.hidden;
            float* to = x_.get() + size_t(row) * m_.hidden;
            for (int i = 0; i < m_.hidden; i++) to[i] = widen(from[i]);
        });
    }

    void normalise(const float* weight) {
        const Rows out = narrow_.as(m_.hidden);
        each_row([&](int row) {
            alignas(64) float normed[MAX_HIDDEN];
            rms_norm(x_.get() + size_t(row) * m_.hidden, weight, m_.rms_eps, m_.hidden, normed);
            quantise_row(normed, out.from(row));
        });
    }

    // Cuts a product into tasks of `panels` neighbouring panels times at most ROWS rows.
    template <class Body>
    void each_tile(int all_panels, int panels, int rows, const Body& body) {
        const int across = (all_panels + panels - 1) / panels, down = (rows + ROWS - 1) / ROWS;
        threads_.loop(across * down, [&](int i) {
            const int first = i % across * panels, row = i / across * ROWS;
            body(first, std::min(panels, all_panels - first), row, std::min(ROWS, rows - row));
        });
    }

    // With few rows weights are streamed: two long runs of panels a thread. With many, small tasks share the work
    // evenly.
    int task_panels(int all) const {
        if (count() > 16) return 4;
        const int runs = 2 * threads_.count();
        return ((all + runs - 1) / runs + 1) / 2 * 2;
    }

    // use(row, panel, value) for X Wt.
    template <class Use>
    void product(const Weights& w, const Rows& x, const Use& use) {
        each_tile(w.n / PANEL, task_panels(w.n / PANEL), count(), [&](int first, int panels, int row, int rows) {
            multiply(w, first, first + panels, x.from(row), rows, [&](int r, int p, f32x16 v) { use(row + r, p, v); });
        });
    }

    void multiply_store(const Weights& w, const Rows& x, const float* bias) {
        float* out = qkv_.get();
        product(w, x, [&](int row, int p, f32x16 v) {
            store16(out + size_t(row) * w.n + p * PANEL, bias ? v + load16(bias + p * PANEL) : v);
        });
    }

    void multiply_add(const Weights& w, const Rows& x) {
        product(w, x, [&](int row, int p, f32x16 v) {
            float* at = x_.get() + size_t(row) * m_.hidden + p * PANEL;
            store16(at, load16(at) + v);
        });
    }

    // silu(gate) * up for 64 channels at a time, which is one group of the next product's input.
    void gate(const Weights& w) {
        const Rows in = narrow_.as(m_.hidden), out = wide_.as(m_.intermediate);
        each_tile(w.n / PANEL / 8, 1, count(), [&](int group, int, int row, int rows) {
            f32x16 gated[ROWS][4];
            for (int i = 0; i < 4; i++) {
                const int at = group * 8 + i * 2;
                multiply_pair(w, at, group * 8 + 8, in.from(row), rows, [&](int r, int p, f32x16 v) {
                    gated[r][i] = p == at ? silu16(v) : gated[r][i] * v;
                });
            }
            for (int r = 0; r < rows; r++) quantise_group(gated[r], out.from(row + r), group);
        });
    }

    // Rotates queries and keys, and writes keys and values into the cache.
    void place(int layer, const FlStep& step, const float* qk_norm) {
        const int d = m_.head_dim;
        const float scale = LOG2E / std::sqrt(static_cast<float>(d));
        each_row([&](int r) {
            const Row& row = rows_[r];
            float* heads = qkv_.get() + size_t(r) * qkv_n_;
            for (int h = 0; h < m_.heads + m_.kv_heads; h++) {
                if (qk_norm) rms_norm(heads + h * d, qk_norm + h * d, m_.rms_eps, d, heads + h * d);
                rotate(heads + h * d, row.position);
            }
            bf16* query = query_.get() + size_t(r) * m_.heads * d;
            for (int i = 0; i < m_.heads * d; i += 16) store_bf16(query + i, load16(heads + i) * scale);
            const float* keys = heads + m_.heads * d;
            const float* values = keys + m_.kv_heads * d;
            for (int h = 0; h < m_.kv_heads; h++) {
                bf16* tile = tile_of(layer, step, row.chunk, row.position / TILE, h);
                store_token(tile, row.position % TILE, d, keys + h * d, values + h * d);
            }
        });
    }

    void rotate(float* head, int position) const {
        const int half = m_.head_dim / 2;
        const float* cos = m_.cos + size_t(position) * half;
        const float* sin = m_.sin + size_t(position) * half;
        for (int i = 0; i < half; i += 16) {
            f32x16 a = load16(head + i), b = load16(head + half + i), c = load16(cos + i), s = load16(sin + i);
            store16(head + i, a * c - b * s);
            store16(head + half + i, b * c + a * s);
        }
    }

    bf16* tile_of(int layer, const FlStep& step, int chunk, int tile, int kv_head) const {
        const int per_block = m_.block_size / TILE;
        const size_t block = size_t(layer) * m_.num_blocks + step.blocks[step.table[chunk] + tile / per_block];
        const size_t at = (block * per_block + tile % per_block) * m_.kv_heads + kv_head;
        return m_.cache + at * cache_tile_size(m_.head_dim);
    }

    void attend(int layer, const FlStep& step) {
        if (m_.head_dim == 64) attend_in<64>(layer, step);
        else attend_in<128>(layer, step);
    }

    // A task is a piece with all its KV heads, or with one where there are few pieces.
    template <int D>
    void attend_in(int layer, const FlStep& step) {
        const int pieces = static_cast<int>(pieces_.size());
        const int heads = pieces >= 4 * threads_.count() ? m_.kv_heads : 1, per_piece = m_.kv_heads / heads;
        threads_.loop(pieces * per_piece, [&](int i) {
            const Piece& piece = pieces_[i / per_piece];
            const int first = i % per_piece;
            for (int h = first; h < first + heads; h++) attend_piece<D>(layer, step, piece, h, h + 1 < first + heads);
        });
    }

    template <int D>
    void attend_piece(int layer, const FlStep& step, const Piece& piece, int kv_head, bool more) {
        const Rows out = attended_.as(m_.heads * D);
        const int head = kv_head * group_, chunk = rows_[piece.first].chunk, queries = piece.count * group_;
        QueryRow rows[MAX_QUERIES];
        alignas(64) float result[MAX_QUERIES * D];
        for (int q = 0; q < queries; q++) {
            const int row = piece.first + q / group_;
            const bf16* query = query_.get() + (size_t(row) * m_.heads + head + q % group_) * D;
            rows[q].query = reinterpret_cast<const uint32_t*>(query);
            rows[q].position = rows_[row].position;
            rows[q].out = result + q * D;
        }
        const int last = rows[queries - 1].position;
        Span then;
        for (int t = 0; more && t < SPAN && t <= last / TILE; t++)
            then.tile[t] = tile_of(layer, step, chunk, t, kv_head + 1);
        auto tile_at = [&](int tile) { return tile_of(layer, step, chunk, tile, kv_head); };
        Attention<D>::run(rows, queries, last, tile_at, zeros_.get(), then);
        for (int q = 0; q < queries; q++) {
            const Rows to = out.from(piece.first + q / group_);
            const int first = (head + q % group_) * (D / GROUP);
            for (int g = 0; g < D / GROUP; g++) quantise_head(rows[q].out + g * GROUP, to, first + g);
        }
    }

    static void quantise_head(const float* from, const Rows& to, int group) {
        f32x16 v[4];
        for (int i = 0; i < 4; i++) v[i] = load16(from + i * 16);
        quantise_group(v, to, group);
    }

    void run_head(const FlStep& step, Clock& clock) {
        if (step.hidden)
            each_row([&](int row) {
                const size_t at = size_t(row) * m_.hidden;
                rms_norm(x_.get() + at, m_.norm, m_.rms_eps, m_.hidden, step.hidden + at);
            });
        const Rows in = narrow_.as(m_.hidden);
        for (int s = 0; s < step.samples; s++) {
            alignas(64) float normed[MAX_HIDDEN];
            rms_norm(x_.get() + size_t(step.last[s]) * m_.hidden, m_.norm, m_.rms_eps, m_.hidden, normed);
            quantise_row(normed, in.from(s));
        }
        ms[FL_ROWS] += clock.lap();
        if (step.samples) {
            await_masks(step);
            choose(step, in);
        }
        ms[FL_HEAD] += clock.lap();
    }

    // The caller fills masks while the layers run, so there is seldom anything to wait for.
    static void await_masks(const FlStep& step) {
        for (int spins = 0; !__atomic_load_n(&step.masked, __ATOMIC_ACQUIRE); spins++) {
            if (spins < 2000) _mm_pause();
            else if (spins < 4000) sched_yield();
            else usleep(50);  // after a fault of the caller they come with its next step
        }
    }

    // Logits of the sampling rows. Each task keeps the best of its channels, so that of greedy rows none are stored.
    void choose(const FlStep& step, const Rows& in) {
        const Weights w = weights(m_.head);
        const int all = w.n / PANEL, tasks = (all + HEAD_PANELS - 1) / HEAD_PANELS;
        best_.assign(size_t(tasks) * step.samples, {-INFINITY, 0});
        give_rows(step);
        threads_.loop(tasks, [&](int task) {
            const int first = task * HEAD_PANELS;
            std::vector<BestLanes> best(step.samples);
            multiply(w, first, std::min(all, first + HEAD_PANELS), in, step.samples,
                     [&](int s, int p, f32x16 v) { keep_best(step, s, p * PANEL, v, best[s]); });
            for (int s = 0; s < step.samples; s++) best_[size_t(task) * step.samples + s] = best[s].winner();
        });
        threads_.loop(step.samples, [&](int s) {
            Best top{-INFINITY, 0};
            for (int task = 0; task < tasks; task++) {
                const Best& best = best_[size_t(task) * step.samples + s];
                if (best.value > top.value) top = best;
            }
            // Without a best there are no numbers to draw from: the token must only stay inside the vocabulary.
            const bool drawn = step.draw[s].temperature > 0.0f && !step.logits[s] && top.value > -INFINITY;
            step.token[s] = !drawn ? top.token : draw(logits_[s], m_.vocab, top.value, step.draw[s]);
        });
    }

    // Where each sampling row's logits go: to the caller, to scratch for a draw, or nowhere.
    void give_rows(const FlStep& step) {
        const size_t size = (m_.vocab + Weighted::CHUNK - 1) / Weighted::CHUNK * Weighted::CHUNK;
        logits_.assign(step.samples, nullptr);
        while (scratch_.size() < size_t(step.samples)) scratch_.emplace_back(nullptr);
        for (int s = 0; s < step.samples; s++) {
            logits_[s] = step.logits[s];
            if (step.logits[s] || step.draw[s].temperature <= 0.0f) continue;
            if (!scratch_[s]) scratch_[s] = std::make_unique<Buffer<float>>(size);
            logits_[s] = scratch_[s]->get();
        }
    }

    struct Best {
        float value;
        int token;
    };

    // The best of every lane so far; of equal logits the lowest token wins.
    struct BestLanes {
        f32x16 value = splat(-INFINITY);
        i32x16 token{};
        Best winner() const {
            Best top{-INFINITY, 0};
            for (int i = 0; i < 16; i++)
                if (value[i] > top.value || (value[i] == top.value && token[i] < top.token)) top = {value[i], token[i]};
            return top;
        }
    };

    void keep_best(const FlStep& step, int s, int channel, f32x16 v, BestLanes& best) const {
        static const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        static const i32x16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        const i32x16 token = lane + channel;
        if (const uint32_t* mask = step.masks[s]) {
            const int32_t allowed = mask[channel / 32] >> (channel % 32) & 0xffff;
            v = (splat_i(allowed) & bit) != 0 ? v : splat(-INFINITY);
        }
        if (float* to = logits_[s]) {
            const int room = m_.vocab - channel;
            if (room >= 16) store16(to + channel, v);
            else
                for (int i = 0; i < room; i++) to[channel + i] = v[i];
        }
        auto better = (v > best.value) & (token < splat_i(m_.vocab));
        best.value = better ? v : best.value;
        best.token = better ? token : best.token;
    }

    static constexpr int ROWS = 64;          // rows of a product's task
    static constexpr int HEAD_PANELS = 32;
    static constexpr int MAX_HIDDEN = 8192;
    static constexpr int MAX_QUERIES = 64;

    FlModel m_;
    std::vector<FlLayer> layers_;
    Threads threads_;
    int group_, qkv_n_;
    Buffer<float> x_, qkv_;
    Buffer<bf16> query_;
    RowBuffer narrow_, attended_, wide_;
    Buffer<bf16> zeros_;
    std::vector<Row> rows_;
    std::vector<Piece> pieces_;
    std::vector<Best> best_;
    std::vector<float*> logits_;
    std::vector<std::unique_ptr<Buffer<float>>> scratch_;
};

}  // namespace fanlight

// Runs steps on a thread of its own, so that the caller can prepare masks and deliver tokens meanwhile.
struct FlEngine {
    explicit FlEngine(const FlModel& model) : engine(model), thread([this] { serve(); }) {}

    ~FlEngine() {
        step.store(nullptr);
        stopping = true;
        posted.raise();
        thread.join();
    }

    void start(const FlStep* next) {
        busy.store(true, std::memory_order_release);
        step.store(next, std::memory_order_release);
        posted.raise();
    }

    void wait() {
        for (uint32_t seen = finished.now(); busy.load(std::memory_order_acquire); seen = finished.now())
            if (busy.load(std::memory_order_acquire)) finished.sleep_unless_changed(seen);
    }

    fanlight::Engine engine;

private:
    void serve() {
        for (uint32_t seen = posted.now(); !stopping; seen = posted.now()) {
            if (const FlStep* next = step.exchange(nullptr)) {
                engine.run(*next);
                busy.store(false, std::memory_order_release);
                finished.raise();
            } else {
                posted.sleep_unless_changed(seen);
            }
        }
    }

    std::atomic<const FlStep*> step{nullptr};
    std::atomic<bool> busy{false}, stopping{false};
    fanlight::Signal posted, finished;
    std::thread thread;
};

extern "C" {

FlEngine* fl_create(const FlModel* model) {
#ifdef __AMX_INT8__
    if (!fanlight::amx_permitted()) return nullptr;
#endif
    try {
        return new FlEngine(*model);
    } catch (const std::exception&) {  // no memory, or no more threads
        return nullptr;
    }
}
void fl_destroy(FlEngine* engine) { delete engine; }
void fl_start(FlEngine* engine, const FlStep* step) { engine->start(step); }

void fl_wait(FlEngine* engine, double* ms) {
    engine->wait();
    std::copy(engine->engine.ms, engine->engine.ms + FL_PARTS, ms);
}

const char* fl_target(void) {
#if defined(__AMX_INT8__)
    return "amx-int8";
#elif defined(__AVX512BF16__)
    return "avx512-vnni-bf16";
#elif defined(__AVX512VNNI__)
    return "avx512-vnni";
#elif defined(__AVXVNNI__)
    return "avx-vnni";
#else
    return "avx2";
#endif
}

}
