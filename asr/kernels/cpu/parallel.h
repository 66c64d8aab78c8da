// Parallel loops, and memory that each thread keeps between calls.
#pragma once
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

// Runs work(0) to work(count - 1). OpenMP shares its threads with torch's operators; they spin for
// some milliseconds after each operator, so other threads would compete for their cores. OpenMP's
// threads do not survive a fork: a forked process starts new threads in each call.
template <class Work>
void in_parallel(int64_t count, int64_t threads, bool forked, Work work) {
  threads = std::min(count, threads);
#if defined(_OPENMP)
  if (!forked) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < count; k++) work(k);
    return;
  }
#endif
  auto run = [&](int64_t first) {
    for (int64_t k = first; k < count; k += threads) work(k);
  };
  std::vector<std::thread> others;
  for (int64_t k = 1; k < threads; k++) others.emplace_back(run, k);
  run(0);
  for (std::thread& other : others) other.join();
}

// One object of each type per thread. It keeps the memory of its vectors between calls, because the
// system zeroes fresh memory page by page.
template <class Memory> Memory& kept() {
  static thread_local Memory memory;
  return memory;
}
