// Runs the threads of a dispatch as fibers: 32 lanes a simdgroup, meetings, barriers, and an order chosen to break what
// lacks a barrier.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <xmmintrin.h>

#include "memory.h"

namespace emulator {

Dispatch* current;

extern "C" {
Lane* emulator_lane;
Position emulator_position;
}

namespace {

constexpr uint64_t STACK_BYTES = 128 << 10, GUARD_BYTES = 4096;
constexpr unsigned FLUSH = 0x8040;  // of the MXCSR: results and operands that are subnormal
constexpr int ORDERS = 64;          // permutations of the lanes, drawn once for each seed
constexpr const char* NAMES[KINDS] = {"nothing",
                                      "threadgroup_barrier",
                                      "simdgroup_barrier",
                                      "simd_shuffle_xor",
                                      "simd_broadcast",
                                      "simd_sum",
                                      "simd_max",
                                      "simd_min",
                                      "simd_any",
                                      "simd_all",
                                      "simdgroup_multiply",
                                      "simdgroup_multiply_accumulate"};

Lane lanes[MAX_THREADS];
Simdgroup simdgroups[MAX_THREADS / LANES];
int simdgroup_count, finished_simdgroups, waiting_simdgroups;
uint8_t orders[ORDERS][LANES];
void* scheduler_stack;
char* stacks;
void** bound;  // the kernel's arguments
uint64_t state;
sigjmp_buf base;
int failure;

// Saves the callee's registers and the stack pointer, and goes on with another stack.
__attribute__((naked)) void switch_stack(void** /*save*/, void* /*to*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
      "ret\n");
}

void go_to(Lane* lane) {
  Lane* before = emulator_lane;
  emulator_lane = lane;
  switch_stack(&before->stack_pointer, lane->stack_pointer);
}

void back_to_scheduler() { switch_stack(&emulator_lane->stack_pointer, scheduler_stack); }

Lane* lane_at(Simdgroup* group, int place_in_order) {
  return &lanes[group->index * LANES + group->order[place_in_order]];
}

void new_order(Simdgroup* group) {
  group->order = orders[random_bits() % ORDERS];
  group->next = 1;
}

void finish_lane() {
  Simdgroup* group = emulator_lane->simdgroup;
  if (group->arrived)
    fail(DIVERGENCE, "%s has finished, while other lanes of its simdgroup wait at %s in line %d", place(),
         NAMES[group->kind], group->line);
  if (++group->finished == LANES) {
    ++finished_simdgroups;
    back_to_scheduler();
  }
  go_to(lane_at(group, group->next++));
}

void run_lane() {
  const uint32_t thread = emulator_lane->thread;
  const Position size = current->threads;
  const Ids ids = {emulator_position,
                   thread / LANES,
                   thread % LANES,
                   thread,
                   {thread % size.x, thread / size.x % size.y, thread / (size.x * size.y)},
                   size,
                   current->groups};
  current->kernel(bound, &ids);
  finish_lane();
  __builtin_unreachable();
}

void make_stacks(int count) {
  static int made = 0;
  if (!stacks) {
    void* memory = mmap(nullptr, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks = static_cast<char*>(memory);
  }
  for (; made < count; ++made) mprotect(stacks + made * STACK_BYTES, GUARD_BYTES, PROT_NONE);
}

void begin_lane(int thread) {
  // Stacks that begin at different places of a page do not fight for the same lines of the cache.
  char* top = stacks + (thread + 1) * STACK_BYTES - (thread * 832 & 4032) - 64;
  void** frame = reinterpret_cast<void**>(top);
  *--frame = nullptr;  // where run_lane would return to, which it does not
  *--frame = reinterpret_cast<void*>(&run_lane);
  frame -= 6;
  lanes[thread] = {frame, &simdgroups[thread / LANES], uint32_t(thread % LANES), uint32_t(thread)};
}

void begin_threadgroup(int threads) {
  simdgroup_count = threads / LANES;
  finished_simdgroups = waiting_simdgroups = 0;
  for (int i = 0; i < simdgroup_count; ++i) {
    Simdgroup& group = simdgroups[i];
    group.parity = group.kind = group.line = group.flags = group.arrived = group.finished = 0;
    group.waits = false;
    group.index = uint32_t(i);
    group.fences = group.device_fences = 1;
    new_order(&group);
  }
  for (int i = 0; i < threads; ++i) begin_lane(i);
  clear_threadgroup_memory();
  begin_group();
}

void release(Simdgroup* group) {
  group->arrived = 0;
  group->parity ^= 1;
  if (group->flags & 2) ++group->fences;
  if (group->flags & 1) ++group->device_fences;
  new_order(group);
}

void release_threadgroup_barrier() {
  const Simdgroup& first = simdgroups[0];
  int line = 0;
  for (int i = 0; i < simdgroup_count; ++i)
    if (simdgroups[i].waits) line = simdgroups[i].line;
  for (int i = 0; i < simdgroup_count; ++i) {
    Simdgroup& group = simdgroups[i];
    if (group.finished)
      fail(DIVERGENCE, "%s: simdgroup %d has finished, while others wait at threadgroup_barrier in line %d", place(), i,
           line);
    if (group.line != first.line || group.flags != first.flags)
      fail(DIVERGENCE, "%s: simdgroup 0 waits at threadgroup_barrier in line %d, simdgroup %d at the one in line %d",
           place(), first.line, i, group.line);
  }
  waiting_simdgroups = 0;
  threadgroup_fences[0] += first.flags >> 1 & 1;
  threadgroup_fences[1] += first.flags & 1;
  for (int i = 0; i < simdgroup_count; ++i) {
    simdgroups[i].waits = false;
    release(&simdgroups[i]);
  }
}

// A simdgroup that can run, by chance.
Simdgroup* choose() {
  const int able = simdgroup_count - finished_simdgroups - waiting_simdgroups;
  int chosen = int(random_bits() % uint64_t(able));
  for (int i = 0;; ++i)
    if (!simdgroups[i].waits && simdgroups[i].finished < LANES && chosen-- == 0) return &simdgroups[i];
}

void run_threadgroup(int threads) {
  begin_threadgroup(threads);
  while (finished_simdgroups < simdgroup_count) {
    if (finished_simdgroups + waiting_simdgroups == simdgroup_count) release_threadgroup_barrier();
    Simdgroup* group = choose();
    emulator_lane = lane_at(group, 0);
    switch_stack(&scheduler_stack, emulator_lane->stack_pointer);
  }
  check_threadgroup_memory();
}

void draw_orders() {
  for (int i = 0; i < ORDERS; ++i) {
    for (int lane = 0; lane < LANES; ++lane) orders[i][lane] = uint8_t(i % 2 ? LANES - 1 - lane : lane);
    if (i % 4 < 2) continue;  // a half of them runs in one direction, where neighbours wait for each other
    for (int lane = LANES - 1; lane > 0; --lane) {
      const int other = int(random_bits() % uint64_t(lane + 1));
      const uint8_t swapped = orders[i][lane];
      orders[i][lane] = orders[i][other];
      orders[i][other] = swapped;
    }
  }
}

void run_grid() {
  const Position groups = current->groups;
  const int threads = int(current->threads.x * current->threads.y * current->threads.z);
  make_stacks(threads);
  draw_orders();
  const uint64_t count = uint64_t(groups.x) * groups.y * groups.z;
  // A step that has no divisor in common with the count visits all threadgroups, in another order for each seed.
  uint64_t step = 1, start = 0;
  if (current->seed) {
    start = random_bits() % count;
    for (step = 1 + random_bits() % count;; ++step) {
      uint64_t a = step, b = count;
      while (b) {
        const uint64_t rest = a % b;
        a = b;
        b = rest;
      }
      if (a == 1) break;
    }
  }
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t number = (start + i * step) % count;
    emulator_position = {uint32_t(number % groups.x), uint32_t(number / groups.x % groups.y),
                         uint32_t(number / (uint64_t(groups.x) * groups.y))};
    run_threadgroup(threads);
  }
}

}  // namespace

uint64_t random_bits() {  // splitmix64
  uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

const char* place() {
  static char text[256];
  snprintf(text, sizeof text, "%s: threadgroup (%u, %u, %u), thread %u (simdgroup %u, lane %u)", current->name,
           emulator_position.x, emulator_position.y, emulator_position.z, emulator_lane->thread,
           emulator_lane->simdgroup->index, emulator_lane->lane);
  return text;
}

void fail(Failure what, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(current->message, sizeof current->message, format, arguments);
  va_end(arguments);
  failure = what;
  siglongjmp(base, 1);
}

extern "C" {

bool emulator_arrive(int kind, int line, int flags) {
  Simdgroup* group = emulator_lane->simdgroup;
  if (group->finished)
    fail(DIVERGENCE, "%s comes to %s in line %d, but %d lanes of its simdgroup have finished", place(), NAMES[kind],
         line, group->finished);
  if (!group->arrived) {
    group->kind = kind;
    group->line = line;
    group->flags = flags;
  } else if (group->kind != kind || group->line != line || group->flags != flags) {
    fail(DIVERGENCE, "%s comes to %s in line %d, but other lanes of its simdgroup wait at %s in line %d", place(),
         NAMES[kind], line, NAMES[group->kind], group->line);
  }
  if (++group->arrived < LANES) {
    go_to(lane_at(group, group->next++));
    return false;
  }
  if (kind != THREADGROUP_BARRIER) return true;
  group->waits = true;
  ++waiting_simdgroups;
  back_to_scheduler();
  return false;
}

void emulator_release() {
  Simdgroup* group = emulator_lane->simdgroup;
  release(group);
  Lane* next = lane_at(group, 0);
  if (current->random)
    back_to_scheduler();
  else if (next != emulator_lane)
    go_to(next);
}

void emulator_fail(const char* reason, int line) { fail(DIVERGENCE, "%s: %s in line %d", place(), reason, line); }

}  // extern "C"

int run_guarded(void** pointers) {
  bound = pointers;
  state = current->seed * 0x2545f4914f6cdd1dull + 1;
  failure = NONE;
  const unsigned control = _mm_getcsr();
  if (current->flush) _mm_setcsr(control | FLUSH);
  if (sigsetjmp(base, 1) == 0) {
    run_grid();
    check_buffers();
  }
  _mm_setcsr(control);
  return failure;
}

}  // namespace emulator
