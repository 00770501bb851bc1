#include "thread_pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace dlite {
namespace {

// Between two operators of a step lie tens of microseconds of Python. A helper that sleeps there
// is woken at a cost of the same size, so it polls, first eagerly, then giving its core to whoever
// wants it, and sleeps when the step is over.
constexpr int64_t kEagerNs = 20'000;
constexpr int64_t kPatientNs = 400'000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

int usable_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return 1;
}

int configured_threads() {
  const char* text = std::getenv("DLITE_CPU_THREADS");
  if (text == nullptr || *text == '\0') return usable_cores();
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 1 || value > 1024) {
    throw std::runtime_error("DLITE_CPU_THREADS = '" + std::string(text) +
                             "': must be an integer from 1 to 1024; unset it to use every core");
  }
  return static_cast<int>(value);
}

// One loop. It lives on the caller's stack; a helper may touch it only while it is counted in
// `users`, which the caller waits on.
struct Loop {
  void (*body)(void*, int64_t);
  void* context;
  int64_t chunks;
  std::atomic<int64_t> claimed{0};
  std::atomic<int64_t> back{0};
};

constexpr int64_t kPrefetchBytes = 1 << 20;  // half of a second-level cache, per helper

thread_local bool inside_loop = false;

class Team {
 public:
  explicit Team(int threads) {
    for (int i = 1; i < threads; ++i) std::thread([this, i] { help(i - 1); }).detach();
    size_ = threads;
  }

  int size() const { return size_; }

  void run(int64_t chunks, void (*body)(void*, int64_t), void* context) {
    Loop loop;
    loop.body = body;
    loop.context = context;
    loop.chunks = chunks;
    const bool alone = size_ == 1 || chunks <= 1 || inside_loop || !busy_.try_lock();
    if (!alone) {
      current_.store(&loop);
      generation_.fetch_add(1);
      if (sleeping_.load() > 0) {
        syscall(SYS_futex, &generation_, FUTEX_WAKE_PRIVATE, size_, nullptr, nullptr, 0);
      }
    }
    // The caller takes chunks from the front, helpers from the back: each of the two sees
    // neighbouring memory, and a helper can know which memory it will want next.
    const End end{alone ? nullptr : this};
    const Inside inside;
    for (int64_t chunk = 0; loop.claimed.fetch_add(1) < chunks; ++chunk) body(context, chunk);
  }

  void expect(const void* data, int64_t bytes) {
    expected_bytes_.store(bytes);
    expected_.store(static_cast<const char*>(data));
  }

 private:
  // Marks the thread as being in a loop: a loop inside another runs on one thread.
  struct Inside {
    const bool before = inside_loop;
    Inside() { inside_loop = true; }
    ~Inside() { inside_loop = before; }
  };

  // Ends a shared loop, also when a body throws: no helper may see it after the caller has left.
  struct End {
    Team* team;
    ~End() {
      if (team == nullptr) return;
      team->current_.store(nullptr);
      for (int spins = 0; team->users_.load() != 0; ++spins) {
        if (spins < 4096) _mm_pause();
        else sched_yield();
      }
      team->busy_.unlock();
    }
  };

  static void work(Loop& loop) {
    const Inside inside;
    while (loop.claimed.fetch_add(1) < loop.chunks) {
      loop.body(loop.context, loop.chunks - 1 - loop.back.fetch_add(1));
    }
  }

  void help(int index) {
    uint32_t seen = 0;
    for (;;) {
      wait_for_change(seen);
      seen = generation_.load();
      // Counting ourselves before looking makes the caller, who clears `current_` and then waits
      // for `users_` to be zero, safe to return once it reads zero.
      users_.fetch_add(1);
      if (Loop* loop = current_.load()) work(*loop);
      users_.fetch_sub(1);
      prefetch_expected(index, seen);
    }
  }

  // Until the next loop begins: the end of what it will read, a part for each helper.
  void prefetch_expected(int index, uint32_t seen) {
    const char* data = expected_.load();
    if (data == nullptr) return;
    const char* end = data + expected_bytes_.load() - index * kPrefetchBytes;
    const char* begin = end - data > kPrefetchBytes ? end - kPrefetchBytes : data;
    for (const char* p = end; p > begin; p -= 4096) {
      if (generation_.load(std::memory_order_relaxed) != seen) return;
      for (int64_t line = 64; line <= 4096 && p - line >= begin; line += 64)
        _mm_prefetch(p - line, _MM_HINT_T1);
    }
  }

  void wait_for_change(uint32_t seen) {
    const int64_t start = now_ns();
    for (;;) {
      for (int i = 0; i < 32; ++i) {
        if (generation_.load(std::memory_order_relaxed) != seen) return;
        _mm_pause();
      }
      const int64_t waited = now_ns() - start;
      if (waited > kPatientNs) break;
      if (waited > kEagerNs) sched_yield();
    }
    sleeping_.fetch_add(1);
    while (generation_.load() == seen) {
      syscall(SYS_futex, &generation_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    }
    sleeping_.fetch_sub(1);
  }

  int size_ = 1;
  std::mutex busy_;
  std::atomic<Loop*> current_{nullptr};
  std::atomic<uint32_t> generation_{0};
  std::atomic<int> users_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<const char*> expected_{nullptr};
  std::atomic<int64_t> expected_bytes_{0};
};

Team& team() {
  // Never destroyed: detached helpers may still poll it while the process exits.
  static Team* instance = new Team(configured_threads());
  return *instance;
}

struct Scratch {
  void* data = nullptr;
  int64_t bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

int num_threads() { return team().size(); }

void parallel_chunks(int64_t chunks, void (*body)(void*, int64_t), void* context) {
  if (chunks > 0) team().run(chunks, body, context);
}

void expect_next(const void* data, int64_t bytes) { team().expect(data, bytes); }

void* thread_scratch(int slot, int64_t bytes) {
  thread_local Scratch slots[4];
  Scratch& scratch = slots[slot];
  if (scratch.bytes < bytes) {
    std::free(scratch.data);
    scratch.data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    scratch.bytes = scratch.data == nullptr ? 0 : bytes;
    if (scratch.data == nullptr) throw std::bad_alloc();
  }
  return scratch.data;
}

}  // namespace dlite
