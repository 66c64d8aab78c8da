// All steps of a LayerNorm-LSTM's recurrence in one kernel, forward and backward.
//
// A cluster of BLOCKS thread blocks computes all H units for ROWS utterances in one direction; each
// block keeps the weights of its 32 units in registers for the whole sequence. What a block needs
// of the others, it receives in its shared memory: h of all units (forward), the partial products
// with W_h^T (backward), and the sums of every norm. A sender writes with st.async, which also counts
// the bytes in a barrier of the receiver: one trip per exchange, and no barrier of the cluster.
// Formulas: reference.py; backward of a norm: python.py.
//
// Threads: 8 warps. In a product, warp w computes 16 rows of the result; elsewhere lane = unit of the
// block, and warp w has the utterances w, w + 8, ... of the cluster. Products are bf16 with fp32 sums,
// all else is fp32.
//
// Macros fix the layer: H; NT = ROWS / 8; MODE as in triton_step.py; RMS; NORM_C, SHOW, CARRY;
// HIDDEN; DROP; EPS. Tensors: S steps, D directions, B utterances, contiguous.
//
// device.h, or on a CPU an emulation of it, comes before this text.

constexpr int UNITS = 32, WARPS = 8, ROWS = 8 * NT, BLOCKS = (H + UNITS - 1) / UNITS, LOCAL = 4 * UNITS;
constexpr int PADDED = BLOCKS * UNITS;                      // of H
constexpr int H_PITCH = (PADDED + 63) / 64 * 64 + 8;      // bf16; conflict-free fragments
constexpr int Z_PITCH = LOCAL + 4;                        // floats
constexpr int D_PITCH = LOCAL + 8;                        // bf16
constexpr int T_PITCH = 16 + 4;                           // floats
constexpr int TILES = PADDED / 16, TILES_PER_WARP = (TILES + WARPS - 1) / WARPS;
constexpr int GATE_PARTS = MODE == 2 ? 4 : 1, PER_UNIT = MODE == 2 ? 1 : 4;
constexpr int STATS = (MODE ? GATE_PARTS : 0) + NORM_C + HIDDEN;  // norms of a row and step
constexpr int C_STAT = MODE ? GATE_PARTS : 0, H_STAT = C_STAT + NORM_C;

struct Arguments {
  const float *gates;       // (S, D, B, 4H)
  const bf16 *weight;       // (D, 4H, H)
  const float *h, *c;       // (D, B, H)
  const float *mask;        // (D, B, H), unread without DROP
  const long long *lengths; // (B)
  const float *gain_h, *bias;                             // (D, 4H)
  const float *gain_c, *bias_c, *gain_hidden, *bias_hidden;  // (D, H)
  float *hs, *cs;           // (S + 1, D, B, H)
  bf16 *ah;                 // (S, D, B, 4H)
  float *raw;               // (S, D, B, H), c before its norm, only with CARRY
  float2 *stats;            // (S, D, B, STATS), mean and scale of every norm
  // Backward only:
  const float *dhs;         // (S, D, B, H)
  float *dh, *dc;           // (D, B, H): the gradients of the last state, replaced by the first's
  float *dz;                // (S, D, B, 4H), with MODE 0 and 1
  bf16 *dah;                // (S, D, B, 4H)
  float *dgates;            // (groups, 2, D, 4H): gain_h, bias
  float *dstates;           // (groups, 4, D, H): gain_c, bias_c, gain_hidden, bias_hidden
  int S, D, B;
};

// Sums over the units of a block, and of all blocks -------------------------------------------------

DEVICE float2 warp_sum(float a, float b) {
  UNROLL
  for (int m = 16; m; m >>= 1) {
    float x = shuffle_xor(a, m), y = shuffle_xor(b, m);
    a += x;
    b += y;
  }
  return {a, b};
}

DEVICE int units_of(int block) { return block < BLOCKS ? min(UNITS, H - block * UNITS) : 0; }

// One value pair per block for every row and part.
template <int PARTS> struct Exchange {
  float2 slots[ROWS][PARTS][BLOCKS];
  Barrier barriers[ROWS];

  DEVICE void initialise() {
    if (thread() < ROWS) barriers[thread()].initialise();
  }
  DEVICE void expect(int row) {
    if (lane() == 0) barriers[row].expect(PARTS * BLOCKS * sizeof(float2));
  }
  DEVICE void send(int row, int part, float2 value) {
    if (lane() < BLOCKS) send_bytes(&slots[row][part][block_rank()], lane(), value, barriers[row]);
  }
  // The pair of block `lane`, zeros where there is no such block. Call wait first.
  DEVICE float2 of_lane(int row, int part) {
    return lane() < BLOCKS ? slots[row][part][lane()] : float2{0, 0};
  }
  DEVICE void wait(int row, int parity) { barriers[row].wait(parity); }
};

// Mean and sum of squares about it of N values in each of this block's units; in RMSNorm 0 and the
// sum of squares. Shifted by one of the values: exact zeros where all values are equal.
template <int N> DEVICE float2 block_stats(const float (&x)[N], bool valid) {
  float first = RMS ? 0.0f : shuffle(x[0], 0), a = 0, b = 0;
  if (valid)
    UNROLL
    for (int i = 0; i < N; i++) {
      float d = x[i] - first;
      a += d;
      b += d * d;
    }
  float2 sums = warp_sum(a, b);
  if (RMS) return {0, sums.y};
  float n = N * units_of(block_rank());
  return {first + sums.x / n, fmaxf(sums.y - sums.x * sums.x / n, 0.0f)};
}

// block_stats of all blocks, that of block `lane` in each lane -> mean and scale of the row.
DEVICE float2 row_stats(float2 own, int per_unit) {
  float reference = shuffle(own.x, 0), n = per_unit * units_of(lane()), d = own.x - reference;
  float2 sums = lane() < BLOCKS ? float2{n * d, own.y + n * d * d} : float2{0, 0};
  sums = warp_sum(sums.x, sums.y);
  float all = per_unit * H, variance = fmaxf(sums.y - sums.x * sums.x / all, 0.0f) / all;
  return {reference + sums.x / all, sums.y == 0 ? 0.0f : 1 / sqrtf(variance + EPS)};
}

DEVICE float sigmoid(float x) { return divide(1, 1 + exponential(-x)); }

DEVICE float tangent(float x) {
  float shrunk = exponential(-2 * fabsf(x)), size = divide(1 - shrunk, 1 + shrunk);
  return x < 0 ? -size : size;
}

// What a thread computes for: one unit in one direction, the rows warp + 8 r of the cluster.
struct Place {
  int group, d, unit, first;
  bool valid;

  DEVICE explicit Place(const Arguments &a)
      : group(cluster_index() / a.D), d(cluster_index() % a.D), unit(block_rank() * UNITS + lane()),
        first(group * ROWS + warp()), valid(unit < H) {}
  DEVICE int utterance(int r) const { return first + 8 * r; }
  DEVICE long long row(const Arguments &a, int s, int r) const {
    return ((long long)s * a.D + d) * a.B + utterance(r);
  }
};

struct Vectors {  // gains and biases of the thread's unit
  float gain_h[4], bias[4], gain_c, bias_c, gain_hidden, bias_hidden;

  DEVICE Vectors(const Arguments &a, const Place &at) {
    UNROLL
    for (int g = 0; g < 4; g++) {
      int column = (at.d * 4 + g) * H + at.unit;
      gain_h[g] = MODE && at.valid ? a.gain_h[column] : 0;
      bias[g] = MODE > 1 && at.valid ? a.bias[column] : 0;
    }
    int column = at.d * H + at.unit;
    gain_c = NORM_C && at.valid ? a.gain_c[column] : 0;
    bias_c = NORM_C && at.valid ? a.bias_c[column] : 0;
    gain_hidden = HIDDEN && at.valid ? a.gain_hidden[column] : 0;
    bias_hidden = HIDDEN && at.valid ? a.bias_hidden[column] : 0;
  }
};

DEVICE void load_gates(float (&to)[4], const float *row, const Place &at, bool real) {
  UNROLL
  for (int g = 0; g < 4; g++) to[g] = real && at.valid ? row[g * H + at.unit] : 0;
}

// Forward -------------------------------------------------------------------------------------------

struct ForwardShared {
  alignas(16) bf16 h[2][ROWS * H_PITCH];  // of all units, after odd and even steps
  alignas(16) float z[ROWS * Z_PITCH];  // this block's 128 products of each row
  alignas(16) bf16 stage[ROWS][UNITS];
  Exchange<GATE_PARTS> gates;
  Exchange<1> c, hidden;
  Barrier arrived[2];
};

KERNEL void lstm_forward(Arguments a) {
  ForwardShared &shared = *(ForwardShared *)shared_memory();
  const Place at(a);
  const Vectors vectors(a, at);
  const int rank = block_rank();

  // Rows 16 warp .. + 15 of this block's weights, gate by gate, as fragments of the products.
  unsigned weight[TILES][4];
  UNROLL
  for (int k = 0; k < TILES; k++)
    UNROLL
    for (int part = 0; part < 4; part++) {
      int local = 16 * warp() + lane() / 4 + 8 * (part & 1), unit = rank * UNITS + local % UNITS;
      int column = 16 * k + 2 * (lane() % 4) + 8 * (part >> 1);
      const bf16 *row = a.weight + ((long long)(at.d * 4 + local / UNITS) * H + unit) * H;
      weight[k][part] = pair_bits(unit < H && column < H ? row[column] : to_bf16(0),
                                  unit < H && column + 1 < H ? row[column + 1] : to_bf16(0));
    }

  float h[NT], c[NT], mask[NT];
  int length[NT];
  bool real[NT];
  UNROLL
  for (int r = 0; r < NT; r++) {
    int b = at.utterance(r);
    real[r] = b < a.B;
    length[r] = real[r] ? (int)a.lengths[b] : 0;
    long long cell = at.row(a, 0, r) * H + at.unit;
    bool here = real[r] && at.valid;
    h[r] = here ? a.h[cell] : 0;
    c[r] = here ? a.c[cell] : 0;
    mask[r] = DROP && here ? a.mask[cell] : 1;
    if (here) {
      a.hs[cell] = h[r];
      a.cs[cell] = c[r];
    }
    // The first product reads the initial h of all units.
    for (int k = lane(); k < H_PITCH; k += 32)
      shared.h[1][(warp() + 8 * r) * H_PITCH + k] =
          to_bf16(real[r] && k < H ? a.h[at.row(a, 0, r) * H + k] : 0);
  }
  for (int k = thread(); k < ROWS * H_PITCH; k += 256) shared.h[0][k] = to_bf16(0);
  if (thread() < 2) shared.arrived[thread()].initialise();
  shared.gates.initialise();
  shared.c.initialise();
  shared.hidden.initialise();
  sync_cluster();

  for (int s = 0; s < a.S; s++) {
    const int parity = s & 1;
    const bool last = s + 1 == a.S;
    if (thread() == 0 && !last) shared.arrived[parity].expect(BLOCKS * ROWS * UNITS * sizeof(bf16));
    float gates[NT][4];
    UNROLL
    for (int r = 0; r < NT; r++) {
      load_gates(gates[r], a.gates + at.row(a, s, r) * 4 * H, at, real[r]);
      if (MODE) shared.gates.expect(warp() + 8 * r);
      if (NORM_C) shared.c.expect(warp() + 8 * r);
      if (HIDDEN) shared.hidden.expect(warp() + 8 * r);
    }

    // W_h h of this block's units
    if (s) shared.arrived[1 - parity].wait((s - 1) >> 1 & 1);
    float sums[NT][4] = {};
    const unsigned *pairs = (const unsigned *)shared.h[1 - parity];
    UNROLL
    for (int k = 0; k < TILES; k++)
      UNROLL
      for (int t = 0; t < NT; t++) {
        const unsigned *own = pairs + (8 * t + lane() / 4) * (H_PITCH / 2) + 8 * k + lane() % 4;
        multiply(sums[t], weight[k], own[0], own[4]);
      }
    UNROLL
    for (int t = 0; t < NT; t++)
      UNROLL
      for (int part = 0; part < 4; part++) {
        int row = 8 * t + 2 * (lane() % 4) + (part & 1);
        shared.z[row * Z_PITCH + 16 * warp() + lane() / 4 + 8 * (part >> 1)] = sums[t][part];
      }
    sync_block();

    // The gates' norms
    float x[NT][4];
    UNROLL
    for (int r = 0; r < NT; r++) {
      const float *z = shared.z + (warp() + 8 * r) * Z_PITCH + lane();
      UNROLL
      for (int g = 0; g < 4; g++) {
        bf16 rounded = to_bf16(z[g * UNITS]);
        x[r][g] = to_float(rounded) + (MODE == 1 ? 0.0f : gates[r][g]);
        if (a.ah && real[r] && at.valid) a.ah[(at.row(a, s, r) * 4 + g) * H + at.unit] = rounded;
      }
      if (MODE == 2)
        UNROLL
        for (int g = 0; g < 4; g++) {
          const float one[1] = {x[r][g]};
          shared.gates.send(warp() + 8 * r, g % GATE_PARTS, block_stats(one, at.valid));
        }
      else if (MODE)
        shared.gates.send(warp() + 8 * r, 0, block_stats(x[r], at.valid));
    }
    float cell[NT], shown[NT], hidden[NT];
    UNROLL
    for (int r = 0; r < NT; r++) {
      if (MODE) {
        shared.gates.wait(warp() + 8 * r, s & 1);
        float2 own = {};
        UNROLL
        for (int g = 0; g < 4; g++) {
          if (g < GATE_PARTS) {
            own = row_stats(shared.gates.of_lane(warp() + 8 * r, g), PER_UNIT);
            if (a.stats && real[r] && rank == 0 && lane() == 0)
              a.stats[at.row(a, s, r) * STATS + g] = own;
          }
          x[r][g] = vectors.gain_h[g] * ((x[r][g] - own.x) * own.y);
          x[r][g] += MODE == 1 ? gates[r][g] : vectors.bias[g];
        }
      }
      float candidate = tangent(x[r][2]) * mask[r];
      cell[r] = shown[r] = at.valid ? sigmoid(x[r][1]) * c[r] + sigmoid(x[r][0]) * candidate : 0;
      if (NORM_C) {
        const float one[1] = {cell[r]};
        shared.c.send(warp() + 8 * r, 0, block_stats(one, at.valid));
      }
    }
    UNROLL
    for (int r = 0; r < NT; r++) {
      if (NORM_C) {
        shared.c.wait(warp() + 8 * r, s & 1);
        float2 own = row_stats(shared.c.of_lane(warp() + 8 * r, 0), 1);
        if (a.stats && real[r] && rank == 0 && lane() == 0)
          a.stats[at.row(a, s, r) * STATS + C_STAT] = own;
        shown[r] = vectors.gain_c * ((cell[r] - own.x) * own.y) + vectors.bias_c;
      }
      hidden[r] = at.valid ? sigmoid(x[r][3]) * tangent(SHOW ? shown[r] : cell[r]) : 0;
      if (HIDDEN) {
        const float one[1] = {hidden[r]};
        shared.hidden.send(warp() + 8 * r, 0, block_stats(one, at.valid));
      }
    }

    // The next state; an utterance that has ended keeps its own
    UNROLL
    for (int r = 0; r < NT; r++) {
      if (HIDDEN) {
        shared.hidden.wait(warp() + 8 * r, s & 1);
        float2 own = row_stats(shared.hidden.of_lane(warp() + 8 * r, 0), 1);
        if (a.stats && real[r] && rank == 0 && lane() == 0)
          a.stats[at.row(a, s, r) * STATS + H_STAT] = own;
        hidden[r] = vectors.gain_hidden * ((hidden[r] - own.x) * own.y) + vectors.bias_hidden;
      }
      if (s < length[r]) {
        h[r] = hidden[r];
        c[r] = CARRY ? shown[r] : cell[r];
      }
      if (!last) {
        shared.stage[warp() + 8 * r][lane()] = to_bf16(at.valid ? h[r] : 0);
        sync_warp();
        int quarter = lane() % 4, offset = (warp() + 8 * r) * H_PITCH + rank * UNITS + 8 * quarter;
        uint4 value = *((const uint4 *)shared.stage[warp() + 8 * r] + quarter);
        for (int to = lane() / 4; to < BLOCKS; to += 8)
          send_bytes((uint4 *)(shared.h[parity] + offset), to, value, shared.arrived[parity]);
      }
      if (real[r] && at.valid) {
        long long now = at.row(a, s, r) * H + at.unit, next = at.row(a, s + 1, r) * H + at.unit;
        a.hs[next] = h[r];
        a.cs[next] = c[r];
        if (CARRY && a.raw) a.raw[now] = cell[r];
      }
    }
  }
  sync_cluster();
}

// Backward ------------------------------------------------------------------------------------------

struct BackwardShared {
  // Each block's share of W_h^T dah, after odd and even steps
  alignas(16) float parts[2][BLOCKS][ROWS][UNITS];
  alignas(16) bf16 d[ROWS * D_PITCH];             // this block's 128 gradients of each row
  alignas(16) float tile[WARPS][ROWS * T_PITCH];
  Exchange<GATE_PARTS> gates;
  Exchange<1> c, hidden;
  Barrier arrived[2];
};

// d of y = N(x) -> that of x, with the sums over the row of d n and of d.
DEVICE float through_norm(float d, float normed, float scale, float2 sums, float n) {
  return scale * (d - (RMS ? 0.0f : sums.y / n) - normed * sums.x / n);
}

DEVICE float2 sum_of_lanes(float2 own) { return warp_sum(own.x, own.y); }

// The sum over the rows of a cluster, in a fixed order.
DEVICE void store_sum(float *scratch, float value, float *to, bool valid) {
  sync_block();
  scratch[warp() * UNITS + lane()] = value;
  sync_block();
  if (warp() == 0 && valid) {
    float total = 0;
    for (int w = 0; w < WARPS; w++) total += scratch[w * UNITS + lane()];
    *to = total;
  }
}

KERNEL void lstm_backward(Arguments a) {
  BackwardShared &shared = *(BackwardShared *)shared_memory();
  const Place at(a);
  const Vectors vectors(a, at);
  const int rank = block_rank();

  // 16 columns of W_h for each tile, times this block's 128 rows.
  unsigned weight[TILES_PER_WARP][8][4];
  UNROLL
  for (int i = 0; i < TILES_PER_WARP; i++)
    UNROLL
    for (int k = 0; k < 8; k++)
      UNROLL
      for (int part = 0; part < 4; part++) {
        int column = 16 * (warp() + WARPS * i) + lane() / 4 + 8 * (part & 1);
        bf16 pair[2];
        UNROLL
        for (int second = 0; second < 2; second++) {
          int local = 16 * k + 2 * (lane() % 4) + 8 * (part >> 1) + second;
          int unit = rank * UNITS + local % UNITS;
          pair[second] = unit < H && column < H
              ? a.weight[((long long)(at.d * 4 + local / UNITS) * H + unit) * H + column]
              : to_bf16(0);
        }
        weight[i][k][part] = pair_bits(pair[0], pair[1]);
      }

  float passing[NT], dc[NT], mask[NT];  // passing: d of an ended row's h, which no product changes
  int length[NT];
  bool real[NT];
  UNROLL
  for (int r = 0; r < NT; r++) {
    int b = at.utterance(r);
    real[r] = b < a.B;
    length[r] = real[r] ? (int)a.lengths[b] : 0;
    long long cell = at.row(a, 0, r) * H + at.unit;
    bool here = real[r] && at.valid;
    passing[r] = here ? a.dh[cell] : 0;
    dc[r] = here ? a.dc[cell] : 0;
    mask[r] = DROP && here ? a.mask[cell] : 1;
  }
  float dgain_h[4] = {}, dbias[4] = {}, dgain_c = 0, dbias_c = 0, dgain_hidden = 0, dbias_hidden = 0;
  if (thread() < 2) shared.arrived[thread()].initialise();
  shared.gates.initialise();
  shared.c.initialise();
  shared.hidden.initialise();
  sync_cluster();

  for (int n = 0; n < a.S; n++) {
    const int s = a.S - 1 - n, parity = n & 1;
    if (thread() == 0) shared.arrived[parity].expect(sizeof(shared.parts[0]));
    float x[NT][4], gates[NT][4], normed[NT][4], c_old[NT], cell[NT], upstream[NT];
    float2 stats[NT][STATS + 1];
    UNROLL
    for (int r = 0; r < NT; r++) {
      bool here = real[r] && at.valid;
      long long now = at.row(a, s, r) * H + at.unit, next = at.row(a, s + 1, r) * H + at.unit;
      load_gates(gates[r], a.gates + at.row(a, s, r) * 4 * H, at, real[r]);
      UNROLL
      for (int g = 0; g < 4; g++)
        x[r][g] = here ? to_float(a.ah[(at.row(a, s, r) * 4 + g) * H + at.unit]) : 0;
      c_old[r] = here ? a.cs[now] : 0;
      cell[r] = here ? (CARRY ? a.raw[now] : a.cs[next]) : 0;
      upstream[r] = here ? a.dhs[now] : 0;
      UNROLL
      for (int i = 0; i < STATS; i++)
        stats[r][i] = real[r] ? a.stats[at.row(a, s, r) * STATS + i] : float2{0, 0};
      if (MODE) shared.gates.expect(warp() + 8 * r);
      if (NORM_C) shared.c.expect(warp() + 8 * r);
      if (HIDDEN) shared.hidden.expect(warp() + 8 * r);
    }

    // The activations
    float normed_c[NT], bounded[NT], normed_h[NT];
    UNROLL
    for (int r = 0; r < NT; r++) {
      UNROLL
      for (int g = 0; g < 4; g++) {
        if (MODE != 1) x[r][g] += gates[r][g];
        if (MODE) {
          float2 own = stats[r][MODE == 2 ? g : 0];
          normed[r][g] = (x[r][g] - own.x) * own.y;
          x[r][g] = vectors.gain_h[g] * normed[r][g];
          x[r][g] += MODE == 1 ? gates[r][g] : vectors.bias[g];
        }
        x[r][g] = g == 2 ? tangent(x[r][g]) : sigmoid(x[r][g]);
      }
      float shown = cell[r];
      if (NORM_C) {
        normed_c[r] = (cell[r] - stats[r][C_STAT].x) * stats[r][C_STAT].y;
        if (SHOW) shown = vectors.gain_c * normed_c[r] + vectors.bias_c;
      }
      bounded[r] = tangent(shown);
      if (HIDDEN)
        normed_h[r] = (x[r][3] * bounded[r] - stats[r][H_STAT].x) * stats[r][H_STAT].y;
    }

    // The gradient of h
    float d[NT];
    if (n) shared.arrived[1 - parity].wait((n - 1) >> 1 & 1);
    UNROLL
    for (int r = 0; r < NT; r++) {
      float total = passing[r];
      if (n)
        UNROLL
        for (int k = 0; k < BLOCKS; k++) total += shared.parts[1 - parity][k][warp() + 8 * r][lane()];
      const bool runs = s < length[r];
      d[r] = runs && at.valid ? total + upstream[r] : 0;
      passing[r] = runs ? 0 : total;
      if (HIDDEN) {
        dgain_hidden += d[r] * normed_h[r];
        dbias_hidden += d[r];
        d[r] *= vectors.gain_hidden;
        shared.hidden.send(warp() + 8 * r, 0, warp_sum(d[r] * normed_h[r], d[r]));
      }
    }

    // That of c
    float around[NT], through[NT];  // through the norm of c, and not
    UNROLL
    for (int r = 0; r < NT; r++) {
      if (HIDDEN) {
        shared.hidden.wait(warp() + 8 * r, n & 1);
        float2 sums = sum_of_lanes(shared.hidden.of_lane(warp() + 8 * r, 0));
        d[r] = at.valid ? through_norm(d[r], normed_h[r], stats[r][H_STAT].y, sums, H) : 0;
      }
      float dshown = d[r] * x[r][3] * (1 - bounded[r] * bounded[r]);
      float live = s < length[r] && at.valid ? dc[r] : 0;
      through[r] = (SHOW ? dshown : 0) + (CARRY ? live : 0);
      around[r] = (SHOW ? 0 : dshown) + (CARRY ? 0 : live);
      if (NORM_C) {
        dgain_c += through[r] * normed_c[r];
        dbias_c += through[r];
        through[r] *= vectors.gain_c;
        shared.c.send(warp() + 8 * r, 0, warp_sum(through[r] * normed_c[r], through[r]));
      }
    }

    // That of the gates
    float dgates[NT][4];
    UNROLL
    for (int r = 0; r < NT; r++) {
      float dcell = around[r];
      if (NORM_C) {
        shared.c.wait(warp() + 8 * r, n & 1);
        float2 sums = sum_of_lanes(shared.c.of_lane(warp() + 8 * r, 0));
        dcell += at.valid ? through_norm(through[r], normed_c[r], stats[r][C_STAT].y, sums, H) : 0;
      }
      const float i = x[r][0], f = x[r][1], g = x[r][2], o = x[r][3];
      dgates[r][0] = dcell * g * mask[r] * i * (1 - i);
      dgates[r][1] = dcell * c_old[r] * f * (1 - f);
      dgates[r][2] = dcell * i * mask[r] * (1 - g * g);
      dgates[r][3] = d[r] * bounded[r] * o * (1 - o);
      if (s < length[r]) dc[r] = dcell * f;
      float slope = 0, total = 0;
      UNROLL
      for (int k = 0; k < 4; k++) {
        if (MODE < 2 && real[r] && at.valid)
          a.dz[(at.row(a, s, r) * 4 + k) * H + at.unit] = dgates[r][k];
        if (MODE) {
          dgain_h[k] += dgates[r][k] * normed[r][k];
          dbias[k] += dgates[r][k];
          dgates[r][k] *= vectors.gain_h[k];
          slope += dgates[r][k] * normed[r][k];
          total += dgates[r][k];
        }
        if (MODE == 2) {
          shared.gates.send(warp() + 8 * r, k % GATE_PARTS, warp_sum(slope, total));
          slope = total = 0;
        }
      }
      if (MODE && MODE != 2) shared.gates.send(warp() + 8 * r, 0, warp_sum(slope, total));
    }
    UNROLL
    for (int r = 0; r < NT; r++) {
      float2 sums = {};
      if (MODE) shared.gates.wait(warp() + 8 * r, n & 1);
      UNROLL
      for (int k = 0; k < 4; k++) {
        if (MODE) {
          if (k < GATE_PARTS) sums = sum_of_lanes(shared.gates.of_lane(warp() + 8 * r, k));
          float scale = stats[r][MODE == 2 ? k : 0].y;
          dgates[r][k] = through_norm(dgates[r][k], normed[r][k], scale, sums, PER_UNIT * H);
        }
        bf16 rounded = to_bf16(at.valid ? dgates[r][k] : 0);
        shared.d[(warp() + 8 * r) * D_PITCH + k * UNITS + lane()] = rounded;
        if (real[r] && at.valid) a.dah[(at.row(a, s, r) * 4 + k) * H + at.unit] = rounded;
      }
    }
    sync_block();

    // W_h^T dah: this block's share of all units, sent to the blocks of the units
    const unsigned *pairs = (const unsigned *)shared.d;
    UNROLL
    for (int i = 0; i < TILES_PER_WARP; i++) {
      const int tile = warp() + WARPS * i;
      if (tile < TILES) {
        float sums[NT][4] = {};
        UNROLL
        for (int k = 0; k < 8; k++)
          UNROLL
          for (int t = 0; t < NT; t++) {
            const unsigned *own = pairs + (8 * t + lane() / 4) * (D_PITCH / 2) + 8 * k + lane() % 4;
            multiply(sums[t], weight[i][k], own[0], own[4]);
          }
        float *stage = shared.tile[warp()];
        sync_warp();
        UNROLL
        for (int t = 0; t < NT; t++)
          UNROLL
          for (int part = 0; part < 4; part++) {
            int row = 8 * t + 2 * (lane() % 4) + (part & 1);
            stage[row * T_PITCH + lane() / 4 + 8 * (part >> 1)] = sums[t][part];
          }
        sync_warp();
        UNROLL
        for (int t = 0; t < NT; t++) {
          int row = 8 * t + lane() / 4, quarter = lane() % 4;
          uint4 value = *(const uint4 *)(stage + row * T_PITCH + 4 * quarter);
          float *to = &shared.parts[parity][rank][row][16 * (tile % 2) + 4 * quarter];
          send_bytes((uint4 *)to, tile / 2, value, shared.arrived[parity]);
        }
      }
    }
  }

  shared.arrived[(a.S - 1) & 1].wait((a.S - 1) >> 1 & 1);
  UNROLL
  for (int r = 0; r < NT; r++) {
    float total = passing[r];
    UNROLL
    for (int k = 0; k < BLOCKS; k++) total += shared.parts[(a.S - 1) & 1][k][warp() + 8 * r][lane()];
    if (real[r] && at.valid) {
      a.dh[at.row(a, 0, r) * H + at.unit] = total;
      a.dc[at.row(a, 0, r) * H + at.unit] = dc[r];
    }
  }
  float *scratch = shared.tile[0];
  static_assert(sizeof(shared.tile) >= WARPS * UNITS * sizeof(float), "room for one value a thread");
  UNROLL
  for (int g = 0; g < 4; g++) {
    long long first = (long long)at.group * 2 * a.D + at.d;
    if (MODE) {
      store_sum(scratch, dgain_h[g], a.dgates + (first * 4 + g) * H + at.unit, at.valid);
      store_sum(scratch, dbias[g], a.dgates + ((first + a.D) * 4 + g) * H + at.unit, at.valid);
    }
  }
  const float states[4] = {dgain_c, dbias_c, dgain_hidden, dbias_hidden};
  UNROLL
  for (int i = 0; i < 4; i++) {
    float *to = a.dstates + (((long long)at.group * 4 + i) * a.D + at.d) * H + at.unit;
    if (i < 2 ? NORM_C : HIDDEN) store_sum(scratch, states[i], to, at.valid);
  }
  sync_cluster();
}

CONSTANT int forward_bytes = sizeof(ForwardShared);
CONSTANT int backward_bytes = sizeof(BackwardShared);
