// Spending a budget on widths. Twin of kvrt/trizone/allocator.py, whose text says what is chosen: equal results.
//
// A step of a hull has a key; keys ascend in the order in which steps are taken, and no two of a group are equal. The
// cut, the least key of a step that the budget does not hold, is found digit by digit, without sorting: for each value
// of a digit the steps that agree with the cut so far are weighed, by bytes. These are whole numbers, so that it does
// not matter in which order they are added.
//
// distortion (widths, groups, n) f32; terms (groups,); threads are THREADS. Many units: `weigh_steps` for each digit,
// `choose_widths`, `fill_rest`. Few: `allocate_few`, which does the same with a block a group.
#include "steps.cuh"

static constexpr int THREADS = 256, WARPS = THREADS / WARP;
static constexpr int DIGIT_BITS = 12, DIGITS = 1 << DIGIT_BITS, EACH = DIGITS / THREADS;
static constexpr int CHUNK = 1024;                // units whose best further steps are known
static constexpr i64 ALL = (i64(1) << 62) - 1;    // a cut above all keys

// The units of a group.
struct Group {
  const float* distortion;
  i64 n, stride;
  int widths, low;

  KVRT_INLINE Group(const float* distortion, int widths, i64 n, int low, i64 group, i64 groups)
      : distortion(distortion + group * n), n(n), stride(groups * n), widths(widths), low(low) {}
  KVRT_INLINE Unit unit(i64 number) const { return Unit(distortion + number, widths, stride); }
};

// Add to sums (DIGITS,) the bytes of the steps that agree with the cut above a digit, `shift` bits from the lowest.
KVRT_INLINE void weigh(const Group& group, const Prices& prices, i64 first, i64 end, i64 cut, int shift, u64* sums) {
  const int above = shift + DIGIT_BITS;
  for (i64 number = first + threadIdx.x; number < end; number += THREADS)
    group.unit(number).walk(prices, [&](int from, int to, float slope) {
      const i64 key = step_key(slope, number, from, group.low);
      if (key >> above == cut >> above)
        atomicAdd(sums + (key >> shift & (DIGITS - 1)), u64(prices.rises[pair_of(from, to)]));
    });
}

// Set a digit of the cut to the first with which the budget is overspent, and add what those before it take. Leaves
// zeros in sums (DIGITS,). By all threads, of which each has EACH of them.
KVRT_INLINE void find_digit(Terms& own, int shift, volatile u64* sums, i64* totals) {
  const int thread = threadIdx.x;
  const i64 budget = own.budget, cut = own.cut;
  i64 spent = own.spent, sum = 0;
  sums += thread * EACH;
#pragma unroll
  for (int i = 0; i < EACH; ++i) sum += i64(sums[i]);
  totals[thread] = sum;
  __syncthreads();
  for (int by = 1; by < THREADS; by *= 2) {
    const i64 before = thread >= by ? totals[thread - by] : 0;
    __syncthreads();
    totals[thread] += before;
    __syncthreads();
  }
  spent += totals[thread] - sum;
  // With a budget below 0 the cut stays 0, below all keys.
  if (spent <= budget && spent + sum > budget) {
    int digit = 0;
    while (spent + i64(sums[digit]) <= budget) spent += i64(sums[digit++]);
    own.cut = cut | i64(thread * EACH + digit) << shift;
    own.spent = spent;
  } else if (thread == THREADS - 1 && spent + sum <= budget) {
    own.cut = ALL;
    own.spent = spent + sum;
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) sums[i] = 0;
}

// Put into best (PAIRS,) the steps of a unit that is at a width.
KVRT_INLINE void add_candidates(const Unit& unit, const Prices& prices, int at, i64 number, u64* best) {
#pragma unroll
  for (int from = 0; from < MOST_WIDTHS - 1; ++from) {
    if (from != at) continue;
#pragma unroll
    for (int to = from + 1; to < MOST_WIDTHS; ++to) {
      const int pair = pair_of(from, to);
      best[pair] = max(best[pair], candidate(unit.slope(from, to, prices), number, pair));
    }
  }
}

KVRT_INLINE u64 warp_max(u64 x) {
  for (int by = WARP / 2; by; by >>= 1) {
    const u32 high = __shfl_xor_sync(ALL_LANES, u32(x >> 32), by), low = __shfl_xor_sync(ALL_LANES, u32(x), by);
    x = max(x, u64(high) << 32 | low);
  }
  return x;
}

// out (PAIRS,) = the largest of all threads' numbers.
KVRT_INLINE void write_best(const u64* best, u64 (*scratch)[PAIRS], u64* out) {
  __syncthreads();  // an earlier one has been read
#pragma unroll
  for (int pair = 0; pair < PAIRS; ++pair) {
    const u64 most = warp_max(best[pair]);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP][pair] = most;
  }
  __syncthreads();
  if (threadIdx.x < PAIRS) {
    u64 most = 0;
    for (int warp = 0; warp < WARPS; ++warp) most = max(most, scratch[warp][threadIdx.x]);
    out[threadIdx.x] = most;
  }
}

// chosen (n,) of a chunk = widths with the steps below the cut; best (chunks, PAIRS) = the best further steps.
KVRT_INLINE void choose(const Group& group, const Prices& prices, i64 chunk, i64 cut, u64 (*scratch)[PAIRS],
                        u8* chosen, u64* best) {
  u64 mine[PAIRS] = {};
  const i64 first = chunk * CHUNK, end = min(first + CHUNK, group.n);
  for (i64 number = first + threadIdx.x; number < end; number += THREADS) {
    const Unit unit = group.unit(number);
    int at = 0;
    unit.walk(prices, [&](int from, int to, float slope) {
      if (step_key(slope, number, from, group.low) < cut) at = to;
    });
    chosen[number] = u8(at);
    add_candidates(unit, prices, at, number, mine);
  }
  write_best(mine, scratch, best + chunk * PAIRS);
}

// Take the best step that the rest of the budget holds, while there is one.
KVRT_INLINE void fill(const Group& group, const Prices& prices, Terms& own, u64 (*scratch)[PAIRS], u8* chosen,
                      u64* best) {
  __shared__ u64 tops[WARPS];
  const i64 chunks = (group.n + CHUNK - 1) / CHUNK, budget = own.budget;
  i64 spent = own.spent;
  while (true) {
    u32 holds = 0;
    for (int pair = 0; pair < PAIRS; ++pair) holds |= u32(prices.rises[pair] <= budget - spent) << pair;
    u64 top = 0;
    if (holds)
      for (i64 i = threadIdx.x; i < chunks * PAIRS; i += THREADS)
        if (holds >> i % PAIRS & 1) top = max(top, best[i]);
    top = warp_max(top);
    if (threadIdx.x % WARP == 0) tops[threadIdx.x / WARP] = top;
    __syncthreads();
    for (int warp = 0; warp < WARPS; ++warp) top = max(top, tops[warp]);
    if (top == 0) break;

    const i64 taken = candidate_unit(top), chunk = taken / CHUNK, end = min((chunk + 1) * CHUNK, group.n);
    const int pair = candidate_pair(top);
    spent += prices.rises[pair];
    if (threadIdx.x == 0) chosen[taken] = prices.to[pair];
    __syncthreads();
    u64 mine[PAIRS] = {};
    for (i64 number = chunk * CHUNK + threadIdx.x; number < end; number += THREADS)
      add_candidates(group.unit(number), prices, chosen[number], number, mine);
    write_best(mine, scratch, best + chunk * PAIRS);
    __syncthreads();
  }
  if (threadIdx.x == 0) own.spent = spent;
}

// Find one digit of the cut. weights (groups, DIGITS) and arrivals (groups,) are zeros before and after. Grid (any,
// groups); a block has `each` units.
extern "C" __global__ void __launch_bounds__(256)
weigh_steps(const float* distortion, int widths, i64 n, i64 each, int low, int shift, i64* terms, u64* weights,
            int* arrivals) {
  __shared__ Prices prices;
  __shared__ u64 sums[DIGITS];
  __shared__ i64 totals[THREADS];
  __shared__ bool last;
  const Group group(distortion, widths, n, low, blockIdx.y, gridDim.y);
  Terms& own = reinterpret_cast<Terms*>(terms)[blockIdx.y];
  weights += blockIdx.y * DIGITS;
  prices.read(own);
  for (int i = threadIdx.x; i < DIGITS; i += THREADS) sums[i] = 0;
  __syncthreads();
  const i64 first = blockIdx.x * each;
  weigh(group, prices, first, min(first + each, n), own.cut, shift, sums);
  __syncthreads();
  for (int i = threadIdx.x; i < DIGITS; i += THREADS)
    if (sums[i]) atomicAdd(weights + i, sums[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrivals + blockIdx.y, 1) == int(gridDim.x) - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();  // the sums of all blocks are there
  find_digit(own, shift, weights, totals);
  if (threadIdx.x == 0) arrivals[blockIdx.y] = 0;
}

// chosen (groups, n), best (groups, chunks, PAIRS). Grid (chunks, groups).
extern "C" __global__ void __launch_bounds__(256)
choose_widths(const float* distortion, int widths, i64 n, int low, const i64* terms, u8* chosen, u64* best) {
  __shared__ Prices prices;
  __shared__ u64 scratch[WARPS][PAIRS];
  const Group group(distortion, widths, n, low, blockIdx.y, gridDim.y);
  const Terms& own = reinterpret_cast<const Terms*>(terms)[blockIdx.y];
  prices.read(own);
  __syncthreads();
  choose(group, prices, blockIdx.x, own.cut, scratch, chosen + blockIdx.y * n,
         best + i64(blockIdx.y) * gridDim.x * PAIRS);
}

// Grid (groups).
extern "C" __global__ void __launch_bounds__(256)
fill_rest(const float* distortion, int widths, i64 n, int low, i64* terms, u8* chosen, u64* best) {
  __shared__ Prices prices;
  __shared__ u64 scratch[WARPS][PAIRS];
  const Group group(distortion, widths, n, low, blockIdx.x, gridDim.x);
  Terms& own = reinterpret_cast<Terms*>(terms)[blockIdx.x];
  prices.read(own);
  __syncthreads();
  fill(group, prices, own, scratch, chosen + blockIdx.x * n, best + blockIdx.x * ((n + CHUNK - 1) / CHUNK) * PAIRS);
}

// All of it. `shift` is that of the highest digit. Grid (groups).
extern "C" __global__ void __launch_bounds__(256)
allocate_few(const float* distortion, int widths, i64 n, int low, int shift, i64* terms, u8* chosen, u64* best) {
  __shared__ Prices prices;
  __shared__ u64 sums[DIGITS];
  __shared__ i64 totals[THREADS];
  __shared__ u64 scratch[WARPS][PAIRS];
  const Group group(distortion, widths, n, low, blockIdx.x, gridDim.x);
  const i64 chunks = (n + CHUNK - 1) / CHUNK;
  Terms& own = reinterpret_cast<Terms*>(terms)[blockIdx.x];
  chosen += blockIdx.x * n;
  best += blockIdx.x * chunks * PAIRS;
  prices.read(own);
  for (int i = threadIdx.x; i < DIGITS; i += THREADS) sums[i] = 0;
  for (; shift >= 0; shift -= DIGIT_BITS) {
    __syncthreads();
    weigh(group, prices, 0, n, own.cut, shift, sums);
    __syncthreads();
    find_digit(own, shift, sums, totals);
  }
  __syncthreads();
  for (i64 chunk = 0; chunk < chunks; ++chunk) choose(group, prices, chunk, own.cut, scratch, chosen, best);
  __syncthreads();
  fill(group, prices, own, scratch, chosen, best);
}
