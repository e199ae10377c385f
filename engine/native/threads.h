// A pool for many short parallel loops. Tasks are claimed one by one, and a loop ends when its tasks are done, not when
// all threads have arrived: a worker that the system has taken off its core holds up nothing but a task it had already
// claimed. Barriers that wait for every thread collapse when cores are shared.
//
// The caller claims from the front and workers from the back, so that from loop to loop the same thread tends to meet
// the same rows, still in its cache.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace fanlight {

// A number that threads can sleep on.
class Signal {
public:
    uint32_t now() const { return value_.load(std::memory_order_acquire); }

    void raise() {
        value_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst))
            syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void sleep_unless_changed(uint32_t seen) {
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

private:
    std::atomic<uint32_t> value_{0};
    std::atomic<uint32_t> sleepers_{0};
};

class Threads {
public:
    explicit Threads(int count) {
        for (int i = 1; i < count; i++) workers_.emplace_back([this] { work(); });
    }

    ~Threads() {
        stopping_ = true;
        signal_.raise();
        for (auto& worker : workers_) worker.join();
    }

    int count() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(i) for i in [0, tasks), on the caller and the workers; returns when all are done.
    template <class Body>
    void loop(int tasks, const Body& body) {
        if (tasks <= 1 || workers_.empty()) {
            for (int i = 0; i < tasks; i++) body(i);
            return;
        }
        generation_ = (generation_ + 1) & 0xffffff;
        Job& job = jobs_[generation_ & 1];
        job.body = &body;
        job.call = [](const void* body, int i) { (*static_cast<const Body*>(body))(i); };
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(pack(generation_, tasks), std::memory_order_release);
        signal_.raise();
        run_claims(true);
        for (int spins = 0; done_.load(std::memory_order_acquire) < tasks; spins++) {
            if (spins < SPINS) _mm_pause();
            else sched_yield();  // whoever holds the last task may be waiting for this core
        }
    }

    // Gets sleeping workers onto their cores ahead of the first loop.
    void wake() { signal_.raise(); }

private:
    struct Job {
        const void* body;
        void (*call)(const void*, int);
    };
    static constexpr int SPINS = 2000;
    static constexpr uint64_t FIELD = 0xfffff;

    // generation:24 | end:20 | begin:20 of the tasks not claimed. Whether a claim counts is decided by this word alone,
    // so a late worker cannot take a task of a loop it has not seen begin.
    static uint64_t pack(uint64_t generation, uint64_t tasks) { return generation << 40 | tasks << 20; }

    void run_claims(bool from_front) {
        for (;;) {
            uint64_t seen = ticket_.load(std::memory_order_acquire);
            const uint64_t begin = seen & FIELD, end = seen >> 20 & FIELD;
            if (begin >= end) return;
            const uint64_t left = from_front ? seen + 1 : seen - (uint64_t(1) << 20);
            if (!ticket_.compare_exchange_weak(seen, left, std::memory_order_acq_rel)) continue;
            const Job& job = jobs_[seen >> 40 & 1];
            job.call(job.body, static_cast<int>(from_front ? begin : end - 1));
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    void work() {
        uint32_t seen = signal_.now();
        while (!stopping_) {
            run_claims(false);
            uint32_t now = signal_.now();
            for (int spins = 0; now == seen && spins < SPINS; spins++) {
                _mm_pause();
                now = signal_.now();
            }
            if (now == seen) signal_.sleep_unless_changed(seen);
            seen = signal_.now();
        }
    }

    std::vector<std::thread> workers_;
    Signal signal_;
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> done_{0};
    Job jobs_[2];
    uint64_t generation_ = 0;
    std::atomic<bool> stopping_{false};
};

}  // namespace fanlight
