// What cluster.cu needs of a GPU, on a CPU: every thread of a cluster is a fiber of one scheduler.
// What a block sends to another arrives late and in random order.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define DEVICE inline
#define KERNEL static
#define CONSTANT extern "C" const
#define UNROLL

using std::min;
struct bf16 { unsigned short bits; };
struct float2 { float x, y; };
struct uint4 { unsigned x, y, z, w; };

struct Meeting {  // of all threads of a warp, block or cluster
  int size = 0, arrived = 0;
  long generation = 0;
};

struct Lane { unsigned a[4], b[2]; float x; };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  int rank, thread;
  bool done = false;
};

struct Delivery { char *to; char bytes[16]; int size; char *barrier; };

struct Cluster {
  int blocks, index;
  std::vector<std::vector<uint4>> memory;
  std::vector<Meeting> warp_meetings, block_meetings;
  std::vector<Lane> lanes;  // twice, for odd and even meetings
  Meeting all;
  std::vector<Fiber> fibers;
  std::vector<Delivery> deliveries;
  ucontext_t scheduler;
  long progress = 0;
};

static Cluster *cluster;
static Fiber *fiber;

inline int thread() { return fiber->thread; }
inline int warp() { return fiber->thread / 32; }
inline int lane() { return fiber->thread % 32; }
inline int cluster_index() { return cluster->index; }
inline int block_rank() { return fiber->rank; }
inline void *shared_memory() { return cluster->memory[fiber->rank].data(); }

inline void pause() { swapcontext(&fiber->context, &cluster->scheduler); }

inline long meet(Meeting &meeting) {
  long generation = meeting.generation;
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    meeting.generation++;
    cluster->progress++;
  } else
    while (meeting.generation == generation) pause();
  return generation;
}
inline int warp_number() { return fiber->rank * 8 + warp(); }
inline void sync_warp() { meet(cluster->warp_meetings[warp_number()]); }
inline void sync_block() { meet(cluster->block_meetings[fiber->rank]); }
inline void sync_cluster() { meet(cluster->all); }

// What all lanes of the warp have posted.
inline const Lane *exchange(const Lane &own) {
  Meeting &meeting = cluster->warp_meetings[warp_number()];
  Lane *all = &cluster->lanes[(warp_number() * 2 + meeting.generation % 2) * 32];
  all[lane()] = own;
  meet(meeting);
  return all;
}
inline float shuffle(float x, int from) { return exchange({{}, {}, x})[from].x; }
inline float shuffle_xor(float x, int mask) { return exchange({{}, {}, x})[lane() ^ mask].x; }

inline float exponential(float x) { return std::exp(x); }
inline float divide(float a, float b) { return a / b; }
inline float from_bits(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline float to_float(bf16 x) { return from_bits((unsigned)x.bits << 16); }
inline bf16 to_bf16(float x) {
  unsigned bits;
  memcpy(&bits, &x, 4);
  return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline unsigned pair_bits(bf16 low, bf16 high) { return low.bits | (unsigned)high.bits << 16; }

// The fragments of mma.m16n8k16, from the documentation of PTX.
inline void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Lane own = {{a[0], a[1], a[2], a[3]}, {b0, b1}, 0};
  const Lane *all = exchange(own);
  for (int part = 0; part < 4; part++) {
    int group = lane() / 4, high = part >> 1, column = 2 * (lane() % 4) + (part & 1);
    for (int k = 0; k < 16; k++) {
      unsigned left = all[group * 4 + k % 8 / 2].a[high + 2 * (k / 8)];
      unsigned right = all[column * 4 + k % 8 / 2].b[k / 8];
      float x = from_bits(k % 2 ? left & 0xffff0000 : left << 16);
      float y = from_bits(k % 2 ? right & 0xffff0000 : right << 16);
      sums[part] += x * y;
    }
  }
}

struct Barrier {
  int bytes;  // expected, less those arrived
  short pending, phase;

  void initialise() { bytes = 0, pending = 1, phase = 0; }
  void expect(unsigned count) { pending--, bytes += count, settle(); }
  void arrive(int count) { bytes -= count, settle(); }
  void settle() {
    if (pending < 0) std::fprintf(stderr, "expected twice in a phase\n"), std::abort();
    if (pending == 0 && bytes == 0) pending = 1, phase++, cluster->progress++;
  }
  void wait(int parity) {
    while ((phase & 1) == parity) pause();
  }
};

template <typename T> void send_bytes(T *to, int rank, T value, Barrier &barrier) {
  auto there = [&](void *own) {
    return (char *)own - (char *)shared_memory() + (char *)cluster->memory[rank].data();
  };
  Delivery delivery = {there(to), {}, sizeof(T), there(&barrier)};
  memcpy(delivery.bytes, &value, sizeof(T));
  cluster->deliveries.push_back(delivery);
}

static void (*kernel)();
static void start() {
  kernel();
  fiber->done = true;
  cluster->progress++;
  pause();
}

// Run all clusters, one after the other; 1 after a deadlock of its threads.
static int emulate(void (*run)(), int clusters, int blocks, int bytes) {
  kernel = run;
  std::mt19937 random(1);
  for (int index = 0; index < clusters; index++) {
    Cluster own;
    cluster = &own;
    own.blocks = blocks, own.index = index;
    own.memory.assign(blocks, std::vector<uint4>(bytes / 16 + 1, uint4{~0u, ~0u, ~0u, ~0u}));
    own.warp_meetings.assign(blocks * 8, Meeting{32});
    own.block_meetings.assign(blocks, Meeting{256});
    own.lanes.resize(blocks * 8 * 2 * 32);
    own.all.size = blocks * 256;
    own.fibers.resize(blocks * 256);
    for (int i = 0; i < blocks * 256; i++) {
      Fiber &f = own.fibers[i];
      f.rank = i / 256, f.thread = i % 256, f.stack.resize(1 << 16);
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = f.stack.size();
      makecontext(&f.context, start, 0);
    }
    for (bool alive = true; alive;) {
      alive = false;
      long before = own.progress;
      for (Fiber &f : own.fibers)
        if (!f.done) alive = true, fiber = &f, swapcontext(&own.scheduler, &f.context);
      bool idle = own.progress == before;
      std::shuffle(own.deliveries.begin(), own.deliveries.end(), random);
      for (size_t i = own.deliveries.size() / (idle ? 1 : 2); i--;) {
        Delivery &last = own.deliveries.back();
        memcpy(last.to, last.bytes, last.size);
        ((Barrier *)last.barrier)->arrive(last.size);
        own.deliveries.pop_back();
        own.progress++;
      }
      if (alive && own.progress == before) return 1;
    }
  }
  return 0;
}
