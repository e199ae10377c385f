// The C interface of the library. All pointers stay owned by the caller and must outlive the engine,
// except those of a step, which must live until fl_wait returns.
#pragma once

#include <cstdint>

extern "C" {

struct FlMatrix {
    const uint8_t* data;   // [n / 16][k / 4][16][4] bytes of weight + 128, or nibbles as four_bit.h has them
    const int16_t* sum;    // [n / 16][k / 64][16] sums over groups of 64 inputs
    const float* scale;    // [n]
    const uint16_t* four;  // [n / 16][k / 64][80] 4-bit weights: their parameters, in place of sum and scale; or null
    int32_t n, k;
};

struct FlLayer {
    FlMatrix qkv, out, gate_up, down;  // gate_up: panels of gate and up alternate
    const float* attn_norm;            // [hidden]
    const float* mlp_norm;             // [hidden]
    const float* qkv_bias;             // [qkv.n] or null
    const float* qk_norm;              // [heads + kv_heads][head_dim] or null
};

struct FlModel {
    int32_t hidden, intermediate, layers, heads, kv_heads, head_dim, vocab;
    int32_t num_blocks, block_size, max_tokens, threads;
    float rms_eps;
    const uint16_t* embedding;  // [vocab][hidden] bf16
    const float* norm;          // [hidden]
    const float* cos;           // [positions][head_dim / 2]
    const float* sin;
    const FlLayer* layer;
    FlMatrix head;
    uint16_t* cache;            // [layers][num_blocks][block_size / 16][kv_heads][2 * 16 * head_dim] bf16
};

// How to draw a row's token; temperature 0 takes the most likely one.
struct FlDraw {
    double uniform;  // in [0, 1)
    float temperature, top_p, min_p;
    int32_t top_k;   // 0: no limit
};

struct FlStep {
    int32_t chunks, samples;
    const int32_t* tokens;   // of all chunks, in order
    const int32_t* start;    // [chunks] position of the first token
    const int32_t* count;    // [chunks]
    const int32_t* table;    // [chunks] where the chunk's block table begins in `blocks`
    const int32_t* blocks;
    const int32_t* last;     // [samples] rows whose next token is wanted
    const FlDraw* draw;      // [samples]
    int32_t* token;          // [samples] out: the token drawn
    float* const* logits;    // [samples] out: [vocab] each, or null where only the token is wanted
    float* hidden;           // out: final-norm states [tokens][hidden], or null
    const uint32_t* const* masks;  // [samples] tokens allowed, bit t % 32 of word t / 32, or null where all are
    int32_t masked;          // 0 until the caller has filled the masks; tokens are chosen after that
};

enum FlPart { FL_LINEAR, FL_ATTENTION, FL_ROWS, FL_HEAD, FL_TOTAL, FL_PARTS };

struct FlEngine;

// Null where the system refuses memory, threads or the tile registers that the target needs.
FlEngine* fl_create(const FlModel* model);
void fl_destroy(FlEngine* engine);
void fl_start(FlEngine* engine, const FlStep* step);  // returns at once; one step at a time
void fl_wait(FlEngine* engine, double* ms);           // [FL_PARTS] milliseconds of the step
const char* fl_target(void);                          // instruction set compiled for

}
