// A team of threads for loops of 10 us to 10 ms, inside a process that shares its cores.
//
// OpenMP's static schedule waits for every thread of the team at the end of every loop, so one
// descheduled thread (a tokenizer took its core) stalls the whole step. Here the caller works too,
// chunks are taken from a counter, and only helpers that have joined the loop are waited for: a
// missing helper costs its share of the work, not a time slice.
//
// A body must not throw on a helper (that ends the process); threads do not survive a fork.
#pragma once

#include <cstdint>
#include <memory>

namespace dlite {

// Threads of the team, the caller included: DLITE_CPU_THREADS, or the cores this process may use.
int num_threads();

// Calls body(context, chunk) once for every chunk in [0, chunks), on the team; returns when all
// are done. A call from a second thread while the team is busy runs its chunks by itself.
void parallel_chunks(int64_t chunks, void (*body)(void* context, int64_t chunk), void* context);

template <typename Body>
void parallel_for(int64_t chunks, const Body& body) {
  parallel_chunks(
      chunks, [](void* context, int64_t chunk) { (*static_cast<const Body*>(context))(chunk); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Names memory that the loop after the coming one will read; null where that is not known. Helpers
// that wait for it fetch its end into their caches: between two operators the memory is idle.
void expect_next(const void* data, int64_t bytes);

// Memory of the calling thread, 64-byte aligned, kept and grown from call to call; slot 0..3 are
// separate buffers. The content does not survive the next request for the same slot.
void* thread_scratch(int slot, int64_t bytes);

}  // namespace dlite
