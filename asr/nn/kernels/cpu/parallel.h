// Work for several threads, and the memory that each keeps.
#pragma once
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

// Runs work(0) to work(count - 1). OpenMP's threads are those of torch's own operators, which
// spin for some milliseconds after each of them: threads beside them would share their cores.
// They do not survive a fork, though: a forked process makes new ones for each call.
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

// One object of each type per thread, kept from call to call with the memory of its vectors:
// fresh memory comes from the system page by page, zeroed.
template <class Memory> Memory& kept() {
  static thread_local Memory memory;
  return memory;
}
